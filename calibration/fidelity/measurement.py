"""CellMeasurement: a replayed cell, its run's own speed, and the simulations beside it."""

from __future__ import annotations

from typing import Any

import numpy as np

from calibration.fidelity.analysis import Trial
from calibration.fidelity.workload import NodeWorkload, Requests
from calibration.steps import CONTIGUOUS
from cluster.engines.base import EngineFacts
from cluster.engines.device_time_clock import LATE_LIMIT
from testbed.errors import EngineError
from testbed.simulation.engine_model import EngineConfig
from testbed.step_time import AnyStepTime, step_seconds

LEAST_STEPS = 20
AS_ASKED = 0.99
"""Share of the requests that must reuse the tokens that their type says."""
SLOW = 0.005
"""Relative deviation of the run's speed from which it is tried as a cause."""


def check_engine(config: EngineConfig, facts: EngineFacts) -> None:
    """The engine that runs must be the one that was predicted.

    Raises
    ------
    EngineError
        It says something else of itself.
    """
    pairs = [
        ("blocks", config.num_blocks, facts.num_blocks),
        ("block size", config.block_size, facts.block_size),
        ("sequences", config.max_sequences, facts.max_sequences),
        ("token budget", config.token_budget, facts.token_budget),
        (
            "scheduling ahead",
            config.async_scheduling,
            facts.extra.get("async_scheduling", config.async_scheduling),
        ),
    ]
    for what, asked, found in pairs:
        if what == "blocks" and config.scheduler == "sglang":
            continue  # its pool is counted in tokens and rounded its own way
        if asked != found:
            raise EngineError(f"{what}: predictions assume {asked}, the engine has {found}")


def run_speed(steps: dict[str, np.ndarray] | None, step_time: AnyStepTime) -> dict[str, Any] | None:
    """Calibrated over measured seconds of the run's own steps: 0.97 says 3 % slower than
    calibrated. None without a step log.

    A step is measured from its start to the next one's where work went on, so that what the
    engine does between steps is in it.
    """
    if steps is None or len(steps["started"]) < LEAST_STEPS:
        return None
    gap = steps["started"][1:] - steps["finished"][:-1]
    busy = (gap >= 0) & (gap < CONTIGUOUS)
    taken = (steps["started"][1:] - steps["started"][:-1])[busy]
    columns = ("prefills", "new_tokens", "new_squared", "new_context", "decodes", "decode_context")
    said = np.array(
        [
            step_seconds(step_time.packed, int(n), a, b, c, int(d), e)
            for n, a, b, c, d, e in zip(*(steps[c][:-1][busy] for c in columns), strict=True)
        ]
    )
    thirds = np.array_split(np.arange(len(taken)), 3)
    return {
        "speed": float(said.sum() / taken.sum()),
        "by_third": [float(said[i].sum() / taken[i].sum()) for i in thirds],
        "steps": len(steps["started"]),
        "median_relative_error": float(np.median(np.abs(said / taken - 1.0))),
        "mean_gap": float(gap[busy].mean()),
    }


def why_invalid(pace: dict[str, Any] | None, cached_as_asked: float) -> str | None:
    """Why a cell's measurement is not to be trusted, or None."""
    found = []
    if pace is not None and pace["late"] > LATE_LIMIT:
        found.append(
            f"{pace['late']:.1%} of the steps in device time were late (limit {LATE_LIMIT:.0%})"
        )
    if cached_as_asked < AS_ASKED:
        found.append(
            f"{1.0 - cached_as_asked:.1%} of the requests reused other tokens than they should"
        )
    return "; ".join(found) or None


def lateness(replayed: dict[str, Any]) -> dict[str, float]:
    """How late requests left, s."""
    lag = replayed["sent"] - replayed["intended"]
    return {"p50": float(np.median(lag)), "p99": float(np.quantile(lag, 0.99))}


def simulate_same(
    workload: NodeWorkload,
    requests: Requests,
    step_time: AnyStepTime,
    config: EngineConfig,
    overhead: float,
    arrival: np.ndarray | None = None,
    pace: float = 1.0,
) -> np.ndarray:
    """TTFT (N,) s of the same requests by the simulator, counted from their intended times.

    ``arrival`` : other times at which they reach the engine; ``pace`` : every step takes this
    many times as long.
    """
    at = requests.arrival if arrival is None else arrival
    order = np.argsort(at, kind="stable")
    moved = Requests(
        at[order] / pace,
        requests.kind[order],
        requests.new[order],
        requests.cached[order],
        requests.outputs[order],
    )
    trace = workload.simulate(moved, step_time, config)
    first = np.empty(len(requests))
    first[order] = trace.first_token * pace
    return first - requests.arrival + overhead


def trials(
    workload: NodeWorkload,
    requests: Requests,
    step_time: AnyStepTime,
    config: EngineConfig,
    overhead: float,
    replayed: dict[str, Any],
    speed: dict[str, Any] | None,
) -> list[Trial]:
    """Simulations that would explain a difference between the simulator and the engine."""
    found = []
    late = replayed["sent"] - replayed["intended"]
    as_sent = requests.arrival + late - float(np.median(late))

    def again(**changes: Any) -> np.ndarray:
        return simulate_same(workload, requests, step_time, config, overhead, **changes)

    found.append(Trial("late sends", again(arrival=as_sent)))
    if speed is not None and abs(speed["speed"] - 1.0) > SLOW:
        slower = 100.0 * (1.0 / speed["speed"] - 1.0)
        name = f"steps took {slower:+.1f} % against the calibration"
        found.append(Trial(name, again(pace=1.0 / speed["speed"])))
        found.append(
            Trial(f"{name}, and late sends", again(pace=1.0 / speed["speed"], arrival=as_sent))
        )
    return found
