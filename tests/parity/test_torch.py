"""The torch backend on the CPU against the float64 specification: operations, and whole models of every family."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from dustin.interfaces import Tap, TokenSet
from dustin.registry import create
from tests.parity.adapters import CONFIGS, ModelCheck, implementations, write_model
from tests.parity.cases import Implementation, Inputs, cases, check

if importlib.util.find_spec("torch") is None or importlib.util.find_spec("dustin.backends.torch_triton.backend") is None:
    pytest.skip("the torch backend is not here", allow_module_level=True)

import torch

from dustin.backends.torch_triton import ops, set_ops
from dustin.backends.torch_triton.attention import Attention
from dustin.backends.torch_triton.cache import TorchCache


def to_numpy(x) -> np.ndarray:
    return x.detach().cpu().float().numpy() if x.is_floating_point() else x.detach().cpu().numpy()


DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def kernels(dtype: torch.dtype) -> dict[str, Implementation]:
    """The backend's inner operations on a one-layer cache that holds the given rows, poison included."""

    def fill(i: Inputs) -> TorchCache:
        batch, capacity, num_kv_heads, head_dim = i["keys"].shape
        cache = TorchCache(1, batch, capacity, num_kv_heads, head_dim, dtype=dtype)
        cache.keys[0].copy_(torch.from_numpy(i["keys"]))
        cache.values[0].copy_(torch.from_numpy(i.get("values", i["keys"])))
        cache.advance([n + t for n, t in zip(i["lengths"], i.get("num_tokens", [0] * batch), strict=True)])
        return cache

    def verify(i: Inputs) -> dict[str, np.ndarray]:
        chosen = None
        if "indices" in i:
            chosen = TokenSet(torch.from_numpy(i["indices"]), torch.from_numpy(i["counts"]))
        valid = torch.arange(i["q"].shape[1])[None] < torch.tensor(i["num_tokens"])[:, None]
        attention = Attention(i["lengths"], i["num_tokens"], i["q"].shape[-1] ** -0.5)
        out = torch.zeros(i["q"].shape, dtype=dtype)
        out[valid] = attention(torch.from_numpy(i["q"]).to(dtype)[valid], fill(i), 0, chosen, None)
        return {"out": to_numpy(out)}

    def score(i: Inputs) -> dict[str, np.ndarray]:
        queries = {0: torch.from_numpy(i["q"]).to(dtype)}
        args = {"num_heads": i["num_heads"], "scale": i["q"].shape[-1] ** -0.5}
        return {"scores": to_numpy(ops.score(queries, Tap({0: i["heads"]}), fill(i), i["lengths"], **args))}

    def score_within(i: Inputs) -> dict[str, np.ndarray]:
        cache, tap = fill(i), Tap({0: i["heads"]})
        within = TokenSet(torch.from_numpy(i["indices"]), torch.from_numpy(i["counts"]))
        args = {"num_heads": i["num_heads"], "scale": i["q"].shape[-1] ** -0.5}
        queries, columns = {0: torch.from_numpy(i["q"]).to(dtype)}, max(i["lengths"])
        places = cache.places(within.indices)
        return {"scores": to_numpy(set_ops.score_within(queries, tap, cache.flat_keys, places, within, columns, **args))}

    def page_scores(i: Inputs) -> dict[str, np.ndarray]:
        cache, tap = fill(i), Tap({0: i["heads"]})
        places = cache.places(torch.arange(max(i["lengths"])).expand(cache.batch, -1))
        args = {"num_heads": i["num_heads"], "scale": i["q"].shape[-1] ** -0.5}
        queries = {0: torch.from_numpy(i["q"]).to(dtype)}
        got = set_ops.page_scores(queries, tap, cache.flat_keys, places, i["lengths"], i["page_size"], **args)
        return {"scores": to_numpy(got)}

    def append_rollback(i: Inputs) -> dict[str, object]:
        cache = TorchCache(1, i["batch"], i["capacity"], i["num_kv_heads"], i["head_dim"], dtype=dtype)
        lengths, dropped = [], []
        for kind, counts, *rows in i["steps"]:
            if kind == "append":
                valid = torch.arange(rows[0].shape[1])[None] < torch.tensor(counts)[:, None]
                keys, values = (torch.from_numpy(x).to(dtype)[valid] for x in rows)
                cache.write(0, cache.destinations(counts), keys, values)
                cache.advance(counts)
            else:
                dropped.append(cache.rollback(counts))
            lengths.append(cache.lengths)
        return {"lengths": lengths, "dropped": dropped, "keys": to_numpy(cache.keys[0]), "values": to_numpy(cache.values[0])}

    made = {"dense_verify": verify, "sparse_verify": verify, "score": score, "append_rollback": append_rollback}
    return made | {"score_within": score_within, "page_scores": page_scores}


INNER = ("dense_verify", "sparse_verify", "score", "score_within", "page_scores", "append_rollback")
WHOLE = ("favour", "select", "accumulate", "smooth", "keep_mass", "measures", "accept_greedy", "accept_sampled", "probabilities")


@pytest.mark.parametrize("case", cases(*INNER), ids=lambda case: case.name)
def test_inner_operation(case):
    check(kernels(DTYPES[case.dtype])[case.op], case)


@pytest.fixture(scope="module")
def backend():
    return create("torch", "cpu")


@pytest.mark.parametrize("case", cases(*WHOLE), ids=lambda case: case.name)
def test_operation(backend, case):
    check(implementations(backend, torch.from_numpy, to_numpy)[case.op], case)


@pytest.mark.parametrize("name", CONFIGS)
def test_model_in_fp32(backend, name, tmp_path):
    ModelCheck(backend, to_numpy, write_model(tmp_path / name, CONFIGS[name]), "float32", 1e-5).run()


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_model_in_bf16(backend, name, tmp_path):
    """Weights are rounded too, so this only bounds gross errors; fp32 above is the exact test."""
    ModelCheck(backend, to_numpy, write_model(tmp_path / name, CONFIGS[name]), "bfloat16", 4e-2).run()
