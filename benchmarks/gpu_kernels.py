"""Degree-2 kernels alone on one GPU, by tile shape: `python benchmarks/gpu_kernels.py`.

Whole calls are timed by `supportbasis bench --device cuda`, kernels of lists by `list_kernels.py`
and `sorting.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import torch

from supportbasis.cuda.polynomial import sums as polynomial
from supportbasis.cuda.polynomial.setting import Setting, Tile
from supportbasis_studies.gpu.cases import LONG, PAPER, gaussian
from supportbasis_studies.gpu.measure import milliseconds


def sweep(d: int) -> None:
    """Time of the degree-2 kernels by tile shape."""
    q, k, v = gaussian(PAPER)(8, LONG, d)
    table = torch.tensor([[1.0, 0.1, 0.005]], device="cuda").expand(8, 3).contiguous()
    given = polynomial.Polynomials(table, torch.zeros(8, device="cuda"), 2)
    setting = Setting(q, v, given)
    known = setting.state_tile
    for rows, pairs, (tokens, stages), warps in itertools.product(
        {64, d}, (1, 2, 4), ((64, 3), (32, 4), (64, 2)), (4, 8)
    ):
        if 64 <= rows * d * pairs // (warps * 32) <= 128:  # registers of the sums
            state = Tile(rows, d, tokens, warps, stages, pairs)
            setting.state_tile = state
            side = polynomial.Side(k, v, None, setting, summed=True)
            show(state, partial(polynomial.sums_over, side, setting, LONG))
    setting.state_tile = known
    keys = polynomial.Side(k, v, None, setting, summed=True)
    queries = polynomial.Side(q, v, None, setting, read=True)
    sums = polynomial.sums_over(keys, setting, LONG)
    for (count, warps), columns, stages in itertools.product(
        ((64, 4), (128, 8), (128, 4), (256, 8)), {64, d}, (2, 3, 4)
    ):
        setting.read_tile = read = Tile(count, columns, 64, warps, stages)
        show(read, partial(polynomial.read, queries, sums, setting))


def show(shape: object, call: Callable[[], object]) -> None:
    try:
        call()
        print(f"{milliseconds(call, 60.0):8.3f} ms  {shape}", flush=True)
    except Exception as error:  # a shape that does not fit is part of the answer
        print(f"       -     {shape}: {str(error).splitlines()[0][:80]}", flush=True)


def main() -> None:
    for d in (64, 128):
        sweep(d)


if __name__ == "__main__":
    main()
