"""PolySketch (Theorem A.9, Fact J.6) of given seeds: its algebra, random maps and arguments."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cases import gaussian
from sketch_cases import BASES, ERRORS, assert_mean, bases, unit
from supportbasis.errors import InputError
from supportbasis.sketch import PolySketch, theory_size
from supportbasis.sketch.polysketch import _draw_tree, _hadamard

properties = settings(derandomize=True, deadline=None, max_examples=60)


# --- the self-tensor (A.9, item 1) ------------------------------------------------------------


@properties
@given(
    base=st.sampled_from(BASES),
    power=st.sampled_from([2, 4, 6, 8, 10]),
    d=st.integers(1, 9),
    size=st.integers(1, 12),
    seed=st.integers(0, 10**9),
)
def test_self_tensor_products_are_squares(
    base: str, power: int, d: int, size: int, seed: int
) -> None:
    """<φ'(x), φ'(y)> = <half(x), half(y)>² ≥ 0 up to the rounding of a sum of size² terms."""
    sketch = PolySketch(power, size, seed, base)
    x, y = unit(2, 5, d, seed=seed % 1000).unbind(0)
    y[0] = -x[0]
    phi_x, phi_y = sketch.nonnegative(x), sketch.nonnegative(y)
    half_x, half_y = sketch.half(x), sketch.half(y)
    rounding = (size**2 + 4) * 2.0**-53 * (phi_x.abs() @ phi_y.abs().T + 1e-300)
    kernel = phi_x @ phi_y.T
    assert phi_x.shape == (5, size**2)
    assert bool((kernel >= -rounding).all())
    assert bool(((kernel - (half_x @ half_y.T).square()).abs() <= 2 * rounding).all())
    assert bool(((half_x @ half_y.T).square() >= 0).all())


@bases
def test_sketched_kernels_do_go_negative_without_it(base: str) -> None:
    """The reason for φ': <x, y>⁴ ≥ 0, its plain sketch is not."""
    x = unit(40, 6, seed=1)
    plain, sketch = PolySketch(4, 16, 0, base)(x), PolySketch(4, 16, 0, base)
    assert float((plain @ plain.T).min()) < -0.01
    assert float((sketch.nonnegative(x) @ sketch.nonnegative(x).T).min()) > -1e-12


