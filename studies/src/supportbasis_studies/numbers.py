"""Numbers as tables and sentences show them."""

from __future__ import annotations

from supportbasis.cli.report import times

__all__ = ["percent", "seconds", "small", "times"]


def seconds(value: float | None) -> str:
    if value is None:
        return "—"
    if value < 1e-3:
        return f"{1e6 * value:.0f} µs"
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def small(value: float | None) -> str:
    return "—" if value is None else f"{value:.1e}"


def percent(value: float) -> str:
    return f"{value:.2g} %" if value < 10 else f"{value:.0f} %" if value < 1e6 else f"{value:.1e} %"
