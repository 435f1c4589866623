"""Kernels of the lists alone on one GPU: `python benchmarks/list_kernels.py`.

Random tokens, sorted at random inside windows; the price opens a given share of the leaves that
cells see. Prints milliseconds of every part, forward and backward, and of PyTorch's attention in
the same run, after a check of sampled tiles and leaves against float32 PyTorch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from supportbasis.cuda.lists import list_attention as fast
from supportbasis.cuda.lists import list_backward as back

WORKSPACE = 2 << 30  # bytes of tilts at a time
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}


@dataclass(frozen=True)
class Case:
    """One setting: causal cells of own windows, causal strict, or not causal."""

    kind: str  # "causal", "strict", "full"
    n: int = 131072
    d: int = 64
    heads: int = 8
    window: int = 2048
    block: int = 128
    leaf: int = 64
    share: float = 0.05
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"

    @property
    def causal(self) -> bool:
        return self.kind != "full"

    @property
    def scale(self) -> float:
        return self.d**-0.5


@dataclass
class Data:
    """Random tokens and the tables made of them."""

    work: Case
    tokens: tuple[Tensor, Tensor, Tensor]  # [1, heads, n, d]
    tables: fast.Tables
    own: tuple[Tensor, Tensor] | None
    price: Tensor
    rows: back.Rows | None = None  # of a random loss


def shuffled(work: Case) -> Tensor:
    """A permutation inside each window, [heads, n]."""
    window = work.window if work.causal else work.n
    noise = torch.rand(work.heads, work.n // window, window, device=work.device)
    first = torch.arange(0, work.n, window, device=work.device)[:, None]
    return (noise.argsort(-1) + first).flatten(1).int()


def routes_of(work: Case) -> tuple[Tensor, ...]:
    """Rows of every window dealt to its cells at random: half a block or so more tiles for each."""
    size, per, heads = work.block // 2, work.window // work.block, work.heads
    windows, have = work.n // work.window, work.window // work.block * 3
    goes = torch.randint(per, (heads * windows, work.window), device=work.device)
    goes, order = goes.sort(dim=-1, stable=True)
    amount = F.one_hot(goes, per).sum(1)  # rows of a cell
    count = -(-amount // size)
    first = count.cumsum(-1) - count
    start = amount.cumsum(-1) - amount
    place = torch.arange(work.window, device=work.device) - start.gather(1, goes)
    place = place + first.gather(1, goes) * size
    rows = torch.full((heads * windows, have * size), -1, device=work.device)
    offset = torch.arange(heads * windows, device=work.device)[:, None] % windows
    rows.scatter_(1, place, order + offset * work.window)
    tile = torch.arange(have, device=work.device)
    cell = (tile >= first.unsqueeze(-1)).sum(1) - 1 + offset * per
    return (
        rows.view(heads, -1, size).int(), cell.view(heads, -1).int(),
        (first + offset * have).view(heads, -1).int(), count.view(heads, -1).int(),
    )  # fmt: skip


def build(work: Case) -> Data:
    torch.manual_seed(0)
    shape = (work.heads, work.n, work.d)
    q, k, v = (torch.randn(shape, device=work.device).to(work.dtype) for _ in range(3))
    order = shuffled(work).long().unsqueeze(-1).expand(shape)
    members = shuffled(work).view(work.heads, -1, work.block)
    cells, per = members.shape[1], work.window // work.block
    visible = torch.full((cells,), work.n // work.leaf, device=work.device)
    if work.causal:
        visible = torch.arange(cells, device=work.device) // per * (work.window // work.leaf)
    strict = work.kind == "strict"
    if strict:  # cells of the window before
        members = torch.cat([torch.full_like(members[:, :per], -1), members[:, :-per]], 1)
    ks = k.gather(1, order)
    spread = ks.float().unflatten(1, (-1, work.leaf)).var(2, correction=0).sum(-1)
    tables = fast.Tables(
        q, ks, v.gather(1, order), None, order[..., 0].int(), members, visible.int(),
        *fast.cell_means(q, members), spread, work.leaf, work.scale,
        "tf32x3", *(routes_of(work) if strict else (members,)),
    )  # fmt: skip
    data = Data(work, (q[None], k[None], v[None]), tables, None, torch.zeros(()))
    data.own = own_window(data) if work.causal else None
    data.price = price_of(data)
    output, lse = forward(data)
    grad = torch.randn(output.shape, device=work.device).to(work.dtype)
    data.rows = back.Rows(grad, (grad.float() * output).sum(-1), lse)
    return data


def own_window(data: Data) -> tuple[Tensor, Tensor]:
    """Exact causal attention inside each window, all windows in one batch."""
    work = data.work
    q, k, v = (x[0].unflatten(1, (-1, work.window)).transpose(0, 1) for x in data.tokens)
    if work.device == "cuda":
        result = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, True, scale=work.scale
        )
        out, lse = result[:2]
    else:
        z = (q @ k.transpose(-1, -2)).float() * work.scale
        z = z.masked_fill(torch.ones_like(z[0, 0]).triu(1).bool(), -torch.inf)
        out, lse = z.softmax(-1).to(v.dtype) @ v, z.logsumexp(-1)
    out, lse = (x.transpose(0, 1).flatten(1, 2).contiguous() for x in (out, lse))
    return out, lse.float()


def price_of(data: Data) -> Tensor:
    """Per head, about the price at which the given share of the visible leaves is open."""
    work, tables = data.work, data.tables
    low, high = (torch.full((work.heads,), x, device=work.device) for x in (-46.0, 10.0))
    seen = float(tables.visible.sum())
    for _ in range(12):
        middle, count = (low + high) / 2, torch.zeros_like(low)
        for first, last, leaves in pieces(data):
            tilts = fast.tilt(tables, first, last, leaves)
            count += fast.select(tables, tilts, middle.exp()).count.sum(1)
        many = count > work.share * seen
        low, high = torch.where(many, middle, low), torch.where(many, high, middle)
    return high.exp()


def pieces(data: Data) -> Iterator[tuple[int, int, int]]:
    """Ranges of cells, in whole windows, whose tilts fit the workspace: first, last, leaves."""
    work, cells = data.work, data.tables.cells
    per = work.window // work.block
    many = work.window // work.leaf
    first = 0
    while first < cells:
        last = first
        while last < cells:
            end = min(cells, last + per)
            leaves = (end // per - 1) * many if work.causal else work.n // work.leaf
            size = work.heads * (end - first) * max(1, leaves) * 2 * work.d
            if last > first and size * data.tables.ks.element_size() > WORKSPACE:
                break
            last, seen = end, max(1, leaves)
        yield first, last, seen
        first = last


def forward(data: Data) -> tuple[Tensor, Tensor]:
    """All cells, the tilts of some windows at a time."""
    work, tables = data.work, data.tables
    output = torch.empty_like(data.tokens[2][0])
    lse = torch.empty(output.shape[:2], device=work.device)
    for first, last, leaves in pieces(data):
        tilts = fast.tilt(tables, first, last, leaves)
        lists = fast.select(tables, tilts, data.price)
        fast.attend(tables, tilts, lists, data.own, output, lse)
    return output, lse


def new_totals(data: Data) -> back.Totals:
    q, k, v = (x[0].shape for x in data.tokens)
    shapes = (q, k, v, data.tables.spread.shape, k[:2])
    return back.Totals(*(torch.zeros(x, device=data.work.device) for x in shapes))


def backward(data: Data) -> back.Totals:
    """Gradients of the lists, whose tilts are made again; the own window's are not among them."""
    tables, totals = data.tables, new_totals(data)
    for first, last, leaves in pieces(data):
        tilts = fast.tilt(tables, first, last, leaves)
        lists = fast.select(tables, tilts, data.price)
        back.gradients(tables, tilts, lists, data.rows, totals)
    return totals


