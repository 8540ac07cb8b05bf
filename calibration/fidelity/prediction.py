"""CellPrediction: what calibration alone says of a cell, on disk before it is measured."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.optimize import brentq

from calibration.fidelity.workload import NodeWorkload
from testbed.errors import TestbedError
from testbed.simulation.engine_model import EngineConfig
from testbed.step_time import AnyStepTime
from testbed.theory.delay.base import DelayModel, TierLoad, get_delay_model, independent_models

FIGURES = ("mean", "p50", "p90", "p99")
PROBABILITIES = (0.5, 0.9, 0.99)
WARM_SHARE = 0.05
"""Share of a run's first requests that count in no figure."""
BATCHES = 20


def figures_of(ttft: np.ndarray) -> np.ndarray:
    """Mean, p50, p90, p99 of a sample, (4,) s."""
    return np.array([ttft.mean(), *np.quantile(ttft, PROBABILITIES)])


def counted(count: int) -> slice:
    """The requests of a run that count."""
    return slice(int(WARM_SHARE * count), count)


def model_names() -> list[str]:
    """The delay models that a calibrated engine can be asked by."""
    # phase_type needs a measured service law, which one cell has not.
    return [name for name in independent_models() if name != "phase_type"]


def predict_cell(
    workload: NodeWorkload,
    share: float,
    step_time: AnyStepTime,
    config: EngineConfig,
    *,
    requests: int,
    seed: int,
) -> dict[str, Any]:
    """Every delay model, and a long run of the step-exact simulator, at ``share`` of capacity.

    Figures are TTFT in seconds from the arrival at the engine, without the way there and back. A
    model that has no stable point at this rate is ``None``, with its reason in ``left_out``.
    """
    capacity = workload.capacity(step_time, config)
    rate = share * capacity
    load = workload.load(rate, step_time, config)
    models: dict[str, list[float] | None] = {}
    left_out: dict[str, str] = {}
    seconds: dict[str, float] = {}
    for name in model_names():
        began = time.process_time()
        label = f"{name}:{workload.output_scv!r}" if name == "step_chain" else name
        try:
            models[name] = model_figures(get_delay_model(label), load)
            if models[name] is None:
                left_out[name] = "no stable point at this rate"
        except TestbedError as error:
            models[name] = None
            left_out[name] = str(error).removeprefix("delay_model: ")
        seconds[name] = time.process_time() - began
    long = long_run(workload, rate, step_time, config, requests, seed)
    sequential = None
    if config.async_scheduling:
        # Most delay models know no scheduling ahead: how much of their error that is.
        plain = config.model_copy(update={"async_scheduling": False})
        sequential = long_run(workload, rate, step_time, plain, requests, seed)
    return {
        "capacity": capacity,
        "rate": rate,
        "models": models,
        "left_out": left_out,
        "cpu_seconds": seconds,
        "simulator": long,
        "simulator_without_lookahead": sequential,
        "utilisation": {"erlang_c": load.utilisation},
    }


def long_run(
    workload: NodeWorkload,
    rate: float,
    step_time: AnyStepTime,
    config: EngineConfig,
    count: int,
    seed: int,
) -> dict[str, Any]:
    """Figures of a long simulation, with standard errors from batches."""
    trace = workload.simulate(workload.draw(rate, count, seed), step_time, config)
    return {
        **batched_figures(trace.ttft[counted(count)]),
        "requests": count,
        "preemptions": int(trace.preemptions.sum()),
    }


def batched_figures(ttft: np.ndarray) -> dict[str, Any]:
    """Figures (4,) s of TTFT (N,) in order of arrival, and their standard errors from batches."""
    batches = np.array([figures_of(x) for x in np.array_split(ttft, BATCHES)])
    return {
        "figures": figures_of(ttft).tolist(),
        "standard_errors": (batches.std(axis=0, ddof=1) / np.sqrt(BATCHES)).tolist(),
    }


def model_figures(
    model: DelayModel, load: TierLoad, probabilities: Sequence[float] = PROBABILITIES
) -> list[float] | None:
    """Mean and quantiles of the mixture's TTFT by a delay model, s (Theory E1 without radio);
    None without a stable point."""
    if model.utilisation(load) >= 1:
        return None
    law = model.excess(load)
    base = load.residual_prefill

    def missing(t: float, p: float) -> float:
        inside = sum(
            w * float(law.cdf(q, np.array(t - base[q]))) for q, w in enumerate(load.weights)
        )
        return inside - p

    high = float(base.max() + law.mean.max())
    while missing(high, max(probabilities)) < 0:
        high *= 2.0
    return [
        float(load.weights @ (base + law.mean)),
        *(float(brentq(missing, 0.0, high, args=(p,), xtol=1e-7)) for p in probabilities),
    ]
