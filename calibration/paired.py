"""Paired: the engine model on the very arrivals and lengths that a real engine was given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from calibration.design import usable_blocks
from calibration.load import RequestClass
from cluster.engines.base import EngineFacts
from testbed.simulation.engine_model import EngineConfig, EngineTrace, simulate_engine
from testbed.step_time import StepTime


def engine_config(facts: EngineFacts, pinned_blocks: int, wake: float = 0.0) -> EngineConfig:
    """The engine model's limits as the engine states its own.

    ``wake``: seconds that the first step after idleness takes more (``idle_start`` of the step
    regression).
    """
    return EngineConfig(
        token_budget=facts.token_budget,
        max_sequences=facts.max_sequences,
        block_size=facts.block_size,
        num_blocks=usable_blocks(facts) + 1,
        max_model_len=facts.max_model_len,
        pinned_blocks=pinned_blocks,
        async_scheduling=bool(facts.extra.get("async_scheduling", False)),
        wake_seconds=wake,
    )


def simulate_same(
    config: EngineConfig,
    step_time: StepTime,
    classes: Sequence[RequestClass],
    run: Mapping[str, Any],
) -> EngineTrace:
    """Serve a run's own requests (``intended``, ``kind``, ``output``) in virtual time."""
    kinds = np.asarray(run["kind"], dtype=int)
    new = np.array([c.new for c in classes])
    cached = np.array([c.cached for c in classes])
    return simulate_engine(
        config,
        step_time,
        np.asarray(run["intended"]),
        (new + cached)[kinds],
        np.asarray(run["output"], dtype=int),
        reusable_tokens=cached[kinds],
    )


def simulated_alone(
    config: EngineConfig, step_time: StepTime, classes: Sequence[RequestClass]
) -> np.ndarray:
    """TTFT of each class alone on an idle engine by the engine model, (Q,), s."""
    return np.array(
        [
            simulate_engine(
                config, step_time, [0.0], [c.new + c.cached], [1], reusable_tokens=[c.cached]
            ).ttft[0]
            for c in classes
        ]
    )
