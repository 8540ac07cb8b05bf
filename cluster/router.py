"""Router: each request to the node of least predicted TTFT, by the policy that theory uses too.

Placement is ``palm``: every request stands at the origin of its own plane and sees the nearest
node of each profile at an exact random distance (Theory F4). The replicas of a profile take
turns, at random, in being that nearest node.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cluster.deployment import Deployment, Node
from cluster.metrics import RouterMetrics
from cluster.wire import ReplicaLost
from testbed.radio import nearest_distances, radio_model
from testbed.routing.admission import Admission
from testbed.routing.catalogue import Catalogue, CatalogueEntry, EngineIdentity, candidates
from testbed.routing.cost import margin, node_costs
from testbed.routing.policies import get_policy
from testbed.scenario import Scenario
from testbed.seeds import generator
from testbed.theory.prefill import residual_prefill
from testbed.tier_engine import tier_prefill
from testbed.workload.stream import RequestStream


@dataclass(frozen=True)
class Choice:
    """Where a request goes: kilometres, seconds of radio delay, tokens promised there."""

    node: Node
    distance: float
    radio: float
    reusable: float


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
        model = radio_model(scenario.radio, scenario.nodes.density)
        self._radio = model.sample(self._distances, generator(seed, "radio"))
        self._reusable = stream.reusable
        self._prefill = residual_prefill(
            tier_prefill(scenario), stream.input_tokens[:, None], stream.reusable
        )
        self._turns = generator(seed, "replicas").random((count, profiles))
        spec = scenario.engine
        assert spec is not None  # a deployment has one
        self._scale = spec.time_scale
        self._identity = EngineIdentity(model=spec.model, tokenizer=spec.model)
        self._admission = Admission.from_scenario(scenario)
        self._lock = threading.Lock()
        self._catalogue = Catalogue(tuple(self._entry(n) for n in deployment.nodes))
        self._telemetry: threading.Thread | None = None
        self._stop = threading.Event()

    def choose(self, i: int, excluded: set[int]) -> Choice | None:
        """The node for request ``i``, or ``None`` when no node can take it (Theory G1-G3)."""
        catalogue = self._catalogue
        alive = {n.id: n for n in self._deployment.nodes if n.alive and n.id not in excluded}
        entries = [e for e in catalogue.entries if e.node in alive]
        nearest = self._nearest(i, entries, alive)
        distances = np.array([nearest.get(e.node, np.inf) for e in entries])
        chosen = candidates(
            entries,
            self._identity,
            distances,
            self.scenario.routing.candidates_per_profile,
            excluded,
        )
        if not chosen:
            return None
        nodes = [alive[entries[k].node] for k in chosen]
        tiers = [n.profile for n in nodes]
        costs = node_costs(
            self._policy,
            self._radio[i, tiers],
            self._prefill[i, tiers],
            np.array([entries[k].wait for k in chosen]),
            psi=margin(
                self.scenario.routing.margin_z, np.array([entries[k].wait_sigma for k in chosen])
            ),
        )
        best = self._admission.choose(costs, [entries[k].profile for k in chosen])
        if best is None:
            return None
        node = nodes[best]
        return Choice(
            node=node,
            distance=float(self._distances[i, node.profile]),
            radio=float(self._radio[i, node.profile]),
            reusable=float(self._reusable[i, node.profile]),
        )

    def _nearest(
        self, i: int, entries: list[CatalogueEntry], alive: dict[int, Node]
    ) -> dict[int, float]:
        """The replica of each profile that stands for its nearest node, at distance R_s."""
        by_profile: dict[int, list[int]] = {}
        for entry in entries:
            by_profile.setdefault(alive[entry.node].profile, []).append(entry.node)
        return {
            nodes[int(self._turns[i, s] * len(nodes))]: float(self._distances[i, s])
            for s, nodes in by_profile.items()
        }

    def _entry(self, node: Node, **advertised: float) -> CatalogueEntry:
        return CatalogueEntry(
            node=node.id,
            profile=self.scenario.profiles[node.profile].name,
            identity=self._identity,
            stamped=time.perf_counter(),
            **advertised,
        )

    def lost(self, node: Node) -> None:
        """Take a node out: it is no candidate until it is restarted and advertises again."""
        node.alive = False
        with self._lock:
            self._catalogue = self._catalogue.updated(self._entry(node))

    # -- telemetry --

    def start_telemetry(self, on_lost: Callable[[Node], None] | None = None) -> None:
        """Ask every node for its advertised wait, each ``routing.telemetry_period`` seconds."""
        period = max(0.05, self.scenario.routing.telemetry_period * self._scale)

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
        profile = self.scenario.profiles[node.profile].name
        entry = self._entry(
            node,
            wait=float(status["wait"]),
            wait_sigma=float(status["deviation"]),
            utilisation=float(status["running"]) / max(1, node.facts.max_sequences),
        )
        with self._lock:
            self._catalogue = self._catalogue.updated(entry)
            tier = [e.utilisation for e in self._catalogue.entries if e.profile == profile]
            self._admission.update(profile, float(np.mean(tier)))
        if self._metrics is not None:
            self._metrics.advertised_wait.labels(profile).set(float(status["wait"]))

    def stop_telemetry(self) -> None:
        self._stop.set()
        if self._telemetry is not None:
            self._telemetry.join(timeout=15)
