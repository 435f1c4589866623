"""The fields of each kind of head in a plan's file, and what is checked when they are read.

Claims are left out of a file: what is proved about a polynomial is proved again from its
coefficients, the range of a pair's polynomial must be that of the pair, the sketch of a kernel is
that of the method, and the maps of a balancing transform must undo each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..lists.tables import ListSettings
from ..methods import Method
from ..methods.block_support import LARGEST_BLOCK
from ..methods.fitted import MOST as MOST_FEATURES
from ..methods.multi_threshold import MOST_PAIRS
from ..polynomials.balancing import FLOOR, Frame
from ..polynomials.certified import LARGEST_DEGREE, certified
from ..polynomials.features import check_rank
from ..polynomials.fitting import HIGHEST_DEGREE, LARGEST_COEFFICIENT, FittedKernel, count_features
from ..polynomials.powers import LARGEST_POWER, PowerKernel
from .heads import (
    BucketHead,
    BucketPair,
    ExactHead,
    FittedHead,
    HeadPlan,
    ListHead,
    PolynomialHead,
    PowerHead,
    ScoreRange,
    ThresholdHead,
)
from .schema import LEAST, Field, array, choice, integer, number, optional, record, text

LARGEST_WINDOW = 2**16
LARGEST_MOVE = 1e18  # squares of such lengths are still numbers in float32

COUNT = integer(0, 2**48)
POSITIVE = number(LEAST)
AMOUNT = number(0.0, infinite=True)
SCORES = record(ScoreRange, dict.fromkeys(ScoreRange._fields, optional(number(0.0))))


def own_fields(method: Method, dim: int) -> dict[type[HeadPlan], dict[str, Field]]:
    """What a head of each kind holds beside what all have."""
    polynomial = {"polynomial": _polynomial(dim)}
    return {
        ExactHead: {},
        PolynomialHead: polynomial,
        ThresholdHead: {"threshold": POSITIVE, "large": array(COUNT, 2, 2), **polynomial},
        BucketHead: _buckets(method, dim),
        PowerHead: {"kernel": _power_kernel(method)},
        ListHead: {"lists": LISTS, "keys": number(0.0)},
        FittedHead: {
            "fitted": _fitted(dim),
            "frame": _frame(dim),
            "exact_rows": COUNT,
            "keys": number(0.0),
        },
    }


def head_field(kind: type[HeadPlan], own: Mapping[str, Field]) -> Field:
    """A head with what all have and its own."""
    common = {
        "reason": text(),
        "n": COUNT,
        "m": COUNT,
        "cost": number(0.0),
        "speedup": POSITIVE,
        "measured": optional(AMOUNT),
        "scores": optional(SCORES),
    }

    def build(**content: Any) -> HeadPlan:
        if "pairs" in content:
            content["pairs"] = _placed_pairs(**content)
        head = kind(**content)
        _check_range(head)
        return head

    return record(build, {**common, **own})


def _check_range(head: HeadPlan) -> None:
    """Whether a head knows the range that it was made for. The largest score is the bound of its
    polynomial, or of one of its pairs, unless the caller of `Polynomial` gave a smaller bound."""
    scores = head.scores
    if isinstance(head, (ExactHead, PowerHead)):
        if scores is not None:
            raise ValueError("scores is given, but nothing depends on it")
        return
    listed = isinstance(head, (ListHead, FittedHead))
    if scores is None or (scores.largest is None) != listed:
        raise ValueError("scores is missing, or not of this kind of head")
    if (scores.mean is None) != (head.measured is None and not listed):
        raise ValueError("scores.mean is missing, or there is no measured error that needs it")
    transformed = isinstance(head, FittedHead) and not head.frame.is_plain
    if (scores.framed is None) == transformed:
        raise ValueError("scores.framed is missing, or there is no frame that needs it")
    reaches = [pair.reach for pair in head.pairs] if isinstance(head, BucketHead) else []
    if reaches and scores.largest is not None and not scores.largest <= 1.001 * max(reaches):
        raise ValueError(f"scores.largest is {scores.largest!r}, beyond the reach of every pair")


# --------------------------------------------------------------------- polynomials and kernels


def _polynomial(dim: int | None) -> Field:
    """A polynomial in features of this dim (None: evaluated pair by pair), certified anew."""

    def build(kind: str, bound: float, coefficients: tuple[float, ...]) -> object:
        if dim is not None:
            check_rank(dim, len(coefficients) - 1)
        return certified(kind, coefficients, bound)

    return record(
        build,
        {
            "kind": choice("taylor", "chebyshev", "minimax"),
            "bound": number(0.0),
            "coefficients": array(number(), 1, LARGEST_DEGREE + 1),
        },
    )


def _sketches(method: Method) -> Field:
    return choice(None, getattr(method, "sketch_size", None))


def _power_kernel(method: Method) -> Field:
    """Polynomial attention, whose power is that of the method."""

    def build(power: int, sketch_size: int | None) -> PowerKernel:
        return PowerKernel(power, None, sketch_size, getattr(method, "seed", 0))

    power = choice(getattr(method, "power", None))
    return record(build, {"power": power, "sketch_size": _sketches(method)})


def _pair_kernel(method: Method, dim: int) -> Field:
    sketch_size = getattr(method, "sketch_size", None)

    def build(**content: Any) -> PowerKernel:
        return PowerKernel(**content, seed=getattr(method, "seed", 0))

    return record(
        build,
        {
            "power": integer(2, LARGEST_POWER, step=2),
            "polynomial": _polynomial(None if sketch_size is None else dim),
            "sketch_size": _sketches(method),
            "balance": POSITIVE,
        },
    )


def _buckets(method: Method, dim: int) -> dict[str, Field]:
    """Edges, and a pair for every bucket of rows with every bucket of keys, in order."""
    pair = {
        "rows": COUNT,
        "keys": COUNT,
        "reach": number(0.0),
        "kernel": optional(_pair_kernel(method, dim)),
    }
    edges = array(number(0.0), 1, MOST_PAIRS)
    pairs = array(record(_pair, pair), 1, MOST_PAIRS)
    return {"row_edges": edges, "key_edges": edges, "pairs": pairs}


def _pair(rows: int, keys: int, reach: float, kernel: PowerKernel | None) -> BucketPair:
    if kernel is not None and kernel.polynomial is not None:
        bound = reach / kernel.power
        if kernel.polynomial.bound != bound:
            raise ValueError(
                f"the polynomial is for ±{kernel.polynomial.bound!r}, but the pair has scores "
                f"within ±{reach!r}, which is ±{bound!r} at power {kernel.power}"
            )
    return BucketPair(-1, -1, rows, keys, reach, kernel)


def _placed_pairs(
    row_edges: tuple[float, ...],
    key_edges: tuple[float, ...],
    pairs: tuple[BucketPair, ...],
    **_: Any,
) -> tuple[BucketPair, ...]:
    for edges in (row_edges, key_edges):
        if list(edges) != sorted(edges):
            raise ValueError(f"edges {edges} do not ascend")
    if len(pairs) != len(row_edges) * len(key_edges):
        raise ValueError(f"{len(pairs)} pairs for {len(row_edges)} x {len(key_edges)} buckets")
    return tuple(
        BucketPair(*divmod(i, len(key_edges)), pair.rows, pair.keys, pair.reach, pair.kernel)
        for i, pair in enumerate(pairs)
    )


# -------------------------------------------------------------------------- lists and fits


def _settings(**content: Any) -> ListSettings:
    settings = ListSettings(**content)
    block, leaf, window = settings.block, settings.leaf, settings.window
    if any(size & (size - 1) for size in (block, leaf, window)):
        raise ValueError(f"lists: {block}, {leaf} and {window} are not all powers of two")
    if leaf > block or (window and window < block) or (settings.strict and not window):
        raise ValueError(f"lists: no such blocks: {settings}")
    return settings


LISTS = record(
    _settings,
    {
        "price": POSITIVE,
        "block": integer(1, LARGEST_BLOCK),
        "leaf": integer(1, LARGEST_BLOCK),
        "window": integer(0, LARGEST_WINDOW),
        "strict": optional(choice(True, False)),
    },
)


def _fitted(dim: int) -> Field:
    coefficient = number(-LARGEST_COEFFICIENT, LARGEST_COEFFICIENT)
    return record(
        _kernel,
        {
            "coefficients": array(coefficient, 1, HIGHEST_DEGREE + 1),
            "spans": array(integer(1, dim), 0, HIGHEST_DEGREE),
            "query_radius": AMOUNT,
            "key_radius": AMOUNT,
        },
    )


def _kernel(**content: Any) -> FittedKernel:
    kernel = FittedKernel(**content)
    if len(kernel.coefficients) != kernel.degree + 1:
        raise ValueError(f"{len(kernel.coefficients)} coefficients for {kernel.degree} spans")
    if list(kernel.spans) != sorted(kernel.spans, reverse=True):
        raise ValueError(f"spans {kernel.spans} do not descend")
    if count_features(kernel.spans) > MOST_FEATURES:
        raise ValueError(f"spans {kernel.spans} need more than {MOST_FEATURES} features")
    return kernel


def _frame(dim: int) -> Field:
    """A balancing transform: centres [d], maps [d, d], eigenvalues [d]."""
    vector, matrix = (_tensor(shape) for shape in ((dim,), (dim, dim)))
    eigenvalues = _tensor((dim,), low=0.0)
    names = dict.fromkeys(("query_centre", "key_centre"), vector)
    names |= dict.fromkeys(("query_map", "key_map"), matrix)
    return record(_checked_frame, {**names, "spectrum": eigenvalues})


def _tensor(shape: tuple[int, ...], low: float | None = None) -> Field:
    field = number() if low is None else number(low)
    for size in reversed(shape):
        field = array(field, size, size)

    def read(value: Any, at: str) -> Tensor:
        return torch.tensor(field.read(value, at), dtype=torch.float64).reshape(shape)

    return Field(read, lambda tensor: tensor.tolist())


def _checked_frame(**content: Tensor) -> Frame:
    """Scores stay as they are as long as A B^T = I (see `frame.balanced`). Each map solves a system
    of condition at most FLOOR^-1/2, so rounding leaves about d / FLOOR unit roundoffs of A B^T."""
    frame = Frame(**content)
    if bool((frame.spectrum.diff() > 0).any()):
        raise ValueError("spectrum does not descend")
    dim = len(frame.spectrum)
    identity = torch.eye(dim, dtype=torch.float64)
    away = frame.query_map @ frame.key_map.T - identity
    if not float(away.abs().max() if dim else 0.0) <= 64 * (dim + 1) / FLOOR * 2.0**-53:
        raise ValueError("query_map and key_map do not undo each other")
    for side in ("query", "key"):
        moved = getattr(frame, f"{side}_centre") @ getattr(frame, f"{side}_map")
        if not float(moved.norm()) <= LARGEST_MOVE:
            raise ValueError(f"{side}_centre is moved beyond {LARGEST_MOVE:g}")
    return frame