@bases
def test_half(base: str) -> None:
    for power in (2, 6, 10):
        half = PolySketch(power, 7, 3, base).half
        assert half == PolySketch(power // 2, 7, 3, base)
    x = gaussian(3, 4)
    torch.testing.assert_close(
        PolySketch(6, 5, 2, base).nonnegative(x),
        torch.stack([torch.kron(h, h) for h in PolySketch(3, 5, 2, base)(x)]),
    )


# --- Kronecker powers (J.6): the sketch is one matrix times x^{⊗p} ----------------------------


def kronecker_power(x: Tensor, power: int) -> Tensor:
    out = torch.ones(1, dtype=x.dtype)
    for _ in range(power):
        out = torch.kron(out, x)
    return out


@properties
@given(power=st.integers(1, 5), d=st.integers(1, 5), seed=st.integers(0, 10**6))
def test_kronecker_facts(power: int, d: int, seed: int) -> None:
    a, b = unit(2, d, seed=seed)
    left, right = kronecker_power(a, power), kronecker_power(b, power)
    assert float(left @ right) == pytest.approx(float(a @ b) ** power, abs=1e-14)
    assert float(left.norm()) == pytest.approx(float(a.norm()) ** power)


@bases
def test_square_is_linear_in_the_kronecker_square(base: str) -> None:
    """S(e_i ⊗ e_j) by polarisation of the sketch alone, and then S (x ⊗ x) for other x."""
    d, sketch = 4, PolySketch(2, 6, 1, base)
    e = torch.eye(d, dtype=torch.float64)
    pairs = sketch(e[:, None] + e[None]) - sketch(e)[:, None] - sketch(e)[None]  # [d, d, size]
    matrix = pairs.flatten(0, 1).T / 2
    assert int(torch.linalg.matrix_rank(matrix)) > 1
    for x in gaussian(5, d, seed=2):
        torch.testing.assert_close(sketch(x), matrix @ torch.kron(x, x))


Join = Callable[[Tensor, Tensor], Tensor]


def entrywise(a: Tensor, b: Tensor) -> Tensor:
    """Row k is the Kronecker product of both rows k."""
    return torch.stack([torch.kron(row, other) for row, other in zip(a, b, strict=True)])


def convolved(a: Tensor, b: Tensor) -> Tensor:
    """Row k is the sum of the Kronecker products of rows i and j over i + j = k mod z."""
    size = len(a)
    rows = [[torch.kron(a[i], b[(k - i) % size]) for i in range(size)] for k in range(size)]
    return torch.stack([torch.stack(row).sum(0) for row in rows])


TREES: dict[int, Callable[[Join, Any, Any], Tensor]] = {
    1: lambda join, x, m: x[0],
    2: lambda join, x, m: join(x[0], x[1]),
    3: lambda join, x, m: join(m[0] @ join(x[0], x[1]), x[2]),
    4: lambda join, x, m: join(m[0] @ join(x[0], x[1]), m[1] @ join(x[2], x[3])),
    5: lambda join, x, m: join(m[1] @ join(m[0] @ join(x[0], x[1]), x[2]), m[2] @ join(x[3], x[4])),
}


@bases
@pytest.mark.parametrize("power", TREES)
def test_the_explicit_matrix(base: str, power: int) -> None:
    """The tree written out: S from its random maps as matrices, applied to x^{⊗p}."""
    d, size, sketch = 3, 5, PolySketch(power, 5, 4, base)
    tree = _draw_tree(sketch, d, torch.float64, torch.device("cpu"))
    identity = torch.eye(size, dtype=torch.float64)
    leaves = [image.T for image in tree.leaves(torch.eye(d, dtype=torch.float64))]
    inner = [maps(identity)[0].T for maps in tree.inner]
    assert (len(leaves), len(inner)) == (power, max(0, power - 2))
    matrix = TREES[power](convolved if base == "tensorsketch" else entrywise, leaves, inner)
    assert matrix.shape == (size, d**power)
    for x in gaussian(4, d, seed=5):
        torch.testing.assert_close(sketch(x), matrix @ kronecker_power(x, power))


# --- the random maps --------------------------------------------------------------------------


def all_maps(sketch: PolySketch, d: int) -> Iterator[Tensor]:
    tree = _draw_tree(sketch, d, torch.float64, torch.device("cpu"))
    yield from tree.leaves(torch.eye(d, dtype=torch.float64))
    for maps in tree.inner:
        yield maps(torch.eye(sketch.size, dtype=torch.float64))[0]


@bases
def test_every_map_is_fresh(base: str) -> None:
    """No two maps share rows, up to sign; d = size makes leaves and inner maps comparable."""
    maps = list(all_maps(PolySketch(8, 32, 0, base), 32))
    assert len(maps) == 8 + 6
    for i, one in enumerate(maps):
        for other in maps[:i]:
            equal = (one.abs() - other.abs()).abs().max(0).values == 0  # column by column
            if base == "gaussian":
                assert not bool(equal.any())
            assert not torch.equal(one, other)
            cosine = float((one * other).sum() / (one.norm() * other.norm()))
            assert abs(cosine) <= ERRORS / math.sqrt(32)  # 32 signs or buckets are drawn for each


@bases
def test_scale_of_the_maps(base: str) -> None:
    """Entries of a Gaussian map are N(0, 1)/z^¼; those of SRHT are ±1/z^¼ and of buckets ±1."""
    size, d = 64, 64
    draws = torch.stack(list(all_maps(PolySketch(8, size, 0, base), d)))
    if base == "gaussian":
        assert_mean(draws.flatten().square() * math.sqrt(size), 1.0)
        assert_mean(draws.flatten() * size**0.25, 0.0)
    elif base == "srht":
        torch.testing.assert_close(draws.abs(), torch.full_like(draws, size**-0.25))
    else:
        assert bool((draws.abs().sum(-1) == 1).all())
        assert_mean(draws.sum(-1).flatten(), 0.0)
        assert_mean((draws.abs() @ torch.arange(float(size)).double()).flatten(), (size - 1) / 2)


def test_power_one_of_unit_vectors() -> None:
    """A basis vector has the norm 1 exactly under SRHT and CountSketch, and signs for entries."""
    e = torch.eye(7, dtype=torch.float64)
    srht = PolySketch(1, 12, 0, "srht")(e)
    torch.testing.assert_close(srht.abs(), torch.full_like(srht, 12**-0.5))
    assert 0 < int((srht > 0).sum()) < srht.numel()
    count = PolySketch(1, 12, 0, "tensorsketch")(e)
    assert bool((count.abs().sum(1) == 1).all())
    assert bool((count.abs().amax(1) == 1).all())


@pytest.mark.parametrize(
    ("base", "drawn", "limit"), [("srht", "rows", 8), ("tensorsketch", "buckets", 5)]
)
def test_every_coordinate_and_bucket_can_be_drawn(base: str, drawn: str, limit: int) -> None:
    """Of the padded length, and of the size. 400 draws miss one with chance e^-50."""
    size, d = (400, 5) if base == "srht" else (5, 400)
    tree = _draw_tree(PolySketch(1, size, 0, base), d, torch.float64, torch.device("cpu"))
    assert getattr(tree.leaves, drawn).unique().tolist() == list(range(limit))


@pytest.mark.parametrize("levels", range(8))
def test_hadamard_transform(levels: int) -> None:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(levels):
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]).double(), matrix)
    x = gaussian(2**levels, 3)
    torch.testing.assert_close(_hadamard(x), matrix @ x)
    torch.testing.assert_close(_hadamard(_hadamard(x[:, 0])), 2**levels * x[:, 0])


