"""Reads and writes plans as JSON files. A file holds only what cannot be derived.

Claims are left out: what is proved about a polynomial is proved again from its coefficients, the
range of a pair's polynomial must be that of the pair, the sketch of a kernel is that of the method,
and the maps of a balancing transform must undo each other.
"""

from __future__ import annotations

import json
from dataclasses import fields as fields_of
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import methods
from ..errors import InputError
from ..lists.tables import ListSettings
from ..methods import Method
from ..methods.block_support import LARGEST_BLOCK
from ..methods.fitted import MOST as MOST_FEATURES
from ..methods.multi_threshold import MOST_PAIRS
from ..polynomials.balancing import FLOOR, Transform
from ..polynomials.certified import LARGEST_DEGREE, CertifiedPolynomial, certified
from ..polynomials.features import check_rank
from ..polynomials.fitting import HIGHEST_DEGREE, LARGEST_COEFFICIENT, FittedKernel, count_features
from ..polynomials.powers import LARGEST_POWER, PowerKernel
from . import schema
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
from .model_plan import UNITS, LayerPlan, ModelPlan
from .plan import Plan
from .schema import Field, array, choice, integer, number, optional, record

FORMAT, MODEL_FORMAT = "supportbasis-plan-4", "supportbasis-model-plan-2"
LARGEST_FILE = 256 * 2**20  # bytes: about 400 balancing transforms of dim 128
LARGEST_WINDOW = 2**16
LARGEST_MOVE = 1e18  # squares of such lengths are still numbers in float32

KINDS_OF: dict[type[Method], tuple[type[HeadPlan], ...]] = {
    methods.Exact: (ExactHead,),
    methods.Polynomial: (ExactHead, PolynomialHead),
    methods.SingleThreshold: (ExactHead, ThresholdHead),
    methods.MultiThreshold: (ExactHead, BucketHead),
    methods.PowerAttention: (PowerHead,),
    methods.BlockSupport: (ExactHead, ListHead),
    methods.FittedPolynomial: (ExactHead, FittedHead),
    methods.Auto: (ExactHead, PolynomialHead, ThresholdHead, ListHead, FittedHead),
}


def save(plan: Plan | ModelPlan, path: str | Path) -> None:
    """Write a plan."""
    try:
        field = MODEL if isinstance(plan, ModelPlan) else PLAN
        data = json.dumps(field.write(plan), indent=1, allow_nan=False).encode()
    except ValueError as error:
        raise InputError(f"the plan cannot be saved: {error}") from None
    _check_size(len(data), "the plan cannot be saved")
    Path(path).write_bytes(data)


def load(path: str | Path) -> Plan:
    """Read a plan, or raise an `InputError` that names the path and what is wrong with the file."""
    plan: Plan = _load(path, "plan", FORMAT, PLAN)
    return plan


def load_model(path: str | Path) -> ModelPlan:
    """The same for the plan of a model."""
    plan: ModelPlan = _load(path, "model plan", MODEL_FORMAT, MODEL)
    return plan


def _load(path: str | Path, kind: str, version: str, field: Field) -> Any:
    content = _read_json(path)
    found = content.get("format") if isinstance(content, dict) else content
    if found != version:
        raise InputError(
            f"path: {path} has format {schema.shown(found)} and is no {kind} of this version "
            f"({version}); make the plan again and save it"
        )
    try:
        return field.read(content, "")
    except ValueError as error:
        raise InputError(f"path: {path} is a damaged {kind}: {error}") from None


