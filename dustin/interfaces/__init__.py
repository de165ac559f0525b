"""What the engine asks of a backend and of its policies: protocols, shapes and contracts, nothing else.

Axes: B sequences, T query rows, R rows that score, S scoring heads, k selected tokens, V vocabulary (METHOD section 2).
An `Array` is opaque to the engine: it is passed from one backend method to another and never indexed. Arrays may be
lazy, on a device, or spread over ranks. Host values (`Sequence[int]`, `Sequence[float]`) go in freely; the only way
out is `Backend.read`, called once a round. A zero in `num_tokens` means: this row takes no part and nothing of it changes.
"""

from dustin.interfaces.backend import Backend, HostVerdict, Measures, RowComparison, TokenLogprobs, Verdict, WarpBatch
from dustin.interfaces.models import (
    Array,
    BegunDrafts,
    BegunForward,
    ChoosingModel,
    CompactModel,
    ForwardAhead,
    ForwardResult,
    GreedyAhead,
    GreedyChain,
    KVCache,
    Model,
    ModelSpec,
    PortableCache,
    Reselection,
    SparseAttention,
    Tap,
    TokenSet,
)
from dustin.interfaces.policies import AcceptanceRule, Drafter, Drafts, RoundState, SelectionContext, SelectionCost, Selector

__all__ = [
    "AcceptanceRule",
    "Array",
    "Backend",
    "BegunDrafts",
    "BegunForward",
    "ChoosingModel",
    "CompactModel",
    "Drafter",
    "Drafts",
    "ForwardAhead",
    "ForwardResult",
    "GreedyAhead",
    "GreedyChain",
    "HostVerdict",
    "KVCache",
    "Measures",
    "Model",
    "ModelSpec",
    "PortableCache",
    "Reselection",
    "RoundState",
    "RowComparison",
    "SelectionContext",
    "SelectionCost",
    "Selector",
    "SparseAttention",
    "Tap",
    "TokenLogprobs",
    "TokenSet",
    "Verdict",
    "WarpBatch",
]
