"""The settings of the study, and how much of it is run."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..comparison.settings import (
    DIM,
    OUTLIER_FACTOR,
    OUTLIER_SHARE,
    SIGMA,
    Setting,
    gaussian,
    outliers,
)

SCALES = {"1/√d": 1 / math.sqrt(DIM), "1/d": 1 / DIM}
EXPERIMENTS, THEORY = SCALES  # where the paper uses them
PAPER_SIGMA = SIGMA**2  # of the scores with 1/√d: d·s⁴/d under the root


@dataclass(frozen=True)
class Extent:
    """How long the inputs are and what is measured on them."""

    lengths: tuple[int, ...]
    steps: int  # thresholds between the paper's ends
    together: int  # thresholds timed in one unit
    budget: float  # seconds of timing for each unit
    map_lengths: tuple[int, ...]
    sigmas: tuple[float, ...]  # standard deviations of the scores
    authors: tuple[int, int]  # tokens and steps of the authors' script

    @property
    def thresholds(self) -> list[float]:
        """Evenly spaced from 0.15 to 0.5, both included."""
        low, high = 0.15, 0.5
        return [round(low + (high - low) * i / (self.steps - 1), 4) for i in range(self.steps)]


FULL = Extent(
    lengths=(8192, 16384, 24576, 32768),
    steps=30,
    together=10,
    budget=3.0,
    map_lengths=(8192, 16384, 32768, 65536, 131072),
    sigmas=(PAPER_SIGMA, 0.1, 0.3, 1.0, 2.0),
    authors=(4096, 30),
)
QUICK = Extent(
    lengths=(2048, 8192),
    steps=8,
    together=8,
    budget=0.5,
    map_lengths=(4096, 16384),
    sigmas=(PAPER_SIGMA, 0.1, 1.0),
    authors=(1024, 8),
)


def paper_setting(n: int, scale: str, seed: int) -> Setting:
    """Q, K ~ N(0, 0.1²), V ~ N(0, 1), which the paper leaves open."""
    return replace(gaussian(n, seed), scale=SCALES[scale])


def harder_setting(n: int, sigma: float, has_outliers: bool, seed: int) -> Setting:
    """Scores of standard deviation ``sigma``, before 1 % of queries and keys are made longer."""
    setting = (outliers if has_outliers else gaussian)(n, seed)
    factor = math.sqrt(sigma) / SIGMA
    text = f"Q and K from N(0, {math.sqrt(sigma):.3g}²)"
    if has_outliers:
        text += f", {100 * OUTLIER_SHARE:g} % of both × {OUTLIER_FACTOR:g}"
    query, key = setting.query * factor, setting.key * factor
    return replace(setting, query=query, key=key, description=text)
