"""EngineLoad: a node's load in the terms of a calibrated engine, for the cheaper delay models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from testbed.errors import ScenarioError
from testbed.step_time import AnyStepTime
from testbed.theory.delay.base import TierLoad


def calibrated(load: TierLoad, model: str) -> tuple[AnyStepTime, int]:
    """The node's step time and token budget.

    Raises
    ------
    ScenarioError
        The scenario's engine is not calibrated.
    """
    if load.step_time is None or load.token_budget is None:
        missing = "step time" if load.step_time is None else "token budget"
        raise ScenarioError(
            f"delay_model: {model} needs the engine's {missing}; give engine.calibration"
        )
    return load.step_time, load.token_budget


@dataclass(frozen=True)
class EngineLoad:
    """Prefill and decode of the mixture by the step time.

    Attributes
    ----------
    prefill : (Q,) seconds of a prefill that other sequences decode beside
    decodes : (Q,) decode steps of a request, its outputs less the first
    base, each : seconds of a decode step without a sequence, and for each
    weights : (Q,)
    """

    prefill: np.ndarray
    decodes: np.ndarray
    base: float
    each: float
    weights: np.ndarray

    @classmethod
    def of(cls, load: TierLoad, model: str) -> Self:
        step_time, _ = calibrated(load, model)
        new = np.maximum(load.new_tokens, 1.0)
        outputs = np.maximum(load.output_tokens, 1.0)
        decodes = outputs - 1.0
        steps = float(load.weights @ decodes)
        context = 0.0
        if steps > 0:
            each = load.weights * decodes
            context = float(each @ (new + load.cached_tokens + 0.5 * outputs)) / steps
        one = step_time.seconds((), 1, context)
        many = step_time.seconds((), max(load.concurrency, 2), max(load.concurrency, 2) * context)
        slope = (many - one) / (max(load.concurrency, 2) - 1)
        beside = 1 if steps > 0 else 0
        prefill = [
            step_time.seconds([(n, h)], beside, beside * context) - beside * slope
            for n, h in zip(new, load.cached_tokens, strict=True)
        ]
        return cls(np.array(prefill), decodes, one - slope, slope, load.weights)

    @property
    def mean_prefill(self) -> float:
        return float(self.weights @ self.prefill)

    @property
    def mean_decodes(self) -> float:
        return float(self.weights @ self.decodes)
