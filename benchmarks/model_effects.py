"""Predicted and measured effects of single heads: `python benchmarks/model_effects.py --model DIR`.

Each head of a causal language model is approximated alone, at three settings; the divergence of the
predictions is measured and compared with what `sb.models.plan` predicts from gradients. Prints a
line for each, then the correlation of logarithms and the median ratio.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import supportbasis as sb
from supportbasis.models import effects, planning
from supportbasis.models.predictions import divergences
from supportbasis.models.progress import Progress
from supportbasis.plans import ExactHead, ModelPlan
from supportbasis_studies.frontier.language import Language


def single(layers: list[planning.Layer], number: int, head: int, rung: int) -> ModelPlan:
    """A plan in which one head is approximated."""
    made = []
    for at, layer in enumerate(layers):
        chosen = [rung if (at, h) == (number, head) else 0 for h in range(len(layer.settings))]
        made.append(replace(layer.site(chosen, layer.options("cost")), min_tokens=0))
    return ModelPlan(tuple(made), "kl", 1.0, 0, sum(sum(layer.effects) for layer in made))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    cuda = given.device == "cuda"
    model = AutoModelForCausalLM.from_pretrained(
        given.model, dtype=torch.bfloat16 if cuda else torch.float32
    )
    model.to(given.device)
    ids = Language.of(given.model)._tokens(None, given.tokens).unsqueeze(0).to(given.device)
    calls = planning._calls(model, ids)
    with Progress(True, len(calls)) as bar:
        layers = planning._layers(model, [ids], calls, "kl", "cost", effects.SAMPLES, 0, bar)
    exact, pairs = planning._predictions(model, ids, "kl"), []
    for number, layer in enumerate(layers):
        for head, plans in enumerate(layer.settings):
            lists = [i for i, plan in enumerate(plans) if not isinstance(plan, ExactHead)]
            for rung in sorted({lists[len(lists) * k // 4] for k in (0, 1, 2)} if lists else ()):
                made = single(layers, number, head, rung)
                with torch.no_grad(), sb.models.use(model, made):
                    other = planning._predictions(model, ids, "kl")
                measured = float(divergences(exact, other).double().mean())
                pairs.append((made.predicted, measured))
                print(f"{number}.{head} {plans[rung].kind} cost {plans[rung].cost:.3f}: predicted "
                      f"{made.predicted:.2e}, measured {measured:.2e}")  # fmt: skip
    found = torch.tensor(pairs, dtype=torch.float64)
    found = found[(found > 0).all(1)]
    correlation = float(torch.corrcoef(found.log().T)[0, 1])
    ratio = float((found[:, 1] / found[:, 0]).median())
    print(f"{len(found)} settings of single heads: log-log correlation {correlation:.3f}, median "
          f"of measured over predicted {ratio:.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
