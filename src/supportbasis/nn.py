"""Modules: attention with its projections, and a transformer encoder of any depth.

Which method computes the attention is a property of a module, not of its weights: it can be
changed at any time, on a trained module too, and nothing has to be trained again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from .api import attention
from .api import plan as make_plan
from .errors import InputError
from .gradient import closed_form_attention
from .gradient.closed_attention import check_method
from .methods import Auto, Method
from .methods.base import check_is_method
from .plans import Plan
from .problem.checks import check_integer

__all__ = ["SupportBasisAttention", "SupportBasisEncoder"]

GRADIENTS = ("function", "closed-form")


class SupportBasisAttention(nn.Module):
    """Multi-head attention: projections of queries, keys and values, `attention`, a projection.

    ``num_key_heads`` below ``num_heads`` shares keys and values between heads (grouped-query
    attention); ``rope`` turns queries and keys by their positions before they meet. ``method`` is
    any method of the library, by default ``Auto(tolerance)``. ``dropout`` on the weights is for
    training only, and with it attention runs exactly. ``bias`` is that of the projections.

    ``gradient`` says what the backward pass computes: "function", the gradient of the function that
    ran, or "closed-form", the paper's, which puts approximate weights into the gradient of exact
    attention (`sb.gradient.closed_form_attention`). It needs ``method`` to be `Exact`,
    `Polynomial` or `SingleThreshold`.

    Without a plan every call plans anew. `plan` makes one from a batch and keeps it: later calls
    use it, whatever their batch size and length. Setting ``method`` drops it.

    >>> import torch, supportbasis as sb
    >>> module = sb.nn.SupportBasisAttention(16, 4, num_key_heads=2, rope=True, is_causal=True)
    >>> x = torch.randn(2, 10, 16)
    >>> module(x).shape
    torch.Size([2, 10, 16])
    >>> module.method = sb.Exact()  # the same weights
    >>> module.plan(x).method
    Exact()
    """

    def __init__(
        self, embed_dim: int, num_heads: int, *, num_key_heads: int | None = None,
        method: Method | None = None, tolerance: float | None = None, is_causal: bool = False,
        rope: bool = False, bias: bool = True, dropout: float = 0.0, gradient: str = "function",
    ):  # fmt: skip
        super().__init__()
        if gradient not in GRADIENTS:
            raise InputError(f"gradient must be one of {GRADIENTS}, got {gradient!r}")
        if gradient == "closed-form" and dropout:
            raise InputError(f"gradient='closed-form' has no dropout, got dropout={dropout}")
        self.embed_dim, self.num_heads, self.gradient = embed_dim, num_heads, gradient
        self.num_key_heads = num_heads if num_key_heads is None else num_key_heads
        self.head_dim = _head_dim(embed_dim, num_heads, self.num_key_heads, rope)
        if not 0.0 <= dropout < 1.0:
            raise InputError(f"dropout must be in [0, 1), got {dropout!r}")
        self.is_causal, self.rope, self.dropout = is_causal, rope, dropout
        self.kept_plan: Plan | None = None
        if method is not None and tolerance is not None:
            raise InputError(f"method is {method} and tolerance is {tolerance}; give one of them")
        self.method = method if tolerance is None else Auto(tolerance)
        key_dim = self.num_key_heads * self.head_dim
        self.query_projection = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.key_projection = nn.Linear(embed_dim, key_dim, bias=bias)
        self.value_projection = nn.Linear(embed_dim, key_dim, bias=bias)
        self.output_projection = nn.Linear(embed_dim, embed_dim, bias=bias)

    def forward(
        self, x: Tensor, context: Tensor | None = None, *, key_mask: Tensor | None = None,
        plan: Plan | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention of ``x`` [..., n, embed_dim] over ``context`` [..., m, embed_dim] (None: x).

        ``key_mask`` [..., m] is True for tokens that may be attended to. A ``plan`` made with
        this module's method is used instead of the one that the module keeps."""
        plan = self.kept_plan if plan is None else plan
        method = self.method if plan is None else None
        settings: dict[str, Any] = {"enable_gqa": True, "method": method, "plan": plan}
        call = self._inputs(x, context, key_mask)
        if self.gradient == "closed-form" and torch.is_grad_enabled():
            output = closed_form_attention(*call, self.is_causal, **settings)
        else:
            dropout = self.dropout if self.training else 0.0
            output = attention(*call, dropout, self.is_causal, **settings)
        return self.output_projection(output.transpose(-2, -3).flatten(-2))

    def plan(
        self, x: Tensor, context: Tensor | None = None, *, key_mask: Tensor | None = None
    ) -> Plan:
        """Make a plan from a batch, as `sb.plan`, and keep it for later calls.

        Where gradients are recorded, errors of causal lists are measured on strict ones, which a
        training step runs."""
        call = self._inputs(x, context, key_mask)
        self.kept_plan = make_plan(
            *call, is_causal=self.is_causal, enable_gqa=True, method=self.method
        )
        return self.kept_plan

    def _inputs(
        self, x: Tensor, context: Tensor | None, key_mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys and values [..., heads, tokens, dim], and a mask of all heads and rows."""
        context = x if context is None else context
        query, key = self.query_projection(x), self.key_projection(context)
        flat = (query, key, self.value_projection(context))
        query, key, value = (y.unflatten(-1, (-1, self.head_dim)).transpose(-2, -3) for y in flat)
        if self.rope:
            query, key = rotated(query), rotated(key)
        return query, key, value, None if key_mask is None else key_mask[..., None, None, :]

    @property
    def method(self) -> Method:
        return self._method

    @method.setter
    def method(self, method: Method | None) -> None:
        check_is_method(method)
        method = Auto() if method is None else method
        if self.gradient == "closed-form":
            check_method(method, "gradient='closed-form'")
        self._method, self.kept_plan = method, None

    @staticmethod
    def from_multihead(
        module: nn.MultiheadAttention, *, method: Method | None = None,
        tolerance: float | None = None, is_causal: bool = False,
    ) -> SupportBasisAttention:  # fmt: skip
        """A module with copies of the weights of ``nn.MultiheadAttention``.

        Tokens are always [..., tokens, dim] here, as with ``batch_first=True`` there."""
        if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
            raise InputError("module has add_bias_kv or add_zero_attn, which have no counterpart")
        if module.in_proj_weight is None:
            raise InputError("module has kdim or vdim other than embed_dim; expected them equal")
        bias = module.in_proj_bias is not None
        made = SupportBasisAttention(
            module.embed_dim, module.num_heads, method=method, tolerance=tolerance,
            is_causal=is_causal, bias=bias, dropout=module.dropout,
        ).to(module.in_proj_weight)  # fmt: skip
        given, state = module.state_dict(), {}
        for kind in ("weight", "bias") if bias else ("weight",):
            parts = (*given[f"in_proj_{kind}"].chunk(3), given[f"out_proj.{kind}"])
            for name, part in zip(("query", "key", "value", "output"), parts, strict=True):
                state[f"{name}_projection.{kind}"] = part
        made.load_state_dict(state)
        return made.train(module.training)

    def extra_repr(self) -> str:
        text = f"{self.embed_dim}, {self.num_heads}, method={self.method}"
        if self.num_key_heads < self.num_heads:
            text += f", num_key_heads={self.num_key_heads}"
        return text + f", is_causal={self.is_causal}, rope={self.rope}"


class SupportBasisEncoder(nn.Module):
    """A transformer of ``num_layers`` pre-norm layers and a last norm.

    Each layer is x + attention(norm(x)), then x + feed-forward(norm(x)) with a GELU in
    ``feedforward_dim`` (4 embed_dim unless given). Further options are those of
    `SupportBasisAttention`. Setting ``method`` sets that of every layer; single layers may differ.

    >>> import torch, supportbasis as sb
    >>> model = sb.nn.SupportBasisEncoder(3, 16, 2, is_causal=True)
    >>> model(torch.randn(2, 10, 16)).shape
    torch.Size([2, 10, 16])
    >>> model.method = sb.Polynomial(2)
    """

    def __init__(
        self, num_layers: int, embed_dim: int, num_heads: int, *,
        feedforward_dim: int | None = None, **options: Any,
    ):  # fmt: skip
        super().__init__()
        num_layers = check_integer("num_layers", num_layers, 0)
        hidden = 4 * embed_dim if feedforward_dim is None else feedforward_dim
        layers = nn.ModuleList(
            _Layer(SupportBasisAttention(embed_dim, num_heads, **options), hidden)
            for _ in range(num_layers)
        )
        self.layers = cast("Sequence[_Layer]", layers)
        self.norm = nn.LayerNorm(embed_dim)

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """``x`` [..., n, embed_dim]; ``key_mask`` [..., n] is True for tokens that are there."""
        for layer in self.layers:
            x = layer(x, key_mask)
        return self.norm(x)

    @property
    def method(self) -> tuple[Method, ...]:
        """The method of each layer."""
        return tuple(layer.attention.method for layer in self.layers)

    @method.setter
    def method(self, method: Method) -> None:
        for layer in self.layers:
            layer.attention.method = method

    def plan(self, x: Tensor, *, key_mask: Tensor | None = None) -> tuple[Plan, ...]:
        """Make a plan for every layer from a batch that runs through all of them, and keep it."""
        plans = []
        for layer in self.layers:
            plans.append(layer.attention.plan(layer.attention_norm(x), key_mask=key_mask))
            x = layer(x, key_mask).detach()
        return tuple(plans)


class _Layer(nn.Module):
    """Attention and feed-forward, each after a norm and beside a skip."""

    def __init__(self, attention: SupportBasisAttention, hidden: int):
        super().__init__()
        dim = attention.embed_dim
        self.attention_norm, self.feedforward_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = attention
        self.feedforward = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x: Tensor, key_mask: Tensor | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), key_mask=key_mask)
        return x + self.feedforward(self.feedforward_norm(x))


ROPE_BASE = 10000.0


def rotated(x: Tensor) -> Tensor:
    """Rotary positions: of ``x`` [..., tokens, dim] the coordinates i and i + dim/2 of token t are
    turned by the angle t base^(-2i/dim), so that scores depend on distances only.

    >>> x = torch.ones(3, 2)
    >>> bool(torch.allclose(rotated(x).norm(dim=1), x.norm(dim=1)))
    True
    """
    tokens, half = x.shape[-2], x.shape[-1] // 2
    exponent = torch.arange(half, device=x.device, dtype=torch.float32) / half
    position = torch.arange(tokens, device=x.device, dtype=torch.float32)
    angle = position.unsqueeze(1) * ROPE_BASE**-exponent
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


def _head_dim(embed_dim: int, heads: int, key_heads: int, rope: bool) -> int:
    sizes = {"embed_dim": embed_dim, "num_heads": heads, "num_key_heads": key_heads}
    for name, size in sizes.items():
        check_integer(name, size, 1)
    if embed_dim % heads:
        raise InputError(f"num_heads is {heads}; expected a divisor of embed_dim={embed_dim}")
    if heads % key_heads:
        raise InputError(f"num_key_heads is {key_heads}; expected a divisor of num_heads={heads}")
    if rope and embed_dim // heads % 2:
        raise InputError(f"rope needs an even head dim, got {embed_dim // heads}")
    return embed_dim // heads
