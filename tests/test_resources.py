"""What the library takes: memory at length 131072, time to import, what an import drags in."""

import subprocess
import sys
from pathlib import Path

import pytest

needs_proc = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc"
)
MEMORY = """
import torch, supportbasis as sb

def resident(field):
    for line in open("/proc/self/status"):
        if line.startswith(field):
            return int(line.split()[1]) / 1024

def tokens(n, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(1, 1, n, 64).normal_(generator=generator)

q, k, v = (tokens(131072, seed) for seed in range(3))
q *= 0.1; k *= 0.1
method = sb.{method}
sb.attention(q[:, :, :4096], k[:, :, :4096], v[:, :, :4096], method=method, is_causal={causal})
before = resident("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # start the high-water mark anew
output = sb.attention(q, k, v, method=method, is_causal={causal})
print(resident("VmHWM") - before - output.numel() * 4 / 2**20)
"""


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize(
    ("method", "causal"),
    [
        ("SingleThreshold(0.4, 2)", False),
        ("SingleThreshold(0.4, 2)", True),
        ("MultiThreshold(2.0, 1, 64)", False),
        ("PowerAttention(4, 64)", True),
    ],
)
def test_peak_extra_memory_at_131072_tokens_is_below_256_mb(method, causal):
    """The features of all tokens at once would take more than a gigabyte."""
    code = MEMORY.format(method=method, causal=causal)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 256


TRAINING = """
import torch, supportbasis as sb

def resident(field):
    for line in open("/proc/self/status"):
        if line.startswith(field):
            return int(line.split()[1]) / 1024

def step(n):
    tensors = []
    for seed, size in enumerate((0.1, 0.1, 1.0)):
        generator = torch.Generator().manual_seed(seed)
        tensors.append(torch.empty(1, 1, n, 64).normal_(std=size, generator=generator))
    q, k, v = (x.requires_grad_() for x in tensors)
    before = resident("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")
    sb.attention(q, k, v, method=sb.SingleThreshold(0.4, 2), is_causal={causal}).sum().backward()
    return resident("VmHWM") - before

step(4096)
print(step(32768))
"""


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize("causal", [False, True])
def test_peak_extra_memory_of_a_training_step_at_32768_tokens_is_below_256_mb(causal):
    """Output and gradients included; the features of all tokens would take 600 MB."""
    code = TRAINING.format(causal=causal)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 256


IMPORT = """
import sys, time
begin = time.process_time()
import torch
start = time.process_time()
import supportbasis
print(start - begin, time.process_time() - start)
import supportbasis.analysis
heavy = {"triton", "transformers", "matplotlib", "typer", "rich", "numpy"} - {"numpy"}
print(sorted(heavy & set(sys.modules)))
"""


def test_import_is_quick_and_drags_nothing_in():
    """Within 0.2 s, or a third of what torch itself takes on a slow or busy machine."""
    for _ in range(6):  # the quickest counts
        done = subprocess.run(
            [sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True
        )
        times, modules = done.stdout.splitlines()
        assert modules == "[]"
        torch_seconds, seconds = map(float, times.split())
        if seconds < max(0.2, torch_seconds / 3):
            return
    pytest.fail(f"the package took {seconds} s to import, torch {torch_seconds} s")
