"""Validation: a measured GPU run simulated from its own profile, against its own stamps.

Nothing of ``requests.jsonl`` but arrivals and token counts enters the simulation: step times
come from ``profile/``, the engine from ``meta.json``, shared prefixes from the trace that was
replayed. The measured stamps are looked at only afterwards.
"""

from __future__ import annotations

import hashlib
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from testbed.errors import CalibrationError, TraceError
from testbed.measured_run import MeasuredRun, read_run
from testbed.operator_profile import OperatorProfile, read_profile
from testbed.simulation.engine_model import EngineConfig, EngineTrace, simulate_engine
from testbed.workload.trace import Trace, read_trace

if TYPE_CHECKING:
    from rich.console import Console

FIGURES = ("mean", "p50", "p90", "p95", "p99")
QUANTITIES = ("ttft", "tpot", "latency")
NAMES = {"ttft": "time to first token", "tpot": "time per output token", "latency": "latency"}
UNLOADED = 5
"""First requests whose unloaded time to first token is shown."""


@dataclass(frozen=True)
class ValidationResult:
    """Figures in seconds; errors signed, per cent of the measured figure.

    ``ttft`` counts from the engine's queued stamp on both sides (as the published comparison of
    such runs does), ``ttft_from_arrival`` from the request's arrival.
    """

    directory: str
    model: str
    device: str
    engine: dict[str, Any]
    requests: int
    compared: int
    measured: dict[str, dict[str, float]]
    predicted: dict[str, dict[str, float]]
    ttft_error_percent: dict[str, float]
    tpot_error_percent: dict[str, float]
    latency_error_percent: dict[str, float]
    ttft_from_arrival_error_percent: dict[str, float]
    ttft_distance: float
    unloaded: tuple[dict[str, float | str], ...]
    time_series: dict[str, dict[str, float]]
    preemptions: int
    preempted_requests: int
    cached_tokens: int
    steps: int
    simulated_seconds: float
    wall_seconds: float
    notes: tuple[str, ...]
    run: MeasuredRun = field(repr=False)
    trace: EngineTrace = field(repr=False)
    profile: OperatorProfile = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; the arrays stay out."""
        kept = {k: v for k, v in self.__dict__.items() if k not in ("run", "trace", "profile")}
        return {**kept, "unloaded": list(self.unloaded), "notes": list(self.notes)}


def validate(
    directory: str | Path, trace: str | Path | None = None, *, profile: str | Path | None = None
) -> ValidationResult:
    """Simulate the run in ``directory`` and compare.

    Parameters
    ----------
    directory
        ``meta.json``, ``requests.jsonl``, ``profile/`` and, if there is one, ``timeseries.csv``.
    trace
        The trace that was replayed, for the prefixes that its prompts share. Looked for by the
        name and hash in ``meta.json`` when not given.
    profile
        Another profile than that of the folder.

    Raises
    ------
    CalibrationError
        A file is missing or malformed, or the run cannot be simulated.
    TraceError
        The trace cannot be read or is not the one that was replayed.
    """
    run = read_run(directory)
    engine = run.engine
    operators = read_profile(
        run.directory / "profile" if profile is None else profile,
        layers=engine.architecture.layers,
        tensor_parallel=engine.tensor_parallel,
        padding=engine.padding,
    )
    notes = [*run.notes, *operators.notes]
    blocks, offsets = _prefixes(run, trace, notes)
    config = engine_config(run)
    _note_extents(run, operators, config, notes)
    started = time.perf_counter()
    simulated = simulate_engine(
        config,
        operators.step_time,
        run.arrival,
        run.input_tokens,
        run.output_tokens,
        block_hashes=blocks,
        block_offsets=offsets,
        log=True,
    )
    wall = time.perf_counter() - started
    if simulated.rejected.any():
        first = int(np.flatnonzero(simulated.rejected)[0])
        raise CalibrationError(
            f"{run.directory / 'requests.jsonl'}:{run.lines[first]}: a request of "
            f"{run.input_tokens[first]} input and {run.output_tokens[first]} output tokens does "
            f"not fit a pool of {config.num_blocks} blocks of {config.block_size}"
        )

    measured = _figures(run.arrival, run.queued, run.first_token, run.finished, run.output_tokens)
    compared = np.isfinite(run.first_token) & np.isfinite(run.finished)
    if not compared.any():
        raise CalibrationError(
            f"{run.directory / 'requests.jsonl'}: no request has a first and a last token"
        )
    predicted = _figures(
        simulated.arrival,
        simulated.queued,
        np.where(compared, simulated.first_token, np.nan),
        np.where(compared, simulated.finished, np.nan),
        run.output_tokens,
    )
    errors = {q: _errors(measured.get(q), predicted.get(q)) for q in (*QUANTITIES, _ARRIVAL)}
    return ValidationResult(
        directory=str(run.directory),
        model=engine.model,
        device=engine.device,
        engine={
            "version": engine.version,
            "num_blocks": engine.num_blocks,
            "block_size": engine.block_size,
            "token_budget": engine.token_budget,
            "max_sequences": engine.max_sequences,
            "prefix_caching": engine.prefix_caching,
            "async_scheduling": engine.async_scheduling,
            "tensor_parallel": engine.tensor_parallel,
            "layers": engine.architecture.layers,
        },
        requests=len(run.arrival),
        compared=int(compared.sum()),
        measured=measured,
        predicted=predicted,
        ttft_error_percent=errors["ttft"],
        tpot_error_percent=errors["tpot"],
        latency_error_percent=errors["latency"],
        ttft_from_arrival_error_percent=errors[_ARRIVAL],
        ttft_distance=_distance(
            (run.first_token - _start(run))[compared],
            (simulated.first_token - simulated.queued)[compared],
        ),
        unloaded=_unloaded(run, simulated, operators, config),
        time_series=_compare_series(run, simulated, config),
        preemptions=int(simulated.preemptions.sum()),
        preempted_requests=int((simulated.preemptions > 0).sum()),
        cached_tokens=int(simulated.cached_tokens.sum()),
        steps=simulated.steps,
        simulated_seconds=float(np.nanmax(simulated.finished)),
        wall_seconds=wall,
        notes=tuple(notes),
        run=run,
        trace=simulated,
        profile=operators,
    )


def engine_config(run: MeasuredRun) -> EngineConfig:
    """The engine of a measured run."""
    engine = run.engine
    return EngineConfig(
        token_budget=engine.token_budget,
        max_sequences=engine.max_sequences,
        block_size=engine.block_size,
        num_blocks=engine.num_blocks,
        prefix_caching=engine.prefix_caching,
        async_scheduling=engine.async_scheduling,
        max_model_len=max(engine.max_model_len, 2),
    )


# --- Shared prefixes --------------------------------------------------------------------------


def engine_blocks(trace: Trace, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Contents of each prompt's full engine blocks from a trace's chains, and their offsets.

    An engine block ends somewhere in a block of the trace; block and place in it together name
    all tokens up to there.
    """
    if trace.block_size == 0:
        return np.zeros(0, dtype=np.int64), np.zeros(len(trace) + 1, dtype=np.int64)
    covered = np.diff(trace.block_offsets) * trace.block_size
    counts = np.minimum(covered, trace.input_tokens) // block_size
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    index = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
    end = (index + 1) * block_size - 1
    chain = np.repeat(trace.block_offsets[:-1], counts) + end // trace.block_size
    _, dense = np.unique(trace.blocks, return_inverse=True)
    return dense[chain] * trace.block_size + end % trace.block_size, offsets


