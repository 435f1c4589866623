"""Plans as JSON files, read and written by the annotations of their dataclasses.

A file holds only what cannot be derived: what is proved about a polynomial is proved again from its
coefficients. What cannot be read is an `InputError` of one line that names the file, the field,
what came and what was expected.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import fields
from functools import cache
from itertools import product, repeat
from numbers import Integral, Real
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn, get_args, get_type_hints

import torch
from torch import Tensor

from .. import methods
from ..errors import InputError
from ..lists.tables import ListSettings
from ..methods import Method
from ..methods.base import LARGEST_SKETCH
from ..methods.block_support import LARGEST_BLOCK
from ..methods.fitted import MOST as MOST_FEATURES
from ..polynomials.balancing import FLOOR, Transform
from ..polynomials.certified import CertifiedPolynomial, certified
from ..polynomials.features import check_rank
from ..polynomials.fitting import HIGHEST_DEGREE, LARGEST_COEFFICIENT, FittedKernel, count_features
from ..polynomials.powers import LARGEST_POWER, PowerKernel
from . import heads as kinds
from .heads import KINDS, HeadPlan
from .plan import UNITS, LayerPlan, Made, ModelPlan, Plan, SomeHeads

FORMATS: dict[type[SomeHeads], tuple[str, str]] = {
    Plan: ("plan", "supportbasis-plan-5"),
    ModelPlan: ("model plan", "supportbasis-model-plan-3"),
}
LARGEST_FILE = 256 * 2**20  # bytes: about 400 balancing transforms of dim 128
LARGEST_MOVE = 1e18  # squares of such lengths are still numbers in float32
SHOWN = 40  # characters of a value in a message
LARGEST = sys.float_info.max

COUNTS, AMOUNTS, FINITE = (0, 2**48), (0.0, LARGEST), (-LARGEST, LARGEST)
POSITIVE = (math.ulp(0.0), LARGEST)
LIMITS: dict[str, tuple[float, float]] = {  # by name; else COUNTS for int, AMOUNTS for float
    **dict.fromkeys(("speedup", "threshold", "price", "balance"), POSITIVE),
    **dict.fromkeys(("query_radius", "key_radius"), (0.0, math.inf)),
    **dict.fromkeys(("query_centre", "key_centre", "query_map", "key_map"), FINITE),
    **dict.fromkeys(("coefficients", "scale", "effects", "predicted", "upper"), FINITE),
    **dict.fromkeys(("block", "leaf"), (1, LARGEST_BLOCK)),
    "window": (0, 2**16),
    "measured": (-LARGEST, math.inf),
    "power": (2, LARGEST_POWER),
    "sketch_size": (1, LARGEST_SKETCH),
    "seed": (0, 2**63 - 1),
}
KINDS_OF: dict[type[Method], tuple[str, ...]] = {
    methods.Exact: ("exact",),
    methods.Polynomial: ("exact", "polynomial"),
    methods.SingleThreshold: ("exact", "single-threshold"),
    methods.MultiThreshold: ("exact", "multi-threshold"),
    methods.PowerAttention: ("power",),
    methods.BlockSupport: ("exact", "lists"),
    methods.FittedPolynomial: ("exact", "fitted"),
    methods.Auto: ("exact", "polynomial", "single-threshold", "lists", "fitted"),
}
# classes that are one of several, and the name under which the file says which
TAGS: dict[type, tuple[str, dict[str, type]]] = {
    Method: ("name", {method.__name__: method for method in KINDS_OF}),
    HeadPlan: ("kind", KINDS),
}


def save(plan: SomeHeads, path: str | Path) -> None:
    try:
        content = {"format": FORMATS[type(plan)][1], **to_json(plan)}
        data = json.dumps(content, indent=1, allow_nan=False).encode()
    except ValueError as error:
        raise InputError(f"the plan cannot be saved: {error}") from None
    _check_size(len(data), "the plan cannot be saved")
    Path(path).write_bytes(data)


def load(path: str | Path, kind: type[Made]) -> Made:
    content, (name, version) = _read_json(path), FORMATS[kind]
    found = content.pop("format", None) if isinstance(content, dict) else content
    if found != version:
        for other, (_, its) in FORMATS.items():
            if found == its:
                raise InputError(f"path: {path} is read by sb.{other.__name__}.load")
        raise InputError(
            f"path: {path} has format {_shown(found)} and is no {name} of this version "
            f"({version}); make the plan again and save it"
        )
    try:
        plan: Made = _read(kind, content, "")
    except ValueError as error:
        raise InputError(f"path: {path} is a damaged {name}: {error}") from None
    return plan


def _check_size(size: int, fault: str) -> None:
    if size > LARGEST_FILE:
        raise InputError(f"{fault}: it has {size} bytes, more than the limit of {LARGEST_FILE}")


def _read_json(path: str | Path) -> Any:
    try:
        file = Path(path)
        if not file.is_file():
            fault = "is not a file" if file.exists() else "does not exist"
            raise InputError(f"path: {path} {fault}; expected a saved plan")
        _check_size(file.stat().st_size, f"path: {path} is no plan")
        text = file.read_bytes().decode()
        return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_unique)
    except InputError:
        raise
    except TypeError:
        raise InputError(f"path must be a string or a Path, got {path!r}") from None
    except OSError as error:
        raise InputError(f"path: {path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:  # of JSON, of UTF-8, of a path with a null
        fault = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InputError(f"path: {path} is not JSON ({fault}); expected a saved plan") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for name, value in pairs:
        _require(name not in content, f"the name {_shown(name)} is repeated")
        content[name] = value
    return content


# ------------------------------------------------------------------ by the annotations of a class


@cache
def _fields(kind: type) -> dict[str, Any]:
    """Names and annotations of what a file holds of a class. Arguments of methods are checked by
    the methods, and coefficients of a polynomial by `certified`."""
    if kind is CertifiedPolynomial:
        return {"kind": str, "bound": float, "coefficients": tuple[float, ...]}
    hints = get_type_hints(kind, None, {"Method": Method})
    if kind is kinds.ScoreRange:
        return hints
    is_method = issubclass(kind, Method)
    return {f.name: object if is_method else hints[f.name] for f in fields(kind) if f.init}


def to_json(value: Any) -> Any:
    """The JSON value of a plan, or of a part of it."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, tuple) and not isinstance(value, kinds.ScoreRange):
        return [to_json(one) for one in value]
    kind: Any = type(value)
    content = {}
    for base, (tag, cases) in TAGS.items():
        if isinstance(value, base):
            name = getattr(value, tag, kind.__name__)
            known = ", ".join(cases)
            _require(cases.get(name) is kind, f"{tag} is {name!r}; expected one of {known}")
            content[tag] = name
    return content | {name: to_json(getattr(value, name)) for name in _fields(kind)}


