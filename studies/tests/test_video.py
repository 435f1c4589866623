"""The video study: its clips, its model, its baselines, its distances, and the command."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

pytest.importorskip("matplotlib")

import supportbasis as sb
from supportbasis.integrations.calls import Call
from supportbasis.models import ladder
from supportbasis.plans import ExactHead, LayerPlan, ListHead, Plan
from supportbasis_studies import commands
from supportbasis_studies.video import Extent, baselines, denoiser, findings, quality, study, train
from supportbasis_studies.video import clips as video
from supportbasis_studies.video.measure import Lab
from supportbasis_studies.video.rows import VideoRow
from supportbasis_studies.video.study import QUICK, video_extent

TINY = Extent(
    frames=4, size=32, steps=4, dense=1, parts=2, clips=2, batch=2, changes=(1e-4, 1e-2, 1.0)
)
SIZES = denoiser.Sizes(2, 2, 16, 64)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def model() -> denoiser.Denoiser:
    """Random weights in every layer, those that start at zero too."""
    made = denoiser.Denoiser(SIZES)
    draw = generator()
    with torch.no_grad():
        for weight in made.parameters():
            if weight.ndim == 2:
                weight.normal_(0, 1.5 / math.sqrt(weight.shape[1]), generator=draw)
    return made.eval()


# ---- clips and the model ---------------------------------------------------------------------


def test_clips_move_and_their_prompt_says_what_is_seen() -> None:
    scenes = video.Scenes.draw(3, generator(1))
    clips = scenes.clips(16, 64, generator(2))
    assert clips.shape == (3, 3, 16, 64, 64)
    assert float(clips.abs().max()) <= 1
    assert scenes.prompts().shape == (3, video.PROMPT)
    assert bool(((clips[:, :, 1:] - clips[:, :, :-1]).abs().amax((1, 2, 3, 4)) > 0.1).all())
    crop = scenes.clips(15, 62, generator(3))  # one of 18 places in each clip
    away = [
        (clips[:, :, t : t + 15, y : y + 62, x : x + 62] - crop).abs().amax((1, 2, 3, 4))
        for t in (0, 1)
        for y in (0, 1, 2)
        for x in (0, 1, 2)
    ]
    assert float(torch.stack(away).amin(0).max()) < 1e-4


def test_the_model_turns_tokens_by_their_distance_alone() -> None:
    """Scores of rotated tokens depend on differences of positions."""
    turn = denoiser.turns(4, 4, 4, 16, torch.device("cpu"))
    query, key = torch.randn(2, 16, generator=generator())
    score = (
        denoiser.rotated(query.expand(64, -1), turn) @ denoiser.rotated(key.expand(64, -1), turn).T
    )
    at = torch.arange(64).view(4, 4, 4)
    first, other = at[1:, 1:, 1:], at[:-1, :-1, :-1]
    moved = score[first.flatten(), other.flatten()]
    torch.testing.assert_close(moved, moved[:1].expand_as(moved))
    assert float((score[at[1, 0, 0], 0] - score[at[0, 1, 0], 0]).abs()) > 1e-3


def test_patches_are_put_back_where_they_were_taken(model: denoiser.Denoiser) -> None:
    """A change of one pixel changes the first layer's input at one token, and a model whose layers
    do nothing answers in the same place."""
    plain = denoiser.Denoiser(SIZES)
    with torch.no_grad():
        plain.pixels.weight.normal_(0, 1, generator=generator())
    clip = torch.zeros(1, 3, 2, 8, 8)
    moved = clip.clone()
    moved[0, 1, 1, 4, 7] = 1.0
    t, prompt = torch.tensor([0.5]), torch.zeros(1, video.PROMPT)
    change = (plain(moved, t, prompt) - plain(clip, t, prompt)).abs().amax((0, 1))
    assert set(map(tuple, change.nonzero().tolist())) == {(1, y, x) for y in (4, 5) for x in (6, 7)}


def test_sampling_integrates_the_velocity() -> None:
    """With the velocity e - x of straight paths to a clip x, Euler steps end at x."""
    noise, clip = torch.randn(2, 1, 3, 2, 8, 8, generator=generator())

    class Straight(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def forward(self, x: torch.Tensor, t: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
            return (x - clip) / t.view(-1, 1, 1, 1, 1)

    told: list[float] = []
    found = denoiser.sample(Straight(), noise, torch.zeros(1, 1), 5, told.append)  # type: ignore[arg-type]
    torch.testing.assert_close(found, clip, rtol=0, atol=1e-5)
    assert told == denoiser.timesteps(5)[:-1]


def test_the_loss_is_that_of_the_velocity_of_straight_paths() -> None:
    clip = torch.randn(3, 3, 2, 8, 8, generator=generator())

    def straight(z: torch.Tensor, t: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return (z - clip) / t.view(-1, 1, 1, 1, 1)

    t = torch.tensor([0.2, 0.5, 1.0])
    assert float(train.velocity_loss(straight, clip, clip, t)) < 1e-9  # type: ignore[arg-type]


def test_training_lowers_the_loss_and_writes_weights(tmp_path: Path) -> None:
    out = tmp_path / "weights" / "model.safetensors"
    made = denoiser.Denoiser(SIZES)
    stages = (train.Stage(0.5, 2, 8, 8), train.Stage(1.0, 2, 16, 4))
    mean = train.train(made, stages, 60.0, out, rate=1e-2, most_steps=60, every=10)
    with (out.parent / "training.csv").open() as file:
        losses = [float(line["loss"]) for line in csv.DictReader(file)]
    assert losses[-1] < 0.8 * losses[0]
    loaded = denoiser.load(out)
    for name, weight in mean.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], weight.bfloat16().float())


def test_the_weights_beside_the_study_predict_velocities() -> None:
    """Much better than the mean velocity would."""
    model, (clip, prompt) = denoiser.load(), video.draw(2, 8, 32, generator())
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        loss = float(train.velocity_loss(model, clip, prompt, torch.tensor([0.5, 0.9])))
    assert loss < 0.2 * float(1 + clip.var())


# ---- distances -------------------------------------------------------------------------------


def test_distances_grow_with_noise_and_vanish_without() -> None:
    clips = video.draw(2, 3, 32, generator())[0]
    noise = torch.randn(clips.shape, generator=generator(1))
    near, far = clips + 0.02 * noise, clips + 0.2 * noise
    assert quality.psnr(clips, clips).tolist() == [quality.EQUAL] * 2
    torch.testing.assert_close(quality.ssim(clips, clips), torch.ones(2))
    assert float(quality.feature_distance(clips, clips).max()) < 1e-9
    for measure, sign in (
        (quality.psnr, -1), (quality.ssim, -1), (quality.feature_distance, 1)
    ):  # fmt: skip
        assert bool((sign * (measure(clips, far) - measure(clips, near)) > 0).all())
    # 0.02 noise in [-1, 1] is 0.01 in [0, 1]: 40 dB, but for pixels beyond the ends
    assert bool((quality.psnr(clips, near) - 40).abs().max() < 0.5)


def test_ssim_is_that_of_its_definition() -> None:
    """One window, by hand."""
    one, two = (torch.rand(1, 3, 1, 11, 11, generator=generator(i)) for i in (0, 1))
    x, y = (quality.pixels(z)[0, 0].double() for z in (one, two))
    at = torch.arange(-5, 6).double()
    w = torch.exp(-at.square() / (2 * 1.5**2))
    w = torch.outer(w, w) / w.sum() ** 2
    mx, my = (x * w).sum((1, 2)), (y * w).sum((1, 2))
    vx, vy = (w * x * x).sum((1, 2)) - mx**2, (w * y * y).sum((1, 2)) - my**2
    both = (w * x * y).sum((1, 2)) - mx * my
    a, b = 0.01**2, 0.03**2
    wanted = (2 * mx * my + a) * (2 * both + b) / ((mx**2 + my**2 + a) * (vx + vy + b))
    torch.testing.assert_close(quality.ssim(one, two)[0].double(), wanted.mean(), rtol=1e-4, atol=0)


# ---- baselines -------------------------------------------------------------------------------


def test_tiles_hold_neighbours_once() -> None:
    groups = baselines.tiles((4, 8, 8), 2, torch.device("cpu"))
    assert groups.rows.shape == (2, 4, 64)
    assert sorted(groups.rows[0].flatten().tolist()) == list(range(256))
    place = torch.stack(torch.meshgrid(*(torch.arange(x) for x in (4, 8, 8)), indexing="ij"), -1)
    part = place.view(-1, 3)[groups.rows[0]]
    assert int((part.amax(1) - part.amin(1)).max()) == 3


@pytest.mark.parametrize("kind", [baselines.CLUSTERS, baselines.TILES, baselines.SLIDING])
def test_sparse_attention_is_softmax_over_the_kept_keys(kind: str) -> None:
    """All keys give exact attention; fewer the softmax of the mask that the groups make."""
    grid = (4, 8, 8)
    q, k, v = torch.randn(3, 1, 2, 256, 8, generator=generator())
    call = Call(0, "call 0", q, k, v)
    handler = baselines.Sparse(kind, grid)
    exact = F.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(handler(call), exact)
    handler.shares = [[0.5, 1.0]]
    found = handler(call)
    torch.testing.assert_close(found[:, 1], exact[:, 1])
    clustered = kind == baselines.CLUSTERS
    groups = baselines.clusters(q[0], k[0]) if clustered else baselines.tiles(grid, 2, q.device)
    if kind == baselines.SLIDING:
        score = baselines.nearness(grid, 2, q.device)
    else:
        score = baselines.masses(q[0], k[0], groups, 8**-0.5)
    top = score[0].topk(score.shape[2] // 2, 1).indices
    mask = torch.zeros(256, 256, dtype=torch.bool)
    for rows, kept in zip(groups.rows[0], top, strict=True):
        mask[rows.unsqueeze(1), groups.keys[0][kept].flatten()] = True
    torch.testing.assert_close(
        found[:, 0], F.scaled_dot_product_attention(q[:, 0], k[:, 0], v[:, 0], mask)
    )


def test_masses_are_weights_of_the_mean_query() -> None:
    q, k = torch.randn(2, 1, 64, 8, generator=generator())
    groups = baselines.tiles((4, 4, 4), 1, q.device)
    weight = (q[0].mean(0) @ k[0].T * 8**-0.5).exp().sum().log()
    torch.testing.assert_close(baselines.masses(q, k, groups, 8**-0.5).flatten()[0], weight)


def test_shares_have_the_cost_or_the_time_of_the_plan() -> None:
    from supportbasis.lists.tables import ListSettings

    lists = ListHead(lists=ListSettings(1e-3, 32, 16), keys=10, n=64, m=64, cost=0.1, speedup=4.0)
    exact = ExactHead(n=64, m=64)
    layers = tuple(
        LayerPlan(str(i), Plan(sb.Auto(), 8, heads, 1.0, False), (0.0, 0.0), 0)
        for i, heads in enumerate([(exact, lists), (lists, lists)])
    )
    plan = sb.ModelPlan(layers, "change", 0.1, 64, 0.0)
    assert baselines.equal_cost(plan) == [[1.0, 0.1], [0.1, 0.1]]
    same = baselines.without_tilts(plan)
    assert same[0][0] == 1.0
    assert 10 / 64 + 1 / 16 < same[1][0] < 10 / 64 + 1 / 16 + 4 / 32
    shares = baselines.ideal(plan, 0.4)
    assert shares[0][0] == 1.0
    assert sum(map(sum, shares)) == pytest.approx(0.4 * 4)


# ---- the command -----------------------------------------------------------------------------


def test_steps_before_the_first_range_are_dense(model: denoiser.Denoiser) -> None:
    lab = Lab(model, TINY, torch.device("cpu"), 0)
    times = denoiser.timesteps(TINY.steps)[:-1]
    assert [lab.part(t) for t in times] == [None, 0, 1, 1]
    chosen = lab.ranges(["one", "two"])  # type: ignore[list-item]
    found = [next(x for (low, high), x in chosen.items() if low <= t <= high) for t in times]
    assert [str(x) for x in found] == [str(sb.Exact()), "one", "two", "two"]


def test_missing_weights_say_how_to_train(tmp_path: Path) -> None:
    command = ["video", "--weights", str(tmp_path / "none"), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(commands.reproduce, command)
    assert result.exit_code == 2
    assert "supportbasis_studies.video.train" in result.output
    for wrong in ("x", "0.1,-1", ""):
        with pytest.raises(sb.InputError, match="--changes"):
            video_extent(QUICK, wrong, None)


def test_the_time_that_is_expected_counts_forward_passes(
    model: denoiser.Denoiser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clips by 1 + 3 methods, or by 1 + 3 x 6; then heads, and plans of 2 ranges."""
    lab = Lab(model, TINY, torch.device("cpu"), 0)
    assert 0 < lab.pass_seconds() < 60
    monkeypatch.setattr(lab.__class__, "pass_seconds", lambda _: 1.0)
    plans = 4 + 2 * (study.SEARCH + 3 * study.CHECK)
    assert study.expected(lab, False) == 2 * 4 * 4 + plans
    assert study.expected(lab, True) == 2 * 4 * 19 + plans


