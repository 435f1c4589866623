"""Attention over sliced tokens is that of the whole sequence, forward and backward."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import supportbasis as sb
from cases import list_plan, small_lists
from rank_cases import on_ranks
from supportbasis.distributed.token_layout import TokenLayout
from supportbasis.plans import FittedHead

N = 203
SLICES = {2: (140, 63), 4: (0, 120, 3, 80), 8: (30, 20, 0, 1, 90, 2, 40, 20)}  # tokens of each rank
# In float64 sums of 203 terms round by less than 1e-13, and no denominator is below 1/100 of the
# terms it is made of.
TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}


@dataclass(frozen=True)
class Case:
    """A call: its method, and what its inputs look like."""

    method: sb.methods.Method
    causal: bool = False
    mask: str | None = None  # a boolean mask, or a bias with gradients
    heads: tuple[int, int] = (4, 2)
    outliers: int = 4
    size: float = 0.5
    exchange: str | None = None
    fitted: bool = False  # a fitted polynomial that fails on some rows, and has exact first rows
    dtype: torch.dtype = torch.float64

    def inputs(self, n: int = N) -> list[Tensor | None]:
        generator = torch.Generator().manual_seed(0)

        def normal(heads: int, dim: int) -> Tensor:
            return torch.randn(2, heads, n, dim, generator=generator, dtype=torch.float64)

        query, key, value = normal(self.heads[0], 6), normal(self.heads[1], 6), None
        value = normal(self.heads[1], 5)
        for x in (query, key):
            x *= self.size
            for i in range(self.outliers):
                x[i % 2, i % x.shape[1], 61 * i % n] *= 5
        mask = None
        if self.mask == "mask":
            mask = (torch.arange(n) % 5 > 0).view(1, 1, 1, n)
        if self.mask == "bias":
            mask = normal(1, 1).mT[:1].contiguous()
        return [query.to(self.dtype), key.to(self.dtype), value.to(self.dtype), mask]

    def plan(self) -> sb.Plan:
        query, key, value, mask = self.inputs()
        if isinstance(self.method, sb.BlockSupport):
            return list_plan(query, small_lists(self.causal))
        gqa = {"enable_gqa": self.heads[0] != self.heads[1]}
        causal = self.causal and not self.fitted
        plan = sb.plan(query, key, value, mask, is_causal=causal, method=self.method, **gqa)
        if not self.fitted:
            return plan
        changed = []
        for head in plan.heads:
            assert isinstance(head, FittedHead)
            kernel = replace(head.fitted, coefficients=(0.5, *head.fitted.coefficients[1:]))
            changed.append(replace(head, fitted=kernel, exact_rows=20 * self.causal, scores=None))
        return replace(plan, heads=tuple(changed), is_causal=None)

    def run(self, attention, tensors, **more) -> tuple[Tensor, list[Tensor]]:
        """Output, and the gradients of all inputs."""
        query, key, value, mask = tensors
        leaves = [query, key, value, *([mask] if self.mask == "bias" else [])]
        for x in leaves:
            x.requires_grad_()
        output = attention(
            query, key, value, mask, is_causal=self.causal,
            enable_gqa=self.heads[0] != self.heads[1], **more,
        )  # fmt: skip
        weight = more_weight(output, more_tokens(tensors))
        (output * weight).sum().backward()
        return output.detach(), [x.grad for x in leaves]


def more_tokens(tensors) -> Tensor:
    return tensors[0].detach()[..., :1]


def more_weight(output: Tensor, tokens: Tensor) -> Tensor:
    """Gradients of the output that depend on the token, not on its place."""
    columns = torch.arange(1, output.shape[-1] + 1, dtype=output.dtype)
    return torch.cos(columns * (1 + tokens))


CASES = {
    "polynomial": Case(sb.Polynomial(2), outliers=0),
    "polynomial causal": Case(sb.Polynomial(2), causal=True, outliers=0),
    "polynomial degree 0": Case(sb.Polynomial(0), causal=True, outliers=0, size=0.1),
    "polynomial masked": Case(sb.Polynomial(1), causal=True, mask="mask", outliers=0, size=0.3),
    "polynomial bias": Case(sb.Polynomial(2), mask="bias", outliers=0, size=0.3),
    "threshold": Case(sb.SingleThreshold(1.6)),
    "threshold causal": Case(sb.SingleThreshold(1.6), causal=True),
    "threshold masked": Case(sb.SingleThreshold(1.6), mask="mask"),
    "threshold causal bias": Case(sb.SingleThreshold(1.6), causal=True, mask="bias"),
    "no large token": Case(sb.SingleThreshold(9.0), causal=True, outliers=0),
    "large rows, no large keys": Case(sb.SingleThreshold(9.0), causal=True, outliers=1),
    "fitted": Case(sb.FittedPolynomial(features=40)),
    "fitted bias": Case(sb.FittedPolynomial(features=40), mask="bias"),
    "fitted failed": Case(sb.FittedPolynomial(features=40), fitted=True),
    "fitted failed causal": Case(sb.FittedPolynomial(features=40), causal=True, fitted=True),
    "fitted causal mask": Case(
        sb.FittedPolynomial(features=40), causal=True, mask="mask", fitted=True
    ),
    "exact": Case(sb.Exact()),
    "exact causal bias": Case(sb.Exact(), causal=True, mask="bias", heads=(3, 3)),
    "exact by heads": Case(sb.Exact(), causal=True, mask="mask", exchange="heads"),
    "exact ring": Case(sb.Exact(), causal=True, mask="mask", exchange="ring"),
    "ring with a bias": Case(sb.Exact(), causal=True, mask="bias", exchange="ring"),
    "ring of one head": Case(sb.Exact(), heads=(1, 1)),
    "lists": Case(sb.BlockSupport()),
    "lists causal": Case(sb.BlockSupport(), causal=True),
    "lists of three heads": Case(sb.BlockSupport(), heads=(3, 1), mask="mask"),
    "buckets": Case(sb.MultiThreshold(), causal=True, heads=(6, 3)),
    "power": Case(sb.PowerAttention(2), mask="mask"),
    "auto": Case(sb.Auto(0.05), causal=True),
}


def of_rank(case: Case, tensors: list[Tensor | None], layout: TokenLayout) -> list[Tensor | None]:
    rank = dist.get_rank()
    query, key, value, mask = tensors
    found = [layout.slices(x)[rank].clone() for x in (query, key, value)]
    return [*found, None if mask is None else layout.slices(mask, 3)[rank].clone()]


def differences(expected, layout: str) -> dict[str, str]:
    """Cases whose output or gradients differ, and how."""
    tokens = TokenLayout(SLICES[dist.get_world_size()], layout)
    found = {}
    for name, (plan, output, grads) in expected.items():
        case = CASES[name]
        tensors = of_rank(case, case.inputs(), tokens)
        made = case.run(
            sb.distributed.attention, tensors, plan=plan, layout=layout, exchange=case.exchange
        )
        wanted = [output, *grads]
        for what, x, whole in zip(("output", "query", "key", "value", "bias"),
                                  (made[0], *made[1]), wanted, strict=False):  # fmt: skip
            slices = tokens.slices(whole, 3 if what == "bias" else 2)
            unit = 1.0 if what == "output" else float(whole.abs().max().clamp(min=1e-12))
            try:
                torch.testing.assert_close(x / unit, slices[dist.get_rank()] / unit, **TOLERANCE)
            except AssertionError as error:
                found[name] = f"{found.get(name, '')}\n{what}: {error}"
    return found


@pytest.fixture(scope="module")
def expected():
    """Plans, outputs and gradients of all cases on one device."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for name, case in CASES.items():
            plan = case.plan()
            found[name] = (plan, *case.run(sb.attention, case.inputs(), plan=plan))
    return found


