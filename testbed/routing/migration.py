"""Migration: changing which nodes hold which profile within a budget (Theory G4)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog


def migration_bytes(moves: np.ndarray, move_bytes: np.ndarray) -> float:
    """Σ m_s→t·bytes_s→t of one control epoch (Theory G4).

    ``moves`` (S, S) nodes, or nodes per km², that change from profile s to t; ``move_bytes``
    (S, S) bytes that such a node must load. The unit of the sum follows the unit of the moves.
    """
    return float((np.asarray(moves) * np.asarray(move_bytes)).sum())


@dataclass(frozen=True)
class Migration:
    """One epoch's change of the placement.

    ``fraction`` (S,) is π after it, ``moves`` (S, S) the share of all nodes that change from s
    to t, ``cost`` their bytes per node of the fleet, ``part`` how far towards the target it goes.
    """

    fraction: np.ndarray
    moves: np.ndarray
    cost: float
    part: float


def migrate(
    current: np.ndarray, target: np.ndarray, move_bytes: np.ndarray, budget: float
) -> Migration:
    """Move towards ``target`` by the cheapest moves, as far as ``budget`` allows (Theory G4).

    The cheapest moves are a transport problem, a small linear program. A part of them costs that
    part of their bytes, so a budget is met exactly by going part of the way.

    Parameters
    ----------
    current, target : (S,) placements π with equal sums
    move_bytes : (S, S) bytes a node loads to change from s to t; the diagonal is not used
    budget : bytes per epoch and node of the fleet, at least 0

    Raises
    ------
    ValueError
        The sums differ, or the budget is negative.
    """
    current, target = np.asarray(current, dtype=float), np.asarray(target, dtype=float)
    if abs(current.sum() - target.sum()) > 1e-9:
        raise ValueError(f"placements sum to {current.sum():g} and {target.sum():g}")
    if not budget >= 0:
        raise ValueError(f"budget {budget:g} is not at least 0")
    size = len(current)
    cost = np.array(move_bytes, dtype=float)
    np.fill_diagonal(cost, 0.0)
    # One row per profile left and one per profile reached; the last is implied by the others.
    rows = np.zeros((2 * size - 1, size * size))
    for s in range(size):
        rows[s, s * size : (s + 1) * size] = 1.0
        if s < size - 1:
            rows[size + s, s::size] = 1.0
    plan = linprog(cost.ravel(), A_eq=rows, b_eq=np.concatenate([current, target[:-1]]))
    if not plan.success or plan.x is None:
        raise ValueError(f"no moves lead from {current} to {target}: {plan.message}")
    moves = plan.x.reshape(size, size)
    np.fill_diagonal(moves, 0.0)
    whole = migration_bytes(moves, cost)
    part = 1.0 if whole <= budget else budget / whole
    return Migration(current + part * (target - current), part * moves, part * whole, part)
