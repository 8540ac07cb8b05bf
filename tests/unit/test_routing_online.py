"""Online formulas: node cost, admission, catalogue, migration (Theory G)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.errors import ScenarioError
from testbed.presets import preset
from testbed.routing.admission import Admission, fallback_profile
from testbed.routing.catalogue import (
    Catalogue,
    CatalogueEntry,
    EngineIdentity,
    candidates,
    usable_depth,
)
from testbed.routing.cost import margin, node_costs
from testbed.routing.migration import migrate, migration_bytes
from testbed.routing.policies import get_policy

MODEST = settings(max_examples=50, deadline=None)
IDENTITY = EngineIdentity(model="m", tokenizer="t", epoch=3)


# --- Cost (G1) -------------------------------------------------------------------------------


def test_the_cost_adds_up_what_the_policy_looks_at() -> None:
    radio, prefill, wait = np.array([0.1, 0.2]), np.array([0.5, 0.1]), np.array([0.0, 0.3])
    psi = margin(1.5, [0.0, 0.2])
    aware = node_costs(get_policy("load_aware"), radio, prefill, wait, fetch=[0, 0.05], psi=psi)
    assert aware == pytest.approx([0.6, 0.2 + 0.1 + 0.05 + 0.3 + 0.3])
    blind = node_costs(get_policy("prefix_only"), radio, prefill, wait, fetch=[0, 0.05], psi=psi)
    assert blind == pytest.approx([0.6, 0.35])
    near = node_costs(get_policy("nearest"), radio, prefill, [np.inf, np.inf])
    assert near == pytest.approx(radio)


# --- Admission (G3) --------------------------------------------------------------------------


@MODEST
@given(st.lists(st.tuples(st.sampled_from(["deep", "shallow", "uncached"]), st.floats(0, 2))))
def test_admission_is_a_hysteresis(events: list[tuple[str, float]]) -> None:
    gate = Admission(high=0.9, low=0.6, fallback="uncached")
    closed = {"deep": False, "shallow": False}
    for tier, rho in events:
        opened = gate.update(tier, rho)
        if tier == "uncached":
            assert opened
            continue
        if rho >= 0.9:
            closed[tier] = True
        elif rho <= 0.6:
            closed[tier] = False
        assert opened == gate.admits(tier) == (not closed[tier])
    assert gate.admits("uncached")
    assert gate.closed == {tier for tier, shut in closed.items() if shut}


def test_the_next_best_candidate_is_tried() -> None:
    gate = Admission(high=0.9, low=0.6, fallback="uncached")
    tiers = ["deep", "shallow", "uncached"]
    costs = np.array([0.1, 0.2, 0.9])
    assert gate.choose(costs, tiers) == 0
    gate.update_all({"deep": 0.95, "shallow": 1.2, "uncached": 1.2})
    assert gate.choose(costs, tiers) == 2
    assert gate.choose(costs[:2], tiers[:2]) is None
    gate.update("shallow", 0.7)
    assert gate.choose(costs, tiers) == 2
    gate.update("shallow", 0.6)
    assert gate.choose(costs, tiers) == 1


def test_admission_comes_from_the_scenario() -> None:
    scenario = preset("paper-baseline")
    assert fallback_profile(scenario) == "uncached"
    never = Admission.from_scenario(scenario)
    assert never.update("deep", 50.0)
    closing = Admission.from_scenario(scenario.with_field("routing.admission_high", 0.8))
    assert not closing.update("deep", 0.8)
    assert closing.update("uncached", 5.0)
    with pytest.raises(ScenarioError, match="admission_low"):
        Admission(high=0.5, low=0.7, fallback="x")


# --- Catalogue (G2, G5) ----------------------------------------------------------------------


def entry(node: int, profile: str, **changes: object) -> CatalogueEntry:
    return replace(CatalogueEntry(node, profile, IDENTITY), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"tokenizer": "other"},
        {"adapter": "lora"},
        {"privacy_domain": "hospital"},
        {"epoch": 2},
    ],
)
def test_nodes_that_may_not_serve_are_dropped(change: dict[str, object]) -> None:
    odd = entry(1, "deep", identity=replace(IDENTITY, **change))  # type: ignore[arg-type]
    entries = [entry(0, "deep"), odd]
    assert candidates(entries, IDENTITY, np.array([2.0, 1.0])) == [0]
    assert usable_depth(odd, IDENTITY, [("h", 10)]) == 0


def test_the_nearest_few_of_each_profile_remain() -> None:
    entries = [entry(i, p) for i, p in enumerate(["deep", "flat", "deep", "deep", "flat"])]
    far = np.array([3.0, 5.0, 1.0, 2.0, np.inf])
    assert candidates(entries, IDENTITY, far) == [2, 1]
    assert candidates(entries, IDENTITY, far, per_profile=2) == [2, 3, 1]
    assert candidates(entries, IDENTITY, far, exclude=[2]) == [3, 1]


def test_a_farther_node_of_a_profile_never_wins_at_equal_waits() -> None:
    rng = np.random.default_rng(0)
    policy = get_policy("load_aware")
    for _ in range(20):
        profiles = rng.integers(0, 3, 12)
        entries = [entry(i, str(p)) for i, p in enumerate(profiles)]
        far = rng.random(12)
        cost = node_costs(policy, far, rng.random(3)[profiles], rng.random(3)[profiles])
        assert int(cost.argmin()) in candidates(entries, IDENTITY, far)


def test_a_hit_is_as_deep_as_what_can_be_verified() -> None:
    holding = entry(0, "deep", prefixes={"a": 128, "b": 512, "c": 2048})
    chain = [("a", 128), ("b", 512), ("x", 1024), ("c", 4096)]
    assert usable_depth(holding, IDENTITY, chain) == 512  # c's depth does not match
    assert usable_depth(holding, IDENTITY, [("z", 64)]) == 0
    newer = replace(IDENTITY, epoch=4)
    ahead = replace(holding, identity=newer)
    # A newer epoch may serve, but its state is not the one that was promised.
    assert ahead.identity.serves(IDENTITY) and usable_depth(ahead, IDENTITY, chain) == 0
    rotated = replace(holding, identity=replace(IDENTITY, position_encoding="alibi"))
    assert rotated.identity.serves(IDENTITY) and usable_depth(rotated, IDENTITY, chain) == 0


def test_a_catalogue_changes_by_copies() -> None:
    first = Catalogue((entry(0, "deep"), entry(1, "flat")))
    second = first.updated(entry(1, "flat", wait=0.5)).updated(entry(2, "deep"))
    assert [e.node for e in second.entries] == [0, 1, 2]
    assert second.entries[1].wait == 0.5 and first.entries[1].wait == 0.0
    assert [e.node for e in second.without(1).entries] == [0, 2]


# --- Migration (G4) --------------------------------------------------------------------------


@MODEST
@given(st.integers(2, 6), st.integers(0, 2**32 - 1), st.floats(0, 2))
def test_migration_keeps_the_budget_and_the_nodes(size: int, seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    current, target = rng.dirichlet(np.ones(size)), rng.dirichlet(np.ones(size))
    cost = rng.uniform(1, 5, (size, size))
    whole = migrate(current, target, cost, np.inf)
    assert whole.part == 1.0
    assert whole.fraction == pytest.approx(target, abs=1e-9)
    # No single direct plan is cheaper: compare with moving every surplus in proportion.
    surplus, lack = np.maximum(current - target, 0), np.maximum(target - current, 0)
    naive = np.outer(surplus, lack / max(lack.sum(), 1e-300))
    assert whole.cost <= migration_bytes(naive, cost) + 1e-9
    budget = share * whole.cost
    step = migrate(current, target, cost, budget)
    assert step.cost <= budget * (1 + 1e-9) + 1e-12
    assert step.fraction.sum() == pytest.approx(1.0)
    assert (step.fraction >= -1e-12).all() and (step.moves >= -1e-12).all()
    left = current - step.moves.sum(axis=1) + step.moves.sum(axis=0)
    assert left == pytest.approx(step.fraction, abs=1e-9)
    assert migration_bytes(step.moves, cost) == pytest.approx(step.cost, abs=1e-9)


def test_migration_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="sum to"):
        migrate(np.array([0.5, 0.5]), np.array([0.5, 0.6]), np.ones((2, 2)), 1.0)
    with pytest.raises(ValueError, match="budget"):
        migrate(np.array([0.5, 0.5]), np.array([0.4, 0.6]), np.ones((2, 2)), -1.0)
