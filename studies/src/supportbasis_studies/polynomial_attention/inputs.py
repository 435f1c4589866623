"""The inputs of the study, and how much of it is run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from supportbasis.problem.problem import Head
from supportbasis.problem.validation import attention_problem

from ..comparison.settings import Setting

DIM = 16
VARIANCE = 0.3  # of an entry, before its row is scaled
ROW_SPREAD = 0.5  # standard deviation of the logarithm of a row's scale
FREEDOM = 3  # of Student's t

Draw = Callable[[int, int, torch.Generator], Tensor]


@dataclass(frozen=True)
class Extent:
    """How long the inputs are and how often each measurement is repeated."""

    lengths: tuple[int, ...]  # of the inputs whose errors are measured
    seeds: int
    bought_length: int  # of the log-normal input on which ratios are compared
    bought_sizes: tuple[int, ...]  # sketch sizes
    bought_seeds: int
    sketch_length: int  # of the input on which sketches of powers are measured
    sketch_sizes: tuple[int, ...]
    sketch_seeds: int
    timed_lengths: tuple[int, ...]
    swept_length: int
    rounds: int  # of each timed call; the best counts


FULL = Extent(
    lengths=(512, 1024, 2048, 4096),
    seeds=5,
    bought_length=4096,
    bought_sizes=(8, 16, 32, 64, 128),
    bought_seeds=3,
    sketch_length=4096,
    sketch_sizes=(16, 32, 64, 128, 256),
    sketch_seeds=8,
    timed_lengths=(8192, 16384, 32768, 65536),
    swept_length=8192,
    rounds=6,
)
QUICK = Extent(
    lengths=(512, 1024),
    seeds=2,
    bought_length=512,
    bought_sizes=(16, 64),
    bought_seeds=1,
    sketch_length=1024,
    sketch_sizes=(16, 64, 256),
    sketch_seeds=2,
    timed_lengths=(2048, 4096, 8192),
    swept_length=2048,
    rounds=2,
)


def _gaussian(n: int, dim: int, generator: torch.Generator) -> Tensor:
    return math.sqrt(VARIANCE) * torch.randn(n, dim, generator=generator)


def _student(n: int, dim: int, generator: torch.Generator) -> Tensor:
    square = torch.randn(FREEDOM, n, dim, generator=generator).square().mean(0)
    unit = torch.randn(n, dim, generator=generator) / square.sqrt()
    return unit * math.sqrt(VARIANCE * (FREEDOM - 2) / FREEDOM)


def _lognormal(n: int, dim: int, generator: torch.Generator) -> Tensor:
    entries = _gaussian(n, dim, generator)
    return entries * (ROW_SPREAD * torch.randn(n, 1, generator=generator)).exp()


DRAWS: dict[str, tuple[Draw, str]] = {
    "gaussian": (_gaussian, f"entries from N(0, {VARIANCE})"),
    "student-t": (
        _student,
        f"entries from Student's t with {FREEDOM} degrees of freedom, variance {VARIANCE}",
    ),
    "log-normal": (
        _lognormal,
        f"entries from N(0, {VARIANCE}), each row times exp(N(0, {ROW_SPREAD}²))",
    ),
}


def draw(name: str, n: int, seed: int, *, dim: int = DIM, factor: float = 1.0) -> Setting:
    """One of `DRAWS` for Q and for K, multiplied by ``factor``; V from N(0, 1)."""
    make, text = DRAWS[name]
    generator = torch.Generator().manual_seed(seed)
    query, key = (factor * make(n, dim, generator)[None, None] for _ in range(2))
    value = torch.randn(1, 1, n, dim, generator=generator)
    return Setting(name, text, query, key, value)


def normal(n: int, dim: int, deviation: float, seed: int = 0) -> Setting:
    """Entries of Q and K from N(0, deviation²), V from N(0, 1)."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(1, 1, n, dim, generator=generator) for _ in range(3))
    text = f"entries from N(0, {deviation:g}²)"
    return Setting("gaussian", text, deviation * query, deviation * key, value)


def fixed_buckets(n: int, dim: int, maxima: tuple[float, ...], seed: int = 0) -> Setting:
    """Gaussian rows scaled so that their largest entries cycle through ``maxima``."""
    setting = normal(n, dim, 1.0, seed)
    target = torch.tensor(maxima).repeat(math.ceil(n / len(maxima)))[:n, None]
    query, key = (x / x.abs().amax(-1, keepdim=True) * target for x in (setting.query, setting.key))
    listed = ", ".join(f"{value:g}" for value in maxima)
    text = f"Gaussian rows whose largest entries are {listed} in turn"
    return Setting("fixed buckets", text, query, key, setting.value)


def only_head(setting: Setting) -> Head:
    """The one head of a setting, as methods see it."""
    tensors = (setting.query, setting.key, setting.value)
    return attention_problem(*tensors, None, 0.0, False, None, False).head(0, 0)
