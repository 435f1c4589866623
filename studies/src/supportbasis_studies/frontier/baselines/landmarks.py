"""Nyströmformer: landmarks in place of queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor

from .common import Answer, Case, attend

ITERATIONS = 6


def nystrom(case: Case, budget: float, seed: int) -> Answer | None:
    """softmax(Q K̃ᵀ) · softmax(Q̃ K̃ᵀ)⁺ · softmax(Q̃ Kᵀ) V with landmarks Q̃, K̃.

    Nyströmformer (Xiong et al., 2021): landmarks are the means of consecutive segments, and six
    rounds of its iteration stand for the pseudo-inverse. It has no causal form.
    """
    head = case.head
    count = _affordable(case, budget)
    if count < 1 or head.is_causal:
        return None
    query, key = (_means(x, count) for x in (head.query, head.key))
    first = (case.query @ key.T * head.scale).softmax(1)
    middle = (query @ key.T * head.scale).double().softmax(1)
    last = attend(query @ head.key.T * head.scale, head.value)
    output = first @ (_inverse(middle) @ last.double()).to(first.dtype)
    return Answer(output, _work(case, count) / case.exact_work, f"{count} landmarks")


def _work(case: Case, count: int) -> float:
    head = case.head
    outer = (head.n + head.m) * (count * (head.d + head.dv) + head.d)
    return outer + count**2 * (head.d + head.dv) + 4 * ITERATIONS * count**3


def _affordable(case: Case, budget: float) -> int:
    """The largest number of landmarks within the budget."""
    low, high = 0, min(case.head.n, case.head.m)
    while low < high:
        middle = (low + high + 1) // 2
        if _work(case, middle) <= budget * case.exact_work:
            low = middle
        else:
            high = middle - 1
    return low


def _means(x: Tensor, count: int) -> Tensor:
    """Means of ``count`` consecutive segments of nearly equal length."""
    owner = torch.arange(len(x), device=x.device) * count // len(x)
    total = x.new_zeros(count, x.shape[1]).index_add_(0, owner, x)
    return total / owner.bincount(minlength=count).unsqueeze(1)


def _inverse(matrix: Tensor) -> Tensor:
    """The paper's iteration for the pseudo-inverse of a square matrix."""
    identity = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    norms = matrix.abs().sum(0).max() * matrix.abs().sum(1).max()
    inverse = matrix.T / norms
    for _ in range(ITERATIONS):
        product = matrix @ inverse
        inner = 15 * identity - product @ (7 * identity - product)
        inverse = inverse @ (13 * identity - product @ inner) / 4
    return inverse
