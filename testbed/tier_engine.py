"""TierEngine: what each tier's own engine takes, where tiers run on different ones.

A profile may name another engine than the scenario's, with its own g(n | h), D_q and calibration;
what it does not say is the scenario's. Theory A8 and A10 then hold with g and D of the tier.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from testbed.errors import ScenarioError
from testbed.scenario import Prefill, Profile, Scenario
from testbed.step_time import OperatorStepTime, StepTime, read_async_scheduling, read_step_time


class TierPrefill(NamedTuple):
    """Coefficients of g(n | h) for each tier, (S,), or for each request, (n,); as in Prefill."""

    overhead: np.ndarray
    linear: np.ndarray
    quadratic: np.ndarray
    context: np.ndarray

    def of(self, tier: np.ndarray) -> TierPrefill:
        """Those of the tiers numbered ``tier``, any shape."""
        return TierPrefill(*(c[tier] for c in self))


def profile_prefill(scenario: Scenario, profile: Profile) -> Prefill:
    """g(n | h) of a profile's engine."""
    return scenario.prefill if profile.prefill is None else profile.prefill


def tier_prefill(scenario: Scenario) -> TierPrefill:
    """g(n | h) of every tier, (S,); shapes broadcast with (Q, S)."""
    each = [profile_prefill(scenario, s) for s in scenario.profiles]
    return TierPrefill(
        *(np.array([getattr(g, name) for g in each]) for name in TierPrefill._fields)
    )


def tier_decode(scenario: Scenario) -> np.ndarray:
    """D_q at every tier, (Q, S) seconds (Theory A10)."""
    return np.array(
        [
            [
                q.decode_occupancy if s.decode_occupancy is None else s.decode_occupancy[q.name]
                for s in scenario.profiles
            ]
            for q in scenario.requests
        ]
    )


def tier_step_times(scenario: Scenario) -> tuple[StepTime | OperatorStepTime, ...] | None:
    """Step time of every tier's engine from its calibration; None where the scenario names none.

    Raises
    ------
    ScenarioError
        Some tiers have a calibration and others have none.
    CalibrationError
        A calibration cannot be read.
    """
    shared = None if scenario.engine is None else scenario.engine.calibration
    files = [shared if s.calibration is None else s.calibration for s in scenario.profiles]
    if not any(files):
        return None
    read = {file: read_step_time(file) for file in dict.fromkeys(files) if file is not None}
    for i, file in enumerate(files):
        if file is None:
            raise ScenarioError(
                f"profiles[{i}].calibration: missing, and there is no engine.calibration"
            )
    return tuple(read[file] for file in files if file is not None)


def tier_lookahead(scenario: Scenario) -> tuple[bool, ...]:
    """Whether every tier's engine forms a step while the one before it runs, by its calibration.

    Raises
    ------
    CalibrationError
        A calibration cannot be read.
    """
    shared = None if scenario.engine is None else scenario.engine.calibration
    files = [shared if s.calibration is None else s.calibration for s in scenario.profiles]
    read = {f: read_async_scheduling(f) for f in dict.fromkeys(files) if f is not None}
    return tuple(f is not None and read[f] for f in files)


def one_engine(scenario: Scenario, what: str) -> None:
    """Raise :class:`ScenarioError` where a tier has an engine of its own that ``what`` ignores."""
    for i, s in enumerate(scenario.profiles):
        for field in ("prefill", "decode_occupancy", "calibration"):
            if getattr(s, field) is not None:
                raise ScenarioError(f"profiles[{i}].{field}: {what} knows one engine for all tiers")
