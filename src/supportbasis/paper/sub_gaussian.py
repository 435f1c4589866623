"""Sub-Gaussian entries: how many exceed a threshold, and which threshold leaves few (Appendix D).

Entries are sub-Gaussian with variance proxy σ² when Pr(|x| ≥ t) ≤ 2·exp(-t²/σ²) for all t ≥ 0
(Definition D.1; a Gaussian of standard deviation s has σ² = 2s²).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import InputError
from ..problem.checks import check_finite, check_integer, check_number


def variance_proxy(x: Tensor) -> float:
    """Smallest σ² whose sub-Gaussian tail covers the entries of x, a tensor of any shape.

    With N entries and |x|_(k) the k-th largest magnitude, share(|x| ≥ t) ≤ 2·exp(-t²/σ²) for
    all t exactly when it holds at every order statistic (Definition D.1), so

        σ² = max_k |x|_(k)² / ln(2N/k).

    >>> x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    >>> 1.0 < variance_proxy(x) < 2.1  # a standard Gaussian has 2
    True
    """
    check_entries("x", x)
    ordered = x.detach().flatten().abs().sort(descending=True).values.double()
    rank = torch.arange(1, ordered.numel() + 1, dtype=torch.float64, device=x.device)
    return float((ordered.square() / (2 * ordered.numel() / rank).log()).max())


def expected_large_entries(n: int, d: int, threshold: float, proxy: float) -> float:
    """Lemma D.2: E|supp(M^(L))| ≤ 2nd·exp(-T²/σ²) for n × d entries, independent or not, with T
    the threshold and σ² the proxy.

    >>> round(expected_large_entries(n=100, d=5, threshold=2.0, proxy=1.0), 3)  # 1000 exp(-4)
    18.316
    """
    check_integer("n", n, 0)
    check_integer("d", d, 0)
    check_threshold(threshold)
    check_number("proxy", proxy, ">= 0")
    return 2.0 * n * d * math.exp(-threshold * threshold / proxy) if proxy > 0 else 0.0


def chernoff_tail(mean: float, count: float) -> float:
    """Fact J.5: an upper bound on Pr[X ≥ count], X a sum of independent [0, 1] variables.

    With count = (1 + δ)·mean: exp(-δ²·mean/3) for δ ≤ 1, exp(-δ·mean/3) for δ > 1, and 1 when
    count ≤ mean. `mean` may be any upper bound on E[X], such as `expected_large_entries`.

    >>> round(chernoff_tail(mean=30.0, count=60.0), 6)  # exp(-10)
    4.5e-05
    """
    check_number("mean", mean, ">= 0")
    check_number("count", count, ">= 0")
    if count <= mean:
        return 1.0
    excess = count - mean  # δ·mean, usable at mean = 0
    return math.exp(-excess * excess / (3 * mean) if excess <= mean else -excess / 3)


def support_exponent(count: float, n: int) -> float:
    """The exponent α with count = n^α, that is ln(count) / ln(n); -inf for count 0.

    >>> support_exponent(count=32.0, n=1024)
    0.5
    """
    check_number("count", count, ">= 0")
    check_integer("n", n, 2)
    return math.log(count) / math.log(n) if count > 0 else -math.inf


def log_threshold(n: int, c: float = 1.0) -> float:
    """T = sqrt(c·ln n), the threshold of Lemma D.3 and Theorem D.4 (which take 0 < c < 1).

    >>> round(log_threshold(n=1024), 3)
    2.633
    """
    check_integer("n", n, 2)
    return math.sqrt(check_number("c", c) * math.log(n))


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
    check_number("proxy", proxy, ">= 0")
    if not (isinstance(alpha, (int, float)) and 0 < alpha <= 1):
        raise InputError(f"alpha must be a number in (0, 1], got {alpha!r}")
    threshold = math.sqrt(proxy * (math.log(2 * d) + (1 - alpha) * math.log(n)))
    return max(threshold, torch.finfo(torch.float32).tiny)


def sub_gaussian_threshold(query: Tensor, key: Tensor, alpha: float = 0.5) -> float:
    """A threshold from data: `sharpest_threshold` of each side's proxy, the larger of the two. The
    leading dims of `[..., n, d]` are taken as more samples of one distribution.

    >>> q = torch.randn(512, 16, generator=torch.Generator().manual_seed(0))
    >>> T = sub_gaussian_threshold(q, q / 2, alpha=0.5)
    >>> int((q.abs() > T).sum()) <= 512**0.5
    True
    """
    check_pair(query, key)
    sides = ((*x.shape[-2:], variance_proxy(x)) for x in (query, key))
    return max(sharpest_threshold(n, d, proxy, alpha) for n, d, proxy in sides)


def check_entries(name: str, x: Tensor) -> None:
    kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise InputError(f"{name} must be a floating-point torch.Tensor, got {kind}")
    if x.numel() == 0:
        raise InputError(f"{name} has shape {tuple(x.shape)}; expected at least one entry")
    check_finite(**{name: x})


def check_pair(query: Tensor, key: Tensor) -> None:
    """Raise `InputError` unless both are finite `[..., n, d]` with the same d."""
    for name, x in (("query", query), ("key", key)):
        check_entries(name, x)
        if x.dim() < 2:
            raise InputError(f"{name} has shape {tuple(x.shape)}; expected [..., n, d]")
    if query.shape[-1] != key.shape[-1]:
        raise InputError(
            f"key has {key.shape[-1]} columns but query has {query.shape[-1]}; they must agree"
        )


def check_threshold(threshold: float) -> None:
    """Raise `InputError` unless T > 0 (T = inf is allowed: nothing is large)."""
    if threshold != math.inf:
        check_number("threshold", threshold)
