"""Report: one self-contained page and the plots of a calibration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from calibration.record import Calibration, LoadRecord
from calibration.report_crowds import crowd_figure, crowd_section
from calibration.waiting import QUANTILES, explain
from testbed.reporting.calibration_tables import calibration_tables
from testbed.reporting.figures import panels, save, styled
from testbed.reporting.page import Picture, Section, write_page
from testbed.reporting.style import DASHES, FAINT, INK, MARKERS, PALETTE
from testbed.reporting.table import Table, figure, words
from testbed.reporting.wording import percent, plain, seconds, significant
from testbed.theory.prefill import prefill_time


def write_calibration_report(path: str | Path, record: Calibration) -> Path:
    """Write the page of a calibration: figures, tables, every misfit; returns its path."""
    data = record.model_dump(mode="json", exclude_none=True)
    where = f"{record.engine.name} on {record.device.name}, {record.model.name}"
    sections = [Section.of("What was measured", *calibration_tables(data))]
    if record.prefill is not None and record.prefill_points:
        sections.append(
            Section.of(
                "Unloaded prefill",
                Picture(
                    prefill_figure(record),
                    "Medians with every sample behind them; lines are the chosen fit of g(n | h). "
                    "Below, the fit against the medians.",
                ),
                grid_table(record),
            )
        )
    if record.crowds:
        sections.append(crowd_section(record))
    if record.decode or record.step_time is not None:
        sections.append(
            Section.of(
                "Decode",
                Picture(
                    decode_figure(record),
                    "Seconds per generated token with so many sequences decoding together: "
                    "measured at the caller, and the step time regressed on the step log.",
                ),
            )
        )
    if record.c_s:
        sections.append(Section.of("KV pool and concurrency", concurrency_table(record)))
    if record.waiting:
        sections += _waiting(record.waiting)
    drift = record.extra.get("drift", {}).get("relative_time_by_round")
    if drift and len(drift) > 1:
        sections.append(
            Section.of(
                "Drift",
                Picture(
                    drift_figure(drift),
                    "Median unloaded prefill of each pass over the grid, relative to the points' "
                    "own medians: the machine's speed while it was calibrated.",
                ),
            )
        )
    if record.source.notes:
        sections.append(Section.of("Notes", *(plain(n) for n in record.source.notes)))
    return write_page(path, f"Calibration: {plain(where)}", sections)


def save_plots(folder: str | Path, record: Calibration) -> list[Path]:
    """The page's figures as SVG and PNG files; returns their paths."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    drawn: dict[str, Figure] = {}
    if record.prefill is not None and record.prefill_points:
        drawn["prefill"] = prefill_figure(record)
    if record.crowds:
        drawn["crowds"] = crowd_figure(record.crowds)
    if record.decode or record.step_time is not None:
        drawn["decode"] = decode_figure(record)
    for name in dict.fromkeys(x.profile for x in record.waiting):
        slug = "".join(c if c.isalnum() else "-" for c in name)
        drawn[f"waiting-{slug}"] = waiting_figure([x for x in record.waiting if x.profile == name])
    return [path for name, plot in drawn.items() for path in save(plot, folder / name)]


