"""A rank-k approximation in input-sparsity time (Theorem E.3; Clarkson and Woodruff, Theorem 8.1).

The rows of SA, for a short random S, span a space that holds a good rank-k approximation of A: with
U_k the leading left singular vectors and B = A - A_k, the rank-k matrix U_k (S U_k)^+ S A lies in
it and has the squared error

    Δ_k² + |(S U_k)^+ S B|²,    (S U_k)^+ S B = (U_kᵀ SᵀS U_k)^-1 U_kᵀ SᵀS B.

S is a stack of q CountSketches of ℓ/q rows: every row of A goes, with a random sign, into one
bucket of each. As U_kᵀ B = 0, E|U_kᵀ SᵀS B|² ≤ (k/ℓ) Δ_k², so ℓ ~ k/ε will do once S keeps the
lengths of the k vectors U_k. One CountSketch needs ℓ ~ k² for that, because two heavy rows must not
share a bucket; q of them tolerate that, and cost q additions for each non-zero.

With U [m, ℓ] an orthonormal basis of those rows, the best approximation of A in their span is that
of the tall A U, times Uᵀ. It costs ℓ for each non-zero. (Least squares over a second sketch would
cost q for A U. But products are so much faster than sketches that this took longer on all matrices
measured, dense ones of 2000 x 2000 to 8000 x 8000, and it errs more.)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import InputError
from ..problem.checks import check_finite, check_integer, check_number, check_seed
from ..problem.rounding import compute_dtype
from ..problem.validation import DTYPES
from .draws import Source

STACKED = 4  # CountSketches in one sketch: q above
ENTRIES = 2**20  # non-zeros at a time


def approximate_svd(
    a: Tensor, k: int, eps: float = 0.5, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """L [n, k], D [k] descending and W [m, k] with |A - L diag(D) Wᵀ|_F ≤ (1 + eps) Δ_k.

    Δ_k is the Frobenius error of the best rank-k approximation. The bound is meant to hold with
    a probability of 9/10 over the seed, which is the theorem's; sizes come from the typical error
    (see `sketch_size`) and are tested over seeds and spectra. L and W have orthonormal columns
    always. ``a`` is [n, m], dense or sparse (COO or CSR). Time: k + 4k/eps for each non-zero,
    plus (n + m) poly(k/eps). A matrix with a side of at most k + 4k/eps is decomposed exactly.

    Float16 and bfloat16 matrices are computed, and returned, in float32.

    >>> a = torch.outer(torch.arange(100.0), torch.ones(80))
    >>> L, D, W = approximate_svd(a, k=2, eps=0.5, seed=0)
    >>> L.shape, W.shape, bool(((L * D) @ W.T - a).norm() < 1e-5 * a.norm())
    (torch.Size([100, 2]), torch.Size([80, 2]), True)
    """
    matrix = _check_matrix(a)
    n, m = matrix.shape
    k, seed = check_integer("k", k, 1), check_seed(seed)
    if k > min(n, m):
        raise InputError(f"k is {k}, more than the smaller side of a, which is {n} x {m}")
    if (eps := check_number("eps", eps)) > 1:
        raise InputError(f"eps must be a number in (0, 1], got {eps!r}")
    size = sketch_size(k, eps)
    if min(n, m) <= size:
        left, values, right = torch.linalg.svd(matrix.to_dense(), full_matrices=False)
        return left[:, :k], values[:k], right[:k].T
    source = Source(("svd", n, m, k, eps, seed), matrix.dtype, matrix.device)
    # row by row in memory, as a sparse product reads it
    basis = torch.linalg.qr(_sketch(matrix, size, source).T).Q.contiguous()
    tall = torch.linalg.qr(matrix @ basis)
    left, values, right = torch.linalg.svd(tall.R)
    return tall.Q @ left[:, :k], values[:k], basis @ right[:k].T


def sketch_size(k: int, eps: float) -> int:
    """Rows of S: ℓ = k + 4k/eps, a multiple of q.

    Typically |(S U_k)^+ S B|² is near (k/ℓ) Δ_k² ≤ (eps/4) Δ_k², and (1 + eps)² - 1 ≥ 2 eps is
    allowed: an eighth of it. The rest is left for the spread over seeds."""
    return STACKED * math.ceil((k + 4 * k / eps) / STACKED)


def _sketch(a: Tensor, size: int, source: Source) -> Tensor:
    """S A [size, m], A dense or COO: each CountSketch adds the rows of A up, with random signs, in
    random buckets, which are its own rows of S A."""
    (n, m), width = a.shape, size // STACKED
    first = width * torch.arange(STACKED, device=a.device).unsqueeze(1)
    buckets = first + source.below(width, STACKED, n)
    image = a.new_zeros(size, m, layout=torch.strided)
    scaled = source.signs(STACKED, n, scale=STACKED**-0.5)
    for bucket, signs in zip(buckets, scaled, strict=True):
        if not a.is_sparse:
            image.index_add_(0, bucket, a * signs.unsqueeze(1))
            continue
        entries = (*a._indices().unbind(0), a._values())
        for rows, columns, values in zip(*(x.split(ENTRIES) for x in entries), strict=True):
            image.view(-1).index_add_(0, bucket[rows] * m + columns, values * signs[rows])
    return image


def _check_matrix(a: Tensor) -> Tensor:
    """The matrix, dense or COO, in the dtype of all sums."""
    if not isinstance(a, Tensor):
        raise InputError(f"a must be a tensor [n, m], got {type(a).__name__}")
    if a.layout not in (torch.strided, torch.sparse_coo, torch.sparse_csr):
        raise InputError(f"a has layout {a.layout}; expected a dense, COO or CSR tensor")
    if a.dtype not in DTYPES:
        raise InputError(f"a has dtype {a.dtype}; expected a real floating-point tensor")
    if a.dim() != 2 or (a.layout == torch.sparse_coo and a.sparse_dim() != 2):
        raise InputError(f"a has shape {tuple(a.shape)}; expected a matrix [n, m]")
    if a.requires_grad and torch.is_grad_enabled():
        raise InputError("a requires grad, but the factors have no gradients; detach it")
    a = a.detach()
    a = a.to_sparse_coo() if a.layout == torch.sparse_csr else a
    check_finite(a=a._values() if a.is_sparse else a)
    return a.to(compute_dtype(a.dtype))