def own_window_backward(data: Data, output: Tensor) -> tuple[Tensor, ...]:
    """Gradients of the own window, from the output and lse of the whole."""
    work, rows = data.work, data.rows

    def cut(x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, work.window)).transpose(0, 1)

    seed = torch.zeros(2, dtype=torch.uint64, device=work.device)
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        cut(rows.grad), *(cut(x[0]) for x in data.tokens), cut(output), cut(rows.lse).contiguous(),
        None, None, work.window, work.window, 0.0, True, seed, seed[0], scale=work.scale,
    )  # fmt: skip


def everything(data: Data) -> None:
    """Forward and backward pass with the own window; sorting and routing are not among them."""
    if data.work.causal:
        own_window(data)
    output, _ = forward(data)
    backward(data)
    if data.work.causal:
        own_window_backward(data, output)


def sampled_error(data: Data, samples: int = 4) -> float:
    """Relative error of some tiles of every head against float32, lists given by the kernels."""
    work, tables = data.work, data.tables
    output, wrong, size = forward(data)[0], 0.0, 0.0
    for first, last, leaves in pieces(data):
        tilts = fast.tilt(tables, first, last, leaves)
        lists = fast.select(tables, tilts, data.price)
        ratio = tables.rows.shape[1] // tables.cells
        for head in range(work.heads):
            for tile in torch.linspace(first * ratio, last * ratio - 1, samples).int().tolist():
                rows = tables.rows[head, tile]
                rows = rows[rows >= 0].long()
                cell = tile if tables.cell is None else int(tables.cell[head, tile])
                at = (head, cell - first)
                opened = lists.index[at][: lists.count[at]].long()
                if len(rows):
                    right = float32_tile(data, head, cell, rows, opened)
                    wrong += float((output[head, rows] - right).square().sum())
                    size += float(right.square().sum())
    return (wrong / size) ** 0.5


