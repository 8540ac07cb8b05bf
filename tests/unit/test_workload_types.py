"""Request types: exact means, the stated loss, and an assignment that a scenario repeats."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.errors import ScenarioError
from testbed.workload.types import cluster, nearest_type

few = settings(max_examples=40, deadline=None)


@st.composite
def requests(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    n = draw(st.integers(1, 40))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    lengths = rng.integers(1, 60, n)
    hits = np.minimum(rng.integers(0, 3, (n, 2)) * 16, lengths[:, None] - 1)
    return lengths, hits


@few
@given(requests(), st.integers(1, 8))
def test_types_are_means_and_state_their_loss(drawn: tuple[np.ndarray, np.ndarray], k: int) -> None:
    lengths, hits = drawn
    found = cluster(lengths, hits, types=k)
    assert 1 <= len(found) <= k
    assert found.probability.sum() == pytest.approx(1)
    for q in range(len(found)):
        mine = found.type_index == q
        assert found.probability[q] == pytest.approx(mine.mean())
        assert found.tokens[q] == pytest.approx(lengths[mine].mean())
        assert found.reusable[q] == pytest.approx(hits[mine].mean(axis=0))
    expected = np.abs(hits - found.reusable[found.type_index]).mean(axis=0)
    assert found.loss == pytest.approx(expected)
    # The law of total expectation: nothing of the mean reuse is lost, whatever k.
    assert found.probability @ found.reusable == pytest.approx(hits.mean(axis=0))
    assert (np.diff(found.tokens) >= 0).all()
    assert (found.reusable <= found.tokens[:, None]).all()


@few
@given(requests(), st.integers(1, 8))
def test_a_scenario_assigns_its_requests_as_when_it_was_made(
    drawn: tuple[np.ndarray, np.ndarray], k: int
) -> None:
    lengths, hits = drawn
    found = cluster(lengths, hits, types=k)
    again = nearest_type(lengths, hits, found.tokens, found.reusable)
    points = np.column_stack([lengths, hits]).astype(float)
    centres = np.column_stack([found.tokens, found.reusable])
    distance = np.linalg.norm(points[:, None] - centres[None], axis=2)
    mine = np.arange(len(points))
    assert distance[mine, again] == pytest.approx(distance[mine, found.type_index], abs=1e-9)


@few
@given(requests(), st.sampled_from([0.0, 1.0, 4.0, 100.0]))
def test_an_error_bound_is_kept(drawn: tuple[np.ndarray, np.ndarray], bound: float) -> None:
    lengths, hits = drawn
    found = cluster(lengths, hits, error_bound=bound)
    assert found.loss.max() <= bound + 1e-12
    if bound >= 16:
        assert len(found) <= 3


def test_as_many_types_as_distinct_requests_lose_nothing() -> None:
    lengths = np.array([10, 10, 20, 30])
    hits = np.array([[0], [0], [8], [16]])
    found = cluster(lengths, hits, types=10)
    assert len(found) == 3 and found.loss.max() == 0 and found.length_loss == 0


def test_paths_that_a_profile_tells_apart_become_different_types() -> None:
    lengths = np.full(40, 500)
    hits = np.zeros((40, 2), dtype=int)
    hits[:20, 0], hits[20:, 1] = 400, 400
    found = cluster(lengths, hits, types=2)
    assert len(set(found.type_index[:20])) == 1 and found.type_index[0] != found.type_index[-1]
    assert found.loss.max() == 0


@pytest.mark.parametrize(
    "wrong", [{}, {"types": 1, "error_bound": 1.0}, {"types": 0}, {"error_bound": -1.0}]
)
def test_wrong_requests_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ScenarioError, match=r"types?:|error_bound"):
        cluster(np.array([1]), np.array([[0]]), **wrong)  # type: ignore[arg-type]