def _read(kind: Any, value: Any, at: str) -> Any:
    """What an annotation says, from a JSON value at a place such as "heads[0].cost"."""
    parts = get_args(kind)
    if NoneType in parts:
        return None if value is None else _read(parts[0], value, at)
    if parts:  # of one kind and any length, or of as many as there are kinds
        repeated = Ellipsis in parts
        if not isinstance(value, list) or not (repeated or len(value) == len(parts)):
            _refuse(at, value, "a list" if repeated else f"a list of {len(parts)}")
        each = zip(repeat(parts[0]) if repeated else parts, value, strict=False)
        return tuple(_read(part, one, f"{at}[{i}]") for i, (part, one) in enumerate(each))
    if kind is object:
        if isinstance(value, (list, dict)):
            _refuse(at, value, "a string, a number, a boolean or null")
        return math.inf if value == "inf" else value
    if kind is Tensor:
        nested: Any = tuple[tuple[float, ...], ...] if at.endswith("_map") else tuple[float, ...]
        return torch.tensor(_read(nested, value, at), dtype=torch.float64)
    if kind in (bool, str):
        if type(value) is not kind or (kind is str and not value.isprintable()):
            _refuse(at, value, "a line of text" if kind is str else "true or false")
        return value
    return _read_number(kind, value, at) if kind in (int, float) else _read_object(kind, value, at)


