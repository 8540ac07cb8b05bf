"""Operating point: the fixed point of waits and association (Theory B1-B4, D)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.errors import ScenarioError
from testbed.presets import preset
from testbed.radio import PowerLaw
from testbed.routing.policies import get_policy
from testbed.scenario import Scenario
from testbed.theory.delay.base import DelayModel, TierLoad
from testbed.theory.delay.erlang_c import ErlangC, ExponentialWait
from testbed.theory.delay.mgc import MGc
from testbed.theory.delay.service import ServiceVariability
from testbed.theory.geometry import associate
from testbed.theory.operating_point import OperatingPoint, damped, solve
from testbed.theory.system import System

LOAD_AWARE = get_policy("load_aware")
BASELINE = System.from_scenario(preset("paper-baseline"))
MODEST = settings(max_examples=25, deadline=None)
FEW = settings(max_examples=15, deadline=None)


def at(intensity: float) -> System:
    return replace(BASELINE, intensity=intensity)


class Plain(DelayModel):
    """Erlang-C that the solver does not recognise, so that it takes the general way."""

    name = "plain"

    def __init__(self) -> None:
        self.inner = ErlangC()

    def excess(self, load: TierLoad) -> ExponentialWait:
        return self.inner.excess(load)


def consistency(system: System, model: DelayModel, point: OperatingPoint) -> float:
    """Largest |W̄ − Q(A(W̄))| relative to the wait or a microsecond's worth of prefill."""
    association = associate(system, system.residual + point.advertised)
    worst = 0.0
    for s in range(system.shape[1]):
        mean = model.mean(system.tier_load(association, s))
        scale = np.maximum(mean, 1e-6 * system.residual.mean())
        worst = max(worst, float(np.abs((mean - point.advertised[:, s]) / scale).max()))
    return worst


@pytest.mark.parametrize("intensity", [0.5, 1.0, 2.0, 3.0, 4.0])
def test_newton_finds_the_point_where_damping_settles(intensity: float) -> None:
    model = ErlangC()
    slow = damped(at(intensity), LOAD_AWARE, model, max_iterations=500)
    fast = solve(at(intensity), LOAD_AWARE, model)
    assert slow.converged and fast.converged
    assert fast.association == pytest.approx(slow.association, abs=1e-9)
    assert fast.wait == pytest.approx(slow.wait, rel=1e-6, abs=1e-12)
    assert fast.iterations <= slow.iterations


@pytest.mark.parametrize("intensity", [5.0, 6.0, 10.0, 15.0, 16.0, 17.0])
def test_newton_settles_where_damping_cycles(intensity: float) -> None:
    model = ErlangC()
    point = solve(at(intensity), LOAD_AWARE, model)
    assert point.converged and point.feasible
    assert consistency(at(intensity), model, point) < 1e-7
    assert not damped(at(intensity), LOAD_AWARE, model, max_iterations=100).converged


@pytest.mark.parametrize("intensity", [1.0, 4.0, 6.0, 16.0, 18.0, 30.0])
def test_the_general_way_finds_the_same_point(intensity: float) -> None:
    compiled = solve(at(intensity), LOAD_AWARE, ErlangC())
    general = solve(at(intensity), LOAD_AWARE, Plain())
    assert general.converged
    assert general.association == pytest.approx(compiled.association, abs=1e-7)
    assert general.feasible == compiled.feasible


@pytest.mark.parametrize("intensity", [1.0, 4.0, 8.0, 15.0])
def test_other_delay_models_are_consistent_too(intensity: float) -> None:
    model = MGc(ServiceVariability())
    point = solve(at(intensity), LOAD_AWARE, model)
    assert point.converged and point.feasible
    assert consistency(at(intensity), model, point) < 1e-7


@pytest.mark.parametrize("policy", ["nearest", "prefix_only", "load_aware"])
def test_what_arrives_is_served(policy: str) -> None:
    system = at(3.0)
    point = solve(system, get_policy(policy), ErlangC())
    rates = np.array([load.arrival_rate for load in point.loads])
    assert rates @ system.density == pytest.approx(3.0, rel=1e-12)
    for s, load in enumerate(point.loads):
        assert load.weights.sum() == pytest.approx(1.0)
        assert load.mean_service == pytest.approx(load.weights @ system.occupancy[:, s])
        assert point.utilisation[s] == pytest.approx(
            load.arrival_rate * load.mean_service / load.concurrency
        )


