"""Router: each request to the node of least predicted TTFT, by the policy that theory uses too.

Placement is ``palm``: every request stands at the origin of its own plane and sees the nearest
node of each profile at an exact random distance (Theory F4). The replicas of a profile take
turns, at random, in being that nearest node.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cluster.deployment import Deployment, Node
from cluster.metrics import RouterMetrics
from cluster.wire import ReplicaLost
from testbed.radio import nearest_distances, radio_model
from testbed.routing.policies import get_policy
from testbed.scenario import Scenario
from testbed.seeds import generator
from testbed.theory.prefill import residual_prefill
from testbed.workload.stream import RequestStream


@dataclass(frozen=True)
class Choice:
    """Where a request goes: kilometres, seconds of radio delay, tokens promised there."""

    node: Node
    distance: float
    radio: float
    reusable: float


@dataclass
class _Advertised:
    wait: float = 0.0
    deviation: float = 0.0
    utilisation: float = 0.0


class Router:
    """Chooses a node for each request of one stream.

    Parameters
    ----------
    scenario : policy, radio, prefill and routing section
    deployment : the nodes; a node that is not alive is no candidate
    stream : gives each request's length and reusable tokens
    seed : the same seed gives every request the same distances under every policy
    """

    def __init__(
        self,
        scenario: Scenario,
        deployment: Deployment,
        stream: RequestStream,
        seed: int,
        metrics: RouterMetrics | None = None,
    ) -> None:
        self.scenario = scenario
        self.run_id = uuid.uuid4().hex[:8]
        self._deployment = deployment
        self._policy = get_policy(scenario.policy)
        self._metrics = metrics
        count, profiles = len(stream), len(scenario.profiles)
        densities = np.array([s.fraction * scenario.nodes.density for s in scenario.profiles])
        self._distances = nearest_distances(densities, count, generator(seed, "distances"))
        model = radio_model(scenario.radio)
        self._radio = model.sample(self._distances, generator(seed, "radio"))
        self._reusable = stream.reusable
        self._prefill = residual_prefill(
            scenario.prefill, stream.input_tokens[:, None], stream.reusable
        )
        self._turns = generator(seed, "replicas").random((count, profiles))
        self._advertised = [_Advertised() for _ in deployment.nodes]
        self._telemetry: threading.Thread | None = None
        self._stop = threading.Event()

    def choose(self, i: int, excluded: set[int]) -> Choice | None:
        """The node for request ``i``, or ``None`` when no node can take it."""
        best: tuple[float, int, Node] | None = None
        for s in range(len(self.scenario.profiles)):
            nodes = [
                n
                for n in self._deployment.nodes
                if n.profile == s and n.alive and n.id not in excluded
            ]
            if not nodes:
                continue
            node = nodes[int(self._turns[i, s] * len(nodes))]
            advertised = self._advertised[node.id]
            wait = advertised.wait + self.scenario.routing.margin_z * advertised.deviation
            cost = self._radio[i, s] + float(
                self._policy.fixed_cost(self._prefill[i, s], np.float64(wait))
            )
            if best is None or cost < best[0]:
                best = (cost, s, node)
        if best is None:
            return None
        _, s, node = best
        return Choice(
            node=node,
            distance=float(self._distances[i, s]),
            radio=float(self._radio[i, s]),
            reusable=float(self._reusable[i, s]),
        )

    def lost(self, node: Node) -> None:
        """Take a node out: it is no candidate until it is restarted."""
        node.alive = False

    # -- telemetry --

    def start_telemetry(self, on_lost: Callable[[Node], None] | None = None) -> None:
        """Ask every node for its advertised wait, each ``routing.telemetry_period`` seconds."""
        period = max(0.05, self.scenario.routing.telemetry_period)

        def poll() -> None:
            while not self._stop.wait(period):
                for node in self._deployment.nodes:
                    if node.alive:
                        self._ask(node, on_lost)

        self._telemetry = threading.Thread(target=poll, name="telemetry", daemon=True)
        self._telemetry.start()

    def _ask(self, node: Node, on_lost: Callable[[Node], None] | None) -> None:
        try:
            status = node.link.ask({"do": "status"}, timeout=10.0)
        except ReplicaLost:
            self.lost(node)
            if on_lost is not None:
                on_lost(node)
            return
        self._advertised[node.id] = _Advertised(
            wait=float(status["wait"]),
            deviation=float(status["deviation"]),
            utilisation=float(status["running"]) / max(1, node.facts.max_sequences),
        )
        if self._metrics is not None:
            name = self.scenario.profiles[node.profile].name
            self._metrics.advertised_wait.labels(name).set(float(status["wait"]))

    def stop_telemetry(self) -> None:
        self._stop.set()
        if self._telemetry is not None:
            self._telemetry.join(timeout=15)
