"""Validation: from the caller's tensors to a `Problem`, or an error that names the argument."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from numbers import Real

import torch
from torch import Tensor

from ..errors import InputError
from .checks import check_bias, check_finite, is_tracing
from .problem import Problem
from .rounding import compute_dtype, unit_roundoff

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def attention_problem(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float,
    is_causal: bool, scale: float | None, enable_gqa: bool, *, finite: bool = True,
    names: tuple[str, str, str] = ("query", "key", "value"),
) -> Problem:  # fmt: skip
    """Check every argument of a call in SDPA's form and flatten it to [batch, heads, ...]. Entries
    are checked, too; if not ``finite``, for calls with a plan, on a CPU only, and not if traced."""
    given = (query, key, value)
    check_tensors(given, names)
    finite = finite or (query.is_cpu and not is_tracing())
    for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(flag, bool):
            raise InputError(f"{name} must be True or False, got {flag!r}")
    leading, key_leading = _leading_dims(given, names, enable_gqa)
    n, m, dim = query.shape[-2], key.shape[-2], query.shape[-1]
    weight, mask = _split_mask(attn_mask, query, (*leading, n, m), finite)
    if finite:
        check_finite(**dict(zip(names, given, strict=True)))
    scale = _check_scale(scale, dim)
    is_flipped = scale < 0
    if scale <= 0:  # kernels disagree about such scales: the sign moves to the query
        # zeros depend on the query: its gradient is zero even where it would overflow
        never = query.new_zeros((), dtype=torch.bool)
        query, scale = (-query, -scale) if scale < 0 else (torch.where(never, query, 0.0), 1.0)
    if scale < torch.finfo(compute_dtype(query.dtype)).smallest_normal:
        # a kernel would take it for zero, and zero times a masked score is no number
        unit = 2.0 ** (math.frexp(scale)[1] + 60)
        query, scale = query * unit, scale / unit
    tokens = (_four(query, leading), _four(key, key_leading), _four(value, key_leading))
    if not isinstance(dropout_p, Real) or not 0.0 <= dropout_p < 1.0:
        raise InputError(f"dropout_p must be in [0, 1), got {dropout_p!r}")
    return Problem(
        *tokens, weight, None, scale, is_causal, True, mask, leading=leading,
        dropout_p=float(dropout_p), is_flipped=is_flipped,
    )  # fmt: skip


def _check_place(name: str, tensor: Tensor, first: str, other: Tensor) -> None:
    """Raise if a tensor is not dense, or not on the device of another."""
    if tensor.is_nested or tensor.layout != torch.strided:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise InputError(f"{name} is a {kind} tensor; expected a dense one")
    if tensor.device != other.device:
        raise InputError(f"{name} is on {tensor.device} but {first} is on {other.device}")


def check_tensors(tensors: Sequence[Tensor], names: Sequence[str]) -> None:
    """Dense floating-point tensors [..., tokens, dim] of one dtype on one device."""
    query, first = tensors[0], names[0]
    for name, tensor in zip(names, tensors, strict=True):
        if not isinstance(tensor, Tensor):
            raise InputError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        _check_place(name, tensor, first, query)
        if tensor.dtype not in DTYPES:
            expected = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise InputError(f"{name} has dtype {tensor.dtype}; expected one of {expected}")
        if tensor.dim() < 2:
            shape = tuple(tensor.shape)
            raise InputError(f"{name} has shape {shape}; expected [..., heads, tokens, dim]")
        if tensor.dtype != query.dtype:
            raise InputError(f"{name} has dtype {tensor.dtype} but {first} has {query.dtype}")
        if tensor.device.type == "meta":
            raise InputError(f"{name} is a meta tensor, which has no entries; expected a real one")
    if query.shape[-1] < 1:
        raise InputError(f"{first} has head dim 0; expected at least 1")


def _leading_dims(
    tensors: Sequence[Tensor], names: Sequence[str], enable_gqa: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Leading dims (heads included) of the query side and of the key side."""
    (_, dim), (m, key_dim), (value_m, _) = (x.shape[-2:] for x in tensors)
    query, key, value = names
    if key_dim != dim:
        raise InputError(f"{key} has head dim {key_dim} but {query} has {dim}; they must agree")
    if value_m != m:
        raise InputError(f"{value} has {value_m} tokens but {key} has {m}; they must agree")
    last, hint = 2, "; for fewer key heads than query heads pass enable_gqa=True"
    if enable_gqa:
        if min(x.dim() for x in tensors) < 3:
            raise InputError("enable_gqa=True needs a heads dim: [..., heads, tokens, dim]")
        heads, key_heads, value_heads = (x.shape[-3] for x in tensors)
        if key_heads != value_heads or key_heads == 0 or heads % key_heads:
            raise InputError(
                f"enable_gqa=True with {heads} query heads, {key_heads} key heads and "
                f"{value_heads} value heads; key and value heads must be equal and divide the "
                "query heads"
            )
        last, hint = 3, ""
    shapes = [tuple(x.shape[:-last]) for x in tensors]
    same = shapes[0] == shapes[1] == shapes[2]
    try:
        batch = shapes[0] if same else tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        text = ", ".join(f"{name} {shape}" for name, shape in zip(names, shapes, strict=True))
        raise InputError(f"leading dims of {text} do not broadcast{hint}") from None
    return (*batch, *tensors[0].shape[-last:-2]), (*batch, *tensors[1].shape[-last:-2])


