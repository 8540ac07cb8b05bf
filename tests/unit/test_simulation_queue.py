"""The FCFS station: closed forms, an independent simulator, and the laws of a queue."""

from __future__ import annotations

import math

import ciw
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.simulation.intervals import interval_mean, interval_proportion
from testbed.simulation.queue import Station, mmc_waits, waits
from testbed.theory.delay import TierLoad, get_delay_model


def erlang(rate: float, mu: float, c: int) -> object:
    load = TierLoad(
        arrival_rate=rate,
        weights=np.ones(1),
        residual_prefill=np.zeros(1),
        new_tokens=np.ones(1),
        cached_tokens=np.zeros(1),
        occupancy=np.array([1 / mu]),
        output_tokens=np.ones(1),
        concurrency=c,
    )
    return get_delay_model("erlang_c").excess(load)


@pytest.mark.parametrize(("rho", "c"), [(0.5, 1), (0.82, 9), (0.8, 24), (0.9, 64)])
def test_waiting_law_is_erlang_c(rho: float, c: int) -> None:
    """Theory B7 at six points of the CDF, each within its interval at 99.9 %."""
    wait = mmc_waits(rho * c, 1.0, c, 600_000, np.random.default_rng(c))[50_000:]
    law = erlang(rho * c, 1.0, c)
    scale = 1 / (c * (1 - rho))
    for w in (0.0, 0.25 * scale, 0.5 * scale, scale, 2 * scale, 4 * scale):
        interval = interval_proportion(wait <= w, level=0.999)
        assert interval.contains(float(law.cdf(0, np.asarray(w)))), (w, interval)
    assert interval_mean(wait, level=0.999).contains(float(law.mean[0]))


def test_same_waits_as_an_independent_simulator() -> None:
    """Ciw serves the very same customers: every wait agrees."""
    rng = np.random.default_rng(5)
    arrival = np.cumsum(rng.exponential(0.15, 400))
    service = rng.gamma(2.0, 0.5, 400)
    gaps = np.diff(arrival, prepend=0.0).tolist()
    network = ciw.create_network(
        arrival_distributions=[ciw.dists.Sequential([*gaps, math.inf])],
        service_distributions=[ciw.dists.Sequential(service.tolist())],
        number_of_servers=[7],
    )
    simulation = ciw.Simulation(network)
    simulation.simulate_until_max_customers(400, method="Finish")
    records = sorted(simulation.get_all_records(), key=lambda r: r.arrival_date)
    # Ciw takes service times in order of start, which under FCFS is the order of arrival.
    assert np.allclose(waits(arrival, service, 7), [r.waiting_time for r in records], atol=1e-9)


def brute_force(arrival: list[float], service: list[float], servers: int) -> list[float]:
    free = [0.0] * servers
    result = []
    for a, s in zip(arrival, service, strict=True):
        k = min(range(servers), key=lambda i: free[i])
        start = max(a, free[k])
        free[k] = start + s
        result.append(start - a)
    return result


customers = st.lists(
    st.tuples(st.floats(0, 5, width=32), st.floats(0, 20, width=32)), min_size=1, max_size=60
)


@settings(max_examples=60, deadline=None)
@given(customers, st.sampled_from([1, 2, 3, 9, 48, 49, 60]))
def test_waits_by_brute_force_and_in_order(people: list[tuple[float, float]], c: int) -> None:
    arrival = np.cumsum([gap for gap, _ in people])
    service = np.array([s for _, s in people])
    wait = waits(arrival, service, c)
    assert np.allclose(wait, brute_force(list(arrival), list(service), c))
    assert (wait >= 0).all()
    assert (np.diff(arrival + wait) >= -1e-9).all(), "FCFS: nobody starts before an earlier one"
    # Work is conserved: at no start are more than c customers in service.
    start, end = arrival + wait, arrival + wait + service
    assert all(((start <= t) & (end > t)).sum() <= c for t in start)


@settings(max_examples=30, deadline=None)
@given(customers, st.integers(1, 60), st.integers(1, 9))
def test_a_run_in_pieces_is_the_whole_run(
    people: list[tuple[float, float]], cut: int, c: int
) -> None:
    arrival = np.cumsum([gap for gap, _ in people])
    service = np.array([s for _, s in people])
    station = Station(c)
    pieces = [station.serve(arrival[a], service[a]) for a in (slice(cut), slice(cut, None))]
    assert np.array_equal(np.concatenate(pieces), waits(arrival, service, c))


@settings(max_examples=30, deadline=None)
@given(customers, st.integers(1, 9))
def test_a_further_server_never_lengthens_a_wait(people: list[tuple[float, float]], c: int) -> None:
    arrival = np.cumsum([gap for gap, _ in people])
    service = np.array([s for _, s in people])
    assert (waits(arrival, service, c + 1) <= waits(arrival, service, c) + 1e-9).all()


def test_unusable_customers_are_refused() -> None:
    with pytest.raises(ValueError, match="time runs back"):
        waits(np.array([1.0, 0.5]), np.ones(2), 1)
    with pytest.raises(ValueError, match="negative"):
        waits(np.array([1.0]), np.array([-1.0]), 1)
    with pytest.raises(ValueError, match="servers"):
        Station(0)
    station = Station(1)
    station.serve(np.array([5.0]), np.ones(1))
    with pytest.raises(ValueError, match="time runs back"):
        station.serve(np.array([4.0]), np.ones(1))
