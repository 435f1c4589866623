"""How the entries of Q and K are distributed, and what that makes of A^(L) (Appendix D, App. L).

Where entries are sub-Gaussian (see `paper.sub_gaussian`), few exceed a threshold T, few rows are
large, and A^(L) is sparse. `EntryProfile.of(query, key)` says whether that is so for your tensors.

A caution the paper leaves out: sub-Gaussian does not mean sparse. At T = sqrt(c·ln n) the bound
is 2d·n^(1 - c/σ²), so the exponent α must exceed 1 - c/σ², which is near 1 for large σ².
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .errors import InputError
from .paper.sub_gaussian import (
    check_pair,
    chernoff_tail,
    expected_large_entries,
    log_threshold,
    sharpest_threshold,
    sub_gaussian_threshold,
    support_exponent,
    variance_proxy,
)
from .plans.drawing import new_figure
from .problem.checks import check_number
from .problem.problem import largest_entries
from .problem.rounding import compute_dtype

__all__ = [
    "EntryProfile", "LargeEntries", "SideProfile", "chernoff_tail", "expected_large_entries",
    "log_threshold", "sharpest_threshold", "sub_gaussian_threshold", "support_exponent",
    "variance_proxy",
]  # fmt: skip

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_HALF = 100  # histogram bins on either side of zero


@dataclass(frozen=True)
class LargeEntries:
    """What exceeds one threshold T on one side. Counts run over all its matrices [n, d].

    The proxy is fitted to these entries, so `entries` ≤ matrices · `bound` always; `gaussian_tail`
    says how surprising the count is under another law.

    Attributes:
        entries, rows: entries of magnitude > T, rows with such an entry; row_share: rows / all.
        alpha: support exponent, entries per matrix = n^alpha (-inf: no entries, nan: n = 1).
        bound: 2nd·exp(-T²/σ²), the expected number per matrix at most (Lemma D.2).
        tail: Chernoff bound on Pr[|supp| ≥ n^α] for the profile's α, mean `bound` (Lemma D.3).
        gaussian_tail: Chernoff bound on Pr[X ≥ entries] were the entries Gaussian with the same
            second moment; near 0: the tail is heavier than a Gaussian's."""

    threshold: float
    entries: int
    rows: int
    row_share: float
    alpha: float
    bound: float
    tail: float
    gaussian_tail: float

    @staticmethod
    def of_counts(
        threshold: float, entries: int, rows: int, *, shape: tuple[int, int, int], proxy: float,
        rms: float, alpha: float,
    ) -> LargeEntries:  # fmt: skip
        """From counts over ``shape`` = (matrices, n, d) entries of this proxy and second moment."""
        matrices, n, d = shape
        bound = expected_large_entries(n, d, threshold, proxy)
        gaussian = matrices * n * d * math.erfc(threshold / rms / math.sqrt(2)) if rms > 0 else 0.0
        exponent = support_exponent(entries / matrices, n) if n > 1 else math.nan
        share, tail = rows / (matrices * n), chernoff_tail(bound, n**alpha)
        surprise = chernoff_tail(gaussian, entries)
        return LargeEntries(threshold, entries, rows, share, exponent, bound, tail, surprise)


@dataclass(frozen=True)
class SideProfile:
    """Distribution of the entries of one tensor: `matrices` matrices of n × d."""

    name: str
    matrices: int
    n: int
    d: int
    mean: float
    std: float
    largest: float
    proxy: float
    large: tuple[LargeEntries, ...]  # one per threshold of the profile, in its order
    histogram: tuple[int, ...]  # counts in equal bins over [-largest, largest]

    @property
    def entries(self) -> int:
        return self.matrices * self.n * self.d

    @property
    def tail_counts(self) -> tuple[list[float], list[float]]:
        """(T, entries with |x| ≥ T per matrix) on the histogram's edges, to within one bin."""
        half = len(self.histogram) // 2
        folded = [self.histogram[half + b] + self.histogram[half - 1 - b] for b in range(half)]
        edges = [self.largest * b / half for b in range(half)]
        return edges, [sum(folded[b:]) / self.matrices for b in range(half)]


