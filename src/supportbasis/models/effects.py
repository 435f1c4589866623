"""What a change of a head's output does to the prediction, to second order.

With p the predicted distribution of a token, o the output of a head and d its change, the
Kullback-Leibler divergence summed over tokens is about

    1/2 sum over rows of E <g_row, d_row>^2,    g = gradient of sum log p(y),

with labels y drawn from p (Fisher information). Rows are taken as independent. Where the output y
of a model is no distribution, g is the gradient of <r, y> with normal r, and the sum without the
half is the expected squared change of y. One forward pass and a few backward passes give g for all
heads at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..integrations.calls import Call
from ..integrations.replacing import replaced
from .predictions import Batch, log_likelihood, logits_of, output_of, run, sample_labels, visible

SAMPLES = 4  # backward passes of a batch
CPU_BYTES, CUDA_SHARE = 4 * 2**30, 0.25  # memory for gradients: bytes; share of free memory


@dataclass(frozen=True, eq=False)
class Sensitivity:
    """One call of attention, its exact output, and gradients of sampled predictions by it."""

    call: Call
    output: Tensor  # [batch, heads, tokens, dim]
    gradients: tuple[Tensor, ...]  # the same shape, one for each sample
    weight: float  # of a squared inner product in the effect

    def effects(self, other: Tensor, heads: Sequence[int] | None = None) -> Tensor:
        """Effect of another output of some heads (None: all): float64 [heads]."""
        chosen = list(range(self.output.shape[1]) if heads is None else heads)
        change = other.float() - self.output[:, chosen].float()
        total = torch.zeros(len(chosen), dtype=torch.float64, device=change.device)
        for gradient in self.gradients:
            moved = (gradient[:, chosen].float() * change).sum(-1)
            total += moved.square().sum((0, 2), dtype=torch.float64)
        return self.weight * total / len(self.gradients)


class Recorder:
    """A handler of calls: exact, and kept where they are wanted."""

    def __init__(self, wanted: Callable[[int], bool]) -> None:
        self.wanted = wanted
        self.calls: dict[int, Call] = {}
        self.outputs: dict[int, Tensor] = {}
        self.is_over = False  # the forward pass: what comes now is computed again by a checkpoint

    def __call__(self, call: Call) -> Tensor:
        output = call.exact()
        if call.site in self.calls and not self.is_over:
            raise InputError(
                f"model: {call.name} attends more than once in a forward pass, which cannot be "
                "planned"
            )
        if self.wanted(call.site):
            if not output.requires_grad:  # nothing before it does
                output = output.detach().requires_grad_()
            if not self.is_over:
                self.calls[call.site], self.outputs[call.site] = call, output
        return output


def sensitivities(
    model: Any,
    batch: Batch,
    sites: Sequence[int],
    unit: str,
    generator: torch.Generator,
    samples: int = SAMPLES,
) -> Iterator[Sensitivity]:
    """Sensitivities of the predictions for a batch to some sites, one after the other. Where the
    device is out of memory the model's gradient checkpointing is used, if it has any."""
    given = (model, batch, sites, unit, generator, samples)
    state = generator.get_state()
    try:
        found = _sensitivities(*given)
    except torch.OutOfMemoryError:
        generator.set_state(state)
        with checkpointed(model):
            found = _sensitivities(*given, checkpoint=True)
    while found:
        yield found.pop(0)


def _sensitivities(
    model: Any,
    batch: Batch,
    sites: Sequence[int],
    unit: str,
    generator: torch.Generator,
    samples: int,
    checkpoint: bool = False,
) -> list[Sensitivity]:
    recorder = Recorder(set(sites).__contains__)
    with frozen(model, checkpoint), torch.enable_grad(), replaced(model, recorder):
        output = run(model, batch)
        recorder.is_over = True
        weight, draw = _objective(output, batch, unit, generator)
        outputs = [recorder.outputs[site] for site in sites]
        drawn: list[tuple[Tensor, ...]] = []
        for number in range(samples):
            last, objective = number == samples - 1, draw()
            if not objective.requires_grad:
                raise InputError(
                    f"model: {type(model).__name__} records no gradients as it runs, which effects "
                    "of heads are found by; expected a forward pass without torch.no_grad"
                )
            drawn.append(torch.autograd.grad(objective, outputs, retain_graph=not last))
    return [
        Sensitivity(_detached(recorder.calls[site]), exact.detach(), gradients, weight)
        for site, exact, gradients in zip(sites, outputs, zip(*drawn, strict=True), strict=True)
    ]


@contextmanager
def checkpointed(model: Any) -> Iterator[None]:
    """Within it, layers of a model of transformers are computed again in the backward pass."""
    config = model.config.to_dict() if hasattr(model, "config") else {}
    dropouts = [x for name, x in config.items() if "drop" in name and isinstance(x, float)]
    if not getattr(model, "supports_gradient_checkpointing", False) or any(dropouts):
        raise InputError(
            "model: its forward and backward pass do not fit into the device's memory, and it has "
            "no gradient checkpointing, or dropout; give shorter batches, or of fewer sequences"
        )
    was = bool(model.is_gradient_checkpointing)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        yield
    finally:
        if not was:
            model.gradient_checkpointing_disable()


def _objective(
    output: Any, batch: Batch, unit: str, generator: torch.Generator
) -> tuple[float, Callable[[], Tensor]]:
    """The weight of squares, and a function that draws what is differentiated."""
    if unit == "kl":
        logits = logits_of(output)
        if logits is None:
            raise InputError(
                "kl: the model's output has no logits; give change= instead, the relative squared "
                "change of its output"
            )
        _check(logits)
        counts = visible(logits, batch)
        weight = 0.5 / max(1, int(counts.sum()))
        return weight, lambda: log_likelihood(logits, sample_labels(logits, generator), counts)
    tensor = output_of(output)
    _check(tensor)
    size = float(tensor.detach().double().square().sum())

    def probe() -> Tensor:
        probes = torch.randn(tensor.shape, generator=generator, device=tensor.device)
        return (tensor.float() * probes).sum()

    return 1.0 / max(size, 1e-300), probe


def _check(output: Tensor) -> None:
    if bool(output.isnan().any()):
        raise InputError(
            "model: its output for a batch has NaN, exactly computed; check its weights, its dtype "
            "and the batch"
        )


def _detached(call: Call) -> Call:
    query, key, value = (x.detach() for x in (call.query, call.key, call.value))
    return replace(call, query=query, key=key, value=value)


@contextmanager
def frozen(model: Any, checkpoint: bool = False) -> Iterator[None]:
    """The model in evaluation, its parameters without gradients; both restored afterwards. With
    ``checkpoint`` its layers checkpoint as they do in training."""
    flags = [(x, x.requires_grad) for x in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    for parameter, _ in flags:
        parameter.requires_grad_(False)
    for module, _ in modes:  # layers ask it of themselves; what they consist of is in evaluation
        module.training = checkpoint and bool(getattr(module, "gradient_checkpointing", False))
    try:
        yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
        for module, mode in modes:
            module.training = mode


def groups(calls: Sequence[Call], samples: int) -> list[list[int]]:
    """Sites whose gradients fit into memory together, one after the other."""
    limit = CPU_BYTES
    device = calls[0].query.device
    if device.type == "cuda":
        limit = int(CUDA_SHARE * torch.cuda.mem_get_info(device)[0])
    found: list[list[int]] = []
    left = 0
    for call in calls:
        size = (samples + 4) * call.query.numel() * call.query.element_size()
        if not found or size > left:
            found.append([])
            left = limit
        found[-1].append(call.site)
        left -= size
    return found
