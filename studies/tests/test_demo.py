"""``supportbasis demo``: what it writes and says, on generated inputs and on the user's tensors."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import supportbasis as sb
from comparison_cases import (  # noqa: F401
    MACHINE,
    NUMBERS,
    assert_stands_alone,
    invoke,
    read,
    row,
    short,
)
from supportbasis_studies.comparison import demo, measure, settings, tables

safetensors_torch = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.usefixtures("short")


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


@pytest.mark.parametrize("n", [1, 0, -5, "many"])
def test_demo_needs_at_least_two_tokens(n: object) -> None:
    code, text = invoke("demo", "--n", n)
    assert code == 2
    assert "--n" in text


def test_a_folder_that_cannot_be_written_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for command in ("demo", "bench"):
        code, text = invoke(command, "--out", tmp_path / "file" / "out")
        assert code == 2
        assert "--out: cannot write to" in text


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


def test_length_and_own_tensors_exclude_each_other(tmp_path: Path) -> None:
    code, text = invoke("demo", "--n", 64, "--qkv", tmp_path / "a.safetensors")
    assert code == 2
    assert "leave it out with --qkv" in text


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
    assert "Refusing() lost the answer" in demo.findings([refused, exact])
    assert "—" in tables.measurement_table("", [refused]).lines[0]
    demo.plot_errors([refused, exact], "two", tmp_path / "two.png")


def test_findings_come_from_the_numbers() -> None:
    mean = row(method="mean(V)", bound=None, cost=None, relative_error=0.5)
    slow, fast = row(ratio=1.5), row(method="Polynomial(1)", ratio=7.0, bound=math.inf)
    exact = row(method="Auto(1e-2)", ratio=9.0, cost=1.0, relative_error=1e-7)
    text = demo.findings([mean, slow, fast, exact])
    assert "was Polynomial(1): 7× as fast as SDPA" in text
    assert "no certified bound" in text
    assert "mean of V alone is off by 50 %" in text
    assert "Auto(1e-3) at 0.5×" in demo.findings([row(ratio=0.5)])
    assert "No approximation came within" in demo.findings([row(relative_error=0.05)])
    assert "Auto(1e-3) lost" in demo.findings([row(relative_error=math.nan)])
