"""`EntryProfile`: counts of large entries of Q, K and V, and their picture."""

from __future__ import annotations

import dataclasses
import math
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import cases
from supportbasis.analysis import (
    EntryProfile,
    chernoff_tail,
    expected_large_entries,
    log_threshold,
    sub_gaussian_threshold,
    variance_proxy,
)
from supportbasis.errors import InputError, SupportBasisError
from supportbasis_studies.dense_splits import support_basis

gaussian = partial(cases.gaussian, dtype=torch.float32)


def test_profile_counts_by_hand() -> None:
    query = torch.zeros(4, 2)
    query[0] = torch.tensor([3.0, -5.0])
    query[2, 1] = -1.5
    key = torch.full((4, 2), 0.5)
    key[3, 0] = 2.5
    profile = EntryProfile.of(query, key, alpha=0.5, threshold=2.0)
    assert profile.labels == ("sqrt(ln n)", "T(0.5)", "T")
    assert profile.thresholds[0] == pytest.approx(math.sqrt(math.log(4)))
    assert profile.thresholds[1] == sub_gaussian_threshold(query, key, 0.5)
    side, large = profile.query, profile.query.large[2]
    assert (side.matrices, side.n, side.d, side.entries) == (1, 4, 2, 8)
    assert side.mean == pytest.approx(-3.5 / 8)
    assert side.std == pytest.approx(float(query.double().std(correction=0)))
    assert side.largest == 5.0
    assert side.proxy == variance_proxy(query)
    assert (large.threshold, large.entries, large.rows, large.row_share) == (2.0, 2, 1, 0.25)
    assert large.alpha == 0.5
    assert large.bound == expected_large_entries(4, 2, 2.0, side.proxy)
    assert large.tail == chernoff_tail(large.bound, 2.0)
    assert side.large[0].entries == 3
    assert side.large[0].rows == 2
    assert profile.key is not None
    assert (profile.key.large[2].entries, profile.key.large[2].rows) == (1, 1)
    assert profile.pair_shares is not None
    assert profile.pair_shares[2] == 1 - (1 - 0.25) * (1 - 0.25)


def test_pair_share_is_the_share_of_the_support_basis() -> None:
    query, key = gaussian(2, 3, 40, 6, seed=1), gaussian(2, 3, 50, 6, seed=2, std=1.2)
    profile = EntryProfile.of(query, key, threshold=2.4)
    large, _ = support_basis(query, key, 2.4)
    assert profile.pair_shares is not None
    assert profile.pair_shares[2] == pytest.approx(int((large != 0).sum()) / large.numel())
    assert profile.thresholds[0] == log_threshold(50)


def test_profile_of_grouped_heads() -> None:
    """Query heads 0, 1 read key head 0; heads 2, 3 read key head 1."""
    query = gaussian(1, 4, 30, 5, seed=3) * torch.tensor([1.0, 2.0, 0.5, 3.0])[:, None, None]
    key = gaussian(1, 2, 30, 5, seed=4) * torch.tensor([0.2, 2.0])[:, None, None]
    grouped = EntryProfile.of(query, key, threshold=2.5)
    spread = EntryProfile.of(query, key.repeat_interleave(2, dim=1), threshold=2.5)
    assert grouped.pair_shares == spread.pair_shares
    with pytest.raises(InputError, match="groups of heads"):
        EntryProfile.of(query, gaussian(1, 3, 30, 5, seed=5))


def test_profile_of_one_token_is_refused() -> None:
    with pytest.raises(InputError, match=r"query has shape \(1, 8\); expected 2 tokens"):
        EntryProfile.of(torch.ones(1, 8))


def test_profile_counts_never_exceed_the_fitted_bound() -> None:
    for seed, power in enumerate((1, 2, 3)):
        profile = EntryProfile.of(gaussian(2, 300, 8, seed=seed) ** power, threshold=1.0)
        for large in profile.query.large:
            assert large.entries <= 2 * large.bound * (1 + 1e-12)


