"""The public functions: inputs, plan, execute, result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, overload

import torch
from torch import Tensor

from .accuracy.certificate import Certificate, certify
from .cuda.runtime.noise import with_noise
from .engine import sdpa
from .engine.autograd import run
from .engine.dispatch import groups, label
from .engine.execute import warn_about
from .errors import InputError
from .methods import Method
from .methods.planning import plan_of
from .plans import Plan
from .problem.checks import is_tracing
from .problem.problem import Outcome, Problem
from .problem.validation import attention_problem, check_tensors, density_problem


@dataclass(frozen=True, eq=False)
class Result:
    """Output, lse, plan and certificate of a call.

    ``output`` is what the plain call returns, ``lse`` the natural log of each row's sum of
    weights. A kernel sum is ``output * exp(log_scale)``: a number for each (batch, head) in the
    caller's leading dims, 0 for attention. ``implementation`` says what ran: "sdpa" (PyTorch's own
    attention, for exact plans), "eager", "triton" (which has exact heads run by PyTorch's fused
    kernels where these take them), or how many heads each of the two took."""

    output: Tensor
    lse: Tensor
    log_scale: Tensor
    plan: Plan
    certificate: Certificate
    implementation: str = "eager"

    def __repr__(self) -> str:
        said = f"output {list(self.output.shape)}, computed by {self.implementation}"
        return f"Result: {said}\n{self.certificate}\n{self.plan}"


@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, *, method: Method | None = None, plan: Plan | None = None,
    return_result: Literal[False] = False, implementation: str = "auto",
) -> Tensor: ...  # fmt: skip


@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, *, method: Method | None = None, plan: Plan | None = None,
    return_result: Literal[True], implementation: str = "auto",
) -> Result: ...  # fmt: skip


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, *, method: Method | None = None, plan: Plan | None = None,
    return_result: bool = False, implementation: str = "auto",
) -> Tensor | Result:  # fmt: skip
    """Softmax attention in the form of ``torch.nn.functional.scaled_dot_product_attention``.

    ``query`` is [..., heads, n, d], ``key`` [..., heads, m, d], ``value`` [..., heads, m, dv]; the
    output is [..., heads, n, dv] in the input dtype. A boolean key mask or additive key bias
    ([..., 1, m], broadcastable) is native in every method, also together with ``is_causal``; any
    other mask, and dropout, runs exactly. ``method=None`` means ``Auto()``, which keeps the error
    of each head to 1 %; a ``plan`` from `sb.plan` is reused as it is. ``return_result=True``
    returns a `Result` with lse, plan and certificate.

    ``implementation="auto"`` runs Triton kernels on CUDA tensors where a head has kernels, and
    PyTorch operations elsewhere; "eager" sums without kernels; "triton" raises where they cannot
    run, and says why. A result says what ran. Where kernels run, a call with a plan can be captured
    in a CUDA graph: only the first one with tensors of a shape may synchronise with the host.

    Gradients flow through the output and the lse of a result to query, key, value and a key bias,
    in the time and memory order of the call itself. They are those of the function that ran, with
    its plan held fixed. ``torch.compile`` takes a call with a plan into a graph, and leaves others
    outside, as those with dropout, a mask of queries or ``return_result``.

    >>> import torch, supportbasis as sb
    >>> q, k, v = torch.randn(3, 1, 2, 128, 16).unbind(0)
    >>> sb.attention(q, k, v, is_causal=True).shape
    torch.Size([1, 2, 128, 16])
    """
    if torch.compiler.is_compiling():
        # planning and certificates read entries
        is_key_mask = attn_mask is None or attn_mask.dim() < 2 or attn_mask.shape[-2] == 1
        if plan is None or return_result or dropout_p or not is_key_mask:
            return torch.compiler.disable(attention)(
                query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa,
                method=method, plan=plan, return_result=return_result,
                implementation=implementation,
            )  # fmt: skip
    elif (
        isinstance(plan, Plan) and plan.is_exact and attn_mask is None and dropout_p == 0
        and method is None and not return_result and implementation == "auto"
    ):  # fmt: skip
        output = sdpa.plainly(query, key, value, plan, is_causal, scale, enable_gqa)
        if output is not None:
            return output
    if implementation not in ("auto", "eager", "triton"):
        wanted = "one of 'auto', 'eager', 'triton'"
        raise InputError(f"implementation must be {wanted}, got {implementation!r}")
    query, key, value = autocast(query, key, value)
    problem = attention_problem(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, finite=plan is None
    )
    # within a transform of `torch.func` gradients may be recorded
    recorded = problem.requires_grad or (is_tracing() and not torch.compiler.is_compiling())
    plan = plan_of(problem, method, plan, implementation).resolved(recorded)
    outcome = run(problem, plan, return_result, implementation)
    if return_result:
        return _result(problem, plan, outcome, implementation)
    return problem.restore(outcome.output)


def plan(
    query: Tensor, key: Tensor, value: Tensor | None = None, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, *, method: Method | None = None,
) -> Plan:  # fmt: skip
    """What `attention` can do with inputs like these: a printable, reusable `Plan`.

    Arguments are those of `attention`; without ``value``, a method that measures errors uses random
    values of dim d. The plan is expected to serve many calls: `Auto` searches for one also where
    inputs are so short that a search within a single call would not pay.

    >>> import torch, supportbasis as sb
    >>> q, k, v = torch.rand(3, 1, 2, 128, 16).unbind(0)
    >>> plan = sb.plan(q, k, v, method=sb.Polynomial(2))
    >>> sb.attention(q[:, :, :99], k, v, plan=plan).shape
    torch.Size([1, 2, 99, 16])
    """
    if value is None:
        check_tensors((query, key), ("query", "key"))
        value = torch.randn(key.shape, generator=torch.Generator().manual_seed(0)).to(key)
    tokens = query, key, value
    problem = attention_problem(*tokens, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return plan_of(replace(problem, is_reused=True), method, None)


@overload
def kernel_sum(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = None,
    method: Method | None = None, return_result: Literal[False] = False,
) -> Tensor: ...  # fmt: skip


@overload
def kernel_sum(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = None,
    method: Method | None = None, return_result: Literal[True],
) -> Result: ...  # fmt: skip


def kernel_sum(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = None,
    method: Method | None = None, return_result: bool = False,
) -> Tensor | Result:  # fmt: skip
    """The unnormalised sum A V with A = exp(scale Q K^T) (the paper's Algorithm 3).

    Shapes, ``scale`` and ``method`` are those of `attention`; there are no gradients. Sums that
    overflow the input dtype raise; ``return_result=True`` returns them as
    ``output * exp(log_scale)`` with one log_scale for each head, and never overflows.

    >>> import torch, supportbasis as sb
    >>> q, k, v = torch.zeros(1, 2, 4), torch.zeros(1, 3, 4), torch.ones(1, 3, 1)
    >>> sb.kernel_sum(q, k, v).flatten()  # exp(0) for each of three keys
    tensor([3., 3.])
    """
    problem = attention_problem(query, key, value, None, 0.0, False, scale, False)
    problem = replace(problem, normalise=False)
    plan = plan_of(problem, method, None)
    outcome = run(problem, plan, return_result)
    if return_result:
        return _result(problem, plan, outcome)
    return _in_linear_units(problem, outcome, query.dtype)


@overload
def gaussian_kde(
    points: Tensor, data: Tensor, bandwidth: float | Tensor, *, weights: Tensor | None = None,
    method: Method | None = None, return_result: Literal[False] = False,
) -> Tensor: ...  # fmt: skip


@overload
def gaussian_kde(
    points: Tensor, data: Tensor, bandwidth: float | Tensor, *, weights: Tensor | None = None,
    method: Method | None = None, return_result: Literal[True],
) -> Result: ...  # fmt: skip


def gaussian_kde(
    points: Tensor, data: Tensor, bandwidth: float | Tensor, *, weights: Tensor | None = None,
    method: Method | None = None, return_result: bool = False,
) -> Tensor | Result:  # fmt: skip
    """Gaussian kernel density of ``data`` [..., n, d] at ``points`` [..., m, d].

    ``sum_j w_j exp(-|x - y_j|^2 / 2 h^2) / (sum_j w_j (2 pi h^2)^(d/2))``, where the bandwidth h is
    a standard deviation: a number or one for each of the d dims. ``weights`` w >= 0 are [..., n]
    (None: equal). Returns [..., m], or with ``return_result=True`` a `Result` with it; there are no
    gradients. ``method=None`` means ``Auto()``.

    >>> import torch, supportbasis as sb
    >>> sb.gaussian_kde(torch.zeros(1, 1), torch.zeros(5, 1), 1.0)  # 1/sqrt(2 pi)
    tensor([0.3989])
    """
    problem, log_norm = density_problem(points, data, bandwidth, weights)
    plan = plan_of(problem, method, None)
    outcome = run(problem, plan, return_result)
    log_scale = outcome.log_scale - log_norm.reshape(outcome.log_scale.shape)
    scaled = replace(outcome, log_scale=log_scale)
    density = _in_linear_units(problem, scaled, points.dtype).squeeze(-1)
    if not return_result:
        return density
    result = _result(problem, plan, outcome)
    lse = (result.lse - log_norm.unsqueeze(-1)).to(result.lse.dtype)
    return replace(result, output=density, lse=lse, log_scale=torch.zeros_like(result.log_scale))


def autocast(*tensors: Tensor) -> Sequence[Tensor]:
    """Inputs in the dtype of autocast for matrix products, as in SDPA."""
    if not all(isinstance(x, Tensor) for x in tensors):
        return tensors  # validation will say so
    kind = tensors[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    narrow = (torch.float32, torch.float16, torch.bfloat16)
    return [x.to(dtype) if x.dtype in narrow else x for x in tensors]


def _result(problem: Problem, plan: Plan, outcome: Outcome, implementation: str = "auto") -> Result:
    ran = "sdpa"
    if not sdpa.can_run(problem, plan, True, implementation):
        found = groups(problem, plan, implementation)
        ran = label(found)
        if ran != "eager":
            outcome = with_noise(problem, found, outcome)
            warn_about(problem, plan, outcome)
    with torch.no_grad(), torch.autocast(problem.query.device.type, enabled=False):
        certificate = certify(problem, plan, outcome)
    output, lse, unit = map(problem.restore, (outcome.output, outcome.lse, outcome.log_scale))
    return Result(output, lse, unit, plan, certificate, ran)


def _in_linear_units(problem: Problem, outcome: Outcome, dtype: torch.dtype) -> Tensor:
    factor = outcome.log_scale.double().exp()
    output = (outcome.output.double() * factor[..., None, None]).to(dtype)
    if not bool(output.isfinite().all()):
        raise InputError(
            f"the sums overflow {dtype}: the largest is about "
            f"exp({float(outcome.log_scale.max()):.4g}); pass return_result=True, which returns "
            "output and log_scale separately"
        )
    return problem.restore(output)
