"""Errors of plans by tolerance on the heads of a model, a causal language model or an encoder:
`python benchmarks/promises.py --model DIR --lengths 16384,32768,65536 --tolerances 0.03,0.1`.

Every layer is planned with `BlockSupport(tolerance=t)` (`--auto`: `Auto(t)`) and run, all its heads
in one call. Outputs are compared with exact ones on sampled rows (all rows of short heads). Prints
a row for each length and tolerance, and every head whose error is beyond its tolerance.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

import supportbasis as sb
from supportbasis.accuracy.sampling import exact_rows
from supportbasis.problem.validation import attention_problem
from supportbasis_studies.frontier.encoder import HEADS, LAYERS, Encoder
from supportbasis_studies.frontier.language import Language
from supportbasis_studies.frontier.sources import load

SAMPLED = 2048  # rows of a head


def layers_of(
    model: Language | Encoder, n: int, device: torch.device
) -> dict[int, tuple[Tensor, ...]]:
    """Queries, keys and values [1, heads, n, d] of each layer; bfloat16 on a GPU."""
    if isinstance(model, Language):
        chosen = [(layer, head) for layer in range(model.layers) for head in range(model.heads)]
        captures = model.captures(n, chosen, None, device)
    else:
        every = frozenset(range(LAYERS * HEADS))
        captures = model.to(device).captures(model.points(n, 0).to(device), every)
    found: dict[int, list[tuple[Tensor, ...]]] = {}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for capture in captures:
        sides = (x.to(dtype) for x in (capture.query, capture.key, capture.value))
        found.setdefault(capture.layer, []).append(tuple(sides))
    return {
        layer: tuple(torch.stack(side).unsqueeze(0) for side in zip(*heads, strict=True))
        for layer, heads in found.items()
    }


def errors(tokens: tuple[Tensor, ...], output: Tensor, causal: bool) -> list[float]:
    """Relative Frobenius error of each head on sampled rows, against float64."""
    problem = attention_problem(*tokens, None, 0.0, causal, None, False)
    rows = torch.randperm(problem.n, generator=torch.Generator().manual_seed(1))[:SAMPLED]
    rows, found = rows.sort().values.to(output.device), []
    for _, h, head in problem.each_head():
        wanted = torch.cat([exact_rows(head, some) for some in rows.split(256)])
        found.append(float((output[0, h, rows].double() - wanted).norm() / wanted.norm()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--lengths", default="16384,32768")
    parser.add_argument("--tolerances", default="0.03,0.1")
    parser.add_argument("--auto", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    model, device = load(given.model), torch.device(given.device)
    causal = isinstance(model, Language)
    for n in map(int, given.lengths.split(",")):
        layers = layers_of(model, n, device)
        for tolerance in map(float, given.tolerances.split(",")):
            ratios, count = [], 0
            method = sb.Auto(tolerance) if given.auto else sb.BlockSupport(tolerance=tolerance)
            for number, tokens in layers.items():
                plan = sb.plan(*tokens, is_causal=causal, method=method)
                output = sb.attention(*tokens, is_causal=causal, plan=plan)
                for h, error in enumerate(errors(tokens, output, causal)):
                    count += 1
                    if plan.heads[h].kind != "exact":
                        ratios.append(error / tolerance)
                        if error > tolerance:
                            print(f"  head {number}.{h}: error {error:.4f}, {plan.heads[h]}")
            beyond = sum(ratio > 1.25 for ratio in ratios)
            print(
                f"{given.model.name} n={n} {method}: {len(ratios)} of {count} heads not exact, "
                f"{beyond} beyond 1.25 times the tolerance, largest {max(ratios, default=0.0):.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
