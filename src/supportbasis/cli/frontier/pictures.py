"""The pictures of the frontier."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..plots import COLOURS, new_figure, plain_axes
from .errors import MEAN, NAME, OURS
from .heads import SYNTHETIC
from .summary import TARGET, Group, KeysNeeded, quantile
from .timing import AutoRow, Growth

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, GREY = "#1f2933", "#9aa5b1"
LINES = {
    NAME: ("#2f855a", "-o"),
    "top blocks (MInference)": ("#2f6fab", "-s"),
    "top blocks (XAttention)": ("#63a4d8", "-D"),
    "top blocks + centroids (PISA)": ("#805ad5", "-^"),
    "LSH + sampling (HyperAttention)": ("#b7791f", "-v"),
    "random features (Performer)": ("#c05621", "-x"),
    "landmarks (Nyström)": ("#d53f8c", "-+"),
    "window + sinks (Longformer)": ("#319795", "-<"),
    "window + random (BigBird)": ("#0b4f4a", "->"),
    "sorted blocks + centroids": ("#1f2933", ":^"),
}
COLUMNS = 8
CLOSEST = 1.9  # ratio of neighbouring costs that both get a label


def _percent(value: float, _: object = None) -> str:
    return f"{100 * value:g} %"


def _length(n: float, _: object = None) -> str:
    return f"{n / 1024:g}k" if n >= 1024 else f"{n:g}"


def _log_axes(axes: Axes, ticks: Sequence[float]) -> None:
    """Cost to the right in per cent, error upwards, both logarithmic."""
    from matplotlib.ticker import NullLocator

    plain_axes(axes)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(_apart(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(_percent)


def _apart(ticks: Sequence[float]) -> list[float]:
    """Those that leave room for their labels."""
    kept: list[float] = []
    for tick in ticks:
        if not kept or tick >= CLOSEST * kept[-1]:
            kept.append(tick)
    return kept


def _fine_errors(axes: Axes) -> None:
    """Labels between the decades, for panels that span hardly more than one."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _curve(group: Group, method: str, heads: Sequence[str], at: float) -> tuple[list[float], ...]:
    """Mean cost and a quantile of the errors over heads, at each budget where it is finite."""
    costs, errors = [], []
    for budget in sorted({row.budget for row in group.rows if row.method == method}):
        error = quantile([group.error(method, budget, head) for head in heads], at)
        used = [
            row.cost
            for row in group.rows
            if (row.method, row.budget) == (method, budget) and row.name in heads and row.is_within
        ]
        if used and math.isfinite(error):
            costs.append(sum(used) / len(used))
            errors.append(error)
    return costs, errors


def _draw_methods(axes: Axes, group: Group, heads: Sequence[str]) -> None:
    """A line for each method, a band for the spread of ours, and the mean of V."""
    for method in reversed(group.methods):
        if method == MEAN:
            continue
        colour, style = LINES[method]
        wide = 2.4 if method == NAME else 1.2
        line = _curve(group, method, heads, 0.5)
        axes.plot(*line, style, color=colour, lw=wide, ms=4.5, label=method)
    if len(heads) > 1:
        low, high = (dict(zip(*_curve(group, NAME, heads, at), strict=True)) for at in (0.1, 0.9))
        both = [x for x in low if x in high]
        axes.fill_between(
            both, [low[x] for x in both], [high[x] for x in both], color="#2f855a", alpha=0.15, lw=0
        )
    free = quantile([r.error for r in group.rows if r.method == MEAN and r.name in heads], 0.5)
    axes.axhline(free, color=GREY, lw=1, ls="--", label=MEAN)


def _legend(figure: Figure, axes: Axes, columns: int) -> None:
    handles, labels = axes.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda i: [*LINES, MEAN].index(labels[i]))
    figure.legend(
        [handles[i] for i in order],
        [labels[i] for i in order],
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=9,
    )


