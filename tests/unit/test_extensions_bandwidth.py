"""Bandwidth sharing: a processor-sharing radio before an M/M/c queue, theory against events."""

import heapq

import numpy as np
import pytest

from testbed.errors import ScenarioError
from testbed.presets import preset
from testbed.radio import nearest_distances
from testbed.routing.policies import get_policy
from testbed.simulation.queue import waits
from testbed.theory.delay import get_delay_model
from testbed.theory.extensions import bandwidth
from testbed.theory.latency import Latency
from testbed.theory.operating_point import solve
from testbed.theory.system import System
from tests.unit.plane import choose
from tests.unit.significance import within

MODEL = get_delay_model("erlang_c")
BATCHES = 20


def system_at(intensity, **radio):
    scenario = preset("paper-baseline").with_field("demand.intensity", intensity)
    if radio:
        scenario = scenario.replace(radio={"model": "power_law", **radio})
    return System.from_scenario(scenario)


def shared(system, policy="load_aware"):
    found = bandwidth.solve(system, get_policy(policy), MODEL)
    return found, bandwidth.SharedLatency.of(system, found, MODEL)


def processor_sharing(arrival, size):
    """Times at which customers leave a server shared equally by all present, (N,).

    Work per customer grows alike for all present; each leaves when it has grown by its size.
    """
    leave = np.empty(len(arrival))
    present: list[tuple[float, int]] = []
    now, work = 0.0, 0.0
    for k in range(len(arrival) + 1):
        until = arrival[k] if k < len(arrival) else np.inf
        while present:
            done = now + (present[0][0] - work) * len(present)
            if done > until:
                break
            now, (work, who) = done, heapq.heappop(present)
            leave[who] = now
        if k == len(arrival):
            return leave
        if present:
            work += (until - now) / len(present)
        now = until
        heapq.heappush(present, (work + size[k], k))
    raise AssertionError("unreachable")


def batch_error(values):
    means = [b.mean() for b in np.array_split(values, BATCHES)]
    return np.std(means, ddof=1) / np.sqrt(BATCHES)


def test_processor_sharing_of_the_test_against_its_closed_form():
    rng = np.random.default_rng(0)
    n = 25_000
    arrival = np.cumsum(rng.exponential(1.0, n))
    size = 0.6 * rng.exponential(1.0, n)
    stay = processor_sharing(arrival, size) - arrival
    within(stay.mean(), 0.6 / 0.4, batch_error(stay))


@pytest.mark.parametrize("intensity", [3.0, 6.0])
def test_radio_and_queue_of_a_node_against_event_simulation(intensity):
    """A node of every tier: Poisson arrivals of the requests that choose it under the theory's
    advertised waits and slowed radio, a shared radio, then c servers."""
    system = system_at(intensity)
    found, latency = shared(system)
    assert found.point.feasible and found.point.converged
    rng = np.random.default_rng(1)
    n = 90_000
    slowed = 1.0 / (1.0 - found.radio_utilisation)
    q = rng.choice(len(system.probability), n, p=system.probability)
    distance = nearest_distances(system.density, n, rng)
    alone = system.radio.delay(distance)
    chosen = np.argmin(found.point.costs[q] + alone * slowed, axis=1)
    share = np.bincount(chosen, minlength=3) / n
    expected = system.probability @ found.point.association
    within(share, expected, np.sqrt(expected * (1 - expected) / n))
    total = 0.0
    for s in range(3):
        mine = chosen == s
        rate = intensity * share[s] / system.density[s]
        arrival = np.cumsum(rng.exponential(1.0 / rate, mine.sum()))
        size = alone[mine, s]
        leave = processor_sharing(arrival, size)
        stay = leave - arrival
        # The mean time in the radio is (1 + n)·ξ r^α, at every size.
        for part in (size > 0, size > np.median(size)):
            expected_stay = size[part].mean() * slowed[s]
            within(stay[part].mean(), expected_stay, batch_error(stay[part]))
        order = np.argsort(leave)
        mean_service = system.occupancy[q[mine], s].mean()
        service = mean_service * rng.exponential(size=mine.sum())
        wait = waits(leave[order], service, int(system.concurrency[s]))
        expected_wait = float(found.point.wait[0, s])
        within(wait.mean(), expected_wait, batch_error(wait), slack=1e-4)
        total += (stay.sum() + wait.sum() + system.residual[q[mine], s].sum()) / n
    assert total == pytest.approx(latency.mean, rel=0.02)


def test_sharing_costs_coverage_and_vanishes_with_the_load():
    policy = get_policy("load_aware")
    for intensity, close in ((0.001, 1e-4), (3.0, None)):
        system = system_at(intensity)
        found, latency = shared(system)
        alone = Latency(system, solve(system, policy, MODEL), MODEL)
        if close is not None:
            assert latency.coverage(0.8) == pytest.approx(alone.coverage(0.8), abs=close)
            assert latency.mean_distance == pytest.approx(alone.mean_distance, rel=1e-3)
        else:
            assert latency.coverage(0.8) < alone.coverage(0.8) - 0.01
            assert latency.mean > alone.mean
        np.testing.assert_allclose(
            found.transfers, found.radio_utilisation / (1 - found.radio_utilisation)
        )


def test_slower_radio_is_busier_and_the_busiest_tier_sheds_load():
    slow, _ = shared(system_at(3.0, xi=0.3, alpha=3.5))
    fast, _ = shared(system_at(3.0, xi=0.05, alpha=3.5))
    assert (slow.radio_utilisation > fast.radio_utilisation).all()
    deep = 2
    assert slow.point.association[:, deep].sum() < fast.point.association[:, deep].sum()


def test_a_radio_that_cannot_carry_its_traffic_is_infeasible_and_says_which():
    found, latency = shared(system_at(3.0, xi=5.0, alpha=3.5), "nearest")
    assert not found.point.feasible
    assert "radio" in str(found.point.reason)
    assert np.isfinite(latency.coverage(0.8))


def test_needs_a_power_law():
    scenario = preset("paper-baseline").replace(
        radio={"model": "sinr", "bandwidth": 2e6, "payload": 4e5, "snr_at_1km": 20.0}
    )
    with pytest.raises(ScenarioError, match="power_law"):
        shared(System.from_scenario(scenario))


def test_nearest_policy_knows_only_the_radio():
    system = system_at(3.0)
    found, _ = shared(system, "nearest")
    np.testing.assert_allclose(
        found.point.association, np.broadcast_to(system.fraction, system.shape), atol=1e-9
    )
    assert np.ptp(found.radio_utilisation) < 1e-9
    distance = nearest_distances(system.density, 20_000, np.random.default_rng(2))
    chosen = choose(system.radio, np.zeros(3), distance)
    busy = 3.0 * system.radio.delay(distance[np.arange(len(chosen)), chosen])
    within(found.radio_utilisation[0], busy.mean(), busy.std() / np.sqrt(len(busy)))
