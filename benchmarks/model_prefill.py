"""Plan a causal language model and time its prefill: `python benchmarks/model_prefill.py
--model DIR --tokens 32768 --run 32768,65536`.

Plans with `sb.models.plan` on the beginning of the standard library's text, evaluates on its end,
and times whole forward passes and the attention in them, exact (SDPA) and planned in turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import supportbasis as sb
from supportbasis.integrations.answers import Answers
from supportbasis.integrations.calls import Call
from supportbasis.integrations.replacing import replaced
from supportbasis_studies.frontier.language import Language

TOKENS = 900_000  # of the standard library, at most


class Timed:
    """A handler of calls that adds up its time."""

    def __init__(self, handler: Callable[[Call], Tensor], cuda: bool) -> None:
        self.handler, self.cuda, self.seconds = handler, cuda, 0.0
        self.pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __call__(self, call: Call) -> Tensor:
        if not self.cuda:
            start = time.perf_counter()
            output = self.handler(call)
            self.seconds += time.perf_counter() - start
            return output
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        output = self.handler(call)
        last.record()
        self.pairs.append((first, last))
        return output

    def total(self) -> float:
        """Seconds since it was last asked."""
        if self.cuda:
            torch.cuda.synchronize()
            self.seconds = sum(a.elapsed_time(b) for a, b in self.pairs) / 1e3
            self.pairs.clear()
        found, self.seconds = self.seconds, 0.0
        return found


@torch.no_grad()
def prefill(model: torch.nn.Module, ids: Tensor, handler: Callable[[Call], Tensor]) -> list[float]:
    """Best seconds of attention and of the whole forward pass."""
    cuda, found = ids.is_cuda, []
    timed = Timed(handler, cuda)
    with replaced(model, timed):
        for _ in range(4 if cuda else 2):
            start = time.perf_counter()
            model(ids, use_cache=False, logits_to_keep=1)
            if cuda:
                torch.cuda.synchronize()
            found.append([timed.total(), time.perf_counter() - start])
    return [min(times[1:]) for times in zip(*found, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--run", default="32768,65536")
    parser.add_argument("--kl", type=float, default=2e-3)
    parser.add_argument("--copies", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("model.plan.json"))
    parser.add_argument("--plan", type=Path, help="a saved plan instead of a new one")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", help="default: bfloat16 on a GPU, float32 on a CPU")
    given = parser.parse_args()
    default = "bfloat16" if given.device == "cuda" else "float32"
    dtype = getattr(torch, given.dtype or default)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=dtype).to(given.device)
    wanted = max(given.tokens * (given.batches + 2), max(map(int, given.run.split(","))))
    ids = Language.of(given.model)._tokens(None, min(TOKENS, wanted)).unsqueeze(0)
    ids, n = ids.to(given.device), given.tokens
    start = time.perf_counter()
    if given.plan is not None:
        plan = sb.ModelPlan.load(given.plan)
    else:
        batches = [ids[:, i * n : (i + 1) * n] for i in range(given.batches)]
        plan = sb.models.plan(model, batches, kl=given.kl)
        plan.save(given.out)
    print(f"planned in {time.perf_counter() - start:.1f} s")
    print(plan, flush=True)
    print(sb.models.evaluate(model, plan, [ids[:, -n:]], copies=given.copies), flush=True)
    for length in map(int, given.run.split(",")):
        text, answers = ids[:, :length], Answers(plan=plan)
        exact = prefill(model, text, lambda call: call.exact())
        planned = prefill(model, text, answers)
        print(f"prefill of {length} tokens: attention {1e3 * exact[0]:.1f} ms exact, "
              f"{1e3 * planned[0]:.1f} ms planned, {exact[0] / planned[0]:.2f}x; whole pass "
              f"{1e3 * exact[1]:.1f} ms and {1e3 * planned[1]:.1f} ms, "
              f"{exact[1] / planned[1]:.2f}x", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
