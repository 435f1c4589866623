"""Plans as plain JSON values. Index sets are left out: a plan that was read splits again."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

import torch

from .blocks import PLACES, BlockSettings
from .fitted import FittedKernel
from .frame import Frame
from .plans import KINDS, BucketPair, HeadPlan
from .polynomials import CertifiedPolynomial
from .powers import PowerKernel

PLAIN = ("kind", "reason", "n", "m", "cost", "speedup", "threshold", "large", "measured")


def head_to_json(head: HeadPlan) -> dict[str, Any]:
    content: dict[str, Any] = {name: getattr(head, name) for name in PLAIN}
    if head.polynomial is not None:
        content["polynomial"] = _polynomial_to_json(head.polynomial)
    if head.kernel is not None:
        content["kernel"] = _kernel_to_json(head.kernel)
    if head.blocks is not None:
        content["blocks"] = asdict(head.blocks)
    if head.fitted is not None:
        content["fitted"] = asdict(head.fitted)
    if head.frame is not None:
        content["frame"] = _frame_to_json(head.frame)
        content["exact_rows"], content["keys"] = head.exact_rows, head.keys
    if head.pairs:
        content["row_edges"], content["key_edges"] = head.row_edges, head.key_edges
        content["pairs"] = [_pair_to_json(pair) for pair in head.pairs]
    return content


def head_from_json(content: dict[str, Any]) -> HeadPlan:
    """The head that `head_to_json` described, or an error that says what is wrong with it."""
    poly, kernel = content.pop("polynomial", None), content.pop("kernel", None)
    row_edges, key_edges = (_edges(content.pop(f"{side}_edges", [])) for side in ("row", "key"))
    pairs = tuple(_pair_from_json(pair) for pair in content.pop("pairs", ()))
    blocks, frame = content.pop("blocks", None), content.pop("frame", None)
    fitted = content.pop("fitted", None)
    head = HeadPlan(
        **content,
        blocks=None if blocks is None else _blocks_from_json(blocks),
        fitted=None if fitted is None else _fitted_from_json(fitted),
        frame=None if frame is None else _frame_from_json(frame),
        polynomial=None if poly is None else _polynomial_from_json(poly),
        kernel=None if kernel is None else _kernel_from_json(kernel),
        row_edges=row_edges,
        key_edges=key_edges,
        pairs=pairs,
    )
    _check(head)
    return head


def _check(head: HeadPlan) -> None:
    if head.kind not in KINDS:
        raise ValueError(f"unknown kind {head.kind!r}")
    if head.kind == "single-threshold" and not isinstance(head.threshold, float):
        raise ValueError(f"a head has threshold {head.threshold!r}")
    if head.kind in ("polynomial", "single-threshold") and head.polynomial is None:
        raise ValueError("a head has no polynomial")
    if head.kind == "power" and head.kernel is None:
        raise ValueError("a head has no kernel")
    if head.kind == "block" and (head.blocks is None or head.frame is None):
        raise ValueError("a head has no blocks")
    if head.kind == "fitted" and (head.fitted is None or head.frame is None):
        raise ValueError("a head has no fitted polynomial")
    places = {(i, j) for i in range(len(head.row_edges)) for j in range(len(head.key_edges))}
    covered = [(pair.row, pair.key) for pair in head.pairs]
    if head.kind == "multi-threshold" and (set(covered) != places or len(covered) != len(places)):
        raise ValueError("the pairs of a head do not cover its buckets once each")


def _edges(values: list[float]) -> tuple[float, ...]:
    edges = tuple(float(value) for value in values)
    if list(edges) != sorted(edges):
        raise ValueError(f"edges {edges} do not ascend")
    return edges


def _encode(value: float) -> float | str:
    """JSON has no infinity; write it as a word."""
    return value if math.isfinite(value) else str(value)


def _polynomial_to_json(poly: CertifiedPolynomial) -> dict[str, Any]:
    ratio = [_encode(x) for x in poly.log_ratio]
    return asdict(poly) | {"error": _encode(poly.error), "log_ratio": ratio}


def _polynomial_from_json(content: dict[str, Any]) -> CertifiedPolynomial:
    low, high = content["log_ratio"]
    coefficients = tuple(float(c) for c in content["coefficients"])
    return replace(
        CertifiedPolynomial(**content),
        coefficients=coefficients,
        error=float(content["error"]),
        log_ratio=(float(low), float(high)),
    )


def _kernel_to_json(kernel: PowerKernel) -> dict[str, Any]:
    poly = kernel.polynomial
    content = {name: getattr(kernel, name) for name in ("power", "sketch_size", "seed")}
    return content | {"polynomial": None if poly is None else _polynomial_to_json(poly)}


def _kernel_from_json(content: dict[str, Any]) -> PowerKernel:
    poly, size = content["polynomial"], content["sketch_size"]
    return PowerKernel(
        int(content["power"]),
        None if poly is None else _polynomial_from_json(poly),
        None if size is None else int(size),
        int(content["seed"]),
    )


def _blocks_from_json(content: dict[str, Any]) -> BlockSettings:
    profile = tuple(float(x) for x in content.pop("profile", ()))
    settings = BlockSettings(**content, profile=profile)
    if settings.order == PLACES and len(profile) % 3 != 1:
        raise ValueError(f"a profile has {len(profile)} numbers")
    return settings


def _fitted_from_json(content: dict[str, Any]) -> FittedKernel:
    coefficients = tuple(float(x) for x in content["coefficients"])
    spans = tuple(int(x) for x in content["spans"])
    if len(coefficients) != len(spans) + 1 or list(spans) != sorted(spans, reverse=True):
        raise ValueError(f"{len(coefficients)} coefficients for spans {spans}")
    radii = (float(content[f"{side}_radius"]) for side in ("query", "key"))
    return FittedKernel(coefficients, spans, *radii)


def _frame_to_json(frame: Frame) -> dict[str, Any]:
    return {name: getattr(frame, name).tolist() for name in Frame.__dataclass_fields__}


def _frame_from_json(content: dict[str, Any]) -> Frame:
    fields = {name: torch.tensor(value, dtype=torch.float64) for name, value in content.items()}
    frame, dim = Frame(**fields), len(fields["spectrum"])
    shapes = [tuple(x.shape) for x in (frame.query_centre, frame.key_centre)]
    shapes += [tuple(x.shape) for x in (frame.query_map, frame.key_map)]
    if shapes != [(dim,), (dim,), (dim, dim), (dim, dim)]:
        raise ValueError(f"a frame has shapes {shapes}")
    return frame


def _pair_to_json(pair: BucketPair) -> dict[str, Any]:
    content = {name: getattr(pair, name) for name in ("row", "key", "rows", "keys", "reach")}
    return content | {"kernel": None if pair.kernel is None else _kernel_to_json(pair.kernel)}


def _pair_from_json(content: dict[str, Any]) -> BucketPair:
    kernel = content.pop("kernel")
    return BucketPair(**content, kernel=None if kernel is None else _kernel_from_json(kernel))
