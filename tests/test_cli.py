"""The command line: what it writes, what it says, and what it leaves alone."""

from __future__ import annotations

import csv
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

import supportbasis as sb

pytest.importorskip("matplotlib")
safetensors_torch = pytest.importorskip("safetensors.torch")

from supportbasis.cli import app as app_module  # noqa: E402
from supportbasis.cli import bench, demo, density, measure, report, settings  # noqa: E402
from supportbasis.cli.app import app  # noqa: E402
from supportbasis.cli.plots import plot_errors, plot_times  # noqa: E402

MACHINE = ["date", "device", "cpu", "cores", "torch", "version", "commit"]
NUMBERS = ["seconds", "baseline", "baseline_seconds", "ratio", "relative_error", "max_error"]
NUMBERS += ["bound", "cost", "repeats"]
TINY = bench.Sizes((128, 256), 256, 256, (64, 256), 0.01, 0.01)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds of every call, whatever the machine."""
    monkeypatch.setattr(demo, "BUDGET", 0.01)
    monkeypatch.setattr(measure, "MOST_ROUNDS", 2)


def invoke(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, " ".join(result.output.split())


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def row(**changes: object) -> measure.Measurement:
    """A measurement with round numbers."""
    plain = measure.Measurement(
        name="job",
        method="Auto(1e-3)",
        n=1024,
        d=64,
        causal=False,
        seconds=1.0,
        baseline="SDPA",
        baseline_seconds=2.0,
        ratio=2.0,
        relative_error=1e-4,
        max_error=1e-5,
        bound=1e-2,
        cost=0.5,
        repeats=2,
    )
    return replace(plain, **changes)


def assert_stands_alone(page: str) -> None:
    """Nothing is fetched: every source is inline, and no address appears."""
    assert not re.search(r"https?:|file:|<script|<link|@import|url\(", page)
    sources = re.findall(r'(?:src|href)="([^"]{0,30})', page)
    assert sources
    assert all(source.startswith("data:image/png;base64,") for source in sources)


# ---- demo ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo_out(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """One run of the demo that several tests look at."""
    out = tmp_path_factory.mktemp("demo") / "new" / "folder"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "BUDGET", 0.01)
        patch.setattr(measure, "MOST_ROUNDS", 2)
        code, text = invoke("demo", "--n", 256, "--out", out)
    assert code == 0
    return out, text


def test_demo_writes_report_numbers_and_pictures(demo_out: tuple[Path, str]) -> None:
    out, text = demo_out
    names = {path.name for path in out.iterdir()}
    pictures = {"error-gaussian.png", "error-outliers.png", "error-heavy-tailed.png"}
    assert names == pictures | {"supports.png", "report.html", "results.csv"}
    assert all((out / name).read_bytes()[:4] == b"\x89PNG" for name in names if "png" in name)
    assert "report.html" in text and "results.csv" in text


def test_demo_rows_are_tidy_and_start_with_the_mean_of_v(demo_out: tuple[Path, str]) -> None:
    rows = read(demo_out[0] / "results.csv")
    head = [*MACHINE, "setting", "method", "n", "d", "causal", *NUMBERS, "ran", "note"]
    assert list(rows[0]) == head
    assert len(rows) == 27
    for setting in ("gaussian", "outliers", "heavy-tailed"):
        methods = [r["method"] for r in rows if r["setting"] == setting]
        assert methods[:4] == ["mean(V)", "SDPA", "Polynomial(1)", "Polynomial(2)"]
        assert methods[-2:] == ["Auto(1e-3)", "Auto(1e-2)"]
        assert len(methods) == 9
    for r in rows:
        assert float(r["seconds"]) > 0
        assert float(r["ratio"]) == pytest.approx(
            float(r["baseline_seconds"]) / float(r["seconds"])
        )
        assert (r["bound"] == "") == (r["method"] in ("mean(V)", "SDPA"))


def test_demo_errors_respect_the_bound(demo_out: tuple[Path, str]) -> None:
    for r in read(demo_out[0] / "results.csv"):
        if r["bound"]:
            assert float(r["max_error"]) <= float(r["bound"])


def test_demo_shows_the_failure_of_one_polynomial_on_outliers(demo_out: tuple[Path, str]) -> None:
    out, text = demo_out
    by_method = {r["method"]: r for r in read(out / "results.csv") if r["setting"] == "outliers"}
    assert float(by_method["Polynomial(2)"]["relative_error"]) > 0.1
    assert by_method["Polynomial(2)"]["bound"] == "inf"
    assert float(by_method["SingleThreshold(0.4, degree=2)"]["relative_error"]) < 1e-3
    assert "Polynomial(1), Polynomial(2) lost the answer" in text


def test_demo_report_stands_alone_and_names_no_folder(demo_out: tuple[Path, str]) -> None:
    page = (demo_out[0] / "report.html").read_text(encoding="utf-8")
    assert_stands_alone(page)
    assert page.count("<img ") == 4
    assert page.count('class="finding"') == 3
    assert str(demo_out[0]) not in page
    for part in ("Machine and versions", sb.__version__, torch.__version__, "mean(V)"):
        assert part in page


def test_demo_causal_is_measured_against_causal_attention(tmp_path: Path) -> None:
    code, _ = invoke("demo", "--n", 128, "--causal", "--out", tmp_path)
    assert code == 0
    rows = read(tmp_path / "results.csv")
    assert {r["causal"] for r in rows} == {"True"}
    assert {r["baseline"] for r in rows} == {"SDPA causal"}
    exact = [r for r in rows if r["method"] == "SDPA causal"]
    assert all(float(r["relative_error"]) < 1e-5 for r in exact)


# ---- the user's tensors ----------------------------------------------------------------------


def save(path: Path, **tensors: torch.Tensor) -> Path:
    safetensors_torch.save_file(tensors, path)
    return path


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("leading", [(), (2,), (2, 2)], ids=["tokens", "heads", "batch"])
def test_demo_takes_tensors_of_any_rank(tmp_path: Path, leading: tuple[int, ...]) -> None:
    x = random(*leading, 40, 8)
    file = save(tmp_path / "mine.safetensors", q=x, k=x.clone(), v=x.clone())
    code, _ = invoke("demo", "--qkv", file, "--out", tmp_path / "out")
    assert code == 0
    rows = read(tmp_path / "out" / "results.csv")
    assert {r["setting"] for r in rows} == {"mine"}
    assert {(r["n"], r["d"]) for r in rows} == {("40", "8")}
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert_stands_alone(page)
    assert "mine.safetensors" in page
    assert str(tmp_path) not in page


def test_shared_key_heads_serve_groups_of_query_heads(tmp_path: Path) -> None:
    q, k, v = random(4, 32, 8), random(2, 32, 8), random(2, 32, 8)
    setting = settings.load_qkv(save(tmp_path / "gqa.safetensors", q=q, k=k, v=v))
    expected = F.scaled_dot_product_attention(q[None], k[None], v[None], enable_gqa=True)
    exact = measure.ExactRows.of(setting, 0)
    assert max(exact.errors(expected)) < 1e-5


def test_missing_tensor_is_named_with_what_is_there(tmp_path: Path) -> None:
    file = save(tmp_path / "a.safetensors", q=random(8, 4), keys=random(8, 4), v=random(8, 4))
    code, text = invoke("demo", "--qkv", file, "--out", tmp_path / "out")
    assert code == 2
    assert "no tensor named k; it holds keys, q, v" in text
    assert not (tmp_path / "out").exists()


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"
    torch.save({"q": random(4, 4)}, file)
    code, text = invoke("demo", "--qkv", file, "--out", tmp_path / "out")
    assert code == 2
    assert "not a readable safetensors file" in text
    code, text = invoke("demo", "--qkv", tmp_path / "nowhere.safetensors")
    assert code == 2
    assert "there is no file" in text


def bad_tensors() -> dict[str, tuple[dict[str, torch.Tensor], str]]:
    x = random(8, 4)
    nan = x.clone()
    nan[3, 1] = math.nan
    return {
        "nan": ({"v": nan}, "v has 1 non-finite entries"),
        "integers": ({"q": torch.ones(8, 4, dtype=torch.int64)}, "expected floating point"),
        "vector": ({"k": random(8)}, "k has shape (8,)"),
        "one-token": ({"q": random(1, 4)}, "at least two tokens"),
        "dims": ({"q": random(8, 5)}, "q has dim 5 but k has dim 4"),
        "lengths": ({"v": random(9, 4)}, "k has 8 tokens but v has 9"),
        "heads": ({"q": random(3, 8, 4), "k": random(2, 8, 4)}, "they must agree"),
    }


@pytest.mark.parametrize("case", bad_tensors())
def test_tensors_that_cannot_be_used_are_explained(tmp_path: Path, case: str) -> None:
    changed, message = bad_tensors()[case]
    x = random(8, 4)
    tensors = {"q": x, "k": x.clone(), "v": x.clone()} | changed
    code, text = invoke("demo", "--qkv", save(tmp_path / "a.safetensors", **tensors))
    assert code == 2
    assert message in text


def test_a_method_that_refuses_the_tensors_is_a_line_of_its_own(tmp_path: Path) -> None:
    class Refusing(sb.Exact):
        def plan_head(self, head: object) -> object:
            raise sb.InputError("head dim is too large")

    setting = settings.gaussian(64)
    methods = {"Refusing()": Refusing(), "Exact()": sb.Exact()}
    refused, exact = measure.compare(setting, methods, budget=0.01, tick=lambda share: None)
    assert (refused.seconds, refused.relative_error, refused.ran) == (None, None, "failed")
    assert refused.note == "head dim is too large"
    assert exact.relative_error is not None and exact.relative_error < 1e-5
    assert "Refusing() lost the answer" in report.findings([refused, exact])
    assert "—" in report.html_table([refused])
    plot_errors([refused, exact], "two", tmp_path / "two.png")


# ---- options ---------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_written_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for command in ("demo", "bench"):
        code, text = invoke(command, "--out", tmp_path / "file" / "out")
        assert code == 2
        assert "--out: cannot write to" in text


@pytest.mark.parametrize("n", [1, 0, -5, "many"])
def test_demo_needs_at_least_two_tokens(n: object) -> None:
    code, text = invoke("demo", "--n", n)
    assert code == 2
    assert "--n" in text


def test_length_and_own_tensors_exclude_each_other(tmp_path: Path) -> None:
    code, text = invoke("demo", "--n", 64, "--qkv", tmp_path / "a.safetensors")
    assert code == 2
    assert "leave it out with --qkv" in text


def test_version() -> None:
    assert invoke("--version") == (0, f"supportbasis {sb.__version__}")


# ---- inputs and measurements -----------------------------------------------------------------


@pytest.mark.parametrize("make", settings.GENERATED, ids=lambda make: make.__name__)
def test_generated_inputs_follow_the_seed_alone(make: object) -> None:
    before = torch.get_rng_state()
    first, again, other = make(100, 1), make(100, 1), make(100, 2)
    assert torch.equal(torch.get_rng_state(), before)
    for name in ("query", "key", "value"):
        assert torch.equal(getattr(first, name), getattr(again, name))
        assert not torch.equal(getattr(first, name), getattr(other, name))


def test_generated_inputs_have_the_stated_spread() -> None:
    n = 4096
    plain, outlying, heavy = (make(n) for make in settings.GENERATED)
    assert float(plain.query.std()) == pytest.approx(0.1, rel=0.01)
    assert float(plain.value.std()) == pytest.approx(1.0, rel=0.01)
    for tokens in (outlying.query, outlying.key):
        assert int((tokens.abs().amax(-1) > 2).sum()) == 41  # 1 % of 4096
    assert not torch.equal(outlying.query.abs().amax(-1) > 2, outlying.key.abs().amax(-1) > 2)
    assert float(heavy.query.std()) == pytest.approx(0.1, rel=0.1)
    assert float(heavy.query.abs().max()) > 1  # ten standard deviations


@pytest.mark.parametrize("causal", [False, True])
def test_exact_rows_agree_with_float64_attention(causal: bool) -> None:
    setting = settings.gaussian(700, is_causal=causal)
    tensors = (setting.query.double(), setting.key.double(), setting.value.double())
    expected = F.scaled_dot_product_attention(*tensors, is_causal=causal)
    exact = measure.ExactRows.of(setting, 0)
    assert len(exact.rows) == 512
    assert max(exact.errors(expected)) < 1e-12
    relative, largest = exact.errors(2 * expected)
    assert relative == pytest.approx(1.0)
    wrong = expected[..., exact.rows, :].abs().max() / setting.value.abs().max()
    assert largest == pytest.approx(float(wrong))


def test_mean_of_v_is_attention_with_equal_weights() -> None:
    for causal in (False, True):
        setting = settings.gaussian(33, is_causal=causal)
        flat = replace(setting, query=torch.zeros_like(setting.query))
        contender = measure.mean_value(flat)
        contender.run()
        assert contender.output is not None
        assert max(measure.ExactRows.of(flat, 0).errors(contender.output)) < 1e-6


def test_warnings_become_notes() -> None:
    setting = settings.outliers(256)
    methods = {"Polynomial(2)": sb.Polynomial(2)}
    (measured,) = measure.compare(setting, methods, budget=0.01, tick=lambda share: None)
    assert "no usable denominator" in measured.note
    assert not measured.note.startswith("supportbasis")


def test_findings_come_from_the_numbers() -> None:
    mean = row(method="mean(V)", bound=None, cost=None, relative_error=0.5)
    slow, fast = row(ratio=1.5), row(method="Polynomial(1)", ratio=7.0, bound=math.inf)
    exact = row(method="Auto(1e-2)", ratio=9.0, cost=1.0, relative_error=1e-7)
    text = report.findings([mean, slow, fast, exact])
    assert "was Polynomial(1): 7× as fast as SDPA" in text
    assert "no certified bound" in text
    assert "mean of V alone is off by 50 %" in text
    assert "Auto(1e-3) at 0.5×" in report.findings([row(ratio=0.5)])
    assert "No approximation came within" in report.findings([row(relative_error=0.05)])
    assert "Auto(1e-3) lost" in report.findings([row(relative_error=math.nan)])


# ---- bench -----------------------------------------------------------------------------------


def test_bench_runs_every_work_and_appends_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "QUICK", TINY)
    code, text = invoke("bench", "--quick", "--out", tmp_path)
    assert code == 0
    rows = read(tmp_path / "results.csv")
    assert list(rows[0]) == [
        *MACHINE, "name", "method", "n", "d", "causal", *NUMBERS, "ran", "note"
    ]  # fmt: skip
    names = {r["name"] for r in rows}
    assert names == {job.name for job in bench.jobs(TINY)}
    assert {"single-n128", "causal-n256", "kde-256", "crossover-kde"} <= names
    assert "single-n256" in text and "crossover-single" in text
    assert_stands_alone((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert (tmp_path / "times.png").read_bytes()[:4] == b"\x89PNG"
    assert len(read(tmp_path / "crossover.csv")) == 7

    code, _ = invoke("bench", "--quick", "--only", "degree1", "--out", tmp_path)
    assert code == 0
    assert [r["name"] for r in read(tmp_path / "results.csv")][len(rows) :] == ["degree1-n256"] * 2


def test_bench_names_what_there_is(tmp_path: Path) -> None:
    code, text = invoke("bench", "--only", "nothing", "--out", tmp_path)
    assert code == 2
    for name in ("single-n8192", "single-n32768", "single-n131072", "degree1-n32768"):
        assert name in text
    for name in ("auto-n32768", "causal-n32768", "outliers-n32768", "kde-100k", "crossover-auto"):
        assert name in text


def test_quick_benchmarks_are_short() -> None:
    assert max(n for job in bench.jobs(bench.QUICK) for n in job.lengths) == 8192


def test_rows_are_not_appended_to_another_table(tmp_path: Path) -> None:
    (tmp_path / "results.csv").write_text("a,b\n1,2\n")
    with pytest.raises(sb.InputError, match="other columns"):
        report.write_csv(tmp_path / "results.csv", bench.Machine.here(), [row()], append=True)
    assert (tmp_path / "results.csv").read_text() == "a,b\n1,2\n"


def test_crossover_is_where_the_ratio_stays_above_one() -> None:
    def sweep(*ratios: float, cost: float = 0.5) -> bench.Crossover:
        rows = [row(n=512 * 2**i, ratio=ratio, cost=cost) for i, ratio in enumerate(ratios)]
        return bench.crossover("crossover-x", rows)

    assert sweep(0.5, 2.0, 3.0).n == pytest.approx(512 * math.sqrt(2))
    assert sweep(2.0, 0.5, 0.5, 1.0).n == pytest.approx(4096)
    assert sweep(1.5, 2.0).n == 512
    assert sweep(0.2, 0.9).n is None
    assert sweep(1.1, 1.2, cost=1.0).n is None  # nothing was approximated
    assert "not faster than SDPA up to n=1024" in str(sweep(0.2, 0.9))


def test_exact_density_sums_agree() -> None:
    points, data = random(50, 3), random(70, 3)
    expected = (points[:, None] - data).square().sum(-1).div(-2).exp().mean(1)
    expected = expected / (2 * math.pi) ** 1.5
    for form in (density.by_distance, density.by_products):
        assert torch.allclose(form(points, data, chunk=16), expected, rtol=1e-5)


def test_times_are_drawn_for_each_baseline(tmp_path: Path) -> None:
    rows = [row(n=n, baseline=name) for n in (512, 1024) for name in ("SDPA", "SDPA causal")]
    plot_times([*rows, row(seconds=None, ratio=None)], tmp_path / "times.png")
    assert (tmp_path / "times.png").stat().st_size > 1000


# ---- what an import costs --------------------------------------------------------------------


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    source = Path(sb.__file__).resolve().parents[1]
    environment = dict(os.environ, PYTHONPATH=str(source))
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )


def test_import_leaves_optional_packages_alone() -> None:
    names = ("triton", "transformers", "matplotlib", "typer", "rich", "safetensors")
    done = python(f"import sys, supportbasis; print([x for x in {names} if x in sys.modules])")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["typer", "rich", "matplotlib", "safetensors"])
def test_without_the_extra_the_command_says_what_to_install(name: str) -> None:
    code = (
        "import sys; sys.modules[sys.argv.pop(1)] = None; from supportbasis.cli import main; main()"
    )
    done = python(code, name, "demo")
    assert done.returncode == 1
    assert 'pip install "supportbasis[cli]"' in done.stderr
    assert name in done.stderr
    assert "Traceback" not in done.stderr


def test_module_is_the_command() -> None:
    done = python("import runpy; runpy.run_module('supportbasis', run_name='__main__')", "--help")
    assert done.returncode == 0, done.stderr
    assert "demo" in done.stdout and "bench" in done.stdout
