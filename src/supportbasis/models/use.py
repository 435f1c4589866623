"""Run a model with a plan, with a method, or with several by the timestep of a denoiser."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from ..distributed.token_layout import Layout
from ..errors import InputError
from ..integrations.answers import Answers
from ..integrations.replacing import replaced, uncompiled
from ..integrations.sliced import Group, SlicedAnswers
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
    group: Group | None = None,
    layout: Layout | None = None,
) -> Iterator[Answers]:
    """Within it, the attention of a model runs by a `ModelPlan`, or by a method (neither: `Auto`).

    Calls shorter than ``min_tokens`` are exact (None: those of the plan; of a method none).

    Of a denoiser, ``plan`` may map ranges of timesteps to plans and methods: with
    ``{(0, 800): plan, (800, 1000): sb.Exact()}`` the first steps, which start at 1000, are dense.
    A range holds its ends; the first one that holds the ``timestep`` of a forward pass counts, the
    largest one where tokens differ. Timesteps are what the model is given: Flux is given 0 to 1.

    With a ``group`` (a process group or a DeviceMesh of one dim) every rank runs the model on its
    slice of the tokens, and attention is that of the whole sequence (`sb.distributed.attention`,
    which describes ``layout``). All attention of the model must be over sliced tokens, and a model
    that takes ``position_ids`` needs those of its slice.

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
    chosen, model = method if plan is None else plan, uncompiled(model)
    if group is None and layout is not None:
        raise InputError(f"layout is {layout!r}, but no group is given, whose ranks hold slices")
    first = None if isinstance(chosen, Mapping) else chosen
    answers = _answers(first, min_tokens)
    if group is not None:
        given = (answers.method, answers.plan, min_tokens)
        answers = SlicedAnswers(*given, group, layout or "contiguous")
    with _with_positions(model) if group is not None else nullcontext():
        if not isinstance(chosen, Mapping):
            _check_names(model, chosen)
            with replaced(model, answers, _layers(chosen)):
                yield answers
            return
        with _by_timestep(model, chosen, answers, min_tokens):
            yield answers


@contextmanager
def _by_timestep(
    model: Any, chosen: Mapping[Range, Choice], answers: Answers, min_tokens: int | None
) -> Iterator[None]:
    sites = _check_ranges(model, chosen, min_tokens)

    def at_timestep(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        answers.become(_answers(_choice(chosen, _timestep(model, args, kwargs)), min_tokens))

    with replaced(model, answers, sites):
        hook = model.register_forward_pre_hook(at_timestep, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()


@contextmanager
def _with_positions(model: Any) -> Iterator[None]:
    """Forward passes without positions raise: a model would count those of a slice from 0."""

    def check(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _argument(model, "position_ids", args, kwargs) is None:
            raise InputError(
                "position_ids are not given; tokens are sliced, and the model would count from 0 "
                "on every rank: pass sb.distributed.split_tokens(torch.arange(n)[None], -1, ...)"
            )

    if not isinstance(model, nn.Module) or not _takes(model, "position_ids"):
        yield  # `replaced` raises, or the model has no argument for them
        return
    hook = model.register_forward_pre_hook(check, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def _takes(model: Any, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters


def _argument(model: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An argument of a forward pass."""
    return inspect.signature(model.forward).bind(*args, **kwargs).arguments.get(name)


def _answers(chosen: Choice | None, min_tokens: int | None) -> Answers:
    if isinstance(chosen, Method):
        return Answers(chosen, None, min_tokens)
    return Answers(None, chosen, min_tokens)


def _layers(chosen: Choice | None) -> int | None:
    return len(chosen.layers) if isinstance(chosen, ModelPlan) else None


def _check_names(model: Any, chosen: Choice | None) -> None:
    """Raise where a model has some modules of a plan, but not all."""
    if not isinstance(chosen, ModelPlan) or not isinstance(model, nn.Module):
        return
    known = {name for name, _ in model.named_modules()}
    missing = [layer.name for layer in chosen.layers if layer.name not in known]
    if 0 < len(missing) < len(chosen.layers):
        raise InputError(
            f"plan: {type(model).__name__} has no {missing[0]}: it was made for another model"
        )


def _check_ranges(model: Any, chosen: Mapping[Range, Choice], min_tokens: int | None) -> int | None:
    """The number of attention modules that all plans agree on."""
    for limits, choice in chosen.items():
        _check_names(model, choice)
        good = isinstance(limits, tuple) and len(limits) == 2 and limits[0] <= limits[1]
        if not good:
            raise InputError(
                f"plan: {limits!r} is no range of timesteps; expected (lowest, highest)"
            )
        _answers(choice, min_tokens)  # raises where it is neither a plan nor a method
    if not _takes(model, "timestep"):
        raise InputError(
            f"plan: {type(model).__name__}.forward has no argument named timestep; give one plan"
        )
    sites = {_layers(choice) for choice in chosen.values()} - {None}
    if len(sites) > 1:
        raise InputError(f"plan: the plans have {sorted(map(str, sites))} layers; expected as many")
    return sites.pop() if sites else None


def _timestep(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    value = _argument(model, "timestep", args, kwargs)
    if value is None:
        raise InputError("plan: a forward pass came without its timestep")
    return float(value.max() if isinstance(value, Tensor) else value)


def _choice(chosen: Mapping[Range, Choice], timestep: float) -> Choice:
    for (low, high), choice in chosen.items():
        if low <= timestep <= high:
            return choice
    raise InputError(f"plan: no range holds the timestep {timestep:g}; there are {list(chosen)}")
