"""simulate: agreement with the theory where its assumptions hold, and the laws of any run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from testbed.errors import ScenarioError
from testbed.outcome import Outcome
from testbed.scenario import Scenario
from testbed.simulation import simulate
from testbed.simulation.simulate import theory_waits

SCENARIO: dict[str, Any] = {
    "name": "three tiers",
    "radio": {"model": "power_law", "xi": 0.16, "alpha": 3.5},
    "nodes": {"density": 1.0},
    "demand": {"intensity": 3.0},
    "prefill": {"linear": 4.6e-4, "quadratic": 5.0e-9},
    "memory": {"capacity": 566418286, "per_sequence": 23405714, "per_token": 131072},
    "requests": [
        {"name": "short", "probability": 0.4, "tokens": 1024, "decode_occupancy": 0.4},
        {"name": "medium", "probability": 0.4, "tokens": 2048, "decode_occupancy": 0.4},
        {"name": "long", "probability": 0.2, "tokens": 4096, "decode_occupancy": 0.4},
    ],
    "profiles": [
        {
            "name": "uncached",
            "fraction": 0.4,
            "persistent_bytes": 0,
            "reusable": {"short": 0, "medium": 0, "long": 0},
        },
        {
            "name": "shallow",
            "fraction": 0.4,
            "persistent_bytes": 33554432,
            "reusable": {"short": 256, "medium": 256, "long": 256},
        },
        {
            "name": "deep",
            "fraction": 0.2,
            "persistent_bytes": 352321536,
            "reusable": {"short": 384, "medium": 1280, "long": 2688},
        },
    ],
    "targets": {"coverage_at": [0.5, 0.8], "quantiles": [0.5, 0.9, 0.99]},
}


def scenario(**changes: Any) -> Scenario:
    return Scenario.from_dict({**SCENARIO, **changes})


@pytest.mark.parametrize("policy", ["nearest", "prefix_only", "load_aware"])
def test_every_request_is_accounted_for(policy: str) -> None:
    outcome = simulate(scenario(policy=policy), requests=4000, seed=3)
    assert outcome.kind == "simulated"
    assert outcome.requests is not None
    assert outcome.requests.sent == outcome.requests.completed == 4000
    for row in outcome.association.values():
        assert sum(row.values()) == pytest.approx(1.0)
    for path, (low, high) in outcome.confidence.items():
        assert low <= outcome.figure(path) <= high, path
    assert Outcome.from_json(outcome.to_json()) == outcome


def test_the_same_seed_gives_the_same_outcome() -> None:
    first, second, other = (simulate(scenario(), requests=2000, seed=s) for s in (7, 7, 8))
    timing = {"environment": {}}
    assert first.model_copy(update=timing) == second.model_copy(update=timing)
    assert first.ttft != other.ttft


def test_policies_see_the_same_requests() -> None:
    """Common random numbers: the difference between policies is far less noisy than either."""
    spread = []
    for seed in range(8):
        aware, blind = (
            simulate(scenario(policy=p, demand={"intensity": 0.5}), requests=2000, seed=seed)
            for p in ("load_aware", "prefix_only")
        )
        spread.append((aware.ttft.mean, aware.ttft.mean - blind.ttft.mean))
    means, differences = zip(*spread, strict=True)
    assert max(differences) - min(differences) < (max(means) - min(means)) / 4


def test_an_overloaded_tier_is_named() -> None:
    outcome = simulate(
        scenario(policy="prefix_only", demand={"intensity": 5.0}), requests=20_000, seed=1
    )
    assert not outcome.feasible
    assert outcome.reason is not None
    assert "deep" in outcome.reason
    assert any("unstable" in w for w in outcome.warnings)


def test_a_tier_without_nodes_serves_nobody() -> None:
    profiles = [dict(p) for p in SCENARIO["profiles"]]
    profiles[0]["fraction"], profiles[2]["fraction"] = 0.6, 0.0
    outcome = simulate(scenario(profiles=profiles), requests=2000, seed=1)
    assert all(row["deep"] == 0 for row in outcome.association.values())
    assert outcome.tiers["deep"].arrival_rate == 0


def test_replications_join_and_differ() -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as pool:
        joined = simulate(scenario(), requests=2000, seed=1, replications=3, executor=pool)
    single = simulate(scenario(), requests=2000, seed=1)
    assert joined.requests is not None
    assert joined.requests.sent == 6000
    assert joined.ttft.mean != single.ttft.mean
    width = {
        o: o_.confidence["ttft.mean"][1] - o_.confidence["ttft.mean"][0]
        for o, o_ in (("joined", joined), ("single", single))
    }
    assert width["joined"] < 2 * width["single"]


def test_an_outcome_is_one_json_document() -> None:
    document = json.loads(simulate(scenario(), requests=500, seed=1).to_json())
    for key in ("feasible", "association", "tiers", "ttft", "requests", "confidence"):
        assert key in document


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"requests": 1}, "requests: 1"),
        ({"requests": 10, "replications": 0}, "replications: 0"),
        ({"requests": 10, "seed": -1}, "seed: -1"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        simulate(scenario(), **arguments)


def test_waits_of_an_unstable_scenario_are_not_invented() -> None:
    with pytest.raises(ScenarioError, match="no stable operating point"):
        theory_waits(scenario(demand={"intensity": 100.0}))
    overloaded = scenario(demand={"intensity": 100.0})
    outcome = simulate(overloaded, requests=3000, seed=1)
    assert not outcome.feasible
    assert "their own waits" in outcome.warnings[0]
    told = overloaded.replace(simulation={"waits": "theory"})
    with pytest.raises(ScenarioError, match="no stable operating point"):
        simulate(told, requests=3000, seed=1)
