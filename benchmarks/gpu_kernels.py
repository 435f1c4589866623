"""Kernels alone on one GPU: `python benchmarks/gpu_kernels.py`.

Block lists of random granules (their share of the keys given) beside PyTorch's attention, and with
`--sweep` the degree-2 kernels by tile shape. Whole calls are timed by `supportbasis bench --device
cuda`.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from supportbasis.cli.gpu.measure import milliseconds
from supportbasis.cli.gpu.works import LONG, PAPER, gaussian
from supportbasis.kernels import blocklist, polynomial
from supportbasis.kernels.tiles import RowTiles, StateTiles, choose_tiles

BLOCK = 128  # queries of a list


def lists(d: int, share: float, *, weighted: bool, backward: bool = False) -> None:
    """One line: attention of 8 heads over random lists, and its error on sampled rows."""
    heads, n = 8, LONG
    q, k, v = gaussian(1.0)(heads, n, d)
    granules, blocks = n // blocklist.GRANULE, n // BLOCK
    generator = torch.Generator("cuda").manual_seed(0)
    chosen = torch.rand(heads, blocks, granules, device="cuda", generator=generator)
    chosen = chosen.topk(int(share * granules), -1).indices.sort(-1).values.int()
    offsets = torch.arange(heads * blocks + 1, device="cuda", dtype=torch.int32) * chosen.shape[-1]
    log_weight = torch.zeros(1, heads, n, device="cuda") if weighted else None

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return blocklist.block_list_attention(
            q, k, v, offsets, chosen.flatten(), log_weight=log_weight, block=BLOCK
        )[0]

    error = listed_error(q, k, v, run(q, k, v), chosen)
    leaves, grad = [x.requires_grad_() for x in (q, k, v)], torch.randn_like(v)

    def timed(call: Callable[..., Tensor]) -> float:
        def step() -> object:
            if backward:
                return torch.autograd.grad(call(*leaves), leaves, grad)
            with torch.no_grad():
                return call(*leaves)

        step()
        return milliseconds(step)

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        exact = timed(F.scaled_dot_product_attention)
    ours = timed(run)
    what = "weighted" * weighted + " forward+backward" * backward
    print(
        f"lists of {share:.0%}, d={d} {what}: {ours:.3f} ms, cuDNN {exact:.1f} ms, "
        f"{exact / ours:.1f}x, error {error:.1e}",
        flush=True,
    )


def listed_error(q: Tensor, k: Tensor, v: Tensor, output: Tensor, chosen: Tensor) -> float:
    """Relative error of some rows against float64 attention over the same lists."""
    wrong = size = 0.0
    rows = range(0, q.shape[2], q.shape[2] // 64)
    for head, row in itertools.product(range(q.shape[1]), rows):
        granules = chosen[head, row // BLOCK].long().unsqueeze(1) * blocklist.GRANULE
        keys = (granules + torch.arange(blocklist.GRANULE, device="cuda")).flatten()
        z = k[0, head, keys].double() @ q[0, head, row].double() * q.shape[-1] ** -0.5
        exact = z.softmax(0) @ v[0, head, keys].double()
        wrong += float((output[0, head, row].double() - exact).square().sum())
        size += float(exact.square().sum())
    return (wrong / size) ** 0.5


def sweep(d: int) -> None:
    """Time of the degree-2 kernels by tile shape."""
    q, k, v = gaussian(PAPER)(8, LONG, d)
    table = torch.tensor([[1.0, 0.1, 0.005]], device="cuda").expand(8, 3).contiguous()
    given = polynomial.Polynomials(table, torch.zeros(8, device="cuda"), 2)
    known = choose_tiles(d, d, False)
    for rows, pairs, (tokens, stages), warps in itertools.product(
        {64, d}, (1, 2, 4), ((64, 3), (32, 4), (64, 2)), (4, 8)
    ):
        if 64 <= rows * d * pairs // (warps * 32) <= 128:  # registers of the sums
            state = StateTiles(rows, d, pairs, tokens, warps, stages)
            setting = polynomial.setting_of(q, v, replace(given, tiles=replace(known, state=state)))
            side = polynomial.prepared(k, v, None, setting, summed=True)
            show(state, partial(polynomial.sums_over, side, setting))
    setting = polynomial.setting_of(q, v, given)
    keys = polynomial.prepared(k, v, None, setting, summed=True)
    queries = polynomial.prepared(q, v, None, setting, read=True)
    sums = polynomial.sums_over(keys, setting)
    for (count, warps), columns, stages in itertools.product(
        ((64, 4), (128, 8), (128, 4), (256, 8)), {64, d}, (2, 3, 4)
    ):
        read = RowTiles(count, columns, 64, warps, stages)
        setting = polynomial.setting_of(q, v, replace(given, tiles=replace(known, read=read)))
        show(read, partial(polynomial.read, queries, sums, keys, setting))


def show(shape: object, call: Callable[[], object]) -> None:
    try:
        call()
        print(f"{milliseconds(call, 60.0):8.3f} ms  {shape}", flush=True)
    except Exception as error:  # a shape that does not fit is part of the answer
        print(f"       -     {shape}: {str(error).splitlines()[0][:80]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    if parser.parse_args().sweep:
        for d in (64, 128):
            sweep(d)
        return
    for d, weighted in itertools.product((64, 128), (False, True)):
        lists(d, 0.1, weighted=weighted)
    lists(64, 0.1, weighted=False, backward=True)


if __name__ == "__main__":
    main()
