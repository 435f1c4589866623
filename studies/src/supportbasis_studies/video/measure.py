"""Sample the same clips with exact attention, with plans and with sparse attention."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import supportbasis as sb
from supportbasis.integrations.calls import Call
from supportbasis.integrations.diffusers import recorded
from supportbasis.integrations.replacing import replaced
from supportbasis.models.planning import Search

from . import quality
from .baselines import IDEAL, SAME_TIME, Sparse, equal_cost, ideal, without_tilts
from .clips import Scenes
from .denoiser import PATCH, Denoiser, sample, timesteps
from .rows import HeadRow, VideoRow
from .timing import Clock, clocked, timed

CALIBRATION = 10**6  # seed of the clips that plans are made from, beyond those of the study
CALIBRATED = 2  # of these clips
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
BUDGET = 0.1  # of `BlockSupport` on the heads of the model
EXACT = "exact"


@dataclass(frozen=True)
class Extent:
    """Sizes of the study."""

    frames: int = 16
    size: int = 64
    steps: int = 20
    dense: int = 3  # steps, the first ones, with exact attention
    parts: int = 2  # ranges of timesteps with a plan of their own
    clips: int = 8
    batch: int = 4
    changes: tuple[float, ...] = (2e-3, 5e-3, 2e-2)

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.frames, self.size // PATCH, self.size // PATCH

    @property
    def tokens(self) -> int:
        frames, height, width = self.grid
        return frames * height * width


@dataclass(frozen=True, eq=False)
class Sampled:
    """Clips by one method, and what they took."""

    method: str
    change: float | None
    clips: Tensor  # float32 on the CPU
    cost: float  # multiply-adds of attention relative to exact, in steps that are not dense
    attention: float  # seconds of all batches
    planned: float  # of these, those of steps that are not dense
    whole: float  # of sampling
    note: str = ""


class Lab:
    """One model, its clips, and how they are sampled."""

    def __init__(self, model: Denoiser, extent: Extent, device: torch.device, seed: int) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model, self.extent = model.to(device, dtype), extent
        self.device, self.seed = device, seed
        self.backend: str | None = None  # of exact attention, the fastest once that is known

    def inputs(self, count: int, seed: int) -> tuple[Tensor, Tensor]:
        """Noise and prompts, the same on every device."""
        generator, extent = torch.Generator().manual_seed(seed), self.extent
        shape = (count, 3, extent.frames, extent.size, extent.size)
        noise = torch.randn(shape, generator=generator)
        prompts = Scenes.draw(count, generator).prompts()
        return noise.to(self.device), prompts.to(self.device)

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        extent = self.extent
        counts = [extent.batch] * (extent.clips // extent.batch)
        counts += [extent.clips % extent.batch] if extent.clips % extent.batch else []
        return [self.inputs(count, self.seed + at) for at, count in enumerate(counts)]

    @torch.no_grad()
    def pass_seconds(self) -> float:
        """Of a forward pass of one clip with exact attention: four times that of half a clip."""
        noise, prompts = self.inputs(1, CALIBRATION + self.seed)
        half = noise[:, :, : max(1, self.extent.frames // 2)]
        dtype = next(self.model.parameters()).dtype
        given = (half.to(dtype), torch.full((1,), 0.5), prompts.to(dtype))
        return 4 * timed(lambda: self.model(*given), self.device)[1]

    # ---- ranges of timesteps

    def bounds(self) -> list[float]:
        """Ends of the ranges of timesteps, from the dense steps down to 0."""
        extent, times = self.extent, timesteps(self.extent.steps)[:-1]
        cuts = [extent.dense + (len(times) - extent.dense) * i // extent.parts
                for i in range(extent.parts)]  # fmt: skip
        return [(times[cut - 1] + times[cut]) / 2 if cut else 2.0 for cut in cuts] + [-1.0]

    def ranges(self, plans: list[sb.ModelPlan]) -> dict[tuple[float, float], Any]:
        """Plans by their timesteps, the first steps dense."""
        ends = self.bounds()
        chosen: dict[tuple[float, float], Any] = {
            (low, high): plan for (high, low), plan in zip(pairwise(ends), plans, strict=True)
        }
        return chosen | {(ends[0], 2.0): sb.Exact()}

    def part(self, t: float) -> int | None:
        """The range that holds a timestep; None: dense."""
        ends = self.bounds()
        return next((i for i, (high, low) in enumerate(pairwise(ends)) if low <= t < high), None)

    # ---- plans

    def searches(self, progress: bool = False) -> list[Search]:
        """For each range of timesteps, what plans are chosen from: inputs of the model while it
        samples other clips with exact attention."""
        noise, prompts = self.inputs(CALIBRATED, CALIBRATION + self.seed)
        with recorded(self.model) as batches:
            sample(self.model, noise, prompts, self.extent.steps)
        by_part: list[list[dict[str, Any]]] = [[] for _ in range(self.extent.parts)]
        for batch in batches:
            part = self.part(float(batch["timestep"][0]))
            if part is not None:
                by_part[part].append(batch)
        return [
            Search.of(
                self.model, [mine[0], mine[-1], mine[len(mine) // 2]], "change",
                minimise="time", seed=self.seed, progress=progress,
            )
            for mine in by_part
        ]  # fmt: skip

    # ---- methods

    def exact(self) -> Sampled:
        """By PyTorch's attention, on a GPU by its fastest backend, which exact heads and steps of
        plans have from then on."""
        if self.device.type != "cuda":
            return self._sampled(EXACT, None, nullcontext, 1.0, note="SDPA")
        found = []
        for self.backend in BACKENDS:
            try:
                found.append(self._sampled(EXACT, None, nullcontext, 1.0, note=self.backend))
            except RuntimeError as error:  # a backend that does not take these inputs
                if "kernel" not in str(error):
                    raise
        fastest = min(found, key=lambda one: one.attention)
        self.backend = fastest.note
        return fastest

    def planned(self, change: float, plans: list[sb.ModelPlan]) -> Sampled:
        """By plans, one for each range of timesteps."""
        said: Counter[str] = Counter()
        costs = self._weighted([plan.cost for plan in plans])

        @contextmanager
        def using() -> Iterator[None]:
            with warnings.catch_warnings(record=True) as caught, \
                    sb.models.use(self.model, self.ranges(plans)):  # fmt: skip
                warnings.simplefilter("always")
                yield
            said.update(str(warning.message).split(",")[0][:80] for warning in caught)

        found = self._sampled("plan", change, using, costs)
        note = "; ".join(f"{text} ({count} times)" for text, count in said.items())
        return Sampled(**{**vars(found), "note": note})

    def sparse(self, kind: str, change: float, plans: list[sb.ModelPlan], share: float) -> Sampled:
        """Sparse attention at the cost or time of plans; of the kind `IDEAL` with ``share`` of the
        time of exact attention, in steps that are not dense."""
        if kind == IDEAL:
            shares = [ideal(plan, share) for plan in plans]
        elif kind == SAME_TIME:
            shares = [without_tilts(plan) for plan in plans]
        else:
            shares = [equal_cost(plan) for plan in plans]
        handler = Sparse(kind, self.extent.grid)

        def before(t: float) -> None:
            part = self.part(t)
            handler.shares = None if part is None else shares[part]

        kept = self._weighted([
            sum(map(sum, each)) / sum(map(len, each)) for each in shares
        ])  # fmt: skip
        return self._sampled(
            kind, change, lambda: replaced(self.model, handler), kept, before, repeat=False
        )

    def _weighted(self, values: list[float]) -> float:
        """The mean of values of ranges over steps."""
        parts = [self.part(t) for t in timesteps(self.extent.steps)[:-1]]
        chosen = [values[part] for part in parts if part is not None]
        return sum(chosen) / len(chosen) if chosen else 1.0

    def _sampled(
        self,
        method: str,
        change: float | None,
        using: Callable[[], AbstractContextManager[Any]],
        cost: float,
        also: Callable[[float], None] = lambda t: None,
        *,
        repeat: bool = True,
        note: str = "",
    ) -> Sampled:
        """All batches; the first one runs twice more before, so that kernels are compiled and
        calls captured."""
        clips, attention, planned, whole = [], 0.0, 0.0, 0.0
        batches = self.batches()
        with ExitStack() as stack:
            stack.enter_context(using())
            if self.backend is not None and repeat:
                stack.enter_context(sdpa_kernel(BACKENDS[self.backend]))
            if repeat and self.device.type == "cuda":
                for _ in range(2):
                    sample(self.model, *batches[0], self.extent.steps, also)
            for noise, prompts in batches:
                clock = Clock(self.device)

                def before(t: float, clock: Clock = clock) -> None:
                    clock.is_dense = self.part(t) is None
                    also(t)

                def run(noise: Tensor = noise, prompts: Tensor = prompts,
                        before: Callable[[float], None] = before) -> Tensor:  # fmt: skip
                    return sample(self.model, noise, prompts, self.extent.steps, before)

                with clocked(self.model, clock):
                    found, seconds = timed(run, self.device)
                clips.append(found.cpu())
                all_calls, not_dense = clock.seconds()
                attention, planned, whole = (
                    attention + all_calls, planned + not_dense, whole + seconds
                )  # fmt: skip
        return Sampled(method, change, torch.cat(clips), cost, attention, planned, whole, note)

    # ---- heads

    def heads(self) -> list[HeadRow]:
        """Error of `BlockSupport(0.1)` on the heads of each layer, in the middle of sampling."""
        noise, prompts = self.inputs(1, CALIBRATION + self.seed)
        calls: list[Call] = []

        def keep(call: Call) -> Tensor:
            calls.append(call)
            return call.exact()

        at = timesteps(self.extent.steps)[(self.extent.dense + self.extent.steps) // 2]
        dtype = next(self.model.parameters()).dtype
        clip = sample(self.model, noise, prompts, self.extent.steps)
        clip = (1 - at) * clip + at * noise
        with torch.no_grad(), replaced(self.model, keep):
            self.model(clip.to(dtype), torch.full((1,), at, device=self.device), prompts.to(dtype))
        return [self._head_row(call) for call in calls]

    @torch.no_grad()
    def _head_row(self, call: Call) -> HeadRow:
        method = sb.BlockSupport(BUDGET)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of heads with a large error, which the table says
            plan = sb.plan(call.query, call.key, call.value, method=method)
            output = sb.attention(call.query, call.key, call.value, plan=plan)
        exact = call.exact().float()
        wrong = (output.float() - exact).square().sum((0, 2, 3)) / exact.square().sum((0, 2, 3))
        errors = wrong.sqrt().tolist()
        return HeadRow(
            f"layer {call.site}", f"BlockSupport({BUDGET})", plan.cost, median(errors), max(errors)
        )


def rows_of(one: Sampled, exact: Sampled) -> list[VideoRow]:
    """A row for each clip, beside the one of exact attention."""
    psnr, ssim, distance = (
        measure(one.clips, exact.clips).tolist()
        for measure in (quality.psnr, quality.ssim, quality.feature_distance)
    )
    return [
        VideoRow(
            one.method, one.change, clip, psnr[clip], ssim[clip], distance[clip], one.cost,
            one.attention, one.planned, one.whole, exact.attention, exact.planned, exact.whole,
            one.note,
        )
        for clip in range(len(one.clips))
    ]  # fmt: skip
