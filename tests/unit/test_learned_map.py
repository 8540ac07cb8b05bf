"""Learned map: monotone by construction, exact gradients, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls
from scipy.sparse import vstack

from testbed.errors import OutOfRangeError, ScenarioError
from testbed.step_time import StepTime
from testbed.theory.delay.base import TierLoad, get_delay_model
from testbed.theory.delay.learned_map import LearnedLaw, LearnedMap
from testbed.theory.delay.learned_map_file import (
    Fit,
    LearnedEngine,
    LearnedMapFile,
    LearnedProfile,
    Surface,
    fingerprint,
)
from testbed.theory.delay.learned_map_fit import slots_axis
from testbed.theory.delay.learned_map_point import capacity_seconds, locate
from testbed.theory.delay.monotone_fit import differences, ordered_least_squares
from testbed.theory.delay.monotone_surface import Axis, MixBasis

STEP = StepTime(c_pre=4e-3, a=4e-5, c_dec=2.7e-3, e=1e-4)
MODEST = settings(max_examples=25, deadline=None)
SLOTS = (2, 16)


def profile_of(surface: Surface, axis: Axis, seconds: np.ndarray, **more: object) -> LearnedProfile:
    given = {
        "profile": "deep",
        "types": ("a", "b"),
        "new_tokens": (500.0, 100.0),
        "cached_tokens": (0.0, 400.0),
        "output_tokens": (4.0, 8.0),
        "prefill_seconds": (0.024, 0.008),
        "step_time": fingerprint(STEP),
        "lookahead": False,
        "least_load": 0.02,
        "most_load": 0.95,
        "least_slots": SLOTS[0],
        "most_slots": SLOTS[1],
        "least_share": 0.005,
        "mix_degree": 2,
        "slots_axis": axis,
        "seconds": tuple(seconds.ravel().tolist()),
        "surface": surface,
        "fit": Fit(cells=1, requests=1, points=1, misfit=0, noise=0, capacity_misfit=0),
    }
    return LearnedProfile.model_validate({**given, **more})


def model_of(profile: LearnedProfile) -> LearnedMap:
    return LearnedMap(
        LearnedMapFile(
            scenario="test",
            seed=0,
            created_at="",
            software="",
            engine=LearnedEngine(scheduler="vllm", token_budget=2048, block_size=16),
            profiles=(profile,),
        )
    )


@pytest.fixture(scope="module")
def anything() -> LearnedMap:
    """Surfaces of random coefficients in order: the laws below hold for every fit."""
    rng = np.random.default_rng(3)
    axis, mix = slots_axis(*SLOTS), MixBasis(2, 2)
    delay = Axis(knots=(-4.0, -2.0, -1.0, 0.0, 0.7, 1.5), degree=3)
    load = Axis(knots=tuple(np.linspace(-3.9, 2.95, 4)), degree=2)
    demand = Axis(knots=(-5.0, -3.0, 0.0), degree=2)
    shape = (2, delay.count, load.count, axis.count, mix.count)
    q, j, u, k, m = shape
    slots_fall = np.cumsum(np.cumsum(rng.exponential(0.3, (q, j, 1, k, m)), axis=1), axis=3)
    load_rise = np.cumsum(rng.exponential(0.2, (q, j, u, 1, m)), axis=2)
    main = 1.0 - slots_fall + np.cumsum(load_rise[:, ::-1], axis=1)[:, ::-1]
    shift = np.cumsum(rng.exponential(0.5, (2, demand.count, mix.count)), axis=1)
    surface = Surface(
        unit=0.05,
        delay=delay,
        load=load,
        demand=demand,
        tail=6.0,
        shape=main.shape,
        main=tuple(main.ravel().tolist()),
        shift=tuple(shift.ravel().tolist()),
    )
    seconds = 0.02 + np.cumsum(rng.exponential(0.02, (axis.count, mix.count)), axis=0)[::-1]
    return model_of(profile_of(surface, axis, seconds))


def load(rate: float, share: float, slots: int = 8, **more: object) -> TierLoad:
    at = TierLoad(
        arrival_rate=rate,
        weights=np.array([share, 1.0 - share]),
        residual_prefill=np.array([0.024, 0.008]),
        new_tokens=np.array([500.0, 100.0]),
        cached_tokens=np.array([0.0, 400.0]),
        occupancy=np.array([0.05, 0.05]),
        output_tokens=np.array([4.0, 8.0]),
        concurrency=slots,
        profile="deep",
        types=("a", "b"),
        step_time=STEP,
        token_budget=2048,
    )
    return replace(at, **more)  # type: ignore[arg-type]


def at(model: LearnedMap, rho: float, share: float, slots: int = 8) -> TierLoad:
    unit = model.utilisation(load(1.0, share, slots))
    return load(rho / unit, share, slots)


SECONDS = np.concatenate([[0.0], np.geomspace(1e-4, 20.0, 60)])


@MODEST
@given(st.floats(1e-4, 0.95), st.floats(1e-4, 0.95), st.floats(0, 1), st.integers(*SLOTS))
def test_more_load_never_makes_a_short_delay_likelier(
    anything: LearnedMap, one: float, two: float, share: float, slots: int
) -> None:
    low, high = (anything.excess(at(anything, r, share, slots)) for r in sorted((one, two)))
    for q in range(2):
        assert (high.cdf(q, SECONDS) <= low.cdf(q, SECONDS) + 1e-12).all()
    assert (high.mean >= low.mean * (1 - 1e-12)).all()


@MODEST
@given(st.floats(1e-4, 0.95), st.floats(0, 1), st.integers(*SLOTS), st.integers(*SLOTS))
def test_more_slots_never_make_a_long_delay_likelier(
    anything: LearnedMap, rho: float, share: float, one: int, two: int
) -> None:
    """At the same arrival rate, not at the same share of a capacity that grows with slots."""
    few, many = sorted((one, two))
    rate = at(anything, rho, share, few).arrival_rate
    scarce, ample = (anything.excess(load(rate, share, c)) for c in (few, many))
    for q in range(2):
        assert (ample.cdf(q, SECONDS) >= scarce.cdf(q, SECONDS) - 1e-12).all()
    assert (ample.mean <= scarce.mean * (1 + 1e-12)).all()


@MODEST
@given(st.floats(1e-3, 0.999), st.floats(0.05, 0.95), st.floats(2.1, 15.9))
def test_the_gradient_is_that_of_finite_differences(
    anything: LearnedMap, rho: float, share: float, slots: float
) -> None:
    profile = anything.file.profiles[0]
    weights = np.array([share, 1.0 - share])
    rate = rho / capacity_seconds(profile, weights, slots)
    here = np.array([rate, share, 1.0 - share, slots])

    def law(x: np.ndarray) -> LearnedLaw:
        return LearnedLaw(profile, locate(profile, x[0], x[1:3], x[3], slopes=True), x[1:3])

    times = np.array([0.003, 0.05, 0.4])
    found = law(here)
    for direction in np.array([[rate, 0, 0, 0], [0, 1, -1, 0], [0, 0, 0, slots]], dtype=float):
        step = 1e-6 * direction
        up, down = law(here + step), law(here - step)
        if _crosses(profile, up.point.rho, down.point.rho):
            continue
        mean = (up.mean - down.mean) / 2e-6
        assert found.mean_gradient() @ direction == pytest.approx(mean, rel=1e-5, abs=1e-9)
        for q in range(2):
            cdf = (up.cdf(q, times) - down.cdf(q, times)) / 2e-6
            assert found.cdf_gradient(q, times) @ direction == pytest.approx(
                cdf, rel=1e-4, abs=1e-7
            )


def _crosses(profile: LearnedProfile, one: float, two: float) -> bool:
    """An edge of what was fitted lies between: the slope jumps there."""
    low, high = sorted((one, two))
    return any(low <= edge <= high for edge in (profile.least_load, profile.most_load))


def test_the_model_gives_the_gradient_in_the_order_of_its_load(anything: LearnedMap) -> None:
    forward = at(anything, 0.7, 0.3)
    swap = np.array([1, 0])
    backward = replace(
        forward,
        types=("b", "a"),
        weights=forward.weights[swap],
        new_tokens=forward.new_tokens[swap],
        cached_tokens=forward.cached_tokens[swap],
        output_tokens=forward.output_tokens[swap],
    )
    mean, slope = anything.gradient(forward)
    mirrored, slope_mirrored = anything.gradient(backward)
    assert mirrored == pytest.approx(mean[swap])
    assert slope_mirrored == pytest.approx(slope[np.ix_(swap, [0, 2, 1, 3])])
    assert anything.mean(backward) == pytest.approx(mean[swap])
    law, same = anything.excess(forward), anything.excess(backward)
    assert law.cdf(0, SECONDS) == pytest.approx(same.cdf(1, SECONDS))
    assert mean == pytest.approx(law.mean)


def test_a_law_is_a_law(anything: LearnedMap) -> None:
    law = anything.excess(at(anything, 0.6, 0.4))
    fine = np.concatenate([np.linspace(0, 5.0, 200_001), np.linspace(5.0, 400.0, 200_001)[1:]])
    for q in range(2):
        beyond = 1.0 - law.cdf(q, fine)
        assert law.mean[q] == pytest.approx(np.trapezoid(beyond, fine), rel=1e-4)
        assert law.cdf(q, np.array([-1.0]))[0] == 0
        assert law.decay(q) > 0
        p = law.quantile(q, 0.95)
        assert float(law.cdf(q, np.array(p))) == pytest.approx(0.95)
    nobody = anything.excess(load(0.0, 0.4))
    assert nobody.mean.tolist() == [0, 0] and nobody.wait_probability == 0
    few = anything.excess(at(anything, 1e-9, 0.4))
    twice = anything.excess(at(anything, 2e-9, 0.4))
    assert twice.mean == pytest.approx(2 * few.mean, rel=1e-3), "∝ λ where hardly anybody is"


def test_what_was_not_fitted_is_refused(anything: LearnedMap, tmp_path: Path) -> None:
    fits = at(anything, 0.5, 0.5)
    for change, message in (
        ({"profile": "other"}, "nothing for profile 'other'"),
        ({"types": ("a", "c")}, "types a, b, not a, c"),
        ({"output_tokens": np.array([4.0, 9.0])}, "output tokens 4, 8, not 4, 9"),
        ({"step_time": StepTime(c_pre=4e-3, a=5e-5, c_dec=2.7e-3, e=1e-4)}, "another step time"),
        ({"step_time": None}, "another step time"),
        ({"lookahead": True}, "formed one by one"),
    ):
        with pytest.raises(ScenarioError, match=message):
            anything.excess(replace(fits, **change))  # type: ignore[arg-type]
    with pytest.raises(OutOfRangeError, match="has 17 slots, the map was fitted for 2 to 16"):
        anything.mean(replace(fits, concurrency=17))
    high = at(anything, 0.97, 0.5)
    assert (anything.mean(high) > anything.mean(at(anything, 0.95, 0.5))).all(), "for a search"
    with pytest.raises(OutOfRangeError, match=r"0\.970 of its capacity.*up to 0\.95"):
        anything.excess(high)
    path = tmp_path / "map.json"
    anything.file.save(path)
    again = get_delay_model(f"learned_map:{path}")
    assert again.mean(fits) == pytest.approx(anything.mean(fits))
    path.write_text("{}")
    with pytest.raises(ScenarioError, match=r"map\.json: scenario"):
        get_delay_model(f"learned_map:{path}")
    with pytest.raises(ScenarioError, match="needs its file"):
        get_delay_model("learned_map")
    surface = anything.file.profiles[0].surface.model_dump()
    with pytest.raises(ValueError, match="main: rises with the delay"):
        Surface.model_validate({**surface, "main": tuple(-x for x in surface["main"])})


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10_000))
def test_ordered_least_squares_is_the_least_in_order(seed: int) -> None:
    """Karush, Kuhn and Tucker: the gradient is a positive mixture of what binds."""
    rng = np.random.default_rng(seed)
    shape = (4, 3)
    order = vstack([differences(shape, 0), -differences(shape, 1)]).tocsr()
    rows = rng.normal(size=(20, 12))
    target = rng.normal(size=20)
    start = np.add.outer(np.arange(4.0), -np.arange(3.0)).ravel()
    normal, right = rows.T @ rows, rows.T @ target
    found = ordered_least_squares(normal, right, order, start)
    slack = order @ found
    assert slack.min() > 0
    worst = float(0.5 * found @ normal @ found - right @ found)
    for other in (start, *(start * s + found for s in (0.01, 0.1))):
        assert (order @ other).min() > 0
        assert float(0.5 * other @ normal @ other - right @ other) >= worst - 1e-9
    bound = order[slack < 1e-3].toarray()
    gradient = normal @ found - right
    if bound.size:
        assert nnls(bound.T, gradient)[1] < 0.02 * max(1.0, np.abs(right).max())
    else:
        assert np.abs(gradient).max() < 1e-3 * np.abs(right).max()
