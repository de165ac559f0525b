"""What a config.json may say: fields that are no numbers of their kind, and weights of another model, are refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import dustin
from dustin.errors import ModelError
from tests import tiny_model

BACKENDS = ("numpy", "torch")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 0}, "config.json has 0 as num_hidden_layers, expected a whole number from 1 on"),
        ({"num_attention_heads": 0}, "config.json has 0 as num_attention_heads"),
        ({"num_key_value_heads": 0}, "config.json has 0 as num_key_value_heads"),
        ({"max_position_embeddings": "512"}, "config.json has '512' as max_position_embeddings"),
        ({"head_dim": 8.0}, "config.json has 8.0 as head_dim"),
        ({"rms_norm_eps": "small"}, "config.json has 'small' as rms_norm_eps, expected a number above 0"),
        ({"rope_theta": -1.0}, "config.json has -1.0 as rope_theta"),
        ({"rope_theta": float("nan")}, "config.json has nan as rope_theta"),
        ({"max_position_embeddings": None}, "config.json lacks 'max_position_embeddings'"),
    ],
)
def test_numbers_are_checked(tmp_path: Path, backend: str, changes: dict[str, object], said: str) -> None:
    if backend == "torch":
        pytest.importorskip("torch")
    folder = tiny_model.write(tmp_path / "model")
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(ModelError, match=said):
        dustin.load(str(folder), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_of_more_layers_are_of_another_model(tmp_path: Path, backend: str) -> None:
    if backend == "torch":
        pytest.importorskip("torch")
    folder = tiny_model.write(tmp_path / "model", num_hidden_layers=3)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 3', '"num_hidden_layers": 2'))
    with pytest.raises(ModelError, match="config.json has 2 layers, but the weights have a layer 2"):
        dustin.load(str(folder), backend=backend)
