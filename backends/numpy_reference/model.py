"""A decoder of the Llama, Mistral, Qwen2 and Qwen3 family in float64, one token after the other."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dustin.backends.numpy_reference import compact_keys
from dustin.backends.numpy_reference.cache import Cache, Floats, check_lengths
from dustin.backends.numpy_reference.ops import Attention, Ints, reselected, set_of_layer
from dustin.backends.numpy_reference.rope import frequencies, rotate
from dustin.errors import ModelError
from dustin.interfaces import ForwardResult, ModelSpec, Tap, TokenSet


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and switches of a decoder. `windows[i]` is the sliding width of layer i in tokens (None = full attention)."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int = 4096
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    tied_embeddings: bool = False
    attention_softcap: float | None = None
    windows: tuple[int | None, ...] = ()
    architecture: str = "LlamaForCausalLM"

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"num_heads is {self.num_heads}, expected a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ModelError(f"head_dim is {self.head_dim}, expected an even number: RoPE turns pairs")
        if len(self.windows) not in (0, self.num_layers):
            raise ModelError(f"windows has {len(self.windows)} entries, expected one for each of {self.num_layers} layers or none")


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor by its Hugging Face name, with its shape."""
    c = config
    q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c.vocab_size, c.hidden_size)}
    for i in range(c.num_layers):
        layer = f"model.layers.{i}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}{norm}.weight"] = (c.hidden_size,)
        linears = [
            ("self_attn.q_proj", q_size, c.hidden_size, c.qkv_bias),
            ("self_attn.k_proj", kv_size, c.hidden_size, c.qkv_bias),
            ("self_attn.v_proj", kv_size, c.hidden_size, c.qkv_bias),
            ("self_attn.o_proj", c.hidden_size, q_size, c.output_bias),
            ("mlp.gate_proj", c.intermediate_size, c.hidden_size, c.mlp_bias),
            ("mlp.up_proj", c.intermediate_size, c.hidden_size, c.mlp_bias),
            ("mlp.down_proj", c.hidden_size, c.intermediate_size, c.mlp_bias),
        ]
        for name, rows, columns, bias in linears:
            shapes[f"{layer}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{layer}{name}.bias"] = (rows,)
        if c.qk_norm:
            shapes[f"{layer}self_attn.q_norm.weight"] = shapes[f"{layer}self_attn.k_norm.weight"] = (c.head_dim,)
    shapes["model.norm.weight"] = (c.hidden_size,)
    if not c.tied_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    return shapes


def _fingerprint(config: ModelConfig, weights: Mapping[str, Floats]) -> str:
    digest = hashlib.sha256(json.dumps(dataclasses.asdict(config), sort_keys=True).encode())
    for name in sorted(weights):
        digest.update(name.encode() + weights[name].tobytes())
    return digest.hexdigest()


