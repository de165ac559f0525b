"""Help for people: options in sections, commands in the order one meets them."""

from __future__ import annotations

import click

from dustin.cli_options import ENGINE, LOADING, REQUEST, SAMPLING

# One line each, for the list of commands.
SUMMARIES = {
    "generate": "Answer one prompt, with files before it.",
    "chat": "Talk with a model on a terminal or in a pipe.",
    "serve": "Serve a model to OpenAI clients.",
    "bench": "Measure the modes side by side on this machine.",
    "calibrate": "Find a pair's scoring heads, once.",
    "trace": "Answer one prompt and draw which tokens each round read.",
    "doctor": "Tell what works here, and why the rest does not.",
    "models": "List, fetch and verify known models.",
    "config": "Show every option and where its value comes from.",
    "completion": "Print the shell's completion script.",
}
_MODEL = (*LOADING, "cuda_graphs", "tensor_parallel", "prompt_cache_file")
_SECTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Model", _MODEL),
    ("Answer", tuple(REQUEST)),
    ("Sampling", tuple(SAMPLING)),
    ("Speculation and sparse attention", tuple(ENGINE)),
)


class Sectioned(click.Command):
    """A command whose --help shows its own options first and the common ones in sections."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections that this command has options of."""
        place = {name: title for title, names in _SECTIONS for name in names}
        rows: dict[str, list[tuple[str, str]]] = {title: [] for title in ("Options", *(title for title, _ in _SECTIONS))}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                rows[place.get(str(param.name), "Options")].append(record)
        # One column for all sections: the eye goes down once.
        for title, records in rows.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class Ordered(click.Group):
    """A group that lists its commands as they were added, with the summaries above."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in order of registration."""
        return list(self.commands)

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        """Add a command under its summary."""
        cmd.short_help = SUMMARIES.get(name or str(cmd.name), cmd.short_help)
        super().add_command(cmd, name)
