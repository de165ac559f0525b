"""Attention of one verification round, selection included, against tuned dense attention in the same run.

A round is one CUDA graph: score the target's and the draft's heads, select, translate, then one sparse kernel a layer.
Every layer reads other memory (8 pools, and other sequences in them for small batches), far past the L2. The baseline is
the better of our dense kernel, torch's fused call with the query heads packed into its row axis (no in-flight mask, so a
little less work), and FlashInfer when it can be imported. A case prints no speed when a result is off its reference.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import rows
from bench.attention_case import (
    DTYPE,
    LARGE,
    LAYERS_HELD,
    PAGE,
    RECENT,
    SINKS,
    SMALL,
    TOKENS,
    Case,
    Memory,
    Round,
    copied_tb_per_s,
    time_us,
)
from dustin.triton_kernels import sparse_verify as sparse
from dustin.triton_kernels.attention_core import AttentionConfig
from dustin.triton_kernels.runtime import INTERPRETED
from dustin.triton_kernels.score_heads import ScoreConfig

TOLERANCE = {"attention": 1e-2, "scores": 1e-3}


def table() -> list[Case]:
    """The cases of the benchmark; the aims are the paper's figure and our own."""
    base = Case(LARGE, 32768, 16, 512, aim="27.85 (the paper), 40")
    every = tuple(range(LARGE.heads))
    return [
        base,
        replace(base, batch=32, aim="36, 45"),
        Case(LARGE, 131072, 8, 1024, aim="50, 75"),
        Case(SMALL, 32768, 32, 512, aim="20, 30"),
        *(replace(base, budget=k, aim="") for k in (128, 256, 1024, 2048)),
        *(replace(base, batch=b, aim="") for b in (1, 2, 4, 8)),
        replace(base, target_heads=(0, 8, 16, 24), aim=""),
        replace(base, target_layers=2, target_heads=every, aim=""),
        replace(base, target_layers=3, target_heads=every, aim=""),
        replace(base, dense_layers=1, aim=""),
    ]


def relative_rms(got: torch.Tensor, want: torch.Tensor) -> float:
    """|got - want| / |want| in float64; infinite when not finite."""
    error = float((got.double() - want.double()).norm() / want.double().norm())
    return error if math.isfinite(error) else math.inf


