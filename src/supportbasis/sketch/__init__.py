"""Random sketches: powers of inner products in few features, low-rank factors of large matrices.

================  ========================================================================
`polysketch`      `PolySketch`: sketches of p-fold tensor powers
`svd`             `approximate_svd` by CountSketches
`draws`           seeded random numbers, the same on every device
================  ========================================================================
"""

from .polysketch import PolySketch, theory_size
from .svd import approximate_svd

__all__ = ["PolySketch", "approximate_svd", "theory_size"]
