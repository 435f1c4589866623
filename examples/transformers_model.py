"""Plan the attention of a language model, and write with it: `python
examples/transformers_model.py MODEL TEXT`.

MODEL is a folder of transformers (or a name on the hub), TEXT a file that it reads: some ten
thousand tokens at least, since nothing pays on short inputs. Needs the extra `hf`.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import supportbasis as sb

TOKENS, BATCHES = 8192, 3  # of a batch, and how many; the last one is held back
LIMIT = 2e-3  # nats per token that the prediction may move, on average


def main(name: str, text: str) -> sb.ModelPlan:
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
    ids = tokenizer(Path(text).read_text(), return_tensors="pt").input_ids
    tokens = min(TOKENS, ids.shape[1] // BATCHES, model.config.max_position_embeddings)
    batches = list(ids[:, : tokens * BATCHES].split(tokens, 1))

    # What each head may cost the prediction is estimated from a few backward passes; the whole
    # plan is then measured on the batch that was held back.
    plan = sb.models.plan(model, batches, kl=LIMIT)
    print(plan)
    plan.save("model.plan.json")

    # The same plan beside exact attention, and in use: long prompts run by the plan, the steps
    # that write single tokens exactly.
    print(sb.models.evaluate(model, plan, batches[-1:]))
    with sb.models.use(model, plan) as answers:
        written = model.generate(batches[-1][:, :-16], max_new_tokens=16, do_sample=False)
    print(tokenizer.decode(written[0, -16:]))
    print(f"{answers.approximated.total()} calls by the plan, {answers.exact.total()} exact")
    return plan


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
