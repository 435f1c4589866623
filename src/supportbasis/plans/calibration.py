"""Seconds of each kind of work on this machine, measured once a process; or from a table, with
``SUPPORTBASIS_DETERMINISTIC=1`` in the environment or ``torch.use_deterministic_algorithms(True)``,
so that the choice of ``Auto`` does not depend on the clock of a machine."""

from __future__ import annotations

import os
import timeit
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..components.streaming import lane_count
from ..polynomials.features import Buffer, FeatureMap
from ..problem.problem import Head

ROUNDS, REPEATS = 4, 3  # of timings: rounds over all dims, calls in each
DIMS = (4, 16, 64)  # at which exact attention is timed
Pairs = tuple[tuple[float, float], ...]  # (dim, one exact pair at that dim), dims ascending


class Rates(NamedTuple):
    """Seconds of each unit of work."""

    pairs: Pairs
    feature: float  # forming one feature
    product: float  # one multiply-add of a feature with a value
    scan: float  # reading one entry

    def pair(self, head: Head) -> float:
        """One exact pair: linear in the dim between the measured ones and beyond the last; below
        the first a kernel gains nothing."""
        dim = max((head.dim + head.value_dim) / 2, self.pairs[0][0])
        segments = (segment for segment in pairwise(self.pairs) if dim <= segment[1][0])
        (low, at_low), (high, at_high) = next(segments, self.pairs[-2:])
        return at_low + (at_high - at_low) * (dim - low) / (high - low)


TABLE_THREADS = 2
TABLE = {  # two cores at 2.5 GHz, and an H200
    "cpu": Rates(((4.0, 9e-10), (16.0, 6.5e-10), (64.0, 1.65e-9)), 2e-10, 1.2e-11, 1e-10),
    "cuda": Rates(((4.0, 4.5e-13), (16.0, 4.5e-13), (64.0, 5.4e-13)), 5e-12, 5.1e-14, 3e-12),
}


def is_deterministic() -> bool:
    """Whether plans must not depend on the clock."""
    asked = os.environ.get("SUPPORTBASIS_DETERMINISTIC", "") not in ("", "0")
    return asked or torch.are_deterministic_algorithms_enabled()


def threads() -> int:
    """Of PyTorch on a CPU; those of the table where plans are deterministic."""
    return TABLE_THREADS if is_deterministic() else torch.get_num_threads()


def rates_of(head: Head) -> Rates:
    """Rates of the head's device; on a GPU of its dtype, since exact kernels for 16 bits are
    faster."""
    query = head.query
    if is_deterministic():
        return TABLE.get(query.device.type, TABLE["cpu"])
    return calibrate(query.device.type, query.dtype if query.is_cuda else torch.float32)


@lru_cache(maxsize=4)
def calibrate(device: str, dtype: torch.dtype) -> Rates:
    """Measure the machine once a process, in about a tenth of a second. A GPU gets more to do:
    small work would only measure how long a launch takes."""
    features, lanes = FeatureMap(48, 2), lane_count(device)
    rows = 504 if device == "cpu" else 64 * 504
    x, value = (_numbers((lanes, rows, width), device) for width in (48, 64))
    buffer = Buffer(features, lanes, rows, x)
    written = buffer.write(x)
    state = value.new_zeros(lanes, features.count - 1, 64)
    count = lanes * rows * features.count
    write = _best(lambda: buffer.write(x), device) / count
    product = _best(lambda: state.baddbmm_(written, value), device) / count
    wide = x if device == "cpu" else written
    scan = _best(lambda: wide.abs().amax(-1), device) / wide.numel()
    return Rates(_time_sdpa(device, dtype), write, product / 64, scan)


def _numbers(shape: tuple[int, ...], device: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)  # the global generator stays untouched
    return torch.randn(shape, generator=generator).to(device)


def _time_sdpa(device: str, dtype: torch.dtype) -> Pairs:
    """Seconds of a pair at each dim, in turns: a busy moment must not hit all calls of one."""
    heads, tokens = (1, 1536) if device == "cpu" else (16, 8192)
    calls = {}
    for dim in DIMS:
        wide = dim if device == "cpu" else max(8, dim)  # fast kernels want multiples of 8
        q, k, v = _numbers((3, 1, heads, tokens, wide), device).to(dtype).unbind(0)
        calls[dim] = partial(F.scaled_dot_product_attention, q, k, v)
    rounds = [[_best(call, device, REPEATS) for call in calls.values()] for _ in range(ROUNDS)]
    best = (min(times) / (heads * tokens**2) for times in zip(*rounds, strict=True))
    return tuple(zip(map(float, DIMS), best, strict=True))


def _best(run: Callable[[], object], device: str, repeats: int = ROUNDS * REPEATS) -> float:
    def call() -> None:
        run()
        if device == "cuda":
            torch.cuda.synchronize()

    return min(timeit.repeat(call, number=1, repeat=repeats))
