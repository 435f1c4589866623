"""Calls, and their derivatives, for the tests of gradients."""

import math

import torch

import supportbasis as sb
from cases import qkv
from supportbasis.engine import autograd
from supportbasis.problem.validation import attention_problem
from supportbasis_studies import reference


class Case:
    """A method on small inputs with one mask; its plan is made once and held fixed."""

    def __init__(self, method, mask, shape, seed=0, scale=0.45, dtype=torch.float64):
        shape = dict(shape)
        leading = shape.pop("leading")
        self.tensors = qkv(*leading, scale=scale, seed=seed, dtype=dtype, **shape)
        self.causal = mask.startswith("causal")
        self.gqa = "key_heads" in shape
        m = self.tensors[1].shape[-2]
        generator = torch.Generator().manual_seed(seed + 1)
        self.bias = None
        if mask == "padding":
            self.bias = torch.zeros(m, dtype=dtype)
            self.bias[1::3] = -math.inf
        elif mask.endswith("bias"):
            self.bias = torch.randn(m, generator=generator, dtype=dtype)
        self.plan = sb.plan(
            *self.tensors, attn_mask=self.bias, is_causal=self.causal, enable_gqa=self.gqa,
            method=method,
        )  # fmt: skip

    @property
    def inputs(self):
        """Leaves that require grad: query, key, value and, where there is one, the bias."""
        bias = [] if self.bias is None else [self.bias]
        return [x.clone().requires_grad_() for x in (*self.tensors, *bias)]

    def problem(self, q, k, v, bias=None):
        return attention_problem(q, k, v, bias, 0.0, self.causal, None, self.gqa)

    def run(self, *inputs):
        """Output and lse of the engine; rows without a sum have lse 0, which has no gradient."""
        outcome = autograd.as_operator(self.problem(*inputs), self.plan)
        return outcome.output, _finite(outcome.lse)

    def dense_reference(self, *inputs):
        output, lse = reference.execute(self.problem(*inputs), self.plan)
        return output, _finite(lse)


def _finite(lse):
    return torch.where(lse > -math.inf, lse, 0.0)


def gradients(call, inputs, seed=3):
    """Gradients of a random linear function of output and lse."""
    generator = torch.Generator().manual_seed(seed)
    outputs = call(*inputs)
    weights = [
        torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in outputs
    ]
    total = sum((x * w).sum() for x, w in zip(outputs, weights, strict=True))
    return torch.autograd.grad(total, inputs)


def assert_close(given, expected, rtol=1e-9):
    """Equal up to rounding: relative to the largest entry of each gradient."""
    for a, b in zip(given, expected, strict=True):
        assert a.isfinite().all()
        size = float(b.double().abs().max()) if b.numel() else 0.0
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=rtol * size + 1e-12)