@pytest.mark.filterwarnings("ignore:supportbasis")
@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (2, "contiguous"),
        (4, "zigzag"),
        pytest.param(2, "zigzag", marks=pytest.mark.slow),
        pytest.param(4, "contiguous", marks=pytest.mark.slow),
        pytest.param(8, "zigzag", marks=pytest.mark.slow),
    ],
)
def test_slices_give_what_the_whole_gives(expected, size, layout):
    failed = {}
    for rank, found in enumerate(on_ranks(size, differences, expected, layout)):
        failed |= {f"{name}, rank {rank}": text for name, text in found.items()}
    assert not failed, "\n".join(f"{name}: {text}" for name, text in failed.items())


@pytest.mark.filterwarnings("ignore:supportbasis")
def test_the_cases_have_what_their_names_say(expected):
    def failed(name: str) -> int:
        case, plan = CASES[name], expected[name][0]
        query, key, value, mask = case.inputs()
        result = sb.attention(
            query, key, value, mask, is_causal=case.causal, plan=plan, return_result=True,
            enable_gqa=True,
        )  # fmt: skip
        return int(result.certificate.invalid_rows.sum())

    rows = 2 * 4 * N
    for name in CASES:
        if "failed" in name:
            assert 0 < failed(name) < rows, name
    kinds = {name: {head.kind for head in plan.heads} for name, (plan, *_) in expected.items()}
    for kind in ("polynomial", "fitted", "lists", "power"):
        named = {name: found for name, found in kinds.items() if name.startswith(kind)}
        assert all(found == {kind} for found in named.values()), named
    assert all(found == {"single-threshold"} for name, found in kinds.items() if "thresh" in name)
    assert kinds["buckets"] == {"multi-threshold"}
