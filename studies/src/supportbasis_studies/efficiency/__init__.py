"""The paper's figure on time and error against the threshold, and the regimes it leaves out.

``inputs``      the settings: the paper's, and harder ones
``methods``     what is timed: the paper's exact computation, AS23, ours
``rows``        one row for each measurement; errors against float64 on sampled rows
``measure``     the units of the study, each timed in turns with SDPA
``findings``, ``pictures``   what is made of the rows
``study``       the command
"""

from __future__ import annotations

from .inputs import FULL, QUICK, Extent
from .study import run_efficiency

__all__ = ["FULL", "QUICK", "Extent", "run_efficiency"]
