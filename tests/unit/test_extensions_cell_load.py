"""Cell load: areas of true association cells, and what they do to coverage."""

import numpy as np
import pytest
from scipy.stats import gamma

from testbed.presets import preset
from testbed.routing.policies import get_policy
from testbed.theory.extensions.cell_load import (
    VORONOI_SHAPE,
    CellLatency,
    CellLaw,
    MixedDelay,
    cell_shapes,
    fixed_cells,
    own_waits,
)
from testbed.theory.extensions.discs import overlap_area, union_area
from testbed.theory.predict import locate
from tests.unit.plane import Torus, choose
from tests.unit.significance import within

GILBERT = 0.280176
"""Variance of the cell of a planar Poisson–Voronoi mosaic in units of its squared mean."""


def located(policy, intensity):
    scenario = preset("paper-baseline").replace(policy=policy)
    return locate(scenario.with_field("demand.intensity", intensity))


def uncached(intensity):
    """One tier, so that cells are Voronoi's."""
    scenario = preset("paper-baseline").with_field("demand.intensity", intensity)
    first = scenario.to_dict()["profiles"][0]
    return locate(scenario.replace(profiles=[{**first, "fraction": 1.0}], policy="nearest"))


@pytest.mark.parametrize(
    ("a", "b", "d", "area"),
    [
        (1.0, 2.0, 0.5, np.pi),  # one inside the other
        (1.0, 1.0, 2.0, 0.0),  # touching
        (1.0, 1.0, 0.0, np.pi),
        (1.0, 1.0, 1.0, 2 * np.pi / 3 - np.sqrt(3) / 2),
        (0.0, 1.0, 0.3, 0.0),
    ],
)
def test_overlap_of_discs(a, b, d, area):
    assert float(overlap_area(a, b, d)) == pytest.approx(area, abs=1e-12)
    assert float(overlap_area(b, a, d)) == pytest.approx(area, abs=1e-12)
    assert float(union_area(a, b, d)) == pytest.approx(np.pi * (a**2 + b**2) - area)


def test_overlap_of_discs_by_counting_points():
    rng = np.random.default_rng(0)
    places = rng.uniform(-3, 3, (80_000, 2))
    for a, b, d in ((1.0, 2.0, 1.7), (1.2, 0.9, 1.1), (0.5, 2.0, 1.9)):
        both = (np.hypot(*places.T) < a) & (np.hypot(places[:, 0] - d, places[:, 1]) < b)
        p = float(overlap_area(a, b, d)) / 36
        within(both.mean(), p, np.sqrt(p * (1 - p) / len(places)))


def test_variance_of_a_voronoi_cell_is_gilberts():
    latency = uncached(3.0)
    shape = cell_shapes(latency.system, latency.point.costs)
    assert 1.0 / shape[0] == pytest.approx(GILBERT, abs=3e-4)
    assert shape[0] == pytest.approx(VORONOI_SHAPE, rel=0.03)


@pytest.mark.parametrize(("policy", "intensity"), [("nearest", 4.0), ("load_aware", 4.0)])
def test_variance_of_association_cells_against_drawn_planes(policy, intensity):
    latency = located(policy, intensity)
    system, costs = latency.system, latency.point.costs
    shapes = cell_shapes(system, costs)
    rng = np.random.default_rng(1)
    side, users, planes = 12.0, 30_000, 8
    spread = np.zeros((planes, 3))
    mean = np.zeros((planes, 3))
    for k in range(planes):
        torus = Torus(system.density, side, rng)
        distance, index = torus.nearest(torus.users(users, rng))
        load = [np.zeros((2, len(points))) for points in torus.points]
        for q, p in enumerate(system.probability):
            tier = choose(system.radio, costs[q], distance)
            for s in range(3):
                for half in range(2):
                    mine = np.flatnonzero(tier[half::2] == s) * 2 + half
                    load[s][half] += p * np.bincount(index[mine, s], minlength=load[s].shape[1])
        unit = users / 2 / side**2
        for s in range(3):
            # The two halves of the users are independent: their product has no sampling noise.
            mean[k, s] = load[s].mean() / unit
            spread[k, s] = (load[s][0] * load[s][1]).mean() / unit**2
    expected = system.probability @ latency.point.association / system.density
    error = mean.std(axis=0, ddof=1) / np.sqrt(planes)
    within(mean.mean(axis=0), expected, error, slack=0.005)
    second = expected**2 * (1.0 + 1.0 / shapes)
    error = spread.std(axis=0, ddof=1) / np.sqrt(planes)
    within(spread.mean(axis=0), second, error, slack=0.01 * second)


def test_gamma_quadrature_integrates_what_it_should():
    for shape in (0.6, VORONOI_SHAPE, 9.0):
        law = CellLaw.gamma(shape)
        assert law.weight @ law.area == pytest.approx(1.0)
        assert law.weight @ law.area**2 == pytest.approx(1.0 + 1.0 / shape)
        busy = np.exp(-law.area)
        exact = gamma.expect(lambda x: np.exp(-x), args=(shape,), scale=1.0 / shape)
        assert law.weight @ busy == pytest.approx(exact, rel=1e-6)
    assert CellLaw.gamma(np.inf).area.tolist() == [1.0]
    with pytest.raises(ValueError, match="shape"):
        CellLaw.gamma(0.0)


