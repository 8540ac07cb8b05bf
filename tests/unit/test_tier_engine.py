"""Tiers on engines of their own: g, D and step time of the tier, in theory and in simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from testbed.errors import ScenarioError
from testbed.scenario import Scenario
from testbed.simulation import simulate
from testbed.simulation.engine_network import engine_config
from testbed.simulation.system import System as SimulatedSystem
from testbed.step_time import StepTime
from testbed.theory import predict
from testbed.theory.score import marginal_depth
from testbed.theory.system import System
from testbed.tier_engine import tier_step_times
from tests.unit.scenarios import small

SLOW = {"linear": 8e-5, "quadratic": 6e-8, "context": 12e-8, "overhead": 8e-3}
"""Twice the g of ``small``."""


def with_deep(scenario: Scenario, **changes: Any) -> Scenario:
    plain, deep = (s.model_dump(exclude_none=True) for s in scenario.profiles)
    return scenario.replace(profiles=[plain, {**deep, **changes}])


def record(path: Path, factor: float) -> str:
    step = StepTime(c_pre=4e-3 * factor, a=4e-5 * factor, c_dec=2e-3 * factor, e=1e-4 * factor)
    path.write_bytes(orjson.dumps({"step_time": step.model_dump()}))
    return str(path)


def test_a_tier_is_charged_by_its_own_engine_in_theory_and_simulation() -> None:
    plain = System.from_scenario(small())
    other = with_deep(small(), prefill=SLOW, decode_occupancy={"agent": 0.2, "chat": 0.3})
    theory, simulated = System.from_scenario(other), SimulatedSystem.of(other)
    assert theory.residual[:, 0] == pytest.approx(plain.residual[:, 0])
    assert theory.residual[:, 1] == pytest.approx(2 * plain.residual[:, 1])
    assert theory.saving[:, 1] == pytest.approx(2 * plain.saving[:, 1])
    assert theory.occupancy[:, 1] == pytest.approx(2 * plain.residual[:, 1] + [0.2, 0.3])
    assert simulated.prefill == pytest.approx(theory.residual)
    assert simulated.occupancy == pytest.approx(theory.occupancy)
    assert simulated.full_prefill == pytest.approx(theory.residual + theory.saving)


def test_theory_lies_in_the_interval_where_tiers_differ() -> None:
    other = with_deep(small(), prefill=SLOW, decode_occupancy={"agent": 0.2, "chat": 0.3})
    other = other.replace(demand={"intensity": 2.0}, simulation={"node_model": "exponential"})
    outcome = simulate(other, requests=20_000, seed=3)
    figures = outcome.extra["theory"]["figures"]
    for name in ("ttft.mean", "offloading_ratio"):
        assert abs(figures[name]["error"]) < 0.05, (name, figures[name])


def test_a_tier_has_its_own_step_time_and_scheduler(tmp_path: Path) -> None:
    """Both tiers slowed by records of their own are the network slowed by the engine's record."""
    one, two = record(tmp_path / "one.json", 1.0), record(tmp_path / "two.json", 2.0)
    base = small(simulation={"node_model": "engine", "nodes": 6, "waits": "node"})
    shared = simulate(base.with_field("engine.calibration", two), requests=800, seed=1)
    own = base.replace(
        profiles=[{**s.model_dump(exclude_none=True), "calibration": two} for s in base.profiles]
    )
    mixed = with_deep(base.with_field("engine.calibration", two), calibration=one)
    assert simulate(own, requests=800, seed=1).ttft == shared.ttft
    assert simulate(mixed, requests=800, seed=1).ttft.mean < shared.ttft.mean
    steps = tier_step_times(mixed)
    assert steps is not None
    assert [s.prefill_seconds(100.0) for s in steps] == pytest.approx([0.016, 0.008])
    sglang = with_deep(mixed, engine="sglang")
    assert [engine_config(sglang, s).scheduler for s in (0, 1)] == ["vllm", "sglang"]
    outcome = simulate(sglang, requests=800, seed=1)
    assert outcome.requests is not None
    assert outcome.requests.completed == 800
    assert outcome.ttft != simulate(mixed, requests=800, seed=1).ttft


def test_every_tier_is_predicted_by_its_own_record(tmp_path: Path) -> None:
    one, two = record(tmp_path / "one.json", 1.0), record(tmp_path / "two.json", 2.0)
    shared = small(policy="nearest").with_field("engine.calibration", one)
    own = with_deep(shared, calibration=two)
    a, b = (predict(x, delay_model="token_server") for x in (shared, own))
    assert a.tiers["fallback"] == b.tiers["fallback"]
    assert b.tiers["deep"].mean_wait > a.tiers["deep"].mean_wait


def test_what_is_missing_or_has_one_engine_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"profiles\[1\]\.decode_occupancy: 'chat' is missing"):
        with_deep(small(), decode_occupancy={"agent": 0.1})
    with pytest.raises(ScenarioError, match=r"profiles\[1\]\.decode_occupancy: agent: -1"):
        with_deep(small(), decode_occupancy={"agent": -1, "chat": 0})
    half = with_deep(small(), calibration=record(tmp_path / "one.json", 1.0))
    with pytest.raises(ScenarioError, match=r"profiles\[0\]\.calibration: missing"):
        predict(half, delay_model="token_server")
    own = with_deep(small(), prefill=SLOW)
    with pytest.raises(ScenarioError, match=r"profiles\[1\]\.prefill: the marginal depth knows"):
        marginal_depth(own, 1.0)
