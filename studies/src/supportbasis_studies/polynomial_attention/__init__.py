"""The study of polynomial attention: what is measured, drawn and said about it.

``inputs``      what is drawn at random, and how much of the study is run
``variants``    what is compared with softmax
``dense``       whole weight matrices in float64, and their errors in four norms
``errors``      part 1: one polynomial, one power, several; does bucketing help?
``buying``      part 2: what buckets buy in power, in sketch size and in time
``sketching``   part 3: the error of sketched powers, measured and predicted
``timing``      parts 4 and 5: time against length, entries, buckets and sketch size
``pictures``, ``tables``, ``findings``   what is made of the numbers
``study``       the command
"""

from __future__ import annotations

from .inputs import FULL, QUICK, Extent
from .study import run_study

__all__ = ["FULL", "QUICK", "Extent", "run_study"]
