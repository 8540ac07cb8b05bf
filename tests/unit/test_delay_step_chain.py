"""Step chain, token server and birth-death: laws, limits, and the step-exact engine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.errors import ScenarioError
from testbed.simulation.engine_model import EngineConfig, simulate_engine
from testbed.step_time import StepTime
from testbed.theory.delay import step_chain_forward as forward
from testbed.theory.delay.base import TierLoad, get_delay_model
from testbed.theory.delay.birth_death import BirthDeath
from testbed.theory.delay.search_model import search_model
from testbed.theory.delay.step_chain import StepChain
from testbed.theory.delay.step_chain_batch import two_points
from testbed.theory.delay.step_chain_mix import MixedStepChain, surrounding
from testbed.theory.delay.step_chain_node import Chain
from testbed.theory.delay.step_chain_slots import SequenceSlots
from testbed.theory.delay.step_chain_stationary import solve
from testbed.theory.delay.token_server import TokenServer
from testbed.theory.fitted import Remembered
from testbed.theory.predict import pose, settle
from tests.unit.scenarios import small

STEP = StepTime(
    c_pre=3.7e-3, p=1e-3, c_both=1e-3, a=39.5e-6, b=30e-9, d=62e-9, c_dec=2.7e-3, e=1.1e-4, f=2.6e-7
)


def node(rate=5.0, weights=(1.0,), new=(512.0,), cached=(0.0,), outputs=(6.0,), slots=4, **more):
    w, n, h, o = map(np.array, (weights, new, cached, outputs))
    prefill = np.array([STEP.prefill_seconds(*pair) for pair in zip(n, h, strict=True)])
    load = TierLoad(
        rate, w, prefill, n, h, prefill + 0.003 * o, o, slots, step_time=STEP, token_budget=2048
    )
    return replace(load, **more)


MIXED = {
    "weights": (0.5, 0.3, 0.2),
    "new": (100.0, 900.0, 2500.0),
    "cached": (900.0, 0.0, 64.0),
    "outputs": (4.0, 1.0, 9.0),
}


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 7), st.integers(1, 4), st.floats(0.05, 1.0))
def test_slots_move_with_probability_one_and_never_up(slots, stages, advance):
    chain = SequenceSlots.of(slots, stages, advance)
    for v, (a, b) in enumerate(zip(chain.start[:-1], chain.start[1:], strict=True)):
        assert chain.probability[a:b].sum() == pytest.approx(1.0, abs=1e-12)
        assert (chain.target[a:b] <= v).all()
        mean = chain.probability[a:b] @ chain.occupied[chain.target[a:b]]
        if stages == 1:
            assert mean == pytest.approx(chain.occupied[v] * (1 - advance), abs=1e-4)


@settings(max_examples=50, deadline=None)
@given(st.floats(0.1, 10), st.floats(0.01, 10), st.floats(-5, 5))
def test_two_points_meet_three_moments(mean, deviation, skewness):
    a, b, p = two_points(mean, deviation**2, skewness * deviation**3)
    at, weight = np.array([a, b]), np.array([p, 1 - p])
    assert weight @ at == pytest.approx(mean)
    assert weight @ (at - mean) ** 2 == pytest.approx(deviation**2)
    third = weight @ (at - mean) ** 3
    assert third == pytest.approx(skewness * deviation**3, abs=1e-8 * (1 + deviation**3))


@pytest.mark.parametrize("kind", [{}, MIXED], ids=["one type", "cut prompts"])
def test_the_chain_conserves_mass_time_and_requests(kind):
    chain = Chain.of(node(**kind), 0.0)
    for rho in (0.3, 0.8):
        rate = rho * chain.capacity
        found = solve(chain, rate)
        assert found.law.sum() == pytest.approx(1.0, abs=1e-9)
        assert found.law.min() >= 0
        # Every request is completed once: completions per step are arrivals per step.
        present = forward.by_occupied(found.law, chain.slots.occupied, chain.count)
        present[0, 0, 1] += present[0, 0, 0]
        present[0, 0, 0] = 0.0
        done = 0.0
        for n in range(chain.count + 1):
            for f in range(present.shape[1]):
                for q, mass in enumerate(present[n, f]):
                    done += mass * chain.batch.fits[n, f, 1 : min(q, chain.count - n) + 1].sum()
        # What decodes differ from the mean by comes with prefills, and leaves the mean as it is
        # but for the load: batches of an engine that is never without work are larger.
        assert done == pytest.approx(rate * sum(found.cycle), rel=2e-5 + 2e-3 * abs(chain.drag))
        # Slots are held for a step each token: Little's law for those that decode.
        outputs = float(chain.mix.weights @ node(**kind).output_tokens)
        steps = 1.0 - present[0, 0, 0]
        assert steps == pytest.approx(1.0)
        decoding = present.sum(axis=(1, 2)) @ np.arange(chain.count + 1)
        assert decoding == pytest.approx(done * (outputs - 1.0), rel=2e-3)


@pytest.mark.parametrize("kind", [{}, MIXED], ids=["one type", "cut prompts"])
def test_little_gives_the_mean_time_to_first_token(kind):
    chain = Chain.of(node(**kind), 0.0)
    rate = 0.7 * chain.capacity
    found = solve(chain, rate)
    waiting = 0.0
    batch = chain.batch
    present = forward.by_occupied(found.law, chain.slots.occupied, chain.count)
    present[0, 0, 1] += present[0, 0, 0]
    present[0, 0, 0] = 0.0
    for n in range(chain.count + 1):
        free = chain.count - n
        for f in range(present.shape[1]):
            for q, mass in enumerate(present[n, f]):
                j = min(q, free)
                parts = [(batch.fits[n, f, j], batch.whole[n, f, j], batch.share[n, f, j])]
                for i in range(j):
                    p = batch.fits[n, f, i] - batch.fits[n, f, i + 1]
                    parts.append((p, np.full(2, batch.cut[n, f, i]), 1.0))
                for p, seconds, share in parts:
                    for t, s in zip(seconds, (share, 1.0 - share), strict=True):
                        waiting += mass * p * s * (q * t + 0.5 * rate * t * t)
    mean = float(chain.mix.weights @ (found.moments[0] + chain.alone))
    # What is left of a cut prompt is known by class only, and the tagged one's by that of all.
    assert waiting / sum(found.cycle) == pytest.approx(rate * mean, rel=1e-3 if not kind else 0.03)


def test_few_requests_find_the_engine_idle():
    model = StepChain()
    load = node(**MIXED)
    few = model.excess(replace(load, arrival_rate=1e-4 * model.curve(load).chain.capacity))
    assert few.wait_probability < 1e-3
    assert (few.mean < 1e-3 * load.residual_prefill).all()
    assert few.cdf(0, np.array([-1.0, 0.0])).tolist() == [0.0, 1.0 - few.wait_probability]


@pytest.mark.parametrize("model", [StepChain(), TokenServer(), BirthDeath()], ids=lambda m: m.name)
def test_delays_rise_with_the_rate_and_their_law_has_their_mean(model):
    load = node(weights=(0.6, 0.4), new=(300.0, 800.0), cached=(64.0, 0.0), outputs=(6.0, 6.0))
    capacity = load.arrival_rate / model.utilisation(load)
    rho = np.array([0.05, 0.21, 0.4, 0.62, 0.63, 0.8, 0.9, 0.93, 0.97, 0.999, 0.99999])
    means = np.array([model.mean(replace(load, arrival_rate=r * capacity)) for r in rho])
    assert (np.diff(means, axis=0) > 0).all()
    last = (1 - rho[-1]) * means[-1]
    assert last == pytest.approx((1 - rho[-2]) * means[-2], rel=0.01)
    for r in (0.3, 0.8, 0.98):
        law = model.excess(replace(load, arrival_rate=r * capacity))
        for q in range(2):
            grid = np.linspace(0.0, 30.0 * law.mean[q] / law.wait_probability, 8001)
            survival = 1.0 - law.cdf(q, grid)
            assert survival[0] <= law.wait_probability + 1e-6
            assert (np.diff(survival) < 1e-4).all()
            assert np.trapezoid(survival, grid) == pytest.approx(law.mean[q], rel=0.01)
            late = law.quantile(q, 0.999)
            assert law.cdf(q, np.array(late)) == pytest.approx(0.999, abs=1e-6)


def test_interpolated_means_are_those_of_the_chain():
    model = StepChain()
    load = node()
    capacity = model.curve(load).chain.capacity
    for rho in (0.15, 0.55, 0.85, 0.94):
        at = replace(load, arrival_rate=rho * capacity)
        assert model.mean(at) == pytest.approx(model.excess(at).mean, rel=0.01)


def test_a_queue_cut_shorter_changes_little():
    chain = Chain.of(node(), 0.0)
    rough, fine = (solve(chain, 0.8 * chain.capacity, tail=t) for t in (1e-5, 1e-9))
    assert rough.tail < 1e-5 and fine.tail < 1e-9
    assert rough.moments[0] == pytest.approx(fine.moments[0], rel=2e-3)


CASES = {
    "slots": (node(outputs=(6.0,)), 0.0),
    "prefill only": (
        node(weights=(0.5, 0.5), new=(200.0, 1500.0), cached=(0.0, 0.0), outputs=(1.0, 1.0),
             slots=16), 0.0,
    ),
    "hits": (
        node(weights=(0.5, 0.5), new=(128.0, 1024.0), cached=(896.0, 0.0), outputs=(9.0, 9.0),
             slots=8), 0.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_it_agrees_with_the_step_exact_engine(case):
    """Within 5 % and four standard errors; the model never sees the engine's waits."""
    load, scv = CASES[case]
    chain = Chain.of(load, scv)
    rng = np.random.default_rng(11)
    count = 60_000
    rate = 0.6 * chain.capacity
    q = rng.choice(len(load.weights), size=count, p=load.weights)
    trace = simulate_engine(
        EngineConfig(token_budget=2048, max_sequences=load.concurrency),
        STEP,
        np.cumsum(rng.exponential(size=count)) / rate,
        (load.new_tokens + load.cached_tokens)[q].astype(int),
        load.output_tokens[q].astype(int),
        reusable_tokens=load.cached_tokens[q].astype(int),
    )
    means = trace.ttft[1000:][: (count - 1000) // 1000 * 1000].reshape(-1, 1000).mean(axis=1)
    error = means.std(ddof=1) / np.sqrt(len(means))
    mean = float(load.weights @ (solve(chain, rate).moments[0] + chain.alone))
    assert abs(mean - means.mean()) < 0.05 * mean + 4 * error


def test_an_engine_without_calibration_is_named():
    for name in ("step_chain", "token_server", "birth_death"):
        with pytest.raises(ScenarioError, match=r"needs the engine's step time"):
            get_delay_model(name).mean(node(step_time=None))
    with pytest.raises(ScenarioError, match="an SCV"):
        get_delay_model("step_chain:often")
    with pytest.raises(ScenarioError, match="no argument"):
        get_delay_model("token_server:1")


def simulated_mean(load, count=20_000, **config):
    rng = np.random.default_rng(5)
    q = rng.choice(load.weights.size, size=count, p=load.weights)
    arrival = np.cumsum(rng.exponential(size=count)) / load.arrival_rate
    trace = simulate_engine(
        EngineConfig(max_sequences=load.concurrency, **config), STEP, arrival,
        (load.new_tokens + load.cached_tokens)[q].astype(int), load.output_tokens[q].astype(int),
        reusable_tokens=load.cached_tokens[q].astype(int),
    )  # fmt: skip
    return float(trace.ttft.mean())


def test_an_engine_that_schedules_ahead_keeps_requests_for_a_step_more():
    load = node(12.0, outputs=(12.0,), slots=6)
    ahead = replace(load, lookahead=True)
    model = StepChain()
    plain, later = (float((x.residual_prefill + model.mean(x)) @ x.weights) for x in (load, ahead))
    seen = [simulated_mean(load), simulated_mean(load, async_scheduling=True)]
    assert seen[1] > 1.02 * seen[0]
    assert plain == pytest.approx(seen[0], rel=0.05)
    assert later == pytest.approx(seen[1], rel=0.05)


def test_where_nobody_decodes_there_is_no_step_to_schedule_ahead():
    load = node(12.0, outputs=(1.0,))
    model = StepChain()
    assert model.mean(replace(load, lookahead=True)) == pytest.approx(model.mean(load))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.0, 1.0), min_size=2, max_size=5), st.integers(1, 6))
