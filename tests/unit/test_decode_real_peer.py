"""The model that transformers runs beside ours in `bench decode_real` is the same model."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from bench.decode_real_peer import transformers_model
from dustin.backends.torch_triton.cuda_random import qwen2_config, random_weights
from dustin.backends.torch_triton.model import TorchModel


@pytest.mark.parametrize("tied", [True, False])
def test_shared_weights_give_the_same_logits(tied):
    config = qwen2_config(64, 96, 3, 8, 2, 150, context_length=256, tied_embeddings=tied)
    weights = random_weights(config, torch.float32, torch.device("cpu"))
    ours = TorchModel(config, weights, "tiny")
    ours.limit_vocabulary(140)
    theirs = transformers_model(ours)
    tokens = torch.randint(0, 140, (2, 30), generator=torch.Generator().manual_seed(1))
    want = ours.forward(tokens, [30, 30], ours.new_cache(2, 64), logits="all").logits
    with torch.inference_mode():
        got = theirs(tokens).logits
    assert got.shape == want.shape == (2, 30, 140)
    assert float((got - want).norm() / want.norm()) < 1e-5
    assert theirs.model.layers[1].mlp.down_proj.weight.data_ptr() == weights.layers[1].down.weight.data_ptr()


def test_another_architecture_is_refused():
    from dataclasses import replace

    config = replace(qwen2_config(64, 96, 1, 8, 2, 150, context_length=256), architecture="LlamaForCausalLM")
    ours = TorchModel(config, random_weights(config, torch.float32, torch.device("cpu")), "tiny")
    with pytest.raises(ValueError, match="tiny is LlamaForCausalLM .* expected Qwen2 without scaling"):
        transformers_model(ours)
