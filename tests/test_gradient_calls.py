"""`attention_loss_gradient` as a function to call: memory, dtypes, printing and arguments."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import supportbasis as sb
from cases import relative
from dense_loss import autograd
from loss_cases import NAMES, problem, run
from supportbasis.errors import InputError
from supportbasis.gradient import attention_loss_gradient

# --- memory, dtypes, citizenship ------------------------------------------------------------------

MEMORY = """
import torch, supportbasis as sb

def resident(field):
    for line in open("/proc/self/status"):
        if line.startswith(field):
            return int(line.split()[1]) / 1024

def call(n):
    generator = torch.Generator().manual_seed(0)
    x = 0.3 * torch.randn(n, 8, generator=generator)
    x[::1000] *= 5
    weights = torch.randn(2, 8, 8, generator=generator) / 3
    target = torch.randn(n, 8, generator=generator)
    return sb.gradient.attention_loss_gradient(
        x, *weights, target, scale=0.3, method=sb.{method}, low_rank={low_rank}
    )

call(1000)
before = resident("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # start the high-water mark anew
call(10000)
print(resident("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    ("method", "low_rank"),
    [
        ("Exact()", None),
        ("Polynomial(2)", None),
        ("SingleThreshold(1.5, 2)", None),
        ("SingleThreshold(1.5, 2)", 4),
    ],
)
def test_no_matrix_of_all_pairs_at_10000_tokens(method, low_rank):
    """One of float32 numbers would take 400 MB."""
    code = MEMORY.format(method=method, low_rank=low_rank)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 200


def test_inputs_may_require_grad_and_results_do_not():
    data = {name: y.requires_grad_() for name, y in problem(31).items()}
    result = run(data, 0.5, sb.Exact())
    assert not any(getattr(result, name).requires_grad for name in NAMES)
    assert all(y.grad is None for y in data.values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    data = {name: y.to(dtype) for name, y in problem(61).items()}
    result = run(data, 0.5, sb.Polynomial(4))
    assert result.weight_qk.dtype == result.loss.dtype == result.x.dtype == torch.float32
    wide = autograd(**{name: y.double() for name, y in data.items()}, scale=0.5)
    assert relative(result.weight_v, wide["weight_v"]) < 0.1


def test_results_repeat_and_leave_the_generator_alone():
    data, state = problem(61, outliers=3), torch.get_rng_state()
    first, second = (run(data, 0.3, sb.SingleThreshold(1.2, 2), low_rank=3) for _ in range(2))
    assert torch.equal(first.x, second.x) and first.error == second.error
    assert torch.equal(state, torch.get_rng_state())


def test_printing_says_what_ran():
    text = str(run(problem(61, outliers=3), 0.3, sb.SingleThreshold(1.2, 2), low_rank=3))
    assert "single-threshold" in text and "exact weights as rank 3" in text and "loss" in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": [[1.0]]}, "x must be a torch.Tensor"),
        ({"x": torch.ones(4)}, "x has shape"),
        ({"x": torch.ones(4, 2, dtype=torch.long)}, "x has dtype"),
        ({"x": torch.full((4, 2), math.inf)}, "x has 8 non-finite"),
        ({"weight_qk": torch.ones(2, 3)}, "weight_qk has shape"),
        ({"weight_qk": torch.ones(2, 2).double()}, "weight_qk has dtype"),
        ({"weight_qk": (torch.ones(2, 2),)}, "weight_qk must be a tensor"),
        ({"weight_qk": (torch.ones(2, 2), torch.ones(2, 3))}, "weight_qk has shapes"),
        ({"weight_v": torch.ones(3, 2)}, "weight_v has 3 rows"),
        ({"target": torch.ones(4, 3)}, "target has shape"),
        ({"scale": math.nan}, "scale must be"),
        ({"method": None}, "method must be one of sb.Exact"),
        ({"method": sb.Auto()}, "method must be one of"),
        ({"method": sb.BlockSupport()}, "method must be one of"),
        ({"low_rank": 2}, "low_rank replaces"),
        ({"low_rank": 0, "method": sb.SingleThreshold(1.0)}, "low_rank must be"),
        ({"low_rank": 5, "method": sb.SingleThreshold(1.0)}, "low_rank must be"),
        ({"low_rank": 2, "method": sb.SingleThreshold(1e-9)}, "whole n x n matrix"),
        ({"input_gradient": 1}, "input_gradient must be"),
    ],
)
def test_bad_input_is_named(change, words):
    eye, ones = torch.eye(2), torch.ones(4, 2)
    call = {"x": ones, "weight_qk": eye, "weight_v": eye, "target": ones}
    with pytest.raises(InputError, match=words):
        attention_loss_gradient(**{**call, "scale": 1.0, "method": sb.Exact(), **change})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": None}, "x must be a torch.Tensor"),
        ({"x": torch.ones(1, 4, 2)}, "x has shape"),
        ({"x": torch.ones(4, 2).to_sparse()}, "x is a sparse_coo tensor"),
        ({"x": torch.ones(4, 2, device="meta")}, "x is a meta tensor"),
        ({"weight_qk": None}, "weight_qk must be a tensor"),
        ({"weight_qk": (torch.ones(2, 2),) * 3}, "weight_qk must be a tensor"),
        ({"weight_qk": (torch.ones(2, 2), None)}, r"weight_qk\[1\] must be a torch.Tensor"),
        ({"weight_qk": torch.ones(2, 2).double()}, "weight_qk has dtype"),
        ({"weight_qk": torch.ones(2, 3)}, "weight_qk has shape"),
        ({"weight_qk": torch.ones(1, 2, 2)}, "which disagree"),
        ({"weight_v": None}, "weight_v must be a torch.Tensor"),
        ({"weight_v": torch.ones(2)}, "weight_v has shape"),
        ({"weight_v": torch.ones(3, 2)}, "weight_v has 3 rows"),
        ({"weight_v": torch.ones(1, 1, 2, 2)}, "weight_v has shape"),
        ({"weight_v": torch.full((2, 2), math.nan)}, "weight_v has 4 non-finite"),
        ({"goal": [1.0]}, "(target|upstream) must be a torch.Tensor"),
        ({"goal": torch.ones(4, 2, dtype=torch.long)}, "(target|upstream) has dtype"),
        ({"goal": torch.ones(1, 4, 2)}, "(target|upstream) has shape"),
        ({"scale": "1"}, "scale must be"),
        ({"method": None}, "method must be one of sb.Exact"),
        ({"is_causal": 0}, "is_causal must be"),
    ],
)
@pytest.mark.parametrize("way", ["target", "causal", "upstream"])
def test_every_way_checks_the_same(way, change, words):
    eye, ones = torch.eye(2), torch.ones(4, 2)
    call = {"x": ones, "weight_qk": eye, "weight_v": eye, "goal": ones, "scale": 1.0}
    call |= {"method": sb.Exact(), "is_causal": way == "causal", **change}
    call["upstream" if way == "upstream" else "target"] = call.pop("goal")
    with pytest.raises(InputError, match=words):
        attention_loss_gradient(**call)


@pytest.mark.parametrize(
    "change", [{"is_causal": True}, {"target": None, "upstream": torch.ones(4, 2)}]
)
def test_low_rank_is_for_one_head_with_a_target(change):
    eye, ones = torch.eye(2), torch.ones(4, 2)
    call = {"x": ones, "weight_qk": eye, "weight_v": eye, "target": ones, **change}
    with pytest.raises(InputError, match="low_rank is 2, which is for one head"):
        attention_loss_gradient(**call, scale=1.0, method=sb.SingleThreshold(1.0), low_rank=2)


def test_a_polynomial_with_too_many_sums_is_refused():
    x, eye = torch.zeros(4, 64), torch.eye(64)
    with pytest.raises(InputError, match="use a lower degree"):
        attention_loss_gradient(x, eye, eye, x, scale=1.0, method=sb.Polynomial(3))
