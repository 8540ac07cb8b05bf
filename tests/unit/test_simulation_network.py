"""The network: agreement with the theory, and laws that hold for every run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.errors import ScenarioError
from testbed.outcome import Outcome
from testbed.radio import Histogram, PowerLaw, radio_model
from testbed.routing.admission import Admission
from testbed.routing.telemetry import AdvertisedWait
from testbed.scenario import Scenario, Users
from testbed.simulation import network_events as events
from testbed.simulation import simulate
from testbed.simulation.heap import drop_first, grown, new_heap, push
from testbed.simulation.network import idle_network, network_rules, simulate_network
from testbed.simulation.network_state import UNSEEN
from testbed.simulation.placement import lay_out, move_bytes, whole_counts
from testbed.simulation.plane import nearest_of_each, new_plane, read_positions
from testbed.simulation.queue import waits
from testbed.simulation.radio_table import drawn_delay, mean_delay, tabulate
from testbed.simulation.requests import typed_arrivals
from testbed.simulation.service import service_law
from testbed.simulation.system import System
from testbed.simulation.tally import Tally
from testbed.simulation.users import Crowd

BASE: dict[str, Any] = {
    "name": "small network",
    "radio": {"model": "power_law", "xi": 0.1, "alpha": 2.0},
    "nodes": {"density": 1.0},
    "demand": {"intensity": 2.0},
    "prefill": {"linear": 4.0e-4},
    "memory": {"capacity": 8.0e9, "per_sequence": 2.0e9, "per_token": 131072},
    "requests": [
        {"name": "chat", "probability": 0.6, "tokens": 1000, "decode_occupancy": 0.3},
        {"name": "agent", "probability": 0.4, "tokens": 3000, "decode_occupancy": 0.5},
    ],
    "profiles": [
        {
            "name": "plain",
            "fraction": 0.5,
            "persistent_bytes": 0,
            "reusable": {"chat": 0, "agent": 0},
        },
        {
            "name": "deep",
            "fraction": 0.5,
            "persistent_bytes": 3.0e9,
            "reusable": {"chat": 500, "agent": 2400},
        },
    ],
    "targets": {"coverage_at": [0.8], "quantiles": [0.5, 0.9]},
}


def scenario(simulation: dict[str, Any], **changes: Any) -> Scenario:
    return Scenario.from_dict({**BASE, **changes, "simulation": simulation})


def sent_and_ended(outcome: Outcome) -> tuple[int, int]:
    counts = outcome.requests
    assert counts is not None
    return counts.sent, counts.completed + counts.rejected + counts.failed


def test_many_nodes_and_one_node_per_tier_agree() -> None:
    """Event by event with routed requests, or tier by tier: the same law."""
    tiers = simulate(scenario({}), requests=60_000, seed=4)
    network = simulate(scenario({"nodes": 40, "catalogue_period": 1000.0}), requests=60_000, seed=4)
    assert network.association == tiers.association
    for path in ("ttft.mean", "ttft.coverage.0.8", "ttft.quantiles.0.9", "tiers.deep.mean_wait"):
        (a, b), (c, d) = network.confidence[path], tiers.confidence[path]
        assert a <= d and c <= b, (path, (a, b), (c, d))


def test_a_node_of_the_network_is_the_exact_fcfs_queue() -> None:
    """Request by request: the waits of Kiefer and Wolfowitz for the same customers."""
    one = [{**BASE["profiles"][0], "fraction": 1.0}]
    asked = scenario(
        {"nodes": 1, "node_model": "exponential_by_type", "catalogue_period": 1e9},
        profiles=one,
        radio={"model": "power_law", "xi": 1e-12, "alpha": 2.0},
        policy="nearest",
        demand={"intensity": 4.0},
    )
    system, spec = System.of(asked), asked.simulation
    assert spec is not None
    law, tally = service_law(spec), Tally(4000, 2, 1, ())
    wait = np.zeros((2, 1))
    simulate_network(asked, system, law, tally, wait=wait, warm_up=0, seed=6)
    sent = list(typed_arrivals(asked, system, law, 4.0, 4000, 6, start=0.0))
    arrival, kind, work = (
        np.concatenate([getattr(a, f) for a in sent]) for f in ("time", "kind", "work")
    )
    waited = waits(arrival, system.occupancy[kind, 0] * work, int(system.concurrency[0]))
    assert (waited > 0).mean() > 0.3
    assert tally.exact == pytest.approx(waited + system.prefill[kind, 0], abs=1e-6)


def test_theory_holds_where_its_assumptions_do() -> None:
    outcome = simulate(scenario({"nodes": 40, "catalogue_period": 1e3}), requests=100_000, seed=2)
    figures = outcome.extra["theory"]["figures"]
    assert sum(f["inside"] for f in figures.values()) >= 0.8 * len(figures)


def test_cells_of_different_size_cost_more_than_the_mean_load_says() -> None:
    """Theory H8: the mean-load model is optimistic, and the outcome says by how much."""
    outcome = simulate(
        scenario({"space": "torus", "nodes": 100, "waits": "theory"}), requests=40_000, seed=1
    )
    spread = outcome.extra["simulation"]["node_utilisation"]["deep"]
    assert spread["0"] < outcome.tiers["deep"].utilisation < spread["1"]
    assert outcome.extra["theory"]["figures"]["tiers.deep.mean_wait"]["error"] < -0.1


def test_own_waits_spread_the_load_of_a_crowded_cell() -> None:
    def tail(waits: str) -> float:
        spec = {"space": "torus", "nodes": 100, "waits": waits}
        return simulate(
            scenario(spec, demand={"intensity": 3.2}), requests=40_000, seed=1
        ).ttft.quantiles["0.9"]

    assert tail("node") < tail("theory")


SPACES = st.sampled_from(["palm", "torus"])


@settings(max_examples=25, deadline=None)
@given(
    space=SPACES,
    policy=st.sampled_from(["nearest", "prefix_only", "load_aware"]),
    intensity=st.floats(0.2, 6.0),
    delay=st.floats(0.0, 2.0),
    period=st.sampled_from([0.0, 0.3, 1.0]),
    high=st.sampled_from([None, 0.5, 0.9]),
    faults=st.booleans(),
    moving=st.booleans(),
    users=st.sampled_from(
        [
            {},
            {"pattern": "clustered", "count": 30},
            {"count": 5, "mobility": "random_waypoint", "speed": 0.01},
            {"pattern": "clustered", "count": 5, "mobility": "gauss_markov"},
        ]
    ),
    seed=st.integers(0, 2**31),
)
def test_laws_of_any_network(
    space: str,
    policy: str,
    intensity: float,
    delay: float,
    period: float,
    high: float | None,
    faults: bool,
    moving: bool,
    users: dict[str, Any],
    seed: int,
) -> None:
    """Requests are conserved, time goes forward (checked inside), figures are possible, and the
    same seed gives the same outcome."""
    spec: dict[str, Any] = {"space": space, "nodes": 12, "waits": "node", "users": users}
    if faults:
        spec["failures"] = {"mean_uptime": 20.0, "mean_downtime": 5.0, "detection": 0.5}
    if moving:
        spec |= {
            "catalogue_period": 7.0,
            "migration": {"target": {"plain": 0.25, "deep": 0.75}, "budget": 2.5e9},
            "backhaul": {"rate": 1.0e9},
        }
    routing = {"telemetry_period": period, "telemetry_delay": delay, "telemetry_window": 5.0}
    if high is not None:
        routing |= {"admission_high": high, "admission_low": high / 2}
    asked = scenario(spec, policy=policy, demand={"intensity": intensity}, routing=routing)
    outcome = simulate(asked, requests=600, seed=seed)
    assert sent_and_ended(outcome) == (600, 600)
    assert outcome.requests is not None
    if not faults:
        assert outcome.requests.failed == 0
    for row in outcome.association.values():
        assert sum(row.values()) == pytest.approx(1.0, abs=1e-9) or outcome.requests.completed < 600
    for tier in outcome.tiers.values():
        assert 0 <= tier.wait_probability <= 1
        assert tier.mean_wait >= 0
    assert 0 <= outcome.offloading_ratio < 1
    again = simulate(asked, requests=600, seed=seed)
    assert again.model_copy(update={"environment": {}}) == outcome.model_copy(
        update={"environment": {}}
    )


def test_failed_nodes_lose_their_requests_to_others() -> None:
    faults = {"mean_uptime": 100.0, "mean_downtime": 20.0, "detection": 0.2}
    calm = simulate(scenario({"space": "torus", "nodes": 50}), requests=20_000, seed=3)
    broken = simulate(
        scenario({"space": "torus", "nodes": 50, "failures": faults}), requests=20_000, seed=3
    )
    assert broken.extra["simulation"]["failures"] > 50
    assert broken.requests is not None
    assert 0 < broken.requests.failed < 2000, "those whose answer had begun are lost"
    assert broken.ttft.mean > calm.ttft.mean


def test_a_network_without_any_live_node_fails_or_rejects_everything() -> None:
    faults = {"mean_uptime": 1e-3, "mean_downtime": 1e9, "detection": 0.0, "attempts": 2}
    outcome = simulate(scenario({"nodes": 4, "failures": faults}), requests=50, seed=1)
    assert outcome.requests is not None
    assert outcome.requests.completed == 0
    assert outcome.ttft.mean == math.inf
    assert outcome.ttft.coverage == {"0.8": 0.0}
    assert not outcome.valid
    assert Outcome.from_json(outcome.to_json()) == outcome


def test_migration_reaches_its_target_within_the_budget() -> None:
    spec = {
        "nodes": 20,
        "catalogue_period": 10.0,
        "migration": {"target": {"plain": 0.2, "deep": 0.8}, "budget": 3.0e9},
        "waits": "node",
    }
    moved = simulate(scenario(spec), requests=8000, seed=1).extra["simulation"]["migration"]
    assert moved["nodes"] == {"plain": 4, "deep": 16}
    assert moved["moves"] == 6
    assert moved["bytes"] == pytest.approx(6 * move_bytes(scenario({}))[0, 1])


def test_a_fetch_over_a_fast_backhaul_beats_recomputing() -> None:
    """Theory H6: with a fast backhaul the plain tier reuses as deeply as the deep one."""
    slow = simulate(scenario({"backhaul": {"rate": 1.0}}), requests=4000, seed=1)
    fast = simulate(scenario({"backhaul": {"rate": 1e12}}), requests=4000, seed=1)
    none = simulate(scenario({}), requests=4000, seed=1)
    assert slow.ttft == none.ttft
    assert fast.reusable_prefix_tokens > none.reusable_prefix_tokens
    assert fast.ttft.mean < none.ttft.mean


def test_fresh_telemetry_is_worth_having() -> None:
    def mean(delay: float) -> float:
        routing = {"telemetry_delay": delay, "telemetry_window": 5.0}
        spec = {"space": "torus", "nodes": 60}
        asked = scenario(spec, demand={"intensity": 3.6}, routing=routing)
        return simulate(asked, requests=40_000, seed=1).ttft.mean

    assert mean(0.0) < mean(60.0)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 80),
    st.integers(1, 3),
    st.integers(1, 3),
    st.floats(0.5, 10),
    st.integers(0, 2**32),
)
def test_nearest_nodes_by_brute_force(
    count: int, marks: int, k: int, width: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    size = np.array([width, 3.0])
    position = rng.random((count, 2)) * size
    mark = rng.integers(-1, marks, count)
    present = np.bincount(mark[mark >= 0], minlength=marks)
    shunned = np.array([rng.integers(count), -1])
    plane = new_plane(position, *size)
    node, distance = np.empty((marks, k), dtype=np.int64), np.empty((marks, k))
    x, y = rng.random(2) * size
    nearest_of_each(plane, x, y, mark, present, shunned, node, distance)
    gap = np.abs(position - [x, y])
    true = np.hypot(*np.minimum(gap, size - gap).T)
    for s in range(marks):
        wanted = [n for n in np.argsort(true) if mark[n] == s and n != shunned[0]][:k]
        assert [n for n in node[s] if n >= 0] == wanted
        assert distance[s][: len(wanted)] == pytest.approx(true[wanted])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 1e6), max_size=200))
def test_the_event_list_is_sorted(times: list[float]) -> None:
    heap = new_heap(2)
    for i, time in enumerate(times):
        if heap.size[0] == len(heap.time):
            heap = grown(heap)
        push(heap, time, i, 0.0)
    out = []
    while heap.size[0]:
        out.append((heap.time[0], heap.code[0]))
        drop_first(heap)
    assert [t for t, _ in out] == sorted(times)
    assert sorted(c for _, c in out) == list(range(len(times)))


@pytest.mark.parametrize("mobility", ["random_waypoint", "gauss_markov"])
def test_a_moving_crowd_stays_uniform(mobility: str) -> None:
    size = np.array([4.0, 2.0])
    spec = Users(count=40, mobility=mobility, speed=0.05)  # type: ignore[arg-type]
    place = Crowd(spec, size, 1).positions(np.arange(100_000.0))
    assert (place >= 0).all() and (place <= size).all()
    share = np.histogram2d(*place.T, bins=(4, 2), range=[[0, 4], [0, 2]])[0] / len(place) * 8
    assert share == pytest.approx(np.ones((4, 2)), abs=0.06)


def test_speed_is_the_mean_speed() -> None:
    """Few users seen often: the path they cover per second is the speed they were given."""
    size = np.array([50.0, 50.0])
    for mobility in ("random_waypoint", "gauss_markov"):
        spec = Users(count=1, mobility=mobility, speed=0.01)  # type: ignore[arg-type]
        step = np.diff(Crowd(spec, size, 2).positions(np.arange(0.0, 40_000.0, 1.0)), axis=0)
        step -= size * np.round(step / size)
        assert np.hypot(*step.T).mean() == pytest.approx(0.01, rel=0.05)


def test_a_radio_table_is_its_model(tmp_path: Path) -> None:
    file = tmp_path / "histogram"
    file.write_text("1 2\n2 0\n3 5\n5 1\n")
    rng = np.random.default_rng(1)
    for model in (PowerLaw(0.2, 3.0), Histogram(file, packets=3)):
        table = tabulate(model, 5.0)
        for distance, chance in zip(rng.random(50) * 5, rng.random(50), strict=True):
            at = np.array([distance])
            assert mean_delay(table, distance) == pytest.approx(model.delay(at)[0])
            drawn = model.quantile(at, np.array([chance]))[0]
            assert drawn_delay(table, distance, chance) == pytest.approx(drawn)


def test_measured_radio_shifts_every_request(tmp_path: Path) -> None:
    file = tmp_path / "histogram"
    file.write_text("100 1\n101 1\n")
    spec = {"model": "histogram", "file": str(file)}
    model = radio_model(scenario({}, radio=spec).radio)
    outcome = simulate(
        scenario({"space": "torus", "nodes": 30}, radio=spec, policy="nearest"),
        requests=2000,
        seed=1,
    )
    fixed = 0.1 + 1000 * 4.0e-4 * 0.5
    assert min(outcome.curve.seconds) >= fixed  # type: ignore[union-attr]
    assert model.delay(np.zeros(1))[0] == pytest.approx(0.101)


def test_positions_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "nodes.csv"
    file.write_text("x,y,profile\n0,0,plain\n1.5,0.2,deep\n0.3,1.6,deep\n1.7,1.9,plain\n")
    _, marks = read_positions(file, ("plain", "deep"))
    assert marks is not None and marks.tolist() == [0, 1, 1, 0]
    outcome = simulate(scenario({"space": "torus", "positions": str(file)}), requests=1000, seed=1)
    assert outcome.extra["simulation"]["nodes"] == {"plain": 2, "deep": 2}
    for text, message in (
        ("1,2\n3\n", ":2: not `x,y`"),
        ("1,2,other\n", "'other' is not a profile"),
        ("1,2,deep\n2,3\n", "1 of 2 nodes"),
        ("x,y\n", "no node"),
        ("1,nan\n", "not finite"),
    ):
        file.write_text(text)
        with pytest.raises(ScenarioError, match=message):
            read_positions(file, ("plain", "deep"))
    file.write_text("0,0\n9,9\n")
    with pytest.raises(ScenarioError, match="but they span"):
        simulate(scenario({"space": "torus", "positions": str(file)}), requests=10, seed=1)


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=6), st.integers(1, 500))
def test_nodes_are_shared_out_whole(fractions: list[float], total: int) -> None:
    counts = whole_counts(np.array(fractions), total)
    ideal = np.array(fractions) / sum(fractions) * total
    assert counts.sum() == total
    assert (np.abs(counts - ideal) < 1).all()


def test_a_profile_without_a_node_is_refused() -> None:
    with pytest.raises(ScenarioError, match="leave none for profile"):
        simulate(scenario({"nodes": 1, "waits": "node"}), requests=10, seed=1)


def test_admission_follows_the_shared_rule() -> None:
    """The compiled hysteresis and the router's class close and reopen alike."""
    routing = {"admission_high": 0.8, "admission_low": 0.5}
    asked = scenario({"nodes": 4}, routing=routing)
    system, spec = System.of(asked), asked.simulation
    assert spec is not None
    rules = network_rules(asked, system, spec, service_law(spec), advertised=True)
    net = idle_network(rules, lay_out(asked, system, spec, seed=1), len(system.profiles))
    gate = Admission.from_scenario(asked)
    rng = np.random.default_rng(3)
    t, closed = net.telemetry, net.nodes.closed
    for _ in range(200):
        t.sent_load[0] = load = rng.random(2) * 1.2
        events.learn(t.sent, t.sent_load, t.seen, closed, 0, rules.close_at, rules.reopen_at)
        gate.update_all({"plain": load[0], "deep": load[1]})
        assert bool(closed[1]) == (not gate.admits("deep"))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 5), st.floats(0, 3)), min_size=1, max_size=30),
    st.floats(0.1, 20),
)
def test_nodes_advertise_by_the_shared_rule(
    steps: list[tuple[float, float]], window: float
) -> None:
    kept = np.array([[0.0, 0.0, UNSEEN]])
    shared, now = AdvertisedWait(window), 0.0
    for gap, wait in steps:
        now += gap
        events.observe(kept, 0, now, wait, window)
        shared.observe(now, wait)
        assert kept[0, 0] == pytest.approx(shared.mean, abs=1e-12)
