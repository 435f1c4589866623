"""Heads and models of the tests of the frontier."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("matplotlib")
safetensors_torch = pytest.importorskip("safetensors.torch")

from supportbasis_studies.frontier import sources  # noqa: E402
from supportbasis_studies.frontier.baselines import BASELINES, ORACLES, Answer, Case  # noqa: E402
from supportbasis_studies.frontier.heads import Capture  # noqa: E402

CPU = torch.device("cpu")
ALL = BASELINES | ORACLES
NYSTROM = "landmarks (Nyström)"  # the only one that has no causal form
TINY = sources.Extent((256, 512), (256, 512), (512,), (), (0.4, 0.8), (0.1,), 2)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def capture(
    n: int = 512, m: int | None = None, d: int = 8, size: float = 1.0, causal: bool = False
) -> Capture:
    m = m or n
    query, key, value = size * random(n, d), size * random(m, d, seed=1), random(m, d, seed=2)
    return Capture("random", 0, "0", query, key, value, causal)


def case(head: Capture, count: int = 64) -> Case:
    return Case(head, torch.arange(0, head.n, max(1, head.n // count)))


def error(at: Case, answer: Answer | None) -> float:
    """Relative error against float64 attention as it is written down."""
    assert answer is not None
    head = at.head
    score = head.query[at.rows].double() @ head.key.double().T / math.sqrt(head.d)
    if head.is_causal:
        score = torch.where(torch.arange(head.m) <= at.rows[:, None], score, -math.inf)
    exact = score.softmax(1) @ head.value.double()
    return float((answer.output.double() - exact).norm() / exact.norm())


def fake_encoder(folder: Path, told: int = 2) -> dict[str, Tensor]:
    """A file with the names and shapes of a trained encoder, and random weights."""
    width, count = 128, iter(range(10**6))
    draw = lambda *shape: random(*shape, seed=next(count)) / math.sqrt(shape[-1])  # noqa: E731
    weights = {"init_embed.weight": 3 * draw(width, told), "init_embed.bias": draw(width)}
    for layer in range(3):
        at = f"embedder.layers.{layer}."
        for side in ("query", "key", "val"):
            weights[f"{at}0.module.W_{side}"] = draw(8, width, 16)
        weights[f"{at}0.module.W_out"] = draw(8, 16, width)
        for index, shape in ((0, (64, width)), (2, (width, 64))):
            weights[f"{at}2.module.{index}.weight"] = draw(*shape)
            weights[f"{at}2.module.{index}.bias"] = draw(shape[0])
        for norm in (1, 3):
            for part in ("weight", "bias", "running_mean"):
                weights[f"{at}{norm}.normalizer.{part}"] = draw(width)
            weights[f"{at}{norm}.normalizer.running_var"] = 1 + draw(width).abs()
    folder.mkdir(parents=True)
    safetensors_torch.save_file(weights, folder / "model.safetensors")
    return weights


def fake_language(folder: Path, context: int = 1024) -> Path:
    """A language model with random weights whose tokens are words: four heads share two keys."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel

    words = {word: number for number, word in enumerate(("?", "import", "def", "return", "self"))}
    tokenizer = Tokenizer(WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    config = transformers.LlamaConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=context,
        initializer_range=0.5,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder
