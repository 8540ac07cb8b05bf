"""Privacy support: what a threshold costs, counted on traces and expected of popularity laws."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings

from testbed.scenario import Prefill
from testbed.theory.extensions.privacy import expected_value, observed_value
from testbed.theory.prefill import prefill_saving
from testbed.workload.synthetic import SyntheticSpec, synthetic_trace
from tests.unit.significance import within
from tests.unit.workload_traces import texts, trace_of

PREFILL = Prefill(overhead=0.002, linear=1e-4, quadratic=2e-8)
THRESHOLDS = (1, 2, 3, 5, 9)


@settings(max_examples=15, deadline=None)
@given(prompts=texts())
def test_observed_value_is_that_of_counting_prefixes_by_hand(prompts):
    trace = trace_of(prompts)
    value = observed_value(trace, PREFILL, THRESHOLDS)
    support = Counter(tuple(p[:k]) for p in prompts for k in range(1, len(p) + 1))
    for i, k in enumerate(THRESHOLDS):
        assert value.advertised[i] == sum(n >= k for n in support.values())
        saved = []
        for p in prompts:
            deep = max((d for d in range(1, len(p) + 1) if support[tuple(p[:d])] >= k), default=0)
            saved.append(float(prefill_saving(PREFILL, 4 * len(p), 4 * deep)))
        assert value.saved[i] == pytest.approx(np.mean(saved))
    assert (np.diff(value.loss) >= -1e-12).all()
    assert value.loss[0] == pytest.approx(0.0, abs=1e-12)


def test_loss_of_a_synthetic_workload_rises_to_all_there_is():
    trace = synthetic_trace(SyntheticSpec(requests=300, seed=1))
    value = observed_value(trace, PREFILL, [1, 2, 5, 20, 100, 10_000])
    assert (np.diff(value.loss) >= 0).all() and value.loss[-1] == 1.0
    assert value.advertised[-1] == 0 and value.advertised[0] > value.advertised[1]
    # Prefixes of one request alone are much of the forest and of what it could save once more.
    assert 0.05 < value.loss[1] < 0.95


def forest(rng):
    """Roots of a Zipf law, each with children of a Zipf law: p_v, parent, gain of each vertex."""
    roots = 1.0 / np.arange(1, 9) ** 1.1
    roots /= roots.sum()
    children = 1.0 / np.arange(1, 13) ** 1.3
    children /= children.sum()
    p = np.concatenate([roots, np.outer(roots, children).ravel()])
    gain = rng.uniform(0.05, 0.4, len(p))
    return p, gain, children


@pytest.mark.parametrize("requests", [50, 400])
def test_expected_value_against_drawn_periods(requests):
    rng = np.random.default_rng(3)
    p, gain, children = forest(rng)
    roots, kinds = 8, len(children)
    thresholds = np.array(THRESHOLDS)
    periods = 200
    saved = np.zeros((periods, len(thresholds)))
    shown = np.zeros((periods, len(thresholds)))
    for k in range(periods):
        root = rng.choice(roots, requests, p=p[:roots])
        leaf = rng.choice(kinds, requests, p=children)
        count = np.bincount(root, minlength=roots)
        pairs = np.bincount(root * kinds + leaf, minlength=roots * kinds)
        support = np.concatenate([count, pairs])
        held = support[:, None] >= thresholds
        # A request of the next period passes through v with probability p_v.
        saved[k] = (p * gain) @ held
        shown[k] = held.sum(axis=0)
    value = expected_value(p, gain, requests, THRESHOLDS)
    within(saved.mean(axis=0), value.saved, saved.std(axis=0, ddof=1) / np.sqrt(periods))
    within(shown.mean(axis=0), value.advertised, shown.std(axis=0, ddof=1) / np.sqrt(periods))


def test_more_requests_lose_less_and_larger_thresholds_more():
    p, gain, _ = forest(np.random.default_rng(4))
    few = expected_value(p, gain, 50, THRESHOLDS)
    many = expected_value(p, gain, 5_000, THRESHOLDS)
    assert (many.loss < few.loss).all()
    assert (np.diff(few.loss) > 0).all()
    assert expected_value(p, gain, 0, [1]).loss.tolist() == [1.0]
    assert expected_value([1.0], [0.0], 10, [1]).loss.tolist() == [0.0]


@pytest.mark.parametrize(
    ("probability", "gain", "requests", "threshold", "message"),
    [
        ([1.2], [1.0], 5, 1, "probability"),
        ([0.2], [-1.0], 5, 1, "gain"),
        ([0.2], [1.0], -5, 1, "requests"),
        ([0.2], [1.0], 5, 0, "at least 1"),
    ],
)
def test_says_what_is_wrong(probability, gain, requests, threshold, message):
    with pytest.raises(ValueError, match=message):
        expected_value(probability, gain, requests, [threshold])
