"""A slice of the fuzzer (`make fuzz` runs more), what it has found so far, and its own teeth."""

import math
from dataclasses import replace

import pytest
import torch

import fuzz
import supportbasis as sb
from fuzz import Case, Violation, check, draw, draw_bound
from supportbasis.accuracy import certificate
from supportbasis.engine import execute

CHUNKS, SIZE = 8, 50


@pytest.mark.parametrize(
    "chunk", [0, 1, *(pytest.param(x, marks=pytest.mark.slow) for x in range(2, CHUNKS))]
)
def test_random_calls(chunk):
    for number in range(chunk * SIZE, (chunk + 1) * SIZE):
        case = draw(0, number)
        if case.check != "compile":  # below, and slow
            check(case)


@pytest.mark.parametrize("number", range(3))
def test_bounds_of_many_small_heads(number):
    assert check(replace(draw_bound(0, number), leading=(1, 20))) > 0


@pytest.mark.parametrize("method", ["sb.Polynomial(2)", "sb.SingleThreshold(1.0, 2)"])
def test_compiled_calls(method):
    check(Case(method, check="compile", leading=(2,), n=7, m=9, causal=True))


FOUND = {
    "a mask for no queries": Case(n=0, m=1, d=1, dv=1, mask="bias of pairs"),
    "sums of zero have no unit": Case(
        "sb.Polynomial(1)", "kernel_sum", leading=(), n=4, m=3, data="large", values="zeros",
        scale=8.0,
    ),
    "rounding of the unit of huge sums": Case(
        run="kernel_sum", dtype="float64", leading=(), m=3, d=2, dv=1, values="huge",
        seed=335832214,
    ),
    "the unit of tiny sums": Case(
        run="kernel_sum", leading=(), n=2, m=17, d=8, dv=8, values="denormal", seed=1756595441
    ),
    "factors that vanish before huge sums do": Case(
        run="kernel_sum", leading=(2, 3), n=17, m=1, d=4, dv=4, values="huge", scale=-1.0,
        seed=969122739,
    ),
    "infinite rounding stays infinite": Case(
        "sb.MultiThreshold(2.0, 1)", "kernel_sum", leading=(), n=2, m=8, d=1, dv=1, scale=1e20,
        seed=1711943260,
    ),
    "squares of tiny errors": Case(
        "sb.MultiThreshold(math.inf, 2)", dtype="float64", leading=(), d=1, dv=4,
        values="denormal", seed=815360024,
    ),
    "squares of huge errors": Case(
        "sb.BlockSupport(0.5, block_size=16, strict=True)", check="plan", dtype="float64",
        n=111, m=111, d=2, dv=2, data="integers", values="huge", seed=2076517730,
    ),
    "outputs beyond float16": Case(
        "sb.Polynomial(2)", check="bound", dtype="float16", leading=(1, 50), n=8, m=10, d=1,
        data="large", values="mixed", scale=-1.0, seed=1571734888,
    ),
    "a loaded frame": Case(
        "sb.Auto(0.1)", check="plan", dtype="bfloat16", n=257, m=257, d=8, dv=1, seed=456429175
    ),
    "slopes on a tiny range": Case(
        "sb.MultiThreshold(2.0, 1)", check="gradients", leading=(), n=8, m=8, d=1, dv=1,
        data="denormal", seed=1680261345,
    ),
    "covariances of huge tokens": Case(
        "sb.BlockSupport(tolerance=0.1, block_size=8)", dtype="float64", leading=(), n=257, m=111,
        d=4, dv=1, data="huge", seed=623349155,
    ),
    "lists of values without entries": Case(
        "sb.BlockSupport(0.5, block_size=16, strict=True)", n=111, m=111, d=4, dv=0
    ),
    "a scale that float32 takes for zero": Case(causal=True, scale=1e-300),
    "gradients of a scale of zero": Case(
        check="gradients", leading=(), m=2, d=1, data="huge", values="mixed", scale=0.0, seed=18
    ),
    "entries without a variance": Case(
        "sb.SingleThreshold('sub-gaussian', 2)", dtype="float64", leading=(), n=3, m=17, d=2,
        dv=2, data="huge", seed=2066814913,
    ),
    "powers of scores that overflow": Case(
        "sb.PowerAttention(6)", leading=(), n=1, m=17, d=2, dv=1, data="huge", seed=922480083
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FOUND.values(), ids=FOUND)
def test_what_was_found_before(case):
    check(case)


METHODS = [sb.Exact(), sb.SingleThreshold(1.0, 2), sb.MultiThreshold(2.0, 1), sb.PowerAttention(2)]


@pytest.mark.filterwarnings("ignore:supportbasis. heads")  # that leave the range of their plan
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_scores_that_overflow_downwards_are_refused(method, causal):
    query = torch.full((1, 1, 3, 2), 1e30)
    for plan in (None, sb.plan(query / 1e30, -query / 1e30, is_causal=causal, method=method)):
        settings = {"method": method} if plan is None else {"plan": plan}
        with pytest.raises(sb.InputError, match="overflows"):
            sb.attention(query, -query, query, is_causal=causal, **settings)


def test_values_that_overflow_leave_lse_alone_and_are_refused_in_sums():
    query, key = torch.zeros(1, 1, 2, 3), torch.zeros(1, 1, 4, 3)
    value = torch.tensor([3e38, 3e38, -3e38, -3e38]).reshape(1, 1, 4, 1)
    result = sb.attention(query, key, value, method=sb.Exact(), return_result=True)
    torch.testing.assert_close(result.lse, torch.full((1, 1, 2), math.log(4)))
    with pytest.raises(sb.InputError, match="overflows"):
        sb.kernel_sum(query, key, value.abs(), method=sb.MultiThreshold(), return_result=True)


def test_the_fuzzer_sees_a_bound_that_is_too_small(monkeypatch):
    case = Case("sb.Polynomial(2)", n=9, m=9)
    check(case)
    monkeypatch.setattr(certificate, "error_bound", lambda *given: 1e-12)
    with pytest.raises(Violation, match="the bound is violated") as caught:
        check(case)
    code = str(caught.value).split("\n", 1)[1]
    assert "check(Case(method='sb.Polynomial(2)', n=9, m=9))" in code
    with pytest.raises(Violation, match="the bound is violated"):
        exec(code, {})


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (lambda outcome: outcome.lse.add_(1e-3), "lse is off"),
        (lambda outcome: outcome.output.mul_(1.1), "the bound is violated"),
        (lambda outcome: outcome.output[..., 0, 0].fill_(math.nan), "overflows"),
        (lambda outcome: outcome.output.add_(1e-5 * torch.rand(1)), "the same call twice"),
    ],
)
def test_the_fuzzer_sees_a_wrong_result(monkeypatch, change, seen):
    run_head = execute.run_head

    def changed(head, plan, basis, outcome, at):
        run_head(head, plan, basis, outcome, at)
        change(outcome)

    case = Case("sb.MultiThreshold(2.0, 2)", n=9, m=9, data="small")
    check(case)
    monkeypatch.setattr(execute, "run_head", changed)
    with pytest.raises(Violation, match=seen):
        check(case)


def test_a_stopped_run_goes_on_where_it_was(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(fuzz, "FOLDER", tmp_path)
    monkeypatch.setattr(fuzz, "CHUNK", 3)
    numbers = []
    monkeypatch.setitem(fuzz.DRAW, "all", lambda seed, number: numbers.append(number) or Case())
    assert fuzz.main(["--cases", "5"]) == 0
    assert fuzz.main(["--cases", "9", "--resume"]) == 0
    assert numbers == list(range(9))
    assert "9 of 9 cases" in capsys.readouterr().out


def test_failures_of_one_kind_are_one_and_made_simpler(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(fuzz, "FOLDER", tmp_path)
    monkeypatch.setitem(
        fuzz.DRAW, "all", lambda seed, number: Case(n=20 + number, m=3, causal=True)
    )

    def fails(case):
        if case.n > 10:
            raise Violation(f"{case.n} is too many\n{case.reproducer}")
        return 1

    monkeypatch.setattr(fuzz, "check", fails)
    assert fuzz.main(["--cases", "4"]) == 1
    printed = capsys.readouterr().out
    assert "4 failures (1 kinds)" in printed
    assert "check(Case(leading=(), n=11, m=1, d=1, dv=1))" in printed
