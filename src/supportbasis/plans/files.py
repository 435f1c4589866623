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
    union,
)

FORMAT = "supportbasis-plan-4"
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


def save(plan: Plan, path: str | Path) -> None:
    """Write a plan."""
    data = json.dumps(plan_content(plan), indent=1, allow_nan=False).encode()
    if len(data) > LARGEST_FILE:
        raise InputError(f"the plan cannot be saved: {_too_large(len(data))}")
    Path(path).write_bytes(data)


def plan_content(plan: Plan) -> dict[str, Any]:
    """A plan as a JSON value."""
    try:
        return {"format": FORMAT, **_schema(plan.method, plan.dim).write(plan)}
    except ValueError as error:
        raise InputError(f"the plan cannot be saved: {error}") from None


def load(path: str | Path) -> Plan:
    """Read a plan, or raise an `InputError` that names the path and what is wrong with the file."""
    content = read_json(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = shown(content.get("format")) if isinstance(content, dict) else shown(content)
        raise InputError(
            f"path: {path} has format {found}, but this version reads {FORMAT!r}; make the plan "
            "again and save it"
        )
    try:
        return plan_of_content(content)
    except ValueError as error:
        raise InputError(f"path: {path} is a damaged plan: {error}") from None


def plan_of_content(content: dict[str, Any]) -> Plan:
    """The plan of a JSON value; raises a `ValueError` where it is damaged."""
    method, dim = member(content, "method", METHOD), member(content, "dim", COUNT)
    fields = {k: v for k, v in content.items() if k != "format"}
    plan: Plan = _schema(method, dim).read(fields, "")
    return plan


def read_json(path: str | Path) -> Any:
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
    kinds = KINDS_OF.get(type(method), ())
    head = union(
        "kind", {kind.kind: head_field(kind, own[kind]) for kind in kinds}, lambda h: h.kind
    )
    return record(
        _plan,
        {
            "method": METHOD,
            "dim": COUNT,
            "scale": optional(number()),
            "is_causal": optional(choice(False, True)),
            "heads": array(head),
        },
    )


def _plan(**content: Any) -> Plan:
    plan = Plan(**content)
    if not plan.is_exact and None in (plan.scale, plan.is_causal):
        raise ValueError("scale or is_causal is null, and not every head is exact")
    lists = [head.lists for head in plan.heads if isinstance(head, ListHead)]
    if any(bool(settings.window) != plan.is_causal for settings in lists):
        raise ValueError("lists have windows where, and only where, is_causal is true")
    return plan
