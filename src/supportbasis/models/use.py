"""Run a model with a plan, with a method, or with several by the timestep of a denoiser."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ..errors import InputError
from ..integrations.answers import Answers
from ..integrations.replacing import replaced
from ..methods import Method
from ..plans import ModelPlan

Choice = ModelPlan | Method
Range = tuple[float, float]


@contextmanager
def use(
    model: Any,
    plan: Choice | Mapping[Range, Choice] | None = None,
    *,
    method: Method | None = None,
    min_tokens: int | None = None,
) -> Iterator[Answers]:
    """Within it, the attention of a model runs by a `ModelPlan`, or by a method.

    Of a denoiser, ``plan`` may map ranges of timesteps to plans and methods: with
    ``{(0, 800): plan, (800, 1000): sb.Exact()}`` the first steps, which start at 1000, are dense.
    A range holds its ends; the first one that holds the ``timestep`` of a forward pass counts.

    The object that is returned counts the calls of each attention module. A forward pass in which
    no attention arrives raises an `InputError`. The model's own attention comes back when the
    block is left, also by an exception.

    >>> import torch, supportbasis as sb
    >>> class Model(torch.nn.Module):
    ...     def forward(self, x):
    ...         return torch.nn.functional.scaled_dot_product_attention(x, x, x)
    >>> model, x = Model(), torch.randn(1, 2, 64, 8)
    >>> with sb.models.use(model, sb.Exact()) as answers:
    ...     output = model(x)
    >>> answers.calls
    1
    """
    if plan is not None and method is not None:
        raise InputError(f"plan is {plan}, and method is {method}; expected one of them")
    chosen = method if plan is None else plan
    if not isinstance(chosen, Mapping):
        answers = _answers(chosen, min_tokens)
        with replaced(model, answers, _layers(chosen)):
            yield answers
        return
    answers, sites = _answers(None, min_tokens), _check_ranges(model, chosen, min_tokens)

    def at_timestep(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        answers.become(_answers(_choice(chosen, _timestep(model, args, kwargs)), min_tokens))

    with replaced(model, answers, sites):
        hook = model.register_forward_pre_hook(at_timestep, with_kwargs=True)
        try:
            yield answers
        finally:
            hook.remove()


def _answers(chosen: Choice | None, min_tokens: int | None) -> Answers:
    if isinstance(chosen, Method):
        return Answers(chosen, None, min_tokens)
    return Answers(None, chosen, min_tokens)


def _layers(chosen: Choice | None) -> int | None:
    return len(chosen.layers) if isinstance(chosen, ModelPlan) else None


def _check_ranges(model: Any, chosen: Mapping[Range, Choice], min_tokens: int | None) -> int | None:
    """The number of attention modules that all plans agree on."""
    for limits, choice in chosen.items():
        good = isinstance(limits, tuple) and len(limits) == 2 and limits[0] <= limits[1]
        if not good:
            raise InputError(
                f"plan: {limits!r} is no range of timesteps; expected (lowest, highest)"
            )
        _answers(choice, min_tokens)  # raises where it is neither a plan nor a method
    if "timestep" not in inspect.signature(model.forward).parameters:
        raise InputError(
            f"plan: {type(model).__name__}.forward has no argument named timestep; give one plan"
        )
    sites = {_layers(choice) for choice in chosen.values()} - {None}
    if len(sites) > 1:
        raise InputError(f"plan: the plans have {sorted(map(str, sites))} layers; expected as many")
    return sites.pop() if sites else None


def _timestep(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    value = inspect.signature(model.forward).bind(*args, **kwargs).arguments.get("timestep")
    if value is None:
        raise InputError("plan: a forward pass came without its timestep")
    return float(value.flatten()[0] if isinstance(value, Tensor) else value)


def _choice(chosen: Mapping[Range, Choice], timestep: float) -> Choice:
    for (low, high), choice in chosen.items():
        if low <= timestep <= high:
            return choice
    raise InputError(f"plan: no range holds the timestep {timestep:g}; there are {list(chosen)}")
