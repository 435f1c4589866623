"""Segments of alike tokens: every token once, clusters kept apart."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from supportbasis.arrangement import ORDERS, SLACK, arranged, repeated, spreads


def clusters(n, count, dim, noise, seed=0):
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(count, (n,), generator=generator)
    centre = torch.randn(count, dim, generator=generator)
    return centre[label] + noise * torch.randn(n, dim, generator=generator), label


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(1, 500),
    dim=st.integers(1, 6),
    count=st.integers(1, 9),
    size=st.integers(1, 64),
    multiple=st.sampled_from([1, 4, 8]),
    how=st.sampled_from(ORDERS),
    seed=st.integers(0, 5),
    aligned=st.booleans(),
)
def test_every_token_comes_once(n, dim, count, size, multiple, how, seed, aligned):
    x, _ = clusters(n, count, dim, 0.05, seed)
    segments, compared, _ = arranged(x, size, multiple, how, aligned=aligned)
    assert torch.equal(segments[segments >= 0].sort().values, torch.arange(n))
    assert segments.shape[1] % multiple == 0
    assert segments.shape[1] <= size + size // SLACK + 2 * multiple - 1
    real = segments >= 0
    assert torch.equal(real, real.sort(1, descending=True).values)  # empty places come last
    assert compared >= 0
    filled = repeated(segments)
    held = torch.where(real, segments, filled)
    assert torch.equal(filled, held)
    assert bool(torch.isin(filled[real.any(1)], segments).all())


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.2])
def test_groups_do_not_straddle_clusters(noise):
    x, label = clusters(4096, 23, 32, noise)
    tree, groups = (arranged(x, 64, 4, how).segments for how in ("tree", "groups"))
    labels = [label[row[row >= 0]] for row in groups]
    mixed = sum(len(row.unique()) > 1 for row in labels)
    assert mixed <= 1  # tokens that nobody leads share segments
    assert spreads(x, groups).mean() < 0.4 * spreads(x, tree).mean()
    assert groups.numel() <= 1.25 * 4096
    counts = [len(row) for row in labels]
    assert min(counts) >= 16  # segments of a group are equally full


@pytest.mark.parametrize("size", [64, 512])
def test_aligned_groups_come_together_last(size):
    x, label = clusters(9000, 11, 24, 0.05)
    segments = arranged(x, size, 8, "groups", aligned=True).segments
    held = [set(label[row[row >= 0]].tolist()) for row in segments]
    alone = 0
    for cluster in range(11):
        places = [i for i, labels in enumerate(held) if labels == {cluster}]
        width = 1 << (len(places) - 1).bit_length()
        first = places[0] // width * width
        assert places == list(range(places[0], places[0] + len(places)))
        assert places[0] == first
        assert all(labels <= {cluster} for labels in held[first : first + width])
        alone += len(places)
    assert alone >= sum(map(bool, held)) - 1  # tokens that nobody leads share segments


def test_clusters_are_found_for_long_segments_too():
    x, label = clusters(16384, 48, 48, 0.1)
    segments = arranged(x, 512, 4, "auto").segments
    mixed = sum(len(label[row[row >= 0]].unique()) > 1 for row in segments)
    assert mixed <= 1


def test_auto_takes_groups_for_clusters_a_tree_without_and_the_sequence_where_it_is_as_good():
    x, _ = clusters(4096, 23, 32, 0.05)
    assert torch.equal(arranged(x, 64, 4, "auto").segments, arranged(x, 64, 4, "groups").segments)
    smooth, _ = clusters(4096, 1, 4, 1.0)
    assert torch.equal(
        arranged(smooth, 64, 4, "auto").segments, arranged(smooth, 64, 4, "tree").segments
    )
    given = arranged(smooth, 64, 4, "tree").segments
    again = arranged(smooth[given.flatten()], 64, 4, "auto").segments
    assert torch.equal(again.sort(1).values, torch.arange(4096).view(-1, 64))


def test_tokens_that_are_all_alike():
    for how in ORDERS:
        segments, _, _ = arranged(torch.zeros(100, 3), 16, 4, how)
        assert torch.equal(segments[segments >= 0].sort().values, torch.arange(100))
