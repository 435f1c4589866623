"""Split and supports (Appendix B): which rows of Q and K are large, and what QKᵀ becomes.

The paper prints the split entry by entry (Definition B.3) but its algorithm needs it row by row:
entrywise, Q^(s)K^(s)ᵀ is not zero on supp(A^(L)), yet Algorithm 3 adds exp(A^(L)) - 1 there and so
counts those pairs twice. `split` therefore decides by rows; `split_entries` is the printed text.
`support_basis` is dense, for tests and small examples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import InputError
from ..problem.checks import check_finite
from ..problem.problem import largest_entries


def row_maxima(x: Tensor) -> Tensor:
    """max_j |x_ij| of each row, `[..., n, d]` -> `[..., n]`, same dtype; NaN and Inf pass through.

    >>> row_maxima(torch.tensor([[1.0, -3.0], [0.5, 0.25]])).tolist()
    [3.0, 0.5]
    """
    check_matrix("x", x)
    return largest_entries(x)


def split(x: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Split by rows (Algorithm 1, line Split): x = x^(L) + x^(s). A row with an entry of magnitude
    > T goes whole to x^(L), any other whole to x^(s).

    >>> large, small = split(torch.tensor([[1.0, -3.0], [0.5, 0.25]]), threshold=2.0)
    >>> large.tolist(), small.tolist()
    ([[1.0, -3.0], [0.0, 0.0]], [[0.0, 0.0], [0.5, 0.25]])
    """
    return _parts(_is_large("x", x, threshold).any(-1, keepdim=True), x)


def split_entries(x: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Split by entries, as Definition B.3 prints it: x^(L)_ij = x_ij if |x_ij| > T, else 0.

    A reference only: fed to Algorithm 3 it gives a wrong sum, see above.

    >>> large, small = split_entries(torch.tensor([[1.0, -3.0], [0.5, 0.25]]), threshold=2.0)
    >>> large.tolist(), small.tolist()
    ([[0.0, -3.0], [0.0, 0.0]], [[1.0, 0.0], [0.5, 0.25]])
    """
    return _parts(_is_large("x", x, threshold), x)


def large_rows(x: Tensor, threshold: float) -> Tensor:
    """Sorted int64 indices {i : max_j |x_ij| > T} of the large rows of a matrix `[n, d]`.

    >>> large_rows(torch.tensor([[1.0, -3.0], [0.5, 0.25], [4.0, 0.0]]), threshold=2.0).tolist()
    [0, 2]
    """
    check_matrix("x", x, single=True)
    return _is_large("x", x, threshold).any(-1).nonzero().squeeze(-1)


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
    rows, keys = _is_large("query", query, threshold), _is_large("key", key, threshold)
    return _parts(rows.any(-1, keepdim=True) | keys.any(-1).unsqueeze(-2), query @ key.mT)


def support_size(x: Tensor) -> int:
    """|supp(x)|, the number of non-zero entries."""
    _check_tensor("x", x)
    return int(torch.count_nonzero(x))


def are_disjoint(*matrices: Tensor) -> bool:
    """Whether no position is non-zero in two of the matrices (Definition B.1).

    >>> are_disjoint(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0]))
    True
    """
    if len(matrices) < 2:
        raise InputError(f"matrices: got {len(matrices)}; disjointness needs at least two")
    _check_shapes(*matrices)
    return bool((torch.stack([matrix != 0 for matrix in matrices]).sum(0) <= 1).all())


def is_support_basis(matrices: Sequence[Tensor], whole: Tensor, atol: float = 0.0) -> bool:
    """Whether the matrices are disjoint and sum to `whole` (Definition B.5), up to entries of
    `atol`: rounding of separate products needs some."""
    if not atol >= 0:
        raise InputError(f"atol must be a number >= 0, got {atol!r}")
    if not are_disjoint(*matrices):
        return False
    _check_shapes(*matrices, whole)
    return bool(((torch.stack(list(matrices)).sum(0) - whole).abs() <= atol).all())


def check_matrix(name: str, x: Tensor, single: bool = False) -> None:
    """Raise `InputError` unless x is a floating-point `[..., n, d]`, or `[n, d]` if ``single``."""
    _check_tensor(name, x)
    if not x.is_floating_point():
        raise InputError(f"{name} has dtype {x.dtype}; expected floating point")
    if x.dim() < 2 or (single and x.dim() > 2):
        expected = "one matrix [n, d]: call once for each head" if single else "[..., n, d]"
        raise InputError(f"{name} has shape {tuple(x.shape)}; expected {expected}")


def _check_tensor(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise InputError(f"{name} must be a torch.Tensor, got {type(x).__name__}")


def check_threshold(threshold: float) -> None:
    """Raise `InputError` unless T > 0 (T = inf is allowed: nothing is large)."""
    number = isinstance(threshold, (int, float)) and not isinstance(threshold, bool)
    if not number or math.isnan(threshold) or threshold <= 0:
        raise InputError(f"threshold must be a number > 0, got {threshold!r}")


def _is_large(name: str, x: Tensor, threshold: float) -> Tensor:
    """Where |x| > T, in float64: a comparison in bfloat16 would round T, and could let a large
    entry pass as small."""
    check_threshold(threshold)
    check_matrix(name, x)
    check_finite(**{name: x})
    return x.detach().abs().double() > threshold


def _parts(is_large: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(is_large, x, 0.0), torch.where(is_large, 0.0, x)


def check_pair(query: Tensor, key: Tensor) -> None:
    """Raise `InputError` unless both are `[..., n, d]` with the same d."""
    check_matrix("query", query)
    check_matrix("key", key)
    if query.shape[-1] != key.shape[-1]:
        raise InputError(
            f"key has {key.shape[-1]} columns but query has {query.shape[-1]}; they must agree"
        )


def _check_shapes(*matrices: Tensor) -> None:
    for matrix in matrices:
        _check_tensor("each of the matrices", matrix)
    shapes = [tuple(matrix.shape) for matrix in matrices]
    if len(set(shapes)) > 1:
        raise InputError(f"matrices, or whole, have shapes {shapes}; expected one shape")
