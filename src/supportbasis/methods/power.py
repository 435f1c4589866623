"""Polynomial attention: a power of the score instead of its exponential (Definition A.8)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import InputError
from ..plans import PowerHead
from ..plans.cost import power_work, work_of
from ..polynomials.powers import LARGEST_POWER, PowerKernel
from ..problem.checks import check_integer, check_seed
from ..problem.problem import Head
from .base import Method, check_sketch_size, live_count


@dataclass(frozen=True)
class PowerAttention(Method):
    """D^-1 (scale Q K^T)^{∘power} V, which is not softmax attention and does not approximate it.

    ``power`` is even, so that no weight is negative. ``sketch_size=None`` computes every pair;
    otherwise the power is a `PolySketch` of that many rows, in time linear in the length, and the
    certificate measures it against the power itself. Rows whose sketched denominator is provably
    too small are computed without the sketch; a row whose scores are all zero has no weights and
    returns zeros. A key bias adds to the log of its key's weights.

    >>> import torch, supportbasis as sb
    >>> q, k = torch.tensor([[1.0]]), torch.tensor([[1.0], [-2.0]])
    >>> sb.attention(q, k, torch.tensor([[0.0], [1.0]]), method=sb.PowerAttention(2))
    tensor([[0.8000]])
    """

    power: int = 4
    sketch_size: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        power = check_integer("power", self.power, 2, LARGEST_POWER)
        if power % 2:
            raise InputError(f"power must be even, got {power}: odd powers have negative weights")
        size, seed = check_sketch_size(self.sketch_size), check_seed(self.seed)
        self._set(power=power, sketch_size=size, seed=seed)

    def plan_head(self, head: Head) -> PowerHead:
        kernel, keys = PowerKernel(self.power, None, self.sketch_size, self.seed), live_count(head)
        work = power_work(head, head.n, keys, self.power, self.sketch_size)
        work += work_of(head, scanned=2 * (head.n + keys) * head.dim)
        return PowerHead(kernel=kernel, **work.settings(head))

    def plan_exactly(self, head: Head, reason: str) -> PowerHead:
        return replace(replace(self, sketch_size=None).plan_head(head), reason=reason)
