"""Sub-Gaussian entries: how many exceed a threshold, and which threshold leaves few (Appendix D).

Entries are sub-Gaussian with variance proxy σ² when Pr(|x| ≥ t) ≤ 2·exp(-t²/σ²) for all t ≥ 0
(Definition D.1; a Gaussian of standard deviation s has σ² = 2s²).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import InputError
from ..problem.checks import check_finite, check_integer
from .split import check_pair, check_threshold

_BINS = 4096  # magnitude bins that locate the binding order statistic


def variance_proxy(x: Tensor) -> float:
    """Smallest σ² whose sub-Gaussian tail covers the entries of x, a tensor of any shape.

    With N entries and |x|_(k) the k-th largest magnitude, share(|x| ≥ t) ≤ 2·exp(-t²/σ²) for
    all t exactly when it holds at every order statistic (Definition D.1), so

        σ² = max_k |x|_(k)² / ln(2N/k).

    Exact, yet only a few entries are sorted: a histogram bounds the term of each bin from both
    sides, and bins that cannot hold the maximum are dropped. O(N) but for degenerate data. All
    zeros give 0.0.

    >>> x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    >>> 1.0 < variance_proxy(x) < 2.1  # a standard Gaussian has 2
    True
    """
    check_entries("x", x)
    magnitudes = x.detach().flatten().abs()
    if magnitudes.dtype != torch.float64:
        magnitudes = magnitudes.float()
    total, largest = magnitudes.numel(), float(magnitudes.max())
    if largest == 0:
        return 0.0
    candidates, above = _binding_candidates(magnitudes, largest)
    ordered = candidates.double().sort(descending=True).values
    rank = above + torch.arange(1, ordered.numel() + 1, dtype=torch.float64, device=x.device)
    return float((ordered.square() / (2 * total / rank).log()).max())


def _binding_candidates(magnitudes: Tensor, largest: float) -> tuple[Tensor, int]:
    """The entries that may attain the maximum in `variance_proxy`, and how many lie above them."""
    if magnitudes.numel() <= _BINS:
        return magnitudes, 0
    # Monotone in the magnitude whatever the rounding, so that the bins are ordered.
    bins = (magnitudes / largest * _BINS).int().clamp_(max=_BINS - 1)
    counts = torch.bincount(bins, minlength=_BINS)
    at_least = counts.flip(0).cumsum(0).flip(0)
    log = (2 * magnitudes.numel() / at_least.double()).log()
    edges = torch.arange(_BINS + 1, dtype=torch.float64, device=magnitudes.device) / _BINS
    margin = 1e-6  # more than the rounding of the bin index
    attained = ((edges[:-1] * (1 - margin)).square() / log).max()
    attainable = (edges[1:] * (1 + margin)).square() / log
    kept = (attainable >= attained).nonzero()
    low, high = int(kept[0]), int(kept[-1])
    return magnitudes[(bins >= low) & (bins <= high)], int(at_least[high] - counts[high])


def expected_large_entries(n: int, d: int, threshold: float, proxy: float) -> float:
    """Lemma D.2: E|supp(M^(L))| ≤ 2nd·exp(-T²/σ²) for M of n × d entries with proxy σ².

    Independence is not needed. The bound may exceed nd when T is small.

    >>> round(expected_large_entries(n=1000, d=10, threshold=2.0, proxy=1.0), 1)
    366.3
    """
    check_integer("n", n, 0)
    check_integer("d", d, 0)
    check_threshold(threshold)
    check_not_negative("proxy", proxy)
    return 2.0 * n * d * math.exp(-threshold * threshold / proxy) if proxy > 0 else 0.0


def chernoff_tail(mean: float, count: float) -> float:
    """Fact J.5: an upper bound on Pr[X ≥ count], X a sum of independent [0, 1] variables.

    With count = (1 + δ)·mean: exp(-δ²·mean/3) for δ ≤ 1, exp(-δ·mean/3) for δ > 1, and 1 when
    count ≤ mean. `mean` may be any upper bound on E[X], such as `expected_large_entries`.

    >>> round(chernoff_tail(mean=30.0, count=60.0), 6)  # exp(-10)
    4.5e-05
    """
    check_not_negative("mean", mean)
    check_not_negative("count", count)
    if count <= mean:
        return 1.0
    excess = count - mean  # δ·mean, usable at mean = 0
    return math.exp(-excess * excess / (3 * mean) if excess <= mean else -excess / 3)


def support_exponent(count: float, n: int) -> float:
    """The exponent α with count = n^α, that is ln(count) / ln(n).

    One large entry gives 0.0; none gives -inf (n^(-inf) = 0), so the two stay distinct.

    >>> support_exponent(32, 1024)
    0.5
    """
    check_not_negative("count", count)
    check_integer("n", n, 2)
    return math.log(count) / math.log(n) if count > 0 else -math.inf


def log_threshold(n: int, c: float = 1.0) -> float:
    """T = sqrt(c·ln n), the threshold of Lemma D.3 and Theorem D.4 (which take 0 < c < 1).

    >>> round(log_threshold(4096), 3)
    2.884
    """
    check_integer("n", n, 2)
    if not (c > 0 and math.isfinite(c)):
        raise InputError(f"c must be a finite number > 0, got {c!r}")
    return math.sqrt(c * math.log(n))


def sharpest_threshold(n: int, d: int, proxy: float, alpha: float) -> float:
    """Smallest T whose expected number of large entries (Lemma D.2) is at most n^α.

        2nd·exp(-T²/σ²) = n^α   ⟺   T = σ·sqrt(ln(2d) + (1 - α)·ln n)

    For proxy 0 every T > 0 will do; the smallest positive float32 is returned.

    >>> T = sharpest_threshold(n=1024, d=8, proxy=2.0, alpha=0.5)
    >>> round(expected_large_entries(1024, 8, T, proxy=2.0), 6)  # 1024^0.5
    32.0
    """
    check_integer("n", n, 1)
    check_integer("d", d, 1)
    check_not_negative("proxy", proxy)
    check_alpha(alpha)
    threshold = math.sqrt(proxy * (math.log(2 * d) + (1 - alpha) * math.log(n)))
    return max(threshold, torch.finfo(torch.float32).tiny)


def sub_gaussian_threshold(query: Tensor, key: Tensor, alpha: float = 0.5) -> float:
    """A threshold from data: `sharpest_threshold` of each side's proxy, the larger of the two.

    Shapes `[..., n, d]`; the leading dims are taken as more samples of one distribution.

    >>> q = torch.randn(512, 16, generator=torch.Generator().manual_seed(0))
    >>> T = sub_gaussian_threshold(q, q / 2, alpha=0.5)
    >>> int((q.abs() > T).sum()) <= 512**0.5
    True
    """
    check_pair(query, key)
    check_entries("query", query)
    check_entries("key", key)
    return max(_side_threshold(x, variance_proxy(x), alpha) for x in (query, key))


def _side_threshold(x: Tensor, proxy: float, alpha: float) -> float:
    return sharpest_threshold(x.shape[-2], x.shape[-1], proxy, alpha)


def check_entries(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise InputError(f"{name} must be a floating-point torch.Tensor, got {kind}")
    if x.numel() == 0:
        raise InputError(f"{name} has shape {tuple(x.shape)}; expected at least one entry")
    check_finite(**{name: x})


def check_not_negative(name: str, value: float) -> None:
    if not (isinstance(value, (int, float)) and 0 <= value < math.inf):
        raise InputError(f"{name} must be a finite number >= 0, got {value!r}")


def check_alpha(alpha: float) -> None:
    if not (isinstance(alpha, (int, float)) and 0 < alpha <= 1):
        raise InputError(f"alpha must be a number in (0, 1], got {alpha!r}")
