"""A trace as one HTML file that needs nothing else (trace_page.html), or as a picture (matplotlib, where it is installed)."""

from __future__ import annotations

import html
import json
from importlib import resources
from pathlib import Path
from typing import Any

from dustin.errors import UsageError
from dustin.trace import SOURCES, Trace

_COLOURS = {"sink": "#8454c9", "recent": "#189b6c", "draft": "#2c6fdb", "target": "#e0602a"}
_LABELS = {"sink": "first tokens", "recent": "recent tokens", "draft": "chosen by the draft", "target": "chosen by the target"}


def render(trace: Trace) -> str:
    """The page. Text of the document reaches it as JSON data alone, in which no character can end the script element."""
    page = resources.files("dustin").joinpath("trace_page.html").read_text(encoding="utf-8")
    data = json.dumps(trace.as_dict(), ensure_ascii=False, separators=(",", ":"))
    # JSON strings may hold these escapes; "<" is what ends a script element or begins a comment, the others break lines.
    for char in "<>&\u2028\u2029":
        data = data.replace(char, f"\\u{ord(char):04x}")
    head, tail = page.replace("__TITLE__", html.escape(f"{trace.info['model']}: what each round read")).split("__DATA__")
    return head + data + tail


def draw(trace: Trace, path: Path) -> None:
    """A PNG of the map, acceptance and recovery. Raise UsageError where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise UsageError("--png needs matplotlib, which is not installed: pip install matplotlib, or leave --png out") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    measured = [(k, r) for k, r in enumerate(trace.rounds) if r.recovery is not None]
    figure, axes = pyplot.subplots(3, 1, figsize=(13, 10), height_ratios=[5, 1.4, 2.2], layout="constrained")
    _draw_map(axes[0], trace)
    drafting = [(k, r) for k, r in enumerate(trace.rounds) if r.drafted]
    at = [k + 1 for k, _ in drafting]
    axes[1].bar(at, [r.drafted for _, r in drafting], color="#d7dae0", label="drafted")
    axes[1].bar(at, [r.accepted for _, r in drafting], color=_COLOURS["draft"], label="accepted")
    axes[1].set(xlabel="round", ylabel="drafts", xlim=(0, len(trace.rounds) + 1))
    if drafting:
        axes[1].legend(loc="upper right", fontsize=8)
    if measured:
        grid: Any = list(zip(*(r.recovery for _, r in measured if r.recovery), strict=True))
        picture = axes[2].imshow(grid, aspect="auto", cmap="magma", vmax=1.0, interpolation="nearest")
        step = max(1, len(measured) // 12)
        axes[2].set_xticks(range(0, len(measured), step), [str(k + 1) for k, _ in measured[::step]])
        axes[2].set(xlabel="round", ylabel="layer")
        figure.colorbar(picture, ax=axes[2], label="attention recovered", pad=0.01)
    else:
        axes[2].text(0.5, 0.5, "attention recovery was not measured", ha="center", transform=axes[2].transAxes)
        axes[2].set_axis_off()
    info = trace.info
    figure.suptitle(f"{info['model']}, mode {info['mode']}, selector {info['selector']}, budget {info['budget']}", fontsize=12)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_map(axis: Any, trace: Trace) -> None:
    for source in SOURCES:
        # Between two values a bar of one token: runs of neighbours are one bar each.
        for k, r in enumerate(trace.rounds):
            runs = _runs(r.kept[source]) if r.kept is not None else []
            axis.broken_barh(runs, (k + 0.5, 1), color=_COLOURS[source], linewidth=0)
    for k, r in enumerate(trace.rounds):
        if r.kept is None:
            axis.broken_barh([(0, r.length)], (k + 0.5, 1), color="#b9bcc2", linewidth=0)
        axis.broken_barh([(r.length, len(trace.tokens) - r.length)], (k + 0.5, 1), color="#e4e2dd", linewidth=0)
    axis.axvline(trace.prompt_tokens, color="black", linewidth=0.8, alpha=0.6)
    axis.set(xlim=(0, len(trace.tokens)), ylim=(len(trace.rounds) + 0.5, 0.5), xlabel="token of the text", ylabel="round")
    handles = [axis.scatter([], [], marker="s", color=_COLOURS[name], label=_LABELS[name]) for name in SOURCES]
    axis.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, 1.08), ncols=4, fontsize=9, frameon=False)


def _runs(positions: list[int]) -> list[tuple[int, int]]:
    """(start, width) of each run of neighbours."""
    runs: list[tuple[int, int]] = []
    for position in positions:
        if runs and position == runs[-1][0] + runs[-1][1]:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((position, 1))
    return runs
