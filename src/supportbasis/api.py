"""The public functions. Each reads as the story of a call: inputs, plan, execute, result."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from numbers import Real

import torch
from torch import Tensor

from .accuracy.certificate import certify
from .cuda.runtime.noise import with_noise
from .engine import autograd, ranges, sdpa
from .engine.dispatch import check_implementation, groups, label
from .engine.execute import execute
from .errors import InputError
from .methods import Auto, Exact, Method, Polynomial, PowerAttention
from .methods.batches import plan_heads
from .plans import Plan
from .problem.checks import is_tracing
from .problem.problem import Problem
from .problem.result import Outcome, Result
from .problem.rounding import compute_dtype, unit_roundoff
from .problem.validation import attention_problem, check_tensors, kernel_problem, with_weights

LARGE_ERROR = 0.05  # measured, of a head's output: warned about where no error was asked for


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    method: Method | None = None,
    plan: Plan | None = None,
    return_result: bool = False,
    implementation: str = "auto",
) -> Tensor | Result:
    """Softmax attention in the form of ``torch.nn.functional.scaled_dot_product_attention``.

    ``query`` is [..., heads, n, d], ``key`` [..., heads, m, d], ``value`` [..., heads, m, dv]; the
    output is [..., heads, n, dv] in the input dtype. A boolean key mask or additive key bias
    ([..., 1, m], broadcastable) is native in every method, also together with ``is_causal``; any
    other mask, and dropout, runs exactly. ``method=None`` means ``Auto()``; a ``plan`` from
    `sb.plan` is reused as it is. ``return_result=True`` returns a `Result` with lse, plan and
    certificate.

    ``implementation="auto"`` runs Triton kernels on CUDA tensors where a head has kernels, and
    PyTorch operations elsewhere; "eager" sums without kernels; "triton" raises where they cannot
    run, and says why. A result says what ran. Where kernels run, a call with a plan looks at no
    entries, neither of inputs nor of sums: it waits for nothing and can be captured in a CUDA
    graph. Where entries decide how much there is to do (lists, fits, the large tokens of a loaded
    plan) the first call with a plan waits until it knows.

    Gradients flow through the output and the lse of a result to query, key, value and a key bias,
    in the time and memory order of the call itself. They are those of the function that ran, with
    its plan held fixed. ``torch.compile`` takes the call into a
    graph when it is given a plan, and leaves it outside otherwise.

    >>> import torch, supportbasis as sb
    >>> q, k, v = torch.randn(3, 1, 2, 128, 16).unbind(0)
    >>> sb.attention(q, k, v, is_causal=True).shape
    torch.Size([1, 2, 128, 16])
    """
    if torch.compiler.is_compiling():
        if not _fits_graph(attn_mask, dropout_p, plan, return_result):
            return torch.compiler.disable(attention)(
                query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa,
                method=method, plan=plan, return_result=return_result,
                implementation=implementation,
            )  # fmt: skip
    elif (
        isinstance(plan, Plan) and plan.is_exact and attn_mask is None and dropout_p == 0
        and method is None and not return_result and implementation == "auto"
    ):  # fmt: skip
        output = sdpa.plainly(query, key, value, is_causal, scale, enable_gqa, plan)
        if output is not None:
            return output
    implementation = check_implementation(implementation)
    query, key, value = _autocast(query, key, value)
    problem = attention_problem(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, finite=plan is None
    )
    plan = _the_plan(problem, method, plan, implementation)
    plan = plan.resolved(autograd.is_recorded(problem))
    outcome = _run(problem, plan, return_result, implementation)
    if return_result:
        return _result(problem, plan, outcome, implementation)
    return problem.restore(outcome.output)


def plan(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    method: Method | None = None,
) -> Plan:
    """What `attention` can do with inputs like these: a printable, reusable `Plan`.

    A plan that is asked for is taken to serve many calls: `Auto` searches for one from shorter
    inputs on than within a call without a plan, where the search has to pay at once.

    Without ``value``, a method that measures errors judges them with random values of dim d.
    """
    if value is None:
        check_tensors((query, key), ("query", "key"))
        generator = torch.Generator().manual_seed(0)
        random = torch.randn(key.shape, generator=generator)
        value = random.to(key.device, key.dtype)
    problem = attention_problem(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
    )
    return _the_plan(replace(problem, is_reused=True), method, None)


def kernel_sum(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    method: Method | None = None,
    return_result: bool = False,
) -> Tensor | Result:
    """The unnormalised sum A V with A = exp(scale Q K^T) (the paper's Algorithm 3).

    Sums that overflow the input dtype raise; ``return_result=True`` returns them as
    ``output * exp(log_scale)`` with one log_scale for each head, and never overflows.
    """
    problem = kernel_problem(query, key, value, scale)
    plan = _the_plan(problem, method, None)
    outcome = _run(problem, plan, return_result)
    if return_result:
        return _result(problem, plan, outcome)
    return _in_linear_units(problem, outcome, query.dtype)


def gaussian_kde(
    points: Tensor,
    data: Tensor,
    bandwidth: float | Tensor,
    *,
    weights: Tensor | None = None,
    method: Method | None = None,
    return_result: bool = False,
) -> Tensor | Result:
    """Gaussian kernel density of ``data`` [..., n, d] at ``points`` [..., m, d].

    ``sum_j w_j exp(-|x - y_j|^2 / 2 h^2) / (sum_j w_j (2 pi h^2)^(d/2))``, where the bandwidth h is
    a standard deviation: a number or one for each of the d dims. Returns [..., m].

    >>> import torch, supportbasis as sb
    >>> sb.gaussian_kde(torch.zeros(1, 1), torch.zeros(5, 1), 1.0)  # 1/sqrt(2 pi)
    tensor([0.3989])
    """
    problem, log_norm = _density_problem(points, data, bandwidth, weights)
    plan = _the_plan(problem, method, None)
    outcome = _run(problem, plan, return_result)
    result = _result(problem, plan, outcome) if return_result else None
    outcome.log_scale = outcome.log_scale - log_norm.reshape(outcome.log_scale.shape)
    density = _in_linear_units(problem, outcome, points.dtype).squeeze(-1)
    if result is None:
        return density
    lse = result.lse - log_norm.unsqueeze(-1)
    unit = torch.zeros_like(result.log_scale)
    return Result(density, lse, unit, plan, result.certificate, result.implementation)


def _density_problem(
    points: Tensor, data: Tensor, bandwidth: float | Tensor, weights: Tensor | None
) -> tuple[Problem, Tensor]:
    """exp(-|x-y|^2/2) = exp(<x,y>) exp(-|x|^2/2) exp(-|y|^2/2), centred and divided by h."""
    names = ("points", "data", "data")
    check = attention_problem(points, data, None, None, 0.0, False, 1.0, False, names=names)
    if not data.shape[-2]:
        raise InputError("data has no points; expected at least one")
    width = _check_bandwidth(bandwidth, points)
    data64 = data.double()
    centre = data64.mean(-2, keepdim=True)
    query, key = (points.double() - centre) / width, (data64 - centre) / width
    row_weight, log_weight = (-x.square().sum(-1) / 2 for x in (query, key))
    total = torch.full(check.leading, float(data.shape[-2]), dtype=torch.float64)
    total = total.to(data.device)
    if weights is not None:
        weight = _check_weights(weights, data)
        log_weight = log_weight + weight.log()
        total = weight.sum(-1).expand(check.leading)
    dtype = _density_dtype(points.dtype, query, key)
    query, key = query.to(dtype), key.to(dtype)
    problem = kernel_problem(query, key, query.new_ones(*key.shape[:-1], 1), 1.0, finite=False)
    problem = with_weights(problem, log_weight, row_weight)
    volume = (width.log() + math.log(2 * math.pi) / 2).expand(points.shape[-1]).sum()
    return problem, total.log() + volume


def _density_dtype(dtype: torch.dtype, query: Tensor, key: Tensor) -> torch.dtype:
    """float32 unless its rounding of <x, y> would show: the exponent -|x - y|^2/2 is a small
    difference of large numbers when points lie many bandwidths from their centre."""
    reach = sum(float(x.square().sum(-1).max()) for x in (query, key) if x.numel())
    rounding = reach * (query.shape[-1] + 6) * unit_roundoff(torch.float32)
    return torch.float64 if rounding > 1e-4 else compute_dtype(dtype)


def _check_bandwidth(bandwidth: float | Tensor, points: Tensor) -> Tensor:
    dim = points.shape[-1]
    if isinstance(bandwidth, bool) or not isinstance(bandwidth, (Real, Tensor)):
        raise InputError(f"bandwidth must be a number or a tensor, got {bandwidth!r}")
    if isinstance(bandwidth, Tensor) and (bandwidth.is_complex() or bandwidth.requires_grad):
        raise InputError("bandwidth must be a real tensor that does not require grad")
    width = torch.as_tensor(bandwidth, dtype=torch.float64, device=points.device)
    if width.shape not in ((), (1,), (dim,)):
        raise InputError(
            f"bandwidth has shape {tuple(width.shape)}; expected a number or one for each of "
            f"the {dim} dims"
        )
    if not bool((width.isfinite() & (width > 0)).all()):
        raise InputError(f"bandwidth must be finite and > 0, got {bandwidth!r}")
    return width


def _check_weights(weights: Tensor, data: Tensor) -> Tensor:
    if not isinstance(weights, Tensor) or not weights.is_floating_point():
        raise InputError(f"weights must be a floating-point tensor, got {weights!r}")
    if weights.requires_grad and torch.is_grad_enabled():
        raise InputError("weights requires grad, but densities have no gradients so far")
    if weights.is_nested or weights.layout != torch.strided:
        raise InputError("weights is a sparse or nested tensor; expected a dense one")
    if weights.device != data.device:
        raise InputError(f"weights is on {weights.device} but data is on {data.device}")
    try:
        expanded = weights.double().expand(data.shape[:-1])
    except RuntimeError:
        raise InputError(
            f"weights has shape {tuple(weights.shape)}; expected {tuple(data.shape[:-1])}"
        ) from None
    finite = bool((expanded.isfinite() & (expanded >= 0)).all())
    if not finite or not bool((expanded.sum(-1) > 0).all()):
        raise InputError("weights must be finite and >= 0, with a positive sum")
    return expanded


def _the_plan(
    problem: Problem, method: Method | None, plan: Plan | None, implementation: str = "auto"
) -> Plan:
    """The caller's plan once it is seen to fit, or a new one."""
    if method is not None and not isinstance(method, Method):
        raise InputError(f"method must be a method such as sb.Auto(), got {method!r}")
    if plan is None:
        method = method or Auto()
        _check_gradients(problem)
        _check_power(problem, method)
        if problem.needs_exact or not isinstance(method, Polynomial):
            autograd.check_scores(problem)
        return _make_plan(problem, method)
    if not isinstance(plan, Plan):
        raise InputError(f"plan must be an sb.Plan, got {type(plan).__name__}")
    if method is not None and method != plan.method:
        raise InputError(f"method is {method} but the plan was made with {plan.method}")
    _check_gradients(problem)
    _check_power(problem, plan.method)
    ranges.check_sign(problem, plan)
    if problem.needs_exact:
        if not is_tracing():
            autograd.check_entries(problem)
            autograd.check_scores(problem)
        return _make_plan(problem, plan.method)
    if is_tracing():  # the operator will look at entries
        autograd.check_plan(problem, plan)
        return plan
    return autograd.checked(problem, plan, implementation)


def _fits_graph(
    attn_mask: Tensor | None, dropout_p: float, plan: Plan | None, return_result: bool
) -> bool:
    """Whether a compiled graph can hold the call: planning and certificates look at entries."""
    if plan is None or return_result or dropout_p:
        return False
    return attn_mask is None or attn_mask.dim() < 2 or attn_mask.shape[-2] == 1


def _autocast(*tensors: Tensor) -> Sequence[Tensor]:
    """Inputs in the dtype that autocast wants of matrix products, as SDPA takes them."""
    if not all(isinstance(x, Tensor) for x in tensors):
        return tensors  # validation will say so
    kind = tensors[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    narrow = (torch.float32, torch.float16, torch.bfloat16)
    return [x.to(dtype) if x.dtype in narrow else x for x in tensors]


def _make_plan(problem: Problem, method: Method) -> Plan:
    reason = problem.needs_exact
    if reason and not isinstance(method, Exact):
        warnings.warn(
            f"supportbasis: {method} runs exactly because {reason}", UserWarning, stacklevel=4
        )
    with torch.no_grad(), torch.autocast(problem.query.device.type, enabled=False):
        heads = tuple(
            method.plan_exactly(problem.head(0, number), reason)
            if reason and problem.batch
            else plan_heads(method, [problem.head(b, number) for b in range(problem.batch)])
            for number in range(problem.heads)
        )
    scale = -problem.scale if problem.is_flipped else problem.scale
    plan = Plan(method, problem.query.shape[-1], heads, scale, problem.is_causal)
    if not method.promises_error:
        _warn_about_error(plan)
    return plan


def _warn_about_error(plan: Plan) -> None:
    """Say how large the largest measured error is, where that is large: once for each plan."""
    errors = [(head.measured or 0.0, number) for number, head in enumerate(plan.heads)]
    count = sum(error > LARGE_ERROR for error, _ in errors)
    if not count:
        return
    error, number = max(errors)
    others = f" (and more than {LARGE_ERROR:.0%} on {count - 1} others)" if count > 1 else ""
    warnings.warn(
        f"supportbasis: {plan.method} has a measured error of {error:.2g} on head "
        f"{number}{others}; give a tolerance to limit it",
        UserWarning,
        stacklevel=5,
    )


def _check_gradients(problem: Problem) -> None:
    if problem.requires_grad and not problem.normalise:
        raise InputError(
            "an input requires grad, but kernel sums have no gradients so far; use "
            "torch.no_grad() or detach the inputs"
        )


def _check_power(problem: Problem, method: Method) -> None:
    """Polynomial attention is no softmax: what falls back to softmax elsewhere has no meaning."""
    if not isinstance(method, PowerAttention):
        return
    if problem.dropout_p > 0:
        raise InputError(f"dropout_p is {problem.dropout_p:g}, but {method} has no dropout; use 0")
    if problem.query_log_weight is not None:
        raise InputError(f"method is {method}, whose kernel is not Gaussian; use another method")


def _run(problem: Problem, plan: Plan, need_lse: bool, implementation: str = "auto") -> Outcome:
    """SDPA itself when every head is exact, the components otherwise."""
    with torch.autocast(problem.query.device.type, enabled=False):
        if _is_sdpa(problem, plan, need_lse, implementation):
            outcome = _run_sdpa(problem, need_lse)
            if not is_tracing():
                autograd.check_output(problem, outcome.output)
            return outcome
        if autograd.is_needed(problem):
            return autograd.run(problem, plan, implementation)
        return autograd.compute(problem, plan, implementation)


def _is_sdpa(problem: Problem, plan: Plan, need_lse: bool, implementation: str) -> bool:
    if not plan.is_exact or implementation == "triton" or not sdpa.can_run(problem, need_lse):
        return False
    if is_tracing() and problem.query.is_cpu and problem.needs_exact is None:
        return False  # entries are checked, which only operators can do here
    if implementation == "eager" or not problem.query.is_cuda:
        return True
    if not need_lse and problem.key_log_weight is None:
        return True
    # PyTorch's CUDA kernels give no lse, and `sdpa` has to look at the entries of a bias
    return groups(problem, plan, implementation)[0].kind is None


def _run_sdpa(problem: Problem, need_lse: bool) -> Outcome:
    outcome = autograd.exact_outcome(problem) if need_lse else None
    if outcome is not None:
        return outcome
    shape = (problem.batch, problem.heads)
    zero = problem.query.new_zeros(shape, dtype=problem.dtype)
    empty = problem.query.new_zeros((*shape, 0), dtype=problem.dtype)
    if not need_lse:
        return Outcome(sdpa.sdpa(problem), empty, zero, zero, zero, zero, empty.bool())
    with torch.no_grad():  # no value has a part in it, nor can overflow it
        plain = replace(problem, value=torch.zeros_like(problem.value[..., :1]))
        lse = execute(plain, _make_plan(plain, Exact())).lse
    noise = sdpa.sdpa_noise(problem)
    return Outcome(sdpa.sdpa(problem), lse, zero, zero, zero, noise, empty.bool())


def _result(problem: Problem, plan: Plan, outcome: Outcome, implementation: str = "auto") -> Result:
    if _is_sdpa(problem, plan, True, implementation):
        ran = "sdpa"
    else:
        found = groups(problem, plan, implementation)
        ran = label(found)
        if ran != "eager":
            outcome = with_noise(problem, found, outcome)
            autograd.warn_about(problem, plan, outcome)
    with torch.no_grad():
        certificate = certify(problem, plan, outcome)
    return Result(
        problem.restore(outcome.output),
        problem.restore(outcome.lse),
        problem.restore(outcome.log_scale),
        plan,
        certificate,
        ran,
    )


def _in_linear_units(problem: Problem, outcome: Outcome, dtype: torch.dtype) -> Tensor:
    factor = outcome.log_scale.double().exp()
    output = (outcome.output.double() * factor[..., None, None]).to(dtype)
    if not bool(output.isfinite().all()):
        raise InputError(
            f"the sums overflow {dtype}: the largest is about "
            f"exp({float(outcome.log_scale.max()):.4g}); pass return_result=True, which returns "
            "output and log_scale apart"
        )
    return problem.restore(output)
