"""Traces: what is recorded equals what the engine did, and the page holds it safely and small."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from shutil import which
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dustin.config import EngineOptions, RequestOptions
from dustin.errors import UsageError
from dustin.generation import Session
from dustin.trace import SOURCES, Recorder, Round, Trace, packed, unpacked
from dustin.trace_page import _runs, render
from tests.unit.engine_helpers import VOCAB, backend, draft, target

PROMPT = [int(t) for t in np.random.default_rng(5).integers(0, VOCAB, 90)]
SMALL: dict[str, Any] = {"budget": 24, "num_sink_tokens": 2, "num_recent_tokens": 6, "num_draft_tokens": 4, "exact_block": 8}
REQUEST = RequestOptions(max_tokens=20)


def session(mode: str, drafter: str = "draft", **more: Any) -> Session:
    options = EngineOptions(mode=mode, drafter=drafter, **(SMALL | more))
    return Session(backend, target(), None, options, draft() if drafter == "draft" else None)


def recorded(mode: str, drafter: str = "draft", **more: Any) -> tuple[Trace, Recorder]:
    recorder = Recorder(session(mode, drafter, **more), list(PROMPT), REQUEST)
    return recorder.run(), recorder


@pytest.mark.parametrize(
    ("mode", "drafter"),
    [("sparse", "draft"), ("sparse", "none"), ("rectified", "lookup"), ("exact", "draft"), ("exact", "none"), ("dense", "self")],
)
def test_recording_changes_nothing_and_the_sets_are_the_engines(mode: str, drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = session(mode, drafter).generate(list(PROMPT), REQUEST)
    seen: list[tuple[int, list[int]]] = []
    inner = target().forward

    # What attention is really given, below everything that records.
    def watched(tokens: Any, counts: Any, cache: Any, **options: Any) -> Any:
        chosen = options.get("token_set")
        if chosen is not None:
            seen.append((cache.lengths[0], chosen.indices[0, : chosen.counts[0]].tolist()))
        return inner(tokens, counts, cache, **options)

    monkeypatch.setattr(target(), "forward", watched)
    trace, recorder = recorded(mode, drafter)
    assert trace.tokens[len(PROMPT) :] == plain.tokens
    sparse = [r for r in trace.rounds if r.kept is not None]
    assert sparse and {r.length for r in sparse} == {n for n, _ in seen if n in {r.length for r in sparse}}
    given_sets = {}
    for length, indices in seen:
        given_sets.setdefault(length, []).append(indices)
    for r in sparse:
        assert r.positions in given_sets[r.length]
        assert len(r.positions) == min(24, r.length) and max(r.positions) < r.length
    counted = [r for r in trace.rounds if not r.check]
    # Drafts that a dense check judged count in the statistics alone, where they were put to the test.
    last = recorder.stats.drafted - sum(r.drafted for r in counted), recorder.stats.accepted - sum(r.accepted for r in counted)
    assert 0 <= last[1] <= last[0] and (last == (0, 0) or mode == "exact")
    assert any(r.check for r in trace.rounds) == (mode == "exact")


def test_sources_are_what_the_quota_rule_says() -> None:
    trace, _ = recorded("sparse")
    for r in trace.rounds:
        assert r.kept is not None and set(r.kept) == set(SOURCES)
        assert r.kept["sink"] == [0, 1] and r.kept["recent"] == list(range(r.length - 6, r.length))
        assert len(r.kept["draft"]) == round(0.6 * 16) and len(r.kept["target"]) == 16 - round(0.6 * 16)
    history, _ = recorded("sparse", selector="history")
    assert all(r.kept is not None and not r.kept["draft"] and len(r.kept["target"]) == 16 for r in history.rounds)
    lookahead, _ = recorded("sparse", selector="lookahead")
    assert all(r.kept is not None and not r.kept["target"] and len(r.kept["draft"]) == 16 for r in lookahead.rounds)
    other, _ = recorded("sparse", lookahead_share=0.25)
    assert {len(r.kept["draft"]) for r in other.rounds if r.kept} == {4}


def test_recovery_is_the_share_of_dense_attention_in_the_set() -> None:
    trace, recorder = recorded("sparse", "none")
    recorder.measure_recovery(trace, 100)
    measured = [r for r in trace.rounds if r.recovery is not None]
    assert len(measured) == len(trace.rounds)
    r = measured[-1]
    assert len(r.recovery) == target().spec.num_layers and all(0 < share < 1 for share in r.recovery)
    # The first round has a dense prefix: layer 0 by hand, with the same model on its own.
    first = measured[0]
    fed = trace.tokens[first.length : first.length + 1 + first.accepted]
    store = target().new_cache(1, 200)
    target().forward(backend.tokens([trace.tokens[: first.length]]), [first.length], store, logits="none")
    from dustin.interfaces import Tap

    tap = Tap({0: (0, 1, 2, 3)})
    out = target().forward(backend.tokens([fed]), [len(fed)], store, tap=tap, logits="none")
    mass = backend.score(out.queries, tap, target(), store, [first.length])[0]
    assert first.recovery is not None and abs(first.recovery[0] - mass[first.positions].sum()) < 1e-4
    few, recorder = recorded("sparse", "none")
    recorder.measure_recovery(few, 5)
    assert sum(r.recovery is not None for r in few.rounds) == 5
    assert few.rounds[0].recovery is not None and few.rounds[-1].recovery is not None
    recorder.measure_recovery(few, 0)


def test_a_run_without_a_chosen_set_says_what_to_do() -> None:
    with pytest.raises(UsageError, match="90 tokens and the budget is 400.*--budget"):
        recorded("sparse", budget=400)


def test_an_answer_that_ends_before_a_set_is_chosen_says_so() -> None:
    """Another budget would not help."""
    with pytest.raises(UsageError, match="the answer ended after 1 tokens; give a larger --max-tokens"):
        Recorder(session("sparse"), list(PROMPT), RequestOptions(max_tokens=1)).run()
    with pytest.raises(UsageError, match="and a mode that reads sparsely"):
        recorded("dense", "lookup")


@given(st.lists(st.integers(0, 5000), unique=True))
def test_packed_positions_come_back(positions: list[int]) -> None:
    positions.sort()
    assert unpacked(packed(positions)) == positions


def test_packed_is_what_its_docstring_says() -> None:
    assert packed([4, 5, 6, 9]) == "4~2,3" and packed([]) == "" and packed([0, 1, 40]) == "0~1,13"
    assert _runs([4, 5, 6, 9]) == [(4, 3), (9, 1)]


EVIL = [
    "</script><script>alert(1)</script>", "<!--", "<img src=x onerror=alert(1)>", "\u2028", "&lt;", "]]>", "'\"`${1}", "\ud7ff\x00",
]  # fmt: skip


class _Scripts(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text: list[str] = []
        self.inside: str | None = None

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        if tag == "script":
            self.inside = dict(attrs).get("type") or "code"
            assert "src" not in dict(attrs)

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self.inside = None

    def handle_data(self, data: str) -> None:
        if self.inside == "application/json":
            self.text.append(data)


def a_trace(pieces: list[str], rounds: list[Round], prompt: int, model: str = "m") -> Trace:
    info = {
        "model": model, "draft": None, "mode": "sparse", "drafter": "none", "selector": "dustin", "budget": 4, "num_layers": 2,
        "scoring": "s", "finish_reason": "length", "stats": {},
    }  # fmt: skip
    return Trace(info, list(range(len(pieces))), pieces, prompt, "", rounds)


def test_document_text_cannot_leave_its_place_in_the_page() -> None:
    r = Round(4, {"sink": [0], "recent": [3], "draft": [1], "target": []}, drafted=2, accepted=1, recovery=[0.5, 1.0])
    page = render(a_trace(EVIL, [r], 5, model="<b>evil</b>"))
    parser = _Scripts()
    parser.feed(page)
    assert parser.tags.count("script") == 2 and "img" not in parser.tags and "b" not in parser.tags
    assert json.loads("".join(parser.text))["pieces"] == EVIL
    data = page.split('id="data">')[1].split("</script>")[0]
    assert not set("<>&\u2028") & set(data)
    # Text reaches the page as text: no markup is ever built from strings, and nothing is fetched.
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|fetch\(|XMLHttp|import\(", page)
    assert "default-src 'none'" in page and not re.search(r"(https?:)?//[a-z]", page)


def test_a_long_document_stays_small() -> None:
    rng = np.random.default_rng(0)
    count, budget = 32_768, 1024
    rounds = []
    for k in range(64):
        length = count - 400 + 4 * k
        middle = np.sort(rng.choice(np.arange(4, length - 32), budget - 36, replace=False)).tolist()
        parts = {"sink": [0, 1, 2, 3], "recent": list(range(length - 32, length)), "draft": middle[::2], "target": middle[1::2]}
        rounds.append(Round(length, parts, drafted=5, accepted=3, recovery=[0.987] * 28))
    page = render(a_trace([" word"] * count, rounds, count - 400))
    assert len(page.encode()) < 1_200_000


def shown(trace: Trace, tmp_path: Path) -> str:
    """The page's document after its script has run in a browser."""
    browser = next(filter(None, map(which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium here to show the page with")
    page = tmp_path / "page.html"
    page.write_text(render(trace))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'user'}", "--virtual-time-budget=3000"]
    done = subprocess.run(
        [browser, *flags, "--enable-logging=stderr", "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


def test_a_browser_shows_what_a_dense_round_read(tmp_path: Path) -> None:
    """Every token that was there has a background, in grey; nothing goes wrong in the script."""
    page = shown(a_trace(["a", "b", "c", "d", "e"], [Round(4, None, drafted=2, accepted=1)], 4), tmp_path)
    spans = re.findall(r"<span([^>]*)>[a-e]</span>", page)
    assert len(spans) == 5 and ["background: rgba(" in span for span in spans] == [True] * 4 + [False], spans
    assert "1 of 2 (50 %), 2.00 tokens a round with drafts" in page


def test_a_browser_shows_the_checks_of_mode_exact(tmp_path: Path) -> None:
    """Sparse rounds accept provisionally: their bars would count tokens that the check cut."""
    chosen = {"sink": [0], "recent": [3], "draft": [], "target": []}
    rounds = [Round(4, chosen, drafted=4, accepted=4), Round(4, None, check=True, drafted=5, accepted=1)]
    trace = a_trace(["a", "b", "c", "d", "e", "f"], rounds, 4)
    trace.info["mode"] = "exact"
    page = shown(trace, tmp_path)
    assert "1 of 5 (20 %), 2.00 tokens a dense check" in page and "Provisional tokens kept" in page


def test_the_script_of_the_page_is_valid() -> None:
    node = which("node")
    if node is None:
        pytest.skip("no node here to read the script with")
    page = (Path(sys.modules["dustin"].__file__ or "").parent / "trace_page.html").read_text()
    script = page.split("<script>")[1].split("</script>")[0]
    done = subprocess.run([node, "--check", "-"], input=script, text=True, capture_output=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    unpack = script[script.index("function unpack") : script.index("// A layer with sets")]
    positions = [0, 1, 2, 7, 50, 51, 4000]
    code = unpack + f"console.log(JSON.stringify(Array.from(unpack({json.dumps(packed(positions))}))))"
    done = subprocess.run([node, "-e", code], text=True, capture_output=True, check=True, timeout=60)
    assert json.loads(done.stdout) == positions
    # A layer's own set by source: first and recent tokens are those of the round's set, the others its own queries chose.
    functions = script[script.index("function unpack") : script.index("let sparse")]
    one = {"kept": {"sink": "0~1", "recent": packed([8, 9]), "draft": "4", "target": "5"}}
    one["own"] = {"3": [packed([0, 1, 6, 8, 9]), packed([0, 1, 7, 8])], "4": None}
    code = f"const sources = {json.dumps(SOURCES)}, r = {json.dumps(one)};" + functions
    code += "const made = [[], [3, 0], [3, 1], [4, 0], [5, 0]].map(a => partsOf(r, ...a));"
    code += "console.log(JSON.stringify(made.map(parts => parts && parts.map(part => Array.from(part)))))"
    done = subprocess.run([node, "-e", code], text=True, capture_output=True, check=True, timeout=60)
    shared = [[0, 1], [8, 9], [4], [5]]
    assert json.loads(done.stdout) == [shared, [[0, 1], [8, 9], [], [6]], [[0, 1], [8], [], [7]], None, shared]