def _read_number(kind: type, value: Any, at: str) -> float:
    """Within the limits of the name that comes last in the place."""
    name = at.rpartition(".")[2].partition("[")[0]
    low, high = LIMITS.get(name, COUNTS if kind is int else AMOUNTS)
    number = math.inf if high == math.inf and value == "inf" else value
    if type(number) not in (int, kind) or not low <= number <= high:
        least = "" if low == -LARGEST else " > 0" if low == POSITIVE[0] else f" >= {low:g}"
        text = f"a number{least}" + ' or "inf"' * (high == math.inf)
        _refuse(at, value, f"an integer from {low} to {high}" if kind is int else text)
    return kind(number)


def _read_object(kind: type, value: Any, at: str) -> Any:
    """A dataclass from an object with exactly the names of its fields, and a tag."""
    if not isinstance(value, dict):
        _refuse(at or "it", value, "an object")
    rest, prefix = dict(value), f"{at}." if at else ""
    if kind in TAGS:
        tag, cases = TAGS[kind]
        _require(tag in rest, f"{prefix}{tag} is missing")
        name = rest.pop(tag)
        if not isinstance(name, str) or name not in cases:
            _refuse(prefix + tag, name, " or ".join(map(repr, cases)))
        kind = cases[name]
    wanted = _fields(kind)
    for name in {**wanted, **rest}:
        _require(name in rest, f"{prefix}{name} is missing")
        _require(name in wanted, f"{prefix}{_shown(name)[1:-1]} is not a name of a plan")
    content = {name: _read(one, rest[name], prefix + name) for name, one in wanted.items()}
    try:
        made = certified(**content) if kind is CertifiedPolynomial else kind(**content)
        _check(made)
    except ValueError as error:
        raise ValueError(f"{at}: {error}" if at else str(error)) from None
    return made


def _require(condition: bool, fault: str) -> None:
    if not condition:
        raise ValueError(fault)


def _refuse(at: str, value: object, expected: str) -> NoReturn:
    raise ValueError(f"{at} is {_shown(value)}; expected {expected}")


def _shown(value: object) -> str:
    """A value in a message: short, and on one line."""
    if isinstance(value, (list, dict)):
        return f"a list of {len(value)}" if isinstance(value, list) else "an object"
    text = ascii(value) if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


# --------------------------------------------------------------------- what must fit together


def _check(made: Any) -> None:
    """Raise a `ValueError` where the fields of something that was read do not fit together."""
    match made:
        case kinds.BucketHead(row_edges=rows, key_edges=keys, pairs=pairs):
            for edges in (rows, keys):
                ascend = bool(edges) and list(edges) == sorted(edges)
                _require(ascend, f"edges {edges} do not ascend")
            expected = list(product(range(len(rows)), range(len(keys))))
            fault = f"pairs are not those of {len(rows)} x {len(keys)} buckets"
            _require([(pair.row, pair.key) for pair in pairs] == expected, fault)
        case kinds.BucketPair(
            kernel=PowerKernel(power=power, polynomial=CertifiedPolynomial() as poly)
        ):
            fault = f"the polynomial is for ±{poly.bound!r}, but scores are within ±{made.reach!r}"
            _require(poly.bound == made.reach / power, f"{fault} / {power}")
        case ListSettings(block=block, leaf=leaf, window=window):
            powers = not any(size & (size - 1) for size in (block, leaf, window))
            _require(powers, f"{block}, {leaf} and {window} are not all powers of two")
            fits = leaf <= block and (window >= block or not (window or made.strict))
            _require(fits, f"no such blocks: {made}")
        case FittedKernel(coefficients=coefficients, spans=spans):
            count = len(coefficients)
            _require(count == len(spans) + 1, f"{count} coefficients for {len(spans)} spans")
            beyond = max(map(abs, coefficients)) > LARGEST_COEFFICIENT
            _require(not beyond, f"coefficients are beyond ±{LARGEST_COEFFICIENT:g}")
            descend = list(spans) == sorted(spans, reverse=True) and 0 not in spans
            _require(descend and count <= HIGHEST_DEGREE + 1, f"there are no such spans: {spans}")
            fault = f"spans {spans} need more than {MOST_FEATURES} features"
            _require(count_features(spans) <= MOST_FEATURES, fault)
        case Transform():
            _check_transform(made)
        case Plan(heads=heads):
            known = made.is_exact or None not in (made.scale, made.is_causal)
            _require(known, "scale or is_causal is null, and not every head is exact")
            for number, head in enumerate(heads):
                try:
                    _check_head(made, head)
                except ValueError as error:
                    raise ValueError(f"heads[{number}]: {error}") from None
        case LayerPlan(effects=effects, heads=heads):
            fault = f"{len(effects)} effects for {len(heads)} heads"
            _require(len(effects) == len(heads), fault)
        case ModelPlan(unit=unit):
            _require(unit in UNITS, f"unit is {unit!r}; expected one of {', '.join(UNITS)}")


