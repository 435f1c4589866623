"""A user's own model on the paper's benchmarks, through lm-eval (the extra ``eval``)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from supportbasis import InputError
from supportbasis.cli.loading import Access, LoadedModel, check_folder, load_model

from ..distribution.models import PRESETS
from ..files import folder_digest
from ..models import attending
from ..study import Row
from .diffusion import Diffusion, as_lm
from .methods import replacement
from .sampler import Sampling

BENCHMARKS = ("gsm8k", "mmlu", "hellaswag", "arc_easy", "arc_challenge")
METRICS = ("acc_norm,none", "acc,none", "exact_match,strict-match")  # the first that there is
INSTALL = 'the benchmarks need lm-eval: pip install "supportbasis-studies[eval]"'
WRITING = Sampling(length=256, steps=256, block=32)  # LLaDA's own for GSM8K


@dataclass(frozen=True)
class BenchmarkRow(Row):
    """A method on a benchmark."""

    model: str
    method: str
    task: str
    metric: str
    items: int
    accuracy: float
    error: float | None  # standard error, as lm-eval states it
    unparsable: float | None  # share of answers that its filters call invalid


@dataclass(frozen=True)
class Wish:
    """A model, the benchmarks, how many items of each, and how it writes if it is a diffusion."""

    model: str
    tasks: tuple[str, ...] = BENCHMARKS
    limit: int | None = None
    access: Access = field(default_factory=Access)
    writing: Sampling = WRITING
    dtype: torch.dtype | None = None  # None: float32 on a CPU, elsewhere that of the file

    @property
    def name(self) -> str:
        return PRESETS.get(self.model.lower(), self.model)

    @property
    def label(self) -> str:
        """In rows and titles: a folder by its name."""
        folder = Path(self.model)
        return folder.resolve().name if folder.is_dir() else self.name

    def unit(self, method: str, task: str) -> str:
        """The model (of a folder, its files), its dtype if one is asked for, what it is asked."""
        parts = [self.name, method, task, str(self.limit or "all")]
        if Path(self.name).is_dir():
            parts.append(folder_digest(self.name))
        if self.dtype is not None:
            parts.append(str(self.dtype).removeprefix("torch."))
        return ", ".join(parts)


def load_for(wish: Wish, device: torch.device) -> LoadedModel:
    """The model of a wish; it must take text and have logits."""
    found = load_model(wish.name, wish.access, device, wish.dtype)
    if found.tokenizer is None:
        raise InputError(f"--model: {found.name} takes pictures; expected a model of language")
    return found


class Harness:
    """The model of a wish, loaded when the first benchmark runs."""

    def __init__(self, wish: Wish, device: torch.device):
        if find_spec("transformers") is None or find_spec("lm_eval") is None:
            raise InputError(INSTALL)
        check_folder(wish.model)
        self.wish, self.device = wish, device

    @cached_property
    def loaded(self) -> tuple[Any, Any]:
        """The model, and the same as lm-eval sees it."""
        found = load_for(self.wish, self.device)
        model, tokenizer = found.model, found.tokenizer
        if is_diffusion(model.config):
            return model, as_lm(Diffusion(model, tokenizer, self.wish.writing))
        if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
            raise InputError(
                f"--model: the tokenizer of {found.name} neither begins nor ends texts, which "
                "lm-eval needs; set its bos_token or eos_token"
            )
        from lm_eval.models.huggingface import HFLM

        return model, HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1)

    def run(self, unit: str, method: str, task: str) -> list[BenchmarkRow]:
        """One benchmark; one item at a time, so that nothing is padded."""
        import lm_eval

        model, lm = self.loaded
        with attending(model, replacement(method).attend):
            try:
                found = lm_eval.simple_evaluate(
                    model=lm, tasks=[task], limit=self.wish.limit, batch_size=1, log_samples=True
                )
            except Exception as error:  # of lm-eval, its tasks, or code that comes with the model
                if isinstance(error, InputError):
                    raise
                first = (str(error).strip().splitlines() or [type(error).__name__])[0]
                raise InputError(
                    f"--tasks: {task} could not be run with {self.wish.label} ({first}); check its "
                    "name, the network, or the model's own code, or fetch its data beforehand"
                ) from None
        return [benchmark_row(unit, self.wish.label, method, task, found)]


def is_llada(config: Any) -> bool:
    """With code of its own, under which `AutoModel` has the words at its end."""
    return str(getattr(config, "model_type", "")).lower().startswith("llada")


def is_diffusion(config: Any) -> bool:
    """LLaDA, or a model that says that it is not causal."""
    return is_llada(config) or not getattr(config, "is_causal", True)


def benchmark_row(
    unit: str, model: str, method: str, task: str, found: dict[str, Any]
) -> BenchmarkRow:
    """The numbers of lm-eval's answer; it lists an item once for each of a task's filters."""
    numbers = found["results"][task]
    metric = next((name for name in METRICS if name in numbers), None)
    if metric is None:
        raise InputError(f"--tasks: {task} has none of the metrics {', '.join(METRICS)}")
    name, kind = metric.split(",")
    error = numbers.get(f"{name}_stderr,{kind}")
    listed = (sample for samples in found.get("samples", {}).values() for sample in samples)
    samples = [sample for sample in listed if sample.get("filter", kind) == kind]
    invalid = [sample for sample in samples if "[invalid]" in _texts(sample)]
    count = len(samples) or int(numbers.get("sample_len", 0))
    share = len(invalid) / len(samples) if samples else None
    error = error if isinstance(error, float) else None
    accuracy = float(numbers[metric])
    return BenchmarkRow(unit, model, method, task, metric, count, accuracy, error, share)


def _texts(sample: dict[str, Any]) -> list[str]:
    given = sample.get("filtered_resps", [])
    return [text for text in given if isinstance(text, str)]


def chosen_tasks(text: str | None) -> tuple[str, ...]:
    """Names with commas between them, each once; without any, the paper's five.

    >>> chosen_tasks("gsm8k, mmlu, gsm8k")
    ('gsm8k', 'mmlu')
    """
    if text is None:
        return BENCHMARKS
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise InputError(
            f"--tasks: no task is named in {text!r}; for example {','.join(BENCHMARKS)}"
        )
    return names
