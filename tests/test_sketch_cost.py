"""Operations of PolySketch (Theorem A.9, item 3), counted from what ran."""

from __future__ import annotations

import math
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cases import gaussian
from supportbasis.sketch import PolySketch

# --- operation counts (A.9, item 3), from what ran --------------------------------------------


class Recorder(TorchDispatchMode):
    """The name, the shapes of the operands and that of the result, for every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[tuple[int, ...]], tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            shapes = [tuple(a.shape) for a in args if isinstance(a, Tensor)]
            self.calls.append((func._schema.name.split("::")[1], shapes, tuple(out.shape)))
        return out

    def shapes(self, name: str) -> list[tuple[list[tuple[int, ...]], tuple[int, ...]]]:
        return [(operands, out) for call, operands, out in self.calls if call == name]


def record(sketch: PolySketch, x: Tensor) -> Recorder:
    sketch.nonnegative(x)  # draws the maps
    with Recorder() as recorder:
        sketch.nonnegative(x)
    return recorder


def count_gaussian(ran: Recorder, n: int, d: int, z: int) -> tuple[int, int, int, int, int]:
    products = [(left[1], right[1]) for (left, right), _ in ran.shapes("mm")]  # inner, columns
    assert all(columns % z == 0 for _, columns in products)
    leaves = sum(columns // z for inner, columns in products if inner == d)
    nodes = sum(columns // z for inner, columns in products if inner == z)
    hadamard = ran.shapes("mul").count(([(n, z), (n, z)], (n, z)))
    kronecker = ran.shapes("mul").count(([(n, z, 1), (n, 1, z)], (n, z, z)))
    assert len(ran.shapes("mul")) == hadamard + kronecker
    work = sum(inner * columns for inner, columns in products) + hadamard * z
    return leaves, nodes, hadamard, kronecker, work


@pytest.mark.parametrize("power", [2, 4, 6, 8, 10, 16])
def test_gaussian_operations_are_those_of_the_theorem(power: int) -> None:
    n, d, z = 5, 7, 3
    sketch = PolySketch(power, z)
    ran = record(sketch, gaussian(n, d))
    assert count_gaussian(ran, n, d, z) == tuple(sketch.cost(d))
    arithmetic = {"mm", "mul", "bmm", "addmm", "div", "add", "sub", "sum"}
    assert {name for name, _, _ in ran.calls} & arithmetic <= {"mm", "mul"}
    assert sketch.cost(d)[:4] == (power // 2, max(0, power // 2 - 2), power // 2 - 1, 1)


@pytest.mark.parametrize("power", [2, 4, 6, 8, 10, 16])
def test_operations_of_the_fast_transforms(power: int) -> None:
    n, d, z = 5, 7, 3
    x, padded = gaussian(n, d), 8
    cost = PolySketch(power, z, 0, "srht").cost(d)
    ran = record(PolySketch(power, z, 0, "srht"), x)
    signs = [shapes[0] for shapes, _ in ran.shapes("mul") if len(shapes[1]) == 1]
    assert signs.count((n, d)) == cost.leaf_products
    assert signs.count((n, z)) == cost.inner_products
    joins = ran.shapes("mul").count(([(n, z), (n, z)], (n, z)))
    assert joins == cost.hadamard_products
    sums = sum(math.prod(out) for name in ("add", "sub") for _, out in ran.shapes(name)) // n
    assert sums == cost.leaf_products * padded * 3 + cost.inner_products * 4 * 2
    work = sums + cost.leaf_products * d + cost.inner_products * z + joins * z
    assert work == cost.multiply_adds

    cost = PolySketch(power, z, 0, "tensorsketch").cost(d)
    ran = record(PolySketch(power, z, 0, "tensorsketch"), x)
    added = [shapes[2] for shapes, _ in ran.shapes("index_add")]
    assert (added.count((n, d)), added.count((n, z))) == cost[:2]
    assert len(added) == sum(cost[:2])
    assert len(ran.shapes("_fft_r2c")) == 2 * cost.hadamard_products
    assert len(ran.shapes("_fft_c2r")) == cost.hadamard_products
    transforms = 3 * cost.hadamard_products * z * 2
    spectra = 4 * 2 * cost.hadamard_products
    work = cost.leaf_products * d + cost.inner_products * z + transforms + spectra
    assert work == cost.multiply_adds