@dataclass(frozen=True)
class EntryProfile:
    """Distribution of the entries of query and key, and the A^(L) it leads to (Figure 1, App. L).

    Build one with `EntryProfile.of`, then `print` it or `plot` it.

    >>> g = torch.Generator().manual_seed(0)
    >>> q, k = torch.randn(2, 4, 256, 8, generator=g)
    >>> profile = EntryProfile.of(q, k, alpha=0.5)
    >>> profile.labels
    ('sqrt(ln n)', 'T(0.5)')
    >>> profile.query.large[0].rows <= profile.query.large[0].entries
    True
    """

    alpha: float
    labels: tuple[str, ...]
    thresholds: tuple[float, ...]
    query: SideProfile
    key: SideProfile | None
    # share of pairs in A^(L) per threshold, 1 - (1 - f_Q)(1 - f_K) averaged over heads, with f the
    # share of large rows; None without a key
    pair_shares: tuple[float, ...] | None

    @classmethod
    def of(
        cls, query: Tensor, key: Tensor | None = None, *, alpha: float = 0.5,
        threshold: float | None = None,
    ) -> EntryProfile:  # fmt: skip
        """Profile tensors `[..., n, d]`, raw entries as the method sees them (before the scale).

        Thresholds considered: sqrt(ln n); the smallest T with at most n^alpha large entries
        expected on either side; and `threshold` if given. n is that of the longer side. Key
        heads may be fewer than query heads (grouped-query attention)."""
        given = {"query": query} if key is None else {"query": query, "key": key}
        check_pair(query, query if key is None else key)
        proxies = {name: variance_proxy(x) for name, x in given.items()}
        sizes = [(x.shape[-2], x.shape[-1], proxies[name]) for name, x in given.items()]
        sharpest = max(sharpest_threshold(*size, alpha) for size in sizes)
        n = max(sizes)[0]
        if n < 2:
            raise InputError(f"query has shape {tuple(query.shape)}; expected 2 tokens or more")
        considered = {"sqrt(ln n)": log_threshold(n), f"T({alpha:g})": sharpest}
        if threshold is not None:
            considered["T"] = check_number("threshold", threshold)
        levels = tuple(considered.values())
        sides = {s: _side_profile(s, x, proxies[s], levels, alpha) for s, x in given.items()}
        shares = None if key is None else tuple(_pair_share(query, key, t) for t in levels)
        return cls(alpha, tuple(considered), levels, sides["query"], sides.get("key"), shares)

    @property
    def sides(self) -> tuple[SideProfile, ...]:
        return (self.query,) if self.key is None else (self.query, self.key)

    def __str__(self) -> str:
        head = ["", "matrices", "n", "d", "mean", "std", "max|x|", "proxy σ²", "σ²/(2·std²)"]
        rows = [head, *(_moments_row(side) for side in self.sides)]
        lines = ["Entries", *_table(rows)]
        head = ["", "large entries", "share", "α", "expected ≤", f"Pr[≥n^{self.alpha:g}]"]
        head += ["Pr[≥count|Gauss]", "large rows", "share"]
        for i, label in enumerate(self.labels):
            lines += ["", f"Above {label} = {self.thresholds[i]:.4g}"]
            lines += _table([head, *(_large_row(side, side.large[i]) for side in self.sides)])
            if self.pair_shares is not None:
                lines.append(f"  pairs in A^(L): {self.pair_shares[i]:.2%}")
        return "\n".join(lines)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draw one row per side: a histogram of the entries with red dashed lines at ±sqrt(ln n) as
        in the paper's figures, and large entries per matrix against T below their bound."""
        figure = new_figure(11.0, 3.6 * len(self.sides))
        axes = figure.subplots(len(self.sides), 2, squeeze=False)
        for side, (left, right) in zip(self.sides, axes, strict=True):
            _draw_histogram(left, side, self)
            _draw_tail(right, side, self)
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure


def _side_profile(
    name: str, x: Tensor, proxy: float, thresholds: tuple[float, ...], alpha: float
) -> SideProfile:
    x = x.detach().to(compute_dtype(x.dtype)).reshape(-1, *x.shape[-2:])
    shape = x.shape[0], x.shape[1], x.shape[2]
    variance, mean = torch.var_mean(x.double(), correction=0)
    moments = float(mean), float(variance.sqrt())
    rms = math.hypot(*moments)
    of_counts = partial(LargeEntries.of_counts, shape=shape, proxy=proxy, rms=rms, alpha=alpha)
    maxima = largest_entries(x)
    largest, large = float(maxima.max()), []
    for threshold in thresholds:
        is_large = maxima.double() > threshold
        entries = int((x[is_large].abs().double() > threshold).sum())  # only large rows have any
        large.append(of_counts(threshold, entries, int(is_large.sum())))
    unit = x.flatten() / (largest or 1.0)  # in [-1, 1]
    bins = ((unit + 1) * _HALF).int().clamp_(0, 2 * _HALF - 1)
    histogram = tuple(torch.bincount(bins, minlength=2 * _HALF).tolist())
    return SideProfile(name, *shape, *moments, largest, proxy, tuple(large), histogram)