def test_a_warm_start_leads_to_the_same_point() -> None:
    cold = solve(at(4.0), LOAD_AWARE, ErlangC())
    for start in (solve(at(3.9), LOAD_AWARE, ErlangC()), solve(at(30.0), LOAD_AWARE, ErlangC())):
        warm = solve(at(4.0), LOAD_AWARE, ErlangC(), start=start)
        assert warm.converged
        assert warm.wait == pytest.approx(cold.wait, rel=1e-7, abs=1e-12)
    near = solve(at(3.999), LOAD_AWARE, ErlangC())
    assert solve(at(4.0), LOAD_AWARE, ErlangC(), start=near).iterations < cold.iterations


def test_the_history_begins_at_zero_and_ends_at_the_answer() -> None:
    point = damped(at(3.0), LOAD_AWARE, ErlangC())
    assert (point.history[0] == 0).all()
    assert point.history[-1] == pytest.approx(point.wait.mean(axis=0), rel=1e-8)
    assert len(point.history) == point.iterations
    # The deep tier draws the long requests and develops the largest delay (Fig. 6).
    assert point.history[-1].argmax() == 2


def test_too_few_iterations_are_said() -> None:
    point = solve(at(15.0), LOAD_AWARE, ErlangC(), max_iterations=2)
    assert not point.converged
    assert point.iterations == 2
    # The search began at waits of 0.
    assert "a node of deep advertises a mean wait of" in str(point.unsettled)
    assert solve(at(15.0), LOAD_AWARE, ErlangC()).unsettled is None


def test_an_overload_names_the_tier_and_by_how_much() -> None:
    point = solve(at(4.0), get_policy("prefix_only"), ErlangC())
    assert not point.feasible and not point.lost
    assert point.reason is not None
    assert point.reason.startswith("deep has utilisation 1.162: 12.71 requests/s per node where")
    assert np.isinf(point.wait[:, 2]).all()
    assert np.isfinite(point.wait[:, :2]).all()
    lost = solve(at(30.0), LOAD_AWARE, ErlangC())
    assert lost.converged and not lost.feasible and lost.lost
    assert lost.reason is not None
    assert lost.reason.startswith("no stable operating point: deep has utilisation")
    assert "no routing can help: the least demand is 23.78 busy servers" in lost.reason
    assert (lost.utilisation > 1).all()
    # A capacity that is enough on paper but not where the requests go: no D2 sentence.
    tight = solve(at(18.0), LOAD_AWARE, ErlangC())
    assert not tight.feasible and at(18.0).capacity_margin > 0
    assert tight.reason is not None and "no routing" not in tight.reason


def test_the_capacity_margin_is_the_necessary_condition() -> None:
    system = at(3.0)
    demand = 3.0 * system.probability @ system.occupancy.min(axis=1)
    assert system.least_demand == pytest.approx(demand)
    assert system.capacity == pytest.approx(0.4 * 24 + 0.4 * 22 + 0.2 * 9)
    assert system.capacity_margin == pytest.approx(1 - demand / system.capacity)
    only = replace(system, fraction=np.array([1.0, 0.0, 0.0]))
    assert only.least_demand == pytest.approx(3.0 * system.probability @ system.occupancy[:, 0])


def test_a_profile_without_nodes_changes_nothing() -> None:
    system = at(6.0)
    more = replace(
        system,
        names=(*system.names, "ghost"),
        reusable=np.column_stack([system.reusable, system.tokens]),
        residual=np.column_stack([system.residual, np.zeros(3)]),
        saving=np.column_stack([system.saving, system.residual[:, 0]]),
        occupancy=np.column_stack([system.occupancy, np.full(3, 0.1)]),
        fraction=np.append(system.fraction, 0.0),
        persistent=np.append(system.persistent, 0.0),
        concurrency=np.append(system.concurrency, 1),
    )
    point, plain = solve(more, LOAD_AWARE, ErlangC()), solve(system, LOAD_AWARE, ErlangC())
    assert point.association[:, :3] == pytest.approx(plain.association, abs=1e-9)
    assert (point.association[:, 3] == 0).all()
    assert point.loads[3].arrival_rate == 0 and np.isfinite(point.loads[3].service_rate)
    assert point.utilisation[3] == 0 and (point.wait[:, 3] == 0).all()