@pytest.mark.parametrize("intensity", [9.0, 11.0])
def test_coverage_over_true_cells(intensity):
    """Exact queues at nodes with the true areas of a drawn plane, users at their true distances."""
    latency = uncached(intensity)
    system, model = latency.system, latency.model
    cells = CellLatency.of(latency, get_policy("nearest"))
    rng = np.random.default_rng(2)
    side, users, planes = 12.0, 20_000, 12
    deadlines = np.array([0.8, 1.2])
    covered = np.zeros((planes, 2))
    for k in range(planes):
        torus = Torus(system.density, side, rng)
        distance, index = torus.nearest(torus.users(users, rng))
        area = np.bincount(index[:, 0], minlength=len(torus.points[0])) / users * side**2
        base = latency.point.loads[0]
        own = [base.scaled(a * system.density[0]) for a in np.maximum(area, 1e-9)]
        laws = [model.excess(load) if load.utilisation < 1 else None for load in own]
        wait = np.array([1.0 if law is None else law.wait_probability for law in laws])
        rate = np.array([0.0 if law is None else law.rate for law in laws])
        radio = system.radio.delay(distance[:, 0])
        for q, p in enumerate(system.probability):
            left = deadlines - (radio + system.residual[q, 0])[:, None]
            node = index[:, 0]
            tail = wait[node, None] * np.exp(-rate[node, None] * np.maximum(left, 0.0))
            covered[k] += p * np.where(left < 0, 0.0, 1.0 - tail).mean(axis=0)
    true = covered.mean(axis=0)
    error = covered.std(axis=0, ddof=1) / np.sqrt(planes)
    ours = np.array([cells.coverage(t) for t in deadlines])
    mean_load = np.array([latency.coverage(t) for t in deadlines])
    # What the mixture leaves out: in a large cell users are also farther.
    within(ours, true, error, slack=0.015)
    assert (np.abs(ours - true) < 0.35 * np.abs(mean_load - true)).all()
    assert (mean_load > true + 0.03).all()


def test_even_cells_are_the_mean_load_model():
    latency = located("nearest", 4.0)
    even = CellLatency.of(latency, get_policy("nearest"), [np.inf] * 3)
    assert even.coverage(0.8) == pytest.approx(latency.coverage(0.8), abs=1e-9)
    assert even.mean == pytest.approx(latency.mean, rel=1e-9)


def test_uneven_cells_cost_coverage_and_some_never_clear():
    latency = located("nearest", 8.0)
    cells = CellLatency.of(latency, get_policy("nearest"))
    assert cells.coverage(0.8) < latency.coverage(0.8) - 0.05
    assert cells.mean == np.inf and np.isinf(cells.quantile(0.999))
    law = cells.laws[2]
    assert isinstance(law, MixedDelay) and 0 < law.lost < 1
    assert float(law.cdf(0, np.array(1e12))) == pytest.approx(1 - law.lost)


def test_a_node_that_advertises_its_own_wait_sheds_what_it_cannot_serve():
    latency = located("load_aware", 4.0)
    cells = CellLaw.gamma(3.5, 10)
    policy = get_policy("load_aware")
    wait, loads = own_waits(latency.system, policy, latency.model, latency.point, 2, cells)
    assert (np.diff(wait) >= 0).all()
    assert all(load.utilisation < 1 for load in loads)
    # The busier the larger its cell, but it takes ever less of what its area would bring.
    busy = np.array([load.utilisation for load in loads])
    rate = np.array([load.arrival_rate for load in loads])
    assert (np.diff(busy) > 0).all() and (np.diff(rate / cells.area) <= 1e-9).all()
    mean = np.interp(1.0, cells.area, wait)
    assert mean == pytest.approx(float(latency.point.wait[0, 2]), rel=0.1)


def test_refuses_a_wrong_number_of_shapes():
    latency = located("nearest", 1.0)
    with pytest.raises(ValueError, match="2 shapes for 3 profiles"):
        CellLatency.of(latency, get_policy("nearest"), [3.5, 3.5])


def test_told_the_mean_of_its_tier_a_crowded_node_sheds_nothing():
    latency, policy = located("load_aware", 4.0), get_policy("load_aware")
    told = CellLatency.of(latency, policy, [3.5] * 3, own=False)
    own = CellLatency.of(latency, policy, [3.5] * 3)
    assert told.coverage(0.8) < own.coverage(0.8) - 0.02
    # A policy that looks at no waits does not tell the two apart.
    blind, nearest = located("nearest", 4.0), get_policy("nearest")
    for own_wait in (False, True):
        cells = CellLatency.of(blind, nearest, [3.5] * 3, own=own_wait)
        law = fixed_cells(blind.model, blind.point.loads[2], CellLaw.gamma(3.5))
        assert cells.laws[2].mean == pytest.approx(law.mean)