def _read_json(path: str | Path) -> Any:
    """The JSON value in a file of sensible size."""
    try:
        file = Path(path)
        if not file.is_file():
            fault = "is not a file" if file.exists() else "does not exist"
            raise InputError(f"path: {path} {fault}; expected a saved plan")
        _check_size(file.stat().st_size, f"path: {path} is no plan")
        return schema.parse(file.read_bytes().decode())
    except InputError:
        raise
    except TypeError:
        raise InputError(f"path must be a string or a Path, got {path!r}") from None
    except OSError as error:
        raise InputError(f"path: {path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # of JSON, of UTF-8, of a path with a null character
        raise InputError(f"path: {path} is not JSON ({error}); expected a saved plan") from None


def _check_size(size: int, fault: str) -> None:
    if size > LARGEST_FILE:
        raise InputError(f"{fault}: it has {size} bytes, more than the limit of {LARGEST_FILE}")


# --------------------------------------------------------------------------- heads of each kind


COUNT = integer(0, 2**48)
POSITIVE = number(schema.LEAST)
AMOUNT = number(0.0, infinite=True)
COMMON = {
    "reason": schema.TEXT,
    "n": COUNT,
    "m": COUNT,
    "cost": number(0.0),
    "speedup": POSITIVE,
    "measured": optional(AMOUNT),
    "scores": optional(
        record(ScoreRange, dict.fromkeys(ScoreRange._fields, optional(number(0.0))))
    ),
}


def _head_fields(method: Method, dim: int) -> dict[str, Field]:
    """The JSON field of each kind of head that a method makes: common fields and its own."""
    sketch_size, seed = getattr(method, "sketch_size", None), getattr(method, "seed", 0)
    sketches = choice(None, sketch_size)
    polynomial = {"polynomial": _polynomial(dim)}
    power = {"power": choice(getattr(method, "power", None)), "sketch_size": sketches}
    pair_power = {
        "power": integer(2, LARGEST_POWER, step=2),
        "polynomial": _polynomial(None if sketch_size is None else dim),
        "sketch_size": sketches,
        "balance": POSITIVE,
    }
    pair = {
        "rows": COUNT,
        "keys": COUNT,
        "reach": number(0.0),
        "kernel": optional(record(partial(PowerKernel, seed=seed), pair_power)),
    }
    edges = array(number(0.0), 1, MOST_PAIRS)
    lists = {
        "price": POSITIVE,
        "block": integer(1, LARGEST_BLOCK),
        "leaf": integer(1, LARGEST_BLOCK),
        "window": integer(0, LARGEST_WINDOW),
        "strict": optional(choice(True, False)),
    }
    coefficient = number(-LARGEST_COEFFICIENT, LARGEST_COEFFICIENT)
    fitted = {
        "coefficients": array(coefficient, 1, HIGHEST_DEGREE + 1),
        "spans": array(integer(1, dim), 0, HIGHEST_DEGREE),
        "query_radius": AMOUNT,
        "key_radius": AMOUNT,
    }
    vector = array(number(), dim, dim)
    transform = {
        **dict.fromkeys(("query_centre", "key_centre"), _tensor(vector, dim)),
        **dict.fromkeys(("query_map", "key_map"), _tensor(array(vector, dim, dim), dim, dim)),
        "eigenvalues": _tensor(array(number(0.0), dim, dim), dim),
    }
    own: dict[type[HeadPlan], dict[str, Field]] = {
        ExactHead: {},
        PolynomialHead: polynomial,
        ThresholdHead: {"threshold": POSITIVE, "large": array(COUNT, 2, 2), **polynomial},
        BucketHead: {
            "row_edges": edges,
            "key_edges": edges,
            "pairs": array(record(_pair, pair), 1, MOST_PAIRS),
        },
        PowerHead: {"kernel": record(partial(PowerKernel, polynomial=None, seed=seed), power)},
        ListHead: {"lists": record(_lists, lists), "keys": number(0.0)},
        FittedHead: {
            "fitted": record(_fitted, fitted),
            "transform": record(_transform, transform),
            "exact_rows": COUNT,
            "keys": number(0.0),
        },
    }
    kinds = KINDS_OF.get(type(method), ())
    return {kind.kind: record(partial(_head, kind), {**COMMON, **own[kind]}) for kind in kinds}


def _head(kind: type[HeadPlan], **content: Any) -> HeadPlan:
    head = kind(**content)
    if isinstance(head, BucketHead):
        head = _numbered(head)
    _check_range(head)
    return head


def _check_range(head: HeadPlan) -> None:
    """Raise unless a head has the range of scores that its kind needs. The largest score is the
    bound of its polynomial, or of one of its pairs, unless the caller of `Polynomial` gave a
    smaller bound."""
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
    transformed = isinstance(head, FittedHead) and not head.transform.is_identity
    if (scores.balanced is None) == transformed:
        raise ValueError("scores.balanced is missing, or there is no transform that needs it")
    reaches = [pair.reach for pair in head.pairs] if isinstance(head, BucketHead) else []
    if reaches and scores.largest is not None and not scores.largest <= 1.001 * max(reaches):
        raise ValueError(f"scores.largest is {scores.largest!r}, beyond the reach of every pair")


def _polynomial(dim: int | None) -> Field:
    """A polynomial in features of this dim (None: evaluated pair by pair), certified anew."""

    def build(kind: str, bound: float, coefficients: tuple[float, ...]) -> CertifiedPolynomial:
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


def _pair(rows: int, keys: int, reach: float, kernel: PowerKernel | None) -> BucketPair:
    if kernel is not None and kernel.polynomial is not None:
        bound = reach / kernel.power
        if kernel.polynomial.bound != bound:
            raise ValueError(
                f"the polynomial is for ±{kernel.polynomial.bound!r}, but the pair has scores "
                f"within ±{reach!r}, which is ±{bound!r} at power {kernel.power}"
            )
    return BucketPair(-1, -1, rows, keys, reach, kernel)


def _numbered(head: BucketHead) -> BucketHead:
    """A pair for every bucket of rows with every bucket of keys, in order."""
    rows, keys = head.row_edges, head.key_edges
    for edges in (rows, keys):
        if list(edges) != sorted(edges):
            raise ValueError(f"edges {edges} do not ascend")
    if len(head.pairs) != len(rows) * len(keys):
        raise ValueError(f"{len(head.pairs)} pairs for {len(rows)} x {len(keys)} buckets")
    places = (divmod(i, len(keys)) for i in range(len(head.pairs)))
    pairs = (replace(p, row=i, key=j) for p, (i, j) in zip(head.pairs, places, strict=True))
    return replace(head, pairs=tuple(pairs))


def _lists(**content: Any) -> ListSettings:
    settings = ListSettings(**content)
    block, leaf, window = settings.block, settings.leaf, settings.window
    if any(size & (size - 1) for size in (block, leaf, window)):
        raise ValueError(f"lists: {block}, {leaf} and {window} are not all powers of two")
    if leaf > block or (window and window < block) or (settings.strict and not window):
        raise ValueError(f"lists: no such blocks: {settings}")
    return settings


def _fitted(**content: Any) -> FittedKernel:
    kernel = FittedKernel(**content)
    if len(kernel.coefficients) != kernel.degree + 1:
        raise ValueError(f"{len(kernel.coefficients)} coefficients for {kernel.degree} spans")
    if list(kernel.spans) != sorted(kernel.spans, reverse=True):
        raise ValueError(f"spans {kernel.spans} do not descend")
    if count_features(kernel.spans) > MOST_FEATURES:
        raise ValueError(f"spans {kernel.spans} need more than {MOST_FEATURES} features")
    return kernel


def _tensor(field: Field, *shape: int) -> Field:
    """A float64 tensor, written as nested lists."""

    def read(value: Any, at: str) -> Tensor:
        return torch.tensor(field.read(value, at), dtype=torch.float64).reshape(shape)

    return Field(read, lambda tensor: tensor.tolist())


def _transform(**content: Tensor) -> Transform:
    """Scores stay as they are as long as A B^T = I (see `balancing`). Each map solves a
    system of condition at most FLOOR^-1/2, so A B^T has an error of about d / FLOOR roundoffs."""
    transform = Transform(**content)
    if bool((transform.eigenvalues.diff() > 0).any()):
        raise ValueError("eigenvalues do not descend")
    dim = len(transform.eigenvalues)
    away = transform.query_map @ transform.key_map.T - torch.eye(dim, dtype=torch.float64)
    if not float(away.abs().max() if dim else 0.0) <= 64 * (dim + 1) / FLOOR * 2.0**-53:
        raise ValueError("query_map and key_map do not undo each other")
    for side in ("query", "key"):
        moved = getattr(transform, f"{side}_centre") @ getattr(transform, f"{side}_map")
        if not float(moved.norm()) <= LARGEST_MOVE:
            raise ValueError(f"{side}_centre is moved beyond {LARGEST_MOVE:g}")
    return transform


# ------------------------------------------------------------------------------ plans and models


METHOD = schema.union(
    "name",
    {one.__name__: record(one, {f.name: schema.ANY for f in fields_of(one)}) for one in KINDS_OF},
    lambda method: type(method).__name__,
)


def _plan_fields(method: Method, dim: int) -> Field:
    """A plan of this method for heads of this dim."""
    settings = {
        "method": METHOD,
        "dim": COUNT,
        "scale": optional(number()),
        "is_causal": optional(choice(False, True)),
        "heads": array(schema.union("kind", _head_fields(method, dim), lambda head: head.kind)),
    }
    return schema.union("format", {FORMAT: record(_plan, settings)}, lambda _: FORMAT)


def _read_plan(content: Any, at: str) -> Plan:
    """Method and dim say what the fields of the heads are."""
    known = (schema.member(content, n, f, at) for n, f in (("method", METHOD), ("dim", COUNT)))
    plan: Plan = _plan_fields(*known).read(content, at)
    return plan


def _plan(**content: Any) -> Plan:
    plan = Plan(**content)
    if not plan.is_exact and None in (plan.scale, plan.is_causal):
        raise ValueError("scale or is_causal is null, and not every head is exact")
    lists = [head.lists for head in plan.heads if isinstance(head, ListHead)]
    if any(bool(settings.window) != plan.is_causal for settings in lists):
        raise ValueError("lists have windows where, and only where, is_causal is true")
    return plan


PLAN = Field(_read_plan, lambda plan: _plan_fields(plan.method, plan.dim).write(plan))


def _layer(**content: Any) -> LayerPlan:
    layer = LayerPlan(**content)
    if len(layer.effects) != len(layer.heads):
        raise ValueError(f"{len(layer.effects)} effects for {len(layer.heads)} heads")
    return layer


def _model_plan(speedups: tuple[tuple[float, float], ...], **content: Any) -> ModelPlan:
    return ModelPlan(speedups=tuple((int(n), speed) for n, speed in speedups), **content)


LAYER = {"name": schema.TEXT, "effects": array(number()), "min_tokens": COUNT, "plan": PLAN}
MODEL_FIELDS = {
    "unit": choice(*UNITS),
    "limit": number(0.0),
    "tokens": COUNT,
    "predicted": number(),
    "measured": optional(number()),
    "upper": optional(number()),
    "model": schema.TEXT,
    "speedups": array(array(number(0.0), 2, 2)),
    "layers": array(record(_layer, LAYER)),
}
MODEL = schema.union(
    "format", {MODEL_FORMAT: record(_model_plan, MODEL_FIELDS)}, lambda _: MODEL_FORMAT
)
