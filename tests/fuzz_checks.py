"""What must hold for a call with any valid input, and a reference that shares no code with it.

The reference is dense attention in NumPy's widest float (64 bits of mantissa on x86), so that its
own rounding, which is added to every tolerance, is far below that of float64 inputs.
"""

from __future__ import annotations

import math
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import supportbasis as sb
from fuzz_cases import REFUSED_MASKS, TURNS, Case, Inputs, build
from supportbasis.accuracy import certificate
from supportbasis.methods import auto
from supportbasis.plans import BucketHead, HeadPlan, PolynomialHead
from supportbasis.problem.validation import attention_problem
from supportbasis_studies import reference

Array = np.ndarray
WIDE = np.longdouble
UNIT = float(np.finfo(WIDE).eps) / 2


class Violation(AssertionError):
    """Something that must hold does not."""


def check(case: Case) -> int:
    """Run a case; raises a `Violation` that ends with its reproducer. Returns heads looked at."""
    try:
        with _steady_machine(case), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with np.errstate(all="ignore"):  # masked scores are -inf, as are logarithms of zero
                heads = _check(case)
        for warning in caught:
            text = str(warning.message)
            ours = issubclass(warning.category, UserWarning) and text.startswith("supportbasis:")
            _require(ours, f"warned {warning.category.__name__}: {text}")
    except Violation as violation:
        raise Violation(f"{violation}\n{case.reproducer}") from violation.__cause__
    except Exception as error:
        line = str(error).split("\n")[0]
        text = f"raised {type(error).__name__}: {line}"
        raise Violation(f"{text}\n{case.reproducer}") from error
    return heads


def _require(condition: object, text: str) -> None:
    if not condition:
        raise Violation(text)


@contextmanager
def _steady_machine(case: Case) -> Iterator[None]:
    """Plans that do not depend on the machine; a search at every length for one kind of `Auto`; no
    measured errors where only the bound is looked at."""
    before = (auto.PLANNING_SECONDS, auto.REUSED_SECONDS, auto.WORTHWHILE)
    measure = certificate.sampled_error
    os.environ["SUPPORTBASIS_DETERMINISTIC"] = "1"
    if case.check == "bound":  # nothing is measured: that would take half of the time
        certificate.sampled_error = lambda *arguments: (math.inf, math.inf)
    if case.method == "sb.Auto(0.1)":
        auto.PLANNING_SECONDS = auto.REUSED_SECONDS = {"cpu": -1.0}
        auto.WORTHWHILE = 0.0
    try:
        yield
    finally:
        certificate.sampled_error = measure
        auto.PLANNING_SECONDS, auto.REUSED_SECONDS, auto.WORTHWHILE = before


def _check(case: Case) -> int:
    inputs = build(case)
    before = [_memory(x) for x in inputs.tensors]
    try:
        result = _call(case, inputs, method=case.build_method)
    except sb.SupportBasisError as error:
        _check_refusal(case, inputs, error)
        return 0
    _require(case.mask not in REFUSED_MASKS or not case.m, f"a mask with {case.mask} was taken")
    truth = Truth.of(case, inputs)
    check_result(case, inputs, truth, result)
    heads = result.certificate.bound.numel()
    if case.check != "bound":
        again = _call(case, inputs, method=case.build_method)
        _require_same(again, result, "the same call twice")
    heads += EXTRAS[case.check](case, inputs, truth, result) or 0
    for name, x, bits in zip(
        ("query", "key", "value", "mask"), inputs.tensors, before, strict=False
    ):
        _require(_memory(x) == bits, f"{name} was changed")
    return heads


def _memory(x: Tensor) -> tuple[object, ...]:
    """Everything a call must leave as it is."""
    storage = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).numpy().tobytes()
    return storage, x.shape, x.stride(), x.storage_offset(), x._version


