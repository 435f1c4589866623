"""Random calls: a case number becomes a `Case`, and a `Case` becomes tensors.

A case is a few words and numbers. It prints itself as the call that runs it again, and every word
of it can be changed by hand.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, fields

import torch
from torch import Tensor

import supportbasis as sb
from supportbasis.methods import Method

DTYPES = ("float32", "float64", "bfloat16", "float16")
PROVED = {  # methods with a proved bound, and how often they are drawn
    "sb.Exact()": 6,
    "sb.Polynomial(0)": 1,
    "sb.Polynomial(1)": 2,
    "sb.Polynomial(2)": 3,
    "sb.Polynomial(5)": 2,
    "sb.Polynomial(3, bound=2.0)": 1,
    "sb.SingleThreshold(1.0, 2)": 3,
    "sb.SingleThreshold(0.3, 4)": 2,
    "sb.SingleThreshold(None, 2)": 2,
    "sb.SingleThreshold('sqrt-log', 1)": 1,
    "sb.SingleThreshold('sub-gaussian', 2)": 1,
    "sb.MultiThreshold(2.0, 1)": 1,
    "sb.MultiThreshold(4.0, 2)": 1,
    "sb.MultiThreshold(math.inf, 2)": 1,
}
POWERS = {"sb.PowerAttention(2)": 1, "sb.PowerAttention(4)": 1, "sb.PowerAttention(6)": 1}
MEASURED = {  # methods whose error is measured
    "sb.MultiThreshold(2.0, 1, sketch_size=8)": 2,
    "sb.MultiThreshold(1.5, 2, sketch_size=5, seed=3)": 1,
    "sb.PowerAttention(2, sketch_size=11)": 1,
    "sb.PowerAttention(6, sketch_size=7, seed=1)": 1,
    "sb.BlockSupport(0.3, block_size=8)": 1,
    "sb.BlockSupport(0.5, block_size=16, strict=True)": 1,
    "sb.BlockSupport(tolerance=0.1, block_size=8)": 1,
    "sb.FittedPolynomial(40)": 1,
    "sb.FittedPolynomial(tolerance=0.1)": 1,
    "sb.Auto()": 2,
    "sb.Auto(0.1)": 1,  # searches at any length
}
LAYOUTS = (
    "contiguous",
    "offset",  # does not start where its storage does
    "strided entries",
    "strided tokens",
    "strided heads",
    "entries first",  # a transposed matrix: the last dim has the largest stride
    "heads last",  # [..., tokens, heads, dim] seen as [..., heads, tokens, dim]
    "flipped",  # read backwards, which PyTorch has by copies alone, of a transposed matrix
    "one token",  # repeated with stride 0
    "one head",
    "one entry",
)
DATA = (
    "normal",
    "large",
    "small",
    "heavy",  # tails: a normal number over another one
    "duplicates",
    "sinks",  # one key that every query likes
    "integers",
    "zeros",
    "zero rows",
    "denormal",
    "huge",  # up to the largest numbers of the dtype
    "mixed",  # magnitudes over six decades
)
VALUES = ("normal", "normal", "normal", "constant", "zeros", "denormal", "huge", "mixed")
MASKS = (
    "keys",  # bool [m]
    "keys of heads",  # bool [..., heads, 1, m]
    "no keys",  # nothing may be attended to
    "bias",
    "bias with -inf",
    "large bias",
    "huge bias",
    "wide bias",  # float64, whatever the inputs are
    "expanded",  # [1, m] seen as [n, m]
    "pairs",  # bool [n, m]
    "bias of pairs",
    "+inf",  # refused
    "nan",  # refused
)
REFUSED_MASKS = ("+inf", "nan")
SCALES = (0.0, 1.0, -1.0, 0.05, -0.3, 8.0, 1e-30, 1e-300, 1e4, 1e20)
CHECKS = {  # what is looked at besides the call itself, and how often
    "nothing": 4,
    "layout": 3,
    "plan": 3,
    "gradients": 4,
    "causality": 2,
    "other tokens": 2,
    "plain": 1,
    "compile": 0.01,
}


@dataclass(frozen=True)
class Case:
    """One call. ``run`` is "attention" or "kernel_sum"; ``check`` one of `CHECKS`."""

    method: str = "sb.Exact()"
    run: str = "attention"
    check: str = "nothing"
    dtype: str = "float32"
    leading: tuple[int, ...] = (1,)
    key_leading: tuple[int, ...] | None = None  # None: as the queries
    gqa: bool = False
    n: int = 5
    m: int = 5
    d: int = 3
    dv: int = 3
    layouts: tuple[str, str, str] = ("contiguous", "contiguous", "contiguous")
    data: str = "normal"
    values: str = "normal"
    mask: str | None = None
    causal: bool = False
    scale: float | None = None
    implementation: str = "auto"
    seed: int = 0

    def __repr__(self) -> str:
        """The fields that are not as usual."""
        given = [(f.name, getattr(self, f.name)) for f in fields(self)]
        usual = {f.name: f.default for f in fields(self)}
        text = ", ".join(f"{name}={value!r}" for name, value in given if value != usual[name])
        return f"Case({text})"

    @property
    def reproducer(self) -> str:
        """Python that runs the case again, in the root of the repository."""
        lines = ("import sys", "sys.path[:0] = ['src', 'tests']", "from fuzz import Case, check")
        return "\n".join([*lines, f"check({self!r})"])

    @property
    def build_method(self) -> Method:
        return eval(self.method, {"sb": sb, "math": math})

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def family(self) -> str:
        """The method's class, sketched or not."""
        name = self.method.removeprefix("sb.").split("(")[0]
        name += " sketched" if "sketch_size" in self.method else ""
        return name if self.run == "attention" else f"{name} {self.run}"


