"""What is lost by sharing, by predicting and by the budget: attention in plain torch, in which any rule may choose the keys.

Neither our kernels nor our caches take part: weights are the torch backend's, prompts are read by torch's own attention, and the
rows of a round see whatever keys a rule leaves them, down to sets of single query heads. So it also judges the numbers of
`python -m bench fidelity` by other means. Documents and traces are those of that bench. Rows go to bench/results/limits.jsonl.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import click
import torch
import torch.nn.functional as F

from bench import rows
from bench.cpu import repetition
from bench.fidelity_documents import TASKS, make, suffix
from dustin.backends.torch_triton import rope
from dustin.replay import HARD_GAP
from dustin.scoring import heuristic

OUT = rows.RESULTS / "limits.jsonl"
SINKS, RECENT, SHARE = 4, 32, 0.6
# Sets by mass hold at most this many budgets.
MASS_BUDGETS = 4
# Rows of the prompt's end that are read as a round is.
ENDING = 16
_NONE = float("-inf")
RULES = (
    "heuristic", "oracle", "own by layer", "own by kv head", "own by head", "oracle by layer", "own by head, as much read",
    "own by kv head, .8 of the mass", "own by kv head, .9 of the mass", "own by kv head, first row",
)  # fmt: skip
Keep = Callable[[int, torch.Tensor], torch.Tensor | None]


class Plain:
    """A decoder over B sequences; keys and values [B, Hkv, Nmax, D] a layer, in bf16 on a GPU, else fp32."""

    def __init__(self, model: Any, batch: int, capacity: int) -> None:
        c = model.config
        self.config, self.weights = c, model.weights
        self.dtype, self.device = model.weights.embedding.dtype, model.weights.embedding.device
        inverse, self.amplitude = rope.frequencies(c.rope_theta, c.head_dim, c.rope_scaling, c.context_length)
        self.inverse, self.head = inverse.to(self.device), model.weights.head.weight[: model.spec.vocab_size]
        self.half = self.dtype == torch.bfloat16 and self.device.type == "cuda"
        shape, dtype = (batch, c.num_kv_heads, capacity, c.head_dim), torch.bfloat16 if self.half else torch.float32
        made = [[torch.zeros(shape, device=self.device, dtype=dtype) for _ in range(c.num_layers)] for _ in range(2)]
        self.keys, self.values = made
        self.group, self.scale = c.num_heads // c.num_kv_heads, c.head_dim**-0.5

    def only(self, b: int) -> Plain:
        """Sequence b alone (views)."""
        other = object.__new__(Plain)
        other.__dict__.update(self.__dict__)
        other.keys, other.values = [k[b : b + 1] for k in self.keys], [v[b : b + 1] for v in self.values]
        return other

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.rms_norm_eps)

    def _project(self, layer: Any, hidden: torch.Tensor, turn: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        heads, both = self.config.num_heads, self.config.num_heads + self.config.num_kv_heads
        qkv = F.linear(self._norm(hidden, layer.input_norm), layer.qkv.weight, layer.qkv.bias)
        qkv = qkv.view(len(hidden), -1, self.config.head_dim)
        qk = rope.rotate(qkv[:, :both], *turn)
        return qk[:, :heads], qk[:, heads:], qkv[:, both:]

    def _rest(self, layer: Any, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        hidden = hidden + F.linear(attended.to(self.dtype), layer.output.weight, layer.output.bias)
        parts = []
        for part in hidden.split(4096):
            gate, up = F.linear(self._norm(part, layer.mlp_norm), layer.gate_up.weight, layer.gate_up.bias).chunk(2, -1)
            parts.append(part + F.linear(F.silu(gate) * up, layer.down.weight, layer.down.bias))
        return torch.cat(parts)

    def read(self, b: int, ids: Sequence[int]) -> None:
        """A prompt's rows of sequence b, in one causal pass."""
        tokens, at = torch.tensor(list(ids), device=self.device), torch.arange(len(ids), device=self.device)
        turn, hidden = rope.table(at, self.inverse, self.amplitude), F.embedding(tokens, self.weights.embedding)
        for i, layer in enumerate(self.weights.layers):
            q, k, v = (x.transpose(0, 1) for x in self._project(layer, hidden, turn))
            self.keys[i][b, :, : len(ids)], self.values[i][b, :, : len(ids)] = k, v
            k, v = (x.repeat_interleave(self.group, 0)[None] for x in (k, v))
            out = F.scaled_dot_product_attention(q[None], k, v, is_causal=True, scale=self.scale)
            hidden = self._rest(layer, hidden, out[0].transpose(0, 1).reshape(len(ids), -1))

    def forward(self, tokens: torch.Tensor, start: torch.Tensor, keep: Keep | None, seen: dict[int, torch.Tensor]) -> torch.Tensor:
        """Logits [B, T, V] fp32 of tokens [B, T] at start[b]...; `keep(layer, logits)` gives the committed keys that are read,
        [B, Hkv or 1, g or 1, n] bool. `seen` gets the queries [B, Hkv, g, T, D] of every layer."""
        batch, height = tokens.shape
        c, at = self.config, start[:, None] + torch.arange(height, device=self.device)
        turn, hidden = rope.table(at.flatten(), self.inverse, self.amplitude), F.embedding(tokens.flatten(), self.weights.embedding)
        sequence = torch.arange(batch, device=self.device)[:, None].expand(batch, height)
        for i, layer in enumerate(self.weights.layers):
            q, k, v = self._project(layer, hidden, turn)
            for store, new in ((self.keys[i], k), (self.values[i], v)):
                store[sequence, :, at] = new.view(batch, height, c.num_kv_heads, -1).to(store.dtype)
            seen[i] = q.view(batch, height, c.num_kv_heads, self.group, c.head_dim).permute(0, 2, 3, 1, 4).float()
            out = self._attend(i, seen[i], start, keep)
            hidden = self._rest(layer, hidden, out.permute(0, 3, 1, 2, 4).reshape(batch * height, -1))
        return F.linear(self._norm(hidden, self.weights.norm), self.head).float().view(batch, height, -1)

    def logits(self, layer: int, q: torch.Tensor, end: int) -> torch.Tensor:
        """[B, Hkv, g, T, end] of q [B, Hkv, g, T, D] against the first `end` keys."""
        return self._product(q.flatten(2, 3), self.keys[layer], end, True).mul_(self.scale).view(*q.shape[:4], end)

    def mass(self, layer: int, q: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        """[B, Hkv, g, n]: mean over rows of the softmax over committed keys."""
        s = self.logits(layer, q, int(start.max()))
        return torch.softmax(s.masked_fill_(~_before(start, s.shape[-1], 5), _NONE), -1).mean(3)

    def _attend(self, layer: int, q: torch.Tensor, start: torch.Tensor, keep: Keep | None) -> torch.Tensor:
        height = q.shape[3]
        end = int(start.max()) + height
        s = self.logits(layer, q, end)
        committed = _before(start, end, 5)
        at = torch.arange(end, device=q.device)
        first = start.view(-1, 1, 1, 1, 1)
        flight = (at >= first) & (at <= first + torch.arange(height, device=q.device)[:, None])
        kept = None if keep is None else keep(layer, s)
        if kept is not None:
            committed = committed & F.pad(kept, (0, end - kept.shape[-1])).unsqueeze(-2)
        p = torch.softmax(s.masked_fill_(~(committed | flight), _NONE), -1)
        return self._product(p.flatten(2, 3), self.values[layer], end, False).view(q.shape)

    def _product(self, x: torch.Tensor, store: torch.Tensor, end: int, turned: bool) -> torch.Tensor:
        """x [B, Hkv, m, .] times the first `end` rows of a store (turned: D is summed over), fp32."""
        if not self.half:
            y = store[:, :, :end]
            return x @ (y.transpose(2, 3) if turned else y)
        y = store.flatten(0, 1)[:, :end] if store.is_contiguous() else store[:, :, :end].reshape(-1, end, store.shape[3])
        y = y.transpose(1, 2) if turned else y
        return torch.bmm(x.flatten(0, 1).to(y.dtype), y, out_dtype=torch.float32).unflatten(0, x.shape[:2])


def _before(start: torch.Tensor, width: int, dims: int) -> torch.Tensor:
    return torch.arange(width, device=start.device) < start.view(-1, *[1] * (dims - 1))


def choose(target: torch.Tensor | None, draft: torch.Tensor | None, start: torch.Tensor, budget: int) -> torch.Tensor:
    """The quota rule on scores [B, ..., n]: bool of the same shape."""
    scores = [x for x in (draft, target) if x is not None]
    inside = _before(start, scores[0].shape[-1], scores[0].dim())
    at = torch.arange(scores[0].shape[-1], device=start.device)
    kept = inside & ((at < SINKS) | (at >= start.view(-1, *[1] * (scores[0].dim() - 1)) - RECENT))
    kept = kept.expand(scores[0].shape).clone()
    rest = budget - SINKS - RECENT
    by_draft = round(SHARE * rest) if len(scores) == 2 else rest
    for x, count in zip(scores, (by_draft, rest - by_draft), strict=False):
        best = x.masked_fill(kept | ~inside, _NONE).topk(min(count, x.shape[-1]), -1, sorted=False).indices
        kept |= torch.zeros_like(kept).scatter_(-1, best, True)
    return kept & inside


def by_mass(scores: torch.Tensor, start: torch.Tensor, most: int, share: float) -> torch.Tensor:
    """Of the `most` best by scores [B, ..., n] the fewest that hold `share` of all, and what `choose` protects."""
    best, at = scores.sort(-1, descending=True)
    count = (best.cumsum(-1) < share * best.sum(-1, keepdim=True)).sum(-1, keepdim=True) + 1
    fewest = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, at, torch.arange(scores.shape[-1], device=at.device) < count)
    protected = choose(scores, None, start, SINKS + RECENT)
    return choose(scores, None, start, most) & (fewest | protected)