def _pair_share(query: Tensor, key: Tensor, threshold: float) -> float:
    """Mean over heads of 1 - (1 - f_Q)(1 - f_K)."""
    rows, keys = ((largest_entries(x).double() > threshold).double().mean(-1) for x in (query, key))
    if rows.dim() and keys.dim() and keys.shape[-1] > 1 and rows.shape[-1] % keys.shape[-1] == 0:
        keys = keys.repeat_interleave(rows.shape[-1] // keys.shape[-1], dim=-1)
    try:
        return float((rows + keys - rows * keys).mean())
    except RuntimeError:
        raise InputError(
            f"key has leading dims {tuple(key.shape[:-2])}, which match those of query, "
            f"{tuple(query.shape[:-2])}, neither by broadcasting nor as groups of heads"
        ) from None


def _moments_row(side: SideProfile) -> list[str]:
    numbers = (side.mean, side.std, side.largest, side.proxy)
    ratio = f"{side.proxy / (2 * side.std**2):.3g}" if side.std > 0 else "-"
    shape = [f"{side.matrices}", f"{side.n}", f"{side.d}"]
    return [side.name, *shape, *(f"{v:.4g}" for v in numbers), ratio]


def _large_row(side: SideProfile, large: LargeEntries) -> list[str]:
    entries = [f"{large.entries:,}", f"{large.entries / side.entries:.3%}"]
    alpha = f"{large.alpha:.3f}" if large.entries else "none"
    expected = f"{large.bound * side.matrices:,.1f}"
    tails = [f"{large.tail:.2g}", f"{large.gaussian_tail:.2g}"]
    rows = [f"{large.rows:,}", f"{large.row_share:.2%}"]
    return [side.name, *entries, alpha, expected, *tails, *rows]


def _table(rows: list[list[str]]) -> list[str]:
    """Columns as wide as their widest cell; the first flush left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join([first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])])
        for first, *rest in rows
    ]


_LINES = (("#c1121f", "--"), ("#333333", ":"), ("#6a4c93", "-."))  # one per threshold
_FILL, _BOUND = "#5b8fb9", "#e07a1f"


def _draw_histogram(axes: Axes, side: SideProfile, profile: EntryProfile) -> None:
    bins, reach = len(side.histogram), side.largest or 1.0
    edges = [reach * (2 * b / bins - 1) for b in range(bins + 1)]
    axes.stairs(side.histogram, edges, fill=True, color=_FILL, baseline=0.5)
    axes.set(yscale="log", ylim=(0.5, None))
    levels = zip(profile.labels, profile.thresholds, _LINES, strict=False)
    for label, threshold, (colour, dashes) in levels:
        axes.axvline(-threshold, color=colour, linestyle=dashes)
        text = f"±{label} = {threshold:.3g}"
        axes.axvline(threshold, color=colour, linestyle=dashes, label=text)
    count = f"{side.matrices} × " * (side.matrices > 1) + f"[{side.n}, {side.d}]"
    title = f"{side.name} {count}: std {side.std:.3g}, max |entry| {side.largest:.3g}"
    axes.set(xlabel="entry", ylabel="number of entries", title=title)


def _draw_tail(axes: Axes, side: SideProfile, profile: EntryProfile) -> None:
    edges, counts = side.tail_counts
    size = 2.0 * side.n * side.d
    bound = [size * math.exp(-(t**2) / (side.proxy or 1.0)) for t in edges]
    axes.plot(edges, bound, color=_BOUND, label=f"2nd·exp(−T²/σ²), σ² = {side.proxy:.3g}")
    axes.plot(edges, counts, color=_FILL, linewidth=2.2, label="entries with |x| ≥ T")
    goal = side.n**profile.alpha
    axes.axhline(goal, color="#888888", linewidth=0.8, label=f"n^{profile.alpha:g} = {goal:.3g}")
    for threshold, (colour, dashes) in zip(profile.thresholds, _LINES, strict=False):
        axes.axvline(threshold, color=colour, linestyle=dashes)
    axes.set(yscale="log", ylim=(0.5 / side.matrices, 2 * size))
    title = f"{side.name}: large entries per matrix"
    axes.set(xlabel="threshold T", ylabel="number of large entries", title=title)
    axes.legend(loc="upper right", fontsize="small", framealpha=1.0)
