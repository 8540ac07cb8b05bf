"""Layout: a panel for every case of a comparison, and one look for every answer in all of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from testbed.outcome import Outcome
from testbed.reporting.compare import Case, Comparison
from testbed.reporting.style import DASHES, INK, MARKERS, PALETTE, panels
from testbed.reporting.wording import asked, plain, provenance


class Look:
    """How one answer is drawn: the reference in a broad line of ink, beneath the others."""

    def __init__(self, outcome: Outcome, number: int) -> None:
        first = number == 0
        self.color = INK if first else PALETTE[(number - 1) % len(PALETTE)]
        self.dash: Any = "-" if first else DASHES[1 + (number - 1) % 4]
        self.marker = MARKERS[number % len(MARKERS)]
        self.width = 2.8 if first else 1.4
        self.line = outcome.kind == "predicted"
        self.order = 2.0 if first else 3.0
        self.valid = [outcome.valid]


def looks(comparison: Comparison) -> dict[str, Look]:
    """{label: look}; an answer keeps its look over all cases."""
    found: dict[str, Look] = {}
    for case in comparison.cases:
        for label, outcome in zip(case.labels, case.outcomes, strict=True):
            if label not in found:
                found[label] = Look(outcome, len(found))
            else:
                found[label].valid.append(outcome.valid)
    return found


def legend(figure: Figure, shown: dict[str, Look], *, lines: bool = True) -> None:
    handles = []
    for label, look in shown.items():
        text = label
        if not all(look.valid):
            text += " (some INVALID)" if any(look.valid) else " (INVALID)"
        line = {"linestyle": look.dash, "linewidth": look.width} if lines else {}
        line |= {} if lines else {"marker": look.marker, "linestyle": ""}
        handles.append(Line2D([], [], color=look.color, label=text, **line))
    figure.legend(handles=handles, loc="outside lower left", ncols=min(4, len(handles)))


def case_panels(
    comparison: Comparison, heading: str, height: float, **shared: Any
) -> tuple[Figure, list[tuple[Case, Axes]]]:
    """A panel a case: a row a policy and a column a load where that fills a grid."""
    cases = comparison.cases
    loads = {case.intensity for case in cases}
    policies = {case.policy for case in cases}
    grid = len(comparison.groups) == 1 and len(cases) == len(loads) * len(policies)
    columns = len(loads) if grid and 1 < len(loads) <= 4 else min(3, len(cases))
    rows = math.ceil(len(cases) / columns)
    figure, axes = panels(rows, columns, height=height + (0.7 if rows == 1 else 0.25), **shared)
    flat = [a for row in axes for a in row]
    for spare in flat[len(cases) :]:
        spare.set_visible(False)
    for case, at in zip(cases, flat, strict=False):
        at.set_title(_title(comparison, case))
    headline(figure, heading, comparison.outcomes)
    return figure, list(zip(cases, flat, strict=False))


def headline(figure: Figure, heading: str, outcomes: Iterable[Outcome]) -> None:
    """The figure's heading, with the kinds and clocks of what it shows."""
    figure.suptitle(f"{heading} ({provenance(outcomes)})", x=0.01, ha="left", weight="bold")


def outer_labels(drawn: Sequence[tuple[Case, Axes]], x: str, y: str) -> None:
    """Axis labels on the left and the lowest panels alone."""
    for i, (_, axes) in enumerate(drawn):
        spec = axes.get_subplotspec()
        if spec is None or spec.is_first_col():
            axes.set_ylabel(y)
        columns = spec.get_gridspec().ncols if spec is not None else 1
        if i + columns >= len(drawn):
            axes.set_xlabel(x)
            axes.xaxis.set_tick_params(labelbottom=True)


def as_percent(value: float, _: Any = None) -> str:
    """A tick of a share of one."""
    return f"{100 * value:.0f} %"


def bounded(interval: tuple[float, float]) -> bool:
    """Whether both ends can be drawn."""
    return math.isfinite(interval[0]) and math.isfinite(interval[1])


def _title(comparison: Comparison, case: Case) -> str:
    name = plain(case.policy)
    if case.intensity is not None:
        name += f", {asked(case.intensity)}/s per km²"
    if len(comparison.groups) > 1:
        name = f"{plain(case.reference.scenario_name)}: {name}"
    invalid = not all(o.valid for o in case.outcomes)
    return f"{name}  INVALID" if invalid else name
