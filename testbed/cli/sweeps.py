"""Sweeps: one numeric field of a scenario over a range, as table, JSON and plot."""

from __future__ import annotations

from pathlib import Path

from testbed.cli.common import emit, page
from testbed.scenario import Scenario


def show_sweep(
    scenario: Scenario,
    text: str,
    *,
    delay_model: str | None,
    extension: str | None,
    as_json: bool,
    plot: Path | None,
) -> None:
    """``FIELD=from:to:count`` asked of the analytical model, each point from the last's waits."""
    from testbed.reporting.sweeps import draw_sweep, render_sweep
    from testbed.theory.sweep import parse_sweep, sweep

    field, values = parse_sweep(text)
    outcomes = sweep(scenario, field, values, delay_model=delay_model, extension=extension)
    if plot is not None:
        draw_sweep(field, values, outcomes, plot)
    if as_json:
        emit(
            {
                "field": field,
                "values": list(map(float, values)),
                "outcomes": [o.model_dump() for o in outcomes],
            }
        )
        return
    render_sweep(page(), field, values, outcomes)
