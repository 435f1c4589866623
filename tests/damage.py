"""Saved plans, and damaged copies of their files.

`every_damage` is systematic, `damaged` random and reproducible: `PYTHONPATH=tests python
tests/damage.py 8000` runs that many random cases, and says how many were refused and how many ran.
"""

from __future__ import annotations

import json
import math
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import supportbasis as sb
from cases import dense_attention, qkv

HERE = '"@damage@"'
# JSON texts that are put in the place of a value
HOSTILE = (
    "null",
    "true",
    "-1",
    "0",
    "3",
    "0.5",
    "-0.25",
    "1e308",
    "3e38",
    "-1e17",
    "1e-320",
    "1e999",
    "NaN",
    "-Infinity",
    "9" * 30,
    "9" * 5000,
    '"inf"',
    '"nan"',
    '"exact"',
    '"\\ud800"',
    "[]",
    "{}",
    "[" * 100_000,
)
Place = tuple[str | int, ...]


@dataclass(frozen=True)
class Case:
    """A saved plan and the call that it was made for."""

    name: str
    plan: sb.Plan
    text: str
    tensors: tuple[Tensor, Tensor, Tensor]
    call: dict[str, bool]
    exact: Tensor  # what the plan approximates, in float64

    @staticmethod
    def of(
        name: str,
        method: sb.methods.Method,
        tensors: tuple[Tensor, Tensor, Tensor],
        kind: str,
        **call: bool,
    ) -> Case:
        plan = sb.plan(*tensors, method=method, **call)
        assert {head.kind for head in plan.heads} == {kind}, plan
        with tempfile.TemporaryDirectory() as folder:
            plan.save(Path(folder) / "plan.json")
            text = (Path(folder) / "plan.json").read_text()
        exact, _ = dense_attention(*tensors, **call)
        if isinstance(method, sb.PowerAttention):
            exact = power_attention(*tensors, method.power)
        return Case(name, plan, text, tensors, call, exact)


def power_attention(q: Tensor, k: Tensor, v: Tensor, power: int) -> Tensor:
    weight = (q.double() @ k.double().mT / math.sqrt(q.shape[-1])) ** power
    return weight / weight.sum(-1, keepdim=True) @ v.double()


def cases() -> list[Case]:
    """A plan of every kind that each method makes."""
    single = torch.float32
    small = qkv(1, 2, n=41, d=3, scale=0.6)
    low = qkv(1, 1, n=41, d=3, scale=0.6, dtype=single)
    long = qkv(1, 1, n=1301, d=3, scale=0.5, dtype=single)
    wide = qkv(1, 1, n=4099, d=3, scale=0.3, dtype=single)
    whole, causal = {"is_causal": False}, {"is_causal": True}
    return [
        Case.of("exact", sb.Exact(), small, "exact", **whole),
        Case.of("polynomial", sb.Polynomial(3), small, "polynomial", **causal),
        Case.of("polynomial in float32", sb.Polynomial(2), low, "polynomial", **whole),
        Case.of("threshold", sb.SingleThreshold(0.9, 2), small, "single-threshold", **whole),
        Case.of("buckets", sb.MultiThreshold(4.0, 2), small, "multi-threshold", **whole),
        Case.of("one bucket", sb.MultiThreshold(math.inf, 1), low, "multi-threshold", **causal),
        Case.of(
            "sketches",
            sb.MultiThreshold(2.0, 1, sketch_size=12, seed=4),
            small,
            "multi-threshold",
            **whole,
        ),
        Case.of("power", sb.PowerAttention(4), small, "power", **whole),
        Case.of("sketched power", sb.PowerAttention(2, 12, seed=4), small, "power", **whole),
        Case.of(
            "fit",
            sb.FittedPolynomial(),
            qkv(1, 1, n=261, d=3, scale=0.7, dtype=single),
            "fitted",
            **whole,
        ),
        Case.of(
            "causal fit",
            sb.FittedPolynomial(),
            qkv(1, 1, n=1031, d=2, scale=0.5, dtype=single),
            "fitted",
            **causal,
        ),
        Case.of("lists", sb.BlockSupport(0.95, block_size=32), long, "lists", **whole),
        Case.of("causal lists", sb.BlockSupport(0.97), long, "lists", **causal),
        Case.of("strict lists", sb.BlockSupport(0.97, strict=True), long, "lists", **causal),
        Case.of("auto", sb.Auto(0.02), wide, "polynomial", **whole),
    ]


def places(content: object, at: Place = ()) -> Iterator[Place]:
    """Every value in a JSON value."""
    if at:
        yield at
    if isinstance(content, dict):
        for name, value in content.items():
            yield from places(value, (*at, name))
    elif isinstance(content, list):
        for i, value in enumerate(content):
            yield from places(value, (*at, i))


def _copy(text: str, at: Place) -> tuple[dict, dict | list]:
    content = json.loads(text)
    parent = content
    for step in at[:-1]:
        parent = parent[step]
    return content, parent


