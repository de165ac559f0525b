"""The attention bench: branches of a graph are branches."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

from bench import attention_case


def test_a_fork_to_the_stream_that_launches_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    here, ran = object(), []
    monkeypatch.setattr(attention_case, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: here)
    with pytest.raises(RuntimeError, match="expected a stream to fork to"):
        attention_case.together([lambda: ran.append(1)], [lambda: ran.append(2)], here)()
    assert not ran


@pytest.mark.gpu
def test_streams_of_a_graph_stay_apart_however_many_were_made() -> None:
    made = [attention_case.streams(), *(torch.cuda.Stream() for _ in range(40)), attention_case.streams()]
    assert made[0] == made[-1] and made[0][0] != made[0][1]
    times = attention_case.time_us([attention_case.together([lambda: None], [lambda: None], made[0][1])], 1)
    assert times > 0
