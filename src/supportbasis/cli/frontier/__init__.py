"""Error against cost of our method and of published ones: what is measured, drawn and said.

``heads``       queries, keys and values of a head; generated heads
``encoder``     the heads of encoders of points, such as tsp50
``language``    the heads of causal language models, such as stories260K
``shipped``     the heads of the models that come with the package
``sources``     what is found in a models folder, and how much is measured
``baselines``   published methods at a given budget
``errors``      errors of all methods on one head
``timing``      plans of Auto and their time beside SDPA
``summary``     medians over heads, the best baseline, keys for a given error
``claims``, ``tables``, ``pictures``   what is made of the numbers
``study``       the command
"""

from __future__ import annotations

from .sources import FULL, QUICK, Extent, Models, frontier_extent
from .study import run_frontier

__all__ = ["FULL", "QUICK", "Extent", "Models", "frontier_extent", "run_frontier"]
