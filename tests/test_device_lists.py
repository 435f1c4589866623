"""Lists on a device against PyTorch's way through the same trees: in Triton's interpreter, or on
the device where there is one."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import supportbasis as sb
from cases import beyond, dense_attention
from device_cases import (  # before kernels are imported
    CUDA,
    DEVICE,
    directions,
    followed,
    marks,
    needs_triton,
    planned,
    record,
    relative,
    rooms_of,
    smooth,
    without_waiting,
)
from supportbasis import forest as forests
from supportbasis.arrangement import repeated
from supportbasis.blocks import FAR, apart, remembered, strangers
from supportbasis.device import (
    causal as lists_of_causal,
)
from supportbasis.device import (
    granules,
    lists,
    lists_backward,
    replay,
)
from supportbasis.device.framed import Stack
from supportbasis.device.room import Room, with_spare
from supportbasis.inputs import attention_problem
from supportbasis.kernels import (
    cells,
    coarse,
    framing,
    ordering,
    placing,
    selection,
    summary,
)
from supportbasis.methods.block_support import BlockSearch
from supportbasis.problem import Head
from supportbasis.selection import Column, select
from supportbasis.tree import assign, order
from test_blocks import clustered, head_of

pytestmark = marks


# ---- orders -----------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize(("segments", "tokens", "dim", "depth"), [(2, 64, 5, 3), (1, 80, 20, 4)])
def test_nodes_that_a_program_holds_are_split_as_by_pytorch(segments, tokens, dim, depth):
    x = torch.randn(segments, tokens, dim, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    given, wanted = ordering.order(x, depth)[0].cpu(), order(x.cpu(), depth)[0]
    assert torch.equal(given.sort(1).values, wanted.sort(1).values)
    if not CUDA:  # rounding decides about ties of a device
        assert torch.equal(given, wanted)


@needs_triton
def test_larger_nodes_are_split_along_sampled_axes(monkeypatch):
    monkeypatch.setattr(ordering, "MOST", 32)
    x = torch.randn(2, 192, 3, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    x = x * torch.tensor([3.0, 1.0, 0.1], device=DEVICE)

    def spread(position):
        leaves = x.gather(1, position.unsqueeze(2).expand(-1, -1, 3)).view(2, -1, 6, 3)
        return float(leaves.var(2).sum(-1).mean())

    given, wanted = ordering.order(x, 5, splits=False)[0], order(x.cpu(), 5)[0].to(DEVICE)
    assert torch.equal(given.sort(1).values, wanted.sort(1).values)
    assert spread(given) <= 1.1 * spread(wanted)


@needs_triton
@pytest.mark.parametrize("most", [16, 128])
def test_tokens_fall_where_they_were_put(monkeypatch, most):
    """By the axes and thresholds of small nodes and of large ones."""
    monkeypatch.setattr(ordering, "MOST", most)
    x = torch.randn(3, 64, 4, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    position, splits = ordering.order(x, 3)
    leaf = assign(x, splits)
    wanted = (torch.arange(64, device=DEVICE) // 8).expand(3, -1)
    assert (leaf.gather(1, position) == wanted).float().mean() >= (0.98 if CUDA else 1.0)


@needs_triton
def test_equal_tokens_keep_their_order():
    x = torch.zeros(1, 16, 2, device=DEVICE)
    assert torch.equal(ordering.order(x, 2)[0][0].cpu(), torch.arange(16))


# ---- nodes ------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize(("n", "d", "length"), [(256, 5, 64), (150, 12, 40)])
def test_nodes_equal_those_of_pytorch(n, d, length):
    q, k, v = (x.to(DEVICE) for x in clustered(n=n, d=d))
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(n, generator=generator)
    weight[::7] = -math.inf
    head = head_of(q, k, v, weight.to(DEVICE))
    position = torch.full((4 * length,), -1)
    position[:n] = torch.randperm(n, generator=generator)
    position = position.view(4, length).to(DEVICE)
    position[-1] = -1
    twin = attention_problem(
        q.double(), k.double(), v.double(), weight.double().to(DEVICE), 0.0, False, None, False
    ).head(0, 0)
    halves = forests._half_sums(twin, position.view(-1, length // 8))
    wanted = forests._assemble(*halves, 2, 3)
    given = summary.summarised(head, position.view(-1, length // 4), 2, 3, torch.float32, math.inf)
    for name in forests.Forest.__dataclass_fields__:
        mine, theirs = getattr(given, name), getattr(wanted, name)
        if name in ("leaf_key", "leaf_value"):  # empty places hold anything without weight
            real = (position.view(-1, length // 4) >= 0).unsqueeze(2)
            mine, theirs = mine * real, theirs * real
        if not mine.is_floating_point():
            assert torch.equal(mine, theirs), name
            continue
        finite = theirs.isfinite()
        assert torch.equal(mine.isfinite(), finite), name
        size = theirs[finite].abs().max()
        assert (mine[finite] - theirs[finite]).abs().max() <= 4e-6 * size, name


# ---- selection --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def search():
    """Of a head with twice as many leaves as nodes that blocks start with."""
    q, k, v = (x.to(DEVICE) for x in clustered(n=2048))
    return BlockSearch.of(head_of(q, k, v), 64, 0)


@needs_triton
@pytest.mark.parametrize("price", [1e-3, 1e-6])
def test_lists_equal_those_of_pytorch(search, price):
    made = search.whole
    for layer in made.layers[:1]:
        cells = len(layer.cells.mean)
        start = Column.of(layer.start, cells)
        view = selection.look(made.forest, layer.cells, start)
        for name in ("log_mass", "key", "output", "size"):
            mine, theirs = getattr(view, name), getattr(layer.view, name)
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        wanted = select(made.forest, layer.cells, layer.view, layer.start, price)
        prices = torch.full((cells,), price, device=DEVICE)
        given = selection.select(made.forest, layer.cells, layer.view, start, prices, 256)
        members = torch.arange(cells, device=DEVICE)
        for mine, pairs in zip(given, (wanted.coarse, wanted.exact), strict=True):
            theirs = Column.of(pairs, cells)
            alike = [
                torch.equal(mine.of_members(one)[0].long(), theirs.of_members(one)[0])
                for one in members.split(1)
            ]
            # rough products on a device may judge a node differently that is near the price
            assert sum(alike) >= (0.9 if CUDA else 1.0) * cells


@needs_triton
def test_blocks_that_start_alike_are_judged_together(search):
    """And a block without a start, first of all, takes nothing from the others."""
    forest, layer = search.whole.forest, search.whole.layers[0]
    cells = len(layer.cells.mean)
    start, prices = Column.of(layer.start, cells), torch.full((cells,), 1e-4, device=DEVICE)
    none = torch.arange(cells, device=DEVICE) % 5 == 0
    same = replace(start, first=torch.zeros_like(start.first), count=start.count * ~none)
    wanted = selection.select(forest, layer.cells, layer.view, start, prices, 256)
    given = selection.select(forest, layer.cells, layer.view, same, prices, 256)
    others = (~none).nonzero().squeeze(1)
    for mine, theirs in zip(given, wanted, strict=True):
        assert not mine.count[none].any() and torch.equal(mine.count[~none], theirs.count[~none])
        assert torch.equal(mine.of_members(others)[0], theirs.of_members(others)[0])


@needs_triton
def test_a_full_list_leaves_the_rest_coarse(search):
    """Every key is still seen once: exactly, or through a node above it."""
    forest, layer = search.whole.forest, search.whole.layers[0]
    cells = len(layer.cells.mean)
    start = Column.of(layer.start, cells)
    longest = int(start.count.max()) + 3
    prices = torch.zeros(cells, device=DEVICE)
    coarse, exact = selection.select(forest, layer.cells, layer.view, start, prices, longest)
    assert int((coarse.count + exact.count).max()) <= longest
    leaves = torch.zeros(len(forest.key), dtype=torch.long)
    for node in reversed(range(len(forest.key))):
        child = int(forest.child[node])
        leaves[node] = 1 if child < 0 else leaves[child] + leaves[child + 1]
    everyone = torch.arange(cells, device=DEVICE)
    node, owner, _ = (x.cpu() for x in coarse.of_members(everyone))
    seen = exact.count.cpu().long().index_add_(0, owner, leaves[node.long()])
    assert (seen == len(forest.leaf_key)).all()


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_means_are_added_where_they_belong(dtype):
    generator = torch.Generator().manual_seed(7)
    output, lse = torch.randn(90, 5, generator=generator), 4 * torch.randn(90, generator=generator)
    lse[::7], lse[::14] = -math.inf, 60.0  # rows without keys so far, rows that dwarf what comes
    output[lse == -math.inf] = 0.0
    rows = torch.randperm(90, generator=generator)[:70]
    rows[::6] = -1
    more, size = torch.randn(70, 5, generator=generator), torch.randn(70, generator=generator)
    size[::4] = -math.inf
    shift = torch.randn(90, generator=generator)
    given = [x.clone().to(DEVICE) for x in (output, lse, rows, more.to(dtype), size, shift)]
    placing.add_means(*given)
    wanted, total = output.double(), lse.double()
    for place, row in enumerate(rows.tolist()):
        extra = float(size[place] + shift[row])
        if row < 0 or extra == -math.inf:
            continue
        both = torch.stack([total[row], torch.tensor(extra).double()])
        weight = both.softmax(0)
        wanted[row] = weight[0] * wanted[row] + weight[1] * more[place].to(dtype).double()
        total[row] = both.logsumexp(0)
    torch.testing.assert_close(given[0].cpu().double(), wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(given[1].cpu().double(), total, rtol=1e-6, atol=1e-5)


@needs_triton
@pytest.mark.parametrize("largest", [math.inf, 1.5])
@pytest.mark.parametrize("size", [1, 3, 40])
def test_rows_are_taken_summarised_and_added_to(size, largest):
    generator = torch.Generator().manual_seed(11)
    table = torch.randn(130, 5, generator=generator)
    rows = torch.randperm(130, generator=generator)[: 120 // size * size].view(-1, size)
    mean, variance = placing.measured(table.to(DEVICE), rows.to(DEVICE))
    whole = table[rows].double()
    torch.testing.assert_close(mean.cpu().double(), whole.mean(1), rtol=0, atol=1e-6)
    wanted = whole.var(1, unbiased=False)
    torch.testing.assert_close(variance.cpu().double(), wanted, rtol=1e-5, atol=1e-6)
    rows[::2, 0] = -1
    here = (rows >= 0).unsqueeze(2)
    wanted = torch.where(here, table[rows].clamp(-largest, largest), 0.0).half()
    taken = placing.taken(table.to(DEVICE), rows.to(DEVICE), torch.float16, largest)
    assert torch.equal(taken.cpu(), wanted)
    for each in (False, True):  # a row for each place, or for each block
        more = torch.randn(len(rows) if each else rows.numel(), 5, generator=generator)
        added = more.unsqueeze(1) if each else more.view(*rows.shape, 5)
        wanted = torch.cat([table, table.new_zeros(1, 5)])
        wanted[rows] += torch.where(here, added.expand(*rows.shape, 5), 0.0)
        total = table.clone().to(DEVICE)
        placing.add_rows(total, (rows if each else rows.flatten()).to(DEVICE), more.to(DEVICE))
        assert torch.equal(total.cpu(), wanted[:-1])


@needs_triton
def test_coarse_keys_equal_tilted_ones(search):
    forest, layer = search.whole.forest, search.whole.layers[0]
    cells, d, dv = len(layer.cells.mean), forest.key.shape[1], forest.value.shape[1]
    coarse = Column.of(layer.start, cells)
    granules = -(-coarse.count // 16)
    base = granules.cumsum(0) - granules
    table = tuple(
        torch.full((int(granules.sum()), 16, *shape), math.nan, device=DEVICE)
        for shape in ((d,), (dv,), ())
    )
    mean = 3 * layer.cells.mean  # some tilts are limited
    selection.write_tilted(forest, mean, coarse, base, table, math.inf)
    node, owner, place = coarse.of_members(torch.arange(cells, device=DEVICE))
    twin = forests.Nodes(*(field[node].double() for field in forest.nodes))
    wanted = forests.tilted(twin, mean[owner].double())
    at = base[owner] * 16 + place
    for mine, theirs in zip(table, wanted, strict=True):
        mine, real = mine.flatten(0, 1)[at], theirs.isfinite()  # empty nodes have no mass
        assert torch.equal(mine.isfinite(), real)
        assert relative(mine[real], theirs[real]) < 1e-6
    rest = torch.ones(len(table[2]) * 16, dtype=torch.bool, device=DEVICE)
    rest[at] = False
    assert (table[2].flatten()[rest] == -math.inf).all()
    assert all(x.isfinite().all() for x in table[:2])


# ---- heads ------------------------------------------------------------------------------------

ENOUGH = (4, 4, *(64, 256) * 3)  # room, for a few blocks
COARSE = {"tail": "coarse", "order": "sequence"}
CASES = {
    "two heads": {"heads": 2, "n": 256},
    "ragged": {"heads": 2, "n": 230},
    "float16": {"heads": 1, "n": 256, "dtype": torch.float16},
    "masked": {"heads": 2, "n": 230, "masked": True},
    "causal": {"heads": 2, "n": 300, "causal": True},
    "causal, masked": {"heads": 1, "n": 300, "causal": True, "masked": True},
}


def block_case(heads, n, dtype=torch.float32, masked=False, causal=False):
    q, k, v = smooth(heads, n, dtype=dtype)
    bias = None
    if masked:
        bias = torch.randn(n, generator=torch.Generator().manual_seed(3))
        bias[::5] = -math.inf
        bias = bias.to(DEVICE)
    order = "tree" if causal else "auto"
    method = sb.BlockSupport(0.8, tail="coarse", block_size=32, order=order)
    plan = planned(q, k, v, bias, is_causal=causal, method=method)
    assert all(lists.refusal(head) is None for head in plan.heads)
    assert all(head.kind == "block" for head in plan.heads)
    problem = attention_problem(q, k, v, bias, 0.0, causal, None, False)
    return (q, k, v, bias), problem, plan


@needs_triton
@pytest.mark.parametrize("name", CASES)
def test_heads_equal_those_of_pytorch(name):
    case = CASES[name]
    (q, k, v, bias), problem, plan = block_case(**case)
    causal, half = case.get("causal", False), case.get("dtype") == torch.float16
    wanted = sb.attention(q, k, v, bias, is_causal=causal, plan=plan, return_result=True)
    output, lse, _ = lists.forward(problem, plan)
    assert output.dtype == q.dtype and lse.dtype == torch.float32
    exact, exact_lse = dense_attention(q, k, v, bias, is_causal=causal)
    assert relative(output, exact) <= 1.2 * relative(wanted.output, exact) < 0.2
    # tokens are repeated to fill trees: rounding decides which copy is where; and PyTorch's trees
    # know nothing of hidden keys
    if name == "ragged" or case.get("masked"):
        real = exact_lse > -math.inf
        mine, theirs = ((x - exact_lse)[real].abs().mean() for x in (lse, wanted.lse))
        assert mine <= 1.2 * theirs and (lse[~real] == -math.inf).all()
        return
    assert relative(output, wanted.output) < (1e-3 if half else 2e-6)
    torch.testing.assert_close(lse, wanted.lse, rtol=0, atol=1e-2 if half else 2e-5)


@needs_triton
def test_long_blocks_are_several_programs(monkeypatch):
    (q, k, v, _), problem, plan = block_case(heads=1, n=256)
    wanted = sb.attention(q, k, v, plan=plan)
    monkeypatch.setattr(granules, "WIDEST_BLOCK", 16)
    assert relative(lists.forward(problem, plan)[0], wanted) < 2e-6


def scattered(n=128, size=32):
    """Two heads: blocks of the sequence with single strays, and blocks that are too wide."""
    q, k, v = smooth(2, n)
    generator = torch.Generator().manual_seed(4)
    near = torch.randn(n // size, 1, q.shape[3], generator=generator).expand(-1, size, -1)
    near = near + 0.1 * torch.randn(near.shape, generator=generator)
    near[::3, 5] += 4.0
    wide = 2 * torch.randn(n, q.shape[3], generator=generator)
    return torch.stack([near.flatten(0, 1), wide]).to(DEVICE)[None], k, v


@needs_triton
@pytest.mark.parametrize("usual", [None, (1,) * 8])
def test_wide_blocks_are_split_and_strays_alone(monkeypatch, usual):
    """Whether there is room for them and their lists at first or not."""
    q, k, v = scattered()
    method = sb.BlockSupport(0.95, tail="coarse", block_size=32, order="sequence")
    plan = planned(q, k, v, method=method)
    assert all(head.kind == "block" for head in plan.heads)
    problem = attention_problem(q, k, v, None, 0.0, False, None, False)
    sizes = []
    for b, h, head in problem.each_head():
        layers = remembered(head, plan.head(b, h).frame, plan.head(b, h).blocks).layers
        sizes += [layer.rows.shape[1] for layer in layers]
    assert {1, 8, 32} <= set(sizes)
    if usual is not None:
        monkeypatch.setattr(lists, "_usual", lambda *_: usual)
    output, lse, _ = lists.forward(problem, plan)
    (room,) = rooms_of(plan)
    assert room.known and (usual is None or min(room.sizes[:4]) > 1)
    wanted = sb.attention(q, k, v, plan=plan, return_result=True)
    assert relative(output, wanted.output) < 2e-6
    torch.testing.assert_close(lse, wanted.lse, rtol=0, atol=2e-5)


@needs_triton
@pytest.mark.parametrize("size", [24, 32])
def test_blocks_of_queries_equal_those_of_pytorch(size):
    """Some columns at a time, with empty places, strays and blocks that are too wide."""
    generator = torch.Generator().manual_seed(5)
    query = torch.randn(300, 20, generator=generator)
    query[:100] *= 0.1
    query[3] += 1.5
    spectrum = torch.rand(2, 20, generator=generator)
    rows = torch.randperm(300, generator=generator)[: 9 * size].view(-1, size) % 100
    rows[0, :4], rows[1, size // 2 :] = torch.tensor([3, 4, 5, 6]), -1
    rows[2] = 100 + torch.arange(size)
    head = torch.arange(9) % 2
    real = repeated(rows)
    distance = apart(query[real], spectrum[head].unsqueeze(1))
    wide = distance.mean(1) > FAR
    far = strangers(distance) & ~wide.unsqueeze(1)
    assert wide.any() and far.any() and not wide.all()
    kept = torch.where(far.unsqueeze(2), query[real].mean(1, keepdim=True), query[real])
    given = [x.to(DEVICE) for x in (query, rows, head, spectrum)]
    made = cells.gathered(*given, torch.float16, 3.0, splits=True)
    made = type(made)(*(x.cpu() for x in made))
    assert torch.equal(made.wide, wide)
    assert torch.equal(made.rows, rows.masked_fill(far | wide.unsqueeze(1), -1))
    assert torch.equal(made.alone, torch.where(far, rows, -1))
    torch.testing.assert_close(made.mean, kept.mean(1), rtol=0, atol=1e-6)
    torch.testing.assert_close(made.variance, kept.var(1, unbiased=False), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(made.query, kept.clamp(-3, 3).half(), rtol=1e-3, atol=1e-6)
    taken = cells.gathered(*given, torch.float32, math.inf, splits=False)
    assert not taken.wide.any() and relative(taken.query[2].cpu(), query[rows[2]]) < 1e-6


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("d", "axes"), [(6, 6), (80, 70)])
def test_tokens_in_frames_equal_products(dtype, d, axes):
    generator = torch.Generator().manual_seed(6)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(DEVICE)

    tokens, matrix, offset = normal(2, 140, d).to(dtype), normal(4, d, d), normal(4, 1, d)
    line, level, metric = normal(4, d, 1), normal(4, 1, 1), normal(4, 1, axes)
    given = framing.framed(tokens, 4, matrix, offset, line, level, metric)
    x = tokens.double().repeat_interleave(2, 0)
    moved = x @ matrix.double() + offset.double()
    wanted = (moved, (x @ line.double() + level.double()).squeeze(2), moved[:, :, :axes] * metric)
    for mine, theirs in zip(given, wanted, strict=True):
        assert relative(mine, theirs) < 1e-6


@needs_triton
@pytest.mark.parametrize(
    ("order", "causal"), [("groups", False), ("places", False), ("places", True)]
)
def test_other_orders_are_left_to_pytorch(order, causal):
    q, k, v = clustered(n=512)
    method = sb.BlockSupport(0.9, order=order, tail="coarse")
    (plan,) = sb.plan(q, k, v, is_causal=causal, method=method).heads
    assert plan.kind == "block"
    assert lists.refusal(plan) == f"its order is {order!r}: such blocks are made by PyTorch"


@needs_triton
def test_wide_blocks_with_empty_places_keep_their_rows():
    """A block that is not full falls into parts, of which each has some of its empty places."""
    q, k, v = (x[:, 1:] for x in scattered())
    q = q[:, :, :120]
    plan = planned(q, k, v, method=sb.BlockSupport(0.95, block_size=32, **COARSE))
    problem = attention_problem(q, k, v, None, 0.0, False, None, False)
    exact, wanted = dense_attention(q, k, v)[0], sb.attention(q, k, v, plan=plan)
    lists.run_of(problem, plan).room.sizes = ENOUGH
    assert relative(lists.forward(problem, plan)[0], exact) <= 1.2 * relative(wanted, exact)


# ---- and back ---------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_equal_those_of_pytorch(causal):
    (q, k, v, _), problem, plan = block_case(heads=1, n=256 if causal else 128, causal=causal)
    tokens = [x.clone().requires_grad_() for x in (q, k, v)]
    result = sb.attention(*tokens, is_causal=causal, plan=plan, return_result=True)
    grad, grad_lse = directions(result.output, result.lse)
    wanted = torch.autograd.grad((result.output, result.lse), tokens, (grad, grad_lse))
    with torch.no_grad():
        output, lse, _ = lists.forward(problem, plan)
        made = lists.gradients(problem, plan, output, lse, lse.isnan(), grad, grad_lse, False)
    assert made.key_log_weight is None
    for mine, theirs in zip((made.query, made.key, made.value), wanted, strict=True):
        assert relative(mine, theirs) < 1e-5


@needs_triton
def test_causal_gradients_with_biases_and_keys_that_heads_share():
    """Fewer keys than rows, and a last window that is not full."""
    q, k, v = smooth(2, 300)
    k, v = k[:, :1, :250], v[:, :1, :250]
    bias = torch.randn(250, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    call = {"is_causal": True, "enable_gqa": True}
    method = sb.BlockSupport(0.8, tail="coarse", block_size=32, order="tree")
    plan = planned(q, k, v, bias, **call, method=method)
    assert all(head.kind == "block" and head.exact_rows for head in plan.heads)
    tokens = [x.clone().requires_grad_() for x in (q, k, v, bias)]
    result = sb.attention(*tokens, **call, plan=plan, return_result=True, implementation="eager")
    grad, grad_lse = directions(result.output, result.lse)
    wanted = torch.autograd.grad((result.output, result.lse), tokens, (grad, grad_lse))
    problem = attention_problem(q, k, v, bias, 0.0, True, None, True)
    output, lse, _ = lists.forward(problem, plan)
    assert relative(output, result.output.detach()) < 1e-5
    made = lists.gradients(problem, plan, output, lse, lse.isnan(), grad, grad_lse, True)
    mine = (made.query, made.key, made.value, made.key_log_weight.sum((0, 1)))
    for part, theirs in zip(mine, wanted, strict=True):
        assert relative(part, theirs) < 1e-5


def of_lists(problem, made, *given):
    """Output and lse by autograd in float64, over the lists that the device found; and tokens and
    log-weights, which they are functions of."""
    frames = [x.double() for x in given[4 : 4 + len(Stack._fields)]]
    tokens = [x.double().requires_grad_() for x in (problem.query, problem.key, problem.value)]
    weight = problem.query.new_zeros(*problem.query.shape[:2], problem.m, dtype=torch.float64)
    if problem.key_log_weight is not None:
        weight += problem.key_log_weight
    weight.requires_grad_()
    head, shift = in_frames(Stack(*frames), *tokens, weight)
    halves = made.position.view(-1, made.position.shape[1] // 2)
    roots = len(made.forest.roots)
    depth = int(math.log2(len(made.position) / roots))
    forest = forests._assemble(*forests._half_sums(head, halves), roots, depth)
    output, lse = torch.zeros_like(head.query[:, :1] * head.value[:1]), torch.zeros_like(shift)
    for blocks, (part, _) in zip(made.blocks, made.found, strict=True):
        for i in (part.rows >= 0).any(1).nonzero().squeeze(1).tolist():
            rows = part.rows[i][part.rows[i] >= 0]
            mine = one_block(forest, head, part, i, mean_of(blocks, i, head.query), rows)
            output, lse = (
                x.index_add(0, rows, y) for x, y in zip((output, lse), mine, strict=True)
            )
    shape = problem.query.shape[:3]
    return (output.view(*shape, -1), (lse + shift).view(shape)), [*tokens, weight]


def in_frames(stack, query, key, value, weight):
    """All heads in their frames as one, and the shifts of its rows."""
    q, k, v = (
        x.repeat_interleave(query.shape[1] // x.shape[1], 1).flatten(0, 1)
        for x in (query, key, value)
    )
    w = (k @ stack.weight_map + stack.weight_offset).squeeze(2) + weight.flatten(0, 1)
    x, y = q @ stack.query_map + stack.query_offset, k @ stack.key_map + stack.key_offset
    parts = [part.flatten(0, 1) for part in (x, y, v, w)]
    return Head(*parts, None, 1.0, False, True), (q @ stack.shift_map).flatten()


def mean_of(blocks, i, query):
    """Empty places repeat the rows of a block; rows that are left alone count as the mean."""
    mine = torch.maximum(blocks.rows[i], blocks.alone[i])
    mine = mine[mine >= 0]
    mine = mine[torch.arange(blocks.rows.shape[1], device=mine.device) % len(mine)]
    far = torch.isin(mine, blocks.alone[i]).unsqueeze(1)
    return torch.where(far, query[mine].mean(0), query[mine]).mean(0)


def one_block(forest, head, part, i, mean, rows):
    """Output and lse of one block over its list."""
    node, leaf = (
        column.item[column.first[i] : column.first[i] + column.count[i]].long()
        for column in (part.coarse, part.exact)
    )
    nodes = forests.Nodes(*(field[node] for field in forest.nodes))
    few = forests.tilted(nodes, mean.expand(len(node), -1))
    tables = (forest.leaf_key, forest.leaf_value, forest.leaf_weight)
    pairs = zip(few, tables, strict=True)
    key, value, bias = (torch.cat([some, table[leaf].flatten(0, 1)]) for some, table in pairs)
    score = head.query[rows] @ key.T + bias
    lse = score.logsumexp(1)
    return (score - lse.unsqueeze(1)).exp() @ value, lse


@needs_triton
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("biased", torch.float32),
        ("scattered", torch.float32),
        pytest.param("biased", torch.float16, marks=pytest.mark.gpu),
        pytest.param("biased", torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param("scattered", torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
def test_gradients_are_those_of_the_same_lists(kind, dtype, monkeypatch):
    """Keys that heads share; hidden keys and biases, or wide blocks, strays and empty places."""
    bias = None
    if kind == "biased":
        q, k, v = smooth(2, 100, dtype=dtype)
        bias = torch.randn(1, 2, 1, 100, generator=torch.Generator().manual_seed(3)).to(DEVICE)
        bias[..., ::5] = -math.inf
        how = {"tail": "coarse", "order": "tree", "block_size": 32}
    else:
        q, k, v = (x[:, :, :88].to(dtype) for x in scattered())
        how = {**COARSE, "block_size": 32}
    k, v = k[:, :1], v[:, :1]
    plan = planned(q, k, v, bias, enable_gqa=True, method=sb.BlockSupport(0.9, **how))
    assert all(head.kind == "block" for head in plan.heads)
    problem = attention_problem(q, k, v, bias, 0.0, False, None, True)
    run = lists.run_of(problem, plan)
    run.room.sizes = ENOUGH
    seen = lists.seen(plan.heads[0].blocks, run.room.sizes, *run.given)
    monkeypatch.setattr(lists_backward, "seen", lambda *_: seen)
    assert seen.fits and (bias is not None or bool(seen.needed[:2].all()))
    results, leaves = of_lists(problem, seen, *run.given)
    grads = directions(*results)
    wanted = torch.autograd.grad(results, leaves, grads)
    output, lse, grad, grad_lse = (x.detach().float() for x in (*results, *grads))
    given = (output.to(dtype), lse, lse.isnan(), grad.to(dtype), grad_lse)
    made = lists.gradients(problem, plan, *given, True)
    limit = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2.0**-7}[dtype]
    mine = (made.query, made.key, made.value, made.key_log_weight)
    for part, theirs in zip(mine, wanted, strict=True):
        assert part.dtype == torch.float32 and relative(part, theirs) < limit
    if bias is not None:
        assert not made.key_log_weight[bias.squeeze(2) == -math.inf].any()


@needs_triton
@pytest.mark.parametrize("causal", [False, True])
def test_what_did_not_fit_goes_back_exactly(causal):
    n = 300 if causal else 80
    q, k, v = smooth(2, n)
    k, v = k[:, :1], v[:, :1]
    bias = torch.randn(n, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    bias[1::5] = -math.inf
    call = {"scale": 0.3, "enable_gqa": True, "is_causal": causal}
    method = sb.BlockSupport(0.95, tail="coarse", block_size=32, order="tree")
    plan = planned(q, k, v, bias, **call, method=method)
    tokens = [x.double().requires_grad_() for x in (q, k, v, bias)]
    results = dense_attention(*tokens, causal, scale=0.3)
    grads = directions(*results)
    wanted = torch.autograd.grad(results, tokens, grads)
    problem = attention_problem(q, k, v, bias, 0.0, causal, 0.3, True)
    room = (lists_of_causal if causal else lists).run_of(problem, plan).room
    room.sizes, room.known = (1,) * len(room.sizes), True
    output, lse, grad, grad_lse = (x.detach().float() for x in (*results, *grads))
    made = lists.gradients(problem, plan, output, lse, lse.isnan(), grad, grad_lse, True)
    mine = (made.query, made.key, made.value, made.key_log_weight.sum((0, 1)))
    for part, theirs in zip(mine, wanted, strict=True):
        assert relative(part, theirs) < 5e-6


@needs_triton
@pytest.mark.parametrize("size", [0.3, 1.0])
def test_gradients_of_coarse_keys_equal_those_of_tilted_ones(size):
    """Of nodes that are coarse for several cells, with tilts that are limited or not."""
    generator = torch.Generator().manual_seed(1)
    nodes, cells, d, dv, known = 12, 5, 6, 5, 3

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(DEVICE)

    fields = [normal(nodes, *shape) for shape in ((d,), (dv,), (), (d,), (dv,), (d,), (known, dv))]
    fields[5] = fields[5].square()
    fields = [0.3 * x for x in fields]
    forest = SimpleNamespace(nodes=forests.Nodes(*fields), **forests.Nodes(*fields)._asdict())
    mean, count = size * normal(cells, d), torch.tensor([3, 0, 12, 1, 2], device=DEVICE)
    item = torch.randint(nodes, (cells * nodes,), generator=generator).int().to(DEVICE)
    column = Column(item, torch.arange(cells, device=DEVICE) * nodes, count)
    base = torch.tensor([0, 1, 1, 2, 3], device=DEVICE)
    grads = tuple(normal(5 * 16, *shape) for shape in ((d,), (dv,), ()))
    node, owner, place = column.of_members(torch.arange(cells, device=DEVICE))
    leaves = [x.double().requires_grad_() for x in (*fields, mean)]
    made = forests.tilted(forests.Nodes(*(x[node.long()] for x in leaves[:-1])), leaves[-1][owner])
    shift = made[0] - leaves[0][node.long()]
    limited = (shift * leaves[-1][owner]).sum(1) > 0.999
    assert limited.any() == (size == 1) and not limited.all()
    wanted = torch.autograd.grad(
        made, leaves, [x[base[owner] * 16 + place].double() for x in grads]
    )
    total = coarse.no_gradients(forest)
    for _ in range(2):  # they are added
        coarse.add_to_nodes(total, forest, mean, column, base, grads)
    for mine, theirs in zip(total, wanted[:-1], strict=True):
        assert relative(mine, 2 * theirs) < 1e-6
    given = coarse.mean_gradients(forest, mean, column, base, grads)
    assert relative(given, wanted[-1]) < 1e-6


# ---- room -------------------------------------------------------------------------------------


def test_room_grows_to_what_was_needed_and_never_shrinks():
    """The first call is made again until it fits; a later one is sure of itself, and the next one
    has the room that it lacked."""
    room, needs = Room((4, 4)), [(3, 9), (3, 10), (2, 2), (40, 1), (1, 1)]
    calls = []

    def work(sizes, sure):
        calls.append((sizes, sure))
        return len(calls), torch.tensor(needs[len(calls) - 1])

    assert [room.run(work) for _ in range(4)] == [2, 3, 4, 5]
    assert calls == [
        ((4, 4), False), ((4, 16), False), ((4, 16), True), ((4, 16), True), ((64, 16), True),
    ]  # fmt: skip


def test_room_has_a_quarter_to_spare_in_coarse_steps():
    for need in (1, 15, 16, 100, 1000, 1001, 123456):
        room = with_spare(need)
        assert need + need // 4 <= room <= 1.55 * need + 16
    assert with_spare(100_000) == with_spare(101_000)


@needs_triton
@pytest.mark.parametrize(
    ("kind", "masked"),
    [("lists", True), ("causal", False)],
)
def test_what_does_not_fit_is_exact(kind, masked):
    """A plan reused on tokens that need more room than any before, with keys that heads share."""
    n = 256 if kind == "causal" else 128
    q, k, v = smooth(2, n)
    k, v, scale = k[:, :1], v[:, :1], 0.3
    bias = None
    if masked:
        bias = torch.randn(n, generator=torch.Generator().manual_seed(3)).to(DEVICE)
        bias[::5] = -math.inf
    causal = kind == "causal"
    method = sb.BlockSupport(0.8, tail="coarse", block_size=32, order="tree")
    call = {"is_causal": causal, "scale": scale}
    plan = beyond(planned(q, k, v, bias, **call, enable_gqa=True, method=method))
    assert all(head.kind == "block" for head in plan.heads)
    problem = attention_problem(q, k, v, bias, 0.0, causal, scale, True)
    first = lists.forward(problem, plan)[0]
    (room,) = rooms_of(plan)
    assert torch.equal(lists.forward(problem, plan)[0], first)
    exact, exact_lse = dense_attention(q, k, v, bias, **call)
    assert relative(first, exact) > 1e-5
    enough, number = room.sizes, 3 if kind == "lists" else 1
    room.sizes = (*enough[:number], 0, *enough[number + 1 :])
    room._report.pending = False
    output, lse, _ = lists.forward(problem, plan)
    assert relative(output, exact) < 2e-6
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=1e-4)
    output = lists.forward(problem, plan)[0]  # there is room now
    assert room.sizes[number] > 0
    assert relative(output, exact) > 1e-5


# ---- replays ----------------------------------------------------------------------------------


@pytest.mark.gpu
def test_replays_do_what_first_calls_do():
    """The same shapes again and again, with other tokens each time: run, recorded, replayed."""
    replay._recordings.clear()
    replay._plain.clear()
    made = [smooth(2, 4096, d=16, seed=seed, dtype=torch.bfloat16) for seed in range(3)]
    plan = planned(*made[0], method=sb.BlockSupport(0.5, tail="coarse", block_size=64))
    assert all(head.kind == "block" for head in plan.heads)
    for number, (q, k, v) in enumerate([*made, made[0]]):
        output = sb.attention(q, k, v, plan=plan)
        assert min(1, number) <= len(replay._recordings) <= number  # others may need more room
        plain = sb.attention(q, k, v, plan=plan, implementation="eager")
        exact = dense_attention(q, k, v)[0]
        assert relative(output, exact) <= 1.2 * relative(plain, exact) + 2e-3
    assert torch.equal(output, sb.attention(*made[0], plan=plan))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_nothing_waits_and_a_call_can_be_recorded(masked, causal):
    tokens = smooth(2, 4096, d=16, dtype=torch.bfloat16)
    mask = torch.arange(4096, device=DEVICE) % 7 != 3 if masked else None
    method = sb.BlockSupport(0.5, tail="coarse", block_size=64, order="tree")
    plan = planned(*tokens, mask, is_causal=causal, method=method)
    assert all(head.kind == "block" for head in plan.heads)

    def call():
        return sb.attention(*tokens, mask, is_causal=causal, plan=plan)

    with pytest.raises(sb.InputError, match="call once before a CUDA graph"):
        record(call)  # which PyTorch warns about, too
    torch.cuda.synchronize()
    for _ in range(3):  # the first waits, the second is recorded
        call()
    without_waiting(call)
    graph, output = record(call)
    for x in tokens:
        x.copy_(x.flip(2))
    graph.replay()
    assert relative(output, call()) < 1e-3
    (prices,) = [x for key, x in plan.memory.items() if key[0] == "prices"]
    prices.zero_()  # everything is opened, for which there is no room
    graph.replay()
    bias = None if mask is None else torch.zeros_like(mask, dtype=torch.float64)
    bias = None if bias is None else bias.masked_fill(~mask, -math.inf)
    assert relative(output, dense_attention(*tokens, bias, causal)[0]) < 3e-3


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # a graph has its own
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_nothing_waits_on_the_way_back_either(masked, causal):
    tokens = [x.requires_grad_() for x in smooth(4, 4096, d=16, dtype=torch.bfloat16)]
    tokens[1:] = [x.detach()[:, ::2].contiguous().requires_grad_() for x in tokens[1:]]
    mask = torch.arange(4096, device=DEVICE) % 7 != 3 if masked else None
    method = sb.BlockSupport(0.5, tail="coarse", block_size=64, order="tree")
    how = {"is_causal": causal, "enable_gqa": True}
    made = planned(*(x.detach() for x in tokens), mask, **how, method=method)
    assert all(head.kind == "block" for head in made.heads)
    grad = torch.randn_like(tokens[0])

    def call():
        output = sb.attention(*tokens, mask, **how, plan=made)
        return [output, *torch.autograd.grad(output, tokens, grad)]

    graph, results = followed(call, tokens)
    (prices,) = [x for key, x in made.memory.items() if key[0] == "prices"]
    prices.zero_()  # everything is opened, for which there is no room
    graph.replay()
    exact = [x.detach().double().requires_grad_() for x in tokens]
    bias = None if mask is None else torch.zeros(4096, device=DEVICE).double()
    bias = None if bias is None else bias.masked_fill(~mask, -math.inf)
    wanted = torch.autograd.grad(dense_attention(*exact, bias, causal)[0], exact, grad.double())
    for mine, theirs in zip(results[1:], wanted, strict=True):
        assert relative(mine, theirs) < 2.0**-6