def test_two_equal_copies_of_a_profile_share_its_traffic() -> None:
    system = at(6.0)
    order = [0, 1, 2, 2]
    split = replace(
        system,
        names=("uncached", "shallow", "deep", "copy"),
        fraction=np.array([0.4, 0.4, 0.15, 0.05]),
        **{
            name: getattr(system, name)[..., order]
            for name in ("reusable", "residual", "saving", "occupancy", "persistent", "concurrency")
        },
    )
    point, plain = solve(split, LOAD_AWARE, ErlangC()), solve(system, LOAD_AWARE, ErlangC())
    assert point.converged
    assert point.association[:, 2:].sum(axis=1) == pytest.approx(plain.association[:, 2], abs=1e-7)
    assert point.utilisation[3] == pytest.approx(plain.utilisation[2], abs=1e-7)


def _scenario(**changes: object) -> Scenario:
    data = {
        "name": "edge",
        "radio": {"model": "power_law", "xi": 0.1, "alpha": 3.0},
        "nodes": {"density": 1.0},
        "demand": {"intensity": 3.0},
        "prefill": {"linear": 4e-4},
        "memory": {"capacity": 1e9, "per_sequence": 1e8, "per_token": 1e5},
        "requests": [{"name": "q", "probability": 1.0, "tokens": 1000, "decode_occupancy": 0.4}],
        "profiles": [
            {"name": "a", "fraction": 0.5, "persistent_bytes": 0, "reusable": {"q": 0}},
            {"name": "b", "fraction": 0.5, "persistent_bytes": 5e8, "reusable": {"q": 800}},
        ],
    }
    return Scenario.from_dict({**data, **changes})


@pytest.mark.parametrize("alpha", [1.001, 1.2, 2.0, 4.0, 8.0])
@pytest.mark.parametrize("xi", [1e-9, 1e-3, 1e4])
def test_any_radio_settles(alpha: float, xi: float) -> None:
    scenario = _scenario(radio={"model": "power_law", "xi": xi, "alpha": alpha})
    system = System.from_scenario(scenario)
    point = solve(system, LOAD_AWARE, ErlangC())
    assert point.converged and point.feasible
    assert point.association.sum(axis=1) == pytest.approx(1.0, abs=1e-10)
    if xi == 1e4:
        assert point.association[0] == pytest.approx([0.5, 0.5], abs=1e-2)


@pytest.mark.parametrize("alpha", [1.2, 2.0, 4.0, 8.0])
@pytest.mark.parametrize("xi", [1e-7, 1e-5, 1e-3])
def test_ties_at_short_radio_delays_settle(alpha: float, xi: float) -> None:
    """Two tiers whose costs tie for one of two types: who gets how much hangs on the radio."""
    tied = _scenario(
        radio={"model": "power_law", "xi": xi, "alpha": alpha},
        demand={"intensity": 6.0},
        requests=[
            {"name": "q", "probability": 0.7, "tokens": 1000, "decode_occupancy": 0.4},
            {"name": "r", "probability": 0.3, "tokens": 700, "decode_occupancy": 0.1},
        ],
        profiles=[
            {"name": "a", "fraction": 0.5, "persistent_bytes": 0, "reusable": {"q": 0, "r": 100}},
            {"name": "b", "fraction": 0.5, "persistent_bytes": 8e8, "reusable": {"q": 800, "r": 0}},
        ],
    )
    point = solve(System.from_scenario(tied), LOAD_AWARE, ErlangC())
    assert point.converged and point.feasible and point.unsettled is None
    # Both tiers serve both types or differ by more than radio delays do.
    gap = point.costs[:, 0] - point.costs[:, 1]
    shared = (point.association > 1e-6).all(axis=1)
    assert (np.abs(gap[shared]) < 1e3 * xi).all()


@pytest.mark.parametrize("capacity", [1e8, 1e9, 1e12, 1e13])
def test_any_concurrency_settles(capacity: float) -> None:
    """One server to 100,000, loaded to 90 % of what they can serve."""
    scenario = _scenario(
        memory={"capacity": capacity, "per_sequence": 1e8, "per_token": 1e5},
        profiles=[{"name": "a", "fraction": 1.0, "persistent_bytes": 0, "reusable": {"q": 0}}],
    )
    system = System.from_scenario(scenario)
    system = replace(system, intensity=0.9 * system.capacity / 0.8)
    point = solve(system, LOAD_AWARE, ErlangC())
    assert point.converged and point.feasible
    assert point.utilisation[0] == pytest.approx(0.9)
    c = int(system.concurrency[0])
    assert point.wait[0, 0] == pytest.approx(
        ErlangC().mean(system.tier_load(np.ones((1, 1)), 0))[0]
    )
    assert c == round(capacity / 1e8)