def float32_tile(data: Data, head: int, cell: int, rows: Tensor, opened: Tensor) -> Tensor:
    """Output of some rows by the tables of a cell, in float32."""
    work, tables = data.work, data.tables
    end = int(tables.visible[cell])
    k, v = (x[head].float().unflatten(0, (-1, work.leaf))[:end] for x in (tables.ks, tables.vs))
    t = work.scale * k @ tables.mean[head, cell]
    w = t.softmax(-1)
    kt, vt = ((w.unsqueeze(-1) * x).sum(1) for x in (k, v))
    lt = t.logsumexp(-1) - work.scale * kt @ tables.mean[head, cell]
    lt[opened] = -torch.inf
    keys = torch.cat([kt, k[opened].flatten(0, 1)])
    values = torch.cat([vt, v[opened].flatten(0, 1)])
    bias = torch.cat([lt, lt.new_zeros(len(keys) - end)])
    z = work.scale * tables.query[head, rows].float() @ keys.T + bias
    if data.own is not None:
        own_out, own_lse = (x[head, rows].float() for x in data.own)
        z = torch.cat([own_lse.unsqueeze(1), z], 1)
        p = z.softmax(1)
        return p[:, :1] * own_out + p[:, 1:] @ values
    return z.softmax(1) @ values


