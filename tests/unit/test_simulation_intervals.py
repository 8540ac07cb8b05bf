"""Intervals hold their level on series whose law is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.signal import lfilter
from scipy.stats import norm

from testbed.simulation.intervals import (
    interval_mean,
    interval_proportion,
    interval_quantile,
    interval_ratio,
    interval_share,
    mser5,
)

REPEATS = 200
FLOOR = 0.95 - 3 * math.sqrt(0.95 * 0.05 / REPEATS)
"""Three standard errors of the observed coverage below the nominal level."""


def autoregressive(n: int, phi: float, seed: int) -> np.ndarray:
    noise = np.random.default_rng(seed).standard_normal(n)
    noise[0] /= math.sqrt(1 - phi**2)  # a stationary start
    return lfilter([1], [1, -phi], noise)


@pytest.mark.parametrize(("phi", "n"), [(0.0, 200), (0.5, 1000), (0.9, 5000)])
def test_coverage_on_a_correlated_series(phi: float, n: int) -> None:
    q90 = norm.ppf(0.9) / math.sqrt(1 - phi**2)
    held = np.zeros(3)
    for seed in range(REPEATS):
        x = autoregressive(n, phi, seed)
        held += (
            interval_mean(x).contains(0.0),
            interval_proportion(x <= q90).contains(0.9),
            interval_quantile(x, 0.9).contains(q90),
        )
    assert (held / REPEATS >= FLOOR).all(), held / REPEATS


def test_coverage_on_skewed_data() -> None:
    held = sum(
        interval_mean(np.random.default_rng(seed).exponential(size=60)).contains(1.0)
        for seed in range(REPEATS)
    )
    assert held / REPEATS >= FLOOR


def test_coverage_of_a_ratio_with_varying_counts() -> None:
    held = 0
    for seed in range(REPEATS):
        rng = np.random.default_rng(seed)
        counts = rng.poisson(5.0, 400)
        sums = np.array([rng.exponential(2.0, k).sum() for k in counts])
        held += interval_ratio(sums, counts).contains(2.0)
    assert held / REPEATS >= FLOOR


def test_correlation_widens_the_interval() -> None:
    x = autoregressive(4000, 0.9, 1)
    shuffled = np.random.default_rng(1).permutation(x)
    assert interval_mean(x).half_width > 2 * interval_mean(shuffled).half_width


def test_a_short_correlated_run_is_called_unreliable() -> None:
    assert not interval_mean(np.linspace(0, 1, 300)).reliable


def test_a_quantile_that_the_sample_does_not_hold_has_no_upper_bound() -> None:
    assert interval_quantile(np.random.default_rng(0).random(50), 0.99).high == math.inf


def test_a_share_of_one_is_not_certain() -> None:
    interval = interval_share(np.full(20, 5), np.full(20, 5))
    assert interval.estimate == interval.high == 1
    assert 0.9 < interval.low < 1


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=2, max_size=200),
    st.floats(0.1, 10),
    st.floats(-100, 100),
)
def test_intervals_follow_a_change_of_unit(x: list[float], scale: float, shift: float) -> None:
    series = np.array(x)
    before, after = interval_mean(series), interval_mean(scale * series + shift)
    room = 1e-6 * (1 + scale) * (1 + float(np.abs(series).max()) + abs(shift))
    assert after.estimate == pytest.approx(scale * before.estimate + shift, abs=room)
    assert before.low <= before.estimate <= before.high or np.ptp(series) > 0


@settings(max_examples=50, deadline=None)
@given(st.lists(st.booleans(), min_size=2, max_size=300))
def test_proportions_stay_inside_the_unit_interval(hits: list[bool]) -> None:
    interval = interval_proportion(np.array(hits))
    assert 0 <= interval.low <= interval.estimate <= interval.high <= 1
    assert interval.estimate == pytest.approx(np.mean(hits))


def test_warm_up_is_found_and_a_stationary_series_is_kept() -> None:
    x = autoregressive(10_000, 0.5, 3)
    transient = np.r_[30 * np.exp(-np.arange(2000) / 200), np.zeros(8000)]
    cut, stationary = mser5(x + transient)
    assert stationary
    assert 600 <= cut <= 2000
    assert mser5(x)[0] < 2000
    assert not mser5(np.arange(1000.0))[1]


@pytest.mark.parametrize("bad", [[1.0], [1.0, math.inf], [math.nan, 1.0]])
def test_unusable_observations_are_refused(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="observation"):
        interval_mean(np.array(bad))
