"""AdvertisedWait: a damped mean, bounded by what it saw, blind to how often it was asked."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.routing.telemetry import AdvertisedWait

samples = st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(-0.1, 10.0)), min_size=1, max_size=30)


@given(samples, st.floats(0.1, 50.0))
def test_the_mean_stays_within_start_and_samples(steps, window):
    wait = AdvertisedWait(window, start=0.5)
    now = 0.0
    for gap, value in steps:
        now += gap
        wait.observe(now, value)
    low = min(0.5, *(v for _, v in steps))
    high = max(0.5, *(v for _, v in steps))
    assert low - 1e-9 <= wait.mean <= high + 1e-9
    assert 0 <= wait.deviation <= high - low + 1e-6


@given(st.floats(0.1, 20.0), st.floats(0.0, 5.0), st.integers(1, 40))
def test_a_constant_wait_is_approached_by_the_clock_not_by_the_count(window, value, count):
    one, many = AdvertisedWait(window), AdvertisedWait(window)
    one.observe(0.0, value)
    one.observe(10.0, value)
    for t in np.linspace(0.0, 10.0, count + 1):
        many.observe(float(t), value)
    assert many.mean == pytest.approx(one.mean, rel=1e-9, abs=1e-12)
    assert one.mean == pytest.approx(value * -np.expm1(-10.0 / window))


def test_an_idle_node_forgets_its_queue():
    wait = AdvertisedWait(2.0, start=3.0)
    for t in range(40):
        wait.idle(float(t))
    assert wait.mean < 1e-6


def test_feedback_through_a_router_settles():
    """Two nodes whose wait grows with their share, a router that follows what they advertise."""
    nodes = [AdvertisedWait(5.0), AdvertisedWait(5.0, start=1.0)]
    rng = np.random.default_rng(0)
    shares = []
    for k in range(4000):
        # A logistic choice: radio distances spread by about 20 ms.
        share = 1 / (1 + np.exp(np.clip((nodes[0].mean - nodes[1].mean) / 0.02, -50, 50)))
        chosen = int(rng.random() > share)
        loads = (share, 1 - share)
        nodes[chosen].observe(k * 0.1, 0.3 * loads[chosen] / (1.2 - loads[chosen]))
        shares.append(share)
    assert np.std(shares[2000:]) < 0.1
    assert np.mean(shares[2000:]) == pytest.approx(0.5, abs=0.05)
