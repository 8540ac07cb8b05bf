"""Crowds on the page: prefills among others, by batch and chunk budget."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from calibration.record import Calibration, CrowdPoint
from testbed.reporting.figures import panels, styled
from testbed.reporting.page import Picture, Section
from testbed.reporting.style import FAINT, MARKERS, PALETTE
from testbed.reporting.table import Table, figure
from testbed.reporting.wording import percent, seconds


def crowd_section(record: Calibration) -> Section:
    """g(n | h; batch, chunk): figure and table."""
    return Section.of(
        "Prefill among others",
        Picture(
            crowd_figure(record.crowds),
            "Prompts that arrive together while others decode, by the token budget of a step. "
            "Left: time to the first tokens against what the step time says. Right: what the "
            "decodes pay, their longest pause against the longest step.",
        ),
        crowd_table(record.crowds),
    )


@styled
def crowd_figure(points: tuple[CrowdPoint, ...]) -> Figure:
    """Measured against the step time: first tokens, and the longest pause of a decode."""
    drawn, axes = panels(1, 2, height=3.2)
    pairs = (
        (axes[0][0], "median", "predicted", "time to the first tokens, s"),
        (axes[0][1], "stall", "longest_step", "longest pause of a decode, s"),
    )
    for plot, seen, said, title in pairs:
        known = [p for p in points if getattr(p, seen) and getattr(p, said)]
        for i, chunk in enumerate(sorted({p.chunk for p in known})):
            group = [p for p in known if p.chunk == chunk]
            plot.plot(
                [getattr(p, said) for p in group],
                [getattr(p, seen) for p in group],
                MARKERS[i % len(MARKERS)],
                color=PALETTE[i % len(PALETTE)],
                label=f"{chunk:,} tokens a step",
            )
        if known:
            values = np.array([[getattr(p, said), getattr(p, seen)] for p in known])
            ends = [values.min(), values.max()]
            plot.plot(ends, ends, color=FAINT, linewidth=0.8)
            plot.set(xscale="log", yscale="log")
            plot.legend(fontsize=7)
        plot.set(xlabel="by the step time, s", ylabel="measured, s", title=title)
        for axis in (plot.xaxis, plot.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_formatter(NullFormatter())
    return drawn


def crowd_table(points: tuple[CrowdPoint, ...]) -> Table:
    """Every case: first tokens, the step time's error, and what the decodes beside it paid."""
    rows = []
    for p in points:
        error = None if p.standard_error is None else f"± {seconds(p.standard_error)}"
        misfit = None if p.predicted is None else percent(100 * (p.predicted / p.median - 1))
        rows.append(
            (
                *(figure(f"{x:,}") for x in (p.chunk, p.decodes, p.prefills, p.new, p.cached)),
                figure(seconds(p.median)),
                figure(error),
                figure(f"{len(p.seconds)}"),
                figure(misfit),
                figure(None if p.stall is None else seconds(p.stall)),
                figure(None if p.longest_step is None else seconds(p.longest_step)),
                figure(None if p.pause is None else seconds(p.pause)),
            )
        )
    head = (
        "tokens a step",
        "decodes",
        "prompts",
        "new",
        "cached",
        "first tokens",
        "standard error",
        "samples",
        "step time − measured",
        "longest pause",
        "longest step",
        "usual pause",
    )
    apart = sum(p.apart for p in points)
    note = "Mean over the prompts of a sample, from the first step that holds them, by the "
    note += "engine's own stamps."
    if apart:
        note += f" {apart} samples whose prompts did not share their steps are left out."
    return Table("g(n | h; batch, chunk)", head, tuple(rows), note=note)
