"""Reading prompts densely, in chunks of bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dustin.interfaces import Array, Backend, ForwardResult, KVCache, Model, Tap

# Tokens of a prompt read at a time where nobody says how many: these, and up to the second where the backend takes more rows well.
_CHUNK, _LONG_CHUNK = 512, 4096
# The same of what is read between two rounds while others stream.
_BETWEEN, _LONG_BETWEEN = 256, 1024


def chunk_of(asked: int | None, backend: Backend, rows: int) -> int:
    """Tokens of each of `rows` prompts to read in a call: what was asked for, or what suits the backend."""
    return asked or max(_CHUNK, min(_LONG_CHUNK, getattr(backend, "prompt_rows", 0) // max(1, rows)))


def shared_chunk(asked: int | None, backend: Backend, rows: int) -> int:
    """Tokens of `rows` prompts together to read in a call."""
    return asked or max(_CHUNK, min(_LONG_CHUNK * rows, getattr(backend, "prompt_rows", 0)))


def chunk_between(asked: int | None, backend: Backend, rows: int) -> int:
    """Tokens of `rows` prompts together to read between two rounds. Where more rows cost a call little, the more of them the more
    prompts wait: those who stream wait a little longer for each token, and not for as many calls."""
    return asked or max(_BETWEEN, min(_LONG_BETWEEN * rows, getattr(backend, "prompt_rows", 0)))


def padded_tokens(backend: Backend, parts: Sequence[Sequence[int]]) -> Array:
    """[B, T] tokens of one chunk. A small T is rounded up to a power of two: backends that keep a graph a shape find it again."""
    width = max(len(part) for part in parts)
    wide = 1 << max(width - 1, 0).bit_length() if width <= 64 else width
    return backend.tokens([[*parts[0], *[0] * (wide - len(parts[0]))], *parts[1:]])


def prefill(
    backend: Backend,
    model: Model,
    cache: KVCache,
    rows: Sequence[Sequence[int]],
    chunk: int,
    tap: Tap | None,
    progress: Callable[[int, int], None] | None = None,
    logits: bool = True,
    all_rows: bool = False,
) -> ForwardResult | None:
    """Append rows[b] to the cache, at most `chunk` tokens a row and call; return the last call's result.

    With `all_rows` the tap's queries are those of all rows of the last call, not only of each sequence's last one.

    Chunks are aligned at the END of each row, so that all rows meet in the last call and its last-row logits and queries
    belong to every row that has tokens at all.
    """
    longest = max((len(row) for row in rows), default=0)
    total, done = sum(len(row) for row in rows), 0
    result = None
    for left in range(-(-longest // chunk), 0, -1):
        parts = [list(row[max(0, len(row) - left * chunk) : max(0, len(row) - (left - 1) * chunk)]) for row in rows]
        last = left == 1
        result = model.forward(
            backend.tokens(parts),
            [len(part) for part in parts],
            cache,
            tap=Tap(tap.heads, last_row_only=not all_rows) if last and tap is not None else None,
            logits="last" if last and logits else "none",
        )
        done += sum(len(part) for part in parts)
        if progress is not None:
            progress(done, total)
    return result