def _expanded(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    try:
        return tensor.expand(shape)
    except RuntimeError:
        fault = f"{name} has shape {tuple(tensor.shape)}, which does not broadcast to {shape}"
        raise InputError(fault) from None


def _four(tensor: Tensor, leading: Sequence[int]) -> Tensor:
    """Broadcast the leading dims and flatten them to [batch, heads]."""
    whole = tensor.expand(*leading, *tensor.shape[-2:])
    return whole.reshape(math.prod(leading[:-1]), *(leading[-1:] or (1,)), *tensor.shape[-2:])


def _check_scale(scale: float | None, dim: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(dim)
    if isinstance(scale, bool) or not isinstance(scale, Real) or not math.isfinite(scale):
        raise InputError(f"scale must be a finite number or None (1/sqrt(dim)), got {scale!r}")
    return float(scale)


def _split_mask(
    mask: Tensor | None, query: Tensor, shape: tuple[int, ...], finite: bool
) -> tuple[Tensor | None, Tensor | None]:
    """A mask as key log-weights [batch, heads, m] if it is a key mask, else as it came.

    A mask is a key mask when its query dim has size 1, or is an expanded view of such a mask."""
    if mask is None:
        return None, None
    if not isinstance(mask, Tensor):
        raise InputError(f"attn_mask must be a torch.Tensor or None, got {type(mask).__name__}")
    _check_place("attn_mask", mask, "query", query)
    if mask.dtype != torch.bool and mask.dtype not in DTYPES:
        raise InputError(f"attn_mask has dtype {mask.dtype}; expected bool or floating point")
    whole = _expanded("attn_mask", mask, shape)
    rows = mask.shape[-2] if mask.dim() >= 2 else 1
    if rows == 0:  # no queries, and a mask for each of them
        return None, None
    if rows > 1 and mask.stride(-2) != 0:
        if mask.requires_grad and torch.is_grad_enabled():
            raise InputError(
                f"attn_mask requires grad and has shape {tuple(mask.shape)}; only a bias of the "
                "keys [..., 1, keys] has gradients: detach it"
            )
        check_bias(mask)
        return None, _four(whole, shape[:-2])
    if rows > 1:
        mask = mask[..., :1, :]
    weight = torch.where(mask, 0.0, -math.inf) if mask.dtype == torch.bool else mask
    weight = weight.to(compute_dtype(query.dtype))
    if finite:
        check_bias(weight)
    weight = weight.expand(*shape[:-2], 1, shape[-1])
    return _four(weight, shape[:-2]).squeeze(2), None


# ---- kernel densities --------------------------------------------------------------------------


def density_problem(
    points: Tensor, data: Tensor, bandwidth: float | Tensor, weights: Tensor | None
) -> tuple[Problem, Tensor]:
    """A density as a kernel sum, and the log of what to divide that by: with x, y centred and
    divided by h, exp(-|x-y|^2/2) = exp(<x,y>) exp(-|x|^2/2) exp(-|y|^2/2). In the factors of rows
    it would be lost: they are so large that it is rounding beside them, until keys cancel them."""
    names = ("points", "data", "data")
    given = attention_problem(points, data, data, None, 0.0, False, 1.0, False, names=names)
    if not data.shape[-2]:
        raise InputError("data has no points; expected at least one")
    width = _check_bandwidth(bandwidth, points)
    data64 = data.double()
    centre = data64.mean(-2, keepdim=True)
    query, key = (points.double() - centre) / width, (data64 - centre) / width
    row_weight, log_weight = (-x.square().sum(-1) / 2 for x in (query, key))
    weight = data64.new_ones(()) if weights is None else _check_weights(weights, data)
    log_weight = log_weight + weight.log()
    total = weight.expand(data.shape[:-1]).sum(-1).expand(given.leading)
    dtype = _density_dtype(points.dtype, query, key)
    tokens = (query.to(dtype), key.to(dtype), key.new_ones(*key.shape[:-1], 1, dtype=dtype))
    parts = (*tokens, log_weight.unsqueeze(-1), row_weight.unsqueeze(-1))
    query, key, value, keys, rows = (_four(x, given.leading) for x in parts)
    problem = replace(
        given, query=query, key=key, value=value, key_log_weight=keys.squeeze(-1),
        query_log_weight=rows.squeeze(-1), normalise=False,
    )  # fmt: skip
    volume = (width.log() + math.log(2 * math.pi) / 2).expand(points.shape[-1]).sum()
    return problem, total.log() + volume


def _density_dtype(dtype: torch.dtype, query: Tensor, key: Tensor) -> torch.dtype:
    """float32 unless its rounding of <x, y> would show: the exponent -|x - y|^2/2 is a small
    difference of large numbers when points lie many bandwidths from their centre."""
    reach = sum(float(x.square().sum(-1).max()) for x in (query, key) if x.numel())
    if not math.isfinite(reach):
        raise InputError(
            "bandwidth is so small that squares of distances over it overflow float64; use a "
            "larger one"
        )
    rounding = reach * (query.shape[-1] + 6) * unit_roundoff(torch.float32)
    return torch.float64 if rounding > 1e-4 else compute_dtype(dtype)


def _check_bandwidth(bandwidth: float | Tensor, points: Tensor) -> Tensor:
    dim = points.shape[-1]
    if isinstance(bandwidth, bool) or not isinstance(bandwidth, (Real, Tensor)):
        raise InputError(f"bandwidth must be a number or a tensor, got {bandwidth!r}")
    if isinstance(bandwidth, Tensor) and (bandwidth.is_complex() or bandwidth.requires_grad):
        raise InputError("bandwidth must be a real tensor that does not require grad")
    width = torch.as_tensor(bandwidth, dtype=torch.float64, device=points.device)
    if width.shape not in ((), (1,), (dim,)):
        raise InputError(
            f"bandwidth has shape {tuple(width.shape)}; expected a number or one for each of "
            f"the {dim} dims"
        )
    if not bool((width.isfinite() & (width > 0)).all()):
        raise InputError(f"bandwidth must be finite and > 0, got {bandwidth!r}")
    return width


def _check_weights(weights: Tensor, data: Tensor) -> Tensor:
    if not isinstance(weights, Tensor) or not weights.is_floating_point():
        raise InputError(f"weights must be a floating-point tensor, got {weights!r}")
    if weights.requires_grad and torch.is_grad_enabled():
        raise InputError("weights requires grad, but densities have no gradients so far")
    _check_place("weights", weights, "data", data)
    expanded = _expanded("weights", weights.double(), tuple(data.shape[:-1]))
    good = (expanded.isfinite() & (expanded >= 0)).all(-1) & (expanded.sum(-1) > 0)
    if not bool(good.all()):
        raise InputError("weights must be finite and >= 0, with a positive sum")
    return expanded
