"""Answers from language models over long documents: speculative decoding that verifies on the few hundred KV rows that matter.

Load a model once, then ask it as often as you like::

    import dustin

    session = dustin.load("SmolLM2-135M-Instruct")  # a known name, a hub id, a folder or a .gguf file
    result = session.generate("The sea is", dustin.RequestOptions(max_tokens=20))
    print(result.text, result.finish_reason, result.stats.generation_tps)

    # Chat messages go through the model's template; text streams as it is made.
    messages = [{"role": "user", "content": "Name a river."}]
    for response in session.stream_generate(messages, dustin.RequestOptions(max_tokens=20)):
        print(response.text, end="", flush=True)

    # Several prompts at once, each with its own request.
    requests = [dustin.RequestOptions(max_tokens=5), dustin.RequestOptions(max_tokens=9, stop=("\\n",))]
    for result in session.batch_generate(["One", "Two"], requests):
        print(result.text)

`dustin.load(model, draft_model, options=dustin.EngineOptions(mode=..., budget=...))` sets how tokens are verified: the
modes `ar` (plain decoding), `dense`, `exact` and `auto` (the default) change no output, `sparse` and `rectified` read only
`budget` tokens of the context and are approximate. `dustin.SamplingOptions(temperature=..., seed=...)` in a request samples;
the default is greedy. `session.prefix_cache = True` keeps the KV of a conversation between calls.

In asyncio code await `session.agenerate(...)`, or iterate over `session.astream_generate(...)`::

    import asyncio

    async def ask(question):
        async for response in session.astream_generate(question, dustin.RequestOptions(max_tokens=8)):
            print(response.text, end="")

    asyncio.run(ask("One, two,"))

Every failure is a `dustin.DustinError` whose message names the value, what was expected and what to do. The same engine
stands behind the command line (`dustin --help`) and the OpenAI-compatible server (`dustin serve`).

Importing this module imports no torch, mlx or triton: a backend is imported when a model is loaded. The method is that of
arXiv 2606.24957; docs/method.md tells it to newcomers.
"""

from __future__ import annotations

from pathlib import Path as _Path
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# In a checkout the sibling folders backends/, triton_kernels/ and metal_kernels/ are dustin.backends and so on.
_root = _Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and (_root / "triton_kernels").is_dir():
    __path__.append(str(_root))

if TYPE_CHECKING:
    from dustin.config import EngineOptions, RequestOptions, SamplingOptions
    from dustin.errors import (
        ContextLengthError,
        DustinError,
        MemoryLimitError,
        ModelError,
        NumericsError,
        TokenizerMismatch,
        UsageError,
    )
    from dustin.generation import Session, generate, load
    from dustin.interfaces import TokenLogprobs
    from dustin.responses import GenerationResponse, GenerationResult
    from dustin.selection import add_selector
    from dustin.stats import Stats

_EXPORTS = {
    "add_selector": "dustin.selection",
    "load": "dustin.generation",
    "generate": "dustin.generation",
    "Session": "dustin.generation",
    "GenerationResponse": "dustin.responses",
    "GenerationResult": "dustin.responses",
    "Stats": "dustin.stats",
    "TokenLogprobs": "dustin.interfaces",
    "EngineOptions": "dustin.config",
    "RequestOptions": "dustin.config",
    "SamplingOptions": "dustin.config",
    "DustinError": "dustin.errors",
    "UsageError": "dustin.errors",
    "ModelError": "dustin.errors",
    "TokenizerMismatch": "dustin.errors",
    "ContextLengthError": "dustin.errors",
    "MemoryLimitError": "dustin.errors",
    "NumericsError": "dustin.errors",
}
__all__ = [
    "ContextLengthError",
    "DustinError",
    "EngineOptions",
    "GenerationResponse",
    "GenerationResult",
    "MemoryLimitError",
    "ModelError",
    "NumericsError",
    "RequestOptions",
    "SamplingOptions",
    "Session",
    "Stats",
    "TokenLogprobs",
    "TokenizerMismatch",
    "UsageError",
    "add_selector",
    "generate",
    "load",
]


def __getattr__(name: str) -> object:
    import importlib

    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'dustin' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
