"""Predict: a scenario's Outcome from the analytical model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from testbed.outcome import Curve, Outcome, Tier, Ttft, figure_key
from testbed.radio import PowerLaw
from testbed.routing.policies import Policy, get_policy
from testbed.scenario import Scenario
from testbed.step_time import AnyStepTime
from testbed.theory.delay.base import DelayModel, ExcessDelay, get_delay_model
from testbed.theory.latency import Latency
from testbed.theory.operating_point import OperatingPoint, solve
from testbed.theory.system import System
from testbed.tier_engine import tier_step_times

_TOLD_APART = 0.01
"""Relative difference between advertised and caused waits above which the outcome says so."""
_HISTORY = 200
"""Most steps of the convergence history that an outcome carries."""


def predict(
    scenario: Scenario,
    *,
    delay_model: str | None = None,
    extension: str | None = None,
    step_time: AnyStepTime | Sequence[AnyStepTime] | None = None,
) -> Outcome:
    """The scenario's outcome by the analytical model (Theory A-E).

    Parameters
    ----------
    scenario : what is asked
    delay_model : a registered delay model instead of ``scenario.delay_model``
    extension : a part of the baseline to replace (Theory H): a name of
        :data:`testbed.theory.extensions.registry.EXTENSIONS`
    step_time : of the nodes' engine, or of each tier's, for the delay models that use it; default:
        those of ``engine.calibration`` and ``profiles[*].calibration``

    Raises
    ------
    ScenarioError
        An unknown policy or delay model, or a radio model that the theory does not have.

    Examples
    --------
    >>> from testbed.presets import preset
    >>> round(predict(preset("paper-baseline")).ttft.coverage["0.8"], 3)
    0.692
    """
    name = delay_model if delay_model is not None else scenario.delay_model
    found = locate(scenario, delay_model=name, extension=extension, step_time=step_time)
    return assemble(scenario, name, found)


def pose(
    scenario: Scenario,
    *,
    delay_model: str | None = None,
    step_time: AnyStepTime | Sequence[AnyStepTime] | None = None,
) -> tuple[System, Policy, DelayModel]:
    """What a solver needs of a scenario: arrays, policy and delay model; as :func:`predict`."""
    model = get_delay_model(delay_model if delay_model is not None else scenario.delay_model)
    if step_time is None and model.uses_step_time and scenario.engine is not None:
        step_time = tier_step_times(scenario)
    return System.from_scenario(scenario, step_time), get_policy(scenario.policy), model


def locate(
    scenario: Scenario,
    *,
    delay_model: str | None = None,
    extension: str | None = None,
    step_time: AnyStepTime | Sequence[AnyStepTime] | None = None,
    start: OperatingPoint | None = None,
) -> Latency:
    """The scenario's operating point and the law of the TTFT there.

    ``start`` is the operating point of a neighbouring scenario, to start from; the rest as in
    :func:`predict`.
    """
    system, policy, model = pose(scenario, delay_model=delay_model, step_time=step_time)
    if extension is not None:
        from testbed.theory.extensions.registry import get_extension

        return get_extension(extension)(scenario, system, policy, model)
    if start is not None and start.wait.shape != system.shape:
        start = None
    return latency_at(system, settle(scenario, system, policy, model, start=start), model)


def settle(
    scenario: Scenario,
    system: System,
    policy: Policy,
    model: DelayModel,
    *,
    start: OperatingPoint | None = None,
) -> OperatingPoint:
    """The operating point by the scenario's own solver settings."""
    return solve(
        system,
        policy,
        model,
        damping=scenario.solver.damping,
        tolerance=scenario.solver.tolerance,
        max_iterations=scenario.solver.max_iterations,
        start=start,
    )


def latency_at(system: System, point: OperatingPoint, model: DelayModel) -> Latency:
    """The law of the TTFT at an operating point, whatever the radio model (Theory E, H4)."""
    if isinstance(system.radio, PowerLaw):
        return Latency(system, point, model)
    from testbed.theory.extensions.radio_law import RadioLatency

    return RadioLatency(system, point, model)


