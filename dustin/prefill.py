"""Reading prompts densely, in chunks of bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dustin.interfaces import Array, Backend, ForwardResult, KVCache, Model, Tap

# Tokens of a prompt read at a time where nobody says how many: these, and up to the second where the backend takes more rows well.
_CHUNK, _LONG_CHUNK = 512, 4096
# The same of what is read between two rounds while others stream; and where calls of one prompt are recorded.
_BETWEEN, _LONG_BETWEEN, _RECORDED_BETWEEN = 256, 1024, 2048
# What a recorded call costs beside its rows, in rows (2.1 ms; 4,096 rows take 20 ms: 1.5B, one H200).
_CALL = 400


def chunk_of(asked: int | None, backend: Backend, rows: int) -> int:
    """Tokens of each of `rows` prompts to read in a call: what was asked for, or what suits the backend."""
    return asked or max(_CHUNK, min(_LONG_CHUNK, getattr(backend, "prompt_rows", 0) // max(1, rows)))


def shared_chunk(asked: int | None, backend: Backend, rows: int) -> int:
    """Tokens of `rows` prompts together to read before a round. Where prompts are read one by one (`piece_alone`) the first of
    them need not wait for the others."""
    together = 1 if recorded_prompts(backend) else rows
    return asked or max(_CHUNK, min(_LONG_CHUNK * together, getattr(backend, "prompt_rows", 0)))


def chunk_between(asked: int | None, backend: Backend, rows: int) -> int:
    """Tokens of `rows` prompts together to read between two rounds. Where more rows cost a call little, the more of them the more
    prompts wait: those who stream wait a little longer for each token, and not for as many calls. A recorded call of more is not
    faster by the token."""
    if recorded_prompts(backend):
        return asked or _RECORDED_BETWEEN
    return asked or max(_BETWEEN, min(_LONG_BETWEEN * rows, getattr(backend, "prompt_rows", 0)))


def recorded_prompts(backend: Backend) -> int:
    """Tokens of one prompt up to which a call is recorded, by powers of two; 0 where none is."""
    return getattr(backend, "recorded_prompt_rows", 0)


def piece_alone(left: int, most: int, recorded: int) -> int:
    """Tokens to read now of one prompt of which `left` are unread, `most` at most, where calls are recorded: a power of two up to
    `recorded`, or the prompt's end, padded to the next one where that costs less than a further call."""
    piece = min(left, most, recorded)
    wide = 1 << (piece - 1).bit_length()
    fits = wide == piece or (piece == left and wide - left <= max(_CALL, wide // 8))
    return piece if fits else wide // 2


def read_together(left: Sequence[int], slots: int, small: int) -> int:
    """How many of the prompts in turn, of which so many tokens are left, share calls of `small` tokens of each at most, where calls
    of single prompts are recorded, and such calls of all `slots`: the short ones, where that is faster than a call for each; else
    one."""
    short = next((i for i, n in enumerate(left) if n > 8 * small), len(left))
    if short < 2:
        return 1
    together = -(-max(left[:short]) // small) * (_CALL // 4 + slots * small)
    return short if together < sum(_CALL + (1 << (n - 1).bit_length()) for n in left[:short]) else 1


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
