"""Where a learned map's node is simulated: nothing is seen at some loads or slots alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from testbed.scenario import Scenario
from testbed.simulation.learned_map_node import Node
from testbed.simulation.learned_maps import HELD_OUT_LOADS, LEAST_SHARE, LOADS, _design, _unseen
from testbed.theory.delay.monotone_surface import MixBasis
from testbed.theory.system import System
from testbed.tier_engine import tier_step_times

pytestmark = pytest.mark.slow

SCENARIO = Path(__file__).parents[2] / "results" / "learned-delay-map" / "scenario.yaml"
SLOTS = (5, 16)
SLOT_THIRDS = 5.0 * (17.0 / 5.0) ** (np.arange(1.0, 3.0) / 3.0)


def node(seed: int) -> Node:
    scenario = Scenario.load(SCENARIO)
    return Node.of(scenario, System.from_scenario(scenario, tier_step_times(scenario)), 0, seed)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_kind_of_mix_is_seen_with_all_loads_and_all_slots(seed: int) -> None:
    cells = list(_design(node(seed), MixBasis(2, 2), SLOTS, 240))
    load, slots, share = np.array([(r, c, w[0]) for r, c, w in cells]).T
    corners = [LEAST_SHARE, 0.5, 1.0 - LEAST_SHARE]
    kinds = [np.isclose(share, x) for x in corners]
    kinds.append(~np.any(kinds, axis=0))
    for edge in LOADS:
        assert set(np.searchsorted(SLOT_THIRDS, slots[load == edge], side="right")) == {0, 1, 2}
    for kind in kinds:
        inside = kind & (load > LOADS[0]) & (load < LOADS[1])
        low, high = (np.log(x / (1 - x)) for x in LOADS)
        place = (np.log(load[inside] / (1 - load[inside])) - low) / (high - low)
        for of_load in range(3):
            assert ((3 * place).astype(int) == of_load).any()
        assert set(np.searchsorted(SLOT_THIRDS, slots[inside], side="right")) == {0, 1, 2}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_held_out_load_is_seen_with_few_and_many_slots(seed: int) -> None:
    cells = list(_unseen(node(seed), SLOTS, 24))
    for load in HELD_OUT_LOADS:
        slots = [c for r, c, _ in cells if r == load]
        assert len(slots) == 24 / len(HELD_OUT_LOADS)
        assert min(slots) < 8 < 10 < max(slots)
