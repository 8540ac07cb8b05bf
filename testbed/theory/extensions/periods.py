"""Periods: placements over many periods whose changes cost migration (Theory H9).

Demand differs from period to period, and changing a node from profile s to t loads bytes_s→t over
the network. Sought is the sequence of placements with the greatest coverage in all,

    max Σ_k weight_k·P_k(τ₀; π_k)   with   Σ_st m_s→t(π_{k−1}, π_k)·bytes_s→t ≤ budget

per period, m the cheapest moves from one placement to the next (a transport problem, Theory G4).
Over a finite set of candidate placements that is a longest path through layers, solved exactly by
dynamic programming: coverage of every candidate in every period, then one backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import linprog

from testbed.errors import ScenarioError
from testbed.routing.migration import migration_bytes
from testbed.routing.policies import get_policy
from testbed.scenario import Scenario
from testbed.theory.delay.base import get_delay_model
from testbed.theory.operating_point import OperatingPoint, solve
from testbed.theory.predict import latency_at
from testbed.theory.system import System

_SLACK = 1e-9


@dataclass(frozen=True)
class Period:
    """One control period: its demand, and how much it counts (its length, or its traffic).

    ``probability`` (Q,) replaces the scenario's p where given; ``intensity`` its λ_req.
    """

    intensity: float
    probability: tuple[float, ...] | None = None
    weight: float = 1.0


@dataclass(frozen=True)
class Plan:
    """Placements in the order of the periods.

    Attributes
    ----------
    fraction : (K, S) π in each period
    coverage : (K,) P(τ₀)
    moved : (K,) bytes per node of the fleet loaded at each period's start
    value : weighted mean coverage
    """

    fraction: np.ndarray
    coverage: np.ndarray
    moved: np.ndarray
    value: float


def transport_bytes(
    candidates: np.ndarray, move_bytes: np.ndarray, start: np.ndarray | None = None
) -> np.ndarray:
    """Least bytes per node of the fleet from every placement to every other (Theory G4).

    Parameters
    ----------
    candidates : (N, S) placements
    move_bytes : (S, S) bytes that a node of s loads to become t
    start : (S,) one placement to come from, instead of all candidates

    Returns
    -------
    (N, N), or (1, N) from ``start``. Where loading a profile costs the same whatever was there
    before, the cheapest moves leave in place what stays, and no program has to be solved.
    """
    origins = candidates if start is None else np.asarray(start, dtype=float)[None, :]
    cost = np.array(move_bytes, dtype=float)
    np.fill_diagonal(cost, 0.0)
    off = ~np.eye(len(cost), dtype=bool)
    plain = all(len(set(cost[off[:, t], t])) <= 1 for t in range(len(cost)))
    if plain:
        load = cost.max(axis=0)
        gained = np.maximum(candidates[None, :, :] - origins[:, None, :], 0.0)
        return gained @ load
    return np.array([[_transport(a, b, cost) for b in candidates] for a in origins])


def _transport(origin: np.ndarray, target: np.ndarray, cost: np.ndarray) -> float:
    size = len(cost)
    rows = np.zeros((2 * size - 1, size * size))
    for s in range(size):
        rows[s, s * size : (s + 1) * size] = 1.0
        if s < size - 1:
            rows[size + s, s::size] = 1.0
    plan = linprog(cost.ravel(), A_eq=rows, b_eq=np.concatenate([origin, target[:-1]]))
    if not plan.success or plan.x is None:
        raise ValueError(f"no moves lead from {origin} to {target}: {plan.message}")
    return migration_bytes(plan.x.reshape(size, size), cost)


def coverage_table(
    scenario: Scenario, periods: Sequence[Period], candidates: np.ndarray
) -> np.ndarray:
    """P(τ₀) of every candidate in every period, (K, N); τ₀ is the first coverage target.

    Raises
    ------
    ScenarioError
        A period whose probabilities do not fit the request types, or no coverage target.
    """
    if not scenario.targets.coverage_at:
        raise ScenarioError("targets.coverage_at: a plan needs a deadline to meet")
    deadline = scenario.targets.coverage_at[0]
    policy, model = get_policy(scenario.policy), get_delay_model(scenario.delay_model)
    systems = [_at(System.from_scenario(scenario), i, p) for i, p in enumerate(periods)]
    table = np.zeros((len(periods), len(candidates)))
    for n, fraction in enumerate(candidates):
        start: OperatingPoint | None = None
        for k, system in enumerate(systems):
            placed = system.with_fraction(fraction)
            point = solve(placed, policy, model, start=start)
            start = point if point.feasible and point.converged else None
            table[k, n] = latency_at(placed, point, model).coverage(deadline)
    return table


def best_path(
    coverage: np.ndarray, weight: np.ndarray, bytes_: np.ndarray, first: np.ndarray, budget: float
) -> np.ndarray:
    """Indices (K,) of the best affordable sequence of candidates, by dynamic programming.

    Parameters
    ----------
    coverage : (K, N)
    weight : (K,)
    bytes_ : (N, N) from each candidate to each; first : (N,) from where the fleet stands
    budget : most bytes of one change

    Raises
    ------
    ScenarioError
        No candidate can be reached within the budget in the first period.
    """
    periods, size = coverage.shape
    allowed = bytes_ <= budget * (1.0 + _SLACK) + _SLACK
    value = np.zeros(size)
    choice = np.zeros((periods, size), dtype=np.int64)
    for k in range(periods - 1, 0, -1):
        ahead = np.where(allowed, weight[k] * coverage[k] + value, -np.inf)
        choice[k] = ahead.argmax(axis=1)
        value = ahead.max(axis=1)
    reachable = first <= budget * (1.0 + _SLACK) + _SLACK
    if not reachable.any():
        raise ScenarioError(
            f"migration budget: {budget:g} bytes a node reach no candidate placement; the "
            f"nearest needs {first.min():g}"
        )
    path = [int(np.where(reachable, weight[0] * coverage[0] + value, -np.inf).argmax())]
    for k in range(1, periods):
        path.append(int(choice[k, path[-1]]))
    return np.array(path)


def plan_periods(
    scenario: Scenario,
    periods: Sequence[Period],
    candidates: np.ndarray,
    move_bytes: np.ndarray,
    budget: float,
) -> Plan:
    """The best placements over the periods from the scenario's own (Theory H9).

    Parameters
    ----------
    candidates : (N, S) placements to choose from; the scenario's own placement is added, so that
        staying is always possible
    move_bytes : (S, S) bytes that a node of profile s loads to become t
    budget : bytes per period and node of the fleet; 0 keeps the placement, infinity frees it
    """
    if not periods:
        raise ScenarioError("periods: none is given")
    if not budget >= 0:
        raise ScenarioError(f"migration budget: {budget:g} is not at least 0")
    weight = np.array([p.weight for p in periods])
    if not (weight >= 0).all() or weight.sum() <= 0:
        raise ScenarioError("periods: weights must be at least 0 and not all 0")
    own = System.from_scenario(scenario).fraction
    fractions = np.vstack([own, candidates])
    coverage = coverage_table(scenario, periods, fractions)
    between = transport_bytes(fractions, move_bytes)
    path = best_path(coverage, weight, between, between[0], budget)
    steps = np.concatenate([[0], path])
    chosen = coverage[np.arange(len(periods)), path]
    return Plan(
        fraction=fractions[path],
        coverage=chosen,
        moved=between[steps[:-1], steps[1:]],
        value=float(weight @ chosen / weight.sum()),
    )


def _at(system: System, number: int, period: Period) -> System:
    probability = system.probability
    if period.probability is not None:
        probability = np.array(period.probability, dtype=float)
        if probability.shape != system.probability.shape or (probability < 0).any():
            raise ScenarioError(
                f"periods[{number}].probability: {len(probability)} values for "
                f"{len(system.types)} request types, all at least 0"
            )
        if abs(probability.sum() - 1.0) > 1e-6:
            raise ScenarioError(
                f"periods[{number}].probability: the sum is {probability.sum():g}, not 1"
            )
        probability = probability / probability.sum()
    if not period.intensity > 0:
        raise ScenarioError(f"periods[{number}].intensity: {period.intensity:g} is not positive")
    return replace(system, intensity=period.intensity, probability=probability)
