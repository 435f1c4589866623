"""Sorting by median splits against a float64 transcription of its definition."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from device_cases import DEVICE, needs_triton  # before kernels are imported

from supportbasis.cuda.lists import window_sorting as sorting  # isort: skip

pytestmark = [
    needs_triton,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, of the interpreter
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def principal(C: Tensor, iterations: int) -> Tensor:
    v = C[:, C.diagonal().argmax()]
    for _ in range(iterations):
        v = C @ v
        v = v / v.norm().clamp(min=1e-300)
    return v


def leading_axes(C: Tensor) -> Tensor:
    """Orthonormal columns of 8 power iterations at once, from the largest columns of C [d, d]."""
    axes = torch.eye(len(C)).double()[:, C.diagonal().topk(min(8, len(C))).indices]
    for _ in range(3):
        made = torch.zeros(len(C), 0).double()
        for v in (C @ axes).T:
            v = v - made @ (made.T @ v)
            made = torch.cat([made, (v / v.norm().clamp(min=1e-300)).unsqueeze(1)], 1)
        axes = made
    return axes


def sorted_window(x: Tensor, leaf: int) -> tuple[list[int], float]:
    """Tokens of one window [W, d], none of them padding, in the sequence of their leaves, and the
    smallest gap at a median, relative to the spread of the node's projections."""
    y = x.double() - x.double().mean(0)
    p, gap = y @ leading_axes(y.T @ y), math.inf

    def leaves(tokens: Tensor) -> list[int]:
        nonlocal gap
        if len(tokens) <= leaf:
            return tokens.tolist()
        z, half = p[tokens] - p[tokens].mean(0), len(tokens) // 2
        along, index = (z @ principal(z.T @ z, 4)).sort(stable=True)
        gap = min(gap, float((along[half] - along[half - 1]) / (along[-1] - along[0])))
        return leaves(tokens[index[:half]]) + leaves(tokens[index[half:]])

    return leaves(torch.arange(len(x))), gap


