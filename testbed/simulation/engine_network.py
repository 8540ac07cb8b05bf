"""Network of engines: the nodes are engine models, step by step, in place of queues."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numba
import numpy as np
from pydantic import ValidationError

from testbed.errors import ScenarioError
from testbed.radio import radio_model
from testbed.scenario import EngineSpec, Scenario, SimulationSpec, first_problem
from testbed.simulation import engine_farm as farms
from testbed.simulation.engine_farm import Arriving, Farm, new_farm
from testbed.simulation.engine_model import EngineConfig
from testbed.simulation.engine_model_kernel import LOG_COLUMNS
from testbed.simulation.network import NetworkRun, describe, network_rules, network_tables, spread
from testbed.simulation.network_kernel import cheapest, draw_of_each
from testbed.simulation.network_state import Chunk, Rules, Tables
from testbed.simulation.placement import Layout, lay_out
from testbed.simulation.plane import Plane, nearest_of_each
from testbed.simulation.radio_table import RadioTable, drawn_delay, tabulate
from testbed.simulation.requests import CHUNK, Costs
from testbed.simulation.service import ServiceLaw
from testbed.simulation.system import System
from testbed.simulation.tally import Served, Tally
from testbed.simulation.traffic import Traffic
from testbed.step_time import OperatorStepTime, StepTime, read_async_scheduling
from testbed.tier_engine import tier_prefill


def simulate_engines(
    scenario: Scenario,
    system: System,
    tally: Tally,
    *,
    step_time: StepTime | OperatorStepTime | Sequence[StepTime | OperatorStepTime],
    wait: np.ndarray | None,
    warm_up: int,
    seed: int,
    progress: Callable[[int], None] | None = None,
) -> NetworkRun:
    """Send ``tally.requests`` requests through a network whose nodes are engine models.

    A profile's prefixes are pinned in its nodes' pools: requests reuse them and only them.
    ``wait`` (Q, S) seconds is what the policy is told of every node of a tier; None: each node
    advertises its own.

    Raises
    ------
    ScenarioError
        The scenario asks for what engines are not simulated with, or a request fits no engine.
    """
    spec = scenario.simulation or SimulationSpec()
    _refuse(scenario, spec)
    configs = [engine_config(scenario, s) for s in range(len(system.profiles))]
    layout = lay_out(scenario, system, spec, seed)
    law = ServiceLaw("engine", fixed=True)
    traffic = Traffic.of(scenario, system, law, layout, tally.requests, warm_up, seed)
    rules = network_rules(scenario, system, spec, law, advertised=wait is None)
    run = NetworkRun(random_layout=layout.random)
    street = _Street(
        rules,
        network_tables(scenario, system, spec, layout, traffic.costs, wait),
        layout,
        tabulate(radio_model(scenario.radio, scenario.nodes.density), layout.longest),
        new_farm(configs, layout.assigned, step_time),
        scenario.routing.candidates_per_profile,
    )
    limits = _Limits.of(configs)
    coefficients = np.ascontiguousarray(np.transpose(tier_prefill(scenario)))
    work = np.zeros(len(layout.assigned))

    def collect(rows: np.ndarray) -> None:
        tally.add(_served(rows, layout))
        np.add.at(work, rows[:, farms.C_NODE].astype(int), rows[:, farms.C_OCCUPANCY])
        if progress is not None and len(rows):
            progress(len(rows))

    street.collect, street.coefficients = collect, coefficients
    for chunk in traffic.chunks():
        street.send(chunk, traffic.costs, limits)
    street.finish()
    farms.check(street.farm)
    tally.expose(np.bincount(layout.assigned, minlength=len(configs)) * traffic.seconds)
    describe(run, scenario, system, spec, layout, rules, traffic)
    spread(run, work, system, layout, traffic.seconds)
    run.facts["engine"] = [c.model_dump(mode="json") for c in configs]
    steps = step_time if isinstance(step_time, Sequence) else [step_time]
    run.facts["step_time"] = ", ".join(dict.fromkeys(s.kind for s in steps))
    run.facts["wait"] = "TTFT at the node beyond the unloaded residual prefill of the scenario"
    return run


class _Street:
    """Requests on their way to engines, slice by slice between advertisements."""

    collect: Callable[[np.ndarray], None]
    coefficients: np.ndarray

    def __init__(
        self,
        rules: Rules,
        tables: Tables,
        layout: Layout,
        radio: RadioTable,
        farm: Farm,
        per_profile: int,
    ) -> None:
        self.rules, self.tables, self.layout, self.radio, self.farm = (
            rules,
            tables,
            layout,
            radio,
            farm,
        )
        profiles, count = len(tables.concurrency), len(layout.assigned)
        self._members = np.zeros((profiles, count), dtype=np.int64)
        self._present = np.bincount(layout.assigned, minlength=profiles).astype(np.int64)
        for s in range(profiles):
            self._members[s, : self._present[s]] = np.flatnonzero(layout.assigned == s)
        k = 1 if layout.palm else per_profile
        self._near = np.full((profiles, k), -1, dtype=np.int64)
        self._far = np.full((profiles, k), np.inf)
        snapshots = math.ceil(rules.delay / rules.period) + 2
        self._sent = np.zeros((snapshots, count, 2))
        self._tick = 0
        self._under_way = _nobody()
        self._out = np.empty((CHUNK, farms.COLLECTED))
        self._log = np.empty((0, len(LOG_COLUMNS)))
        self._nothing = np.zeros(0, dtype=np.int64)

    def send(self, chunk: Chunk, costs: Costs, limits: _Limits) -> None:
        """Route a chunk's requests as time passes; engines run up to its last advertisement."""
        done, total = 0, len(chunk.time)
        while done < total:
            if self.rules.advertised:
                end = (self._tick + 1) * self.rules.period
                stop = int(np.searchsorted(chunk.time, end, side="left"))
            else:
                end, stop = float(chunk.time[-1]), total
            part = slice(done, stop)
            if stop > done:
                self._route(chunk, part, costs, limits)
                done = stop
            if done < total or not self.rules.advertised:
                self._run(end)
                self._advertise(end)

    def finish(self) -> None:
        """Serve what is still in the network."""
        self._run(math.inf)

    def _route(self, chunk: Chunk, part: slice, costs: Costs, limits: _Limits) -> None:
        n = part.stop - part.start
        node = np.empty(n, dtype=np.int64)
        distance, delay = np.empty(n), np.empty(n)
        _route(
            self.rules,
            self.radio,
            self.layout.plane,
            self.layout.assigned,
            self._members,
            self._present,
            self.tables.prefill,
            self.tables.wait,
            self._sent,
            self._tick,
            chunk.time[part],
            chunk.row[part],
            chunk.kind[part],
            chunk.chance[part],
            chunk.position[part],
            chunk.radius[part],
            chunk.turn[part],
            node,
            distance,
            delay,
            self._near,
            self._far,
        )
        row = chunk.row[part]
        tokens = np.maximum(1, np.rint(costs.tokens[row])).astype(np.int64)
        memo = np.zeros((n, farms.MEMO))
        memo[:, farms.M_PLACE] = chunk.place[part]
        memo[:, farms.M_KIND] = chunk.kind[part]
        memo[:, farms.M_INTENDED] = chunk.time[part]
        memo[:, farms.M_DISTANCE] = distance
        profile = self.layout.assigned[node]
        arriving = Arriving(
            time=chunk.time[part] + delay,
            node=node,
            input_tokens=tokens,
            output_tokens=chunk.output_tokens[part],
            reusable=np.floor(self.tables.reuse[row, profile]).astype(np.int64),
            memo=memo,
        )
        limits.check(arriving, profile)
        joined = [np.concatenate(pair) for pair in zip(self._under_way, arriving, strict=True)]
        order = np.argsort(joined[0], kind="stable")
        self._under_way = Arriving(*(a[order] for a in joined))

    def _run(self, until: float) -> None:
        """Engines take in what reaches them before ``until`` and run up to it."""
        count = int(np.searchsorted(self._under_way.time, until, side="left"))
        now = Arriving(*(np.ascontiguousarray(a[:count]) for a in self._under_way))
        self._under_way = Arriving(*(a[count:] for a in self._under_way))
        while not farms.admit(self.farm, now):
            self.farm = farms.with_more_room(self.farm)
        if len(self._out) < self.farm.spare.shape[1]:
            self._out = np.empty((2 * self.farm.spare.shape[1], farms.COLLECTED))
        first = 0
        while first < len(self.layout.assigned):
            first, collected = farms.serve(
                self.farm,
                first,
                until,
                self.rules.window,
                self.coefficients,
                self._log,
                self._nothing,
                self._out,
            )
            self.collect(self._out[:collected].copy())

    def _advertise(self, now: float) -> None:
        if not self.rules.advertised:
            return
        self._tick += 1
        sent = self._sent[self._tick % len(self._sent)]
        farms.advertise(self.farm, now, self.rules.window, sent)