def replaced(text: str, at: Place, by: str) -> str:
    """A file with another JSON text at a place."""
    content, parent = _copy(text, at)
    parent[at[-1]] = json.loads(HERE)
    return json.dumps(content).replace(HERE, by)


def deleted(text: str, at: Place) -> str:
    content, parent = _copy(text, at)
    del parent[at[-1]]
    return json.dumps(content)


def repeated(text: str, at: Place) -> str:
    """A value twice: under the same name, or one after the other."""
    content, parent = _copy(text, at)
    value = parent[at[-1]]
    if isinstance(parent, list):
        parent.insert(at[-1], value)
        return json.dumps(content)
    parent[at[-1]] = json.loads(HERE)
    once = json.dumps(value)
    return json.dumps(content).replace(HERE, f"{once}, {json.dumps(at[-1])}: {once}")


def every_damage(text: str, hostile: tuple[str, ...] = HOSTILE) -> Iterator[Callable[[], str]]:
    """Every value replaced by every hostile one, left out, and repeated; made when called."""
    for at in places(json.loads(text)):
        for by in hostile:
            yield partial(replaced, text, at, by)
        yield partial(deleted, text, at)
        yield partial(repeated, text, at)


def damaged(text: str, seed: int) -> bytes:
    """The file with one random damage."""
    draw = random.Random(seed)
    spots = list(places(json.loads(text)))
    at = draw.choice(spots)
    kind = draw.randrange(8)
    if kind == 0:
        return replaced(text, at, draw.choice(HOSTILE)).encode()
    if kind == 1:
        return draw.choice((deleted, repeated))(text, at).encode()
    if kind == 2:  # a value from elsewhere in the file
        _, parent = _copy(text, draw.choice(spots))
        other = parent if isinstance(parent, list) else draw.choice(list(parent.values()))
        return replaced(text, at, json.dumps(other)).encode()
    if kind in (3, 4):  # another number of the same kind
        numbers = [spot for spot in spots if type(value_at(text, spot)) in (int, float)]
        at = draw.choice(numbers)
        return replaced(text, at, json.dumps(_other_number(value_at(text, at), draw))).encode()
    data = bytearray(text.encode())
    if kind == 5:
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        return bytes(data)
    first, last = sorted(draw.randrange(len(data) + 1) for _ in range(2))
    if kind == 6:
        return bytes(data[:first]) if draw.random() < 0.5 else bytes(data[:first] + data[last:])
    digits = [i for i, byte in enumerate(data) if chr(byte).isdigit()]
    data[draw.choice(digits)] = ord(draw.choice("0123456789"))
    return bytes(data)


def value_at(text: str, at: Place) -> object:
    _, parent = _copy(text, at)
    return parent[at[-1]]


def _other_number(value: float, draw: random.Random) -> float:
    if isinstance(value, int):
        return draw.choice((value + 1, value - 1, 2 * value, value // 2, -value, 10 * value + 7))
    powers = (1e-300, 1e-9, 1e9, 1e18, 1e36, 1e300)
    found = value * draw.choice((0.0, -1.0, 0.5, 2.0, 1 + 2**-50, draw.gauss(0, 1), *powers))
    return found if math.isfinite(found) else 1.7e308


def outcome(case: Case, data: bytes | str, folder: Path) -> str:
    """What becomes of a damaged file: "refused" when it is loaded or "unfit" for the call, by an
    error that says so; or it "ran", with an error within the bound that it states."""
    path = folder / "damaged.json"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    try:
        plan = sb.Plan.load(path)
    except sb.InputError as error:
        message = str(error)
        assert str(path) in message and "\n" not in message, message
        return "refused"
    assert str(plan) and plan.cost >= 0 and plan.speedup >= 0
    plan.save(path)
    again = path.read_bytes()
    sb.Plan.load(path).save(path)
    assert path.read_bytes() == again
    try:
        with warnings.catch_warnings():  # of rows without a usable denominator
            warnings.simplefilter("ignore")
            result = sb.attention(*case.tensors, **case.call, plan=plan, return_result=True)
    except sb.SupportBasisError:
        return "unfit"
    assert bool(result.output.isfinite().all())
    error = (result.output.double() - case.exact).abs().amax((-1, -2))
    largest = case.tensors[2].double().abs().amax((-1, -2))
    assert bool((error <= result.certificate.bound * largest).all())
    return "ran"


def main(count: int, start: int = 0) -> None:
    """Random damages of all cases in turn; failures are printed with what reproduces them."""
    torch.set_num_threads(1)
    made, found = cases(), Counter()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(start, start + count):
            case = made[seed % len(made)]
            try:
                found[outcome(case, damaged(case.text, seed), Path(folder))] += 1
            except Exception as error:
                found["failed"] += 1
                print(f"{case.name}, seed {seed}: {error!r}"[:300])
    print(dict(found))


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