class Study:
    """Known continuations of B sequences in rounds of T rows, read by dense attention once and then by rules."""

    def __init__(
        self,
        models: Sequence[Plain],
        start: torch.Tensor,
        texts: Sequence[Sequence[int]],
        valid: Sequence[int],
        height: int,
        history: dict[int, torch.Tensor],
    ) -> None:
        self.target, self.draft, self.start, self.height, self.history = models[0], models[1:], start, height, history
        self.count = (min(len(text) for text in texts) - 1) // height
        self.tokens = torch.tensor([list(text[: self.count * height + 1]) for text in texts], device=start.device)
        self.reference: list[torch.Tensor] = []
        self.queries: list[dict[int, torch.Tensor]] = []
        self.ahead: list[dict[int, torch.Tensor]] = []
        for i in range(self.count):
            seen: dict[int, torch.Tensor] = {}
            self.reference.append(self.target.forward(self.fed(i), self.at(i), None, seen))
            self.queries.append(seen)
            for draft in self.draft:
                seen = {}
                draft.forward(self.fed(i), self.at(i), None, seen)
                self.ahead.append({layer: q[:, :, :, : height - 1] for layer, q in seen.items()})
        place = torch.arange(self.count * height, device=start.device).view(self.count, 1, height)
        self.valid = (place + 1 < torch.tensor(list(valid), device=start.device).view(1, -1, 1)).expand(-1, len(texts), -1)

    def fed(self, i: int) -> torch.Tensor:
        """The tokens of round i."""
        return self.tokens[:, i * self.height : (i + 1) * self.height]

    def at(self, i: int) -> torch.Tensor:
        """Where round i starts."""
        return self.start + i * self.height

    def rule(self, name: str, budget: int, scoring: Any, i: int, last: dict[int, torch.Tensor]) -> Keep | None:
        """What round i reads; `last` are the queries of the round before, or the prompt's."""
        target, start = self.target, self.at(i)
        layers = range(target.config.num_layers)
        if name == "dense":
            return None
        if name.startswith("own"):
            level, _, how = name.partition(", ")
            axes = {"own by layer": (1, 2), "own by kv head": (2,), "own by head": ()}[level]
            group = target.config.num_heads // target.config.num_kv_heads

            def own(layer: int, s: torch.Tensor) -> torch.Tensor:
                s = s[..., : int(start.max())]
                p = torch.softmax(s.masked_fill(~_before(start, s.shape[-1], 5), _NONE), -1)
                p = p[:, :, :, :1].mean(3) if how == "first row" else p.mean(3)
                p = p.mean(axes, keepdim=True) if axes else p
                if how.endswith("of the mass"):
                    return by_mass(p, start, MASS_BUDGETS * budget, float(how.split()[0]))
                return choose(p, None, start, budget // group if how == "as much read" else budget)

            return own
        if name == "oracle by layer":
            masses = [target.mass(layer, self.queries[i][layer], start).mean((1, 2)) for layer in layers]
            return lambda layer, s: choose(masses[layer], None, start, budget)[:, None, None]
        if name == "oracle":
            mean = sum(target.mass(layer, self.queries[i][layer], start).mean((1, 2)) for layer in layers)
            shared = choose(mean, None, start, budget)  # type: ignore[arg-type]
        else:
            seen = [target.mass(layer, last[layer], start).mean((1, 2)) for layer in scoring.target.heads]
            drafts = [d.mass(layer, self.ahead[i][layer], start).mean((1, 2)) for d in self.draft for layer in scoring.draft.heads]
            shared = choose(sum(seen), sum(drafts) if drafts else None, start, budget)  # type: ignore[arg-type]
        return lambda layer, s: shared[:, None, None]

    def run(self, name: str, budget: int, scoring: Any) -> dict[str, Any]:
        """The numbers of one rule."""
        last, parts, read = self.history, [], list[float]()
        for i in range(self.count):
            seen: dict[int, torch.Tensor] = {}
            keep = self.rule(name, budget, scoring, i, last)
            counted = None if keep is None else partial(_counted, keep, float(self.at(i).float().mean()), read)
            out = self.target.forward(self.fed(i), self.at(i), counted, seen)
            last = {layer: q[:, :, :, -1:] for layer, q in seen.items()}
            parts.append(compared(self.reference[i], out, self.tokens[:, i * self.height + 1 : (i + 1) * self.height + 1]))
        kl, same, gap, loss = (torch.stack(x).double() for x in zip(*parts, strict=True))
        keep = self.valid
        each = [[round(float(x[:, b][keep[:, b]].mean()), 4) for x in (same, kl)] for b in range(keep.shape[1])]
        return {
            "kv_read": round(sum(read) / len(read), 5) if read else 1.0,
            "agreement": round(float(same[keep].mean()), 5),
            "hard_flips": round(float(((same < 1) & (gap > HARD_GAP))[keep].double().mean()), 5),
            "kl": round(float(kl[keep].mean()), 5),
            "perplexity_ratio": round(float(loss[keep].mean().exp()), 5),
            "rows": int(keep.sum()),
            "by_document": each,
        }

    def self_agreement(self) -> float:
        """Share of rows whose dense best token is the next one: on dense attention's own answers, read one token at a time, what
        is missing to 1 is the noise of batch shapes."""
        best = torch.stack([x.argmax(-1) for x in self.reference])
        following = self.tokens[:, 1:].unflatten(1, (self.count, self.height)).transpose(0, 1)
        return float((best == following)[self.valid].double().mean())


def _counted(keep: Keep, length: float, read: list[float], layer: int, s: torch.Tensor) -> torch.Tensor | None:
    """What `keep` leaves of a layer; the share of its keys that kv heads read goes to `read`."""
    kept = keep(layer, s)
    read.append(1.0 if kept is None else float(kept.any(2).sum(-1).float().mean()) / length)
    return kept


def compared(reference: torch.Tensor, logits: torch.Tensor, following: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """KL, same best token, dense attention's top-2 gap, and what the following token lost, [B, T] each."""
    p, q = torch.log_softmax(reference, -1), torch.log_softmax(logits, -1)
    best = reference.topk(2, -1).values
    lost = (p - q).gather(-1, following[..., None])[..., 0]
    same = (reference.argmax(-1) == logits.argmax(-1)).float()
    return (p.exp() * (p - q)).sum(-1), same, best[..., 0] - best[..., 1], lost


@click.command()
@click.option("--model", default="Qwen2.5-Coder-1.5B-Instruct-eval", show_default=True)
@click.option("--draft-model", default="Qwen2.5-Coder-0.5B-Instruct-eval", show_default=True)
@click.option("--contexts", default="32000,16384,8192", show_default=True, help="Tokens of the documents' prefixes.")
@click.option("--documents", default=12, show_default=True)
@click.option("--tokens", default=193, show_default=True)
@click.option("--budget", default=1024, show_default=True)
@click.option("--tracks", default="chat,text", show_default=True)
@click.option("--rules", default="|".join(RULES), show_default=True, help="With | between.")
@click.option("--gamma", default=5, show_default=True)
@click.option("--seconds", default=3600.0, show_default=True, help="Leave out what does not fit in this time, loading included.")
@click.option("--seed", default=0, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--device", default="auto", show_default=True)
@click.option("--dtype", default="auto", show_default=True)
@click.option("--out", default=str(OUT), show_default="bench/results/limits.jsonl")
def main(**opts: Any) -> None:
    """Sharing, prediction and budget, each by itself."""
    from pathlib import Path

    from dustin.generation import load

    torch.set_num_threads(opts["threads"])
    torch.backends.cuda.matmul.allow_tf32 = False
    deadline = time.perf_counter() + opts["seconds"]
    session = load(opts["model"], opts["draft_model"] or None, device=opts["device"], dtype=opts["dtype"])
    contexts = [int(part) for part in opts["contexts"].split(",")]
    documents = make(session.tokenizer, sorted(contexts), opts["documents"], opts["tokens"] + 8, opts["seed"])
    scoring = heuristic(session.target.spec, session.draft.spec if session.draft else None)
    out = Path(opts["out"])
    out.unlink(missing_ok=True)
    base = {
        "bench": "limits", "device": session.backend.device, "model": session.target.spec.name, "num_draft_tokens": opts["gamma"],
        "draft": session.draft.spec.name if session.draft else None, "dtype": session.target.spec.dtype, "budget": opts["budget"],
        "seed": opts["seed"], "command": rows.command(), "commit": rows.commit(),
        "card": torch.cuda.get_device_name() if session.backend.device == "cuda" else rows.processor(),
    }  # fmt: skip
    with torch.inference_mode():
        for track in opts["tracks"].split(","):
            for context in contexts:
                if time.perf_counter() > deadline:
                    click.echo(f"out of time: {context} {track}", err=True)
                    continue
                study, repeated = _study(session, documents, context, track, opts)
                noise = study.self_agreement() if track == "chat" else None
                about = {"context": context, "track": track, "dense_self_agreement": noise, "repeated_4grams": repeated}
                for name in opts["rules"].split("|"):
                    if time.perf_counter() > deadline:
                        click.echo(f"out of time: {context} {track} {name}", err=True)
                        break
                    numbers = study.run(name, opts["budget"], scoring)
                    kinds = [document.kind for document in documents]
                    where = [[kind, *values] for kind, values in zip(kinds, numbers.pop("by_document"), strict=True)]
                    rows.write(out, [base | about | {"rule": name} | numbers | {"by_document": where}], append=True)
                    shown = " ".join(f"{key} {numbers[key]:.4f}" for key in ("agreement", "hard_flips", "kl", "perplexity_ratio"))
                    click.echo(f"{context} {track} {name:<16} {shown} noise {noise}", err=True)


def _study(session: Any, documents: Sequence[Any], context: int, track: str, opts: dict[str, Any]) -> tuple[Study, float]:
    """The traces of one context and track, and the share of repeated 4-grams in the continuations."""
    count, tokens = len(documents), opts["tokens"]
    models = [Plain(m, count, context + tokens + 128) for m in (session.target, session.draft) if m is not None]
    for model in models:
        for b, document in enumerate(documents):
            model.read(b, document.prefix(context - ENDING))
    tails = [document.tokens[context - ENDING : context] for document in documents]
    if track == "chat":
        tails = [[*tail, *suffix(session.tokenizer, TASKS[d.kind])] for tail, d in zip(tails, documents, strict=True)]
    history, first = [], []
    for place, model in enumerate(models):
        for b, tail in enumerate(tails):
            seen: dict[int, torch.Tensor] = {}
            fed, start = torch.tensor([tail], device=model.device), torch.tensor([context - ENDING], device=model.device)
            logits = model.only(b).forward(fed, start, None, seen)
            if place == 0:
                history.append({layer: q[:, :, :, -1:] for layer, q in seen.items()})
                first.append(int(logits[0, -1].argmax()))
    start = torch.tensor([context - ENDING + len(tail) for tail in tails], device=models[0].device)
    joined = {layer: torch.cat([part[layer] for part in history]) for layer in history[0]}
    if track == "text":
        texts = [document.tokens[context : context + tokens] for document in documents]
        valid = [tokens] * count
    else:
        texts = [[token] for token in first]
        for step in range(tokens - 1):
            fed = torch.tensor([[text[-1]] for text in texts], device=models[0].device)
            for text, best in zip(texts, models[0].forward(fed, start + step, None, {})[:, 0].argmax(-1).tolist(), strict=True):
                text.append(best)
        eos = frozenset(session.tokenizer.eos_ids)
        valid = [max(8, next((i for i, token in enumerate(text) if token in eos), len(text))) for text in texts]
    repeated = round(sum(repetition(text) for text in texts) / count, 3)
    return Study(models, start, texts, valid, opts["gamma"] + 1, joined), repeated
