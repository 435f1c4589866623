"""A masked-diffusion model of LLaDA's kind as lm-eval wants one: likelihoods and written answers.

Likelihoods are LLaDA's estimate: some tokens of the continuation are masked at random, several
times over, and the loss of the masked ones is scaled up to all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .sampler import Sampling, sample

MASK = 126336  # LLaDA's mask token, where its config does not say
DRAWS = 32  # of masks, for a likelihood


def mask_token(config: Any) -> int:
    """The token that stands for what is to be written.

    >>> from types import SimpleNamespace
    >>> mask_token(SimpleNamespace(mask_token_id=0)), mask_token(SimpleNamespace())
    (0, 126336)
    """
    found = getattr(config, "mask_token_id", None)
    return MASK if found is None else int(found)


class Diffusion:
    """The three calls of lm-eval's ``LM``; `as_lm` makes it one."""

    def __init__(self, model: Any, tokenizer: Any, how: Sampling, draws: int = DRAWS):
        self.model, self.tokenizer, self.how, self.draws = model, tokenizer, how, draws
        self.mask = mask_token(model.config)
        self.device = next(model.parameters()).device

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        made = []
        for request in requests:
            context, continuation = request.args
            start = self._tokens(context)
            end = self._tokens(context + continuation)[len(start) :]
            made.append((self.likelihood(start, end), self._is_likeliest(start, end)))
        return made

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        return [self.likelihood([], self._tokens(request.args[0])) for request in requests]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        made = []
        for request in requests:
            context, options = request.args
            prompt = torch.tensor([self._tokens(context)], device=self.device)
            written = sample(self._logits, prompt, self.how, self.mask)[0]
            text = self.tokenizer.decode(written, skip_special_tokens=True)
            for stop in options.get("until", ()):
                text = text.split(stop)[0] if stop else text
            made.append(text)
        return made

    @torch.no_grad()
    def likelihood(self, start: list[int], end: list[int]) -> float:
        """The mean over draws of -loss of the masked tokens, times all over masked."""
        if not end:
            return 0.0
        generator = torch.Generator().manual_seed(0)
        tokens, count, total = torch.tensor([start + end], device=self.device), len(end), 0.0
        draws = 1 if count == 1 else self.draws  # all draws of one token are the same
        for draw in range(draws):
            masked = 1 + draw * count // draws  # evenly from one token to all
            places = torch.randperm(count, generator=generator)[:masked] + len(start)
            places = places.to(self.device)
            shown = tokens.clone()
            shown[0, places] = self.mask
            logs = self._logits(shown)[0, places].float().log_softmax(-1)
            total += float(logs.gather(-1, tokens[0, places, None]).sum()) * count / masked
        return total / draws

    @torch.no_grad()
    def _is_likeliest(self, start: list[int], end: list[int]) -> bool:
        """Whether the continuation comes out where all of it is masked."""
        tokens = torch.tensor([start + [self.mask] * len(end)], device=self.device)
        found = self._logits(tokens)[0, len(start) :].argmax(-1)
        return found.tolist() == end

    def _logits(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens).logits
        return logits

    def _tokens(self, text: str) -> list[int]:
        return list(self.tokenizer(text)["input_ids"])


def as_lm(diffusion: Diffusion) -> Any:
    """For lm-eval, whose base class is imported only here."""
    from lm_eval.api.model import LM

    class Wrapped(LM):  # type: ignore[misc]
        def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
            return diffusion.loglikelihood(requests)

        def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
            return diffusion.loglikelihood_rolling(requests)

        def generate_until(self, requests: Sequence[Any]) -> list[str]:
            return diffusion.generate_until(requests)

    return Wrapped()
