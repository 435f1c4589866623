"""Lists on the device against the evaluator in PyTorch operations, list by list."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cases import centred_head, key_weights
from device_cases import DEVICE, marks, needs_triton, slow_case  # before kernels are imported

import supportbasis as sb  # isort: skip
from supportbasis.components.cotangent import SavedForward
from supportbasis.cuda.lists import list_heads as device_lists
from supportbasis.cuda.runtime import replay
from supportbasis.engine.execute import backward
from supportbasis.lists.list_sum import groups, list_attention
from supportbasis.lists.tables import ListSettings
from supportbasis.lists.tables import tables as tables_of
from supportbasis.plans import ListHead, Plan
from supportbasis.problem.validation import attention_problem

pytestmark = [*marks, needs_triton]
MODES = ["whole", "causal", "strict"]


def settings_of(mode, price=1e-3, block=32, leaf=16, window=64):
    return ListSettings(price, block, leaf, 0 if mode == "whole" else window, mode == "strict")


def plan_of(q, settings, causal):
    head = ListHead(n=q.shape[2], m=q.shape[2], cost=0.5, speedup=1.0, lists=settings)
    return Plan(sb.BlockSupport(), q.shape[3], (head,) * q.shape[1], None, causal)


def tokens(n=150, m=None, heads=2, key_heads=2, d=8, dv=8):
    made = [centred_head(n, m, d, dv, seed=seed, dtype=torch.float32) for seed in range(heads)]
    q, k, v = (torch.stack(x).unsqueeze(0).to(DEVICE) for x in zip(*made, strict=True))
    return q, k[:, :key_heads].contiguous(), v[:, :key_heads].contiguous()


def case_of(shape, kind, mode):
    """A call and its plan."""
    n, m, heads, key_heads, dv = shape
    q, k, v = tokens(n, m, heads, key_heads, dv=dv)
    bias, causal = key_weights(kind, m), mode != "whole"
    mask = None if bias is None else bias.float().to(DEVICE).view(1, 1, 1, m)
    problem = attention_problem(q, k, v, mask, 0.0, causal, None, key_heads != heads)
    return problem, plan_of(q, settings_of(mode), causal)


@pytest.mark.parametrize(
    ("shape", "kind", "mode"),
    [
        ((150, 150, 2, 2, 8), "mask", "causal"),
        ((192, 192, 2, 1, 8), "none", "strict"),
        ((130, 100, 1, 1, 5), "bias", "whole"),
        slow_case((130, 100, 1, 1, 5), "bias", "strict"),
        slow_case((70, 130, 1, 1, 8), "none", "whole"),
        slow_case((70, 130, 1, 1, 8), "none", "causal"),
    ],
)
def test_matches_the_evaluator_in_pytorch(shape, kind, mode):
    problem, plan = case_of(shape, kind, mode)
    output, lse, _ = device_lists.forward(problem, plan)
    for b, h, head in problem.each_head():
        wanted, wanted_lse = list_attention(head, settings_of(mode))
        limit = 2e-5 * float(problem.value.abs().max())
        assert (output[b, h] - wanted).abs().max() < limit
        seen = wanted_lse > -math.inf
        assert torch.equal(lse[b, h] > -math.inf, seen)
        assert (lse[b, h] - wanted_lse)[seen].abs().max() < 1e-4


@pytest.mark.parametrize("mode", MODES)
def test_lists_are_the_same(mode):
    """Every cell opens the same leaves, as sets of keys, for the same queries."""
    q, k, v = tokens(192, heads=2)
    settings = settings_of(mode)
    problem = attention_problem(q, k, v, None, 0.0, mode != "whole", None, False)
    tables = device_lists._tables(problem, settings)
    price = torch.full((2,), settings.price, device=DEVICE)
    found, listed = {}, 0
    for tilts, lists in device_lists.groups(tables, settings, price):
        for h in range(2):
            for at in range(tilts.cells):
                rows = frozenset(tables.members[h, tilts.first + at].tolist()) - {-1}
                count = int(lists.count[h, at])
                leaf = lists.index[h, at, :count].long()
                keys = tables.slots[h].view(-1, settings.leaf)[leaf]
                found[h, rows] = {frozenset(x) for x in keys.tolist()}
                listed += count
    assert listed
    for _, h, head in problem.each_head():
        made = tables_of(head, settings)
        for group in groups(head, made, settings):
            for at, cell in enumerate(range(group.cells.start, group.cells.stop)):
                rows = frozenset(made.members[cell].tolist()) - {-1}
                if not rows or not int(made.visible[cell]):
                    continue
                keys = made.slots[group.open[at].nonzero().squeeze(1)]
                assert found[h, rows] == {frozenset(x) for x in keys.tolist()}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("heads", "key_heads", "kind"), [(2, 1, "none"), (2, 2, "mask")])
def test_tables_are_laid_out_as_kernels_read_them(mode, heads, key_heads, kind):
    """Of tokens whose heads lie beside one another: kernels know no strides."""
    n, dv, bias = 150, 5, key_weights(kind, 150)
    mask = None if bias is None else bias.float().to(DEVICE).view(1, 1, 1, n)
    q, k, v = (
        x.transpose(1, 2).contiguous().transpose(1, 2)
        for x in tokens(n, heads=heads, key_heads=key_heads, dv=dv)
    )
    problem = attention_problem(q, k, v, mask, 0.0, mode != "whole", None, key_heads != heads)
    settings = settings_of(mode)
    tables = device_lists._tables(problem, settings)
    cells, slots = tables.cells, tables.slots.shape[1]
    assert slots % settings.leaf == 0 and (tables.bs is not None or slots == n)
    many, size = tables.rows.shape[1:]
    wanted = {
        "query": (heads, n, 8), "ks": (key_heads, slots, 8), "vs": (key_heads, slots, dv),
        "bs": (heads, slots), "slots": (key_heads, slots), "visible": (cells,),
        "members": (heads, cells, settings.block), "mean": (heads, cells, 8),
        "variance": (heads, cells), "spread": (key_heads, slots // settings.leaf),
        "rows": (heads, many, size), "cell": (heads, many), "first_tile": (heads, cells),
        "tile_count": (heads, cells),
    }  # fmt: skip
    floats = ("query", "ks", "vs", "bs", "mean", "variance", "spread")
    for name, shape in wanted.items():
        x = getattr(tables, name)
        dtype = torch.float32 if name in floats else torch.int32
        assert x is None or (x.shape == shape and x.is_contiguous() and x.dtype == dtype), name
    assert size == settings.tile and (tables.cell is None) == (mode != "strict")


def test_sizes_without_kernels_are_refused_in_words():
    def refusal(block, leaf, window, strict=False):
        settings = ListSettings(1e-3, block, leaf, window, strict)
        return device_lists.refusal(ListHead(n=9, m=9, cost=1.0, speedup=1.0, lists=settings))

    assert refusal(16, 16, 0) is refusal(32, 16, 4096, True) is None
    assert "of 16 tokens or more" in refusal(16, 8, 0)
    assert "of 16 tokens or more" in refusal(16, 16, 64, True)
    assert "4096 positions at most" in refusal(16, 16, 8192)


@pytest.mark.slow
def test_ranges_of_a_small_workspace_give_the_same_bits(monkeypatch):
    q, k, v = tokens(130, heads=1, key_heads=1)
    for mode in MODES:
        problem = attention_problem(q, k, v, None, 0.0, mode != "whole", None, False)
        plan = plan_of(q, settings_of(mode), mode != "whole")
        whole = device_lists.forward(problem, plan)
        with monkeypatch.context() as patch:
            patch.setattr(device_lists, "WORKSPACE", 2000)
            tables = device_lists._tables(problem, settings_of(mode))
            price = torch.zeros(1, device=DEVICE)
            assert len(list(device_lists.groups(tables, settings_of(mode), price))) > 1
            parts = device_lists.forward(problem, plan)
        assert torch.equal(whole[0], parts[0]) and torch.equal(whole[1], parts[1])


def test_a_workspace_that_does_not_fit_is_refused(monkeypatch):
    q, k, v = tokens(192)
    problem = attention_problem(q, k, v, None, 0.0, False, None, False)
    monkeypatch.setattr(device_lists, "WORKSPACE", 10)
    with pytest.raises(sb.InputError, match=r"need a workspace of \d+ bytes.*block_size"):
        device_lists.forward(problem, plan_of(q, settings_of("whole"), False))


@pytest.mark.parametrize(
    ("shape", "kind", "mode"),
    [
        ((100, 80, 1, 1, 5), "mask", "whole"),
        ((70, 70, 4, 2, 8), "none", "causal"),
        slow_case((130, 100, 1, 1, 5), "mask", "strict"),
    ],
)
def test_gradients_match_those_in_pytorch(shape, kind, mode):
    problem, plan = case_of(shape, kind, mode)
    output, lse, _ = device_lists.forward(problem, plan)
    generator = torch.Generator().manual_seed(4)
    grad = torch.randn(output.shape, generator=generator).to(DEVICE)
    grad_lse = torch.randn(lse.shape, generator=generator).to(DEVICE)
    none = torch.zeros_like(lse).bool()
    saved = SavedForward(output, lse, none, grad, grad_lse, kind == "mask")
    found = device_lists.gradients(problem, plan, saved)
    wanted = backward(problem, plan, saved)
    for name in ("query", "key", "value", "key_log_weight"):
        one, other = getattr(found, name), getattr(wanted, name)
        if other is not None:
            assert (one - other).abs().max() < 1e-4 * max(1.0, float(other.abs().max())), name


class Indices(TorchDispatchMode):
    """Entries in memory of the largest index that is made."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.dtype == torch.int64:
            self.most = max(self.most, made.untyped_storage().nbytes() // 8)
        return made


def test_gradients_index_tokens_and_not_their_entries():
    problem, plan = case_of((70, 70, 2, 2, 8), "none", "whole")
    output, lse, _ = device_lists.forward(problem, plan)
    saved = SavedForward(output, lse, torch.zeros_like(lse).bool(), output, None, False)
    with Indices() as indices:
        device_lists.gradients(problem, plan, saved)
    assert 2 * 70 <= indices.most <= 2 * 128


@pytest.mark.parametrize("heads", [1, 2])
def test_neighbours_in_memory_are_joined_without_a_copy(heads):
    memory = torch.randn(2, 32, heads, 8, device=DEVICE)
    odd = memory.as_strided((2, heads, 32, 8), (256 * heads, 8, 8 * heads, 1))
    first, second = odd[0], odd[1]
    wanted = torch.cat([first, second])
    _, held = replay._held("a stream", (first, second))
    assert torch.equal(replay.joined(*held), wanted)
    assert replay.joined(*held).data_ptr() == held[0].data_ptr()
    assert torch.equal(replay.joined(held[1], held[0]), torch.cat([second, first]))
    if heads == 1:  # any stride of the one head is a contiguous one
        assert first.is_contiguous() and torch.equal(replay.joined(first, second), wanted)


def test_memory_of_a_graph_captured_in_inference_mode_serves_other_calls():
    tokens = torch.randn(2, 8, 4, device=DEVICE)
    with torch.inference_mode():
        _, held = replay._held("another stream", (tokens,))
    with torch.no_grad():
        assert torch.equal(held[0].copy_(2 * tokens), 2 * tokens)
    assert not held[0].is_inference()
