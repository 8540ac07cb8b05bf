"""Distribution: the whole law of TTFT, drawn from its middle (``ttft_cdf``) and its tail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from testbed.outcome import Outcome
from testbed.reporting.compare import Case, lay_out
from testbed.reporting.layout import (
    Look,
    as_percent,
    bounded,
    case_panels,
    legend,
    looks,
    outer_labels,
)
from testbed.reporting.quantities import COVERAGE
from testbed.reporting.style import FAINT, styled
from testbed.reporting.wording import asked

TAIL = 2e-3
"""The lowest share of slower requests that the tail figure shows."""
WIDE = 40
"""Ratio of the longest to the shortest TTFT from which the axis is logarithmic."""


@styled
def ttft_cdf(outcomes: Sequence[Outcome]) -> Figure:
    """P(TTFT ≤ t) of every answer, a panel a case; bars are 95 % intervals of quantiles and
    coverage, upright lines the targets. An outcome without a curve is drawn through its
    quantiles."""
    figure, drawn, unit = _distributions(outcomes, "Time to first token", tail=False)
    for _, axes in drawn:
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(FuncFormatter(as_percent))
    outer_labels(drawn, f"time to first token, {unit}", "share of requests")
    return figure


@styled
def ttft_tail(outcomes: Sequence[Outcome]) -> Figure:
    """P(TTFT > t) of every answer on a logarithmic scale: where p90, p95 and p99 can be read."""
    figure, drawn, unit = _distributions(outcomes, "Tail of the time to first token", tail=True)
    for _, axes in drawn:
        axes.set_yscale("log")
        axes.set_ylim(TAIL, 1)
        axes.set_yticks([1, 0.1, 0.05, 0.01], ["all", "p90", "p95", "p99"])
        axes.minorticks_off()
    outer_labels(drawn, f"time to first token, {unit}", "slower requests")
    return figure


def _distributions(
    outcomes: Sequence[Outcome], heading: str, *, tail: bool
) -> tuple[Figure, list[tuple[Case, Axes]], str]:
    comparison = lay_out(outcomes)
    shown = looks(comparison)
    figure, drawn = case_panels(comparison, heading, 2.1, sharex="col")
    points = {id(o): _points(o) for o in comparison.outcomes}
    limits = _limits(drawn, points)
    factor = 1.0 if max(high for _, high in limits.values()) >= 10 else 1e3
    for case, axes in drawn:
        for target in _targets(case):
            axes.axvline(target * factor, color=FAINT, linewidth=0.8, alpha=0.6, zorder=0.5)
        for label, outcome in zip(case.labels, case.outcomes, strict=True):
            t, p = points[id(outcome)]
            look = shown[label]
            axes.plot(
                t * factor,
                1 - p if tail else p,
                color=look.color,
                linestyle=look.dash,
                linewidth=look.width,
                zorder=look.order,
            )
            _intervals(axes, outcome, look, factor, tail)
    logarithmic = any(high > WIDE * low > 0 for low, high in limits.values())
    for _, axes in drawn:
        low, high = limits[_column(axes)]
        if logarithmic:
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: asked(v)))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set_xlim(0.8 * low * factor, 1.25 * high * factor)
        else:
            axes.set_xlim(0, 1.04 * high * factor)
    legend(figure, shown)
    return figure, drawn, "s" if factor == 1.0 else "ms"


def _limits(
    drawn: Sequence[tuple[Case, Axes]], points: dict[int, tuple[np.ndarray, np.ndarray]]
) -> dict[int, tuple[float, float]]:
    """(shortest, longest) TTFT in seconds that the panels of each column show.

    The outermost 0.2 % of a distribution do not stretch a panel, nor does an infeasible load,
    whose curve has no end, where a feasible one is there.
    """
    found: dict[int, list[tuple[bool, float, float]]] = {}
    for case, axes in drawn:
        for outcome in case.outcomes:
            t, p = points[id(outcome)]
            inner = t[(p >= TAIL) & (p <= 1 - TAIL) & (t > 0)]
            if len(inner):
                ends = (outcome.feasible, float(inner[0]), float(inner[-1]))
                found.setdefault(_column(axes), []).append(ends)
    limits = {}
    for _, axes in drawn:
        ends_here = found.get(_column(axes), [(True, 1e-3, 1.0)])
        stable = [e for e in ends_here if e[0]] or ends_here
        limits[_column(axes)] = (min(e[1] for e in stable), max(e[2] for e in stable))
    return limits


def _column(axes: Axes) -> int:
    spec = axes.get_subplotspec()
    return 0 if spec is None else spec.colspan.start


def _points(outcome: Outcome) -> tuple[np.ndarray, np.ndarray]:
    """Finite points (seconds, probability) of a distribution, its curve or else its quantiles."""
    if outcome.curve is not None:
        t, p = np.array(outcome.curve.seconds), np.array(outcome.curve.probability)
    else:
        pairs = sorted((t, float(z)) for z, t in outcome.ttft.quantiles.items())
        t, p = np.array([t for t, _ in pairs]), np.array([p for _, p in pairs])
    return t[np.isfinite(t)], p[np.isfinite(t)]


def _targets(case: Case) -> list[float]:
    return [float(row.quantity.names[0]) for row in case.part(COVERAGE)]


def _intervals(axes: Axes, outcome: Outcome, look: Look, factor: float, tail: bool) -> None:
    """Quantile intervals lie flat on the curve, coverage intervals stand upright on it (not in a
    tail, whose scale would stretch them)."""
    bar: dict[str, Any] = {"color": look.color, "linewidth": 2.6, "alpha": 0.5}
    bar |= {"solid_capstyle": "butt", "zorder": look.order}
    for z in outcome.ttft.quantiles:
        if (found := outcome.confidence.get(f"ttft.quantiles.{z}")) and bounded(found):
            p = 1 - float(z) if tail else float(z)
            axes.plot([found[0] * factor, found[1] * factor], [p, p], **bar)
    for target in outcome.ttft.coverage if not tail else ():
        if (found := outcome.confidence.get(f"ttft.coverage.{target}")) and bounded(found):
            axes.plot([float(target) * factor] * 2, list(found), **bar)
