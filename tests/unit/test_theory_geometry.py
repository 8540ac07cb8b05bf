"""Geometry: association, distance laws and their closed forms (Theory A6-A7, C)."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import chi2

from testbed.presets import preset
from testbed.radio import PowerLaw, nearest_distances
from testbed.theory.distance import (
    distance_cdf,
    equal_cost_radius,
    joint_density,
    mean_distances,
    prefers,
)
from testbed.theory.geometry import associate, respond
from testbed.theory.system import System
from tests.unit.significance import LEVEL, kolmogorov, within

MODEST = settings(max_examples=30, deadline=None)


def system(
    density: list[float] | np.ndarray, xi: float = 0.16, alpha: float = 3.5, types: int = 1
) -> System:
    """A system with these tier densities; everything but space is a placeholder."""
    density = np.asarray(density, dtype=float)
    tiers = len(density)
    shape = (types, tiers)
    return System(
        types=tuple(f"q{i}" for i in range(types)),
        names=tuple(f"s{i}" for i in range(tiers)),
        probability=np.full(types, 1.0 / types),
        tokens=np.ones(types),
        output_tokens=np.ones(types),
        reusable=np.zeros(shape),
        residual=np.zeros(shape),
        saving=np.zeros(shape),
        occupancy=np.ones(shape),
        fraction=density / density.sum(),
        persistent=np.zeros(tiers),
        concurrency=np.ones(tiers, dtype=int),
        node_density=float(density.sum()),
        intensity=1.0,
        radio=PowerLaw(xi, alpha),
    )


@st.composite
def spaces(draw: st.DrawFn) -> tuple[System, np.ndarray]:
    tiers = draw(st.integers(1, 6))
    density = [10.0 ** draw(st.floats(-2, 1)) for _ in range(tiers)]
    alpha = draw(st.sampled_from([1.01, 1.3, 2.0, 2.4, 3.0, 3.5, 4.0, 5.0]))
    xi = 10.0 ** draw(st.floats(-6, 3))
    costs = np.array([[draw(st.floats(0, 3)) for _ in range(tiers)]])
    return system(density, xi, alpha), costs


@MODEST
@given(spaces())
def test_rows_sum_to_one(space: tuple[System, np.ndarray]) -> None:
    where, costs = space
    association = associate(where, costs)
    assert association.sum() == pytest.approx(1.0, abs=1e-10)
    assert (association >= 0).all()


@MODEST
@given(spaces(), st.floats(0.1, 10.0), st.floats(-2, 2))
def test_scaling_space_and_shifting_costs_change_nothing(
    space: tuple[System, np.ndarray], k: float, shift: float
) -> None:
    where, costs = space
    association = associate(where, costs)
    # λ·k² and r/k: the radio delay stays the same if ξ grows by k^α.
    radio = PowerLaw(where.radio.xi * k**where.radio.alpha, where.radio.alpha)  # type: ignore[attr-defined]
    scaled = replace(where, node_density=where.node_density * k**2, radio=radio)
    assert associate(scaled, costs) == pytest.approx(association, abs=1e-9)
    # A shift rounds each cost by 1e-16, and beside a tie A moves by that to the power 2/α.
    tied = np.ptp(costs) < 1e-3
    assert associate(where, costs + shift) == pytest.approx(association, abs=1e-5 if tied else 1e-9)


@MODEST
@given(spaces(), st.randoms(use_true_random=False))
def test_permuting_profiles_permutes_the_result(space: tuple[System, np.ndarray], random) -> None:
    where, costs = space
    order = list(range(costs.shape[1]))
    random.shuffle(order)
    moved = replace(where, fraction=where.fraction[order])
    assert associate(moved, costs[:, order]) == pytest.approx(
        associate(where, costs)[:, order], abs=1e-11
    )


@MODEST
@given(spaces(), st.floats(0.05, 0.95))
def test_splitting_a_profile_in_two_equal_copies_changes_nothing(
    space: tuple[System, np.ndarray], part: float
) -> None:
    where, costs = space
    split = np.append(where.density[1:], where.density[0] * np.array([part, 1 - part]))
    copies = np.concatenate([costs[:, 1:], costs[:, :1], costs[:, :1]], axis=1)
    other = associate(
        system(split, where.radio.xi, where.radio.alpha),  # type: ignore[attr-defined]
        copies,
    )
    whole = associate(where, costs)
    assert other[:, -2:].sum() == pytest.approx(whole[0, 0], abs=1e-11)
    assert other[:, :-2] == pytest.approx(whole[:, 1:], abs=1e-11)
    assert other[0, -2] == pytest.approx(part * whole[0, 0], abs=1e-11)


@pytest.mark.parametrize("alpha", [1.001, 1.5, 2.0, 3.0, 4.0, 6.0])
@pytest.mark.parametrize("xi", [1e-12, 0.16, 1e9])
def test_equal_costs_give_the_placement(alpha: float, xi: float) -> None:
    where = system([0.4, 0.4, 0.2], xi, alpha)
    assert associate(where, np.full((1, 3), 0.7))[0] == pytest.approx([0.4, 0.4, 0.2], abs=1e-12)


@pytest.mark.parametrize("gap", [0.0, 1e-12, 0.01, 0.3, 5.0, 100.0])
def test_two_tiers_at_alpha_2_have_a_closed_form(gap: float) -> None:
    """A_far = λ_far/(λ_far + λ_near)·exp(−π λ_near Δ/ξ): beyond Δ both exposures grow linearly."""
    near, far, xi = 0.7, 1.9, 0.3
    association = associate(system([near, far], xi, 2.0), np.array([[0.2, 0.2 + gap]]))[0]
    expected = far / (near + far) * np.exp(-np.pi * near * gap / xi)
    assert association[1] == pytest.approx(expected, abs=1e-13)


def mass_within(where: System, costs: np.ndarray, s: int, reach: float, moment: int = 0) -> float:
    """∫₀^reach r^moment times Theory C3's integrand by adaptive quadrature, split at its kinks."""
    kinks = equal_cost_radius(where.radio, 0.0, costs[0], costs[0, s])
    ends = np.unique(np.clip(np.concatenate([[0.0], kinks, [reach]]), 0.0, reach))

    def density(r: float) -> float:
        return float(joint_density(where, costs, 0, s, r)) * r**moment

    return sum(
        quad(density, a, b, epsabs=1e-13, epsrel=1e-12, limit=400)[0] for a, b in pairwise(ends)
    )


