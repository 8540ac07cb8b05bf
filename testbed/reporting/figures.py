"""Figures: plots of outcomes that every report shares.

Each takes outcomes, sorts them into cases (one policy at one intensity) and draws one panel a
case. The reference (what was measured, if anything) is a broad solid line of ink; every other
answer has a colour, a dash and a marker of its own. The heading names kinds and clocks.
``svg`` and ``save`` turn a figure into markup or files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from testbed.outcome import Outcome
from testbed.reporting.agreement import CLOSE_PERCENT, Agreement, Reading
from testbed.reporting.compare import Case, Group, lay_out
from testbed.reporting.distribution import ttft_cdf, ttft_tail
from testbed.reporting.layout import (
    Look,
    as_percent,
    bounded,
    case_panels,
    headline,
    legend,
    looks,
    outer_labels,
)
from testbed.reporting.quantities import ASSOCIATION, COVERAGE, LATENCY, percentile
from testbed.reporting.style import FAINT, GRID, INK, PALETTE, panels, save, styled, svg
from testbed.reporting.wording import plain

__all__ = [
    "association_bars",
    "can_draw_load",
    "error_bars",
    "load_curves",
    "panels",
    "save",
    "styled",
    "svg",
    "ttft_cdf",
    "ttft_tail",
]

MOST_ASSOCIATION_ROWS = 16
"""More (type, profile) pairs than this are summed over the request types."""


@styled
def error_bars(outcomes: Sequence[Outcome]) -> Figure:
    """Signed error of mean and quantiles of TTFT against the reference, in per cent.

    A whisker is the 95 % noise of the difference: an error whose whisker does not reach 0 is a
    miss. The band is ±5 %. An unbounded error is drawn at the panel's edge and marked ∞.
    """
    comparison = lay_out(outcomes)
    shown = looks(comparison)
    figure, drawn = case_panels(comparison, "TTFT error against the reference", 2.2, sharey=True)
    for case, axes in drawn:
        rows = case.part(LATENCY)
        axes.axhspan(-CLOSE_PERCENT, CLOSE_PERCENT, color=GRID, alpha=0.55, linewidth=0)
        axes.axhline(0, color=FAINT, linewidth=0.9)
        others = case.labels[1:]
        for k, label in enumerate(others):
            look = shown[label]
            offset = 0.5 * ((k + 0.5) / len(others) - 0.5)
            for i, row in enumerate(rows):
                agreement = row.agreements[k + 1]
                if agreement is None or agreement.error_percent is None:
                    continue
                if math.isinf(agreement.error_percent):
                    axes.annotate(
                        "∞",
                        (i + offset, 1.0),
                        xycoords=("data", "axes fraction"),
                        color=look.color,
                        ha="center",
                        va="top",
                    )
                    continue
                error = agreement.error_percent
                ends = _whiskers(row.readings[k + 1], row.readings[0], agreement)
                for end, edge in zip(ends, (0, 1), strict=True):
                    if math.isinf(end):
                        _to_edge(axes, i + offset, error, edge, look)
                axes.errorbar(
                    i + offset,
                    error,
                    yerr=[[end if math.isfinite(end) else 0] for end in ends],
                    color=look.color,
                    marker=look.marker,
                    markerfacecolor=look.color if agreement.within is not True else "white",
                    linestyle="none",
                    elinewidth=1,
                )
        axes.set_xticks(range(len(rows)), [r.quantity.label.removeprefix("TTFT ") for r in rows])
        axes.set_xlim(-0.6, len(rows) - 0.4)
        axes.grid(axis="x", visible=False)
    outer_labels(drawn, "", "error, %")
    reference = {case.labels[0] for case in comparison.cases}
    legend(figure, {k: v for k, v in shown.items() if k not in reference}, lines=False)
    return figure


@styled
def association_bars(outcomes: Sequence[Outcome]) -> Figure:
    """Share of each request type's requests that each profile serves.

    The bar and its whisker are the reference and its 95 % interval; markers are the others. More
    than 16 pairs of type and profile are summed over the types, weighted by their probability.
    """
    comparison = lay_out(outcomes)
    shown = looks(comparison)
    pairs = max(len(case.part(ASSOCIATION)) for case in comparison.cases)
    summed = pairs > MOST_ASSOCIATION_ROWS
    rows = max((len(_shares(case, summed)) for case in comparison.cases), default=1)
    figure, drawn = case_panels(
        comparison,
        "Association, all request types together" if summed else "Association by request type",
        0.75 + 0.22 * max(rows, 1),
        sharex=True,
    )
    for case, axes in drawn:
        for y, (_, found) in enumerate(_shares(case, summed)):
            for k, (label, reading) in enumerate(zip(case.labels, found, strict=True)):
                if reading is None:
                    continue
                look = shown[label]
                if k == 0:
                    axes.barh(y, reading.value, height=0.62, color=look.color, alpha=0.22)
                    _whisker(axes, reading, y, look)
                else:
                    axes.plot(
                        reading.value,
                        y + 0.56 * ((k - 0.5) / max(len(case.labels) - 1, 1) - 0.5),
                        color=look.color,
                        marker=look.marker,
                        linestyle="none",
                        markersize=4,
                    )
        names = [name for name, _ in _shares(case, summed)]
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_xlim(0, 1.02)
        axes.xaxis.set_major_formatter(FuncFormatter(as_percent))
        axes.grid(axis="y", visible=False)
    outer_labels(drawn, "share of requests", "")
    legend(figure, shown, lines=False)
    return figure


@styled
def load_curves(outcomes: Sequence[Outcome]) -> Figure:
    """Mean and highest quantile of TTFT, and coverage at the first target, against intensity.

    A colour a policy; measured and simulated are points with 95 % intervals, predictions lines.
    TTFT at an infeasible load depends on the length of the run and is left out.
    """
    comparison = lay_out(outcomes)
    figure, grid = panels(1, 3, height=2.9)
    cases = [case for case in comparison.cases if case.intensity is not None]
    policies = list(dict.fromkeys(case.policy for case in cases))
    shown = looks(comparison)
    for axes, (path, title) in zip(grid[0], _curves(cases), strict=False):
        for i, policy in enumerate(policies):
            for label, look in shown.items():
                _load_line(axes, cases, policy, label, path, PALETTE[i % len(PALETTE)], look)
        axes.set_title(title)
        axes.set_xlabel("requests/s per km²")
        if path.startswith("ttft.coverage"):
            axes.set_ylim(0, 1.03)
            axes.yaxis.set_major_formatter(FuncFormatter(as_percent))
        else:
            axes.set_ylim(bottom=0)
    handles = [
        Line2D([], [], color=PALETTE[i % len(PALETTE)], linewidth=3, label=plain(policy))
        for i, policy in enumerate(policies)
    ]
    for label, look in shown.items():
        line = {"linestyle": look.dash} if look.line else {"marker": look.marker, "linestyle": ""}
        line |= {} if look.line or look.color == INK else {"markerfacecolor": "none"}
        handles.append(Line2D([], [], color=FAINT, label=label, **line))
    headline(figure, "TTFT and coverage against load", outcomes)
    figure.legend(handles=handles, loc="outside lower left", ncols=4)
    return figure


def can_draw_load(group: Group) -> bool:
    """Whether some policy was asked at more than one intensity."""
    loads: dict[str, set[float | None]] = {}
    for case in group.cases:
        loads.setdefault(case.policy, set()).add(case.intensity)
    return any(len(found) > 1 for found in loads.values())


# --- what the panels show -----------------------------------------------------------------------


def _whiskers(
    answer: Reading | None, reference: Reading | None, agreement: Agreement
) -> tuple[float, float]:
    """How far the error's 95 % interval reaches below and above it, in per cent.

    Where the noise is the reference's alone, [low, high], the error lies between p/high − 1 and
    p/low − 1; where both have noise, the interval of the difference is scaled.
    """
    a = agreement
    if answer is None or reference is None or a.interval is None or a.error_percent is None:
        return 0.0, 0.0
    if answer.interval is None and reference.interval is not None and not a.paired:
        low, high = reference.interval
        least = 100 * (answer.value / high - 1) if high > 0 else -math.inf
        most = 100 * (answer.value / low - 1) if low > 0 else math.inf
        return max(a.error_percent - least, 0.0), max(most - a.error_percent, 0.0)
    scale = 100 / abs(reference.value)
    below, above = (a.difference or 0.0) - a.interval[0], a.interval[1] - (a.difference or 0.0)
    return below * scale, above * scale


def _to_edge(axes: Axes, x: float, error: float, edge: int, look: Look) -> None:
    """An unbounded whisker: an arrow to the panel's edge."""
    axes.annotate(
        "",
        (x, edge),
        xycoords=axes.get_xaxis_transform(),
        xytext=(x, error),
        textcoords="data",
        arrowprops={"arrowstyle": "->", "color": look.color, "linewidth": 1, "shrinkA": 0},
    )