def draw_frontier(made: Sequence[Group], path: Path) -> None:
    """Median error against cost: a panel for each length."""
    figure = new_figure(1.0 + 3.6 * max(2, len(made)), 5.4)
    panels = figure.subplots(1, len(made), sharey=True, squeeze=False)[0]
    for axes, group in zip(panels, made, strict=True):
        _log_axes(axes, group.budgets)
        _draw_methods(axes, group, group.heads)
        axes.set_title(f"{group.label}, {len(group.heads)} heads", loc="left", fontsize=11)
        axes.set_xlabel("cost, everything counted (exact = 100 %)")
    panels[0].set_ylabel("median relative error")
    _legend(figure, panels[0], 4 if len(made) > 2 else 3)
    figure.savefig(path, dpi=150)


def draw_synthetic(group: Group, path: Path) -> None:
    """Error against cost: a panel for each generated head."""
    columns = min(3, len(group.heads))
    lines = math.ceil(len(group.heads) / columns)
    figure = new_figure(1.0 + 3.8 * max(2, columns), 1.6 + 3.2 * lines)
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes, head in zip(panels, group.heads, strict=False):
        _log_axes(axes, group.budgets)
        _draw_methods(axes, group, [head])
        _fine_errors(axes)
        axes.set_title(f"{head}, n={group.n}", loc="left", fontsize=11)
        axes.set_xlabel("cost")
        axes.set_ylabel("relative error")
    for axes in panels[len(group.heads) :]:
        axes.set_axis_off()
    _legend(figure, panels[0], 3)
    figure.savefig(path, dpi=150)


def draw_heads(group: Group, path: Path) -> None:
    """Every head: ours and, at each budget, the best of all baselines."""
    columns = min(COLUMNS, len(group.heads))
    lines = math.ceil(len(group.heads) / columns)
    figure = new_figure(0.8 + 1.75 * max(3, columns), 1.4 + 1.75 * lines)
    panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    for axes, head in zip(panels.flatten(), group.heads, strict=False):
        _log_axes(axes, [group.budgets[0], group.budgets[-1]])
        best = [group.best_on(budget, head)[1] for budget in group.budgets]
        axes.plot(group.budgets, best, "-s", color="#c05621", ms=3, lw=1.2, label="best baseline")
        axes.plot(
            *_curve(group, NAME, [head], 0.5), "-o", color="#2f855a", ms=3, lw=1.6, label="ours"
        )
        sigma = next(row.sigma for row in group.rows if row.name == head)
        axes.set_title(f"{head}, σ={sigma:.2g}", loc="left", fontsize=9)
        axes.tick_params(labelsize=8)
    for axes in panels.flatten()[len(group.heads) :]:
        axes.set_axis_off()
    figure.supxlabel(f"cost ({group.label}; σ: standard deviation of the scores)", fontsize=10)
    figure.supylabel("relative error", fontsize=10)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=2, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


def draw_keys(needed: Sequence[KeysNeeded], autos: Sequence[AutoRow], path: Path) -> None:
    """Keys a query for 2 %: each head grey, the median over heads green; and all work in keys."""
    figure = new_figure(10.4, 4.6)
    panels = figure.subplots(1, 2)
    for axes, paid in zip(panels, (False, True), strict=True):
        plain_axes(axes)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        for head in dict.fromkeys(item.head for item in needed):
            line = [(i.n, i.paid if paid else i.keys) for i in needed if i.head == head]
            points = [(n, keys) for n, keys in line if keys is not None]
            is_median = head == "median"
            axes.plot(
                *zip(*points, strict=True) if points else ([], []),
                "-o",
                color="#2f855a" if is_median else GREY,
                lw=2.4 if is_median else 0.8,
                ms=5 if is_median else 2.5,
                zorder=3 if is_median else 2,
                label="for the median error" if is_median else "one head",
            )
        _keys_axes(axes, needed, autos, paid)
    figure.savefig(path, dpi=150)