@pytest.mark.parametrize("alpha", [1.02, 1.5, 2.0, 2.7, 3.5, 4.0, 5.3])
def test_each_entry_agrees_with_adaptive_quadrature_in_the_radius(alpha: float) -> None:
    rng = np.random.default_rng(int(alpha * 100))
    for _ in range(2):
        where = system(rng.dirichlet(np.ones(4)) * 2.0, 0.2, alpha)
        costs = rng.uniform(0.0, 1.0, (1, 4))
        association = associate(where, costs)
        for s in range(4):
            reach = 6.0 / np.sqrt(where.density[s])
            total = mass_within(where, costs, s, reach)
            assert association[0, s] == pytest.approx(total, abs=1e-9)
            share = mass_within(where, costs, s, reach, 1)
            mean = mean_distances(where, costs)[0, s]
            assert mean * association[0, s] == pytest.approx(share, abs=1e-9)


def test_near_ties_are_continuous() -> None:
    where = system([0.5, 0.3, 0.2], 0.16, 3.5)
    tied = associate(where, np.array([[0.4, 0.4, 0.9]]))
    for gap in (1e-14, 1e-12, 1e-10):
        beside = associate(where, np.array([[0.4, 0.4 + gap, 0.9]]))
        assert beside.sum() == pytest.approx(1.0, abs=1e-12)
        # A moves like gap^(2/α) beside a tie.
        assert np.abs(beside - tied).max() < 10 * (gap / 0.16) ** (2 / 3.5)


def test_a_tier_without_nodes_or_at_infinite_cost_gets_nothing() -> None:
    where = system([0.5, 0.0, 0.5])
    assert associate(where, np.zeros((1, 3)))[0] == pytest.approx([0.5, 0.0, 0.5], abs=1e-12)
    three = system([0.4, 0.4, 0.2])
    closed = associate(three, np.array([[0.1, np.inf, 0.3]]))[0]
    pair = associate(system([0.4, 0.2]), np.array([[0.1, 0.3]]))[0]
    assert closed[1] == 0.0
    assert closed[[0, 2]] == pytest.approx(pair, abs=1e-12)
    assert associate(three, np.array([[0.0, 1e6, 0.0]]))[0, 1] == 0.0


