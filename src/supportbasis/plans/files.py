"""Plans as JSON files: the only place that reads or writes them. A file holds what a plan cannot
derive."""

from __future__ import annotations

import json
from dataclasses import fields
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

FORMAT = "supportbasis-plan-3"
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
        method.__name__: record(method, {field.name: scalar() for field in fields(method)})
        for method in KINDS_OF
    },
    lambda method: type(method).__name__,
)


def save(plan: Plan, path: str | Path) -> None:
    """Write a plan."""
    try:
        content = {"format": FORMAT, **_schema(plan.method, plan.dim).write(plan)}
    except ValueError as error:
        raise InputError(f"the plan cannot be saved: {error}") from None
    data = json.dumps(content, indent=1, allow_nan=False).encode()
    if len(data) > LARGEST_FILE:
        raise InputError(f"the plan cannot be saved: {_too_large(len(data))}")
    Path(path).write_bytes(data)


def load(path: str | Path) -> Plan:
    """Read a plan, or raise an `InputError` that names the path and what is wrong with the file."""
    content = _content(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = shown(content.get("format")) if isinstance(content, dict) else shown(content)
        raise InputError(
            f"path: {path} has format {found}, but this version reads {FORMAT!r}; make the plan "
            "again and save it"
        )
    try:
        method, dim = member(content, "method", METHOD), member(content, "dim", COUNT)
        plan = _schema(method, dim).read({k: v for k, v in content.items() if k != "format"}, "")
    except ValueError as error:
        raise InputError(f"path: {path} is a damaged plan: {error}") from None
    assert isinstance(plan, Plan)
    return plan


def _content(path: str | Path) -> Any:
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
