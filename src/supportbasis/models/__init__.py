"""Plans for whole models, in the unit of their prediction.

================  ======================================================================
`planning`        `plan`: the cheapest attention of every head within a limit
`use`             run a model with a plan or a method
`predictions`     run a model on batches, compare what it predicts
`effects`         what a change of a head's output does to the prediction
`ladder`          the settings that a head may get
`evaluation`      `evaluate`: loss, divergence, agreement and copying, beside exact attention
`profiling`       entries, scores and entropy of each head, and what `Auto` would give it
`allocation`      one setting for each head: the least cost or time within the limit
`progress`        a bar
================  ======================================================================
"""

from __future__ import annotations

from ..plans import ModelPlan
from .evaluation import evaluate
from .planning import plan
from .use import use

__all__ = ["ModelPlan", "evaluate", "plan", "use"]
