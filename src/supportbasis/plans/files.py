"""Reads and writes plans as JSON files. A file holds only what cannot be derived."""

from __future__ import annotations

import json
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..methods import (
    Auto,
    BlockSupport,
    Exact,
    FittedPolynomial,
    Method,
    MultiThreshold,
    Polynomial,
    PowerAttention,
    SingleThreshold,
)
from .head_fields import COUNT, head_field, own_fields
from .heads import (
    BucketHead,
    ExactHead,
    FittedHead,
    HeadPlan,
    ListHead,
    PolynomialHead,
    PowerHead,
    ThresholdHead,
)
from .model_plan import UNITS, LayerPlan, ModelPlan
from .plan import Plan
from .schema import (
    Field,
    array,
    choice,
    member,
    number,
    optional,
    parse,
    record,
    scalar,
    shown,
    text,
    union,
)

FORMAT, MODEL_FORMAT = "supportbasis-plan-4", "supportbasis-model-plan-2"
LARGEST_FILE = 256 * 2**20  # bytes: about 400 balancing transforms of dim 128

KINDS_OF: dict[type[Method], tuple[type[HeadPlan], ...]] = {
    Exact: (ExactHead,),
    Polynomial: (ExactHead, PolynomialHead),
    SingleThreshold: (ExactHead, ThresholdHead),
    MultiThreshold: (ExactHead, BucketHead),
    PowerAttention: (PowerHead,),
    BlockSupport: (ExactHead, ListHead),
    FittedPolynomial: (ExactHead, FittedHead),
    Auto: (ExactHead, PolynomialHead, ThresholdHead, ListHead, FittedHead),
}
METHOD = union(
    "name",
    {
        method.__name__: record(method, {field.name: scalar() for field in fields_of(method)})
        for method in KINDS_OF
    },
    lambda method: type(method).__name__,
)


def save(plan: Plan | ModelPlan, path: str | Path) -> None:
    """Write a plan."""
    try:
        field = MODEL if isinstance(plan, ModelPlan) else PLAN
        data = json.dumps(field.write(plan), indent=1, allow_nan=False).encode()
    except ValueError as error:
        raise InputError(f"the plan cannot be saved: {error}") from None
    if len(data) > LARGEST_FILE:
        raise InputError(f"the plan cannot be saved: {_too_large(len(data))}")
    Path(path).write_bytes(data)


def load(path: str | Path) -> Plan:
    """Read a plan, or raise an `InputError` that names the path and what is wrong with the file."""
    content = _read_json(path)
    found = content.get("format") if isinstance(content, dict) else content
    if found != FORMAT:
        raise InputError(
            f"path: {path} has format {shown(found)}, but this version reads {FORMAT!r}; make the "
            "plan again and save it"
        )
    plan: Plan = _checked(path, "plan", PLAN, content)
    return plan


def load_model(path: str | Path) -> ModelPlan:
    """The same for the plan of a model."""
    content = _read_json(path)
    if not isinstance(content, dict) or content.get("format") != MODEL_FORMAT:
        raise InputError(
            f"path: {path} is no model plan of this version ({MODEL_FORMAT}); make it again by "
            "sb.models.plan and save it"
        )
    plan: ModelPlan = _checked(path, "model plan", MODEL, content)
    return plan


def _checked(path: str | Path, kind: str, field: Field, content: Any) -> Any:
    try:
        return field.read(content, "")
    except ValueError as error:
        raise InputError(f"path: {path} is a damaged {kind}: {error}") from None


def _read_json(path: str | Path) -> Any:
    """The JSON value in a file of sensible size."""
    try:
        file = Path(path)
        if not file.exists():
            raise InputError(f"path: {path} does not exist; expected a saved plan")
        if not file.is_file():
            raise InputError(f"path: {path} is not a file; expected a saved plan")
        with file.open("rb") as stream:
            data = stream.read(LARGEST_FILE + 1)
        if len(data) > LARGEST_FILE:
            raise InputError(f"path: {path} is no plan: {_too_large(file.stat().st_size)}")
        return parse(data.decode())
    except InputError:
        raise
    except TypeError:
        raise InputError(f"path must be a string or a Path, got {path!r}") from None
    except OSError as error:
        raise InputError(f"path: {path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # of JSON, of UTF-8, of a path with a null character
        raise InputError(f"path: {path} is not JSON ({error}); expected a saved plan") from None


def _too_large(size: int) -> str:
    return f"it has {size} bytes, more than the limit of {LARGEST_FILE}"


def _schema(method: Method, dim: int) -> Field:
    """A plan of this method for heads of this dim."""
    own = own_fields(method, dim)
    kinds = {kind.kind: head_field(kind, own[kind]) for kind in KINDS_OF.get(type(method), ())}
    settings = {
        "method": METHOD,
        "dim": COUNT,
        "scale": optional(number()),
        "is_causal": optional(choice(False, True)),
        "heads": array(union("kind", kinds, lambda head: head.kind)),
    }
    return union("format", {FORMAT: record(_plan, settings)}, lambda _: FORMAT)


def _read_plan(content: Any, at: str) -> Plan:
    """Method and dim say what the fields of the heads are."""
    method, dim = member(content, "method", METHOD, at), member(content, "dim", COUNT, at)
    plan: Plan = _schema(method, dim).read(content, at)
    return plan


def _plan(**content: Any) -> Plan:
    plan = Plan(**content)
    if not plan.is_exact and None in (plan.scale, plan.is_causal):
        raise ValueError("scale or is_causal is null, and not every head is exact")
    lists = [head.lists for head in plan.heads if isinstance(head, ListHead)]
    if any(bool(settings.window) != plan.is_causal for settings in lists):
        raise ValueError("lists have windows where, and only where, is_causal is true")
    return plan


PLAN = Field(_read_plan, lambda plan: _schema(plan.method, plan.dim).write(plan))


def _layer(**content: Any) -> LayerPlan:
    layer = LayerPlan(**content)
    if len(layer.effects) != len(layer.heads):
        raise ValueError(f"{len(layer.effects)} effects for {len(layer.heads)} heads")
    return layer


def _model_plan(speedups: tuple[tuple[float, float], ...], **content: Any) -> ModelPlan:
    return ModelPlan(speedups=tuple((int(n), speed) for n, speed in speedups), **content)


LAYER = record(
    _layer, {"name": text(), "effects": array(number()), "min_tokens": COUNT, "plan": PLAN}
)
MODEL = union(
    "format",
    {
        MODEL_FORMAT: record(
            _model_plan,
            {
                "unit": choice(*UNITS),
                "limit": number(0.0),
                "tokens": COUNT,
                "predicted": number(),
                "measured": optional(number()),
                "upper": optional(number()),
                "model": text(),
                "speedups": array(array(number(0.0), 2, 2)),
                "layers": array(LAYER),
            },
        )
    },
    lambda _: MODEL_FORMAT,
)