class NumpyModel:
    """Model of dustin.interfaces. Each token of each sequence is computed alone, so a batch equals its singles bit for bit."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Any], name: str = "numpy") -> None:
        """`weights` by Hugging Face name, any float dtype. Raise ModelError on a missing tensor or a wrong shape."""
        shapes = weight_shapes(config)
        for key, shape in shapes.items():
            if key not in weights:
                raise ModelError(f"tensor {key} is missing, expected shape {shape}: the model folder is incomplete")
            if tuple(weights[key].shape) != shape:
                raise ModelError(f"tensor {key} has shape {tuple(weights[key].shape)}, expected {shape}")
        self.config = config
        self.weights: dict[str, Floats] = {key: np.array(weights[key], dtype=np.float64, order="C") for key in shapes}
        self.softcap = config.attention_softcap
        self.scale = config.head_dim**-0.5
        self.compact: compact_keys.CompactKeys | None = None
        self._windows = config.windows or (None,) * config.num_layers
        self._inverse, self._amplitude = frequencies(config.rope_theta, config.head_dim, config.rope_scaling, config.context_length)
        self.spec = ModelSpec(
            name=name,
            architecture=config.architecture,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            context_length=config.context_length,
            dtype="float64",
            fingerprint=_fingerprint(config, self.weights),
            sliding_layers=tuple(i for i, window in enumerate(self._windows) if window),
            bytes_per_kv_token=2 * config.num_layers * config.num_kv_heads * config.head_dim * 8,
            weight_bytes=sum(w.nbytes for w in self.weights.values()),
        )

    def limit_vocabulary(self, size: int) -> None:
        """Logits have the first `size` entries from now on."""
        if not 1 <= size <= self.config.vocab_size:
            raise ValueError(f"size is {size}, expected 1 to {self.config.vocab_size}")
        self.spec = dataclasses.replace(self.spec, vocab_size=size)

    def fit_compact_keys(self, tokens: Sequence[int], rank: int) -> None:
        """See CompactModel.fit_compact_keys. Raise ValueError where there are no tokens."""
        if self.compact is not None and self.compact.rank == rank:
            return
        if not tokens:
            raise ValueError("the text to fit has 0 tokens, expected 1 or more")
        layers = [i for i, window in enumerate(self._windows) if not window]
        cache = self.new_cache(1, len(tokens))
        tap = Tap({layer: tuple(range(self.config.num_heads)) for layer in layers})
        out = self.forward(np.array([list(tokens)]), [len(tokens)], cache, tap=tap, logits="none")
        keys = {layer: cache.keys[layer][0, : len(tokens)] for layer in layers}
        queries = {layer: out.queries[layer][0] for layer in layers}
        self.compact = compact_keys.fit(queries, keys, rank, self._inverse, self.spec.context_length)

    def new_cache(self, batch: int, capacity: int) -> Cache:
        """An empty cache: see Model.new_cache."""
        return Cache(self.config.num_layers, batch, capacity, self.config.num_kv_heads, self.config.head_dim)

    def forward(
        self,
        tokens: Ints,
        num_tokens: Sequence[int],
        cache: Cache,
        *,
        token_set: TokenSet | None = None,
        tap: Tap | None = None,
        logits: str = "all",
    ) -> ForwardResult:
        """See Model.forward. Rows beyond num_tokens[b] come out as 0. Raise ValueError on a bad token, count or set."""
        batch, rows = tokens.shape
        check_lengths("num_tokens", num_tokens, cache.batch, [0] * batch, [rows] * batch)
        cache.check_room(num_tokens)
        if logits not in ("all", "last", "none"):
            raise ValueError(f"logits is {logits!r}, expected all, last or none")
        if tap is not None and (unknown := set(tap.heads) - set(range(self.config.num_layers))):
            raise ValueError(f"tap names layers {sorted(unknown)}, expected 0 to {self.config.num_layers - 1}")
        valid = [(b, t) for b in range(batch) for t in range(num_tokens[b])]
        hidden = np.zeros((batch, rows, self.config.hidden_size))
        for b, t in valid:
            if not 0 <= tokens[b, t] < self.config.vocab_size:
                raise ValueError(f"tokens[{b}, {t}] is {tokens[b, t]}, expected 0 to {self.config.vocab_size - 1}")
            hidden[b, t] = self.weights["model.embed_tokens.weight"][tokens[b, t]]
        queries: dict[int, Floats] = {}
        # What the last layer that chose for itself has chosen, for each kv head or for all.
        chosen: list[TokenSet] = []
        for i in range(self.config.num_layers):
            q, attended, chosen = self._attend(i, hidden, valid, num_tokens, cache, token_set, chosen)
            if tap is not None and i in tap.heads:
                queries[i] = q[:, :, list(tap.heads[i])]
            for b, t in valid:
                layer = f"model.layers.{i}."
                hidden[b, t] += self._linear(f"{layer}self_attn.o_proj", attended[b, t].ravel())
                hidden[b, t] += self._mlp(i, self._norm(f"{layer}post_attention_layernorm", hidden[b, t]))
        cache.advance(num_tokens)
        if tap is not None and tap.last_row_only:
            queries = {i: _last_rows(q, num_tokens) for i, q in queries.items()}
        return ForwardResult(self._logits(hidden, num_tokens, logits), queries)

    def _attend(
        self,
        i: int,
        hidden: Floats,
        valid: list[tuple[int, int]],
        num_tokens: Sequence[int],
        cache: Cache,
        token_set: TokenSet | None,
        before: list[TokenSet],
    ) -> tuple[Floats, Floats, list[TokenSet]]:
        """Queries and attention output of layer i, both [B, T, Hq, D], and what was chosen last (`before`: by an earlier layer);
        writes the layer's K and V behind the valid rows."""
        c, name = self.config, f"model.layers.{i}."
        shape = hidden.shape[:2]
        q = np.zeros((*shape, c.num_heads, c.head_dim))
        k, v = (np.zeros((*shape, c.num_kv_heads, c.head_dim)) for _ in range(2))
        for b, t in valid:
            x = self._norm(f"{name}input_layernorm", hidden[b, t])
            position = cache.lengths[b] + t
            q[b, t] = self._heads(f"{name}self_attn.q", x, position)
            k[b, t] = self._heads(f"{name}self_attn.k", x, position)
            v[b, t] = self._linear(f"{name}self_attn.v_proj", x).reshape(c.num_kv_heads, c.head_dim)
        cache.write(i, num_tokens, k, v)
        attention = Attention(self.scale, self.softcap, self._windows[i])
        chosen = self._chosen(i, q, num_tokens, cache, token_set)
        again = None if token_set is None else token_set.reselection
        read: list[TokenSet | None] = [set_of_layer(token_set, i)]
        if chosen:
            read = list(chosen)
        elif again is not None and again.reuse and before and read[0] is token_set:
            read = list(before)
        if len(read) == 1:
            return q, attention(q, cache, i, cache.lengths, num_tokens, read[0]), chosen or before
        parts = []
        for kv, one in enumerate(read):
            mine = np.split(q, c.num_kv_heads, axis=2)[kv]
            parts.append(attention(mine, cache.of_kv_head(i, kv), i, cache.lengths, num_tokens, one))
        return q, np.concatenate(parts, axis=2), chosen or before

    def _chosen(
        self, i: int, q: Floats, num_tokens: Sequence[int], cache: Cache, token_set: TokenSet | None
    ) -> list[TokenSet]:
        """The sets that layer i chooses itself: one for all kv heads, or for each; none where it does not."""
        c, again = self.config, None if token_set is None else token_set.reselection
        if token_set is None or again is None or i not in again.heads:
            return []
        parts = again.of_kv_heads(i, c.num_heads, c.num_kv_heads) if again.by_kv_head else [again]
        how = (num_tokens, self.scale, self.softcap, self.compact)
        made = [reselected(dataclasses.replace(token_set, reselection=part), q, cache, i, *how) for part in parts]
        return [one for one in made if one is not None]

    def chosen_sets(
        self, queries: Mapping[int, Floats], num_tokens: Sequence[int], cache: Cache, token_set: TokenSet
    ) -> dict[int, list[TokenSet]]:
        """See ChoosingModel."""
        made = {layer: self._chosen(layer, q, num_tokens, cache, token_set) for layer, q in queries.items()}
        return {layer: sets for layer, sets in made.items() if sets}

    def _heads(self, name: str, x: Floats, position: int) -> Floats:
        """Projected, normed (QK-norm) and turned heads [H, D] of one token."""
        heads = self._linear(f"{name}_proj", x).reshape(-1, self.config.head_dim)
        if self.config.qk_norm:
            heads = self._norm(f"{name}_norm", heads)
        return rotate(heads, position, self._inverse, self._amplitude)

    def _linear(self, name: str, x: Floats) -> Floats:
        out = self.weights[f"{name}.weight"] @ x
        return out + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else out

    def _norm(self, name: str, x: Floats) -> Floats:
        mean_square = (x * x).mean(axis=-1, keepdims=True)
        return x / np.sqrt(mean_square + self.config.rms_norm_eps) * self.weights[f"{name}.weight"]

    def _mlp(self, i: int, x: Floats) -> Floats:
        name = f"model.layers.{i}.mlp."
        gate = self._linear(f"{name}gate_proj", x)
        return self._linear(f"{name}down_proj", gate / (1 + np.exp(-gate)) * self._linear(f"{name}up_proj", x))

    def _logits(self, hidden: Floats, num_tokens: Sequence[int], wanted: str) -> Floats | None:
        if wanted == "none":
            return None
        kept, counts = hidden, num_tokens
        if wanted == "last":
            kept, counts = _last_rows(hidden, num_tokens), [min(n, 1) for n in num_tokens]
        head = "model.embed_tokens.weight" if self.config.tied_embeddings else "lm_head.weight"
        out = np.zeros((*kept.shape[:2], self.spec.vocab_size))
        for b, count in enumerate(counts):
            for t in range(count):
                out[b, t] = self.weights[head][: self.spec.vocab_size] @ self._norm("model.norm", kept[b, t])
        return out


def _last_rows(x: Floats, num_tokens: Sequence[int]) -> Floats:
    """[B, 1, ...]: row num_tokens[b]-1 of each sequence (row 0 where there is none)."""
    return np.stack([x[b, max(n - 1, 0)][None] for b, n in enumerate(num_tokens)])


def random_model(config: ModelConfig, seed: int = 0) -> NumpyModel:
    """A model with random weights: variance 1/fan-in, norms near 1, embeddings of unit size. Same seed, same model."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in weight_shapes(config).items():
        if "norm" in name:
            weights[name] = 1 + 0.1 * rng.standard_normal(shape)
        elif name.endswith("bias"):
            weights[name] = 0.1 * rng.standard_normal(shape)
        elif name == "model.embed_tokens.weight":
            weights[name] = rng.standard_normal(shape)
        else:
            weights[name] = rng.standard_normal(shape) / np.sqrt(shape[-1])
    return NumpyModel(config, weights, name=f"random-{seed}")
