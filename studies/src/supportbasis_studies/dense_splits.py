"""Splits, supports and buckets of the paper (Appendices B, F and G) as dense matrices.

The paper prints the split entry by entry (Definition B.3) but its algorithm needs it row by row:
entrywise, Q^(s)K^(s)ᵀ is not zero on supp(A^(L)), yet Algorithm 3 adds exp(A^(L)) - 1 there and so
counts those pairs twice. `split` therefore decides by rows; `split_entries` is the printed text.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from supportbasis.paper.buckets import bucket_numbers, check_ratio, smallest_maximum
from supportbasis.paper.sub_gaussian import check_pair, check_threshold
from supportbasis.problem.checks import check_finite
from supportbasis.problem.problem import largest_entries


def split(x: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Split by rows (Algorithm 1, line Split): x = x^(L) + x^(s). A row with an entry of magnitude
    > T goes whole to x^(L), any other whole to x^(s).

    >>> large, small = split(torch.tensor([[1.0, -3.0], [0.5, 0.25]]), threshold=2.0)
    >>> large.tolist(), small.tolist()
    ([[1.0, -3.0], [0.0, 0.0]], [[0.0, 0.0], [0.5, 0.25]])
    """
    return _parts(_is_large(x, threshold).any(-1, keepdim=True), x)


def split_entries(x: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Split by entries, as Definition B.3 prints it: x^(L)_ij = x_ij if |x_ij| > T, else 0.

    Fed to Algorithm 3 it gives a wrong sum, see above.

    >>> large, small = split_entries(torch.tensor([[1.0, -3.0], [0.5, 0.25]]), threshold=2.0)
    >>> large.tolist(), small.tolist()
    ([[0.0, -3.0], [0.0, 0.0]], [[1.0, 0.0], [0.5, 0.25]])
    """
    return _parts(_is_large(x, threshold), x)


def large_rows(x: Tensor, threshold: float) -> Tensor:
    """Sorted int64 indices {i : max_j |x_ij| > T} of the large rows of a matrix `[n, d]`.

    >>> large_rows(torch.tensor([[1.0, -3.0], [0.5, 0.25], [4.0, 0.0]]), threshold=2.0).tolist()
    [0, 2]
    """
    return _is_large(x, threshold).any(-1).nonzero().squeeze(-1)


def support_basis(query: Tensor, key: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Dense (A^(L), A^(s)) of QKᵀ, `[..., n, m]` (Definition B.4 with the row-wise split).

    A^(L)_ij = (QKᵀ)_ij if row i of Q or row j of K is large, else 0;  A^(s) = QKᵀ - A^(L).
    (The paper asks whether the large part of the *product* is non-zero. By rows this differs only
    where a score is exactly 0, and there both parts are 0 either way.)

    >>> q, k = torch.tensor([[3.0], [1.0]]), torch.tensor([[1.0], [5.0]])
    >>> large, small = support_basis(q, k, threshold=2.0)
    >>> large.tolist(), small.tolist()
    ([[3.0, 15.0], [0.0, 5.0]], [[0.0, 0.0], [1.0, 0.0]])
    """
    check_pair(query, key)
    rows, keys = _is_large(query, threshold), _is_large(key, threshold)
    return _parts(rows.any(-1, keepdim=True) | keys.any(-1).unsqueeze(-2), query @ key.mT)


def support_basis_entries(query: Tensor, key: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Dense (A^(L), A^(s)) of QKᵀ, Definition B.4 to the letter, from the entrywise split.

    With M = Q^(L)K^(L)ᵀ + Q^(s)K^(L)ᵀ + Q^(L)K^(s)ᵀ:  A^(L)_ij = (QKᵀ)_ij where M_ij ≠ 0, and
    A^(s)_ij = (Q^(s)K^(s)ᵀ)_ij where M_ij = 0.

    >>> q, k = torch.tensor([[3.0, 1.0], [1.0, 1.0]]), torch.tensor([[0.0, 1.0], [1.0, 1.0]])
    >>> large, small = support_basis_entries(q, k, threshold=2.0)
    >>> large.tolist(), small.tolist()  # score (0, 0) = 3·0 + 1·1 owes nothing to the large 3
    ([[0.0, 4.0], [0.0, 0.0]], [[1.0, 0.0], [1.0, 2.0]])
    """
    check_pair(query, key)
    query_large, query_small = split_entries(query, threshold)
    key_large, key_small = split_entries(key, threshold)
    mixed = query_large @ key_large.mT + query_small @ key_large.mT + query_large @ key_small.mT
    is_large = mixed != 0
    large = torch.where(is_large, query @ key.mT, 0.0)
    return large, torch.where(is_large, 0.0, query_small @ key_small.mT)


def support_size(x: Tensor) -> int:
    """|supp(x)|, the number of non-zero entries."""
    return int(torch.count_nonzero(x))


def are_disjoint(*matrices: Tensor) -> bool:
    """Whether no position is non-zero in two of the matrices (Definition B.1).

    >>> are_disjoint(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0]))
    True
    """
    return bool((torch.stack([matrix != 0 for matrix in matrices]).sum(0) <= 1).all())


def is_support_basis(matrices: Sequence[Tensor], whole: Tensor) -> bool:
    """Whether the matrices are disjoint and sum to `whole` (Definition B.5)."""
    return are_disjoint(*matrices) and torch.equal(torch.stack(list(matrices)).sum(0), whole)


def bucket_count(smallest: float, largest: float, ratio: float) -> int:
    """How many thresholds cover [b, B]: m = floor(log_ratio(B / b)) + 1 (Fact G.2).

    >>> bucket_count(1.0, 8.0, 2.0), bucket_count(1.0, 7.9, 2.0)
    (4, 3)
    """
    if not 0 < smallest <= largest:
        return 1
    return int(bucket_numbers(torch.tensor(largest, dtype=torch.float64), smallest, ratio))


def decompose(x: Tensor, ratio: float, smallest: float | None = None) -> list[Tensor]:
    """X^(T_1), ..., X^(T_m): the rows of each bucket, zeros elsewhere (Definition F.1, G.1).

    >>> [part.tolist() for part in decompose(torch.tensor([[1.0], [2.0], [0.0]]), ratio=2.0)]
    [[[1.0], [0.0], [0.0]], [[0.0], [2.0], [0.0]]]
    """
    maxima = largest_entries(x)
    b = smallest_maximum(maxima) if smallest is None else smallest
    numbers = bucket_numbers(maxima, b, check_ratio(ratio)).unsqueeze(1)
    return [torch.where(numbers == l, x, 0.0) for l in range(1, int(numbers.max()) + 1)]


def bucket_basis(query: Tensor, key: Tensor, ratio: float) -> list[list[Tensor]]:
    """The pieces A^(T_l, T_l') = Q^(T_l) K^(T_l')^T, which are disjoint and add up to Q K^T
    (Definition F.2, Lemma F.4).
    """
    check_pair(query, key)
    b = smallest_maximum(largest_entries(query), largest_entries(key))
    keys = decompose(key, ratio, b)
    return [[q @ k.T for k in keys] for q in decompose(query, ratio, b)]


def _is_large(x: Tensor, threshold: float) -> Tensor:
    """Where |x| > T, in float64: a comparison in bfloat16 would round T, and could let a large
    entry pass as small."""
    check_threshold(threshold)
    check_finite(x=x)
    return x.abs().double() > threshold


def _parts(is_large: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(is_large, x, 0.0), torch.where(is_large, 0.0, x)
