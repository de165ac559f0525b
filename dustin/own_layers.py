"""Calibration of the few layers that choose sets of their own beside the shared one.

Most layers are served well by one set; a few are not, and make up much of the loss. Chosen by compact keys, a layer's own sets cost
hundredths of what scoring reads, and the time of one more selection: few are tried, and each has to be worth it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dustin.interfaces import CompactModel
from dustin.scoring import FEW_LAYERS, full_layers, with_own_sets
from dustin.selection import largest_rank

if TYPE_CHECKING:
    from dustin.calibration import Calibrator, Trial

# The share by which a layer has to lower KL: it costs time in every round.
WORTHWHILE = 0.08
# Layers that are best alone, which are tried beside the first.
PROMISING = 8


def search(calibrator: Calibrator, best: Trial) -> Trial:
    """`best` with the layers whose own sets lower KL at equal bytes; as it is where the target keeps no compact keys."""
    spec = calibrator.target.spec
    rank = largest_rank(spec)
    if not rank or calibrator.tokenizer is None or not isinstance(calibrator.target, CompactModel):
        return best
    layers = full_layers(spec)
    for number in range(FEW_LAYERS):
        have = list(best.scoring.reselection.heads)
        tried = [(layer, with_own_sets(best.scoring, spec, [*have, layer], rank)) for layer in layers if layer not in have]
        found = calibrator.best(best, [scoring for _, scoring in tried], f"layer {number + 1} with its own sets", WORTHWHILE)
        ranked = sorted((calibrator.kl_of(scoring), layer) for layer, scoring in tried)
        if not number:
            calibrator.single["own sets"] = {str(layer): round(kl, 4) for kl, layer in ranked if kl < float("inf")}
        if found is best:
            break
        best, layers = found, [layer for _, layer in ranked[:PROMISING]]
    return best