# --- one function of the fields ---------------------------------------------------------------


@bases
def test_seeds(base: str) -> None:
    x = gaussian(3, 5)
    first = PolySketch(4, 16, 5, base)(x)
    _draw_tree.cache_clear()
    torch.testing.assert_close(PolySketch(4, 16, 5, base)(x), first, rtol=0, atol=0)
    for other in (PolySketch(4, 16, 6, base), PolySketch(4, 16, 5 + 2**32, base)):
        assert not torch.allclose(other(x), first)


def test_sketches_of_different_power_are_independent_under_one_seed() -> None:
    """With d = 1 the first map of each would be the same numbers, the first of one stream."""
    one, two = (next(all_maps(PolySketch(power, 64**2), 1)).flatten() for power in (1, 2))
    assert abs(float(one @ two / (one.norm() * two.norm()))) <= ERRORS / 64


@bases
def test_global_generator_and_defaults_are_left_alone(base: str) -> None:
    x = gaussian(3, 5).float()
    expected = PolySketch(3, 8, 0, base)(x)
    _draw_tree.cache_clear()
    torch.manual_seed(1)
    state = torch.get_rng_state()
    try:
        torch.set_default_dtype(torch.float64)
        actual = PolySketch(3, 8, 0, base)(x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@bases
@pytest.mark.parametrize("power", [1, 2, 5])
def test_single_precision_agrees_with_double(base: str, power: int) -> None:
    """Each entry passes about power·(d + z) roundings of 2^-24, relative to the sums of |terms|."""
    x, d, size = unit(50, 17, seed=4).float(), 17, 16
    sketch = PolySketch(power, size, 0, base)
    single, double = sketch(x), sketch(x.double())
    assert (single.dtype, double.dtype) == (torch.float32, torch.float64)
    tolerance = power * (d + size) * 2.0**-24 * float(double.abs().max())
    torch.testing.assert_close(single.double(), double, rtol=0, atol=tolerance)


@bases
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_single(base: str, dtype: torch.dtype) -> None:
    x, sketch = gaussian(4, 6).to(dtype), PolySketch(4, 8, 0, base)
    for of in (sketch, sketch.nonnegative):
        assert of(x).dtype == torch.float32
        torch.testing.assert_close(of(x), of(x.float()), rtol=0, atol=0)


@properties
@given(
    base=st.sampled_from(BASES),
    power=st.integers(1, 7),
    lead=st.lists(st.integers(0, 3), max_size=3),
    d=st.integers(1, 6),
    size=st.integers(1, 9),
)
def test_shapes_rows_and_homogeneity(
    base: str, power: int, lead: list[int], d: int, size: int
) -> None:
    """Each vector on its own, whatever the leading dims; S (tx)^{⊗p} = t^p S x^{⊗p}."""
    sketch, x = PolySketch(power, size, 1, base), gaussian(*lead, d, seed=3)
    out = sketch(x)
    assert out.shape == (*lead, size)
    flat = x.reshape(-1, d)
    rows = [sketch(row) for row in flat]
    scale = 1 + float(out.abs().max()) if out.numel() else 1.0
    for row, expected in zip(rows, out.reshape(-1, size), strict=True):
        torch.testing.assert_close(row, expected, rtol=0, atol=1e-13 * scale)
    torch.testing.assert_close(sketch(-2 * x), (-2) ** power * out, rtol=0, atol=1e-11 * scale)
    turned = gaussian(d, *lead, seed=3).movedim(0, -1)  # not contiguous
    torch.testing.assert_close(sketch(turned), sketch(turned.contiguous()))


@bases
def test_gradients(base: str) -> None:
    """Also when the maps were first drawn, and cached, in inference mode."""
    sketch = PolySketch(6, 4, 0, base)
    _draw_tree.cache_clear()
    with torch.inference_mode():
        sketch.nonnegative(gaussian(2, 3))
    x = gaussian(2, 3).requires_grad_()
    assert torch.autograd.gradcheck(sketch.nonnegative, (x,))


@pytest.mark.gpu
@bases
def test_devices_agree(base: str) -> None:
    x, sketch = unit(100, 17, seed=4), PolySketch(5, 32, 0, base)
    torch.testing.assert_close(sketch(x.cuda()).cpu(), sketch(x))
    torch.testing.assert_close(sketch(x.float().cuda()).cpu(), sketch(x).float(), rtol=0, atol=1e-4)
    assert PolySketch(4, 8, 0, base).nonnegative(x.cuda()[:0]).shape == (0, 64)


def test_cache_is_bounded() -> None:
    assert 0 < (_draw_tree.cache_info().maxsize or 0) <= 64


def test_a_sketch_is_a_value() -> None:
    sketch = PolySketch(4, 8, base="srht")
    assert sketch == PolySketch(4, 8, 0, "srht")
    assert hash(sketch) == hash(PolySketch(4, 8, 0, "srht"))
    assert len({sketch, PolySketch(4, 8), PolySketch(4, 9), PolySketch(4, 8, 1)}) == 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        sketch.power = 2  # type: ignore[misc]
    numpy = pytest.importorskip("numpy")
    assert type(PolySketch(numpy.int64(4), numpy.int32(8)).power) is int


def test_theory_size() -> None:
    assert theory_size(4, 0.5, 0.1) == math.ceil(4 * 4 * math.log(10))
    assert theory_size(2, 0.25, 0.01, pairs=300) == math.ceil(2 * 16 * math.log(30_000))
    assert theory_size(1, 0.99, 0.99) == 1
    assert theory_size(1, 0.5, 5e-324) == math.ceil(4 * -math.log(5e-324))


# --- bad input --------------------------------------------------------------------------------

SKETCH = PolySketch(4, 8)
BAD: list[tuple[str, Callable[[], Any]]] = [
    ("power .*got 0", lambda: PolySketch(0, 8)),
    ("power .*got 2.0", lambda: PolySketch(2.0, 8)),  # type: ignore[arg-type]
    ("power .*got True", lambda: PolySketch(True, 8)),
    ("size .*got 0", lambda: PolySketch(2, 0)),
    ("size .*got '8'", lambda: PolySketch(2, "8")),  # type: ignore[arg-type]
    ("seed .*got -1", lambda: PolySketch(2, 8, -1)),
    (f"seed .*got {2**63}", lambda: PolySketch(2, 8, 2**63)),
    ("seed .*got None", lambda: PolySketch(2, 8, None)),  # type: ignore[arg-type]
    ("base .*gaussian.*got 'fft'", lambda: PolySketch(2, 8, 0, "fft")),
    ("base .*got None", lambda: PolySketch(2, 8, 0, None)),  # type: ignore[arg-type]
    (r"base .*got \['srht'\]", lambda: PolySketch(2, 8, 0, ["srht"])),  # type: ignore[arg-type]
    ("power is 3.*even", lambda: PolySketch(3, 8).half),
    ("power is 5.*even", lambda: PolySketch(5, 8).nonnegative(torch.ones(2))),
    ("power is 1.*even", lambda: PolySketch(1, 8).cost(4)),
    ("dim .*got 0", lambda: SKETCH.cost(0)),
    ("x .*got list", lambda: SKETCH([1.0])),  # type: ignore[arg-type]
    ("x .*torch.int64", lambda: SKETCH(torch.tensor([1, 2]))),
    ("x .*torch.complex64", lambda: SKETCH.nonnegative(torch.ones(2, dtype=torch.complex64))),
    (r"x has shape \(\)", lambda: SKETCH(torch.tensor(1.0))),
    (r"x has shape \(3, 0\).*d >= 1", lambda: SKETCH(torch.ones(3, 0))),
    ("power .*got 0", lambda: theory_size(0, 0.5, 0.1)),
    ("epsilon .*got 0", lambda: theory_size(2, 0, 0.1)),
    ("epsilon .*got 1.5", lambda: theory_size(2, 1.5, 0.1)),
    ("epsilon .*got nan", lambda: theory_size(2, math.nan, 0.1)),
    ("delta .*got 1", lambda: theory_size(2, 0.5, 1.0)),
    ("delta .*got None", lambda: theory_size(2, 0.5, None)),  # type: ignore[arg-type]
    ("pairs .*got 0", lambda: theory_size(2, 0.5, 0.1, pairs=0)),
]


@pytest.mark.parametrize(("message", "call"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_bad_input_is_named(message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(InputError, match=message):
        call()
