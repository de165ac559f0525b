"""The bench of limits end to end on a tiny random model: every rule, what it reads, and its table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench import fidelity_documents, limit_tables, limits
from tests.tiny_model import write


def test_every_rule_has_its_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = {kind: make()[:9000] for kind, make in fidelity_documents.SOURCES.items() if kind != "code"}
    monkeypatch.setattr(fidelity_documents, "SOURCES", {kind: (lambda kind=kind: text[kind]) for kind in text})
    models = [
        str(write(tmp_path / name, seed=seed, head_dim=16, num_hidden_layers=3, max_position_embeddings=4096))
        for seed, name in enumerate(("target", "draft"))
    ]
    out = tmp_path / "limits.jsonl"
    args = ["--model", models[0], "--draft-model", models[1], "--device", "cpu", "--dtype", "float32", "--documents", "2"]
    args += ["--contexts", "1400", "--tokens", "13", "--budget", "160", "--tracks", "chat", "--threads", "1", "--out", str(out)]
    result = CliRunner().invoke(limits.main, args)
    assert result.exit_code == 0, result.output
    made = {row["rule"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert list(made) == list(limits.RULES)
    # Sets of query heads read more together than one of their kv head; a part of the budget each reads less.
    shared = 160 / 1400
    assert made["own by kv head"]["kv_read"] == pytest.approx(shared, rel=0.1)
    assert made["own by head"]["kv_read"] > 1.05 * shared
    assert made["own by head, as much read"]["kv_read"] < shared
    assert made["own by kv head, .8 of the mass"]["kv_read"] < made["own by kv head, .9 of the mass"]["kv_read"]
    assert made["own by head"]["kl"] < made["own by kv head"]["kl"] < made["heuristic"]["kl"]
    monkeypatch.setattr(limit_tables, "LIMITS", out)
    table = limit_tables.limits()
    assert "one a query head, together no larger than one of a kv head" in table and "KV read %" in table
