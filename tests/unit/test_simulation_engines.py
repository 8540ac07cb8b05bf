"""Networks of engine models, and delay maps made from them and from queues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from testbed.errors import CalibrationError, ScenarioError
from testbed.scenario import Scenario
from testbed.simulation import engine_farm as farms
from testbed.simulation import simulate
from testbed.simulation.delay_maps import delay_map
from testbed.simulation.engine_farm import Arriving, new_farm
from testbed.simulation.engine_model import EngineConfig, simulate_engine
from testbed.simulation.engine_network import engine_config
from testbed.simulation.network_events import observe
from testbed.step_time import StepTime, read_step_time
from testbed.theory import predict

STEP_TIME = StepTime(c_pre=0.004, a=2e-4, c_dec=0.006, e=1e-4)

BASE: dict[str, Any] = {
    "name": "engines",
    "radio": {"model": "power_law", "xi": 0.1, "alpha": 2.0},
    "nodes": {"density": 1.0},
    "demand": {"intensity": 1.5},
    "prefill": {"overhead": 0.004, "linear": 2e-4},
    "memory": {"capacity": 4.0e9, "per_sequence": 4.0e8, "per_token": 131072},
    "engine": {"max_sequences": 8, "block_size": 16, "token_budget": 2048},
    "requests": [
        {"name": "chat", "probability": 0.6, "tokens": 500, "output_tokens": 4},
        {"name": "agent", "probability": 0.4, "tokens": 1500, "output_tokens": 8},
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
            "persistent_bytes": 4.0e8,
            "reusable": {"chat": 256, "agent": 1200},
        },
    ],
    "targets": {"coverage_at": [0.8], "quantiles": [0.5, 0.9]},
}


def scenario(**simulation: Any) -> Scenario:
    spec = {"node_model": "engine", "nodes": 10, **simulation}
    return Scenario.from_dict({**BASE, "simulation": spec})


def arriving(time: np.ndarray, node: np.ndarray, tokens: np.ndarray, out: np.ndarray) -> Arriving:
    memo = np.zeros((len(time), farms.MEMO))
    memo[:, farms.M_PLACE] = np.arange(len(time))
    memo[:, farms.M_INTENDED] = time
    return Arriving(time, node, tokens, out, np.zeros_like(tokens), memo)


def test_a_farm_in_slices_is_each_engine_on_its_own() -> None:
    """Slices, recycled rows and growth change nothing about any request."""
    rng = np.random.default_rng(1)
    config = EngineConfig(max_sequences=6, num_blocks=400, max_model_len=2048)
    assigned = np.zeros(3, dtype=np.int64)
    n = 600
    node = rng.integers(0, 3, n)
    time = np.cumsum(rng.exponential(0.04, n))
    tokens, out = rng.integers(1, 1200, n), rng.integers(1, 30, n)
    everyone = arriving(time, node, tokens, out)
    farm = new_farm([config], assigned, STEP_TIME, room=4)
    coefficients = np.array([[0.004, 2e-4, 0.0, 0.0]])
    log, nothing = np.empty((0, 20)), np.zeros(0, dtype=np.int64)
    ttft = np.full(n, np.nan)
    edges = np.append(np.arange(1.0, time[-1], 1.0), np.inf)
    first = 0
    for until in edges:
        last = int(np.searchsorted(time, until))
        part = Arriving(*(a[first:last] for a in everyone))
        while not farms.admit(farm, part):
            farm = farms.with_more_room(farm)
        done, at = 0, np.empty((4 * farm.spare.shape[1], farms.COLLECTED))
        while done < 3:
            done, count = farms.serve(farm, done, until, 5.0, coefficients, log, nothing, at)
            ttft[at[:count, farms.C_PLACE].astype(int)] = at[:count, farms.C_TTFT]
        first = last
    farms.check(farm)
    assert (farm.left == farm.spare.shape[1]).all(), "every request has left"
    for k in range(3):
        mine = node == k
        alone = simulate_engine(config, STEP_TIME, time[mine], tokens[mine], out[mine])
        assert ttft[mine] == pytest.approx(alone.ttft, abs=1e-9)


def test_a_network_of_engines_agrees_with_its_delay_map(tmp_path: Path) -> None:
    """Theory H3: with the map of its own engines the analytical model is close; Erlang-C is not."""
    file = tmp_path / "map.json"
    delay_map(scenario(), requests=10_000, seed=1, step_time=STEP_TIME).save(file)
    asked = scenario(waits="theory").replace(delay_model=f"delay_map:{file}")
    outcome = simulate(asked, requests=20_000, seed=2, step_time=STEP_TIME)
    figures = outcome.extra["theory"]["figures"]
    assert outcome.tiers["deep"].mean_wait > 0.005
    assert abs(figures["tiers.deep.mean_wait"]["error"]) < 0.08
    assert abs(figures["ttft.mean"]["error"]) < 0.03
    assert predict(scenario()).tiers["deep"].mean_wait < 0.1 * outcome.tiers["deep"].mean_wait


def test_engines_on_a_torus_conserve_requests_and_repeat() -> None:
    asked = scenario(space="torus", users={"count": 20, "mobility": "random_waypoint"})
    one, two = (simulate(asked, requests=3000, seed=5, step_time=STEP_TIME) for _ in range(2))
    assert one.requests is not None
    assert one.requests.completed == 3000
    assert one.model_copy(update={"environment": {}}) == two.model_copy(update={"environment": {}})
    for row in one.association.values():
        assert sum(row.values()) == pytest.approx(1.0)
    # A hit is rounded down to whole blocks of what the profile pins.
    assert 0 < one.reusable_prefix_tokens <= 0.6 * 256 + 0.4 * 1200


def test_a_trace_is_replayed_on_engines(tmp_path: Path) -> None:
    lines = [
        f'{{"timestamp": {i * 200}, "input_length": 1024, "output_length": 3, '
        f'"hash_ids": [7, {100 + i}]}}'
        for i in range(200)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(lines))
    base = scenario().to_dict()
    for profile in base["profiles"]:
        profile["reusable"] = {"chat": 0, "agent": 0}
    base["profiles"][1] |= {"reusable": {"chat": 500, "agent": 512}, "pinned_blocks": [7]}
    base["workload"] = {"trace": str(trace), "arrivals": "verbatim"}
    asked = Scenario.from_dict(base)
    outcome = simulate(asked, requests=150, seed=1, step_time=STEP_TIME)
    assert outcome.requests is not None
    assert outcome.requests.completed == 150
    assert outcome.extra["simulation"]["workload"]["arrivals"] == "verbatim"
    assert outcome.extra["simulation"]["warm_up"]["requests"] == 0
    assert outcome.reusable_prefix_tokens > 0
    queues = simulate(
        asked.replace(simulation={"nodes": 10, "waits": "node"}), requests=150, seed=1
    )
    assert queues.requests is not None
    assert queues.requests.completed == 150


def test_what_engines_cannot_do_is_refused() -> None:
    with pytest.raises(ScenarioError, match=r"simulation\.failures"):
        simulate(
            scenario(failures={"mean_uptime": 1.0, "mean_downtime": 1.0}),
            requests=100,
            step_time=STEP_TIME,
        )
    with pytest.raises(ScenarioError, match=r"engine\.calibration"):
        simulate(scenario(), requests=100)
    short = {**BASE, "engine": {"max_model_len": 1000}, "simulation": {"node_model": "engine"}}
    with pytest.raises(ScenarioError, match="fits neither"):
        simulate(Scenario.from_dict(short), requests=100, step_time=STEP_TIME)


def test_step_time_of_a_calibration_record(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    file.write_text('{"step_time": ' + STEP_TIME.model_dump_json() + "}")
    assert read_step_time(file) == STEP_TIME
    for text, message in (("{", "calibration.json:1"), ("{}", "this record has none")):
        file.write_text(text)
        with pytest.raises(CalibrationError, match=message):
            read_step_time(file)
    with pytest.raises(CalibrationError, match="No such file"):
        read_step_time(tmp_path / "absent")


def test_a_gpus_engine_schedules_while_a_step_runs(tmp_path: Path) -> None:
    """As its record says; where that says nothing, as vLLM does on such a device."""
    file = tmp_path / "calibration.json"
    asked = scenario().with_field("engine.calibration", str(file))
    for part, expected in (
        ('"engine": {"async_scheduling": true}', True),
        ('"engine": {"async_scheduling": false}, "device": {"kind": "gpu"}', False),
        ('"device": {"kind": "gpu"}', True),
        ('"device": {"kind": "cpu"}', False),
    ):
        file.write_text("{" + part + "}")
        assert engine_config(asked, 0).async_scheduling is expected


def test_a_map_of_queues_is_erlang_c(tmp_path: Path) -> None:
    """Tabulated by simulation, the M/M/c law is the closed form within sampling error."""
    queues = Scenario.from_dict({**BASE, "demand": {"intensity": 6.0}})
    file = tmp_path / "map.json"
    delay_map(queues, requests=60_000, seed=3).save(file)
    told, closed = predict(queues, delay_model=f"delay_map:{file}"), predict(queues)
    assert told.ttft.mean == pytest.approx(closed.ttft.mean, rel=0.01)
    assert told.ttft.coverage["0.8"] == pytest.approx(closed.ttft.coverage["0.8"], abs=0.005)


def test_a_map_is_ordered_in_rate_and_delay() -> None:
    map_ = delay_map(scenario(), requests=1000, seed=1, step_time=STEP_TIME, rounds=1)
    assert {t.profile for t in map_.tables} == {"plain", "deep"}
    for table in map_.tables:
        cdf = np.array(table.cdf)
        assert (np.diff(cdf, axis=0) <= 1e-12).all(), "more load, longer delays"
        assert (np.diff(cdf, axis=2) >= 0).all()


@pytest.mark.parametrize("loads", [(), (0.5, 0.4), (0.0, 0.5), (0.5, 1.0)])
def test_loads_must_rise_below_capacity(loads: tuple[float, ...]) -> None:
    with pytest.raises(ScenarioError, match="loads"):
        delay_map(scenario(), loads=loads)


def test_engines_advertise_in_order_of_first_tokens() -> None:
    kept = np.array([[0.0, 0.0, -1.0]])
    for now, wait in ((0.0, 1.0), (2.0, 1.0), (4.0, 0.0)):
        observe(kept, 0, now, wait, 2.0)
    assert 0 < kept[0, 0] < 1 - np.exp(-1.0)
