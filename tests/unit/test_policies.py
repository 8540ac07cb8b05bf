"""Policies: one cost serves theory, simulation and cluster."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.errors import ScenarioError
from testbed.routing.policies import POLICIES, Policy, get_policy, register

seconds = st.lists(st.floats(0, 10), min_size=1, max_size=6)


@given(seconds, st.randoms())
def test_load_aware_takes_the_least_predicted_ttft(radio, random):
    prefill = np.array([random.random() for _ in radio])
    wait = np.array([random.random() for _ in radio])
    chosen = get_policy("load_aware").choose(np.array(radio), prefill, wait)
    total = np.array(radio) + prefill + wait
    assert total[chosen] == total.min()


@given(seconds)
def test_nearest_looks_at_distance_alone(radio):
    rng = np.random.default_rng(0)
    chosen = get_policy("nearest").choose(
        np.array(radio), rng.random(len(radio)), np.full(len(radio), np.inf)
    )
    assert radio[chosen] == min(radio)


def test_an_infinite_wait_repels_only_who_looks():
    radio, prefill = np.array([0.0, 1.0]), np.array([0.0, 0.0])
    wait = np.array([np.inf, 0.0])
    assert get_policy("load_aware").choose(radio, prefill, wait) == 1
    assert get_policy("prefix_only").choose(radio, prefill, wait) == 0
    for policy in POLICIES.values():
        assert not np.isnan(policy.fixed_cost(prefill, wait)).any()


def test_unknown_and_taken_names():
    with pytest.raises(ScenarioError, match="'psychic' is not one of load_aware, nearest"):
        get_policy("psychic")
    with pytest.raises(ScenarioError, match="registered already"):
        register(Policy("nearest", 0.0, 0.0, ""))
