"""Fitting a learned map: the law that samples are from, and tails that few samples tell of."""

from __future__ import annotations

import numpy as np
import pytest

from testbed.theory.delay.base import ExcessDelay, TierLoad
from testbed.theory.delay.erlang_c import ErlangC
from testbed.theory.delay.learned_map import LearnedLaw
from testbed.theory.delay.learned_map_file import LearnedProfile
from testbed.theory.delay.learned_map_fit import (
    SimulatedLaw,
    bends,
    fit_seconds,
    fit_surface,
    slots_axis,
)
from testbed.theory.delay.learned_map_point import locate
from testbed.theory.delay.monotone_surface import Axis, MixBasis
from tests.unit.test_learned_map import profile_of

pytestmark = pytest.mark.slow

LOADS = (0.05, 0.95)
SLOTS = (2, 8)
INSIDE = ((3, 0.5), (5, 0.7), (8, 0.8), (4, 0.9))
"""Slots and share of the capacity where fits are looked at."""


def exact(rate: float, slots: int) -> ExcessDelay:
    """M/M/c with service of 1 s in the mean."""
    one = np.ones(1)
    return ErlangC().excess(TierLoad(rate, one, one, one, one, one, one, slots))


def fitted(samples: int, cells: int = 120) -> LearnedProfile:
    """A map of M/M/c waits, ``samples`` of each of ``cells`` loads.

    So many cells, as what lies between a few loads and slots at random is extrapolated: with 40 of
    them the mean is missed by up to a fifth, and more samples of each do not help.
    """
    rng = np.random.default_rng(5)
    axis, mix = slots_axis(*SLOTS), MixBasis(1, 0)
    laws = []
    for i in range(cells):
        slots = int(rng.integers(SLOTS[0], SLOTS[1] + 1))
        rho = LOADS[i % 8 == 7] if i % 4 == 3 else 1 / (1 + np.exp(-rng.uniform(-3, 2.9)))
        law = exact(rho * slots, slots).exponential()
        assert law is not None
        wait, theta = law
        waits = rng.random(samples) < wait[0]
        delays = np.where(waits, rng.exponential(1 / theta[0], samples), 0.0)
        laws.append(SimulatedLaw(rho * slots, np.ones(1), slots, float(slots), (delays,)))
    seconds = fit_seconds(laws, axis, mix)
    found = fit_surface(laws, np.array([0.1]), seconds, axis, mix, LOADS)
    return profile_of(
        found.surface,
        axis,
        seconds,
        types=("a",),
        new_tokens=(500.0,),
        cached_tokens=(0.0,),
        output_tokens=(4.0,),
        prefill_seconds=(0.1,),
        least_load=LOADS[0],
        least_slots=SLOTS[0],
        most_slots=SLOTS[1],
        mix_degree=0,
    )


def law_of(profile: LearnedProfile, rho: float, slots: int) -> LearnedLaw:
    point = locate(profile, rho * slots, np.ones(1), float(slots))
    assert point.rho == pytest.approx(rho, rel=0.01)
    return LearnedLaw(profile, point, np.ones(1))


def test_a_fit_finds_the_law_that_its_samples_are_from() -> None:
    """M/M/c waits, whose law is known at every load and number of servers."""
    profile = fitted(20_000)
    for slots, rho in INSIDE:
        found, truth = law_of(profile, rho, slots), exact(rho * slots, slots)
        assert found.mean == pytest.approx(truth.mean, rel=0.05)
        w = np.array([0.0, 0.2, 1.0, 3.0])
        assert found.cdf(0, w) == pytest.approx(truth.cdf(0, w), abs=0.015)


def test_a_tail_that_few_samples_tell_of_is_not_lengthened() -> None:
    """Of 2,000 samples none tells of p99.9: what is smooth by the prior has to be exponential."""
    profile = fitted(2_000)
    apart = [
        law_of(profile, rho, slots).quantile(0, 0.999)
        / exact(rho * slots, slots).quantile(0, 0.999)
        for slots, rho in INSIDE
    ]
    assert abs(np.mean(apart) - 1.0) < 0.15


def test_exponential_tails_do_not_bend() -> None:
    """A surface falling linearly in the delay, its rate anything linear along load and slots."""
    delay = Axis(knots=(-4.0, -1.0, 0.0, 0.5, 3.0), degree=3)
    t, load, slots = np.exp(delay.places), np.arange(5.0), np.arange(4.0)
    rate = np.add.outer(-0.3 * load, 0.2 * slots) + 3.0
    straight = np.repeat((2.0 - np.multiply.outer(t, rate))[..., None], 3, axis=-1)
    bent = bends(delay, straight.shape)
    assert np.abs(bent @ straight.ravel()).max() < 1e-12 * t.max()
    in_logarithm = np.broadcast_to(-delay.places[:, None, None, None], straight.shape)
    assert np.abs(bent @ in_logarithm.ravel()).max() > 0.1


def test_the_places_of_an_axis_give_back_its_argument() -> None:
    axis = Axis(knots=(0.0, 1.0, 2.0, 4.0), degree=3)
    x = np.linspace(0.0, 4.0, 33)
    assert axis.basis(x) @ axis.places == pytest.approx(x)
    assert Axis(knots=(2.0,), degree=0).places.tolist() == [2.0]