@st.composite
def systems(draw: st.DrawFn) -> System:
    types, tiers = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    residual = rng.uniform(0.02, 1.5, (types, tiers))
    system = replace(
        BASELINE,
        types=tuple(f"q{i}" for i in range(types)),
        names=tuple(f"s{i}" for i in range(tiers)),
        probability=rng.dirichlet(np.ones(types)),
        tokens=np.full(types, 4000.0),
        output_tokens=np.ones(types),
        reusable=np.zeros((types, tiers)),
        residual=residual,
        saving=1.6 - residual,
        occupancy=residual + rng.uniform(0.1, 1.0, (types, 1)),
        fraction=rng.dirichlet(np.ones(tiers)),
        persistent=np.zeros(tiers),
        concurrency=rng.integers(1, 40, tiers),
    )
    load = draw(st.floats(0.05, 1.3))
    return replace(system, intensity=load * system.capacity / (system.least_demand / 3.0))


@MODEST
@given(systems())
def test_a_point_that_is_called_stable_is_one(system: System) -> None:
    model = ErlangC()
    point = solve(system, LOAD_AWARE, model)
    assert point.association.sum(axis=1) == pytest.approx(1.0, abs=1e-10)
    assert not np.isnan(point.wait).any() and (point.wait >= 0).all()
    assert point.feasible == (point.utilisation < 1).all()
    if system.capacity_margin < 0:
        assert not point.feasible
    if point.feasible and point.converged:
        assert consistency(system, model, point) < 1e-5


def _same(one: OperatingPoint, other: OperatingPoint, unit: float = 1.0) -> None:
    """Equal operating points, the second in a time unit of ``unit``; unstable ones only alike."""
    assert one.feasible == other.feasible
    if one.feasible and one.converged and other.converged:
        assert other.association == pytest.approx(one.association, abs=1e-6)
        assert other.utilisation == pytest.approx(one.utilisation, abs=1e-6)
        floor = 1e-6 * float(one.costs.mean())
        assert other.wait / unit == pytest.approx(one.wait, rel=1e-4, abs=floor)


@FEW
@given(systems(), st.randoms(use_true_random=False))
def test_permuting_types_and_profiles_permutes_the_point(system: System, random) -> None:
    types, tiers = system.shape
    q, s = list(range(types)), list(range(tiers))
    random.shuffle(q)
    random.shuffle(s)
    moved = replace(
        system,
        probability=system.probability[q],
        fraction=system.fraction[s],
        concurrency=system.concurrency[s],
        **{
            name: getattr(system, name)[np.ix_(q, s)]
            for name in ("reusable", "residual", "saving", "occupancy")
        },
    )
    one, other = (solve(x, LOAD_AWARE, ErlangC()) for x in (system, moved))
    back = replace(
        other,
        association=other.association[np.ix_(np.argsort(q), np.argsort(s))],
        utilisation=other.utilisation[np.argsort(s)],
        wait=other.wait[np.ix_(np.argsort(q), np.argsort(s))],
    )
    _same(one, back)


@FEW
@given(systems(), st.floats(0.2, 5.0), st.floats(0.01, 100.0))
def test_no_unit_of_length_or_time_matters(system: System, k: float, unit: float) -> None:
    """Densities per area times k² with ξ·k^α, and every time in another unit."""
    radio = system.radio
    assert isinstance(radio, PowerLaw)
    moved = replace(
        system,
        node_density=system.node_density * k**2,
        intensity=system.intensity * k**2 / unit,
        radio=PowerLaw(radio.xi * k**radio.alpha * unit, radio.alpha),
        residual=system.residual * unit,
        saving=system.saving * unit,
        occupancy=system.occupancy * unit,
    )
    _same(*(solve(x, LOAD_AWARE, ErlangC()) for x in (system, moved)), unit)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ScenarioError, match="'psychic' is not one of"):
        get_policy("psychic")