def _prefixes(
    run: MeasuredRun, path: str | Path | None, notes: list[str]
) -> tuple[np.ndarray | None, np.ndarray | None]:
    if not run.engine.prefix_caching:
        return None, None
    if path is None:
        path = _find_trace(run)
        if path is None:
            notes.append(
                "no trace given, nor found by the name and hash in meta.json: prompts are taken "
                "to share nothing"
            )
            return None, None
        notes.append(f"shared prefixes from {Path(path).name}, found by name and hash")
    trace = read_trace(path, block_size=run.engine.block_size)
    count = len(run.input_tokens)
    if len(trace) < count or (trace.input_tokens[:count] != run.input_tokens).any():
        if len(trace) < count:
            raise TraceError(f"{path}: {len(trace)} requests, {count} were measured")
        at = int(np.flatnonzero(trace.input_tokens[:count] != run.input_tokens)[0])
        raise TraceError(
            f"{path}: request {at + 1} has {trace.input_tokens[at]} input tokens; the run's "
            f"({run.names[at]}, line {run.lines[at]}) has {run.input_tokens[at]}"
        )
    blocks, offsets = engine_blocks(trace, run.engine.block_size)
    return blocks, offsets[: count + 1]


def _find_trace(run: MeasuredRun) -> Path | None:
    """The replayed file near the folder, told by its name and confirmed by its hash."""
    name, digest = run.meta.get("dataset_path"), run.meta.get("dataset_hash")
    if not isinstance(name, str) or not isinstance(digest, str):
        return None
    near = run.directory.resolve()
    base = Path(name).name
    places = [near / name, near / base, near.parent / base]
    for up in near.parents[:3]:
        places.extend([up / "traces" / base, *sorted(up.glob(f"traces/*/{base}"))])
    for place in places:
        if place.is_file() and hashlib.sha256(place.read_bytes()).hexdigest() == digest:
            return place
    return None


