"""Latency: the law of the TTFT, and predict's outcome (Theory E, C7, D3)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.errors import ScenarioError
from testbed.outcome import Outcome, flatten
from testbed.presets import preset, preset_names
from testbed.radio import nearest_distances
from testbed.routing.policies import get_policy
from testbed.scenario import Prefill, Scenario
from testbed.theory import predict
from testbed.theory.delay.erlang_c import ErlangC
from testbed.theory.delay.mgc import MGc
from testbed.theory.delay.phase_type import PhaseType
from testbed.theory.delay.service import ServiceVariability
from testbed.theory.latency import Latency
from testbed.theory.operating_point import solve
from testbed.theory.predict import locate
from testbed.theory.prefill import marginal_saving, prefill_saving, prefill_time, residual_prefill
from testbed.theory.system import System
from tests.unit.significance import kolmogorov, within

BASELINE = preset("paper-baseline")
POLICIES = ["nearest", "prefix_only", "load_aware"]
MODEST = settings(max_examples=30, deadline=None)


def asked(intensity: float = 3.0, policy: str = "load_aware", **changes: object) -> Scenario:
    scenario = BASELINE.replace(policy=policy, **changes)
    return scenario.with_field("demand.intensity", intensity)


KEYS = [(p, i) for p in sorted(POLICIES) for i in (1.0, 3.0, 4.0)]


@cache
def latency_of(policy: str, intensity: float) -> Latency:
    return locate(asked(intensity, policy))


# --- Prefill (A5, A8, H1) --------------------------------------------------------------------


@MODEST
@given(
    st.floats(0, 0.1),
    st.floats(1e-6, 1e-3),
    st.floats(0, 1e-7),
    st.floats(0, 1e-7),
    st.floats(1, 8000),
    st.floats(0, 1),
)
def test_prefill_saves_what_it_does_not_compute(
    overhead: float, linear: float, quadratic: float, context: float, tokens: float, part: float
) -> None:
    spec = Prefill(overhead=overhead, linear=linear, quadratic=quadratic, context=context)
    hit = part * tokens
    left = residual_prefill(spec, tokens, hit)
    assert prefill_time(spec, 0.0, hit) == 0.0
    assert left + prefill_saving(spec, tokens, hit) == pytest.approx(
        float(prefill_time(spec, tokens, 0.0))
    )
    if part < 0.99:
        step = 1e-4 * tokens
        slope = (left - residual_prefill(spec, tokens, hit + step)) / step
        assert slope == pytest.approx(
            float(marginal_saving(spec, tokens, hit + step / 2)), rel=1e-6, abs=1e-12
        )


def test_attending_to_cached_tokens_costs_time() -> None:
    plain, attending = Prefill(linear=1e-4), Prefill(linear=1e-4, context=2e-8)
    assert residual_prefill(attending, 4096, 3072) - residual_prefill(
        plain, 4096, 3072
    ) == pytest.approx(2e-8 * 1024 * 3072)
    # With d = 2b cutting a prompt in two chunks is neutral.
    spec = Prefill(linear=1e-4, quadratic=1e-8, context=2e-8)
    whole = prefill_time(spec, 1000, 0)
    assert prefill_time(spec, 400, 0) + prefill_time(spec, 600, 400) == pytest.approx(float(whole))


# --- The law of the TTFT ---------------------------------------------------------------------


@MODEST
@given(st.sampled_from(KEYS), st.floats(0, 6), st.floats(0, 6))
def test_coverage_rises_with_the_deadline_below_its_bound(
    key: tuple[str, float], a: float, b: float
) -> None:
    latency = latency_of(*key)
    low, high = sorted((a, b))
    assert latency.coverage(low) <= latency.coverage(high) + 1e-11
    assert 0 <= latency.coverage(low) <= latency.upper_bound(low) + 1e-11
    assert latency.upper_bound(high) <= 1 + 1e-11


@pytest.mark.parametrize("key", KEYS)
def test_quantiles_invert_coverage(key: tuple[str, float]) -> None:
    latency = latency_of(*key)
    for level in (0.1, 0.5, 0.9, 0.99):
        at = latency.quantile(level)
        if np.isinf(at):
            assert latency.coverage(1e6) < level
        else:
            assert latency.coverage(at) == pytest.approx(level, abs=1e-9)
            assert latency.coverage(at * (1 - 1e-6)) < level


@pytest.mark.parametrize("policy", POLICIES)
def test_the_mean_is_the_integral_of_the_tail(policy: str) -> None:
    latency = latency_of(policy, 3.0)
    grid = np.concatenate([np.linspace(0, 6, 1201), np.geomspace(6.01, 60, 100)])
    tail = np.array([1 - latency.coverage(t) for t in grid])
    assert latency.mean == pytest.approx(np.trapezoid(tail, grid), rel=1e-4)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_ttft_agrees_with_monte_carlo(policy: str) -> None:
    """2·10⁵ draws of distances (Theory F4) and waits, at the level of three standard errors: the
    CDF everywhere on the axis, and four means."""
    latency = latency_of(policy, 3.0)
    system, point = latency.system, latency.point
    rng = np.random.default_rng(7)
    count = 200_000
    kind = rng.choice(3, count, p=system.probability)
    distance = nearest_distances(system.density, count, rng)
    radio = system.radio.delay(distance)
    rule = get_policy(policy)
    costs = radio + rule.fixed_cost(system.residual, point.wait)[kind]
    chosen = costs.argmin(axis=1)
    laws = [latency.model.excess(load) for load in point.loads]
    waiting = np.array([law.wait_probability for law in laws])[chosen]
    rate = np.array([law.rate if law.wait_probability else 1.0 for law in laws])[chosen]
    wait = (rng.random(count) < waiting) * rng.exponential(1.0, count) / rate
    served = np.arange(count), chosen
    ttft = radio[served] + system.residual[kind, chosen] + wait
    at = np.linspace(0, count - 1, 200).astype(int)
    law = np.array([latency.coverage(t) for t in np.sort(ttft)[at]])
    gap = float(np.abs(law - (at + 0.5) / count).max())
    assert gap < kolmogorov(count) + 0.5 / count
    saved, whole = system.saving[kind, chosen], (system.residual + system.saving)[kind, 0]
    ratio = latency.offloading_ratio
    drawn = np.array([ttft, system.reusable[kind, chosen], distance[served], saved - ratio * whole])
    expected = [latency.mean, latency.reusable_tokens, latency.mean_distance, 0.0]
    z = within(drawn.mean(axis=1), expected, drawn.std(axis=1) / np.sqrt(count))
    print(f"{policy}, {count} samples: TTFT CDF off by {gap:.2e}, means by {z:.2f} standard errors")


def test_nearest_has_the_law_of_one_tier() -> None:
    latency = latency_of("nearest", 1.0)
    association = latency.point.association
    assert association == pytest.approx(np.tile([0.4, 0.4, 0.2], (3, 1)), abs=1e-12)
    assert latency.mean_distance == pytest.approx(0.5, rel=1e-9)
    # Without waits, P(τ) is the nearest-neighbour law at the radio delay that is left.
    system = latency.system
    expected = 0.0
    for q, p in enumerate(system.probability):
        for s, share in enumerate(system.fraction):
            r = float(system.radio.distance(np.array(0.8 - system.residual[q, s])))
            expected += p * share * (1 - np.exp(-np.pi * r**2))
    assert latency.upper_bound(0.8) == pytest.approx(expected, abs=1e-11)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_general_law_gives_what_the_exponential_one_does(policy: str) -> None:
    fast = latency_of(policy, 3.0)
    grid = np.concatenate([np.linspace(0, 4, 201), np.geomspace(4.05, 60, 30)])
    for model in (MGc(ServiceVariability(0.5)), PhaseType(ServiceVariability(1.5))):
        slow = Latency(fast.system, solve(fast.system, get_policy(policy), model), model)
        # The mean does not come from the law's CDF, so it checks the quadrature of the CDF.
        tail = np.array([1 - slow.coverage(t) for t in grid])
        assert slow.mean == pytest.approx(np.trapezoid(tail, grid), rel=1e-3)
    hidden = Latency(fast.system, fast.point, ErlangC())
    object.__setattr__(hidden, "_exponential", None)
    for t in (0.2, 0.5, 0.8, 1.7, 5.0):
        assert hidden.coverage(t) == pytest.approx(fast.coverage(t), abs=1e-10)


def test_a_huge_deadline_covers_all_that_is_served() -> None:
    assert latency_of("load_aware", 4.0).coverage(1e6) == pytest.approx(1.0, abs=1e-12)
    overloaded = latency_of("prefix_only", 4.0)
    served = overloaded.system.probability @ overloaded.point.association[:, :2].sum(axis=1)
    assert overloaded.coverage(1e6) == pytest.approx(float(served), abs=1e-12)
    assert latency_of("load_aware", 1.0).coverage(0.0) == 0.0


# --- predict ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "intensity", "density", "coverage"),
    [
        ("load_aware", 3.0, 1.0, 0.692),
        ("load_aware", 4.0, 1.0, 0.627),
        ("prefix_only", 3.0, 1.0, 0.550),
        ("prefix_only", 4.0, 1.0, 0.228),
        ("nearest", 1.0, 1.0, 0.515),
        ("nearest", 4.0, 1.0, 0.515),
        ("load_aware", 3.0, 0.5, 0.481),
        ("load_aware", 3.0, 3.0, 0.951),
        ("nearest", 3.0, 3.0, 0.520),
    ],
)
def test_the_baseline_gives_its_published_values(
    policy: str, intensity: float, density: float, coverage: float
) -> None:
    outcome = predict(asked(intensity, policy).with_field("nodes.density", density))
    assert outcome.ttft.coverage["0.8"] == pytest.approx(coverage, abs=6e-4)
    if (policy, intensity) == ("load_aware", 4.0):
        assert outcome.tiers["deep"].utilisation == pytest.approx(0.819, abs=6e-4)
        assert outcome.tiers["deep"].concurrency == 9


def test_an_outcome_is_whole() -> None:
    outcome = predict(asked(3.0))
    assert outcome.kind == "predicted" and outcome.clock == "none"
    assert outcome.feasible and outcome.converged and outcome.reason is None
    for row in outcome.association.values():
        assert sum(row.values()) == pytest.approx(1.0, abs=1e-10)
    assert outcome.curve is not None
    probability = np.array(outcome.curve.probability)
    assert len(probability) == 200 and (np.diff(probability) >= -1e-12).all()
    assert probability[-1] == pytest.approx(0.998, abs=1e-9)
    assert outcome.ttft.upper_bound is not None
    assert outcome.ttft.upper_bound["0.8"] >= outcome.ttft.coverage["0.8"]
    waits = outcome.extra["convergence"]["mean_wait"]["deep"]
    assert waits[0] == 0.0 and waits[-1] == pytest.approx(outcome.tiers["deep"].mean_wait, rel=1e-4)
    again = Outcome.from_json(outcome.to_json())
    assert again == outcome


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("intensity", [1e-6, 4.0, 18.0, 1e4])
def test_no_figure_is_ever_nan(policy: str, intensity: float) -> None:
    outcome = predict(asked(intensity, policy))
    for path, value in flatten(outcome.model_dump()):
        assert not (isinstance(value, float) and np.isnan(value)), path
    text = outcome.to_json()
    assert b"NaN" not in text
    if intensity == 1e4:
        assert not outcome.feasible and outcome.reason
        assert outcome.ttft.mean == np.inf
        assert outcome.ttft.coverage["0.8"] == 0.0
        assert b'"mean":"inf"' in text
        assert all(t.mean_wait == np.inf for t in outcome.tiers.values())


def test_an_overloaded_tier_adds_nothing_under_an_unaware_policy() -> None:
    outcome = predict(asked(5.0, "prefix_only"))
    assert not outcome.feasible
    assert outcome.tiers["deep"].mean_wait == np.inf
    assert outcome.tiers["deep"].wait_probability == 1.0
    assert np.isfinite(outcome.tiers["shallow"].mean_wait)
    assert outcome.ttft.mean == np.inf
    assert 0 < outcome.ttft.coverage["0.8"] < 0.3
    assert outcome.ttft.quantiles["0.99"] == np.inf


def test_a_load_aware_scenario_without_a_stable_point_serves_nobody() -> None:
    outcome = predict(asked(25.0))
    assert not outcome.feasible and outcome.converged
    assert set(outcome.ttft.coverage.values()) == {0.0}
    assert set(outcome.ttft.quantiles.values()) == {np.inf}
    assert outcome.capacity_margin > 0 and "no stable operating point" in str(outcome.reason)


def test_one_profile_and_one_type() -> None:
    scenario = Scenario.from_dict(
        {
            "name": "one",
            "radio": {"model": "power_law", "xi": 0.05, "alpha": 2.0},
            "nodes": {"density": 1.0},
            "demand": {"intensity": 3.0},
            "prefill": {"linear": 2e-4},
            "memory": {"capacity": 5e8, "per_sequence": 5e8, "per_token": 131072},
            "requests": [
                {"name": "chat", "probability": 1.0, "tokens": 500, "decode_occupancy": 0.1}
            ],
            "profiles": [
                {"name": "only", "fraction": 1.0, "persistent_bytes": 0, "reusable": {"chat": 0}}
            ],
            "targets": {"coverage_at": [0.3], "quantiles": [0.5]},
        }
    )
    outcome = predict(scenario)
    tier = outcome.tiers["only"]
    # M/M/1 with ρ = 3·0.2; α = 2 makes the radio delay exponential with mean ξ/(π λ).
    assert tier.concurrency == 1 and tier.utilisation == pytest.approx(0.6)
    assert tier.wait_probability == pytest.approx(0.6)
    assert tier.mean_wait == pytest.approx(0.6 * 0.2 / 0.4)
    assert outcome.ttft.mean == pytest.approx(0.1 + 0.3 + 0.05 / np.pi)
    radio, queue = np.pi / 0.05, 2.0
    left = 0.3 - 0.1
    both = (
        1
        - np.exp(-radio * left)
        - 0.6 * radio / (radio - queue) * (np.exp(-queue * left) - np.exp(-radio * left))
    )
    assert outcome.ttft.coverage["0.3"] == pytest.approx(both, abs=1e-11)


def test_a_full_hit_takes_no_prefill_and_no_server() -> None:
    data = asked(3.0).to_dict()
    data["profiles"][2]["reusable"] = {"short": 1024, "medium": 2048, "long": 4096}
    for request in data["requests"]:
        request["decode_occupancy"] = 0.0
    outcome = predict(Scenario.from_dict(data))
    assert outcome.tiers["deep"].utilisation == 0.0
    assert outcome.tiers["deep"].service_rate == np.inf
    assert outcome.tiers["deep"].mean_wait == 0.0


def test_other_delay_models_may_be_asked_for() -> None:
    scenario = asked(3.0)
    exact = predict(scenario)
    varied = predict(scenario, delay_model="mgc:exponential_by_type")
    assert varied.delay_model == "mgc:exponential_by_type"
    # A mixture of exponentials varies a little more than one exponential of its mean.
    assert varied.ttft.coverage["0.8"] == pytest.approx(exact.ttft.coverage["0.8"], abs=2e-3)
    steady = predict(scenario, delay_model="mgc:deterministic")
    assert steady.tiers["deep"].mean_wait < exact.tiers["deep"].mean_wait
    with pytest.raises(ScenarioError, match="delay_model"):
        predict(scenario, delay_model="oracle")


def test_damping_and_warm_start_change_no_figure() -> None:
    base = predict(asked(4.0))
    for damping in (0.05, 1.0):
        other = predict(asked(4.0).with_field("solver.damping", damping))
        assert other.ttft.mean == pytest.approx(base.ttft.mean, rel=1e-9)
    neighbour = locate(asked(4.2)).point
    assert locate(asked(4.0), start=neighbour).mean == pytest.approx(base.ttft.mean, rel=1e-9)


def test_presets_are_named() -> None:
    assert "paper-baseline" in preset_names()
    with pytest.raises(ScenarioError, match=r"'nope' is not one of .*paper-baseline"):
        preset("nope")


def test_permuting_profiles_and_types_permutes_the_outcome() -> None:
    data = asked(6.0).to_dict()
    data["profiles"].reverse()
    data["requests"].reverse()
    other, base = predict(Scenario.from_dict(data)), predict(asked(6.0))
    assert other.ttft.coverage["0.8"] == pytest.approx(base.ttft.coverage["0.8"], abs=1e-9)
    for q, row in base.association.items():
        assert other.association[q] == pytest.approx(row, abs=1e-8)


def test_scaling_space_changes_only_distances() -> None:
    """λ_b·k², λ_req·k² and ξ·k^α leave every time as it was (Theory C5)."""
    k = 3.0
    base = predict(asked(4.0))
    alpha = BASELINE.radio.alpha  # type: ignore[union-attr]
    scaled = predict(
        asked(4.0 * k**2).with_field("nodes.density", k**2).with_field("radio.xi", 0.16 * k**alpha)
    )
    assert scaled.ttft.mean == pytest.approx(base.ttft.mean, rel=1e-9)
    assert scaled.ttft.coverage["0.8"] == pytest.approx(base.ttft.coverage["0.8"], abs=1e-10)
    assert scaled.mean_distance == pytest.approx(base.mean_distance / k, rel=1e-9)


def test_a_tier_load_carries_what_better_models_need() -> None:
    system = System.from_scenario(asked(3.0))
    load = replace(system, token_budget=2048).tier_load(np.full((3, 3), 1 / 3), 2)
    assert load.profile == "deep" and load.types == ("short", "medium", "long")
    assert load.new_tokens == pytest.approx([640, 768, 1408])
    assert load.cached_tokens == pytest.approx([384, 1280, 2688])
    assert load.token_budget == 2048 and load.step_time is None
    assert load.scaled(2.0).arrival_rate == pytest.approx(2 * load.arrival_rate)


@pytest.mark.parametrize("alpha", [1.05, 3.5, 4.0, 6.0])
def test_splitting_profiles_in_equal_copies_changes_no_figure(alpha: float) -> None:
    whole = asked(6.0).with_field("radio.alpha", alpha)
    data = whole.to_dict()
    for index in (0, 2):
        part = dict(data["profiles"][index])
        share = part["fraction"]
        data["profiles"][index]["fraction"] = 0.3 * share
        data["profiles"].append({**part, "name": part["name"] + "-copy", "fraction": 0.7 * share})
    base, split = predict(whole), predict(Scenario.from_dict(data))
    assert split.converged
    for path in ("ttft.mean", "ttft.coverage.0.8", "mean_distance", "offloading_ratio"):
        assert split.figure(path) == pytest.approx(base.figure(path), rel=1e-9)
    assert split.tiers["deep"].utilisation == pytest.approx(base.tiers["deep"].utilisation)
    assert split.tiers["deep-copy"].utilisation == pytest.approx(base.tiers["deep"].utilisation)