@numba.njit(cache=True)
def _route(
    rules: Rules,
    radio: RadioTable,
    plane: Plane,
    mark: np.ndarray,
    members: np.ndarray,
    present: np.ndarray,
    prefill: np.ndarray,
    wait: np.ndarray,
    sent: np.ndarray,
    tick: int,
    time: np.ndarray,
    row: np.ndarray,
    kind: np.ndarray,
    chance: np.ndarray,
    position: np.ndarray,
    radius: np.ndarray,
    turn: np.ndarray,
    node: np.ndarray,
    distance: np.ndarray,
    delay: np.ndarray,
    near: np.ndarray,
    far: np.ndarray,
) -> None:
    """Nodes, distances (km) and radio delays (s) of a slice's requests (n,)."""
    closed = np.zeros(near.shape[0], dtype=np.bool_)
    tried = np.full((1, 1), -1)
    untold = np.zeros((sent.shape[1], 2))
    for k in range(node.shape[0]):
        if rules.palm:
            draw_of_each(members, present, tried, radius[k : k + 1], turn[k : k + 1], 0, near, far)
        else:
            x, y = position[k, 0], position[k, 1]
            nearest_of_each(plane, x, y, mark, present, tried[0], near, far)
        seen = untold
        if rules.advertised:
            told = min(tick, math.floor((time[k] - rules.delay) / rules.period))
            if told >= 1:
                seen = sent[told % sent.shape[0]]
        node[k], distance[k] = cheapest(
            rules, radio, prefill, wait, seen, closed, near, far, row[k], kind[k]
        )
        delay[k] = drawn_delay(radio, distance[k], chance[k])


