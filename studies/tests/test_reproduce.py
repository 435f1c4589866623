"""The study of polynomial attention: its mathematics, its bookkeeping and what it writes."""

from __future__ import annotations

import csv
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer import Typer
from typer.testing import CliRunner

import supportbasis as sb
from supportbasis import Plan
from supportbasis.plans.plan import HeadPlan
from supportbasis.problem.validation import attention_problem
from supportbasis.sketch import PolySketch
from supportbasis_studies import reference

pytest.importorskip("matplotlib")

from supportbasis_studies import bench_commands, commands
from supportbasis_studies.polynomial_attention import (
    Extent,
    buying,
    errors,
    findings,
    inputs,
    sketching,
    tables,
    timing,
    variants,
)
from supportbasis_studies.polynomial_attention.dense import (
    Dense,
    Errors,
    Exact,
    Norms,
    measure_errors,
)
from supportbasis_studies.statistics import Interval, log_slope

TINY = Extent(
    lengths=(95,),
    seeds=2,
    bought_length=63,
    bought_sizes=(8,),
    bought_seeds=1,
    sketch_length=130,
    sketch_sizes=(16, 64),
    sketch_seeds=2,
    timed_lengths=(64, 128),
    swept_length=96,
    rounds=1,
)
CSV = {"errors", "errors-summary", "bucketing", "powers", "sketches", "equal-error"}
CSV |= {"sketched-powers", "lengths", "sweeps"}
PNG = {"errors", "bucketing", "powers", "bought", "sketched-powers", "lengths", "sweeps"}


def head_of(name: str, n: int = 111, seed: int = 0):  # type: ignore[no-untyped-def]
    return inputs.only_head(inputs.draw(name, n, seed))


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# ---- the command -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """One run of the smallest study, which several tests look at."""
    out = tmp_path_factory.mktemp("study") / "new"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commands, "QUICK_STUDY", TINY)
        command = ["polynomial-attention", "--quick", "--out", str(out)]
        result = CliRunner().invoke(commands.reproduce, command)
    if result.exception is not None:
        raise result.exception
    return out, " ".join(result.output.split())


def test_study_writes_a_report_numbers_and_pictures(study: tuple[Path, str]) -> None:
    out, text = study
    expected = {f"{name}.csv" for name in CSV}
    expected |= {f"{name}.{kind}" for name in PNG for kind in ("png", "svg")}
    assert {path.name for path in out.iterdir()} == expected | {"report.html"}
    assert all((out / f"{name}.png").read_bytes()[:4] == b"\x89PNG" for name in PNG)
    assert "report.html" in text and "statements hold" in text


