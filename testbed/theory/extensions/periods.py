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
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from testbed.errors import ScenarioError
from testbed.routing.migration import migrate
from testbed.scenario import Scenario
from testbed.theory.operating_point import OperatingPoint, solve
from testbed.theory.predict import latency_at, pose
from testbed.theory.system import System

_SLACK = 1e-9
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Period:
    """One control period: its demand, and how much it counts (its length, or its traffic).

    ``probability`` (Q,) replaces the scenario's p where given; ``intensity`` its λ_req.
    """

    intensity: float
    probability: tuple[float, ...] | None = None
    weight: float = 1.0


def read_periods(path: str | Path, scenario: Scenario) -> list[Period]:
    """Periods from a YAML list, one mapping each: ``intensity``, and where they differ from the
    scenario's or from 1 also ``probability`` {request: p} and ``weight``.

    Raises
    ------
    ScenarioError
        The file is missing or is not such a list.
    """
    try:
        entries = yaml.safe_load(Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ScenarioError(f"{path}: {reason}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ScenarioError(f"{where}: {getattr(error, 'problem', None) or 'not YAML'}") from None
    if not isinstance(entries, list) or not entries:
        raise ScenarioError(f"{path}: not a list of periods")
    names = [q.name for q in scenario.requests]
    periods = []
    for i, entry in enumerate(entries):
        if not isinstance(entry, dict) or "intensity" not in entry:
            raise ScenarioError(f"{path}: [{i}].intensity: missing")
        if unknown := set(entry) - {"intensity", "probability", "weight"}:
            raise ScenarioError(f"{path}: [{i}].{sorted(map(str, unknown))[0]}: unknown key")
        mix = entry.get("probability")
        if mix is not None and (not isinstance(mix, dict) or set(mix) != set(names)):
            raise ScenarioError(f"{path}: [{i}].probability: give one for each of {names}")
        try:
            periods.append(
                Period(
                    intensity=float(entry["intensity"]),
                    probability=None if mix is None else tuple(float(mix[q]) for q in names),
                    weight=float(entry.get("weight", 1.0)),
                )
            )
        except (TypeError, ValueError):
            raise ScenarioError(f"{path}: [{i}]: not a number where one is needed") from None
    return periods


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

    def to_dict(self, names: Sequence[str]) -> dict[str, Any]:
        """Plain values; ``names`` (S,) of the profiles."""
        rows = zip(self.fraction, self.coverage, self.moved, strict=True)
        return {
            "coverage": self.value,
            "periods": [
                {
                    "fraction": dict(zip(names, map(float, pi), strict=True)),
                    "coverage": float(covered),
                    "moved_bytes_per_node": float(moved),
                }
                for pi, covered, moved in rows
            ],
        }


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
    before, and where only one profile loses nodes or only one gains them, the moves are plain; the
    others are small linear programs (:func:`~testbed.routing.migration.migrate`).
    """
    origins = candidates if start is None else np.asarray(start, dtype=float)[None, :]
    cost = np.array(move_bytes, dtype=float)
    np.fill_diagonal(cost, 0.0)
    change = candidates[None, :, :] - origins[:, None, :]
    change[np.abs(change) < _ROUNDING] = 0.0
    gained, left = np.maximum(change, 0.0), np.maximum(-change, 0.0)
    off = ~np.eye(len(cost), dtype=bool)
    if all(len(set(cost[off[:, t], t])) <= 1 for t in range(len(cost))):
        return gained @ cost.max(axis=0)
    bytes_ = np.einsum("abs,st,abt->ab", left, cost, gained)
    moved = gained.sum(axis=2)
    bytes_ = np.divide(bytes_, moved, out=np.zeros_like(bytes_), where=moved > 0)
    # Where a detour is never cheaper what can stay stays, and one profile that loses, or one that
    # gains, leaves no choice: the product above is the cost. The rest are programs.
    detour = cost[:, :, None] + cost[None, :, :]
    direct = (cost[:, None, :] <= detour * (1.0 + _SLACK)).all()
    forced = ((gained > 0).sum(axis=2) <= 1) | ((left > 0).sum(axis=2) <= 1)
    for i, j in np.argwhere(~forced if direct else np.ones_like(forced)):
        bytes_[i, j] = migrate(origins[i], candidates[j], cost, np.inf).cost
    return bytes_


def coverage_table(
    scenario: Scenario,
    periods: Sequence[Period],
    candidates: np.ndarray,
    deadline: float | None = None,
) -> np.ndarray:
    """P(τ₀) of every candidate in every period, (K, N); τ₀ is the last target unless given, s.

    Raises
    ------
    ScenarioError
        A period whose probabilities do not fit the request types, or no coverage target.
    """
    if deadline is None:
        if not scenario.targets.coverage_at:
            raise ScenarioError("targets.coverage_at: a plan needs a deadline to meet")
        deadline = scenario.targets.coverage_at[-1]
    system, policy, model = pose(scenario)
    systems = [_at(system, i, p) for i, p in enumerate(periods)]
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
    *,
    deadline: float | None = None,
) -> Plan:
    """The best placements over the periods from the scenario's own (Theory H9).

    Parameters
    ----------
    candidates : (N, S) placements to choose from; the scenario's own placement is added, so that
        staying is always possible
    move_bytes : (S, S) bytes that a node of profile s loads to become t
    budget : bytes per period and node of the fleet; 0 keeps the placement, infinity frees it
    deadline : τ₀, s; the scenario's last target by default
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
    coverage = coverage_table(scenario, periods, fractions, deadline)
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
