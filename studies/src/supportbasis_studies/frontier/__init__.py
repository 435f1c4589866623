"""Error against cost and time of our methods and of published ones.

``heads``       queries, keys and values of a head; generated heads
``encoder``     the heads of encoders of points, such as tsp50
``language``    the heads of causal language models, as they read a text
``shipped``     the heads of the models that come with the package
``sources``     which models there are, and how much is measured
``baselines``   published methods at a given budget
``measure``     errors, costs and times of all methods on heads of one layer
``summary``     medians over heads, the best baseline
``findings``, ``pictures``   what is made of the rows
``study``       the command
"""

from __future__ import annotations

from .heads import parse_heads
from .sources import FULL, QUICK, Extent, Models, frontier_extent, parse_lengths
from .study import Wish, run_frontier

__all__ = [
    "FULL",
    "QUICK",
    "Extent",
    "Models",
    "Wish",
    "frontier_extent",
    "parse_heads",
    "parse_lengths",
    "run_frontier",
]
