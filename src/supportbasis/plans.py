"""Plans: what each head will do, printable, drawable, and reusable on new tokens."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .errors import InputError
from .polynomials import CertifiedPolynomial

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .methods import Method

FORMAT = "supportbasis-plan-1"


@dataclass(frozen=True, eq=False)
class HeadPlan:
    """What one (batch, head) pair will do, and why.

    ``large_rows`` and ``large_keys`` are sorted index sets; any index sets give a valid disjoint
    cover, whatever the data. They are None where nothing is split, and in a loaded plan, which
    splits again by ``threshold``.
    """

    kind: str  # "exact", "polynomial" or "single-threshold"
    reason: str
    n: int
    m: int
    cost: float  # multiply-adds relative to exact attention
    speedup: float  # predicted against SDPA on this machine
    polynomial: CertifiedPolynomial | None = None
    threshold: float | None = None
    large_rows: Tensor | None = None
    large_keys: Tensor | None = None
    measured: float | None = None  # error on sampled rows, where the planner measured it

    @property
    def degree(self) -> int | None:
        return None if self.polynomial is None else self.polynomial.degree

    @property
    def bound(self) -> float | None:
        """B: the polynomial is certified for scores in [-B, B]."""
        return None if self.polynomial is None else self.polynomial.bound

    def __str__(self) -> str:
        parts = [self.kind]
        if self.polynomial is not None:
            poly = self.polynomial
            parts.append(f"{poly.kind} degree {poly.degree} on ±{poly.bound:.4g}")
            parts.append(f"eps {poly.error:.2g}")
        if self.threshold is not None:
            parts.append(f"T={self.threshold:.4g}")
        if self.large_rows is not None and self.large_keys is not None:
            parts.append(f"{len(self.large_rows)} large rows, {len(self.large_keys)} large keys")
        parts.append(f"cost {self.cost:.3g}, predicted {self.speedup:.3g}x as fast as exact")
        if self.measured is not None:
            parts.append(f"measured error {self.measured:.2g}")
        return "; ".join(parts) + (f" ({self.reason})" if self.reason else "")


@dataclass(frozen=True, eq=False)
class Plan:
    """A method applied to data: one `HeadPlan` for each (batch, head).

    >>> import torch, supportbasis as sb
    >>> q = k = v = torch.zeros(1, 2, 8, 4)
    >>> plan = sb.plan(q, k, v, method=sb.Polynomial(degree=1))
    >>> len(plan.heads), plan.heads[0].kind
    (2, 'polynomial')
    """

    method: Method
    batch: int
    num_heads: int
    dim: int
    heads: tuple[HeadPlan, ...]

    @property
    def cost(self) -> float:
        """Multiply-adds relative to exact attention (1.0), everything counted, mean over heads."""
        return sum(h.cost for h in self.heads) / len(self.heads) if self.heads else 1.0

    @property
    def speedup(self) -> float:
        """Predicted time of SDPA over predicted time of this plan on this machine."""
        times = [1.0 / h.speedup for h in self.heads]
        return len(times) / sum(times) if times else 1.0

    def head(self, batch: int, head: int) -> HeadPlan:
        return self.heads[batch * self.num_heads + head]

    def __str__(self) -> str:
        lines = [
            f"Plan: {self.method}, {self.batch} x {self.num_heads} heads, dim {self.dim}, "
            f"cost {self.cost:.3g} of exact, predicted {self.speedup:.3g}x SDPA"
        ]
        for i, head in enumerate(self.heads):
            lines.append(f"  [{i // self.num_heads}, {i % self.num_heads}] {head}")
        return "\n".join(lines)

    __repr__ = __str__

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, without index sets: a loaded plan splits again."""
        heads = [_head_to_json(head) for head in self.heads]
        content = {
            "format": FORMAT,
            "method": self.method.to_json(),
            "batch": self.batch,
            "num_heads": self.num_heads,
            "dim": self.dim,
            "heads": heads,
        }
        Path(path).write_text(json.dumps(content, indent=1))

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan written by `save`."""
        from .methods import method_from_json

        try:
            content = json.loads(Path(path).read_text())
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise InputError(f"path: {path} is not JSON ({error}); expected a saved plan") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise InputError(f"path: {path} is not a plan; expected format {FORMAT!r}")
        try:
            batch, num_heads, dim = (int(content[key]) for key in ("batch", "num_heads", "dim"))
            heads = tuple(_head_from_json(head) for head in content["heads"])
            if len(heads) != batch * num_heads:
                raise ValueError(f"{len(heads)} heads for {batch} x {num_heads}")
            return Plan(method_from_json(content["method"]), batch, num_heads, dim, heads)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InputError(f"path: {path} is a damaged plan ({error!r})") from None

    def draw(self, path: str | Path | None = None, head: int = 0) -> Figure:
        """Draw the supports of one head: large rows, large keys, and the rest."""
        from .drawing import draw_supports

        if not 0 <= head < len(self.heads):
            raise InputError(f"head must be in 0..{len(self.heads) - 1}, got {head}")
        return draw_supports(self.heads[head], path)


def _encode(value: float | None) -> float | str | None:
    """JSON has no infinity; write it as a word."""
    return value if value is None or math.isfinite(value) else str(value)


def _head_to_json(head: HeadPlan) -> dict[str, Any]:
    names = ("kind", "reason", "n", "m", "cost", "speedup", "threshold", "measured")
    content: dict[str, Any] = {name: getattr(head, name) for name in names}
    if head.polynomial is not None:
        poly = asdict(head.polynomial)
        poly["error"] = _encode(poly["error"])
        poly["log_ratio"] = [_encode(x) for x in poly["log_ratio"]]
        content["polynomial"] = poly
    return content


def _head_from_json(content: dict[str, Any]) -> HeadPlan:
    poly = content.pop("polynomial", None)
    head = HeadPlan(**content)
    if head.kind not in ("exact", "polynomial", "single-threshold"):
        raise ValueError(f"unknown kind {head.kind!r}")
    if head.kind == "single-threshold" and not isinstance(head.threshold, float):
        raise ValueError(f"a head has threshold {head.threshold!r}")
    if poly is None:
        if head.kind != "exact":
            raise ValueError("a head has no polynomial")
        return head
    poly["coefficients"] = tuple(float(c) for c in poly["coefficients"])
    poly["error"] = float(poly["error"])
    low, high = poly["log_ratio"]
    poly["log_ratio"] = (float(low), float(high))
    return replace(head, polynomial=CertifiedPolynomial(**poly))
