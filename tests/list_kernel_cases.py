"""A dense float64 transcription of the lists' kernels, and tables to compare them on."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import pytest
import torch
from torch import Tensor

from device_cases import (
    CUDA,
    DEVICE,
    UNIT,
    needs_triton,
)  # first: it chooses the interpreter

from supportbasis.cuda.lists import list_attention as fast  # isort: skip

marks = [
    needs_triton,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.usefixtures("poisoned"),
]
INF = math.inf


# --- the scheme, dense ---------------------------------------------------------------------------


@dataclass
class Tokens:
    """What is differentiated, in float64; keys once for every head of the queries."""

    q: Tensor  # [H, n, d]
    k: Tensor  # [H, M, d], sorted
    v: Tensor
    b: Tensor  # [H, M]

    @staticmethod
    def of(tables: fast.Tables) -> Tokens:
        k, v = (x.double().repeat_interleave(tables.group, 0) for x in (tables.ks, tables.vs))
        b = torch.zeros_like(k[..., 0]) if tables.bs is None else tables.bs.double()
        return Tokens(tables.query.double(), k, v, b)


@dataclass
class DenseTilts:
    kt: Tensor
    vt: Tensor
    lt: Tensor
    mean: Tensor


def dense_tilts(x: Tokens, tables: fast.Tables, scale: float) -> DenseTilts:
    """Every leaf as every cell sees it."""
    heads = torch.arange(tables.heads, device=x.q.device)[:, None, None]
    live = (tables.members >= 0).unsqueeze(-1)
    rows = x.q[heads, tables.members.long().clamp(min=0)] * live
    mean = rows.sum(2) / live.sum(2).clamp(min=1)
    k, v, b = (y.unflatten(1, (-1, tables.leaf)) for y in (x.k, x.v, x.b))
    t = scale * torch.einsum("hcd,hljd->hclj", mean, k) + b.unsqueeze(1)
    leaf = torch.arange(k.shape[1], device=t.device)
    seen = (t > -INF).any(-1) & (leaf < tables.visible[:, None])
    t = t.masked_fill(~seen.unsqueeze(-1), 0.0)
    w = t.softmax(-1) * seen.unsqueeze(-1)
    kt, vt = (torch.einsum("hclj,hljd->hcld", w, y) for y in (k, v))
    lt = t.logsumexp(-1) - scale * torch.einsum("hcd,hcld->hcl", mean, kt)
    qvar = ((rows - mean.unsqueeze(2)) * live).square().sum((2, 3)) / live.sum((2, 3)).clamp(min=1)
    real = (tables.slots >= 0).repeat_interleave(tables.group, 0).unsqueeze(-1)
    kvar = leaf_spread(x.k, real, tables.leaf)
    curvature = scale**2 / 2 * (qvar / x.q.shape[-1]).unsqueeze(2) * kvar.unsqueeze(1)
    lt = lt + curvature.log1p()
    return DenseTilts(kt, vt, lt.masked_fill(~seen, -INF), mean)


def dense_importance(x, tilts: DenseTilts, tables, scale, stride=1) -> Tensor:
    """Importance of every leaf for every cell; zero where there are no members."""
    heads = torch.arange(tables.heads, device=x.q.device)[:, None, None]
    live, index = tables.members >= 0, tables.members.long().clamp(min=0)
    rows = x.q[heads, index]
    apart = (rows - tilts.mean.unsqueeze(2)).square().sum(-1) * live
    qvar = apart.sum(-1) / live.sum(-1).clamp(min=1) / x.q.shape[-1]
    z = scale * torch.einsum("hcid,hcld->hcil", rows, tilts.kt) + tilts.lt.unsqueeze(2)
    share = (z - z.logsumexp(-1, keepdim=True)).exp().nan_to_num(0.0)
    share, live = share[:, :, ::stride], live[:, :, ::stride]
    square = (share.square() * live.unsqueeze(-1)).sum(2) / live.sum(2).clamp(min=1).unsqueeze(-1)
    spread = tables.spread.double().repeat_interleave(tables.group, 0).unsqueeze(1)
    return square * scale**2 * qvar.unsqueeze(-1) * spread


def dense_attend(x, tilts: DenseTilts, tables, opened, own, scale) -> tuple[Tensor, Tensor]:
    """Output and lse of every row in a tile, one softmax each; ``opened`` [H, cells, leaves]."""
    out, lse = torch.zeros_like(x.q[..., :1].expand(*x.q.shape[:2], x.v.shape[-1])), []
    outs = []
    for head in range(tables.heads):
        z = torch.full((x.q.shape[1], 1), -INF, dtype=torch.float64, device=x.q.device)
        value = torch.zeros_like(out[head])
        for tile, rows in enumerate(tables.rows[head]):
            rows = rows[rows >= 0].long()
            if not len(rows):
                continue
            cell = tile if tables.cell is None else int(tables.cell[head, tile])
            q, at = x.q[head, rows], (head, cell)
            far = scale * q @ tilts.kt[at].T + tilts.lt[at].masked_fill(opened[at], -INF)
            closed = ~opened[at].repeat_interleave(tables.leaf)
            near = scale * q @ x.k[head].T + x.b[head].masked_fill(closed, -INF)
            score, values = torch.cat([far, near], 1), torch.cat([tilts.vt[at], x.v[head]])
            share = score.masked_fill(score == -INF, -1e9)  # finite gradients of empty rows
            size = share.logsumexp(1)
            total = share.softmax(1) @ values
            if own is not None:
                both = torch.logaddexp(size, own[1][head, rows].double())
                total = total * (size - both).exp().unsqueeze(1)
                start = own[0][head, rows].double()
                total = total + start * (own[1][head, rows] - both).exp().unsqueeze(1)
                size = both
            none = (size < -1e8).unsqueeze(1)
            value = value.index_put((rows,), total.masked_fill(none, 0.0))
            z = z.index_put((rows,), size.unsqueeze(1).masked_fill(none, -INF))
        outs.append(value)
        lse.append(z[:, 0])
    return torch.stack(outs), torch.stack(lse)


# --- cases ---------------------------------------------------------------------------------------


@dataclass
class Case:
    tables: fast.Tables
    own: tuple[Tensor, Tensor] | None
    strict: bool
    leaves: int

    @property
    def scale(self) -> float:
        return self.tables.scale

    @property
    def rough(self) -> float:
        """Relative error of results, in the norm.

        Scores of unit normal tokens have the size r = scale sqrt(d). Operands and weights are
        rounded to the unit u; roundings of <q, kt> and of the mean m, which moves kt by scale
        cov m, change a weight by r u and r^2 u: in all a few times (1 + r)^2 u. In float32 sums of
        d and L entries add sqrt(d + L) roundings.
        """
        x, unit = self.tables.ks, UNIT[self.tables.ks.dtype]
        if x.dtype == torch.float32:
            unit *= math.sqrt(x.shape[2] + self.tables.leaf)
        return 4 * unit * (1 + self.scale * math.sqrt(x.shape[2])) ** 2

    @cached_property
    def seen(self) -> Tensor:
        """Visible leaves [H, cells, leaves]."""
        leaf = torch.arange(self.leaves, device=DEVICE)
        seen = leaf < self.tables.visible[:, None]
        return seen.expand(self.tables.heads, *seen.shape)

    @cached_property
    def tokens(self) -> Tokens:
        return Tokens.of(self.tables)

    @cached_property
    def dense(self) -> DenseTilts:
        return dense_tilts(self.tokens, self.tables, self.scale)

    @cached_property
    def known(self) -> Tensor:
        """Importance [H, cells, leaves]."""
        value = dense_importance(self.tokens, self.dense, self.tables, self.scale)
        return value[:, :, : self.leaves]

    @cached_property
    def made(self) -> fast.Tilts:
        return self.tilts(0, self.tables.cells)

    def tilts(self, first: int, last: int) -> fast.Tilts:
        return fast.tilt(self.tables, first, last, self.leaves)

    def select(self, price: Tensor) -> tuple[fast.Tilts, fast.Lists]:
        tilts = replace(self.made, lt=self.made.lt.clone())  # whose lt it changes
        return tilts, fast.select(self.tables, tilts, price)


def sorted_in_windows(count: int, window: int, padded: int, generator) -> Tensor:
    """A permutation inside each window, -1 for padding, padding last."""
    windows = []
    for start in range(0, padded, window):
        real = torch.arange(start, max(start, min(start + window, count)))
        real = real[torch.randperm(len(real), generator=generator)]
        windows.append(torch.cat([real, torch.full((window - len(real),), -1)]))
    return torch.cat(windows).int()


def leaf_spread(ks: Tensor, real: Tensor, leaf: int) -> Tensor:
    """Mean |k - mean|^2 over the real keys of every leaf; zero where it has none."""
    k, real = (x.unflatten(1, (-1, leaf)) for x in (ks, real))
    count = real.sum(2, keepdim=True).clamp(min=1)
    apart = (k - k.sum(2, keepdim=True) / count).square() * real
    return (apart / count).sum((2, 3))


def routed(n, windows, window, block, heads, generator) -> list[Tensor]:
    """Rows of every window at random cells of it, in whole tiles of half a block, the cell of each
    tile, and the first tile and the number of tiles of each cell."""
    size, per, have = block // 2, window // block, window // block + 2 * window // block
    rows = torch.full((heads, windows * have, size), -1, dtype=torch.int32)
    cell = torch.full((heads, windows * have), -1, dtype=torch.int32)
    first, count = torch.zeros(2, heads, windows * per, dtype=torch.int32)
    for head in range(heads):
        for w in range(windows):
            at = w * have
            own = torch.arange(w * window, min(n, (w + 1) * window), dtype=torch.int32)
            goes = torch.randint(per, own.shape, generator=generator)
            for c in range(per):
                first[head, w * per + c] = at
                for part in own[goes == c].split(size):
                    rows[head, at, : len(part)], cell[head, at] = part, w * per + c
                    at += 1
                count[head, w * per + c] = at - first[head, w * per + c]
    return [x.to(DEVICE) for x in (rows, cell, first, count)]


def case(
    kind, *, heads=2, key_heads=1, n=90, m=90, d=12, dv=20, weighted=True, dtype=torch.float32,
    scale=0.3, window=32, block=16, leaf=16, seed=0,
) -> Case:  # fmt: skip
    """Random tokens, sorted at random: not causal ("full"), causal, or causal and strict."""
    generator = torch.Generator().manual_seed(seed)
    causal, strict = kind != "full", kind == "strict"
    if strict:
        block, window = 2 * block, 2 * window
    windows = -(-n // window)
    if causal:
        m, keys, rows = n, windows * window, windows * window
    else:
        keys, rows, window = -(-m // leaf) * leaf, -(-n // block) * block, None
    randn = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    order = torch.stack([sorted_in_windows(m, window or keys, keys, generator)] * key_heads)
    real = (order >= 0).unsqueeze(-1)
    ks, vs = ((randn(key_heads, keys, w) * real).to(dtype) for w in (d, dv))
    members = torch.stack(
        [sorted_in_windows(n, window or rows, rows, generator) for _ in range(heads)]
    )
    members = members.view(heads, -1, block)
    per = members.shape[1] if not causal else window // block
    visible = torch.full((members.shape[1],), keys // leaf, dtype=torch.int32)
    if causal:
        visible = torch.arange(members.shape[1]) // per * (window // leaf)
    if strict:
        members = torch.cat([torch.full_like(members[:, :per], -1), members[:, :-per]], 1)
    bs = randn(heads, keys) if weighted else torch.zeros(heads, keys)
    bs = bs.masked_fill((order < 0).repeat_interleave(heads // key_heads, 0), -INF)
    if weighted:
        bs[:, leaf : 2 * leaf] = bs[:, 5] = -INF  # a hidden leaf, a hidden key
    bs = bs.to(DEVICE) if weighted or (order < 0).any() else None
    query = (randn(heads, n, d) + 0.5).to(dtype).to(DEVICE)
    members = members.contiguous().to(DEVICE)
    mean, variance = fast.cell_means(query, members)
    tables = fast.Tables(
        query, ks.to(DEVICE), vs.to(DEVICE), bs, order.to(DEVICE), members,
        visible.int().to(DEVICE), mean, variance,
        leaf_spread(ks.float(), real, leaf).to(DEVICE), leaf, scale, "ieee",
        *(routed(n, windows, window, block, heads, generator) if strict else [members]),
    )  # fmt: skip
    own = (randn(heads, n, dv).to(dtype).to(DEVICE), randn(heads, n).to(DEVICE)) if causal else None
    if causal:
        own[1][:, 3] = -INF
    leaves = keys // leaf if not causal else max(1, int(visible.max()))
    return Case(tables, own, strict, leaves)


# The interpreter has no bfloat16.
HALF = torch.bfloat16 if CUDA else torch.float16
CASES = {
    "full": {"kind": "full"},
    "full-unweighted-whole": {"kind": "full", "weighted": False, "m": 96, "d": 20, "dv": 8},
    "causal": {"kind": "causal"},
    "causal-unweighted": {"kind": "causal", "weighted": False, "heads": 1},
    "strict": {"kind": "strict", "n": 150},
    "full-wide-leaf": {"kind": "full", "leaf": 64, "m": 290, "n": 60, "heads": 1},
    "half-full-padding": {"kind": "full", "weighted": False, "dtype": HALF, "n": 40},
    "half-strict": {"kind": "strict", "n": 150, "dtype": HALF, "key_heads": 2, "d": 16, "dv": 32},
}


def opened_by(lists: fast.Lists, leaves: int) -> Tensor:
    """Lists as a mask [H, cells, leaves]; each must ascend."""
    mask = torch.zeros(*lists.index.shape[:2], leaves, dtype=torch.bool, device=DEVICE)
    for head in range(mask.shape[0]):
        for cell in range(mask.shape[1]):
            index = lists.index[head, cell, : lists.count[head, cell]].long()
            assert (index.diff() > 0).all()
            mask[head, cell, index] = True
    return mask


def gap_price(value: Tensor, share: float) -> Tensor:
    """Per head, the middle of the widest gap of the importances near a quantile."""
    prices = []
    for row in value.flatten(1):
        row = row[row > 0].log().sort().values
        low = int(len(row) * (1 - share)) - 3
        gap = row[low : low + 7].diff().argmax() + low
        prices.append(((row[gap] + row[gap + 1]) / 2).exp())
    return torch.stack(prices).float()