def assemble(scenario: Scenario, delay_model: str, latency: Latency) -> Outcome:
    """The outcome of a scenario from its latency at the operating point."""
    system, point = latency.system, latency.point
    coverage_at = scenario.targets.coverage_at
    seconds, probability = latency.curve()
    warnings = []
    if not point.converged:
        warnings.append(
            f"the operating point did not settle to {scenario.solver.tolerance:g} in "
            f"{point.iterations} iterations" + (f": {point.unsettled}" if point.unsettled else "")
        )
    if (off := _interpolated(point)) > _TOLD_APART:
        warnings.append(
            f"the waits that the policy looks at are interpolated between mixes: up to "
            f"{100 * off:.1f} % from those of the delay model at the operating point"
        )
    notes = (latency.model.caveat(load) for load in point.loads if load.arrival_rate > 0)
    warnings.extend(note for note in notes if note is not None)
    return Outcome(
        kind="predicted",
        clock="none",
        scenario_name=scenario.name,
        scenario=scenario.to_dict(),
        policy=scenario.policy,
        delay_model=delay_model,
        feasible=point.feasible,
        reason=point.reason,
        converged=point.converged,
        iterations=point.iterations,
        association={
            q: dict(zip(system.names, map(float, row), strict=True))
            for q, row in zip(system.types, point.association, strict=True)
        },
        tiers={
            name: _tier(system, point, s, latency.laws[s]) for s, name in enumerate(system.names)
        },
        ttft=Ttft(
            mean=latency.mean,
            coverage={figure_key(t): latency.coverage(t) for t in coverage_at},
            quantiles={figure_key(z): latency.quantile(z) for z in scenario.targets.quantiles},
            upper_bound={figure_key(t): latency.upper_bound(t) for t in coverage_at},
        ),
        mean_distance=latency.mean_distance,
        reusable_prefix_tokens=latency.reusable_tokens,
        offloading_ratio=latency.offloading_ratio,
        capacity_margin=system.capacity_margin,
        curve=Curve(seconds=tuple(seconds.tolist()), probability=tuple(probability.tolist())),
        warnings=tuple(warnings),
        extra={"convergence": _history(system, point), **latency.details},
    )


def _interpolated(point: OperatingPoint) -> float:
    """Largest relative difference between a wait that is advertised and the one that it causes,
    at tiers with traffic of a point that settled; mean over types, or over a hundredth of the
    residual prefill where that is longer."""
    if not (point.converged and point.feasible) or not point.advertised.any():
        return 0.0
    worst = 0.0
    for s, load in enumerate(point.loads):
        if load.arrival_rate > 0:
            caused = float(load.weights @ point.wait[:, s])
            told = float(load.weights @ point.advertised[:, s])
            least = 0.01 * float(load.weights @ load.residual_prefill)
            worst = max(worst, abs(told - caused) / max(caused, least, 1e-300))
    return worst


def _tier(system: System, point: OperatingPoint, s: int, law: ExcessDelay | None) -> Tier:
    load = point.loads[s]
    return Tier(
        density=float(system.density[s]),
        concurrency=load.concurrency,
        arrival_rate=load.arrival_rate,
        service_rate=load.service_rate,
        utilisation=float(point.utilisation[s]),
        wait_probability=1.0 if law is None else float(law.wait_probability),
        mean_wait=float("inf") if law is None else _mixture(load.weights, law.mean),
    )


def _mixture(weights: np.ndarray, mean: np.ndarray) -> float:
    """Σ w·m over the types that come at all: 0·inf is not a number."""
    used = weights > 0
    return float(weights[used] @ mean[used])


def _history(system: System, point: OperatingPoint) -> dict[str, Any]:
    """Mean wait of each tier after each step, s (Fig. 6); the first and last steps of many."""
    history = point.history
    if len(history) > _HISTORY:
        history = np.concatenate([history[: _HISTORY // 2], history[-_HISTORY // 2 :]])
    return {
        "mean_wait": {name: history[:, s].tolist() for s, name in enumerate(system.names)},
        "steps": len(point.history),
    }
