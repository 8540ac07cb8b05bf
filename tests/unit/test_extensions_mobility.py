"""Mobility: handover and warm state, against users that move over drawn planes."""

import numpy as np
import pytest

from testbed.presets import preset
from testbed.scenario import Backhaul, Users
from testbed.simulation.users import Crowd
from testbed.theory.extensions.mobility import (
    Session,
    displacements,
    next_turn,
    stay_probability,
)
from testbed.theory.predict import locate
from testbed.theory.prefill import prefill_time
from tests.unit.plane import Torus, choose
from tests.unit.significance import within

SCENARIO = preset("paper-baseline")
MOVES = np.array([0.05, 0.3, 1.0])
SESSION = Session(context=1500.0, new_tokens=100.0)
BACKHAUL = Backhaul(rate=1e9, latency=0.02)


@pytest.fixture(scope="module")
def latency():
    return locate(SCENARIO)


def moves(latency, q, rng, planes, users, side=12.0):
    """Per plane and move: share that stays with each tier's same node, and the time of the next
    turn, radio and prefill and mean wait, for each way to go on."""
    system, point = latency.system, latency.point
    shared = np.minimum(system.reusable[q], SESSION.context)
    kappa = SCENARIO.memory.per_token
    warm = float(prefill_time(SCENARIO.prefill, SESSION.new_tokens, SESSION.context))
    cold = prefill_time(SCENARIO.prefill, SESSION.context - shared + SESSION.new_tokens, shared)
    size = (SESSION.context - shared) * kappa
    carried = warm + np.where(size > 0, BACKHAUL.latency + size / BACKHAUL.rate, 0.0)
    stays = np.zeros((planes, 3, len(MOVES)))
    times = np.zeros((planes, 3, len(MOVES)))
    row = np.arange(users)
    for k in range(planes):
        torus = Torus(system.density, side, rng)
        before = torus.users(users, rng)
        distance, index = torus.nearest(before)
        tier = choose(system.radio, point.costs[q], distance)
        node = index[row, tier]
        place = np.empty((users, 2))
        for s in range(3):
            place[tier == s] = torus.points[s][node[tier == s]]
        angle = rng.uniform(0, 2 * np.pi, users)
        for j, d in enumerate(MOVES):
            after = before + d * np.column_stack([np.cos(angle), np.sin(angle)])
            distance, index = torus.nearest(after)
            now = choose(system.radio, point.costs[q], distance)
            same = (now == tier) & (index[row, now] == node)
            stays[k, :, j] = [(same & (tier == s)).mean() for s in range(3)]
            old = system.radio.delay(torus.apart(after, place)) + point.wait[q, tier] + warm
            new = system.radio.delay(distance[row, now]) + point.wait[q, now]
            times[k, 0, j] = old.mean()
            times[k, 1, j] = (new + np.where(same, warm, cold[now])).mean()
            times[k, 2, j] = (new + np.where(same, warm, carried[now])).mean()
    return stays, times


def session_turn(latency, q, moved=MOVES, backhaul=BACKHAUL):
    return next_turn(
        latency.system,
        latency.point.costs,
        latency.point.wait,
        q,
        moved,
        SESSION,
        prefill=SCENARIO.prefill,
        per_token=SCENARIO.memory.per_token,
        backhaul=backhaul,
    )


@pytest.mark.parametrize("q", [0, 2])
def test_handover_and_next_turn_against_drawn_planes(latency, q):
    planes = 24
    stays, times = moves(latency, q, np.random.default_rng(q + 1), planes, 1_500)
    expected = stay_probability(latency.system, latency.point.costs, MOVES)[q]
    error = stays.std(axis=0, ddof=1) / np.sqrt(planes)
    within(stays.mean(axis=0), expected, error, slack=2e-3)
    turn = session_turn(latency, q)
    np.testing.assert_allclose(turn.same, expected.sum(axis=0))
    error = times.std(axis=0, ddof=1) / np.sqrt(planes)
    ways = np.array([turn.stay, turn.rehome, turn.migrate])
    within(times.mean(axis=0), ways, error, slack=2e-3 * ways)


def test_who_does_not_move_stays_and_who_moves_far_does_not(latency):
    d = np.array([0.0, 0.1, 0.4, 1.0, 3.0, 12.0])
    stay = stay_probability(latency.system, latency.point.costs, d)
    np.testing.assert_allclose(stay[:, :, 0], latency.point.association, atol=2e-5)
    total = stay.sum(axis=1)
    assert (np.diff(total, axis=1) < 0).all()
    assert total[:, -1].max() < 1e-6


def test_scaling_all_lengths_changes_nothing(latency):
    """Half the density at √2 the distances, the radio delay being rescaled to match."""
    alpha = SCENARIO.radio.alpha
    xi = SCENARIO.radio.xi * 2 ** (-alpha / 2)
    wide = locate(
        SCENARIO.replace(
            radio={"model": "power_law", "xi": xi, "alpha": alpha},
            nodes={"density": 0.5},
            demand={"intensity": SCENARIO.demand.intensity / 2},
        )
    )
    ours = stay_probability(wide.system, wide.point.costs, MOVES * np.sqrt(2))
    np.testing.assert_allclose(
        ours, stay_probability(latency.system, latency.point.costs, MOVES), rtol=1e-4, atol=1e-6
    )


def test_warm_state_is_worth_staying_for_until_the_path_outgrows_it(latency):
    d = np.linspace(0.05, 3.0, 30)
    best = session_turn(latency, 0, d).best
    assert best[0] == 0 and best[-1] != 0
    assert (np.diff((best == 0).astype(int)) <= 0).all()
    # A fast backhaul lets the state follow the user at once; a slow one makes recomputing better.
    fast = session_turn(latency, 0, d, Backhaul(rate=1e13))
    slow = session_turn(latency, 0, d, Backhaul(rate=1e7))
    assert (fast.best == 0).sum() <= (best == 0).sum() <= (slow.best == 0).sum()
    assert fast.best[-1] == 2 and slow.best[-1] == 1


@pytest.mark.parametrize(("seconds", "memory"), [(5.0, 60.0), (120.0, 30.0)])
def test_displacement_of_gauss_markov_users_against_their_simulation(seconds, memory):
    users = Users(count=1_500, mobility="gauss_markov", speed=0.002, memory=memory)
    crowd = Crowd(users, np.array([1e3, 1e3]), seed=1)
    crowd._since[:] = 0.0
    start = crowd._place.copy()
    while (crowd._since < seconds).any():
        crowd.positions(np.full(1_500, seconds))
    moved = np.hypot(*(crowd._place - start).T)
    law = displacements(users, seconds, 400)
    within(moved.mean(), law.mean(), moved.std() / np.sqrt(len(moved)), slack=0.003 * law.mean())
    middle = np.median(law)
    within((moved < middle).mean(), 0.5, np.sqrt(0.25 / len(moved)))


def test_other_motions():
    assert displacements(Users(), 100.0).tolist() == [0.0] * 32
    walker = Users(count=1, mobility="random_waypoint", speed=0.002)
    assert displacements(walker, 100.0, 2) == pytest.approx([0.2, 0.2])
