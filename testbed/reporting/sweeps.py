"""Sweeps: outcomes of one scenario against one of its fields, as a table and as a figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from rich.console import Console

from testbed.errors import OutcomeError
from testbed.outcome import Outcome
from testbed.reporting.layout import as_percent, headline
from testbed.reporting.quantities import COVERAGE, LATENCY, Quantity, readings
from testbed.reporting.style import DASHES, FAINT, GRID, INK, PALETTE, panels, save, styled
from testbed.reporting.table import Cell, Table, figure, to_rich, words
from testbed.reporting.wording import amount, asked, plain, provenance, seconds

Values = Sequence[float] | np.ndarray

MOST_TIERS = 5
"""With more tiers than this a table shows the busiest alone."""

UNITS = {
    "demand.intensity": "requests/s per km²",
    "nodes.density": "nodes per km²",
    "radio.xi": "s·km^−α",
    "radio.bandwidth": "Hz",
    "radio.payload": "bits",
    "prefill.overhead": "s",
    "prefill.linear": "s/token",
    "prefill.quadratic": "s/token²",
    "prefill.context": "s/token²",
    "memory.capacity": "bytes",
    "memory.per_sequence": "bytes",
    "persistent_bytes": "bytes",
    "tokens": "tokens",
    "decode_occupancy": "s",
}
"""Units of the fields that an axis may show, by their path or its last part."""


def sweep_table(field: str, values: Values, outcomes: Sequence[Outcome]) -> Table:
    """A row a value of the swept field: coverage, TTFT, offloading, then the tiers' utilisation.

    Raises
    ------
    OutcomeError
        There is no outcome, or not one for every value.
    """
    _paired(field, values, outcomes)
    shown = [
        q
        for q in readings(outcomes[0])
        if q.part in (COVERAGE, LATENCY) or q.path == "offloading_ratio"
    ]
    tiers = tuple(outcomes[0].tiers)
    every = len(tiers) <= MOST_TIERS
    rows = []
    for value, outcome in zip(values, outcomes, strict=True):
        found = readings(outcome)
        cells: list[Cell] = [figure(asked(float(value)), "strong")]
        cells += [figure(amount(found[q].value, q.unit)) for q in shown]
        load = {name: outcome.tiers[name].utilisation for name in tiers}
        busiest = max(tiers, key=lambda name: load[name])
        cells += [_load(load[name]) for name in (tiers if every else (busiest,))]
        if not every:
            cells.append(words(busiest))
        cells.append(_verdict(outcome))
        rows.append(tuple(cells))
    head = (
        plain(field),
        *(_short(q) for q in shown),
        *([f"ρ {plain(name)}" for name in tiers] if every else ["highest ρ", "at"]),
        "",
    )
    reasons = [
        f"{asked(float(v))}: {plain(o.reason)}"
        for v, o in zip(values, outcomes, strict=True)
        if o.reason
    ]
    return Table(
        f"{plain(outcomes[0].scenario_name)} against {plain(field)}"
        f" ({plain(outcomes[0].policy)}; {provenance(outcomes)})",
        head,
        tuple(rows),
        note=f"first without a stable point at {reasons[0]}" if reasons else "",
    )


def render_sweep(console: Console, field: str, values: Values, outcomes: Sequence[Outcome]) -> None:
    """Print :func:`sweep_table`."""
    console.print(to_rich(sweep_table(field, values, outcomes)))


@styled
def sweep_figure(field: str, values: Values, outcomes: Sequence[Outcome]) -> Figure:
    """Coverage, mean and quantiles of TTFT, and utilisation of every tier against the field.

    Grey ground marks values without a stable point: TTFT has no finite mean there, and a line
    that stops has become infinite.
    """
    _paired(field, values, outcomes)
    order = np.argsort(np.asarray(values, dtype=float), kind="stable")
    x = np.asarray(values, dtype=float)[order]
    sorted_outcomes = [outcomes[i] for i in order]
    figure, ((coverage, ttft, load),) = panels(1, 3, height=3.1)
    for axes in (coverage, ttft, load):
        _shade(axes, x, [o.feasible for o in sorted_outcomes])
        axes.set_xlabel(_with_unit(field))
        if len(x) > 1:
            axes.set_xlim(x[0], x[-1])

    for i, key in enumerate(sorted_outcomes[0].ttft.coverage):
        covered = [o.ttft.coverage[key] for o in sorted_outcomes]
        _line(coverage, x, covered, i, f"at {seconds(float(key))}")
        bound = [(o.ttft.upper_bound or {}).get(key, math.inf) for o in sorted_outcomes]
        if all(math.isfinite(b) for b in bound):
            label = "without queues" if i == 0 else None
            coverage.plot(x, bound, color=FAINT, linewidth=0.9, linestyle=(0, (1, 2)), label=label)
    coverage.set(title="Coverage", ylim=(0, 1.03))
    coverage.yaxis.set_major_formatter(FuncFormatter(as_percent))

    _line(ttft, x, [o.ttft.mean for o in sorted_outcomes], 0, "mean", color=INK)
    for i, key in enumerate(sorted_outcomes[0].ttft.quantiles):
        quantile = [o.ttft.quantiles[key] for o in sorted_outcomes]
        _line(ttft, x, quantile, i, f"p{100 * float(key):.10g}")
    ttft.set(title="TTFT, seconds")
    ttft.set_ylim(bottom=0)

    for i, name in enumerate(sorted_outcomes[0].tiers):
        rho = [o.tiers[name].utilisation for o in sorted_outcomes]
        _line(load, x, rho, i, plain(name))
    load.axhline(1, color=FAINT, linewidth=0.9)
    load.set(title="Utilisation of a node")
    load.set_ylim(bottom=0)
    load.yaxis.set_major_formatter(FuncFormatter(as_percent))
    for axes in (coverage, ttft, load):
        axes.legend(loc="best")
    headline(figure, f"{plain(outcomes[0].scenario_name)} against {plain(field)}", outcomes)
    return figure


def draw_sweep(
    field: str, values: Values, outcomes: Sequence[Outcome], path: str | Path
) -> tuple[Path, Path]:
    """Write :func:`sweep_figure` as SVG and PNG; the two paths."""
    return save(sweep_figure(field, values, outcomes), path)


def _short(quantity: Quantity) -> str:
    label = quantity.label.removeprefix("TTFT ").removesuffix(" ratio")
    return label.replace("coverage at ", "≤ ")


def _paired(field: str, values: Values, outcomes: Sequence[Outcome]) -> None:
    if len(values) == 0 or len(values) != len(outcomes):
        raise OutcomeError(f"{field}: {len(values)} values and {len(outcomes)} outcomes")


def _with_unit(field: str) -> str:
    unit = UNITS.get(field, UNITS.get(field.rpartition(".")[2]))
    return plain(field if unit is None else f"{field}, {unit}")


def _line(
    axes: Axes, x: np.ndarray, y: Sequence[float], i: int, label: str, color: str | None = None
) -> None:
    at = np.where(np.isfinite(y), y, np.nan)
    axes.plot(
        x,
        at,
        color=color or PALETTE[i % len(PALETTE)],
        linestyle=DASHES[i % len(DASHES)],
        marker="o" if len(x) == 1 else None,
        label=label,
    )


def _shade(axes: Axes, x: np.ndarray, feasible: Sequence[bool]) -> None:
    """A grey ground from half way before to half way after each value without a stable point."""
    middle = 0.5 * (x[1:] + x[:-1])
    left, right = np.concatenate([x[:1], middle]), np.concatenate([middle, x[-1:]])
    for low, high, stable in zip(left, right, feasible, strict=True):
        if not stable and high > low:
            axes.axvspan(low, high, color=GRID, alpha=0.55, linewidth=0)


def _load(rho: float) -> Cell:
    return figure(amount(rho, "1"), "bad" if rho >= 1 else "unsure" if rho >= 0.9 else "")


def _verdict(outcome: Outcome) -> Cell:
    if not outcome.feasible:
        return words("no stable point" if outcome.policy == "load_aware" else "overloaded", "bad")
    return words("" if outcome.converged else "did not settle", "unsure")
