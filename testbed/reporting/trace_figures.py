"""Trace figures: arrivals, lengths, sharing and cache behaviour of one trace."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, PercentFormatter

from testbed.reporting.style import FAINT, INK, PALETTE, panels, save, styled
from testbed.workload.forest import PrefixForest
from testbed.workload.lru import HitCurve, hit_curve, overlap_depth
from testbed.workload.trace import Trace

_POINTS = 2000
"""A curve of more points is thinned: nobody can see them."""

_LONG = 30.0
"""Mean gaps; where one gap is longer, gaps are drawn on a logarithmic axis."""


@styled
def arrival_figure(trace: Trace) -> Figure:
    """Rate over time, and the distribution of gaps beside that of a Poisson process."""
    figure, ((rate, gaps),) = panels(1, 2)
    window, counts = windowed_counts(trace)
    edges = window * np.arange(len(counts) + 1)
    rate.stairs(counts / window, edges, color=INK, linewidth=1.0)
    rate.axhline(trace.rate, color=FAINT, linewidth=0.8, linestyle="--")
    rate.set(xlabel="seconds", ylabel="requests/s", title=f"Arrivals in {window:.3g}-s windows")
    gap = np.sort(np.diff(trace.arrival))
    if len(gap) and gap[-1] > 0:
        above = 1.0 - np.arange(len(gap)) / len(gap)
        keep = _thin(len(gap))
        gaps.plot(gap[keep], above[keep], color=INK, label="trace", drawstyle="steps-post")
        x = np.geomspace(1e-3 * gap.mean(), gap[-1], 400)
        shown = np.exp(-x * trace.rate)
        gaps.plot(x, shown, color=PALETTE[0], linestyle="--", label="Poisson of this rate")
        gaps.set(yscale="log", ylim=(0.5 / len(gap), 1.2))
        if gap[-1] > _LONG * gap.mean():  # a linear axis would show the longest gaps alone
            gaps.set(xscale="log", xlim=(1e-3 * gap.mean(), 1.5 * gap[-1]))
            _powers(gaps.xaxis)
        gaps.legend()
        _powers(gaps.yaxis)
    gaps.set(xlabel="gap, seconds", ylabel="P(gap ≥ x)", title="Gaps between requests")
    return figure


def windowed_counts(trace: Trace) -> tuple[float, np.ndarray]:
    """Seconds of a window, about a hundredth of the trace, and the requests in each whole one.

    Windows hold whole steps of the recorded times' grid: others would hold now one step more, now
    one less, and show the grid in place of the load.
    """
    span = max(trace.duration, 1e-9)
    step = trace.time_grid or 1e-9
    window = max(1, round(span / 120 / step)) * step
    number = max(1, int(span / window * (1 + 1e-12)))
    index = ((trace.arrival - trace.arrival[0]) / window * (1 + 1e-12)).astype(np.int64)
    return window, np.bincount(index[index < number], minlength=number)


@styled
def length_figure(trace: Trace) -> Figure:
    """Distributions of input and output lengths."""
    figure, ((inputs, outputs),) = panels(1, 2, sharey=True)
    for axes, values, name in (
        (inputs, trace.input_tokens, "Input"),
        (outputs, trace.output_tokens, "Output"),
    ):
        _cdf(axes, values, INK, None)
        axes.set(xscale="log", xlabel="tokens", title=f"{name} length")
        _powers(axes.xaxis)
    inputs.set_ylabel("share of requests")
    return figure


@styled
def cache_figure(trace: Trace, forest: PrefixForest, curve: HitCurve) -> Figure:
    """Hit ratio against cache size, and how many requests carry each block."""
    figure, ((hits, support),) = panels(1, 2)
    sizes = np.unique(np.geomspace(1, len(forest), 200).astype(np.int64))
    hits.plot(sizes, curve.tokens[sizes - 1], color=INK, label="by tokens")
    hits.plot(sizes, curve.blocks[sizes - 1], color=PALETTE[0], linestyle="--", label="by blocks")
    hits.set(xscale="log", ylim=(0, None), title="LRU prefix cache, exact", ylabel="hit ratio")
    hits.set_xlabel(f"cache, blocks of {trace.block_size} tokens")
    hits.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _powers(hits.xaxis)
    hits.legend()
    ranked = np.sort(forest.count)[::-1]
    at = np.unique(np.geomspace(1, len(ranked), 400).astype(np.int64))
    support.plot(at, ranked[at - 1], color=INK)
    support.set(xscale="log", yscale="log", xlabel="block, by rank", ylabel="requests")
    _powers(support.xaxis)
    _powers(support.yaxis)
    support.set_title("Requests that carry a block")
    return figure


@styled
def sharing_figure(trace: Trace, forest: PrefixForest) -> Figure:
    """How deep prompts overlap with earlier ones, and how long shared blocks live."""
    figure, ((depth, lives),) = panels(1, 2, sharey=True)
    _cdf(depth, overlap_depth(trace, forest), INK, "tokens shared")
    _cdf(depth, trace.input_tokens, FAINT, "prompt length", "--")
    depth.set(xlabel="tokens", ylabel="share of requests")
    depth.set_xscale("symlog", linthresh=100.0)
    _powers(depth.xaxis)
    depth.set_title("Overlap with earlier prompts")
    depth.set_xlim(left=0)
    depth.legend()
    shared = forest.count > 1
    if shared.any():
        _cdf(lives, (forest.last_use - forest.first_use)[shared], INK, "first to last use")
        _cdf(lives, forest.reuse_intervals(trace.arrival)[1], PALETTE[1], "between uses", "--")
        lives.set_xscale("symlog", linthresh=1.0)
        _powers(lives.xaxis)
        lives.set_xlim(left=0)
        lives.legend()
    lives.set(xlabel="seconds", title="Lifetime of shared blocks")
    return figure


def trace_figures(trace: Trace) -> dict[str, Figure]:
    """Every figure that the trace has data for, by name."""
    figures = {"arrivals": arrival_figure(trace), "lengths": length_figure(trace)}
    if len(trace.blocks):
        forest = PrefixForest.of(trace)
        figures["cache"] = cache_figure(trace, forest, hit_curve(trace, forest))
        figures["sharing"] = sharing_figure(trace, forest)
    return figures


def save_trace_figures(trace: Trace, folder: str | Path) -> list[Path]:
    """Write every figure as SVG and PNG into a folder; the paths written."""
    written: list[Path] = []
    for name, figure in trace_figures(trace).items():
        written.extend(save(figure, Path(folder) / f"trace-{name}"))
    return written


def _cdf(axes: Axes, values: np.ndarray, colour: str, label: str | None, dash: str = "-") -> None:
    x = np.sort(values)
    y = np.arange(1, len(x) + 1) / len(x)
    keep = _thin(len(x))
    axes.plot(x[keep], y[keep], color=colour, linestyle=dash, label=label, drawstyle="steps-post")
    axes.set_ylim(0, 1.02)


def _powers(axis: Axis) -> None:
    """Label powers of ten as plain numbers: the project's style shows no mathematics."""
    axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}" if v >= 1 else f"{v:g}"))
    axis.set_minor_formatter(NullFormatter())


def _thin(count: int) -> np.ndarray:
    return np.unique(np.linspace(0, count - 1, min(count, _POINTS)).astype(np.int64))
