"""Published approximations of attention, written from their papers, at a given cost.

All of them take a budget, choose their own sizes so that everything they do costs no more, and
give the output at sampled rows: causal or not, scale 1/√d, float32, on any device.
"""

from __future__ import annotations

from .blocks import antidiagonals, centroids, oracle, top_blocks
from .common import Answer, Baseline, Case
from .features import performer
from .landmarks import nystrom
from .sampling import hyper
from .windows import random_blocks, window

BASELINES: dict[str, Baseline] = {
    "top blocks (MInference)": top_blocks,
    "top blocks (XAttention)": antidiagonals,
    "top blocks + centroids (PISA)": centroids,
    "LSH + sampling (HyperAttention)": hyper,
    "random features (Performer)": performer,
    "landmarks (Nyström)": nystrom,
    "window + sinks (Longformer)": window,
    "window + random (BigBird)": random_blocks,
}
ORACLES: dict[str, Baseline] = {"top blocks, oracle": oracle}  # no method: what dropping allows

__all__ = ["BASELINES", "ORACLES", "Answer", "Baseline", "Case"]
