"""SINR radio: fading, interference and transfers against direct simulation; theory under it."""

import numpy as np
import pytest
from scipy.integrate import quad

from testbed.errors import ScenarioError
from testbed.presets import preset
from testbed.radio import nearest_distances, radio_model
from testbed.radio.sinr import Link
from testbed.routing.policies import get_policy
from testbed.scenario import Scenario, SinrRadio
from testbed.theory.delay import get_delay_model
from testbed.theory.latency import Latency
from testbed.theory.operating_point import solve
from testbed.theory.predict import locate
from testbed.theory.system import System
from tests.unit.plane import choose
from tests.unit.significance import within

SPEC = SinrRadio(model="sinr", bandwidth=2e6, payload=2e5, path_loss_exponent=4.0, snr_at_1km=10.0)
DENSITY = 1.0


@pytest.fixture(scope="module")
def radio():
    return radio_model(SPEC, DENSITY)


def blocks(link, distance, count, rng, reach=6.0):
    """Spectral efficiencies of blocks by drawing fading and interferers, (count,)."""
    nodes = rng.poisson(link.density * np.pi * reach**2, count)
    block = np.repeat(np.arange(count), nodes)
    r = reach * np.sqrt(rng.random(len(block)))
    power = link.snr * rng.exponential(size=len(block)) * r**-link.exponent
    interference = np.bincount(block, power, minlength=count)
    signal = link.snr * rng.exponential(size=count) * distance**-link.exponent
    return np.minimum(np.log2(1.0 + signal / (1.0 + interference)), link.cap)


@pytest.mark.parametrize("distance", [0.1, 0.4, 1.0])
def test_law_of_a_block_against_drawn_fading_and_interferers(radio, distance):
    drawn = blocks(radio.link, distance, 20_000, np.random.default_rng(1))
    at = np.array([0.01, 0.1, 0.5, 1.0, 3.0, 7.9])
    p = radio.link.exceeds(distance, at)
    # Interferers beyond the drawn window add S·π·λ·6^-2 = 0.9 to a noise of 1 and more.
    within((drawn[:, None] >= at).mean(axis=0), p, np.sqrt(p * (1 - p) / len(drawn)), slack=4e-3)


@pytest.mark.parametrize("distance", [0.02, 0.5, 3.0, 30.0])
def test_moments_of_a_block_are_the_integrals_of_its_law(radio, distance):
    link = radio.link
    mean, variance = link.moments(distance)
    # In ln z, so that an adaptive rule sees the power law near 0.
    first, _ = quad(lambda u: np.exp(u) * link.exceeds(distance, np.exp(u)), -60, np.log(8.0))
    second, _ = quad(
        lambda u: 2 * np.exp(2 * u) * link.exceeds(distance, np.exp(u)), -60, np.log(8.0)
    )
    assert mean == pytest.approx(first, rel=1e-5)
    assert variance == pytest.approx(second - first**2, rel=1e-4)


def test_no_interference_leaves_rayleigh_fading():
    link = Link(exponent=3.0, snr=5.0, density=0.0, cap=8.0)
    e = np.array([0.5, 2.0])
    np.testing.assert_allclose(link.exceeds(0.7, e), np.exp(-(2.0**e - 1) * 0.7**3 / 5.0))


@pytest.mark.parametrize("distance", [0.05, 0.3, 1.0])
def test_transfers_against_block_by_block_simulation(radio, distance):
    rng = np.random.default_rng(2)
    mean, _ = radio.link.moments(distance)
    many = int(1.6 * radio.need / mean) + 30
    pool = blocks(radio.link, distance, 20_000, rng)
    carried = rng.choice(pool, (1_500, many))
    total = np.cumsum(carried, axis=1)
    last = np.argmax(total >= radio.need, axis=1)
    row = np.arange(len(total))
    assert (total[:, -1] >= radio.need).all()
    left = radio.need - (total[row, last] - carried[row, last])
    seconds = radio.coherence * (last + left / carried[row, last])
    # All transfers draw from one pool of blocks, whose own mean is a little off.
    pooled = pool.std() / pool.mean() / np.sqrt(len(pool))
    spread = seconds.std() / np.sqrt(len(seconds)) + seconds.mean() * (pooled + 0.002)
    within(seconds.mean(), radio.delay(np.array(distance)), spread)
    level = np.array([0.1, 0.5, 0.9])
    at = radio.quantile(np.array(distance), level)
    below = (seconds[:, None] <= at * (1 + 1e-9)).mean(axis=0)
    atom = seconds.min() * (1 + 1e-6) >= at
    noise = np.sqrt(level * (1 - level) / len(seconds))
    shift = 4 * pooled * 0.4 * seconds.mean() / seconds.std()
    within(below[~atom], level[~atom], noise[~atom], slack=0.01 + shift)