def _whisker(axes: Axes, reading: Reading, y: float, look: Look) -> None:
    if reading.interval is not None and bounded(reading.interval):
        axes.plot(list(reading.interval), [y, y], color=look.color, linewidth=1.2)


def _shares(case: Case, summed: bool) -> list[tuple[str, tuple[Reading | None, ...]]]:
    """(name, reading of each answer) for each type and profile, or each profile over all types."""
    if not summed:
        return [(row.quantity.label, row.readings) for row in case.part(ASSOCIATION)]
    profiles = list(dict.fromkeys(row.quantity.names[1] for row in case.part(ASSOCIATION)))
    return [(plain(s), tuple(_served(o, s) for o in case.outcomes)) for s in profiles]


def _served(outcome: Outcome, profile: str) -> Reading | None:
    """Σ_q p_q A_sq, with the probabilities that the outcome's scenario states."""
    types = {q["name"]: float(q["probability"]) for q in outcome.scenario.get("requests", ())}
    rows = {q: row[profile] for q, row in outcome.association.items() if profile in row}
    if not rows or not types.keys() >= rows.keys():
        return None
    return Reading(math.fsum(types[q] * value for q, value in rows.items()))


def _curves(cases: Sequence[Case]) -> list[tuple[str, str]]:
    quantiles = [r.quantity for c in cases for r in c.part(LATENCY) if r.quantity.names]
    targets = [r.quantity for c in cases for r in c.part(COVERAGE)]
    curves = [("ttft.mean", "TTFT mean, s")]
    if quantiles:
        highest = max(quantiles, key=lambda q: float(q.names[0]))
        curves.append((highest.path, f"TTFT {percentile(float(highest.names[0]))}, s"))
    if targets:
        curves.append((targets[0].path, f"{targets[0].label}"))
    return curves