@dataclass(frozen=True)
class _Limits:
    """What an engine of each profile can hold, (S,) tokens and blocks."""

    longest: np.ndarray
    blocks: np.ndarray
    block_size: int

    @classmethod
    def of(cls, configs: list[EngineConfig]) -> _Limits:
        return cls(
            np.array([c.max_model_len for c in configs]),
            np.array([c.usable_blocks if c.num_blocks else 2**62 for c in configs]),
            configs[0].block_size,
        )

    def check(self, arriving: Arriving, profile: np.ndarray) -> None:
        total = arriving.input_tokens + arriving.output_tokens
        resident = np.minimum(arriving.reusable, arriving.input_tokens - 1)
        need = -(-total // self.block_size) - resident // self.block_size
        bad = np.flatnonzero((total > self.longest[profile]) | (need > self.blocks[profile]))
        if len(bad):
            i = bad[0]
            raise ScenarioError(
                f"engine: a request of {arriving.input_tokens[i]} input and "
                f"{arriving.output_tokens[i]} output tokens fits neither max_model_len "
                f"{self.longest[profile[i]]} nor {self.blocks[profile[i]]} blocks of "
                f"{self.block_size}"
            )


def engine_config(scenario: Scenario, profile: int) -> EngineConfig:
    """The engine of a profile's nodes: the scenario's, with the profile's blocks pinned.

    Without ``engine.num_blocks`` the pool is ``memory.capacity`` in blocks of κ bytes a token.

    Raises
    ------
    ScenarioError
        The pinned blocks leave none for requests.
    """
    engine, memory = scenario.engine or EngineSpec(), scenario.memory
    name = scenario.profiles[profile].engine or engine.name
    record = scenario.profiles[profile].calibration or engine.calibration
    block = engine.block_size * memory.per_token
    # One more block is vLLM's null block, which holds nothing; SGLang has none.
    if engine.num_blocks is None:
        blocks = int(memory.capacity // block) + 1
    else:
        blocks = engine.num_blocks + (name == "sglang")
    try:
        return EngineConfig(
            scheduler="sglang" if name == "sglang" else "vllm",
            token_budget=max(engine.token_budget, engine.max_sequences),
            max_sequences=engine.max_sequences,
            block_size=engine.block_size,
            num_blocks=blocks,
            max_model_len=engine.max_model_len,
            pinned_blocks=math.ceil(scenario.profiles[profile].persistent_bytes / block),
            async_scheduling=record is not None and read_async_scheduling(record),
        )
    except ValidationError as error:
        raise ScenarioError(f"profiles[{profile}]: {first_problem(error)}") from None


def _refuse(scenario: Scenario, spec: SimulationSpec) -> None:
    for field, given in (
        ("simulation.failures", spec.failures is not None),
        ("simulation.catalogue_period", spec.catalogue_period is not None),
        ("simulation.backhaul", spec.backhaul is not None),
        ("routing.admission_high", scenario.routing.admission_high is not None),
    ):
        if given:
            raise ScenarioError(f"{field}: nodes that are engines are simulated without it")


def _served(rows: np.ndarray, layout: Layout) -> Served:
    node = rows[:, farms.C_NODE].astype(np.int64)
    return Served(
        index=rows[:, farms.C_PLACE].astype(np.int64),
        kind=rows[:, farms.C_KIND].astype(np.int64),
        profile=layout.assigned[node],
        ttft=rows[:, farms.C_TTFT],
        wait=rows[:, farms.C_WAIT],
        occupancy=rows[:, farms.C_OCCUPANCY],
        distance=rows[:, farms.C_DISTANCE],
        reused=rows[:, farms.C_CACHED],
        saved=rows[:, farms.C_SAVED],
        full=rows[:, farms.C_FULL],
    )


def _nobody() -> Arriving:
    none, whole = np.empty(0), np.empty(0, dtype=np.int64)
    return Arriving(none, whole, whole, whole, whole, np.empty((0, farms.MEMO)))