def test_delay_grows_with_distance_and_distance_inverts_it(radio):
    r = np.geomspace(1e-3, 1e3, 60)
    delay = radio.delay(r)
    assert (np.diff(delay) > 0).all()
    np.testing.assert_allclose(radio.distance(delay)[10:], r[10:], rtol=1e-9)
    assert radio.distance(np.array([-1.0, 0.0, radio.floor])).tolist() == [0, 0, 0]
    assert radio.delay(np.array(0.0)) == radio.floor
    assert np.isinf(radio.delay(np.array(np.inf)))


def test_drawn_delays_have_the_mean_that_policies_see(radio):
    rng = np.random.default_rng(3)
    for distance in (0.05, 0.5, 2.0):
        drawn = radio.sample(np.full(40_000, distance), rng)
        error = drawn.std() / np.sqrt(len(drawn))
        mean = float(radio.delay(np.array(distance)))
        within(drawn.mean(), mean, error, slack=0.004 * mean)


def test_interference_costs_time():
    plain = radio_model(SPEC.model_copy(update={"interference": False}))
    sparse = radio_model(SPEC, 0.2)
    dense = radio_model(SPEC, 2.0)
    r = np.array([0.1, 0.5, 1.0])
    assert (plain.delay(r) < sparse.delay(r)).all()
    assert (sparse.delay(r) < dense.delay(r)).all()


def test_interference_needs_nodes():
    with pytest.raises(ScenarioError, match=r"radio\.interference"):
        radio_model(SPEC)


def test_quadrature_for_any_radio_agrees_with_the_closed_geometry():
    from testbed.theory.extensions import radio_law

    system = System.from_scenario(preset("paper-baseline"))
    policy, model = get_policy("load_aware"), get_delay_model("erlang_c")
    exact = Latency(system, solve(system, policy, model), model)
    ours = radio_law.RadioLatency(system, radio_law.solve(system, policy, model), model)
    np.testing.assert_allclose(ours.point.association, exact.point.association, atol=2e-6)
    np.testing.assert_allclose(ours.point.utilisation, exact.point.utilisation, atol=1e-5)
    assert ours.mean == pytest.approx(exact.mean, rel=1e-5)
    assert ours.mean_distance == pytest.approx(exact.mean_distance, rel=1e-4)
    # A wait law that jumps at 0 and a deterministic radio make coverage jump inside a panel.
    assert ours.coverage(0.8) == pytest.approx(exact.coverage(0.8), abs=1e-3)


def sinr_scenario(policy: str) -> Scenario:
    section = SPEC.model_dump(mode="json") | {"payload": 4e5, "snr_at_1km": 20.0}
    return preset("paper-baseline").replace(radio=section, policy=policy)


@pytest.mark.parametrize("policy", ["nearest", "load_aware"])
def test_theory_under_sinr_against_monte_carlo(policy):
    latency = locate(sinr_scenario(policy))
    system, point = latency.system, latency.point
    assert point.converged and point.feasible
    rng = np.random.default_rng(4)
    n = 40_000
    covered = np.zeros(3)
    ttft_mean, error = 0.0, 0.0
    deadlines = np.array([0.5, 0.8, 2.0])
    for q, p in enumerate(system.probability):
        distance = nearest_distances(system.density, n, rng)
        chosen = choose(system.radio, point.costs[q], distance)
        share = np.bincount(chosen, minlength=3) / n
        a = point.association[q]
        within(share, a, np.sqrt(a * (1 - a) / n))
        served = distance[np.arange(n), chosen]
        waiting = np.array([law.wait_probability for law in latency.laws])[chosen]
        rate = np.array([getattr(law, "rate", 1.0) for law in latency.laws])[chosen]
        wait = np.where(
            rng.random(n) < waiting, rng.exponential(size=n) / np.maximum(rate, 1e-9), 0
        )
        ttft = system.radio.sample(served, rng) + system.residual[q, chosen] + wait
        covered += p * (ttft[:, None] <= deadlines).mean(axis=0)
        ttft_mean += p * ttft.mean()
        error += p**2 * ttft.var() / n
    expected = np.array([latency.coverage(t) for t in deadlines])
    within(covered, expected, np.sqrt(0.25 / n), slack=1e-3)
    within(ttft_mean, latency.mean, np.sqrt(error), slack=0.003 * latency.mean)


def test_a_delay_that_does_not_grow_with_distance_is_refused(tmp_path):
    file = tmp_path / "delays.csv"
    file.write_text("1 10\n2 20\n3 5\n")
    radio = {"model": "histogram", "file": str(file)}
    with pytest.raises(ScenarioError, match="grows with distance"):
        locate(preset("paper-baseline").replace(radio=radio))
