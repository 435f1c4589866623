"""Methods: small objects that say how a support basis is chosen. Every one returns a `HeadPlan`."""

from __future__ import annotations

from .auto import Auto
from .base import Method
from .block_support import BlockSupport
from .exact import Exact
from .fitted import FittedPolynomial
from .multi_threshold import MultiThreshold
from .polynomial import Polynomial
from .power import PowerAttention
from .single_threshold import SingleThreshold

__all__ = [
    "Auto",
    "BlockSupport",
    "Exact",
    "FittedPolynomial",
    "Method",
    "MultiThreshold",
    "Polynomial",
    "PowerAttention",
    "SingleThreshold",
]