def as_leaves(permutation: Tensor | list[int], leaf: int) -> list[set[int]]:
    return [set(part.tolist()) for part in torch.as_tensor(permutation).cpu().long().split(leaf)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def clusters(tokens: int, window: int, leaf: int, d: int) -> Tensor:
    """One head, [1, tokens, d], whose leaves are clusters: every split is a quarter of that
    before."""
    levels = (window // leaf).bit_length() - 1
    x = 1e-3 * 4.0**-levels * random(1, tokens, d)
    direction = torch.nn.functional.normalize(random(levels, d, seed=1), dim=-1)
    for start in range(0, tokens, window):
        shuffle = torch.randperm(window, generator=torch.Generator().manual_seed(start))
        for level in range(levels):
            side = (shuffle >> level & 1) * 2.0 - 1.0
            x[0, start : start + window] += 4.0**-level * side.unsqueeze(1) * direction[level]
    return x


def assert_permutes(permutation: Tensor, window: int, count: int) -> None:
    """Every window holds its own tokens once, padding last."""
    for row in permutation.cpu():
        for start, part in zip(range(0, count, window), row.split(window), strict=True):
            real = list(range(start, min(count, start + window)))
            assert sorted(part[: len(real)].tolist()) == real
            assert (part[len(real) :] == -1).all()


@pytest.mark.parametrize("d", [3, 150])
def test_leaves_are_those_of_float64(d):
    x = (random(2, 128, d) * torch.linspace(0.3, 2.0, d)).float()
    permutation = sorting.window_permutation(x.to(DEVICE), 64, 8)
    assert permutation.dtype == torch.int32
    assert permutation.shape == (2, 128)
    for head in range(2):
        for start in (0, 64):
            expected, gap = sorted_window(x[head, start : start + 64], 8)
            # rounding turns float32 axes by some 1e-6 for each of ten products
            assert gap > 1e-4, "the data must be such that rounding cannot matter"
            mine = permutation[head, start : start + 64].cpu() - start
            assert as_leaves(mine, 8) == as_leaves(expected, 8)


def test_the_first_tokens_of_a_window_may_lie_apart():
    """Sums are taken about their mean, not that of the window."""
    x = (random(1, 256, 3) * torch.tensor([3.0, 1.0, 0.5])).float()
    x[0, :128, 1] += 4.0
    expected, gap = sorted_window(x[0], 64)
    assert gap > 1e-4
    permutation = sorting.window_permutation(x.to(DEVICE), 256, 64)
    assert as_leaves(permutation[0], 64) == as_leaves(expected, 64)


@pytest.mark.parametrize("size", [3e-5, 3e-6, 5e-7])
def test_small_entries_decide_where_the_large_one_is_the_same(size):
    """Squares of products with their covariance vanish in float32."""
    x, number = torch.zeros(1, 64, 16), torch.arange(64) * 5 % 64
    for dim, entry in enumerate((1.0, size, size / 3)):
        x[0, :, dim] = entry * ((number >> dim & 1) * 2 - 1)
    permutation = sorting.window_permutation(x.to(DEVICE), 64, 8)
    leaves = number[permutation[0].cpu().long()].view(-1, 8) % 8
    assert (leaves == leaves[:, :1]).all()


@pytest.mark.parametrize(
    ("d", "dtype"), [(3, torch.bfloat16), (64, torch.float32), (64, torch.float16)]
)
def test_clusters_become_leaves(d, dtype):
    x = (clusters(128, 128, 16, d) + 3.0).to(dtype)  # an offset costs no digits
    permutation = sorting.window_permutation(x.to(DEVICE), 128, 16)
    expected, gap = sorted_window(x[0], 16)
    assert gap > 0.05
    assert as_leaves(permutation[0], 16) == as_leaves(expected, 16)


@pytest.mark.parametrize(("count", "leaf"), [(1, 16), (111, 64), (128, 16), (257, 64), (257, 128)])
def test_one_number_each_is_sorted_and_padding_is_last(count, leaf):
    x = random(1, 300, 1).float()[:, :count]
    permutation = sorting.window_permutation(x.to(DEVICE), 128, leaf)
    assert_permutes(permutation, 128, count)
    for start in range(0, count, 128):
        part = x[0, start : min(count, start + 128), 0]
        expected = torch.full((128,), -1)
        expected[: len(part)] = start + (part.argsort() if leaf < 128 else torch.arange(len(part)))
        mine = as_leaves(permutation[0, start : start + 128], leaf)
        assert mine == as_leaves(expected, leaf)


def test_tokens_keep_their_sequence_inside_a_leaf():
    x = random(1, 128, 5).float().to(DEVICE)
    permutation = sorting.window_permutation(x, 128, 16).view(-1, 16)
    assert (permutation.diff(dim=1) > 0).all()
    assert (permutation.flatten().diff() < 0).any()


@pytest.mark.parametrize(
    ("d", "value"),
    [(3, 0.0), (3, 0.1), (3, -1e12), (3, math.inf), (200, math.nan)],
)
def test_equal_tokens_keep_their_sequence(d, value):
    """Also tokens that are not finite: their place does not matter, but each has one."""
    x = torch.full((1, 100, d), value).to(DEVICE)
    permutation = sorting.window_permutation(x, 64, 16)
    assert permutation.shape == (1, 128)
    assert permutation[0, :100].tolist() == list(range(100))
    assert (permutation[0, 100:] == -1).all()


def test_some_tokens_that_are_not_finite_leave_a_permutation():
    x = random(1, 128, 4).float()
    x[0, 5], x[0, 9, 2] = math.nan, -math.inf
    assert_permutes(sorting.window_permutation(x.to(DEVICE), 64, 8), 64, 128)


@pytest.mark.parametrize("size", [1e-12, 1e12])
def test_size_does_not_matter(size):
    x = random(1, 64, 3).float().to(DEVICE)
    permutation = sorting.window_permutation(x * 2.0 ** round(math.log2(size)), 64, 8)
    assert permutation.tolist() == sorting.window_permutation(x, 64, 8).tolist()


@pytest.mark.parametrize("d", [6, 130])
def test_a_sequence_says_which_tokens_stand_in_a_window(d):
    x = random(2, 128, d).float()
    shuffle = torch.randperm(128, generator=torch.Generator().manual_seed(0))
    sequence = torch.stack([shuffle, torch.arange(128).flip(0)]).int()
    permutation = sorting.window_permutation(x.to(DEVICE), 128, 32, sequence.to(DEVICE)).cpu()
    for head in range(2):
        local, gap = sorted_window(x[head, sequence[head].long()], 32)
        assert gap > 1e-4
        assert as_leaves(permutation[head], 32) == as_leaves(sequence[head][local], 32)


@pytest.mark.parametrize("d", [6, 130])
def test_no_token_in_a_slot_is_padding(d):
    x, sequence = random(1, 70, d).float(), torch.arange(70).int().unsqueeze(0)
    sequence[0, 53:64] = -1
    permutation = sorting.window_permutation(x.to(DEVICE), 64, 16, sequence.to(DEVICE))[0].cpu()
    assert sorted(permutation[:53].tolist()) == list(range(53))
    assert permutation[53:64].tolist() == [-1] * 11
    assert sorted(permutation[64:70].tolist()) == list(range(64, 70))
    assert permutation[70:].tolist() == [-1] * 58


def test_strides_are_followed():
    """Of heads and tokens."""
    part = random(2, 64, 3, 6).float().to(DEVICE)[:, ::2, 1]  # heads, tokens, d
    mine = sorting.window_permutation(part, 32, 16)
    assert mine.tolist() == sorting.window_permutation(part.contiguous(), 32, 16).tolist()


# ---- whole heads ------------------------------------------------------------------------------


def nearest_centres(x: Tensor, span: int) -> list[int]:
    """The centre of each token of a head, by the definition."""
    many = 2 ** math.ceil(math.log2(len(x) / span))
    sample = x[torch.arange(span) * len(x) // span]
    leaves = torch.tensor(sorted_window(sample, span // many)[0]).view(many, -1)
    centres = sample.double()[leaves].mean(1)
    return torch.cdist(x.double(), centres).argmin(1).tolist()


def short_spans(monkeypatch):
    """Heads are cut into windows of 64 tokens, and 64 tokens are sampled for centres."""
    monkeypatch.setattr(sorting.sorting, "SORTED", 64)


def test_a_head_is_gathered_around_centres(monkeypatch):
    short_spans(monkeypatch)
    x = clusters(64, 64, 16, 20).repeat_interleave(4, 1)  # the sample has 16 of each of 4 clusters
    x = (torch.cat([x, 10 * x.flip(1)]) + 3.0).bfloat16()  # heads of their own
    permutation = sorting.head_permutation(x.to(DEVICE), 16).cpu()
    assert permutation.shape == (2, 256)
    for head in range(2):
        centre = torch.tensor(nearest_centres(x[head], 64))
        assert centre.bincount().tolist() == [64] * 4
        assert as_leaves(permutation[head], 64) == as_leaves(centre.argsort(stable=True), 64)


def test_a_window_of_a_head_is_sorted_too(monkeypatch):
    short_spans(monkeypatch)
    x = random(1, 200, 5).float()
    centre = nearest_centres(x[0], 64)
    sequence = torch.tensor(sorted(range(200), key=lambda token: centre[token]))
    permutation = sorting.head_permutation(x.to(DEVICE), 8)[0]
    for start in (0, 128):
        local, gap = sorted_window(x[0, sequence[start : start + 64]], 8)
        assert gap > 1e-4
        expected = sequence[start : start + 64][local]
        assert as_leaves(permutation[start : start + 64], 8) == as_leaves(expected, 8)


@pytest.mark.parametrize(("count", "slots"), [(1, 16), (33, 64), (64, 64), (65, 128)])
def test_every_token_of_a_head_has_a_slot(monkeypatch, count, slots):
    short_spans(monkeypatch)
    permutation = sorting.head_permutation(random(2, count, 4).float().to(DEVICE), 16)
    assert permutation.shape == (2, slots)
    for row in permutation:
        assert sorted(row[:count].tolist()) == list(range(count))
        assert (row[count:] == -1).all()


@pytest.mark.slow
def test_heads_with_leaves_of_two_sizes_are_sorted_as_if_alone(monkeypatch):
    short_spans(monkeypatch)
    key, query = random(2, 150, 6).float().to(DEVICE), random(3, 150, 6).float().to(DEVICE) + 1
    both = torch.cat([key, query])
    for sort in (sorting.head_permutation, partial(sorting.window_permutation, window=64)):
        for leaf, other in ((16, 32), (32, 16), (16, 64)):
            found = sort(both, leaf=leaf, others=(2, other)).tolist()
            assert found[:2] == sort(key, leaf=leaf).tolist()
            assert found[2:] == sort(query, leaf=other).tolist()


@pytest.mark.parametrize("count", [60, 150])
def test_hidden_tokens_are_left_out(monkeypatch, count):
    short_spans(monkeypatch)
    x = random(3, count, 4).float()
    hidden = torch.rand(3, count, generator=torch.Generator().manual_seed(0)) < 0.4
    hidden[1], hidden[2] = False, True
    x[hidden] = 1e6  # nothing of them is seen
    permutation = sorting.head_permutation(x.to(DEVICE), 32, hidden.to(DEVICE)).cpu()
    for row, gone in zip(permutation, hidden, strict=True):
        real = (~gone).nonzero().flatten().tolist()
        assert sorted(row[: len(real)].tolist()) == real
        assert (row[len(real) :] == -1).all()
    assert (permutation[1:2] == sorting.head_permutation(x[1:2].to(DEVICE), 32).cpu()).all()


def test_centres_come_from_tokens_that_are_not_hidden(monkeypatch):
    """A head with hidden tokens is sorted as if they were not there."""
    short_spans(monkeypatch)
    x, hidden = random(1, 200, 4).float(), torch.arange(200).view(1, -1) % 4 == 1
    x[hidden] = 1e6
    seen = (~hidden[0]).nonzero().flatten()
    permutation = sorting.head_permutation(x.to(DEVICE), 32, hidden.to(DEVICE))[0].cpu()
    alone = sorting.head_permutation(x[:, seen].to(DEVICE), 32)[0].cpu().long()
    assert permutation[:150].tolist() == seen[alone[:150]].tolist()


def test_nothing_to_sort():
    assert sorting.window_permutation(torch.zeros(2, 0, 2), 64, 16).shape == (2, 0)
