"""The rows of a check that hold tokens, packed for the products of a wide model: the same logits, queries and cache."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from dustin.backends.torch_triton import cuda_packing  # noqa: E402
from dustin.backends.torch_triton.cuda_packing import packed_size  # noqa: E402
from tests.unit.interpreted import interpreted, run_interpreted  # noqa: E402


def test_under_the_interpreter():
    run_interpreted(__file__)


def test_sizes_are_few_and_hold_what_is_fed():
    hidden = cuda_packing.LEAST_HIDDEN
    assert packed_size([16] * 8, 16, hidden) == packed_size([15] * 8, 16, hidden) == 0
    assert packed_size([14] * 8, 16, hidden) == 112 and packed_size([13] * 8, 16, hidden) == 112
    assert packed_size([12] * 8, 16, hidden) == 96 and packed_size([0] * 7 + [3], 16, hidden) == 96
    # Narrow models, and few rows in all.
    assert packed_size([3] * 8, 16, hidden - 1) == packed_size([3] * 7, 16, hidden) == 0


def checked(model, counts: list[int], width: int, monkeypatch, least: int):
    """Logits and queries of a check, and logits of a token after it; how many rows its products had."""
    from dustin.backends.torch_triton.cuda_forward import DeviceForward
    from dustin.interfaces import Tap

    monkeypatch.setattr(cuda_packing, "LEAST_HIDDEN", least)
    monkeypatch.setattr(cuda_packing, "LEAST_ROWS", 1)
    device, batch = model.device, len(counts)
    generator, sizes = torch.Generator().manual_seed(3), []
    prompts, tokens = (torch.randint(0, 50, (batch, n), generator=generator).to(device) for n in (40, width))
    cache = model.new_cache(batch, 100)
    model.forward(prompts, [40 - b for b in range(batch)], cache, logits="none")
    run = DeviceForward.run

    def noted(self, inputs, *rest):
        sizes.append(None if inputs.packed is None else len(inputs.packed.rows))
        return run(self, inputs, *rest)

    monkeypatch.setattr(DeviceForward, "run", noted)
    out = model.forward(tokens, counts, cache, tap=Tap({1: (0, 3)}))
    monkeypatch.setattr(DeviceForward, "run", run)
    assert cache.lengths == tuple(40 - b + n for b, n in enumerate(counts))
    after = model.forward(torch.full((batch, 1), 7, device=device), [1] * batch, cache).logits
    assert out.logits.shape == (batch, width, 50) and out.queries[1].shape[:2] == (batch, width)
    assert torch.isfinite(out.logits).all()
    return out, after, sizes[0] if sizes else None


def compare(model, monkeypatch, tolerance: float) -> None:
    """A packed check against the same one unpacked, of as many rows as sizes tell apart."""
    for counts, size in (([12, 3, 0], 27), ([12, 9, 10], 31), ([9, 12, 12], None)):
        want, later, none = checked(model, counts, 12, monkeypatch, 1 << 30)
        got, after, packed = checked(model, counts, 12, monkeypatch, 1)
        assert none is None and packed in (size, None) and (size is None or packed == size)
        for b, n in enumerate(counts):
            torch.testing.assert_close(got.logits[b, :n], want.logits[b, :n], atol=tolerance, rtol=tolerance)
            torch.testing.assert_close(got.queries[1][b, :n], want.queries[1][b, :n], atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(after, later, atol=tolerance, rtol=tolerance)


def model_on(device: str):
    from dustin.backends.torch_triton.cuda_model import CudaModel
    from dustin.backends.torch_triton.cuda_random import qwen2_config, random_weights

    config = qwen2_config(64, 96, 2, 4, 2, 50, context_length=256)
    return CudaModel(config, random_weights(config, torch.float32, torch.device(device), 3), "toy")


@interpreted
def test_a_packed_check_is_the_same(monkeypatch):
    compare(model_on("cpu"), monkeypatch, 1e-4)


@pytest.mark.gpu
def test_a_packed_check_on_a_gpu_is_the_same(monkeypatch):
    model = model_on("cuda")
    torch.backends.cuda.matmul.allow_tf32 = False
    # The first call of a shape records it, later ones replay that with other numbers of rows.
    for counts in ([12, 3, 0], [1, 2, 3], [12, 9, 5]):
        want, later, _ = checked(model, counts, 12, monkeypatch, 1 << 30)
        got, after, _ = checked(model, counts, 12, monkeypatch, 1)
        for b, n in enumerate(counts):
            torch.testing.assert_close(got.logits[b, :n], want.logits[b, :n], atol=2e-3, rtol=2e-3)
            torch.testing.assert_close(got.queries[1][b, :n], want.queries[1][b, :n], atol=2e-3, rtol=2e-3)
        torch.testing.assert_close(after, later, atol=2e-3, rtol=2e-3)