def draw(seed: int, number: int) -> Case:
    """Case ``number`` of the run with this seed: any method, any input."""
    random_ = random.Random(f"{seed}:{number}")
    pick = random_.choice
    method = _weighted(random_, {**PROVED, **POWERS, **MEASURED})
    run = "kernel_sum" if method in PROVED and random_.random() < 0.15 else "attention"
    long = "Block" in method or "Auto(0" in method or random_.random() < 0.01
    sizes = (0, 1, 1, 2, 3, 5, 7, 8, 17, 33) if not long else (33, 64, 111, 257)
    n = pick(sizes)
    m = n if random_.random() < 0.5 else pick(sizes)
    d = pick((1, 2, 3, 4, 5, 8))
    leading = (
        (1,) if long else pick(((), (1,), (2,), (3,), (1, 2), (2, 3), (2, 1, 2), (0,), (2, 0)))
    )
    key_leading, gqa = _key_leading(random_, leading, run)
    return Case(
        method,
        run,
        _check(random_, run),
        pick(DTYPES),
        leading,
        key_leading,
        gqa,
        n,
        m,
        d,
        pick((d, d, 1, 4, 0)),
        tuple(pick(LAYOUTS) if random_.random() < 0.4 else "contiguous" for _ in range(3)),
        pick(DATA) if random_.random() < 0.7 else "normal",
        pick(VALUES),
        pick(MASKS) if run == "attention" and random_.random() < 0.4 else None,
        run == "attention" and random_.random() < 0.4,
        pick(SCALES) if random_.random() < 0.4 else None,
        "eager" if run == "attention" and random_.random() < 0.2 else "auto",
        random_.randrange(2**31),
    )


HEADS, TURNS = 50, 8  # in a call of a run of the bound, and calls with one plan


def draw_bound(seed: int, number: int) -> Case:
    """Case ``number`` of a run of the bound: many small heads, each with numbers of its own."""
    random_ = random.Random(f"bound {seed}:{number}")
    pick = random_.choice
    run = "kernel_sum" if random_.random() < 0.1 else "attention"
    n, d = random_.randint(1, 12), random_.randint(1, 6)
    return Case(
        _weighted(random_, PROVED),
        run,
        "bound",
        pick(DTYPES),
        (1, HEADS),
        None,
        False,
        n,
        n if random_.random() < 0.5 else random_.randint(1, 12),
        d,
        d if random_.random() < 0.5 else random_.randint(1, 4),
        data=pick(DATA) if random_.random() < 0.7 else "normal",
        values=pick(VALUES),
        mask=_bound_mask(random_) if run == "attention" else None,
        causal=run == "attention" and random_.random() < 0.3,
        scale=pick(SCALES) if random_.random() < 0.3 else None,
        seed=random_.randrange(2**31),
    )


def _bound_mask(random_: random.Random) -> str | None:
    if random_.random() < 0.7:
        return None
    return random_.choice([mask for mask in MASKS if mask not in REFUSED_MASKS])


def _weighted(random_: random.Random, choices: dict[str, float]) -> str:
    return random_.choices(list(choices), list(choices.values()))[0]


def _check(random_: random.Random, run: str) -> str:
    check = _weighted(random_, CHECKS)
    return check if run == "attention" or check in ("layout", "plain") else "nothing"


def _key_leading(
    random_: random.Random, leading: tuple[int, ...], run: str
) -> tuple[tuple[int, ...] | None, bool]:
    """Leading dims of keys and values: the queries', fewer heads, or some that broadcast."""
    chance = random_.random()
    if chance < 0.2 and run == "attention" and leading and leading[-1] > 0:
        heads = [h for h in range(1, leading[-1] + 1) if leading[-1] % h == 0]
        return (*leading[:-1], random_.choice(heads)), True
    if chance < 0.3:
        return tuple(1 if random_.random() < 0.5 else size for size in leading), False
    return None, False