def opened_leaves(data: Data, head: int) -> Tensor:
    """Open leaves of every cell of a head, [cells, leaves]."""
    work, tables = data.work, data.tables
    mask = torch.zeros(tables.cells, work.n // work.leaf + 1, dtype=bool, device=work.device)
    for first, last, leaves in pieces(data):
        tilts = fast.tilt(tables, first, last, leaves)
        lists = fast.select(tables, tilts, data.price)
        listed = torch.arange(leaves, device=work.device) < lists.count[head].unsqueeze(-1)
        mask[first:last].scatter_(1, lists.index[head].where(listed, mask.shape[1] - 1).long(), 1)
    return mask[:, :-1]


def surrogate(data, head, rows, q, m, k, v, opened) -> Tensor:
    """A sum whose gradient is that of the loss, from some rows of a cell over leaves [.., L, d]."""
    scale, given = data.work.scale, data.rows
    t = scale * k @ m
    kt, vt = ((t.softmax(-1).unsqueeze(-1) * x).sum(1) for x in (k, v))
    lt = (t.logsumexp(-1) - scale * kt @ m).masked_fill(opened, -1e9)
    keys, values = (torch.cat([x, y[opened].flatten(0, 1)]) for x, y in ((kt, k), (vt, v)))
    z = scale * q @ keys.T + torch.cat([lt, lt.new_zeros(len(keys) - len(lt))])
    along = given.grad[head, rows].float() @ values.T
    p = (z.detach() - given.lse[head, rows, None]).exp()
    dz = p * (along.detach() - given.slope[head, rows, None])
    return (dz * z).sum() + (p * along).sum()


def sampled_gradient_error(data: Data) -> dict[str, float]:
    """Relative errors at a leaf and at the members of a cell of the last head, against float32."""
    work, tables, head = data.work, data.tables, data.work.heads - 1
    totals, opened = backward(data), opened_leaves(data, head)
    q, mean = tables.query[head].float(), tables.mean[head]
    k, v = (x[head].float().unflatten(0, (-1, work.leaf)) for x in (tables.ks, tables.vs))
    home = torch.full((work.n + 1,), -1, device=work.device)  # cell of a row
    ratio = tables.rows.shape[1] // tables.cells
    cell_of = torch.arange(tables.cells, device=work.device).repeat_interleave(ratio).int()
    cell_of = cell_of if tables.cell is None else tables.cell[head]
    home[tables.rows[head].long()] = cell_of.long().unsqueeze(-1).expand(tables.rows.shape[1:])
    home = home[:-1]
    leaf = work.n // work.leaf // 3
    at = slice(leaf, leaf + 1)
    key, value = k[at].clone().requires_grad_(), v[at].clone().requires_grad_()
    for cell in range(tables.cells):
        rows = (home == cell).nonzero()[:, 0]
        if int(tables.visible[cell]) > leaf and len(rows):
            given = (data, head, rows, q[rows], mean[cell], key, value, opened[cell, at])
            surrogate(*given).backward()
    cell = tables.cells * 3 // 4
    members = tables.members[head, cell].long()
    tokens = q.clone().requires_grad_()
    for one in {cell, *home[members].tolist()}:
        end = int(tables.visible[one])
        rows = (home == one).nonzero()[:, 0]
        m = tokens[members].mean(0) if one == cell else mean[one]
        given = (k[:end], v[:end], opened[one, :end])
        surrogate(data, head, rows, tokens[rows], m, *given).backward()
    pairs = {
        "query": (totals.query[head, members], tokens.grad[members]),
        "key": (totals.key[head].unflatten(0, (-1, work.leaf))[at], key.grad),
        "value": (totals.value[head].unflatten(0, (-1, work.leaf))[at], value.grad),
    }
    return {name: float((x - y).norm() / y.norm()) for name, (x, y) in pairs.items()}


def backward_parts(data, tilts, lists, output) -> dict[str, Callable[[], object]]:
    """Calls of the backward pass to time, by name; the tilts are lost."""
    given, totals = (data.tables, tilts), new_totals(data)
    rows = back.gather(*given, data.rows)
    openers = back.transposed(lists, rows)
    changes = back.tilt_gradients(
        data.tables, replace(tilts, kt=tilts.kt.clone(), vt=tilts.vt.clone()), rows
    )
    calls: dict[str, Callable[[], object]] = {
        "gather": lambda: back.gather(*given, data.rows),
        "dq of rows": lambda: back.query_gradients(*given, lists, rows, totals),
        "transposed lists": lambda: back.transposed(lists, rows),
        "dk, dv of open leaves": lambda: back.exact_gradients(data.tables, openers, rows, totals),
        "dk, dv through tilts": lambda: back.leaf_gradients(*given, changes, totals),
        "dq through means": lambda: back.mean_gradients(*given, changes, totals),
        "d of tilts": lambda: back.tilt_gradients(*given, rows),
        "backward": lambda: backward(data),
    }
    if data.work.causal:
        calls["own window backward"] = lambda: own_window_backward(data, output)
    calls["all, forward and backward"] = lambda: everything(data)
    return calls


def parts(data: Data) -> dict[str, Callable[[], object]]:
    """Calls to time, by name; tilts of all cells at once."""
    work, tables = data.work, data.tables
    leaves = int(tables.visible.max())
    tilts = fast.tilt(tables, 0, tables.cells, leaves)
    closed = replace(tilts, lt=tilts.lt.clone())
    lists = fast.select(tables, closed, data.price)
    output = torch.empty_like(data.tokens[2][0])
    lse = torch.empty(output.shape[:2], device=work.device)
    calls: dict[str, Callable[[], object]] = {
        "means": lambda: fast.cell_means(tables.query, tables.members),
        "tilt": lambda: fast.tilt(tables, 0, tables.cells, leaves),
        "select": lambda: fast.select(tables, closed, data.price),
        "attend": lambda: fast.attend(tables, closed, lists, data.own, output, lse),
        "forward": lambda: forward(data),
    }
    if work.causal:
        calls["own window"] = lambda: own_window(data)
    return calls | backward_parts(data, closed, lists, output)


def exact(data: Data) -> Iterator[tuple[str, Callable[[], object]]]:
    """PyTorch's attention by each backend, forward alone and with the backward pass."""
    tokens = [x.clone().requires_grad_() for x in data.tokens]
    for name, backend in BACKENDS.items():

        def call(backend: SDPBackend = backend) -> object:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(
                    *data.tokens, is_causal=data.work.causal, scale=data.work.scale
                )

        def both(backend: SDPBackend = backend) -> object:
            with sdpa_kernel(backend):
                output = F.scaled_dot_product_attention(
                    *tokens, is_causal=data.work.causal, scale=data.work.scale
                )
            return torch.autograd.grad(output, tokens, data.rows.grad[None])

        yield name, call
        yield f"{name} and backward", both


def report(work: Case) -> None:
    """One table: the check, then milliseconds."""
    from triton.testing import do_bench

    data = build(work)
    print(
        f"\n{work.kind} n={work.n} d={work.d} heads={work.heads} {work.share:.0%} open", flush=True
    )
    print(f"  error against float32  {sampled_error(data):.1e}", flush=True)
    errors = ", ".join(f"{name} {x:.1e}" for name, x in sampled_gradient_error(data).items())
    print(f"  of gradients           {errors}", flush=True)
    for name, call in (*parts(data).items(), *exact(data)):
        try:
            call()
            took = do_bench(call, warmup=20, rep=100, return_mode="median")
            print(f"  {name:25s} {took:8.3f} ms", flush=True)
        except Exception as error:  # a shape that does not fit is part of the answer
            print(f"  {name:25s} {str(error).splitlines()[0][:80]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=131072)
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--kinds", nargs="+", default=["causal", "strict", "full"])
    parser.add_argument("--dims", nargs="+", type=int, default=[64, 128])
    given = parser.parse_args()
    for kind in given.kinds:
        for d in given.dims:
            report(Case(kind, given.n, d, share=given.share))
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
