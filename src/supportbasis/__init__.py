"""Sub-quadratic softmax attention and Gaussian kernel sums with a stated error.

The one idea: a support basis is a list of disjoint components that together cover the score
matrix; each component turns (q, k, v) into partial sums; partial sums add; there is one division.
"""

import gc as _gc

_collects = _gc.isenabled()
_gc.disable()  # a collection would go through all of torch, and find nothing
try:
    from . import analysis, distributed, gradient, integrations, models, nn, sketch
    from .accuracy.certificate import Certificate
    from .api import Result, attention, gaussian_kde, kernel_sum, plan
    from .errors import InputError, SupportBasisError
    from .methods import (
        Auto,
        BlockSupport,
        Exact,
        FittedPolynomial,
        MultiThreshold,
        Polynomial,
        PowerAttention,
        SingleThreshold,
    )
    from .plans import ModelPlan, Plan
except KeyboardInterrupt:  # torch takes seconds to import; half of this package is imported again
    raise KeyboardInterrupt("supportbasis was interrupted while it was imported") from None
finally:
    if _collects:
        _gc.enable()

__version__ = "0.1.0"

__all__ = [
    "Auto", "BlockSupport", "Certificate", "Exact", "FittedPolynomial", "InputError", "ModelPlan",
    "MultiThreshold", "Plan", "Polynomial", "PowerAttention", "Result", "SingleThreshold",
    "SupportBasisError", "analysis", "attention", "distributed", "gaussian_kde", "gradient",
    "integrations", "kernel_sum", "models", "nn", "plan", "sketch",
]  # fmt: skip