@dataclass(frozen=True)
class Inputs:
    """The tensors of a call."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        own = (self.query, self.key, self.value)
        return own if self.mask is None else (*own, self.mask)


def build(case: Case, turn: int = 0) -> Inputs:
    """The tensors of a case; another ``turn`` has other numbers of the same kind, every second one
    with smaller scores, which do not leave the range of a plan."""
    generator = torch.Generator().manual_seed(case.seed + turn)
    key_leading = case.leading if case.key_leading is None else case.key_leading
    shapes = (
        (*case.leading, case.n, case.d),
        (*key_leading, case.m, case.d),
        (*key_leading, case.m, case.dv),
    )
    kinds = (case.data, case.data, case.values)
    # exponents of huge numbers; one head that overflows would have all heads of a call refused
    most = (1.0, 1.0, 1.0) if case.check != "bound" else (0.48, 0.48, 0.96)
    query, key, value = (
        _tokens(kind, shape, case.torch_dtype, generator, power)
        for kind, shape, power in zip(kinds, shapes, most, strict=True)
    )
    if case.data == "sinks" and case.m and query.numel():
        key[..., 0, :] = 6 * query[..., 0, :].reshape(-1, case.d)[0]
    if turn % 2:
        query = query / 2
    query, key, value = (
        laid_out(x, layout) for x, layout in zip((query, key, value), case.layouts, strict=True)
    )
    return Inputs(query, key, value, _mask(case, generator))


def _tokens(
    kind: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, most: float
) -> Tensor:
    """Tokens of one kind, rounded to the dtype, finite. Heads differ in size; the largest number of
    the dtype to the power ``most`` is the largest of all."""

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    info, x = torch.finfo(dtype), normal(*shape)
    heads = (*shape[:-2], 1, 1)
    if kind == "large":
        x = x * 10 ** (2 * torch.rand(heads, generator=generator, dtype=torch.float64))
    elif kind == "small":
        x = x * 10 ** (-4 * torch.rand(heads, generator=generator, dtype=torch.float64))
    elif kind == "heavy":
        x = x / normal(*shape).abs().clamp(min=1e-4)
    elif kind == "duplicates" and shape[-2]:
        x = x[..., torch.randint(min(3, shape[-2]), (shape[-2],), generator=generator), :]
    elif kind == "integers":
        x = x.round()
    elif kind == "zeros":
        x = x * 0
    elif kind == "zero rows":
        x = x * (normal(*shape[:-1], 1) > 0)
    elif kind == "constant":
        x = torch.full_like(x, 0.7)
    elif kind == "denormal":
        x = x * info.smallest_normal / 4
    elif kind == "huge":
        share = 0.3 + 0.7 * torch.rand(heads, generator=generator, dtype=torch.float64)
        x = x.clamp(-1, 1) * info.max ** (most * share)
    elif kind == "mixed":
        x = x * 10 ** (6 * torch.rand(shape, generator=generator, dtype=torch.float64) - 4)
    else:
        x = x * (0.5 + torch.rand(heads, generator=generator, dtype=torch.float64))
    return x.clamp(info.min, info.max).to(dtype)


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same numbers otherwise in memory; "one ..." repeats the first of them."""
    if layout == "offset":
        return torch.cat([x.new_zeros(3), x.reshape(-1)])[3:].view(x.shape)
    if layout == "strided entries":
        return torch.stack([x, x + 1], -1).flatten(-2)[..., ::2]
    if layout == "strided tokens":
        return torch.stack([x, x + 1], -2).flatten(-3, -2)[..., ::2, :]
    if layout == "entries first":
        return x.mT.contiguous().mT
    if layout == "flipped":
        return x.mT.contiguous().flip(-1).flip(-1).mT
    if layout == "one token" and x.shape[-2]:
        return x[..., :1, :].expand_as(x)
    if layout == "one entry":
        return x[..., :1].expand_as(x)
    if x.dim() > 2 and x.shape[-3]:
        if layout == "strided heads":
            return torch.stack([x, x + 1], -3).flatten(-4, -3)[..., ::2, :, :]
        if layout == "heads last":
            return x.transpose(-3, -2).contiguous().transpose(-3, -2)
        if layout == "one head":
            return x[..., :1, :, :].expand_as(x)
    return x


def _mask(case: Case, generator: torch.Generator) -> Tensor | None:
    """An attention mask or bias of the case's kind."""
    kind, n, m = case.mask, case.n, case.m
    if kind is None:
        return None
    heads = (*case.leading, 1, m)

    def kept(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator) < 0.7

    def bias(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    made = {
        "keys": lambda: kept(m),
        "keys of heads": lambda: kept(*heads),
        "no keys": lambda: torch.zeros(m, dtype=torch.bool),
        "bias": lambda: bias(*heads),
        "bias with -inf": lambda: bias(m).masked_fill(~kept(m), -math.inf),
        "large bias": lambda: bias(m) * 300,
        "huge bias": lambda: bias(m).clamp(-1, 1) * torch.finfo(case.torch_dtype).max / 2,
        "wide bias": lambda: bias(*heads) * 5,
        "expanded": lambda: kept(1, m).expand(n, m),
        "pairs": lambda: kept(n, m),
        "bias of pairs": lambda: bias(n, m).masked_fill(~kept(n, m), -math.inf),
        "+inf": lambda: bias(m).index_fill_(0, torch.tensor([0] if m else [], dtype=int), math.inf),
        "nan": lambda: bias(m).index_fill_(0, torch.tensor([0] if m else [], dtype=int), math.nan),
    }[kind]()
    return made if made.dtype == torch.bool or kind == "wide bias" else made.to(case.torch_dtype)
