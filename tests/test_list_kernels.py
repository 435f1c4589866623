"""Kernels of the lists against a dense float64 transcription: interpreted, or on the device."""

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
    relative,
)  # first: it chooses the interpreter
from supportbasis.errors import InputError

from supportbasis.cuda.lists import list_attention as fast  # isort: skip

pytestmark = [
    needs_triton,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
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
    routes = tables.routes
    out, lse = torch.zeros_like(x.q[..., :1].expand(*x.q.shape[:2], x.v.shape[-1])), []
    outs = []
    for head in range(tables.heads):
        z = torch.full((x.q.shape[1], 1), -INF, dtype=torch.float64, device=x.q.device)
        value = torch.zeros_like(out[head])
        for tile, rows in enumerate(tables.rows[head]):
            rows = rows[rows >= 0].long()
            if not len(rows):
                continue
            cell = tile if routes is None else int(routes.cell[head, tile])
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
    scale: float
    leaves: int

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
        return fast.tilt(self.tables, first, last, self.leaves, self.scale)

    def select(self, price: Tensor) -> tuple[fast.Tilts, fast.Lists]:
        tilts = replace(self.made, lt=self.made.lt.clone())  # whose lt it changes
        return tilts, fast.select(self.tables, tilts, price, self.scale)


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
    k, real = (x.float().unflatten(1, (-1, leaf)) for x in (ks, real))
    count = real.sum(2, keepdim=True).clamp(min=1)
    apart = (k - k.sum(2, keepdim=True) / count).square() * real
    return (apart / count).sum((2, 3))


def routed(n, windows, window, block, heads, generator) -> fast.Routes:
    """Rows of every window at random cells of it, in whole tiles of half a block."""
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
    return fast.Routes(*(x.to(DEVICE) for x in (rows, cell, first, count)))


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
    mean, variance = fast.cell_means(query, members.contiguous().to(DEVICE))
    tables = fast.Tables(
        query, ks.to(DEVICE), vs.to(DEVICE), bs, members.contiguous().to(DEVICE),
        visible.int().to(DEVICE), mean, variance, leaf_spread(ks, real, leaf).to(DEVICE), leaf,
        routed(n, windows, window, block, heads, generator) if strict else None, "ieee",
    )  # fmt: skip
    own = (randn(heads, n, dv).to(dtype).to(DEVICE), randn(heads, n).to(DEVICE)) if causal else None
    if causal:
        own[1][:, 3] = -INF
    leaves = keys // leaf if not causal else max(1, int(visible.max()))
    return Case(tables, own, strict, scale, leaves)


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


@pytest.fixture(params=CASES, scope="module")
def any_case(request) -> Case:
    return case(**CASES[request.param])


@pytest.fixture(autouse=True)
def poisoned(monkeypatch) -> None:
    """Memory that nobody wrote holds NaN, or a large number."""
    new_empty, empty_like = Tensor.new_empty, torch.empty_like

    def poison(x: Tensor) -> Tensor:
        return x.fill_(math.nan if x.is_floating_point() else 10**8)

    monkeypatch.setattr(Tensor, "new_empty", lambda *a, **k: poison(new_empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))


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


def test_means_are_those_of_the_real_members(any_case):
    tables, rough = any_case.tables, 4 * UNIT[torch.float32] * math.sqrt(any_case.tables.block)
    assert relative(tables.mean, any_case.dense.mean) < rough
    for head, cell in ((0, 0), (tables.heads - 1, tables.cells - 1)):
        rows = tables.members[head, cell]
        rows = any_case.tokens.q[head, rows[rows >= 0].long()]
        qvar = rows.var(0, correction=0).mean() if len(rows) else rows.new_zeros(())
        assert abs(tables.variance[head, cell] - qvar) <= 2 * rough * qvar


def test_tilts(any_case):
    tilts, known = any_case.made, any_case.dense
    known = [y[:, :, : any_case.leaves] for y in (known.kt, known.vt, known.lt)]
    seen = known[2] > -INF
    assert ((tilts.lt > -INF) == seen).all()
    hidden = any_case.seen & ~seen
    assert (tilts.kt[hidden] == 0).all() and (tilts.vt[hidden] == 0).all()
    for mine, right in zip((tilts.kt, tilts.vt, tilts.lt), known, strict=True):
        assert relative(mine[seen], right[seen]) < any_case.rough


def test_tilts_of_a_range_are_the_same_bits(any_case):
    """Also of the first cells, which see few of the leaves, and in causal attention none."""
    whole, half = any_case.made, any_case.tables.cells // 2
    for first, last in ((0, half), (half, any_case.tables.cells)):
        part = any_case.tilts(first, last)
        seen = part.lt > -INF
        assert torch.equal(part.lt, whole.lt[:, first:last])
        for mine, all_cells in ((part.kt, whole.kt), (part.vt, whole.vt)):
            assert torch.equal(mine[seen], all_cells[:, first:last][seen])


def test_the_tilt_is_exact_at_the_mean(any_case):
    """kt is rounded, m too: lt makes up for both, so that only float32 roundings remain."""
    tables, tilts, x = any_case.tables, any_case.made, any_case.tokens
    m = tables.mean.to(tables.ks.dtype).double()
    mine = any_case.scale * torch.einsum("hcd,hcld->hcl", m, tilts.kt.double()) + tilts.lt
    k, b = (y.unflatten(1, (-1, tables.leaf))[:, : any_case.leaves] for y in (x.k, x.b))
    right = any_case.scale * torch.einsum("hcd,hljd->hclj", m, k) + b.unsqueeze(1)
    seen = tilts.lt > -INF
    size = 1 + right.logsumexp(-1)[seen].abs().max()
    rough = 2 * UNIT[torch.float32] * (tables.ks.shape[2] + 3) * size  # two products of d terms
    assert (mine - right.logsumexp(-1))[seen].abs().max() < rough


def test_some_members_are_asked():
    given = case("full", heads=1, n=130, block=64)
    known = dense_importance(given.tokens, given.dense, given.tables, given.scale, 2)
    assert relative(known, given.known) > 0.01
    price = gap_price(known, 0.3)
    opened = opened_by(given.select(price)[1], given.leaves)
    assert torch.equal(opened, known > price.view(-1, 1, 1))


def test_lists_are_the_leaves_above_the_price(any_case):
    price = gap_price(any_case.known, 0.3)
    tilts, lists = any_case.select(price)
    opened = opened_by(lists, any_case.leaves)
    price = price.view(-1, 1, 1)
    sure = (any_case.known / price - 1).abs() > 3 * any_case.rough
    if any_case.tables.ks.dtype == torch.float32:
        assert sure.all()
    assert ((opened == (any_case.known > price)) | ~sure).all() and opened.any()
    assert torch.equal(tilts.lt, any_case.made.lt.masked_fill(opened, -INF))


def test_lists_are_compacted_chunk_by_chunk(monkeypatch):
    given = case("full", heads=1)
    price = gap_price(given.known, 0.5)
    lists = given.select(price)[1]
    shapes = tuple((32, 16, 4, 1) for _ in fast.TILES["select"])
    monkeypatch.setitem(fast.TILES, "select", shapes)
    tilts, again = given.select(price)
    opened = opened_by(again, given.leaves)
    assert torch.equal(opened, opened_by(lists, given.leaves))
    assert torch.equal(tilts.lt, given.made.lt.masked_fill(opened, -INF))


def compare_attention(given: Case, price: Tensor) -> Tensor:
    tables, (tilts, lists) = given.tables, given.select(price)
    output = torch.full((*tables.query.shape[:2], tables.vs.shape[2]), math.nan, device=DEVICE)
    output, lse = output.to(tables.ks.dtype), output[..., 0].clone()
    fast.attend(tables, tilts, lists, given.own, output, lse, given.scale)
    opened = opened_by(lists, tables.ks.shape[1] // tables.leaf)
    right, size = dense_attend(given.tokens, given.dense, tables, opened, given.own, given.scale)
    some = size > -INF
    assert torch.equal(lse > -INF, some) and (output[~some] == 0).all()
    assert relative(output, right) < given.rough
    assert relative(lse[some], size[some]) < given.rough
    return opened[:, :, : given.leaves]


def test_attention(any_case):
    """Of the last head every leaf is open, or none: the others have some of both."""
    price = gap_price(any_case.known, 0.3)
    everything = any_case.strict
    if any_case.tables.heads > 1:
        price[-1] = -1.0 if everything else INF
    opened = compare_attention(any_case, price)
    assert opened[0].any() and not opened[0, any_case.seen[0]].all()
    if any_case.tables.heads > 1:
        assert torch.equal(opened[-1], any_case.seen[-1] & everything)


def test_attention_of_ranges_of_whole_windows_is_the_same_bits():
    given = case("strict", n=150, heads=1)
    price = gap_price(given.known, 0.3)
    tables, (tilts, lists) = given.tables, given.select(price)
    output, lse = torch.full_like(given.own[0], math.nan), torch.full_like(given.own[1], math.nan)
    again, size = output.clone(), lse.clone()
    fast.attend(tables, tilts, lists, given.own, output, lse, given.scale)
    for first, last, leaves in ((0, 2, 1), (2, 6, 8)):
        tilts = fast.tilt(tables, first, last, leaves, given.scale)
        lists = fast.select(tables, tilts, price, given.scale)
        fast.attend(tables, tilts, lists, given.own, again, size, given.scale)
    assert torch.equal(again, output) and torch.equal(size, lse)


def test_the_own_output_may_be_float32():
    given = case("causal", dtype=HALF, heads=1)
    given = replace(given, own=(torch.randn_like(given.own[0].float()), given.own[1]))
    compare_attention(given, gap_price(given.known, 0.3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"leaf": 24}, "leaf"),
        ({"ks": torch.zeros(1, 96, 9)}, "ks"),
        ({"mean": torch.zeros(2, 6, 3)}, "mean"),
        ({"spread": torch.zeros(2, 6)}, "spread"),
        ({"bs": torch.zeros(2, 96, dtype=torch.float64)}, "bs"),
        ({"query": torch.zeros(2, 90, 12, dtype=torch.float64)}, "float64"),
        ({"members": torch.zeros(2, 6, 16)}, "members"),
    ],
)
def test_wrong_tables_are_refused_by_name(change, message):
    tables = case("full").tables
    with pytest.raises(InputError, match=message):
        replace(tables, **change)


def test_wrong_ranges_are_refused():
    given = case("full")
    with pytest.raises(InputError, match="tilt: cells"):
        given.tilts(3, 20)