# --- Figures ----------------------------------------------------------------------------------

_ARRIVAL = "ttft_from_arrival"


def _start(run: MeasuredRun) -> np.ndarray:
    return np.where(np.isnan(run.queued), run.arrival, run.queued)


def _figures(
    arrival: np.ndarray,
    queued: np.ndarray,
    first: np.ndarray,
    last: np.ndarray,
    outputs: np.ndarray,
) -> dict[str, dict[str, float]]:
    start = np.where(np.isnan(queued), arrival, queued)
    several = outputs > 1
    samples = {
        "ttft": first - start,
        "tpot": (last - first)[several] / (outputs[several] - 1),
        "latency": last - start,
        _ARRIVAL: first - arrival,
    }
    return {name: _summary(values) for name, values in samples.items()}


def _summary(values: np.ndarray) -> dict[str, float]:
    values = values[np.isfinite(values)]
    if len(values) == 0:
        return {}
    quantiles = np.percentile(values, [50, 90, 95, 99])
    return dict(zip(FIGURES, [float(values.mean()), *map(float, quantiles)], strict=True))


def _errors(
    measured: dict[str, float] | None, predicted: dict[str, float] | None
) -> dict[str, float]:
    if not measured or not predicted:
        return {}
    return {
        name: 100.0 * (predicted[name] / measured[name] - 1.0)
        for name in FIGURES
        if measured[name] > 0
    }


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    """Kolmogorov-Smirnov distance of two samples."""
    grid = np.sort(np.concatenate([a, b]))
    left = np.searchsorted(np.sort(a), grid, side="right") / len(a)
    right = np.searchsorted(np.sort(b), grid, side="right") / len(b)
    return float(np.abs(left - right).max())


def unloaded_ttft(
    operators: OperatorProfile, config: EngineConfig, tokens: int, cached: int
) -> float:
    """Prefill of one prompt on an idle engine, cut by the token budget, s."""
    total, before = 0.0, cached
    while before < tokens:
        n = min(config.token_budget, tokens - before)
        total += operators.step_time.seconds([(n, before)])
        before += n
    return total


def _unloaded(
    run: MeasuredRun, simulated: EngineTrace, operators: OperatorProfile, config: EngineConfig
) -> tuple[dict[str, float | str], ...]:
    rows: list[dict[str, float | str]] = []
    for i in range(min(UNLOADED, len(run.arrival))):
        tokens, cached = int(run.input_tokens[i]), int(simulated.cached_tokens[i])
        row: dict[str, float | str] = {
            "request": run.names[i],
            "input_tokens": tokens,
            "cached_tokens": cached,
            "unloaded": unloaded_ttft(operators, config, tokens, cached),
            "simulated": float(simulated.first_token[i] - simulated.queued[i]),
        }
        measured = float(run.first_token[i] - _start(run)[i])
        if math.isfinite(measured):
            row["measured"] = measured
        rows.append(row)
    return tuple(rows)


