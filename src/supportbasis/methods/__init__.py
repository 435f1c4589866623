"""Methods: small objects that plan heads. Every one returns a `HeadPlan` for a head.

====================  ====================================================================
`base`                `Method`, and what all methods share; `Exact`: softmax attention
`planning`            from a problem and a method to a plan, for any batch
`auto`                the fastest method within a tolerance
`polynomial`          one polynomial for all scores
`single_threshold`    large tokens exactly, a polynomial for the rest
`multi_threshold`     buckets by size, a power of a polynomial for each pair
`power`               polynomial attention
`fitted`              a polynomial fitted to the scores
`block_support`       lists of exact and tilted keys; `list_search`: how long they are
====================  ====================================================================
"""

from __future__ import annotations

from .auto import Auto
from .base import Exact, Method
from .block_support import BlockSupport
from .fitted import FittedPolynomial
from .multi_threshold import MultiThreshold
from .polynomial import Polynomial
from .power import PowerAttention
from .single_threshold import SingleThreshold

__all__ = ["Auto", "BlockSupport", "Exact", "FittedPolynomial", "Method", "MultiThreshold",
           "Polynomial", "PowerAttention", "SingleThreshold"]  # fmt: skip
