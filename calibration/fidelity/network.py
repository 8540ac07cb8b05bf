"""TwoTierNetwork: the network simulator of two replicas, on the requests that are measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from calibration.fidelity.prediction import batched_figures, counted, figures_of
from calibration.fidelity.two_tiers import POLICY_CELLS, REPLICAS, TwoTiers
from testbed.errors import CalibrationError
from testbed.outcome import RequestRecord
from testbed.routing.policies import get_policy
from testbed.scenario import Scenario
from testbed.simulation.engine_model import simulate_engine
from testbed.simulation.engine_network import simulate_engines
from testbed.simulation.simulate import replicate
from testbed.simulation.system import System
from testbed.simulation.tally import Tally

POLLS, POLL_WIDTH = 15, 0.1
"""Periods of the router's polls that are tried, and how far off the scenario's they go."""


@dataclass(frozen=True)
class TwoTierNetwork:
    """Engine models behind the router's policy: radio, places and requests are those of a run."""

    tiers: TwoTiers

    def predict(self, asked: Scenario, requests: int, seed: int) -> dict[str, Any]:
        """Long simulations, as in :func:`calibration.fidelity.prediction.predict_cell`."""
        ttft = self.simulate(asked, requests, seed)[counted(requests)]
        return {
            "simulator": {**batched_figures(ttft[np.isfinite(ttft)]), "requests": requests},
            "simulator_with_steady_waits": self._steady(asked, requests, seed),
        }

    def _steady(self, asked: Scenario, count: int, seed: int) -> dict[str, Any] | None:
        """The simulation where the policy is told the mean waits of theory instead of what nodes
        advertise; None where it looks at none, or there are none."""
        if not get_policy(asked.policy).load_aware:
            return None
        point = self.tiers.operating_point(asked)
        if not point.feasible:
            return None
        scenario, system = _simulated(asked), System.of(asked)
        tally = Tally(count, len(system.types), len(system.profiles), ())
        simulate_engines(
            scenario, system, tally, step_time=self.tiers.step_time, wait=point.wait,
            warm_up=0, seed=seed,
        )  # fmt: skip
        if tally.exact is None:
            raise CalibrationError(f"{POLICY_CELLS}: {count} requests cannot be kept one by one")
        return batched_figures(tally.exact[counted(count)])

    def simulate(self, asked: Scenario, count: int, seed: int) -> np.ndarray:
        """TTFT (N,) s by the network of engine models, request by request; NaN where the
        simulation itself left out its first ones as not yet stationary.

        Raises
        ------
        CalibrationError
            There are too many requests to keep one by one.
        """
        scenario = _simulated(asked)
        exact = replicate(scenario, count, seed, 0, None, self.tiers.step_time).tally.exact
        if exact is None:
            raise CalibrationError(f"{POLICY_CELLS}: {count} requests cannot be kept one by one")
        return np.concatenate([np.full(count - len(exact), np.nan), exact])

    def poll_jitter(self, asked: Scenario, count: int, seed: int) -> np.ndarray | None:
        """Standard deviations (4,) of the logarithms of the figures over the moments at which the
        router asks for waits, which nobody chooses; None where it looks at none.

        Another period, a few per cent off, makes the polls drift through the same requests.
        """
        if not get_policy(asked.policy).load_aware:
            return None
        period = asked.routing.telemetry_period
        said = []
        for factor in 1.0 + POLL_WIDTH * np.linspace(-1.0, 1.0, POLLS):
            other = asked.with_field("routing.telemetry_period", period * float(factor))
            ttft = self.simulate(other, count, seed)[counted(count)]
            said.append(np.log(figures_of(ttft[np.isfinite(ttft)])))
        return np.std(said, axis=0, ddof=1)

    def as_routed(self, records: Sequence[RequestRecord], *, late: bool) -> np.ndarray:
        """TTFT (n,) s of measured requests by the engine model, each at the node that the router
        really chose; ``late``: also when it really left."""
        lag = np.array([r.dispatch_lag for r in records]) if late else np.zeros(len(records))
        reach = np.array([r.intended + r.radio for r in records]) + lag - np.median(lag)
        names = [s.name for s in self.tiers.scenario.profiles]
        node = np.array([names.index(r.profile or "") for r in records])
        first = np.empty(len(records))
        for s, config in enumerate(self.tiers.configs):
            own = np.flatnonzero(node == s)
            own = own[np.argsort(reach[own], kind="stable")]
            first[own] = simulate_engine(
                config,
                self.tiers.step_time,
                reach[own],
                [records[i].input_tokens for i in own],
                [records[i].output_tokens for i in own],
                reusable_tokens=[int(records[i].reusable_tokens) for i in own],
            ).first_token
        return first - np.array([r.intended for r in records])


def _simulated(asked: Scenario) -> Scenario:
    return asked.replace(
        simulation={"node_model": "engine", "nodes": REPLICAS, "waits": "node", "warm_up": 0}
    )
