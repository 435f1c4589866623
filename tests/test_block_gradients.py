"""Gradients through lists: those of the function that ran, with orders and lists held fixed."""

from __future__ import annotations

import math

import pytest
import torch

import supportbasis as sb
from cases import dense_attention
from test_blocks import clustered, relative


def planned(q, k, v, budget=0.5, causal=False, bias=None, **options):
    method = sb.BlockSupport(budget, block_size=16, tail="coarse", **options)
    plan = sb.plan(q, k, v, attn_mask=bias, is_causal=causal, method=method)
    assert all(head.kind == "block" for head in plan.heads)
    return plan


def derivative(function, tensors, directions, step=1e-6):
    """Along a direction, by central differences."""
    ahead, back = (
        function(*(x + sign * step * d for x, d in zip(tensors, directions, strict=True)))
        for sign in (1, -1)
    )
    return float(ahead - back) / (2 * step)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("order", ["auto", "tree", "sequence", "places"])
@pytest.mark.parametrize("weights", ["none", "bias", "mask"])
def test_slopes_in_random_directions(order, weights, causal):
    n = 700
    q, k, v = clustered(n=n, d=6, clusters=9, noise=0.3, size=1.5, dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    bias = torch.randn(n, generator=generator, dtype=torch.float64)
    bias = {"none": None, "bias": bias, "mask": bias.masked_fill(bias > 1.2, -math.inf)}[weights]
    plan = planned(q, k, v, causal=causal, bias=bias, order=order)
    target = torch.randn(q.shape[:-1] + v.shape[-1:], generator=generator, dtype=torch.float64)
    lean = torch.randn(n, generator=generator, dtype=torch.float64)

    def loss(q, k, v, *rest):
        result = sb.attention(
            q, k, v, attn_mask=rest[0] if rest else None, is_causal=causal, plan=plan,
            return_result=True,
        )  # fmt: skip
        return (result.output * target).sum() + (result.lse * lean).sum()

    tensors = [q, k, v] + ([] if bias is None else [bias])
    leaves = [x.clone().requires_grad_() for x in tensors]
    loss(*leaves).backward()
    for which in range(len(tensors)):
        directions = [torch.zeros_like(x) for x in tensors]
        directions[which] = torch.randn(
            tensors[which].shape, generator=generator, dtype=torch.float64
        )
        grad = leaves[which].grad
        assert bool(grad.isfinite().all())
        slope = float((grad * directions[which]).sum())
        with torch.no_grad():
            expected = derivative(loss, tensors, directions)
        assert slope == pytest.approx(expected, rel=2e-5, abs=2e-5 * float(grad.norm()))


def test_grouped_heads_and_other_value_dims():
    q, k, v = clustered(n=512, d=6, dtype=torch.float64)
    q = torch.cat([q, 0.7 * q.flip(2)], 1)
    v = torch.cat([v, v.square()], -1)
    method = sb.BlockSupport(0.6, block_size=16, tail="coarse")
    plan = sb.plan(q, k, v, enable_gqa=True, method=method)
    assert {head.kind for head in plan.heads} == {"block"}
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    sb.attention(*leaves, enable_gqa=True, plan=plan).square().sum().backward()
    twin = [x.clone().requires_grad_() for x in (q, k, v)]
    dense_attention(*twin)[0].square().sum().backward()
    for mine, exact in zip(leaves, twin, strict=True):
        assert relative(mine.grad, exact.grad) < 0.05


def test_with_every_key_exact_they_are_those_of_attention():
    q, k, v = clustered(n=600, d=6, dtype=torch.float64)
    plan = planned(q, k, v, budget=0.9)
    from dataclasses import replace

    (head,) = plan.heads
    plan = replace(plan, heads=(replace(head, blocks=replace(head.blocks, price=0.0)),))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    sb.attention(*leaves, plan=plan).square().sum().backward()
    twin = [x.clone().requires_grad_() for x in (q, k, v)]
    dense_attention(*twin)[0].square().sum().backward()
    for mine, exact in zip(leaves, twin, strict=True):
        assert relative(mine.grad, exact.grad) < 1e-9


def test_auto_trains_through_lists():
    q, k, v = (x.requires_grad_() for x in clustered(n=4096, size=4.0))
    result = sb.attention(q, k, v, method=sb.BlockSupport(0.2, tail="coarse"), return_result=True)
    assert result.plan.heads[0].kind == "block"
    result.output.square().mean().backward()
    assert all(bool(x.grad.isfinite().all()) for x in (q, k, v))
