"""Random sketches: powers of inner products in few features, low-rank factors of large matrices."""

from .polysketch import PolySketch, theory_size
from .svd import approximate_svd

__all__ = ["PolySketch", "approximate_svd", "theory_size"]
