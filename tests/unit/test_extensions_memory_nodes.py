"""Memory nodes: compute and memory as two point processes, against drawn planes."""

import numpy as np
import pytest

from testbed.errors import ScenarioError
from testbed.presets import preset
from testbed.radio import PowerLaw
from testbed.scenario import Backhaul
from testbed.theory import predict
from testbed.theory.extensions.memory_nodes import MemoryPool, solve
from tests.unit.plane import Torus
from tests.unit.significance import within

SCENARIO = preset("paper-baseline").with_field("demand.intensity", 2.0)


def pool(rate=1e9, density=1.5, latency=0.01):
    return MemoryPool(
        density, Backhaul(rate=rate, latency=latency, decompression=1e-10), PowerLaw(0.05, 2.0)
    )


def draw(found, rng, planes, users, side=10.0, rule_nodes=1):
    """Requests on drawn planes: source of the state and time without queues, a row a plane.

    Each user goes to the nearest of its compute nodes, or, with ``rule_nodes`` above 1, to the one
    of its nearest few whose best pair is cheapest.
    """
    pairs = found.pairs
    costs = pairs.costs(found.link_utilisation)
    shares = np.zeros((planes, *found.association.shape))
    times = np.zeros(planes)
    for k in range(planes):
        compute = Torus([pairs.compute_density], side, rng)
        memory = Torus(pairs.memory_density, side, rng)
        away, _ = memory.nearest(compute.points[0])
        with np.errstate(invalid="ignore"):
            path = pairs.pool.path.delay(away)
        places = compute.users(users, rng)
        distance, node = compute._trees[0].query(places, k=rule_nodes)
        distance, node = distance.reshape(users, -1), node.reshape(users, -1)
        for q, p in enumerate(pairs.probability):
            ways = np.column_stack([costs[q] + path, np.full(len(path), pairs.whole[q])])
            whole = pairs.radio.delay(distance) + ways.min(axis=1)[node]
            best = node[np.arange(users), whole.argmin(axis=1)]
            source = ways.argmin(axis=1)[best]
            shares[k, q] = np.bincount(source, minlength=ways.shape[1]) / users
            times[k] += p * whole.min(axis=1).mean()
    return shares, times


def test_association_and_delay_against_drawn_planes():
    found = solve(SCENARIO, pool())
    assert found.converged and found.feasible
    planes = 50
    shares, times = draw(found, np.random.default_rng(1), planes, 200)
    error = shares.std(axis=0, ddof=1) / np.sqrt(planes)
    within(shares.mean(axis=0), found.association, error, slack=2e-3)
    wait = float(found.load.weights @ found.law.mean)
    within(times.mean(), found.mean - wait, times.std(ddof=1) / np.sqrt(planes))


def test_choosing_the_pair_jointly_gains_and_the_model_leaves_it_out():
    found = solve(SCENARIO, pool())
    rng = np.random.default_rng(2)
    _, nearest = draw(found, rng, 20, 200)
    _, joint = draw(found, np.random.default_rng(2), 20, 200, rule_nodes=5)
    assert joint.mean() < nearest.mean()
    assert joint.mean() > 0.9 * nearest.mean()


def test_links_carry_what_the_association_asks_of_them():
    found = solve(SCENARIO, pool())
    pairs = found.pairs
    rng = np.random.default_rng(3)
    bytes_ = pairs.probability @ (found.association[:, :-1] * pairs.size)
    expected = 2.0 * bytes_ / 1e9 / np.maximum(pairs.memory_density, 1e-300)
    np.testing.assert_allclose(found.link_utilisation, expected, rtol=1e-6)
    # The same from requests: what a drawn request asks for, times the rate at a memory node.
    q = rng.choice(3, 100_000, p=pairs.probability)
    moved = np.array([rng.choice(4, p=row / row.sum()) for row in found.association[q[:5_000]]])
    drawn = np.zeros(5_000)
    for s in range(3):
        drawn += np.where(moved == s, pairs.size[q[:5_000], s], 0.0)
    within(drawn.mean(), bytes_.sum(), drawn.std() / np.sqrt(5_000))


def test_without_useful_memory_it_is_a_network_of_uncached_nodes():
    found = solve(SCENARIO, pool(rate=1e3))
    assert (found.association[:, -1] == 1.0).all()
    uncached = SCENARIO.model_dump(mode="json", exclude_none=True)["profiles"][0]
    alone = predict(SCENARIO.replace(profiles=[{**uncached, "fraction": 1.0}], policy="nearest"))
    assert found.mean == pytest.approx(alone.ttft.mean, rel=1e-4)
    for tau in (0.8, 1.2):
        asked = SCENARIO.replace(
            profiles=[{**uncached, "fraction": 1.0}],
            policy="nearest",
            targets={"coverage_at": [tau]},
        )
        expected = predict(asked).ttft.coverage[f"{tau:g}"]
        assert found.coverage(tau) == pytest.approx(expected, abs=3e-3)


def test_faster_and_denser_memory_is_used_more_and_helps():
    slow, fast = solve(SCENARIO, pool(rate=6e8)), solve(SCENARIO, pool(rate=4e9))
    dense = solve(SCENARIO, pool(rate=4e9, density=6.0))
    assert slow.association[:, -1].sum() > fast.association[:, -1].sum()
    assert slow.mean > fast.mean > dense.mean
    assert fast.coverage(0.8) < dense.coverage(0.8)
    assert fast.load.utilisation < solve(SCENARIO, pool(rate=1e3)).load.utilisation


def test_overload_is_said():
    busy = solve(SCENARIO.with_field("demand.intensity", 40.0), pool())
    assert not busy.feasible and "compute nodes" in str(busy.reason)
    assert busy.coverage(0.8) == 0.0 and busy.mean == np.inf


def test_refuses_no_memory():
    with pytest.raises(ScenarioError, match="memory nodes"):
        solve(SCENARIO, pool(density=0.0))
