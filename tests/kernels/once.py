"""Every Triton kernel once on small ragged shapes, in the forms a launch can take: what compute-sanitizer watches.

    compute-sanitizer --tool memcheck python -m tests.kernels.once
    compute-sanitizer --tool racecheck python -m tests.kernels.once short checks

Words choose parts (checks, attention0 to attention3, handed, products, scoring, selection, own_sets; all without one), which may
then run side by side; `short` cuts the contexts, for tools that take a thousand times as long. Prints a line a launch with its
relative RMS against float64; exit code 1 when one is off.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from dustin.backends.torch_triton.compact_keys import CompactKeys
from dustin.self_test import Result, judge
from dustin.self_test_kernels import triton_checks
from dustin.triton_kernels.attention_core import EMPTY, AttentionConfig, AttentionWorkspace
from dustin.triton_kernels.decode_linear import LinearConfig, LinearScratch, Stream
from dustin.triton_kernels.dense_verify import dense_verify
from dustin.triton_kernels.linear_add import linear_add
from dustin.triton_kernels.packed_rows import packed_keys, packed_rows
from dustin.triton_kernels.packed_scores import packed_scores
from dustin.triton_kernels.score_heads import ScoreConfig, group_heads, score_layers
from dustin.triton_kernels.select_tokens import select_tokens
from dustin.triton_kernels.sparse_verify import plan, sparse_verify
from dustin.triton_kernels.translate_slots import translate_slots
from dustin.triton_kernels.wide_linear import WideConfig, WideScratch, wide_linear
from tests.kernels.reference import attention, choose, head_scores, paged_case, random_set, relative_rms

# (Hq, Hkv, D), page size, committed tokens, in-flight tokens, query rows.
Shape = tuple[tuple[int, int, int], int, list[int], list[int], int]
SHAPES: tuple[Shape, ...] = (
    ((64, 8, 128), 64, [2001, 517, 0, 1024], [6, 3, 6, 0], 6),
    ((28, 4, 128), 32, [1000, 700], [6, 5], 6),
    ((14, 2, 64), 64, [900, 31], [1, 1], 1),
    ((28, 4, 128), 64, [1500, 640], [33, 20], 33),
)
SPARSE = (
    None,
    AttentionConfig(64, 32, 4, 3, waves=2.0, fused_splits=4),
    AttentionConfig(64, 64, 4, 3, waves=1.0, fused_splits=64, value_parts=2, prefetch_bytes=1 << 20),
    AttentionConfig(64, 32, 4, 3, waves=3.0, fused_splits=0),
    AttentionConfig(64, 32, 4, 3, waves=2.0, fused_splits=4, handed_splits=4),
)
DENSE = (
    None,
    AttentionConfig(64, 64, 4, 3, waves=2.0, fused_splits=0),
    AttentionConfig(64, 32, 4, 3, waves=2.0, fused_splits=4, described=True),
)


def shortened(shape: Shape) -> Shape:
    """A fifth of the context, and of the heads one kv head in four at least two: as many forms of a launch, fewer programs."""
    (num_heads, num_kv_heads, dim), page_size, lengths, fed, tokens = shape
    kept = max(2, num_kv_heads // 4)
    return (num_heads // num_kv_heads * kept, kept, dim), page_size, [n // 5 for n in lengths], fed, tokens


def attention_launches(dtype: torch.dtype, shapes: Sequence[Shape]) -> Iterator[tuple[str, float]]:
    """(launch, relative RMS) of both attention kernels."""
    for heads, page_size, lengths, fed, tokens in shapes:
        case = paged_case("cuda", dtype, lengths=lengths, num_tokens=fed, tokens=tokens, heads=heads, page_size=page_size)
        indices, counts = random_set(case, [int(n * 0.4) for n in lengths])
        place = (indices, counts, case.lengths, case.num_tokens, case.page_table, page_size, tokens)
        slots, slot_counts = translate_slots(*place)
        torch.cuda.synchronize()
        want = attention(case, indices, counts)
        given = {"slots": slots, "slot_counts": slot_counts}
        for i, config in enumerate(SPARSE):
            for settled in (False, True):
                out = sparse_verify(*case.inputs, indices, counts, **given, config=config, settled=settled)
                yield f"sparse_verify {heads} {tokens} rows, form {i}, settled {settled}", relative_rms(out, want)
        for i, config in enumerate(DENSE):
            out = dense_verify(*case.inputs, config=config)
            wanted = attention(case)
            yield f"dense_verify {heads} {tokens} rows, form {i}", relative_rms(out, wanted)
            rows = torch.zeros(sum(fed), *out.shape[2:], dtype=dtype, device="cuda")
            starts = (case.num_tokens.cumsum(0) - case.num_tokens).int()
            dense_verify(*case.inputs, config=config, out=rows, starts=starts)
            fed_rows = torch.cat([wanted[b, :n] for b, n in enumerate(fed)])
            yield f"dense_verify {heads} {tokens} rows, form {i}, packed", relative_rms(rows, fed_rows)


def scoring_launches(dtype: torch.dtype, short: bool) -> Iterator[tuple[str, float]]:
    """(launch, relative RMS) of scoring: weights kept (through shared memory or directly) or keys read again."""
    lengths, fed = [3000, 1025, 0, 700], [5, 2, 5, 0]
    lengths = [n // 2 for n in lengths] if short else lengths
    case = paged_case("cuda", dtype, lengths=lengths, num_tokens=[0] * 4, tokens=1, heads=(28, 4, 128), page_size=64)
    q, groups = torch.randn(4, 5, 4, 128, device="cuda").to(dtype), group_heads([0, 1, 2, 3], 28, 4, "cuda")
    rows = torch.tensor(fed, dtype=torch.int32, device="cuda")
    columns = max(lengths) + 1
    want = head_scores(case, q, [0] * 4, fed, columns)
    inside = ~want.isinf()
    for keep, direct in ((True, False), (True, True), (False, False)):
        scores = torch.empty(4, columns, device="cuda")
        score_layers(
            [q] * 3, [case.k_pool] * 3, case.page_table, case.lengths, [groups] * 3, scores,
            num_rows=rows, weight=1 / 3, keep_weights=keep, config=ScoreConfig(128, 512, 3, direct=direct),
        )  # fmt: skip
        yield f"score_layers, kept {keep}, direct {direct}", relative_rms(scores[inside], want[inside])


def handed_launches(dtype: torch.dtype, short: bool) -> Iterator[tuple[str, float]]:
    """(launch, relative RMS) of splits that hand their partials over word by word, twice each: words are empty again."""
    for shape in SHAPES[:3]:
        heads, page_size, lengths, fed, tokens = shortened(shape) if short else shape
        case = paged_case("cuda", dtype, lengths=lengths, num_tokens=fed, tokens=tokens, heads=heads, page_size=page_size)
        indices, counts = random_set(case, [int(n * 0.4) for n in lengths])
        want = attention(case, indices, counts)
        for splits in (2, 4, 8):
            config = AttentionConfig(64, 32, 4, 3, waves=64.0, fused_splits=splits, handed_splits=splits, max_splits=splits)
            made = plan(case.q, case.k_pool.shape[2], max(counts.tolist()) + tokens, config)
            workspace = AttentionWorkspace(made.num_rows, heads[2], made.num_counters, "cuda", made.num_handed)
            for time in ("first", "again"):
                out = sparse_verify(*case.inputs, indices, counts, config=config, workspace=workspace)
                error = relative_rms(out, want) if bool((workspace.handed == EMPTY).all()) else math.inf
                yield f"sparse_verify {heads} {tokens} rows, {made.splits} splits handed over, {time}", error


def product_launches(short: bool) -> Iterator[tuple[str, float]]:
    """(launch, relative RMS) of a decoding step's products whose depth is split, twice each: counters are at zero again."""
    size, depth = (192, 1000) if short else (1536, 4096)
    for rows in (1, 16, 33):
        shapes = (rows, depth), (size, depth), (size,), (2 * size, depth)
        x, w, bias, gates = (torch.randn(*shape, device="cuda").to(torch.bfloat16) for shape in shapes)
        want = x.double() @ w.double().T
        scratch = WideScratch(1 << 20, 256, x.device)
        for splits in (1, 3, 4):
            config = WideConfig(64, 128, splits, num_stages=4)
            for time in ("first", "again"):
                out = wide_linear(x, w, bias, config=config, scratch=scratch)
                yield f"wide_linear {rows} rows, {config.splits} splits, {time}", relative_rms(out, want + bias.double())
        gate, up = (x.double() @ gates.double().T).chunk(2, 1)
        out = wide_linear(x, gates, gate=True, scratch=scratch)
        yield f"wide_linear {rows} rows, gate", relative_rms(out, torch.nn.functional.silu(gate) * up)
        norm = torch.ones(size, device="cuda", dtype=torch.bfloat16)
        for config in (LinearConfig(16, 32, 4, 3), LinearConfig(64, 64, 1, 4, swap=True), LinearConfig(16, 64, 1, 2)):
            residual, room = bias.repeat(rows, 1), LinearScratch(20_000, 1 << 20, 256, x.device)
            stream = Stream(residual, torch.empty_like(residual), room, 0)
            for step, time in enumerate(("first", "again"), 1):
                linear_add(x, w, None, stream, norm, config=config)
                error = relative_rms(stream.residual, bias.double() + step * want)
                yield f"linear_add {rows} rows, {config.splits} splits, {time}", error