def simulated_series(
    simulated: EngineTrace, at: np.ndarray, usable_blocks: int
) -> dict[str, np.ndarray]:
    """Running, waiting and KV use (per cent) at times ``at``: as the last step before began."""
    log = simulated.log
    if log is None:
        raise ValueError("simulate_engine was not asked for a log")
    row = np.searchsorted(log["start"], at, side="right") - 1
    live = (row >= 0) & (at < log["end"][-1])
    index = np.maximum(row, 0)
    return {
        "running": np.where(live, log["running"][index], 0.0),
        "waiting": np.where(live, log["waiting"][index], 0.0),
        "kv_cache_pct": np.where(live, log["used_blocks"][index] / usable_blocks * 100.0, 0.0),
    }


def _compare_series(
    run: MeasuredRun, simulated: EngineTrace, config: EngineConfig
) -> dict[str, dict[str, float]]:
    if not run.series:
        return {}
    ours = simulated_series(simulated, run.series["t"], config.usable_blocks)
    compared = {}
    for name, values in ours.items():
        theirs = run.series.get(name)
        if theirs is None:
            continue
        gap = values - theirs
        compared[name] = {
            "measured_mean": float(theirs.mean()),
            "predicted_mean": float(values.mean()),
            "mean_absolute_error": float(np.abs(gap).mean()),
            "largest_error": float(np.abs(gap).max()),
        }
    return compared


def _note_extents(
    run: MeasuredRun, operators: OperatorProfile, config: EngineConfig, notes: list[str]
) -> None:
    """Say where the run may leave the profile's grids."""
    step = operators.step_time
    longest = int((run.input_tokens + run.output_tokens).max())
    reach = {
        "tokens in a step": (min(config.token_budget, int(run.input_tokens.sum())), step.tokens),
        "prefill chunk": (min(config.token_budget, int(run.input_tokens.max())), step.chunk),
        "context": (longest, step.decode_context),
        "sequences": (min(config.max_sequences, len(run.arrival)), step.sequences),
    }
    for name, (most, grid) in reach.items():
        if most > grid[-1]:
            notes.append(
                f"{name} may reach {most}, the profile ends at {grid[-1]:g}: its trend goes on"
            )


# --- On a terminal ----------------------------------------------------------------------------


def render_validation(console: Console, result: ValidationResult) -> None:
    """Print a result on a Rich console."""
    from rich.table import Table

    console.print(
        f"[bold]{result.model}[/bold] on {result.device}: {result.compared} of "
        f"{result.requests} requests compared, {result.steps} steps simulated in "
        f"{result.wall_seconds:.2f} s for {result.simulated_seconds:.1f} s of engine time"
    )
    table = Table("seconds", "", *FIGURES)
    for column in table.columns[2:]:
        column.justify = "right"
    for quantity in QUANTITIES:
        measured, predicted = result.measured[quantity], result.predicted[quantity]
        error = getattr(result, f"{quantity}_error_percent")
        if not measured or not predicted:
            continue
        table.add_row(NAMES[quantity], "measured", *(f"{measured[f]:.4g}" for f in FIGURES))
        table.add_row("", "predicted", *(f"{predicted[f]:.4g}" for f in FIGURES))
        table.add_row(
            "",
            "[bold]error %[/bold]",
            *(f"{error[f]:+.2f}" if f in error else "-" for f in FIGURES),
            end_section=True,
        )
    console.print(table)
    if result.unloaded:
        first = Table("first requests", "input", "cached", "unloaded", "simulated", "measured")
        for column in first.columns[1:]:
            column.justify = "right"
        for row in result.unloaded:
            times = (row["unloaded"], row["simulated"], row.get("measured", math.nan))
            first.add_row(
                str(row["request"]),
                f"{row['input_tokens']:.0f}",
                f"{row['cached_tokens']:.0f}",
                *(f"{t:.3f}" for t in times),
            )
        console.print(first)
    for name, values in result.time_series.items():
        console.print(
            f"{name}: measured mean {values['measured_mean']:.1f}, predicted "
            f"{values['predicted_mean']:.1f}, mean absolute error "
            f"{values['mean_absolute_error']:.1f} a tick"
        )
    console.print(
        f"{result.preemptions} preemptions of {result.preempted_requests} requests, "
        f"{result.cached_tokens} prompt tokens from the prefix cache, KS distance of the TTFT "
        f"laws {result.ttft_distance:.3f}"
    )
    for note in result.notes:
        console.print(f"note: {note}", style="dim")
