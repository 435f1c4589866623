"""What kernels occupy on a GPU that need not be there: `python benchmarks/compiled_kernels.py`.

Calls with a plan run on the CPU as they would on a device, except that each launch compiles its
kernel and does nothing else. A row has a kernel's registers, the bytes of its stack (spilled
registers), its shared memory, and the lines of its PTX: numbers that show a kernel that is no
longer what was timed. The script ends with status 1 if a kernel does not compile, or needs more
shared memory than a block may have. Results of kernels are checked by Triton's interpreter
(`make test`), both on a device (`pytest -m gpu`).
"""

from __future__ import annotations

import argparse
import csv
import importlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # read when kernels are decorated
os.environ["SUPPORTBASIS_DETERMINISTIC"] = "1"

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

import supportbasis as sb
from supportbasis.cuda.runtime.capacity import Capacity
from supportbasis.engine import dispatch

SHARED = {80: 166912, 89: 101376, 90: 232448}  # bytes that a block may have, by capability
LARGE = (64, 64)  # rows and keys beyond a threshold that calls have capacity for

LISTS, STRICT = (sb.BlockSupport(0.9, block_size=128, strict=strict) for strict in (False, True))
THRESHOLD = sb.SingleThreshold(1.2, 2)
BRAIN, FULL = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Case:
    """A method on tokens of some size."""

    name: str
    method: Any
    d: int = 64
    dtype: torch.dtype = BRAIN
    causal: bool = False

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.name}, {kind}, d={self.d}" + ", causal" * self.causal


def cases() -> Iterator[Case]:
    for d, dtype in ((64, BRAIN), (128, BRAIN), (64, FULL)):
        for causal in (False, True):
            yield Case("lists", LISTS, d, dtype, causal)
            yield Case("single threshold", THRESHOLD, d, dtype, causal)
            yield Case("degree 2", sb.Polynomial(2, 1.0), d, dtype, causal)
            yield Case("degree 1", sb.Polynomial(1, 0.5), d, dtype, causal)
        yield Case("strict lists", STRICT, d, dtype, causal=True)
        yield Case("exact", sb.Exact(), d, dtype, causal=True)


@dataclass(frozen=True)
class Row:
    """What one kernel of a case occupies."""

    case: str
    kernel: str
    registers: int
    stack: int
    shared: int
    warps: int
    ptx_lines: int


class Recorder:
    """Stands in for launches: kernels are compiled, once for each specialisation."""

    def __init__(self, capability: int) -> None:
        target = GPUTarget("cuda", capability, 32)
        device = SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: target,
        )
        triton.runtime.driver.set_active(device)
        self.case, self.rows, self.faults = "", list[Row](), list[str]()
        self.limit, self.seen = SHARED.get(capability, 101376), set[tuple[str, str]]()
        compiled = JITFunction.run

        def launch(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            try:
                kernel = compiled(function, *args, grid=grid, warmup=True, **options)
            except Exception as error:  # every kernel that fails is named
                self.faults.append(f"{self.case}: {function.__name__}: {str(error)[:500]}")
            else:
                self.add(kernel)

        JITFunction.run = launch

    def add(self, kernel: Any) -> None:
        if (self.case, kernel.hash) in self.seen:
            return
        self.seen.add((self.case, kernel.hash))
        data, lines = kernel.metadata, kernel.asm["ptx"].count("\n")
        row = Row(
            self.case, data.name, *used(kernel.asm["cubin"]), data.shared, data.num_warps, lines
        )
        self.rows.append(row)
        if row.shared > self.limit:
            self.faults.append(f"{self.case}: {row.kernel}: {row.shared} bytes of shared memory")
        print(
            f"{row.kernel:20} {row.registers:4} registers {row.stack:5} B stack "
            f"{row.shared:7} B shared {row.warps:3} warps {row.ptx_lines:6} lines",
            flush=True,
        )


def used(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread and bytes of its stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])


def run(case: Case) -> None:
    """A call of two heads, forward and backward; small scores, or tokens on a surface."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    d = case.d
    if isinstance(case.method, sb.BlockSupport):
        slope, phase = 2 * normal(2, 3, d), 6 * normal(2, 1, d)
        q, k = torch.cos(normal(2, 2, 6000, 3).sigmoid() @ slope + phase) * (2 * d**-0.25)
    else:
        q, k = normal(2, 2, 2048, d) * (0.5 * d**-0.5)
        q[:, 3::100] *= 8
        k[:, 5::100] *= 8
    tokens = [x.unsqueeze(0) for x in (q, k, normal(*k.shape))]
    plan = sb.plan(*tokens, is_causal=case.causal, method=case.method)
    given = [x.to(case.dtype).requires_grad_() for x in tokens]
    output = sb.attention(*given, is_causal=case.causal, plan=plan, implementation="triton")
    torch.autograd.grad(output, given, torch.randn_like(output))


def on_a_device_without_one() -> None:
    """Memory that no kernel has written is zero, an index of what is there; the capacity for large
    tokens is given; tensors on a CPU are taken as on a device."""
    for place, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        made = getattr(place, name)
        setattr(place, name, lambda *args, made=made, **how: made(*args, **how).zero_())
    for evaluator in dispatch.EVALUATORS.values():  # they ask for themselves
        importlib.import_module(f"supportbasis.cuda.{evaluator}")
    dispatch.interpreted = lambda: True
    initialise = Capacity.__init__
    Capacity.__init__ = lambda self, sizes: initialise(self, LARGE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("--capability", type=int, default=90, help="90: Hopper, 80: Ampere")
    parser.add_argument("--only", default="", help="cases whose description has this text")
    parser.add_argument("--out", type=Path, help="a CSV file for the rows")
    options = parser.parse_args()
    recorder = Recorder(options.capability)
    on_a_device_without_one()
    for case in cases():
        if options.only in str(case):
            recorder.case = str(case)
            print(f"\n{case}")
            run(case)
    if options.out:
        with options.out.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(field.name for field in fields(Row))
            writer.writerows(map(astuple, recorder.rows))
    print(f"\n{len(recorder.rows)} kernels", *recorder.faults, sep="\n")
    sys.exit(1 if recorder.faults or not recorder.rows else 0)


if __name__ == "__main__":
    main()