def test_report_stands_alone_and_says_what_was_found(study: tuple[Path, str]) -> None:
    page = (study[0] / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|file:|<script|<link|@import|url\(", page)
    assert page.count("<img ") == len(PNG)
    assert page.count('class="finding"') >= 15
    assert str(study[0]) not in page
    words = re.sub(r'"data:image[^"]*"|<style>.*?</style>', "", page, flags=re.DOTALL)
    assert not re.search(r"\b(nan|inf)\b", words)
    for part in ("Does bucketing help?", "vacuous", "Machine and versions", sb.__version__):
        assert part in page


def test_rows_are_tidy_and_complete(study: tuple[Path, str]) -> None:
    rows = read(study[0] / "errors.csv")
    assert list(rows[0])[:8] == [
        "date", "device", "cpu", "cores", "torch", "version", "commit", "input"
    ]  # fmt: skip
    methods = variants.compared(errors.DEGREES, errors.SIZE)
    assert len(rows) == len(inputs.DRAWS) * TINY.seeds * len(methods)
    assert all(f"{part}_{norm}" in rows[0] for part, norm in errors.measures())
    assert {row["sweep"] for row in read(study[0] / "sweeps.csv")} == set(timing.SWEEPS)
    assert all(float(row["sdpa_seconds"]) > 0 for row in read(study[0] / "lengths.csv"))


def test_softmax_is_close_where_the_method_is_exact_and_not_elsewhere(
    study: tuple[Path, str],
) -> None:
    for row in read(study[0] / "errors.csv"):
        if float(row["exact_share"]) == 1:
            assert float(row["output_linf"]) < 1e-12
        if row["method"] == "PowerAttention(4)":
            assert float(row["output_l2"]) > 0.5


# ---- whole matrices --------------------------------------------------------------------------


def plans() -> dict[str, tuple[str, sb.MultiThreshold | sb.Polynomial | sb.PowerAttention]]:
    return {
        "polynomial": ("gaussian", sb.Polynomial(2)),
        "mean": ("gaussian", sb.Polynomial(0)),
        "buckets": ("log-normal", sb.MultiThreshold(1.5, 2)),
        "sketched": ("gaussian", sb.MultiThreshold(2.0, 1, 8)),
        "partly-exact": ("student-t", sb.MultiThreshold(2.0, 1, 8)),
        "power": ("gaussian", sb.PowerAttention(4)),
        "sketched-power": ("gaussian", sb.PowerAttention(4, 8)),
    }


@pytest.mark.parametrize("case", plans())
def test_dense_weights_are_those_of_the_reference(case: str) -> None:
    name, method = plans()[case]
    head = head_of(name)
    plan = method.plan_head(head)
    unit = Exact.of(head).unit
    expected, top = reference.weights(head, plan)
    expected = expected * (top - unit).exp().unsqueeze(1)
    softmax = (head.query.double() @ head.key.double().T * head.scale - unit).exp()
    dense = Dense(head, plan, unit)
    seen = []
    for rows, exact, given in dense:
        # float64 logarithms of sketched lengths: about 1e-13, times the power
        torch.testing.assert_close(given, expected[rows][:, dense.order], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(exact, softmax[rows][:, dense.order], rtol=1e-12, atol=0.0)
        seen += rows.tolist()
    assert sorted(seen) == list(range(head.n))


@pytest.mark.parametrize("case", plans())
def test_errors_are_those_of_what_the_library_returns(case: str) -> None:
    name, method = plans()[case]
    setting = inputs.draw(name, 111, 0)
    tensors = (setting.query.double(), setting.key.double(), setting.value.double())
    problem = attention_problem(*tensors, None, 0.0, False, None, False)
    head = problem.head(0, 0)
    plan = method.plan_head(head)
    output, _ = reference.execute(problem, Plan(method, head.dim, (plan,)))
    softmax = torch.nn.functional.scaled_dot_product_attention(*tensors)
    measured = measure_errors(head, plan, Exact.of(head), fallback=True)
    for norm, value in zip((1, 2, 4, math.inf), measured.output, strict=True):
        wrong = torch.linalg.vector_norm(output - softmax, norm)
        expected = wrong / torch.linalg.vector_norm(softmax, norm)
        assert value == pytest.approx(float(expected), rel=1e-8, abs=1e-14)


def test_norms_add_up_over_parts() -> None:
    matrix = torch.tensor([[1.0, -2.0], [0.5, 4.0]], dtype=torch.float64)
    norms = Norms()
    for row in matrix:
        norms.add_(row.clone())
    expected = [float(torch.linalg.vector_norm(matrix, q)) for q in (1, 2, 4, math.inf)]
    assert norms.values() == pytest.approx(expected, rel=1e-14)


def test_norms_survive_entries_whose_fourth_powers_overflow() -> None:
    for size in (1e90, 1e-90):
        norms, one = Norms(), Norms()
        for _ in range(2):
            norms.add_(torch.tensor([size, -size], dtype=torch.float64))
            one.add_(torch.tensor([1.0, 1.0], dtype=torch.float64))
        assert norms.over(one) == pytest.approx([size] * 4, rel=1e-12)


def test_lost_rows_are_counted_and_mended_only_on_request() -> None:
    head = head_of("log-normal")
    plan = sb.MultiThreshold(math.inf, 1).plan_head(head)
    sketched = variants.all_sketched(plan, 1, 0)
    exact = Exact.of(head)
    bare, mended = (measure_errors(head, sketched, exact, fallback=r) for r in (False, True))
    assert bare.failed_rows == mended.failed_rows > 0.5
    assert mended.attention[0] < bare.attention[0]


# ---- variants --------------------------------------------------------------------------------


def test_nothing_is_exact_where_nothing_shall_be() -> None:
    head = head_of("log-normal")
    plan = sb.MultiThreshold(1.5, 1).plan_head(head)
    own, shared = (variants.all_sketched(plan, 8, 3, share=share) for share in (False, True))
    kernels = [pair.kernel for pair in own.pairs]
    assert all(kernel is not None and kernel.sketch_size == 8 for kernel in kernels)
    assert len({kernel.seed for kernel in kernels if kernel}) == len(own.pairs) > 4
    assert {pair.kernel.seed for pair in shared.pairs if pair.kernel} == {kernels[0].seed}
    powers = variants.Powers.of(own)
    assert powers.exact_share == 0
    assert powers.largest_power == max(pair.kernel.power for pair in plan.pairs if pair.kernel)


def test_exact_share_and_mean_power_are_weighted_by_pairs() -> None:
    head = head_of("log-normal", 300)
    plan = sb.MultiThreshold(2.0, 1, 4).plan_head(head)
    powers = variants.Powers.of(plan)
    exact = sum(pair.rows * pair.keys for pair in plan.pairs if pair.kernel is None)
    assert powers.exact_share == pytest.approx(exact / head.n**2)
    rest = [pair for pair in plan.pairs if pair.kernel is not None]
    total = sum(pair.rows * pair.keys * pair.kernel.power for pair in rest if pair.kernel)
    assert powers.mean_power == pytest.approx(total / sum(p.rows * p.keys for p in rest))


def test_one_power_has_the_power_that_was_asked_for() -> None:
    head = head_of("log-normal")
    plan = variants.one_power(head, 2, 6)
    assert variants.Powers.of(plan) == variants.Powers(1, 1, 6, 6.0, 0.0)


# ---- the prediction of sketch errors ---------------------------------------------------------


def test_cumulants_and_moments_are_inverse_and_known() -> None:
    norms, inner = torch.tensor([2.0, 3.0, 1.0]).double(), torch.tensor([0.5, -3.0, 0.0]).double()
    cumulant = sketching.product_cumulants(norms, inner)
    moment = sketching.raw_moments(cumulant)
    torch.testing.assert_close(moment[1], norms**2 + 2 * inner**2)
    fourth = 9 * norms**4 + 72 * norms**2 * inner**2 + 24 * inner**4  # Isserlis
    torch.testing.assert_close(moment[3], fourth)
    for mine, back in zip(cumulant, sketching.cumulants(moment), strict=True):
        torch.testing.assert_close(mine, back)


@pytest.mark.parametrize("power", sketching.POWERS)
def test_predicted_moments_are_those_of_the_sketch(power: int) -> None:
    """Means of X and X² over seeds, within six of their predicted standard errors."""
    setting = inputs.normal(3, 5, 1.0, seed=1)
    pairs = sketching.Pairs.of(setting)
    size, seeds = 7, 3000
    one, two, _, four = pairs.moments(power, size)
    sums = [torch.zeros_like(one), torch.zeros_like(one)]
    for seed in range(seeds):
        half = PolySketch(power, size, seed).half
        inner = half(pairs.query) @ half(pairs.key).T
        sums[0] += inner / seeds
        sums[1] += inner**2 / seeds
    errors_ = ((two - one**2) / seeds).sqrt(), ((four - two**2) / seeds).sqrt()
    for mean, expected, error in zip(sums, (one, two), errors_, strict=True):
        assert bool(((mean - expected).abs() < 6 * error).all())


def test_sketch_errors_follow_the_prediction() -> None:
    extent = replace(TINY, sketch_length=400, sketch_seeds=3, sketch_sizes=(16, 64, 256))
    rows = sketching.measure_sketch(extent, 0, lambda share: None)
    for decay in sketching.decays(rows, extent, 0):
        assert 1 / 1.5 < decay.ratio(64) < 1.5
        assert abs(decay.slopes[0] - decay.slopes[1]) < 0.1
        assert decay.inner_slopes[1] == pytest.approx(-0.5)
        sizes, predicted = zip(*decay.beyond[-2:], strict=True)
        assert log_slope(sizes, predicted) == pytest.approx(-0.5, abs=0.05)


# ---- bookkeeping -----------------------------------------------------------------------------


def test_interval_is_students_on_the_logarithm() -> None:
    interval = Interval.of([1.0, 10.0, 100.0])
    student = 0.95 / math.sqrt(2 * 0.975 * 0.025)  # 97.5 % point, two degrees of freedom
    half = student * math.log(10) / math.sqrt(3)
    assert interval.mean == pytest.approx(10.0)
    assert interval.low == pytest.approx(10 * math.exp(-half))
    assert interval.high == pytest.approx(10 * math.exp(half))
    assert Interval.of([3.0]) == Interval(
        pytest.approx(3.0), pytest.approx(3.0), pytest.approx(3.0), 1
    )
    assert Interval.of([0.0, 0.0]).mean == pytest.approx(1e-16)


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (commands.reproduce, ("distribution", "[default: 2048, or its limit]")),
        (commands.reproduce, ("downstream", "ours6-revised, as23-4-revised")),
        (bench_commands.bench, ("frontier", "[default: $SUPPORTBASIS_MODELS]")),
    ],
)
def test_help_shows_choices_and_defaults(
    command: Typer, shown: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    text = " ".join(CliRunner().invoke(command, [shown[0], "--help"]).output.split())
    assert shown[1] in text


def error_row(method: str, seed: int, error: float) -> errors.ErrorRow:
    four = (error,) * 4
    powers = variants.Powers(1, 1, 2, 2.0, 0.0)
    return errors.ErrorRow("input", 64, 16, seed, method, "", powers, Errors(four, four, four, 0.0))


def test_bucketing_helps_where_its_errors_are_smaller() -> None:
    rows = []
    for degree in errors.DEGREES:
        for seed, wobble in enumerate((1.0, 1.1, 0.9)):
            for buckets, one in errors.SKETCHES.values():
                factor = 2.0 if "sketch" in buckets else 0.5
                label = f"buckets 2, degree {degree}{buckets}"
                rows.append(error_row(label, seed, factor * wobble))
                rows.append(error_row(f"one power, degree {degree}{one}", seed, 1.0))
    verdicts = errors.compare_buckets(rows)
    words = {verdict.sketch: verdict.word for verdict in verdicts}
    assert list(words.values()) == ["helps", "helps", "hurts", "hurts"]
    text = " ".join(findings.verdict_findings(verdicts))
    assert "no sketch, counts of cases. input: helps in 24, hurts in 0, unclear in 0" in text
    assert "mostly hurts" not in text
    assert "with Chebyshev polynomials it is lower in 2 of 2 cases (ratio 0.5" in text


def sketch_row(size: int, seed: int, error: float, seconds: float) -> buying.SketchRow:
    powers = variants.Powers(2, 2, 4, 3.0, 0.25)
    way = variants.AS_RUN
    return buying.SketchRow(1.0, 2.0, way, size, seed, powers, error, 0.0, seconds, 0.5, 0.9)


def test_equal_error_takes_the_smallest_size_that_every_seed_reaches() -> None:
    rows = [sketch_row(8, 0, 0.1, 1.0), sketch_row(8, 1, 0.3, 1.0)]
    rows += [sketch_row(16, 0, 0.1, 3.0), sketch_row(16, 1, 0.2, 2.0)]
    reached, not_reached = buying.equal_error(rows, targets=(0.2, 0.05))
    assert (reached.sketch_size, reached.error, reached.seconds) == (16, 0.2, 2.0)
    assert (reached.sdpa_seconds, reached.exact_share) == (0.5, 0.25)
    assert not_reached.sketch_size is None


def time_row(n: int, seconds: float) -> timing.TimeRow:
    return timing.TimeRow("gaussian", "M", n, 64, seconds, 2.0, 2, 2, 0.5, 0.1)


def test_factor_of_a_doubling_spans_longer_steps() -> None:
    rows = [time_row(100, 1.0), time_row(200, 3.0), time_row(800, 12.0)]
    assert timing.doublings(rows) == {"M, gaussian": [pytest.approx(3.0), pytest.approx(2.0)]}
    text = " ".join(findings.length_findings(rows))
    assert "by at most 3.00" in text and "worse than the mean of V" in text


def test_paper_formulas_by_hand() -> None:
    theory = timing.Theory(
        n=100, rank=17, size=8, largest_entry=0.5, reach=0.25, pairs=((2, 0.1), (4, 0.2)),
        polynomial_error=0.0,
    )  # fmt: skip
    assert theory.lemma == 100 * (2 + 4) * (17 * 8 + 64)
    assert theory.theorem == pytest.approx(100 * 0.25**3 * 64)
    log = math.log(100 / timing.DELTA)
    assert theory.epsilon == pytest.approx(math.sqrt(4 * log / 8))
    sums = math.sqrt(2 * log / 8) * math.exp(0.1) + math.sqrt(4 * log / 8) * math.exp(0.2)
    assert theory.bound == pytest.approx(sums * math.exp(0.75))


def test_theory_counts_exact_pairs_too() -> None:
    setting = inputs.draw("log-normal", 200, 0)
    method = sb.MultiThreshold(2.0, 1, 4)
    plan: HeadPlan = method.plan_head(inputs.only_head(setting))
    assert any(pair.kernel is None for pair in plan.pairs)
    assert len(timing.Theory.of(setting, method).pairs) == len(plan.pairs)


def test_fixed_buckets_do_not_change_with_the_length() -> None:
    for n in (100, 333):
        head = inputs.only_head(inputs.fixed_buckets(n, 8, timing.MAXIMA))
        plan = timing.METHOD.plan_head(head)
        assert len(plan.row_edges) == len(plan.key_edges) == len(timing.MAXIMA)


@pytest.mark.parametrize("name", inputs.DRAWS)
def test_inputs_have_the_stated_variance_and_follow_the_seed(name: str) -> None:
    first, again, other = (inputs.draw(name, 4000, seed) for seed in (1, 1, 2))
    assert torch.equal(first.query, again.query) and not torch.equal(first.query, other.query)
    spread = float(first.query.log_softmax(-1).isfinite().all())
    assert spread == 1.0
    expected = inputs.VARIANCE * (math.exp(2 * inputs.ROW_SPREAD**2) if name == "log-normal" else 1)
    # Student's t with three degrees of freedom has no fourth moment: its sample variance is loose
    assert float(first.query.var()) == pytest.approx(expected, rel=0.3)


def test_large_factors_and_vanishing_errors_are_readable() -> None:
    assert (tables.growth(2.0), tables.growth(16777216.0)) == ("2×", "2e+07×")
    assert (tables.brief(0.01234), tables.brief(1e-17), tables.brief(None)) == ("0.012", "0", "—")