def test_profile_of_heads_counts_per_matrix() -> None:
    """Exponent, bound and tail speak of one matrix [n, d]; the counts of all of them."""
    x = gaussian(3, 400, 8, seed=0)
    large = EntryProfile.of(x, alpha=0.6, threshold=3.3).query.large[2]
    assert large.entries == int((x.abs() > 3.3).sum())
    assert large.alpha == pytest.approx(math.log(large.entries / 3) / math.log(400))
    assert large.bound == expected_large_entries(400, 8, 3.3, variance_proxy(x)) < 400**0.6
    assert large.tail == chernoff_tail(large.bound, 400**0.6) > chernoff_tail(large.bound, 400)


def test_gaussian_tail_tells_heavy_tails_from_gaussian_ones() -> None:
    light = EntryProfile.of(gaussian(2000, 32, seed=0), threshold=3.0).query.large[2]
    heavy = EntryProfile.of(gaussian(2000, 32, seed=0) ** 3, threshold=15.0).query.large[2]
    assert light.entries > 0
    assert light.gaussian_tail > 1e-3
    assert heavy.gaussian_tail < 1e-6


def test_histogram_holds_every_entry() -> None:
    x = gaussian(2, 100, 7, seed=1)
    side = EntryProfile.of(x).query
    assert sum(side.histogram) == side.entries == x.numel()
    half = len(side.histogram) // 2
    assert sum(side.histogram[:half]) == int((x < 0).sum())
    edges, counts = side.tail_counts
    assert counts[0] == 700
    assert counts[half // 2] == pytest.approx(int((x.abs() >= edges[half // 2]).sum()) / 2, abs=1)
    assert counts == sorted(counts, reverse=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_profile_of_other_dtypes_equals_that_of_float32(dtype: torch.dtype) -> None:
    x = gaussian(64, 8, seed=2).bfloat16().to(torch.float16).to(dtype)
    profile, reference = EntryProfile.of(x, x), EntryProfile.of(x.float(), x.float())
    bare, expected = (dataclasses.replace(p.query, histogram=()) for p in (profile, reference))
    assert bare == expected
    assert profile.thresholds == reference.thresholds
    assert profile.pair_shares == reference.pair_shares


def test_profile_is_frozen_and_prints_its_numbers() -> None:
    profile = EntryProfile.of(gaussian(4, 256, 8, seed=0), gaussian(2, 256, 8, seed=1))
    with pytest.raises(dataclasses.FrozenInstanceError):
        profile.alpha = 0.1  # type: ignore[misc]
    text = str(profile)
    assert profile.pair_shares is not None
    large = profile.query.large[0]
    for piece in ("query", "key", "sqrt(ln n) = 2.355", "T(0.5)", f"{large.entries:,}"):
        assert piece in text
    assert f"pairs in A^(L): {profile.pair_shares[0]:.2%}" in text
    assert f"{large.alpha:.3f}" in text
    assert max(map(len, text.splitlines())) <= 120
    assert "pairs" not in str(EntryProfile.of(gaussian(16, 8, seed=0)))


def test_profile_of_zeros() -> None:
    profile = EntryProfile.of(torch.zeros(4, 4), torch.zeros(4, 4))
    assert profile.pair_shares == (0.0, 0.0)
    assert profile.query.large[0].alpha == -math.inf
    assert "none" in str(profile)


# --- plotting ---------------------------------------------------------------------------------


def test_plot_shows_entries_and_thresholds(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    profile = EntryProfile.of(gaussian(128, 8, seed=0), gaussian(128, 8, seed=1), threshold=2.5)
    figure = profile.plot(tmp_path / "profile.png")
    assert (tmp_path / "profile.png").read_bytes().startswith(b"\x89PNG")
    histogram, tail = figure.axes[:2]
    assert len(figure.axes) == 4
    assert histogram.get_yscale() == tail.get_yscale() == "log"
    dashed = [line.get_xdata()[0] for line in histogram.lines if line.get_linestyle() == "--"]
    assert dashed == pytest.approx([-profile.thresholds[0], profile.thresholds[0]])
    bound, counts = (line.get_ydata() for line in tail.lines[:2])
    assert all(c <= 1.001 * b for b, c in zip(bound, counts, strict=True))
    assert len(EntryProfile.of(gaussian(16, 8, seed=0)).plot().axes) == 2
    EntryProfile.of(torch.zeros(4, 4)).plot(tmp_path / "zeros.png")


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SupportBasisError, match=r'pip install "supportbasis\[cli\]"'):
        EntryProfile.of(gaussian(16, 8, seed=0)).plot()
