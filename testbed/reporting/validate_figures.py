"""Figures of a validation: both laws of each latency, and the engine's state over time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from testbed.reporting.style import INK, PALETTE, panels, save, styled
from testbed.simulation.validate import (
    NAMES,
    QUANTITIES,
    ValidationResult,
    engine_config,
    simulated_series,
)

SERIES = {"running": "running requests", "waiting": "waiting requests", "kv_cache_pct": "KV use, %"}


@styled
def validation_figure(result: ValidationResult) -> Figure:
    """Measured and predicted: distribution functions above, state over time below."""
    run, trace = result.run, result.trace
    shown = [name for name in SERIES if name in run.series]
    figure, axes = panels(2 if shown else 1, 3)
    measured = _samples(run.arrival, run.queued, run.first_token, run.finished, run.output_tokens)
    predicted = _samples(
        trace.arrival, trace.queued, trace.first_token, trace.finished, run.output_tokens
    )
    for axis, quantity in zip(axes[0], QUANTITIES, strict=True):
        _law(axis, measured[quantity], "measured", INK, "-")
        _law(axis, predicted[quantity], "predicted", PALETTE[0], (0, (5, 2)))
        axis.set_xlabel(f"{NAMES[quantity]}, s")
        axis.set_ylabel("fraction of requests")
        axis.set_ylim(0, 1)
    axes[0][0].legend(loc="lower right")
    if shown:
        times = run.series["t"]
        fine = np.linspace(0.0, max(float(times[-1]), result.simulated_seconds), 800)
        ours = simulated_series(trace, fine, engine_config(run).usable_blocks)
        for axis, name in zip(axes[1], SERIES, strict=True):
            if name in run.series:
                axis.plot(times, run.series[name], color=INK, linewidth=1.2)
            axis.plot(fine, ours[name], color=PALETTE[0], linewidth=1.0, linestyle=(0, (5, 2)))
            axis.set_xlabel("time since the first arrival, s")
            axis.set_ylabel(SERIES[name])
            axis.set_ylim(bottom=0)
    figure.suptitle(f"{result.model} on {result.device}: {result.compared} requests")
    return figure


def save_validation_figure(result: ValidationResult, path: str | Path) -> tuple[Path, Path]:
    """Write the figure as SVG and PNG; the two paths."""
    return save(validation_figure(result), path)


def _samples(
    arrival: np.ndarray,
    queued: np.ndarray,
    first: np.ndarray,
    last: np.ndarray,
    outputs: np.ndarray,
) -> dict[str, np.ndarray]:
    start = np.where(np.isnan(queued), arrival, queued)
    several = outputs > 1
    return {
        "ttft": first - start,
        "tpot": (last - first)[several] / (outputs[several] - 1),
        "latency": last - start,
    }


def _law(axis: Axes, values: np.ndarray, label: str, colour: str, dash: object) -> None:
    values = np.sort(values[np.isfinite(values)])
    probability = np.arange(1, len(values) + 1) / max(len(values), 1)
    axis.step(values, probability, where="post", label=label, color=colour, linestyle=dash)
