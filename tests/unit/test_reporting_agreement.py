"""Agreement is arithmetic: signed error, and noise from the intervals of both sides."""

from __future__ import annotations

import math

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from testbed.reporting.agreement import NOISY_PERCENT, Agreement, Reading, agree

positive = st.floats(1e-4, 1e4)
relative = st.floats(0.0, 0.9)


def against(p: float, m: float, low: float, high: float, probability: bool = False) -> Agreement:
    return agree(Reading(p), Reading(m, (low, high)), probability=probability)


@given(positive, positive)
@settings(max_examples=100, deadline=None)
def test_the_error_is_the_difference_over_the_reference(p: float, m: float) -> None:
    found = agree(Reading(p), Reading(m), probability=False)
    assert found.error_percent is not None and found.difference == p - m
    assert math.isclose(found.error_percent, 100 * (p - m) / m, rel_tol=1e-12)
    assert found.within is None and found.status == "no interval"


@given(positive, positive, relative, relative)
@settings(max_examples=100, deadline=None)
def test_a_bare_answer_is_within_exactly_when_the_interval_holds_it(
    p: float, m: float, below: float, above: float
) -> None:
    low, high = m - below * m, m + above * m
    found = against(p, m, low, high)
    edge = math.isclose(p, low, rel_tol=1e-9) or math.isclose(p, high, rel_tol=1e-9)
    assert edge or found.within == (low <= p <= high)
    assert found.noise is not None and math.isclose(found.noise, (high - low) / 2, abs_tol=1e-9 * m)
    assert found.interval is not None
    assert edge or found.within == (found.interval[0] <= 0 <= found.interval[1])


@given(positive, positive, relative, relative)
@settings(max_examples=100, deadline=None)
def test_noise_of_two_sides_adds_in_quadrature_and_swapping_them_changes_only_the_sign(
    p: float, m: float, a: float, b: float
) -> None:
    one, two = Reading(p, (p * (1 - a), p * (1 + a))), Reading(m, (m * (1 - b), m * (1 + b)))
    there, back = agree(one, two, probability=False), agree(two, one, probability=False)
    assert there.noise is not None and back.noise is not None
    assert math.isclose(there.noise, math.hypot(a * p, b * m), rel_tol=1e-9, abs_tol=1e-12)
    assert there.within == back.within
    assert there.difference == -(back.difference or 0.0)


@given(st.floats(0.011, 0.5))
@settings(max_examples=50, deadline=None)
def test_agreement_within_a_wide_noise_is_not_called_agreement(noise: float) -> None:
    assume(abs(100 * noise - NOISY_PERCENT) > 1e-9)  # at the limit rounding decides
    found = against(1.0, 1.0, 1 - noise, 1 + noise)
    assert found.within
    assert found.status == ("too noisy" if 100 * noise > NOISY_PERCENT else "agrees")


def test_outside_the_noise_is_a_miss_unless_it_is_small() -> None:
    assert against(1.04, 1.0, 0.99, 1.01).status == "close"
    assert against(1.06, 1.0, 0.99, 1.01).status == "misses"
    assert against(0.94, 1.0, 0.99, 1.01).status == "misses"
    # A share is judged in points: 1 % against 2 % is one point, though half of the figure.
    assert against(0.01, 0.02, 0.019, 0.021, probability=True).status == "close"
    assert against(0.45, 0.50, 0.49, 0.51, probability=True).status == "misses"


@given(
    st.sampled_from([0.0, 1.0, math.inf]),
    st.sampled_from([0.0, 1.0, math.inf]),
    st.sampled_from([None, (0.0, 1.0), (0.0, math.inf), (-math.inf, math.inf), (1.0, 1.0)]),
)
@settings(max_examples=60, deadline=None)
def test_zero_and_infinity_never_become_not_a_number(
    p: float, m: float, interval: tuple[float, float] | None
) -> None:
    found = agree(Reading(p), Reading(m, interval), probability=False)
    numbers = [found.error_percent, found.difference, found.noise, found.noise_percent]
    numbers += list(found.interval or ())
    assert not any(x is not None and math.isnan(x) for x in numbers)
    if math.isinf(p) != math.isinf(m):
        assert found.status == "unbounded" and found.within is False