@MODEST
@given(spaces())
def test_the_response_is_the_derivative(space: tuple[System, np.ndarray]) -> None:
    where, costs = space
    tiers = costs.shape[1]
    # Beside a tie the derivative of A is unbounded from α = 4 up; keep costs apart.
    costs = np.sort(costs) + 0.2 * np.arange(tiers)
    association, response = respond(where, costs)
    assert association == pytest.approx(associate(where, costs), abs=1e-12)
    assert response[0] == pytest.approx(response[0].T)
    assert response[0].sum(axis=1) == pytest.approx(np.zeros(tiers), abs=1e-9)
    step = 1e-6
    for t in range(tiers):
        moved = np.zeros(tiers)
        moved[t] = step
        slope = (associate(where, costs + moved) - associate(where, costs - moved)) / (2 * step)
        scale = max(1.0, float(np.abs(response).max()))
        assert slope[0] == pytest.approx(response[0, :, t], abs=2e-5 * scale)


def test_one_tier_has_the_nearest_neighbour_law() -> None:
    where = system([1.7], 0.3, 2.5)
    costs = np.array([[0.4]])
    r = np.linspace(0.0, 2.0, 9)
    law = 1.0 - np.exp(-np.pi * 1.7 * r**2)
    assert distance_cdf(where, costs, 0, 0, r) == pytest.approx(law, abs=1e-12)
    assert mean_distances(where, costs)[0, 0] == pytest.approx(0.5 / np.sqrt(1.7), rel=1e-12)


def test_the_conditional_distance_law_is_the_integral_of_the_joint_density() -> None:
    where = system([0.5, 0.3, 0.2])
    costs = np.array([[0.5, 0.45, 0.1]])
    association = associate(where, costs)[0]
    for s in range(3):
        for r in (0.3, 0.8, 1.6):
            cdf = float(distance_cdf(where, costs, 0, s, r))
            assert cdf * association[s] == pytest.approx(mass_within(where, costs, s, r), abs=1e-9)
    nobody = system([1.0, 0.0])
    assert distance_cdf(nobody, np.zeros((1, 2)), 0, 1, np.array([1.0]))[0] == 0.0


def test_the_pairwise_rule_has_the_equal_cost_radius_as_its_boundary() -> None:
    radio = PowerLaw(0.16, 3.5)
    for cost, other in ((0.5, 0.2), (0.2, 0.5), (0.3, 0.3)):
        for r in (0.2, 0.8, 2.0):
            edge = float(equal_cost_radius(radio, r, cost, other))
            assert not prefers(radio, r, edge * 1.001 + 1e-9, cost, other)
            if edge > 0:
                assert prefers(radio, r, edge * 0.999, cost, other)


def test_association_and_distance_agree_with_monte_carlo() -> None:
    """2·10⁵ exact nearest-distance draws a type (Theory F4), at the level of three standard errors:
    every association, their joint fit, every mean distance, and every distance law everywhere."""
    scenario = preset("paper-baseline")
    where = System.from_scenario(scenario)
    wait = np.array([0.0, 0.01, 0.11])
    costs = where.residual + wait
    association = associate(where, costs)
    means = mean_distances(where, costs)
    count = 200_000
    rng = np.random.default_rng(20250)
    seen = np.zeros((3, 3))
    own_mean, own_error, gaps = np.zeros((3, 3)), np.zeros((3, 3)), np.zeros((3, 3))
    for q in range(3):
        distance = nearest_distances(where.density, count, rng)
        chosen = (where.radio.delay(distance) + costs[q]).argmin(axis=1)
        seen[q] = np.bincount(chosen, minlength=3) / count
        for s in range(3):
            own = np.sort(distance[chosen == s, s])
            own_mean[q, s], own_error[q, s] = own.mean(), own.std() / np.sqrt(len(own))
            at = np.linspace(0, len(own) - 1, 200).astype(int)
            law = distance_cdf(where, costs, q, s, own[at])
            gaps[q, s] = np.abs(law - (at + 0.5) / len(own)).max()
            assert gaps[q, s] < kolmogorov(len(own), laws=9) + 0.5 / len(own)
    z = within(seen, association, np.sqrt(association * (1 - association) / count))
    fit = float((count * (seen - association) ** 2 / association).sum())
    assert chi2.sf(fit, df=6) > LEVEL
    far = within(own_mean, means, own_error)
    print(
        f"{count} samples a type: association off by {np.abs(seen - association).max():.2e}, "
        f"{z:.2f} standard errors (of 9; chi-square {fit:.1f} of 6); mean distance by {far:.2f}; "
        f"distance CDF by {gaps.max():.2e}"
    )