def _load_line(
    axes: Axes,
    cases: Sequence[Case],
    policy: str,
    label: str,
    path: str,
    color: str,
    look: Look,
) -> None:
    found: list[tuple[float, Reading]] = []
    for case in cases:
        row = case.row(path)
        if case.policy != policy or label not in case.labels or row is None:
            continue
        i = case.labels.index(label)
        reading = row.readings[i]
        if row.quantity.part == LATENCY and not case.outcomes[i].feasible:
            continue
        if reading is not None and case.intensity is not None and math.isfinite(reading.value):
            found.append((case.intensity, reading))
    if not found:
        return
    x, y = [at for at, _ in found], [r.value for _, r in found]
    if look.line:
        axes.plot(x, y, color=color, linestyle=look.dash)
        return
    low, high = [], []
    for _, r in found:
        known = r.interval is not None and bounded(r.interval)
        low.append(max(r.value - r.interval[0], 0.0) if known and r.interval else 0.0)
        high.append(max(r.interval[1] - r.value, 0.0) if known and r.interval else 0.0)
    marker: dict[str, Any] = {"marker": look.marker, "markersize": 4.5, "zorder": 3.5}
    if look.color != INK:  # stands open around what was measured
        marker |= {"markersize": 8, "markerfacecolor": "none"}
    axes.errorbar(x, y, yerr=[low, high], color=color, linestyle="none", **marker)
