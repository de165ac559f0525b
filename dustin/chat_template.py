"""Chat templates: jinja2 in a sandbox, with the environment that model publishers write for."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from dustin.errors import UsageError


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # jinja2's own filter escapes HTML characters, which templates do not want.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


@lru_cache(maxsize=8)
def _compile(template: str) -> Any:
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.datetime.now().strftime(form)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return environment.from_string(template)


def render(
    template: str, messages: Sequence[Mapping[str, Any]], special_tokens: Mapping[str, str], add_generation_prompt: bool
) -> str:
    """The text of a conversation. Raise UsageError with the template's own words when it refuses the messages."""
    import jinja2

    try:
        return _compile(template).render(
            messages=[dict(message) for message in messages], add_generation_prompt=add_generation_prompt, **special_tokens
        )
    except (jinja2.TemplateError, TypeError) as error:
        raise UsageError(f"the model's chat template cannot render these messages: {error}") from error