def _keys_axes(
    axes: Axes, needed: Sequence[KeysNeeded], autos: Sequence[AutoRow], paid: bool
) -> None:
    from matplotlib.ticker import NullLocator

    lengths = sorted({item.n for item in needed})
    auto = {n: [row for row in autos if row.n == n and row.keys is not None] for n in lengths}
    points = [
        (n, quantile([row.cost * n if paid else row.keys or 0.0 for row in rows], 0.5))
        for n, rows in auto.items()
        if rows
    ]
    if points:
        label = f"Auto({TARGET:g}), median head"
        axes.plot(*zip(*points, strict=True), ":s", color="#2f6fab", lw=1.6, ms=4.5, label=label)
    axes.plot(lengths, lengths, "--", color=INK, lw=1, label="all keys")
    axes.set_xticks(lengths)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(_length)
    axes.yaxis.set_major_formatter(_length)
    axes.set_xlabel("tokens")
    what = "all work, in keys a query" if paid else "keys a query, exact and coarse"
    axes.set_title(f"{what}, for {100 * TARGET:g} % error", loc="left", fontsize=11)
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes.legend(unique.values(), unique.keys(), frameon=False, fontsize=9, loc="upper left")


def draw_times(rows: Sequence[AutoRow], growing: Sequence[Growth], path: Path) -> None:
    """Gain over SDPA head by head, and seconds against length where there are several."""
    figure = new_figure(11.6 if growing else 6.0, 4.8)
    panels = figure.subplots(1, 2 if growing else 1, squeeze=False)[0]
    _draw_gains(panels[0], rows)
    if growing:
        _draw_growth(panels[1], rows, growing)
    figure.savefig(path, dpi=150)


def _draw_growth(axes: Axes, rows: Sequence[AutoRow], growing: Sequence[Growth]) -> None:
    plain_axes(axes)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for index, item in enumerate(growing):
        label = f"{item.head}: exponent {item.exponent:.2f}"
        colour = COLOURS[index % len(COLOURS)]
        axes.plot(item.lengths, item.seconds, "-o", color=colour, ms=4, lw=1.4, label=label)
    exact = {row.n: row.sdpa_seconds for row in rows if row.sdpa_seconds and row.model != SYNTHETIC}
    lengths = sorted(exact)
    axes.plot(lengths, [exact[n] for n in lengths], "--D", color=INK, ms=4, label="SDPA")
    axes.xaxis.set_major_formatter(_length)
    axes.set_xlabel("tokens")
    axes.set_ylabel("seconds per call")
    axes.set_title("Auto with a saved plan", loc="left", fontsize=11)
    axes.legend(frameon=False, fontsize=8)


def _draw_gains(axes: Axes, rows: Sequence[AutoRow]) -> None:
    plain_axes(axes)
    axes.set_yscale("log")
    keys = list(dict.fromkeys((row.model, row.n) for row in rows if row.speedup is not None))
    for place, key in enumerate(keys):
        gains = sorted(r.speedup for r in rows if (r.model, r.n) == key and r.speedup is not None)
        spread = [place + 0.5 * (i + 1) / (len(gains) + 1) - 0.25 for i in range(len(gains))]
        axes.plot(spread, gains, "o", color="#2f855a", ms=4, alpha=0.8)
        axes.plot([place - 0.3, place + 0.3], [quantile(gains, 0.5)] * 2, color=INK, lw=1.4)
    axes.axhline(1.0, color=GREY, lw=1, ls="--")
    axes.set_xticks(range(len(keys)), [f"{model}\n{_length(n)}" for model, n in keys])
    axes.yaxis.set_major_formatter("{x:g}×")
    axes.yaxis.set_minor_formatter("{x:g}×")
    axes.tick_params(axis="y", which="minor", labelsize=7)
    axes.set_title("speed-up over SDPA; a dot for each head", loc="left", fontsize=11)


def shown_heads(group: Group) -> bool:
    """Whether a picture of every head says more than that of the median."""
    return len(group.heads) > 1 and any(row.kind == OURS and row.is_within for row in group.rows)