def reference(run: Round, queries: torch.Tensor, b: int, head: int, keys: torch.Tensor, layer: int) -> torch.Tensor:
    """Float64 attention [T, g, D] of one sequence and kv head over committed `keys` and the in-flight rows."""
    k_pool, v_pool = run.pools(layer)
    flying = torch.arange(run.length, run.length + TOKENS, device=keys.device)
    positions = torch.cat([keys.long(), flying])
    pages = run.tables[0][b][positions // PAGE].long()
    k, v = (pool[pages, positions % PAGE, head].double() for pool in (k_pool, v_pool))
    group = run.shape.heads // run.shape.kv_heads
    q = queries[b, :, head * group : (head + 1) * group].double()
    logits = torch.einsum("tgd,nd->tgn", q, k) / math.sqrt(run.shape.dim)
    hidden = flying[None, :] > run.length + torch.arange(TOKENS, device=keys.device)[:, None]
    logits[:, :, len(keys) :].masked_fill_(hidden[:, None, :], -math.inf)
    return torch.einsum("tgn,nd->tgd", logits.softmax(-1), v)


def gate(run: Round, kind: str) -> float:
    """Worst relative RMS of a layer's output on the corner sequences and heads."""
    launch = run.sparse_layer if kind == "sparse" else run.dense_layer
    run.out.fill_(math.nan)
    # The second layer: the first one waits for the translation, the others read ahead.
    launch(1)
    if not torch.isfinite(run.out).all():
        return math.inf
    group, worst = run.shape.heads // run.shape.kv_heads, 0.0
    for b in {0, run.case.batch - 1}:
        everything = torch.arange(run.length, device=run.memory.device)
        keys = run.indices[b, : int(run.counts[b])] if kind == "sparse" else everything
        for head in {0, run.shape.kv_heads - 1}:
            want = reference(run, run.q[1], b, head, keys, 1)
            worst = max(worst, relative_rms(run.out[b, :, head * group : (head + 1) * group], want))
    return worst


def gate_selection(run: Round) -> float:
    """Relative RMS of the target's scores of the last sequence; infinite when a chosen set differs from sorting."""
    b, group = run.case.batch - 1, run.shape.heads // run.shape.kv_heads
    positions = torch.arange(run.length, device=run.memory.device)
    want = torch.zeros(run.length, dtype=torch.float64, device=run.memory.device)
    for layer in range(run.case.target_layers):
        k_pool = run.pools(layer)[0]
        pages = run.tables[0][b][positions // PAGE].long()
        for s, head in enumerate(run.case.target_heads):
            k = k_pool[pages, positions % PAGE, head // group].double()
            logits = k @ run.history[b, 0, s].double() / math.sqrt(run.shape.dim)
            want += logits.softmax(0) / (len(run.case.target_heads) * run.case.target_layers)
    for row in range(run.case.batch):
        chosen = torch.zeros(run.columns, dtype=torch.bool, device=run.memory.device)
        chosen[:SINKS] = chosen[run.length - RECENT : run.length] = True
        for scores, quota in ((run.draft_scores, run.by_draft), (run.target_scores, run.case.budget)):
            quota = min(quota, run.case.budget - int(chosen.sum()))
            ranked = scores[row].masked_fill(chosen, -math.inf).sort(descending=True, stable=True).indices
            chosen[ranked[:quota]] = True
        if not torch.equal(chosen.nonzero()[:, 0].int(), run.indices[row]):
            return math.inf
    return relative_rms(run.target_scores[b, : run.length], want)


def candidates(case: Case, kind: str) -> list[AttentionConfig]:
    """What `--tune` tries."""
    group = case.batch * case.shape.kv_heads
    near = [2**i for i in range(6) if 64 <= 2**i * group <= 528 or (group == 8 and 8 <= 2**i <= 16)]
    if kind == "dense":
        counts = [*near[:1], 33] if group == 8 else near[:2]
        return [AttentionConfig(64, 64, 4, 3, waves=(n * group + 0.01) / 132, fused_splits=8) for n in counts]
    found = []
    for block_n, stages in ((64, 3), (32, 4)):
        for splits in near[:2]:
            for trigger, early in ((0, 0), (3, 0), (3, 6), (5, 12)):
                waves = (splits * group + 0.01) / 132
                start = {"trigger": trigger * 64 // block_n, "prefetch_bytes": early << 20}
                found.append(AttentionConfig(64, block_n, 4, stages, waves, 2, **start))
    return found


def tune(run: Round, kind: str) -> AttentionConfig:
    """The fastest candidate on this case."""
    best, config = math.inf, None
    for candidate in candidates(run.case, kind):
        if kind == "dense":
            run.dense_config = candidate
            launches = [lambda i=i: run.dense_layer(i) for i in range(4)]
        else:
            run.sparse_config = candidate
            launches = [lambda i=i: run.sparse_layer(i) for i in range(16)]
        elapsed = time_us(launches, 3 if kind == "dense" else 9) / len(launches)
        if elapsed < best:
            best, config = elapsed, candidate
    if config is None:
        raise click.ClickException(f"no {kind} candidate ran")
    return config


SCORE_CANDIDATES = [
    (keep, ScoreConfig(block_n, chunk, stages, direct=direct))
    for block_n, chunk, stages in ((64, 512, 3), (64, 1024, 3), (64, 1024, 4), (128, 512, 2), (128, 1024, 3), (128, 2048, 3))
    for keep, direct in ((True, False), (True, True), (False, False))
]


def tune_scoring(run: Round) -> str:
    """Keep the fastest scoring launch for the target and for the draft; say which."""
    said = []
    for name, setter, launch in (
        ("target", run.set_target_scoring, run.score_target),
        ("draft", run.set_draft_scoring, run.score_draft),
    ):
        timed = []
        for keep, config in SCORE_CANDIDATES:
            setter(keep, config)
            timed.append((time_us([launch] * 2, 5) / 2, keep, config))
        elapsed, keep, config = min(timed, key=lambda entry: entry[0])
        setter(keep, config)
        logits = "stored directly" if config.direct else "kept" if keep else "recomputed"
        said.append(f"{name} {elapsed:.1f} us ({logits}, {config.block_n}/{config.chunk}, {config.num_stages} stages)")
    return ", ".join(said)


def describe(config: AttentionConfig) -> str:
    """A configuration in a few words."""
    merge = "handed-over" if config.handed_splits else "fused" if config.fused_splits else "separate"
    return (
        f"tile {config.block_m}x{config.block_n}, {config.num_warps} warps, {config.num_stages} stages, "
        f"waves {config.waves:.2f}, {merge} merge, next kernel after tile {config.trigger}, "
        f"{config.prefetch_bytes >> 20} MiB ahead"
    )


def packed_us(run: Round) -> tuple[float, str]:
    """The better of torch's flash and cuDNN kernels with packed query heads."""
    best = (math.inf, "none")
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        try:
            with sdpa_kernel(backend):
                elapsed = time_us([lambda i=i: run.packed_layer(i) for i in range(4)], 3) / 4
        except RuntimeError:
            continue
        best = min(best, (elapsed, f"torch packed ({backend.name.lower()})"))
    return best


def flashinfer_us(run: Round) -> tuple[float, str]:
    """FlashInfer's paged prefill kernel, when installed."""
    try:
        import flashinfer
    except ImportError:
        return math.inf, "FlashInfer"
    batch, shape, device = run.case.batch, run.shape, run.memory.device
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.empty(256 << 20, dtype=torch.uint8, device=device), "NHD")
    each = run.tables[0].shape[1]
    steps = torch.arange(batch + 1, dtype=torch.int32, device=device)
    wrapper.plan(
        steps * TOKENS, steps * each, run.tables[0].flatten(), run.ints((run.case.context - 1) % PAGE + 1),
        shape.heads, shape.kv_heads, shape.dim, PAGE, causal=True, q_data_type=DTYPE,
    )  # fmt: skip
    flat = [q.view(-1, shape.heads, shape.dim) for q in run.q]
    return time_us([lambda i=i: wrapper.run(flat[i], run.pools(i)) for i in range(4)], 3) / 4, "FlashInfer"


def measure(case: Case, memory: Memory, copy_rate: float, baselines: dict[Any, Any], tuned: bool) -> dict[str, Any]:
    """One row, or ClickException when a result is off its reference."""
    run = Round(case, memory)
    run.start()
    key, scored = (case.shape, case.context, case.batch), baselines.setdefault("scoring", {})
    scoring_config = "shipped"
    if tuned:
        if key not in scored:
            scored[key] = tune_scoring(run), run.target_scoring, run.draft_scoring
        scoring_config, target, draft = scored[key]
        run.set_target_scoring(target["keep_weights"], target["config"])
        run.set_draft_scoring(draft["keep_weights"], draft["config"])
        run.start()
        run.sparse_config = tune(run, "sparse")
        run.dense_config = baselines[key]["config"] if key in baselines else tune(run, "dense")
    errors = {"sparse": gate(run, "sparse"), "dense": gate(run, "dense"), "scores": gate_selection(run)}
    allowed = {name: TOLERANCE["scores" if name == "scores" else "attention"] for name in errors}
    if any(not errors[name] <= allowed[name] for name in errors):
        raise click.ClickException(f"parity gate is red for {case}: {errors}, allowed {allowed}: no speed is printed")
    if key not in baselines:
        ours = time_us([lambda i=i: run.dense_layer(i) for i in range(LAYERS_HELD)], 5) / LAYERS_HELD
        packed, library = packed_us(run), flashinfer_us(run)
        best = min((ours, "our dense kernel"), packed, library)
        baselines[key] = {"ours": ours, "packed": packed[0], "library": library[0], "best": best, "config": run.dense_config}
    base = baselines[key]
    attention = time_us([lambda i=i: run.sparse_layer(i) for i in range(case.shape.layers)]) / case.shape.layers
    choosing, translating = time_us([run.choose] * 4) / 4, time_us([run.translate] * 4) / 4
    # Scores of target and draft one after the other, or as two branches of the graph.
    wholes = {branches: time_us([*run.selection(branches == 2), *run.layers()]) for branches in (1, 2)}
    branches = min(wholes, key=lambda count: wholes[count])
    whole = wholes[branches]
    scoring, selection = time_us(run.scoring(branches == 2)), time_us(run.selection(branches == 2))
    dense_total = base["best"][0] * case.shape.layers
    row_bytes = 4 * case.shape.row_elements
    group = case.shape.heads // case.shape.kv_heads
    shipped = sparse.choose_config(TOKENS * group, case.shape.dim, DTYPE, sparse.one_wave(run.q[0], case.shape.kv_heads))
    return {
        "bench": "attention",
        "card": torch.cuda.get_device_name() if not INTERPRETED else "interpreter",
        "shape": f"{case.shape.name}, {case.shape.layers} layers",
        "weights": "random",
        "kv_layout": memory.layout,
        "pages": "shuffled" if memory.shuffled else "in allocation order",
        "context": case.context,
        "batch": case.batch,
        "query_rows": TOKENS,
        "budget": case.budget,
        "scoring": case.scoring,
        "dense_layers": case.dense_layers,
        "round_us": round(whole, 1),
        "scoring_branches": branches,
        "round_us_other_branches": round(wholes[3 - branches], 1),
        "per_layer_us": round(whole / case.shape.layers, 2),
        "sparse_attention_us_per_layer": round(attention, 2),
        "scoring_us_per_round": round(scoring, 1),
        "choosing_us_per_round": round(choosing, 1),
        "translation_us_per_round": round(translating, 1),
        "selection_us_per_round": round(selection, 1),
        "selection_percent_of_dense": round(100 * selection / dense_total, 2),
        "our_dense_us_per_layer": round(base["ours"], 1),
        "torch_packed_us_per_layer": round(base["packed"], 1) if math.isfinite(base["packed"]) else None,
        "flashinfer_us_per_layer": round(base["library"], 1) if math.isfinite(base["library"]) else None,
        "copy_tb_per_s": round(copy_rate, 2),
        "dense_over_copy_floor": round(base["ours"] * copy_rate / (case.batch * case.context * row_bytes / 1e6), 3),
        "sparse_byte_floor_us": round(case.batch * (case.budget + TOKENS) * row_bytes / copy_rate / 1e6, 2),
        "baseline": base["best"][1],
        "ratio": round(dense_total / whole, 2),
        "ratio_attention_only": round(base["best"][0] / attention, 2),
        "aim": case.aim,
        "relative_rms": max(errors["sparse"], errors["dense"]),
        "relative_rms_scores": errors["scores"],
        "config": describe(run.sparse_config or shipped),
        "scoring_config": scoring_config,
        "command": rows.command(),
        "commit": rows.commit(),
    }


def copy_tb_per_s(memory: Memory) -> float:
    """Bytes read and written a second by a device copy of one pool."""
    return copied_tb_per_s(memory.buffers[0], memory.buffers[1])


@click.command()
@click.option("--only", default="", help="Run the cases whose 'shape context batch budget' contains this text.")
@click.option("--tune/--no-tune", "tuned", default=False, help="Try several launch configurations for each case and keep the best.")
@click.option("--layout", type=click.Choice(["interleaved", "separate"]), default="separate", show_default=True)
@click.option("--shuffled", is_flag=True, help="Pages of a sequence in random order instead of the allocator's.")
@click.option("--output", type=click.Path(path_type=Path), default=rows.RESULTS / "attention.jsonl", show_default=True)
def main(only: str, tuned: bool, layout: str, shuffled: bool, output: Path) -> None:
    """Sparse verification attention, selection included, against tuned dense attention on one GPU."""
    if not torch.cuda.is_available() and not INTERPRETED:
        raise click.ClickException("needs an NVIDIA GPU")
    memory = Memory("cuda", 32 * 32768, layout, shuffled)
    copy_rate = copy_tb_per_s(memory)
    click.echo(f"copy {copy_rate:.2f} TB/s", err=True)
    done: list[dict[str, Any]] = []
    baselines: dict = {}
    for case in table():
        if only not in f"{case.shape.name} {case.context} {case.batch} {case.budget}":
            continue
        row = measure(case, memory, copy_rate, baselines, tuned)
        done.append(row)
        rows.write(output, done)
        click.echo(
            f"{row['shape']:20} ctx {row['context']:6} B {row['batch']:2} k {row['budget']:4}  {row['ratio']:6.2f}x "
            f"(attention only {row['ratio_attention_only']:.2f}x)  layer {row['per_layer_us']:.2f} us  "
            f"sparse {row['sparse_attention_us_per_layer']:.2f}  select {row['selection_us_per_round']:.0f} us/round "
            f"({row['selection_percent_of_dense']:.2f} %)  dense {row['our_dense_us_per_layer']:.1f} "
            f"packed {row['torch_packed_us_per_layer']}  floor x{row['dense_over_copy_floor']:.3f}  rms {row['relative_rms']:.1e}  "
            f"[{row['config']}]  {'aim ' + row['aim'] if row['aim'] else row['scoring']}"
        )