def own_set_launches(short: bool) -> Iterator[tuple[str, float]]:
    """(launch, relative RMS) of sets of the kv heads' own: codes and projected queries, scores by kv head, attention over each."""
    kv_heads, rank, lengths, fed = 2, 64, ([900, 17, 0] if short else [3000, 1025, 7]), [5, 2, 5]
    case = paged_case("cuda", torch.bfloat16, lengths=lengths, num_tokens=fed, tokens=5, heads=(12, kv_heads, 128), page_size=64)
    q = case.inputs[0]
    mean, encode, decode = (torch.randn(*shape, device="cuda") for shape in ((kv_heads, 128), *[(kv_heads, 128, rank)] * 2))
    codes = torch.randint(-128, 128, (*case.k_pool.shape[:2], kv_heads, rank // 2), dtype=torch.int8, device="cuda")
    place = (case.page_table, case.lengths)
    begins = torch.tensor([0, 5, 7], dtype=torch.int32, device="cuda")
    spread = encode / 128**0.5
    packed_keys(case.k_pool, codes.flatten(0, 1), case.page_table, begins, case.lengths, mean, spread, most=lengths[0])
    made = CompactKeys(rank, {0: mean}, {0: spread}, {})
    flat, differ = codes.flatten(0, 1), 0
    for b, (begin, length) in enumerate(zip(begins.tolist(), lengths, strict=True)):
        at = torch.arange(begin, max(begin, length), device="cuda")
        where = case.page_table[b].long()[at // 64] * 64 + at % 64
        differ += int((flat[where] != made.codes_of(0, case.k_pool.flatten(0, 1)[where])).sum())
    # A coordinate that lies between two steps may go either way.
    yield "packed_keys", differ / codes.numel()
    asked = packed_rows(q, case.k_pool, codes.flatten(0, 1), *place, mean, encode, decode, num_rows=5)
    want = torch.einsum("bthgd,hdr->bthgr", q.unflatten(2, (kv_heads, -1)).float(), decode).flatten(2, 3)
    yield "packed_rows", relative_rms(asked, want.to(asked.dtype))
    groups = group_heads(range(12), 12, kv_heads, "cuda")
    scores = torch.empty(3 * kv_heads, max(lengths) + 1, device="cuda")
    rows = torch.tensor(fed, dtype=torch.int32, device="cuda")
    numbers = torch.cat([(codes << 4) >> 4, codes >> 4], -1).double()
    for keep in (True, False):
        score_layers([asked], [codes], *place, [groups], scores, num_rows=rows, scale=0.001, keep_weights=keep, by_group=True)
        error = 0.0
        for b, length in enumerate(lengths):
            keys = numbers[case.page_table[b].long()].flatten(0, 1)[:length]
            for h in range(kv_heads if length else 0):
                logits = torch.einsum("rgd,nd->rgn", asked[b, : fed[b], 6 * h : 6 * h + 6].double(), keys[:, h]) * 0.001
                error = max(error, relative_rms(scores[b * kv_heads + h, :length], torch.softmax(logits, -1).mean((0, 1)).float()))
        yield f"score_layers by kv head, packed, kept {keep}", error
    by_heads = scores.clone()
    packed_scores(asked, codes, *place, scores, num_rows=rows, scale=0.001)
    yield "packed_scores", relative_rms(scores[~by_heads.isinf()], by_heads[~by_heads.isinf()])
    chosen = torch.zeros(3 * kv_heads, 256, dtype=torch.int32)
    counts = torch.tensor([min(n, 256 - 3 * h) for n in lengths for h in range(kv_heads)], dtype=torch.int32)
    for row, count in enumerate(counts.tolist()):
        chosen[row, :count] = torch.randperm(lengths[row // kv_heads])[:count].sort().values
    chosen, counts = chosen.cuda(), counts.cuda()
    for i, config in enumerate(SPARSE):
        out, error = sparse_verify(*case.inputs, chosen, counts, config=config), 0.0
        for h in range(kv_heads):
            mine = attention(case, chosen[h::kv_heads], counts[h::kv_heads])[:, :, 6 * h : 6 * h + 6]
            error = max(error, relative_rms(out[:, :, 6 * h : 6 * h + 6], mine))
        yield f"sparse_verify by kv head, form {i}", error


def selection_launches() -> Iterator[tuple[str, float]]:
    """(launch, 0 or 1: a wrong set) of selection in one, two and three levels."""
    quota = {"num_sink_tokens": 4, "num_recent_tokens": 32}
    for columns, budget in ((8000, 512), (32762, 512), (131072, 1024)):
        lengths = [columns, columns // 3, 300]
        target, draft = (torch.rand(3, columns, device="cuda") for _ in range(2))
        by_draft = int(0.6 * (budget - 36))
        indices, counts = select_tokens(
            target, draft, torch.tensor(lengths, dtype=torch.int32, device="cuda"), budget=budget, num_draft_selected=by_draft,
            **quota,
        )  # fmt: skip
        want = choose(target[0].tolist(), draft[0].tolist(), columns, budget, 4, 32, by_draft)
        right = indices[0].tolist() == want and counts.tolist() == [budget, budget, 300]
        yield f"select_tokens {columns} k={budget}", float(not right)


def parts(short: bool) -> dict[str, Callable[[], Iterator[tuple[str, float]]]]:
    """Name -> launches."""
    shapes = [shortened(shape) for shape in SHAPES] if short else SHAPES
    found: dict[str, Callable[[], Iterator[tuple[str, float]]]] = {"checks": checked}
    for i, shape in enumerate(shapes):
        found[f"attention{i}"] = partial(attention_launches, torch.bfloat16, [shape])
    return (
        found
        | {"scoring": partial(scoring_launches, torch.bfloat16, short), "selection": selection_launches}
        | {"handed": partial(handed_launches, torch.bfloat16, short), "products": partial(product_launches, short)}
        | {"own_sets": partial(own_set_launches, short)}
    )


def checked() -> Iterator[tuple[str, float]]:
    """(kernel, 0 or infinity) of the self-test's checks."""
    for check in triton_checks():
        result = check if isinstance(check, Result) else judge(check)
        yield f"{result.name}: {result.state} {result.detail}", math.inf if result.state == "failed" else 0.0


def main(words: Sequence[str]) -> int:
    """Number of launches that are off, as an exit code; 2 on a word that names no part."""
    found = parts("short" in words)
    chosen = [word for word in words if word != "short"]
    if unknown := set(chosen) - set(found):
        print(f"no part is named {', '.join(sorted(unknown))}: expected short, {', '.join(found)}", file=sys.stderr)
        return 2
    off = launches = 0
    for part in chosen or found:
        for name, error in found[part]():
            off += not error <= 1e-2
            launches += 1
            print(f"{name}: {error:.1e}", flush=True)
    torch.cuda.synchronize()
    print(f"{launches} launches, {off} off")
    return min(off, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
