"""SharedBlocks: concurrency by what requests allocate of their own (Theory H12).

A hit takes no blocks for its prefix again, so that c_s depends on the profile and on the mix of
types that runs at it, and the mix depends on the waits that c_s causes. The operating point is
found for one c, c for the mix that it has, and so on until c stays.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from testbed.errors import ScenarioError
from testbed.routing.policies import Policy
from testbed.scenario import Scenario
from testbed.theory.delay.base import DelayModel
from testbed.theory.latency import Latency
from testbed.theory.memory_coupling import shared_concurrency
from testbed.theory.operating_point import OperatingPoint
from testbed.theory.predict import settle
from testbed.theory.system import System

_ROUNDS = 50


class SharedBlocksLatency(Latency):
    """TTFT at the operating point whose concurrency counts every shared block once."""

    @property
    def details(self) -> dict[str, Any]:
        return {"extension": "shared_blocks"}


def own_concurrency(scenario: Scenario, system: System, association: np.ndarray) -> np.ndarray:
    """c_s for the mix that runs at each tier under A_sq (Q, S), (S,) (Theory H12).

    A type counts with its share of the arrivals times how long it holds its sequence; a tier that
    nobody uses gets the mixture of all requests. Blocks are the engine's, single tokens where the
    scenario names no engine, whose sequence limit holds as well.

    Raises
    ------
    ScenarioError
        A profile leaves no room for one request of its mix.
    """
    engine = scenario.engine
    found = []
    for s, profile in enumerate(scenario.profiles):
        weights = system.probability * association[:, s] * system.occupancy[:, s]
        if weights.sum() <= 0:
            weights = system.probability
        c = shared_concurrency(
            scenario, profile, weights, 1 if engine is None else engine.block_size
        )
        if c < 1:
            raise ScenarioError(
                f"profiles[{s}].persistent_bytes: no room beside it for one request of its mix"
            )
        found.append(c if engine is None else min(c, engine.max_sequences))
    return np.array(found)


def solve_shared_blocks(
    scenario: Scenario, system: System, policy: Policy, model: DelayModel
) -> tuple[System, OperatingPoint]:
    """The system with its c_s, and the operating point at which they agree (Theory D1, H12).

    Concurrencies are whole numbers: where two sets of them lead to each other none agrees, and the
    smaller of each is taken.
    """
    point = settle(scenario, system, policy, model)
    seen = [own_concurrency(scenario, system, point.association)]
    for _ in range(_ROUNDS):
        system = replace(system, concurrency=seen[-1])
        point = settle(scenario, system, policy, model, start=point if point.feasible else None)
        again = own_concurrency(scenario, system, point.association)
        if (again == seen[-1]).all():
            return system, point
        before = [k for k, c in enumerate(seen) if (c == again).all()]
        if before:
            again = np.min(seen[before[0] :], axis=0)
            system = replace(system, concurrency=again)
            return system, settle(scenario, system, policy, model)
        seen.append(again)
    return system, replace(point, converged=False)