def test_a_mix_lies_between_mixes_of_the_grid(parts, cells):
    total = sum(parts)
    weights = np.array(parts) / total if total > 1e-6 else np.full(len(parts), 1 / len(parts))
    corners, shares = surrounding(weights, cells)
    assert shares.sum() == pytest.approx(1.0)
    assert (shares > -1e-9).all() and (corners >= -1e-9).all()
    assert shares @ corners == pytest.approx(weights, abs=1e-9)
    assert np.abs(corners * cells - np.rint(corners * cells)).max() < 1e-9


def test_the_mixed_chain_is_the_chain_on_its_grid_and_close_to_it_between():
    model, exact = MixedStepChain(), StepChain()
    for weight, tolerance in ((0.5, 1e-9), (0.6, 0.01)):
        load = node(
            14.0, weights=(weight, 1 - weight), new=(128.0, 900.0), cached=(512.0, 0.0),
            outputs=(4.0, 4.0),
        )  # fmt: skip
        assert model.mean(load) == pytest.approx(exact.mean(load), rel=tolerance)
        assert model.utilisation(load) == pytest.approx(exact.utilisation(load), rel=tolerance)


def test_the_fixed_point_asks_a_chain_between_mixes_and_answers_with_the_chain():
    asked = small().with_field("memory.per_sequence", 130 * 32 * 2048)
    system, policy, model = pose(asked, delay_model="step_chain", step_time=STEP)
    point = settle(asked, system, policy, model)
    assert point.converged and search_model(model) is search_model(model)
    for s, load in enumerate(point.loads):
        assert point.wait[:, s] == pytest.approx(StepChain().mean(load))
        assert point.advertised[:, s] == pytest.approx(point.wait[:, s], rel=0.05)
    # The same search by the chain itself, a new one at every mix.
    exact = settle(asked, system, policy, Remembered(model))
    assert point.association == pytest.approx(exact.association, abs=0.01)