@styled
def prefill_figure(record: Calibration) -> Figure:
    """g(n | h) by cached depth, log-log, and the relative residuals of the fit beneath."""
    drawn, axes = panels(2, 1, height=3.0, sharex="all")
    top, bottom = axes[0][0], axes[1][0]
    depths = sorted({p.cached for p in record.prefill_points})
    shown = depths if len(depths) <= len(PALETTE) else depths[:: -(-len(depths) // len(PALETTE))]
    fit = record.prefill_or_raise()
    for i, h in enumerate(shown):
        points = sorted((p for p in record.prefill_points if p.cached == h), key=lambda p: p.new)
        colour, marker = PALETTE[i % len(PALETTE)], MARKERS[i % len(MARKERS)]
        new = np.array([p.new for p in points], dtype=float)
        median = np.array([p.median for p in points])
        for p in points:
            top.plot([p.new] * len(p.seconds), p.seconds, ".", color=colour, alpha=0.25, ms=3)
        label = f"{h:,} cached" if h else "cold"
        top.plot(new, median, marker, color=colour, label=label)
        line = np.geomspace(new.min(), new.max(), 60)
        said = np.array([float(prefill_time(fit, n, h)) for n in line])
        top.plot(line, said, color=colour, linewidth=1)
        at = np.array([float(prefill_time(fit, n, h)) for n in new])
        bottom.plot(new, 100 * (at / median - 1), marker, color=colour)
    top.set(xscale="log", yscale="log", ylabel="unloaded prefill, s", title="g(n | h)")
    _plain_ticks(top)
    top.legend(ncols=2)
    bottom.axhline(0, color=FAINT, linewidth=0.8)
    bottom.set(xlabel="new tokens n", ylabel="fit − measured, %", title="Misfit")
    return drawn


@styled
def decode_figure(record: Calibration) -> Figure:
    """Seconds per token against the decode batch."""
    drawn, axes = panels(1, 1, height=2.8)
    plot: Axes = axes[0][0]
    if record.decode:
        batch = [d.concurrency for d in record.decode]
        each = [1e3 * d.per_token for d in record.decode]
        error = [1.96e3 * d.standard_errors.get("per_token", 0.0) for d in record.decode]
        plot.errorbar(batch, each, error, fmt="o", color=INK, label="measured (95 %)", capsize=2)
    if record.step_time is not None:
        most = record.engine.max_sequences or 16
        batches = np.arange(1, most + 1)
        contexts = sorted({round(d.context_tokens or 0) for d in record.decode}) or [64]
        for i, context in enumerate([contexts[0], contexts[0] + 1024]):
            step = [
                1e3 * record.step_time.seconds(decodes=int(m), decode_context=float(m * context))
                for m in batches
            ]
            label = f"step time at {context:,} tokens of context"
            plot.plot(batches, step, color=PALETTE[i], linestyle=DASHES[i], label=label)
    plot.set(xlabel="sequences decoding together", ylabel="ms per token", title="Decode step")
    plot.set_ylim(bottom=0)
    plot.legend()
    return drawn


@styled
def drift_figure(relative: Sequence[float]) -> Figure:
    """Relative time by pass."""
    drawn, axes = panels(1, 1, height=2.0)
    axes[0][0].plot(range(1, len(relative) + 1), relative, "o-", color=INK)
    axes[0][0].axhline(1, color=FAINT, linewidth=0.8)
    axes[0][0].set(xlabel="pass over the grid", ylabel="relative time", title="Speed")
    return drawn


@styled
def waiting_figure(loads: Sequence[LoadRecord]) -> Figure:
    """P(excess delay > t) of one profile: a panel a load, measured in ink, models in colour."""
    columns = 2 if len(loads) > 1 else 1
    rows = -(-len(loads) // columns)
    drawn, axes = panels(rows, columns, height=2.6)
    flat = [a for row in axes for a in row]
    names = [m.model for m in loads[0].models if m.model in loads[0].curve]
    for plot, load in zip(flat, loads, strict=False):
        at = 1e3 * np.array(load.curve["seconds"])
        for i, name in enumerate(names):
            if name in load.curve:
                tail = 1 - np.array(load.curve[name])
                style = DASHES[i % len(DASHES)]
                plot.plot(at, tail, color=PALETTE[i % len(PALETTE)], linestyle=style, label=name)
        tail = 1 - np.array(load.curve["measured"])
        plot.plot(at, tail, color=INK, linewidth=3, alpha=0.75, label="measured", zorder=1)
        title = f"load {load.load:g}: {load.arrival_rate:.1f} requests/s"
        plot.set(xscale="log", yscale="log", title=title, ylim=(2e-3, 1.2))
        plot.set(xlabel="excess delay t, ms", ylabel="P(delay > t)")
        _plain_ticks(plot)
    for plot in flat[len(loads) :]:
        plot.set_visible(False)
    flat[0].legend(fontsize=7)
    return drawn


def _plain_ticks(axes: Axes) -> None:
    """Numbers instead of powers of ten, which the style writes as text."""
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())


def grid_table(record: Calibration) -> Table:
    """Every point of the grid: median, error, samples, outliers, and the fit's misfit."""
    fit = record.prefill_or_raise()
    rows = []
    for p in record.prefill_points:
        said = float(prefill_time(fit, p.new, p.cached))
        error = None if p.standard_error is None else f"± {seconds(p.standard_error)}"
        rows.append(
            (
                figure(f"{p.new:,}"),
                figure(f"{p.cached:,}"),
                figure(seconds(p.median)),
                figure(error),
                figure(f"{len(p.seconds)}"),
                figure(f"{p.outliers}"),
                figure(percent(100 * (said / p.median - 1))),
            )
        )
    head = ("new", "cached", "median", "standard error", "samples", "outliers", "fit − measured")
    return Table("The grid of unloaded prefills", head, tuple(rows))


def concurrency_table(record: Calibration) -> Table:
    """c_s as seen beside the formula, by profile."""
    rows = []
    for c in record.c_s:
        m_run = None if c.per_sequence is None else f"{c.per_sequence.value:,.0f}"
        rows.append(
            (
                words(c.profile),
                figure(f"{c.persistent_bytes:,.0f}"),
                figure(m_run),
                figure(None if c.formula is None else f"{c.formula}"),
                figure(None if c.measured is None else f"{c.measured}"),
                words(c.limit or "–"),
                figure(None if c.preemptions is None else f"{c.preemptions}"),
                figure(None if c.fragmentation is None else percent(100 * c.fragmentation)),
            )
        )
    head = (
        "profile",
        "B_s, bytes",
        "m_run, bytes",
        "floor((M − B_s)/m_run)",
        "c_s measured",
        "bounded by",
        "preemptions",
        "allocated, unused",
    )
    return Table("Sequences at once (Theory A9)", head, tuple(rows))


def waiting_table(loads: Sequence[LoadRecord]) -> Table:
    """Each model's error at each load of one profile."""
    rows = []
    for load in loads:
        for m in load.models:
            errors = [m.errors.get(k) for k in ("mean", *map(str, QUANTILES))]
            rows.append(
                (
                    figure(f"{load.load:g}"),
                    words(m.model),
                    figure(None if m.ks_distance is None else f"{m.ks_distance:.3f}"),
                    *(figure(None if e is None else percent(100 * e)) for e in errors),
                    words(m.note or ""),
                )
            )
    head = ("load", "model", "KS", "mean", *(f"p{100 * z:g}" for z in QUANTILES), "")
    note = "; ".join(f"{x.load:g}: {x.ks_noise:.3f}" for x in loads)
    return Table(
        "Error of predicted TTFT, and KS distance of the excess delay",
        head,
        tuple(rows),
        note=f"KS distance that this many requests show by chance (95 %), by load: {note}",
    )


def load_table(loads: Sequence[LoadRecord]) -> Table:
    """What was measured at each load, with 95 % intervals."""
    rows = []
    for x in loads:
        cells = [figure(f"{x.load:g}"), figure(f"{x.arrival_rate:.2f}"), figure(f"{x.requests:,}")]
        cells.append(figure(f"{seconds(x.mean[0])} [{seconds(x.mean[1])}, {seconds(x.mean[2])}]"))
        for z in map(str, QUANTILES):
            if z not in x.quantiles:  # a record of an earlier version
                cells.append(figure(None))
                continue
            value, low, high = x.quantiles[z]
            ends = [seconds(e) if e is not None else "?" for e in (low, high)]
            cells.append(figure(f"{seconds(value)} [{', '.join(ends)}]"))
        cells.append(
            figure(f"{significant(x.relative_time[0])} → {significant(x.relative_time[1])}")
        )
        speed = x.step_relative_time
        cells.append(figure(None if speed is None else f"{speed:.3f}"))
        rows.append(tuple(cells))
    levels = (f"p{100 * z:g}" for z in QUANTILES)
    head = ("load", "requests/s", "requests", "mean", *levels, "unloaded", "steps")
    note = "Load: share of the measured capacity. ?: the sample does not hold that bound. "
    note += "Unloaded: relative time of unloaded requests before and after; steps: of this load's "
    note += "own steps against the step time. "
    if any(not x.reliable for x in loads):
        unsure = ", ".join(f"{x.load:g}" for x in loads if not x.reliable)
        note += f" Too short for its intervals to hold their level: load {unsure}."
    return Table("TTFT under Poisson load", head, tuple(rows), note=note)


def _waiting(loads: Sequence[LoadRecord]) -> list[Section]:
    by_profile: dict[str, list[LoadRecord]] = {}
    for load in loads:
        by_profile.setdefault(load.profile, []).append(load)
    sections = []
    for name, group in by_profile.items():
        why = [f"Load {x.load:g}: {explain(x)}." for x in group if x.reasons]
        sections.append(
            Section.of(
                f"Delay under load: {plain(name)}",
                Picture(
                    waiting_figure(group),
                    "Excess delay beyond the unloaded TTFT, its tail. Models know the calibration "
                    "alone; the step simulator gets the run's own arrivals as well.",
                ),
                load_table(group),
                waiting_table(group),
                *(["Why an M/M/c queue misses, as measured:", *why] if why else []),
            )
        )
    return sections