def _check_transform(transform: Transform) -> None:
    """Scores stay as they are as long as A B^T = I (see `balancing`). Each map solves a
    system of condition at most FLOOR^-1/2, so A B^T has an error of about d / FLOOR roundoffs."""
    dim = len(transform.eigenvalues)
    for name in _fields(Transform):
        shape = tuple(getattr(transform, name).shape)
        expected = (dim, dim) if name.endswith("_map") else (dim,)
        _require(shape == expected, f"{name} has shape {shape}; expected {expected}")
    descend = bool((transform.eigenvalues.diff() <= 0).all())
    _require(dim > 0 and descend, "eigenvalues do not descend")
    away = transform.query_map @ transform.key_map.T - torch.eye(dim, dtype=torch.float64)
    close = float(away.abs().max()) <= 64 * (dim + 1) / FLOOR * 2.0**-53
    _require(close, "query_map and key_map do not undo each other")
    for side in ("query", "key"):
        moved = getattr(transform, f"{side}_centre") @ getattr(transform, f"{side}_map")
        near = float(moved.norm()) <= LARGEST_MOVE
        _require(near, f"{side}_centre is moved beyond {LARGEST_MOVE:g}")


def _check_head(plan: Plan, head: HeadPlan) -> None:
    """A head does what the plan's method says, for the plan's dim."""
    method: Any = plan.method
    names = KINDS_OF[type(method)]
    _require(head.kind in names, f"kind is {head.kind!r}; expected {' or '.join(names)}")
    needs_range = not isinstance(head, (kinds.ExactHead, kinds.PowerHead))
    agrees = (head.scores is not None) == needs_range
    _require(agrees, "scores is missing, or nothing needs it")
    if isinstance(head, kinds.PolynomialHead) or head.is_sketched:
        for polynomial in head.polynomials:
            check_rank(plan.dim, polynomial.degree)
    if isinstance(head, kinds.ListHead):
        agrees = bool(head.lists.window) == plan.is_causal
        _require(agrees, "lists have windows where, and only where, is_causal is true")
    if isinstance(head, kinds.FittedHead):
        dim, most = len(head.transform.eigenvalues), max(head.fitted.spans, default=0)
        _require(dim == plan.dim >= most, f"spans or transform are not for dim {plan.dim}")
    is_power = isinstance(head, kinds.PowerHead)
    for kernel in head.kernels:
        wanted = method.power if is_power else "an even number"
        good = kernel.power == method.power if is_power else kernel.power % 2 == 0
        _require(good, f"power is {kernel.power}; expected {wanted}")
        _require((kernel.polynomial is None) == is_power, "polynomial is not of this kind of head")
        size = kernel.sketch_size
        _require(size in (None, method.sketch_size), f"sketch_size {size} is not the method's")