def _call(
    case: Case, inputs: Inputs, *, full: bool = True, **settings: object
) -> sb.Result | Tensor:
    query, key, value = inputs.query, inputs.key, inputs.value
    if case.run == "kernel_sum":
        return sb.kernel_sum(query, key, value, scale=case.scale, return_result=full, **settings)
    return sb.attention(
        query,
        key,
        value,
        inputs.mask,
        is_causal=case.causal,
        scale=case.scale,
        enable_gqa=case.gqa,
        return_result=full,
        implementation=case.implementation,
        **settings,
    )


# --- refusals ---------------------------------------------------------------------------------


def _check_refusal(case: Case, inputs: Inputs, error: sb.SupportBasisError) -> None:
    """An error of ours, in one line, for a reason."""
    text = str(error)
    _require("\n" not in text, f"an error of more than one line: {text}")
    if case.mask in REFUSED_MASKS and "attn_mask contains" in text:
        return
    if "overflow" in text and _may_overflow(case, inputs):
        return
    if "bucket pairs" in text and case.data in ("mixed", "heavy", "denormal", "huge"):
        return
    raise Violation(f"refused: {text}") from error


def _may_overflow(case: Case, inputs: Inputs) -> bool:
    """Whether scores, sums of values or an output come within a factor 16 of the largest number."""
    dtype = inputs.query.dtype
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    largest = torch.finfo(compute).max / 16
    query, key, value = (_largest(x) for x in inputs.tensors[:3])
    scale = abs(_scale(case))
    score = max(case.d * query * key * max(scale, 1.0), scale * max(query, key))
    score += _largest_bias(inputs)
    narrow = torch.finfo(dtype).max / 2
    return not (score < largest and value * max(1, case.m) < largest and value < narrow)


def _largest(x: Tensor) -> float:
    x = x.double().masked_fill(x == -math.inf, 0.0)
    return float(x.abs().max()) if x.numel() else 0.0


def _largest_bias(inputs: Inputs) -> float:
    mask = inputs.mask
    return 0.0 if mask is None or mask.dtype == torch.bool else _largest(mask)


def _scale(case: Case) -> float:
    return 1 / math.sqrt(case.d) if case.scale is None else case.scale


# --- the truth --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Truth:
    """Exact attention of every head, [heads, ...], and how far the reference itself may be off."""

    output: Array  # [heads, n, dv]
    lse: Array  # [heads, n]; -inf: nothing may be attended to
    largest: Array  # [heads]: max|V|
    reach: Array  # [heads]: no score is larger
    rounding: Array  # [heads]: relative error of the reference's weights

    @staticmethod
    def of(case: Case, inputs: Inputs) -> Truth:
        query, key, value = _by_heads(case, inputs)
        scale = WIDE(_scale(case))
        score = np.matmul(query, key.swapaxes(-1, -2)) * scale
        power = getattr(case.build_method, "power", None)
        if power is not None:
            score = power * np.log(np.abs(score))
        log_weight = _log_weight(case, inputs, score.shape)
        score = score + log_weight
        top = score.max(-1, initial=-np.inf)
        unit = np.where(np.isfinite(top), top, 0)
        weight = np.exp(score - unit[..., None])
        total = weight.sum(-1)
        seen = total > 0
        lse = np.where(seen, np.log(total) + unit, -np.inf)
        output = np.matmul(weight, value) / np.where(seen, total, 1)[..., None]
        norms = [np.sqrt(np.square(x).sum(-1)).max(-1, initial=0) for x in (query, key)]
        reach = np.abs(scale) * norms[0] * norms[1]
        score = reach if power is None else _power_error(power, reach, log_weight, lse)
        rounding = _own_rounding(case, inputs, score)
        return Truth(output, lse, np.abs(value).max((-1, -2), initial=0), reach, rounding)