def row(method: str, change: float | None, clip: int, psnr: float, planned: float) -> VideoRow:
    return VideoRow(method, change, clip, psnr, 1.0, 0.0, 0.1, planned, planned, 2.0, 1.0, 1.0,
                    3.0, "")  # fmt: skip


def test_statements_are_of_the_fastest_plan_that_is_near_enough() -> None:
    rows = [row("plan", 0.1, i, 20.0, 0.1) for i in (0, 1)]
    assert [check.holds for check in findings.checks(rows)] == [False]
    rows += [row("plan", 0.01, i, 32.0 + i, 0.4) for i in (0, 1)]
    rows += [row(baselines.CLUSTERS, 0.01, i, 29.0 + 2 * i, 0.4) for i in (0, 1)]
    speed, dropped = findings.checks(rows)
    assert speed.holds and "2.5×" in speed.measured
    assert dropped.holds and "+2.5" in dropped.measured


@pytest.mark.slow
# heads of an untrained model may leave the range that they had on other clips
@pytest.mark.filterwarnings("ignore:supportbasis. heads .* leave the range")
def test_the_command_compares_clips_with_exact_ones(
    model: denoiser.Denoiser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "QUICK_VIDEO", TINY)
    monkeypatch.setattr(ladder, "FASTER", 0.0)
    denoiser.save(model, tmp_path / "model.safetensors")
    out = tmp_path / "out"
    command = ["video", "--quick", "--weights", str(tmp_path / "model.safetensors"),
               "--out", str(out), "--changes", "1e-6,1e-2"]  # fmt: skip
    result = CliRunner().invoke(commands.reproduce, command)
    if result.exception is not None:
        raise result.exception
    with (out / "video.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * (1 + 2 * 6)
    psnr = {(r["method"], r["change"], r["clip"]): float(r["psnr"]) for r in rows}
    assert psnr["exact", "", "0"] == quality.EQUAL
    for clip in "01":
        assert psnr["plan", "1e-06", clip] >= psnr["plan", "0.01", clip]
    cost = {(r["method"], r["change"]): float(r["cost"]) for r in rows}
    assert cost["plan", "0.01"] < 1
    assert cost[baselines.CLUSTERS, "0.01"] == pytest.approx(cost["plan", "0.01"])
    assert "On a CPU this takes about" in " ".join(result.output.split())
    page = (out / "report.html").read_text()
    assert "What plans should reach is asked of clips of 16384 tokens" in page
    assert "statements hold" not in page
    assert page.count("data:image/png") == 2
    assert "ModelPlan: Denoiser" in page
    short = [*command[:-1], "1e-2", "--no-baselines"]
    assert CliRunner().invoke(commands.reproduce, short).exit_code == 0
    with (out / "video.csv").open() as file:
        assert {r["method"] for r in csv.DictReader(file)} == {"exact", "plan"}