def _power_error(power: int, reach: Array, log_weight: Array, lse: Array) -> Array:
    """What an error e of every score, over e / reach, does to a sum of w |z|^p: at most
    p (sum w / sum w |z|^p)^(1/p) of it, by Hölder's inequality; the worst row of each head."""
    mass = np.log(np.exp(log_weight).sum(-1))
    seen = np.isfinite(lse) & np.isfinite(mass)
    share = np.where(seen, np.exp(np.where(seen, mass - lse, 0) / power), 0).max(-1, initial=0)
    return power * reach * share + power * 100


def _own_rounding(case: Case, inputs: Inputs, score: Array) -> Array:
    """expm1 of twice the error of a score, and gamma of the sum over keys, at `UNIT`."""
    score = score * (case.d + 4) + 4 * _largest_bias(inputs)
    return np.minimum(np.expm1(np.minimum(2 * UNIT * score, 1)) + UNIT * (2 * case.m + 8), 1)


def _by_heads(case: Case, inputs: Inputs) -> list[Array]:
    """Query, key and value as [heads, tokens, dim], repeated where heads share keys."""
    tensors = [x.detach() for x in inputs.tensors[:3]]
    if case.gqa:
        heads = case.leading[-1]
        tensors[1:] = [x.repeat_interleave(heads // x.shape[-3], -3) for x in tensors[1:]]
    return [_wide(x.expand(*case.leading, *x.shape[-2:]), 2) for x in tensors]


def _wide(x: Tensor, dims: int) -> Array:
    """Heads flattened, in the widest float."""
    count = math.prod(x.shape[: x.dim() - dims])
    return x.detach().double().reshape(count, *x.shape[x.dim() - dims :]).numpy().astype(WIDE)


def _log_weight(case: Case, inputs: Inputs, shape: tuple[int, ...]) -> Array:
    weight = np.zeros(shape, dtype=WIDE)
    mask = inputs.mask
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.where(mask, 0.0, -math.inf)
        weight = weight + _wide(mask.expand(*case.leading, case.n, case.m), 2)
    if case.causal:
        weight[:, ~np.tri(case.n, case.m, dtype=bool)] = -np.inf
    return weight


# --- what a result must be --------------------------------------------------------------------


def check_result(
    case: Case, inputs: Inputs, truth: Truth, result: sb.Result, *, own_plan: bool = True
) -> None:
    """Finite, within its bound, with the right lse; ``own_plan``: made for these inputs."""
    output = _wide(result.output, 2)
    lse = _wide(result.lse, 1)
    bound = _wide(result.certificate.bound.reshape(-1), 0)
    _require(result.output.dtype == case.torch_dtype, f"the output is {result.output.dtype}")
    _require(np.isfinite(output).all(), "the output is not finite")
    _require(not np.isnan(lse).any() and not (lse == np.inf).any(), "lse is NaN or +inf")
    _require(not np.isnan(bound).any() and (bound >= 0).all(), "the bound is NaN or negative")
    error = _errors(case, truth, result, output)
    allowed = bound + 2 * truth.rounding
    worst = int(np.argmax(error - allowed)) if error.size else 0
    _require(
        (error <= allowed).all(),
        f"the bound is violated: {error[worst] if error.size else 0:.4g} > "
        f"{bound[worst] if error.size else 0:.4g} in head {worst}",
    )
    _check_measured(case, inputs, truth, result, output)
    _check_rows(case, truth, result, lse, bound)
    if own_plan:
        _check_lse(case, truth, result, lse, bound)


def _errors(case: Case, truth: Truth, result: sb.Result, output: Array) -> Array:
    """The error of each head in the bound's units: max|V|, and for kernel sums each row's sum."""
    if case.run == "kernel_sum":
        unit = _wide(result.log_scale.reshape(-1), 0)[:, None] - truth.lse
        output = np.where(output == 0, 0, output * np.exp(unit)[..., None])
    error = np.abs(output - truth.output).max((-1, -2), initial=0)
    _require((error[truth.largest == 0] == 0).all(), "values of zero gave something else")
    return error / np.where(truth.largest > 0, truth.largest, 1)


def _check_measured(
    case: Case, inputs: Inputs, truth: Truth, result: sb.Result, output: Array
) -> None:
    """Where all rows were compared, the measured error is the true one.

    Its own reference is float64: of weights that err by r the error of a row is at most 2 r
    max|V|, so the norm of them all at most that times sqrt(n dv).
    """
    given = result.certificate
    if case.run != "attention" or given.rows != case.n or not output.size:
        return
    limit = _wide(given.limit.reshape(-1), 0)
    error, size = (
        np.sqrt(np.square(x).sum((-1, -2))) for x in (output - truth.output, truth.output)
    )
    slack = truth.rounding * 2.0**-53 / UNIT
    if case.mask == "wide bias" and case.dtype != "float64":
        slack = slack + 2.0**-23 * _largest(inputs.mask)  # the bias that was taken is float32
    slack = slack * math.sqrt(case.n * case.dv) * truth.largest
    counted = given.invalid_rows.reshape(-1).numpy() > 0  # they have a bound of 1 at least
    wrong = ~counted & (size > 4 * slack) & (error - 4 * slack > limit * size * (1 + 1e-6))
    _require(not wrong.any(), "the measured error is below the true one")


def _check_rows(case: Case, truth: Truth, result: sb.Result, lse: Array, bound: Array) -> None:
    """lse is -inf where nothing may be attended to, and in rows that are counted as invalid."""
    dead, given = truth.lse == -np.inf, lse == -np.inf
    counts = result.certificate
    lost = (counts.invalid_rows - counts.fallback_rows).reshape(-1).numpy()
    if "Power" in case.method:  # weights of zero are no mask
        dead = dead & given
    if case.run == "kernel_sum":  # a sum that is not positive is one, but has no logarithm
        dead = given & (dead | ~(bound < 1)[:, None])
    _require((given | ~dead).all(), "a row without keys has a finite lse")
    silent = (given & ~dead).sum(-1) > lost
    far = truth.lse < -0.9 * torch.finfo(result.lse.dtype).max
    _require(not (silent & ~far.any(-1)).any(), "lse is -inf in rows that nobody counts")


def _check_lse(case: Case, truth: Truth, result: sb.Result, lse: Array, bound: Array) -> None:
    """|lse - exact| is what distorted weights and rounding can do to a sum.

    If every weight is exact times f in [lo, hi], so is the sum. Rounding changes it by a factor
    1 ± eta, where the bound is at least 2 eta (attention) or eta (kernel sums). The logarithm and
    the unit it is added to are rounded in lse's dtype.
    """
    unit = torch.finfo(result.lse.dtype).eps
    eta = bound / 2 if case.run == "attention" else bound
    for h, plan in enumerate(result.plan.heads):
        span = _log_distortion(plan)
        if span is None or not eta[h] < 0.5 or truth.largest[h] == 0:  # then the bound is 0
            continue
        seen = np.isfinite(truth.lse[h]) & (lse[h] > -np.inf)
        given, exact = lse[h][seen], truth.lse[h][seen]
        slack = eta[h] + eta[h] ** 2 + 2 * truth.rounding[h]  # -log(1 - x) <= x + x^2 below 0.5
        slack = slack + unit * (2 * np.abs(exact) + 2 * math.log(case.m + 1) + 4)
        off = given - exact
        _require(
            ((off >= span[0] - slack) & (off <= span[1] + slack)).all(),
            f"lse is off by {np.abs(off).max(initial=0):.4g} in head {h}",
        )


def _log_distortion(plan: HeadPlan) -> tuple[float, float] | None:
    """Proved range of log(given weight / exact weight); None where there is none."""
    if plan.kind in ("exact", "power") and not plan.is_sketched:
        return 0.0, 0.0
    if plan.is_sketched or plan.kind not in ("polynomial", "single-threshold", "multi-threshold"):
        return None
    if isinstance(plan, PolynomialHead):
        ranges = [plan.polynomial.log_ratio]
    else:
        assert isinstance(plan, BucketHead)
        ranges = [pair.kernel.log_ratio for pair in plan.pairs if pair.kernel is not None]
    if plan.kind != "polynomial":
        ranges.append((0.0, 0.0))  # exact pairs
    low, high = min(r[0] for r in ranges), max(r[1] for r in ranges)
    return None if low == -math.inf else (low, high)


def _require_same(given: sb.Result, first: sb.Result, what: str) -> None:
    _require(torch.equal(given.output, first.output), f"another output: {what}")
    _require(torch.equal(given.lse, first.lse), f"another lse: {what}")


# --- what is looked at besides ----------------------------------------------------------------


def _nothing(case: Case, inputs: Inputs, truth: Truth, result: sb.Result) -> None:
    return


def _plain(case: Case, inputs: Inputs, truth: Truth, result: sb.Result) -> None:
    """The call without a result: the same within twice the bound, and bit for bit where the engine
    runs (exact heads run through another kernel of PyTorch)."""
    try:
        output = _call(case, inputs, full=False, method=case.build_method)
    except sb.InputError as error:
        _require(case.run == "kernel_sum" and "overflow" in str(error), f"refused: {error}")
        return
    _require(output.isfinite().all(), "the output is not finite")
    if case.run == "attention":
        _check_close(truth, result, output, "without a result")


def _check_close(truth: Truth, result: sb.Result, output: Tensor, what: str) -> None:
    if result.implementation == "eager":
        _require(torch.equal(output, result.output), f"another output: {what}")
        return
    bound = _wide(result.certificate.bound.reshape(-1), 0)
    error = np.abs(_wide(output, 2) - _wide(result.output, 2)).max((-1, -2), initial=0)
    _require((error <= 2 * bound * truth.largest).all(), f"another output: {what}")


def _layout(case: Case, inputs: Inputs, truth: Truth, result: sb.Result) -> None:
    """Contiguous copies give the same: within the bound, and bit for bit unless a dim is 1: PyTorch
    takes a product with one column in another order where its rows are not adjacent."""
    mask = None if inputs.mask is None else inputs.mask.contiguous()
    if case.mask == "expanded":
        mask = inputs.mask
    copies = [x.contiguous() for x in inputs.tensors[:3]]
    other = _call(case, Inputs(*copies, mask), method=case.build_method)
    check_result(case, inputs, truth, other)
    if result.implementation == "eager" and 1 not in (case.n, case.m, case.d, case.dv):
        _require_same(other, result, "of contiguous inputs")


def _plan(case: Case, inputs: Inputs, truth: Truth, result: sb.Result) -> None:
    """A plan used again, saved and loaded gives the same bits."""
    _require_same(_call(case, inputs, plan=result.plan), result, "with its plan")
    output = _call(case, inputs, full=False, plan=result.plan)
    _check_close(truth, result, output, "with its plan, without a result")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        result.plan.save(path)
        loaded = sb.Plan.load(path)
    _require_same(_call(case, inputs, plan=loaded), result, "with a loaded plan")
    _require(
        torch.equal(_call(case, inputs, full=False, plan=loaded), output),
        "another output: with a loaded plan, without a result",
    )


def _other_tokens(case: Case, inputs: Inputs, truth: Truth, result: sb.Result) -> int:
    """A plan used on other tokens: its bound is that of those tokens."""
    other = build(case, turn=1)
    try:
        again = _call(case, other, plan=result.plan)
    except sb.SupportBasisError as error:
        _check_refusal(case, other, error)
        return 0
    check_result(case, other, Truth.of(case, other), again, own_plan=False)
    return again.certificate.bound.numel()


def _bound(case: Case, inputs: Inputs, truth: Truth, result: sb.Result) -> int:
    """More calls with other tokens and the same plan; kernel sums make a new one."""
    settings = {"plan": result.plan}
    if case.run == "kernel_sum" or case.mask in ("pairs", "bias of pairs"):
        settings = {"method": case.build_method}
    heads = 0
    for turn in range(1, TURNS):
        other = build(case, turn)
        try:
            again = _call(case, other, **settings)
        except sb.SupportBasisError as error:
            _check_refusal(case, other, error)
            continue
        check_result(case, other, Truth.of(case, other), again, own_plan=False)
        heads += again.certificate.bound.numel()
    return heads


def _causality(case: Case, inputs: Inputs, truth: Truth, result: sb.Result) -> None:
    """Later keys and values change nothing before them: not a bit, with a plan.

    They are turned round (k to -k), which leaves all norms, and with them every unit, alone.
    """
    known = ("exact", "polynomial", "single-threshold", "power")
    kinds = {head.kind for head in result.plan.heads}
    sketched = any(head.is_sketched for head in result.plan.heads)
    if not case.causal or sketched or not kinds <= set(known) or case.m < 2 or not case.n:
        return
    first = 1 + case.seed % (case.m - 1)
    key, value = inputs.key.clone(), inputs.value.clone()
    key[..., first:, :], value[..., first:, :] = -key[..., first:, :], -value[..., first:, :]
    other = _call(case, replace(inputs, key=key, value=value), plan=result.plan)
    base = _call(case, inputs, plan=result.plan)
    same = torch.equal(other.output[..., :first, :], base.output[..., :first, :])
    _require(same, "the output of a row depends on later tokens")
    same = torch.equal(other.lse[..., :first], base.lse[..., :first])
    _require(same, "lse of a row depends on later tokens")


def _compile(case: Case, inputs: Inputs, truth: Truth, result: sb.Result) -> None:
    """A compiled call with the plan gives what the plain one gives."""
    if case.mask in ("pairs", "bias of pairs"):
        return
    torch._dynamo.reset()

    def call(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return _call(case, Inputs(query, key, value, mask), full=False, plan=result.plan)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    query, key, value = inputs.tensors[:3]
    output = compiled(query, key, value, inputs.mask)
    _check_close(truth, result, output, "compiled")


# --- gradients --------------------------------------------------------------------------------


def _gradients(case: Case, inputs: Inputs, truth: Truth, result: sb.Result) -> None:
    """Finite, and in float64 those of the dense reference of the same plan."""
    if case.m == 0 or not result.output.numel() or _steep(case, inputs, truth):
        return
    leaves = [x.detach().clone().requires_grad_() for x in inputs.tensors[:3]]
    bias = inputs.mask
    by_bias = case.mask in ("bias", "bias with -inf") and case.seed % 2 == 0
    if by_bias:
        bias = inputs.mask.clone().requires_grad_()
        leaves.append(bias)
    given = _call(case, Inputs(*leaves[:3], bias), plan=result.plan)
    check_result(case, inputs, truth, given)
    generator = torch.Generator().manual_seed(case.seed)
    weight = torch.randn(given.output.shape, generator=generator).to(case.torch_dtype)
    loss = (given.output * weight).sum()
    if case.seed % 3 == 0:
        loss = loss + torch.where(given.lse > -math.inf, given.lse, 0.0).sum()
    own = torch.autograd.grad(loss, leaves)
    for name, grad in zip(("query", "key", "value", "mask"), own, strict=False):
        _require(grad.isfinite().all(), f"the gradient of {name} is not finite")
    if case.dtype == "float64" and not int(given.certificate.invalid_rows.sum()):
        _compare_gradients(case, inputs, truth, result, own, weight)


def _steep(case: Case, inputs: Inputs, truth: Truth) -> bool:
    """Whether a gradient may be too large for its dtype, or is one of rounding: its weights are
    formed again, and differ from the first by e^x where scores are rounded by x."""
    unit = torch.finfo(torch.float64 if case.dtype == "float64" else torch.float32).eps
    if unit * (case.d + 6) * (float(truth.reach.max(initial=0)) + _largest_bias(inputs)) > 1:
        return True
    query, key, value = (_largest(x) for x in inputs.tensors[:3])
    slope = max(1.0, max(query, key) * abs(_scale(case)))
    largest = slope * max(value, 1.0) * case.n * (case.dv + 1) * 100
    power = getattr(case.build_method, "power", 1)
    if (
        power > 1
        and _smallest_score(case, inputs) < torch.finfo(torch.float32).smallest_normal * 1e8
    ):
        return True  # d log z^p / dz is p / z
    return not largest * power < torch.finfo(case.torch_dtype).max


def _smallest_score(case: Case, inputs: Inputs) -> float:
    """The smallest |score| that is not zero, by float64."""
    query, key, _ = _by_heads(case, inputs)
    score = np.abs(np.matmul(query, key.swapaxes(-1, -2)) * WIDE(_scale(case)))
    return float(score[score > 0].min(initial=np.inf))


def _compare_gradients(
    case: Case,
    inputs: Inputs,
    truth: Truth,
    result: sb.Result,
    own: tuple[Tensor, ...],
    weight: Tensor,
) -> None:
    """With w the weights of a row, g the cotangent and G = 2 dv max|g| max|V| + 1,

        dq = scale sum_j w_j (g v_j - g o + 1) k_j,   dk_j = scale sum_i w_ij (...) q_i,

    so |dq| <= |scale| G max|k|, |dk| <= n |scale| G max|q|, |dv| <= n max|g|, and an error r of
    every weight and every factor moves them by no more than 4 r of that. The weights of a
    polynomial on [-R, R] carry the rounding of terms as large as e^R over sums as small as e^-R.
    """
    kinds = {head.kind for head in result.plan.heads}
    reach = float(truth.reach.max(initial=0))
    if not kinds <= {"exact", "polynomial", "single-threshold", "multi-threshold"}:
        return
    if reach > 6 or any(head.is_sketched for head in result.plan.heads):
        return
    if kinds != {"exact"} and not bool((result.certificate.bound < 0.5).all()):
        return
    leaves = [x.detach().clone().requires_grad_() for x in inputs.tensors[:3]]
    bias = inputs.mask if len(own) == 3 else inputs.mask.detach().clone().requires_grad_()
    problem = attention_problem(*leaves, bias, 0.0, case.causal, case.scale, case.gqa)
    output, lse = (problem.restore(x) for x in reference.execute(problem, result.plan))
    loss = (output * weight).sum()
    if case.seed % 3 == 0:
        loss = loss + torch.where(lse > -math.inf, lse, 0.0).sum()
    true = torch.autograd.grad(loss, leaves if len(own) == 3 else [*leaves, bias])
    query, key, value = (_largest(x) for x in inputs.tensors[:3])
    slope = abs(_scale(case)) * (2 * case.dv * _largest(weight) * value + 1)
    rows = case.n * math.prod(case.leading)  # heads may share keys, rows share a bias
    size = (slope * key, rows * slope * query, rows * _largest(weight), rows * slope)
    terms = case.d + case.m + 32
    relative = (
        4 * terms * 2.0**-53 * (1 + reach) * (1.0 if kinds == {"exact"} else math.exp(2 * reach))
    )
    for name, grad, exact, most in zip(
        ("query", "key", "value", "mask"), own, true, size, strict=False
    ):
        error = _largest(grad - exact)
        _require(
            error <= relative * most * 4 + 1e-300, f"the gradient of {name} is off by {error:.4g}"
        )


EXTRAS: dict[str, Callable[[Case, Inputs, Truth, sb.Result], int | None]] = {
    "nothing": _nothing,
    "plain": _plain,
    "layout": _layout,
    "plan": _plan,
    "other tokens": _other_tokens,
    "bound": _bound,
    "causality": _causality,
    "gradients": _gradients,
    "compile": _compile,
}
