"""Two answers to the same requests: their noise is that of the differences."""

from __future__ import annotations

import numpy as np
import pytest

from testbed.outcome import Outcome, Series
from testbed.reporting.compare import compare
from testbed.reporting.paired import LEAST_BEYOND, Paired
from testbed.reporting.quantities import LATENCY, Quantity
from testbed.scenario import Scenario
from testbed.simulation import simulate
from tests.unit.reporting_factory import QUANTILES, TARGETS, outcome

MEAN = Quantity("ttft.mean", "TTFT mean", "s", LATENCY)


def quantile(z: float) -> Quantity:
    return Quantity(f"ttft.quantiles.{z:g}", f"p{100 * z:g}", "s", LATENCY, (f"{z:g}",))


def busy(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Correlated delays of the same requests on two engines, one 10 % slower and with a noise."""
    draw = np.random.default_rng(seed)
    level = np.zeros(count)
    for i in range(1, count):
        level[i] = 0.9 * level[i - 1] + draw.normal()
    one = 0.1 + np.exp(0.5 * level)
    return one, 1.1 * one + draw.normal(0.0, 0.01, count)


def with_series(
    kind: str, ttft: np.ndarray, stream: str = "a", first: int = 0, **changes: object
) -> Outcome:
    """An outcome that says of these TTFTs what their sample says."""
    told = outcome(kind)  # type: ignore[arg-type]
    figures = told.ttft.model_copy(
        update={
            "mean": float(ttft.mean()),
            "quantiles": {f"{z:g}": float(np.quantile(ttft, z)) for z in QUANTILES},
            "coverage": {f"{t:g}": float((ttft <= t).mean()) for t in TARGETS},
        }
    )
    series = Series(stream=stream, first=first, ttft=tuple(ttft.tolist()))
    return told.model_copy(update={"ttft": figures, "series": series, **changes})


def test_sharing_requests_narrows_the_noise_and_another_stream_does_not() -> None:
    one, two = busy(800, 1)
    measured, simulated = with_series("measured", one), with_series("simulated", two)
    paired = compare([measured, simulated]).cases[0]
    apart = compare([measured, with_series("simulated", two, "b")]).cases[0]
    for path in ("ttft.mean", "ttft.quantiles.0.5", "ttft.quantiles.0.9"):
        near, far = (case.row(path).agreements[1] for case in (paired, apart))  # type: ignore[union-attr]
        assert near is not None and far is not None
        assert near.paired == 800 and far.paired == 0
        assert near.difference == far.difference and near.error_percent == far.error_percent
        assert near.noise < far.noise  # type: ignore[operator]
    assert any("same 800 requests" in g for g in paired.verdicts[0].grounds)
    assert not any("same 800 requests" in g for g in apart.verdicts[0].grounds)


def test_the_same_answer_twice_agrees_without_noise() -> None:
    one, _ = busy(300, 2)
    case = compare([with_series("measured", one), with_series("simulated", one)]).cases[0]
    agreement = case.row("ttft.mean").agreements[1]  # type: ignore[union-attr]
    assert agreement is not None and agreement.difference == 0.0
    assert agreement.noise == 0.0 and agreement.status == "agrees"


def test_a_shift_of_every_request_is_known_exactly() -> None:
    one, _ = busy(400, 3)
    pair = Paired(one + 0.25, one)
    for quantity in (MEAN, quantile(0.5), quantile(0.9)):
        below, above = pair.halves(quantity)  # type: ignore[misc]
        assert below == pytest.approx(0.0, abs=1e-9) and above == pytest.approx(0.0, abs=1e-9)


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    truth_a, truth_b = busy(200_000, 99)
    held = {path: 0 for path in (MEAN, quantile(0.5), quantile(0.9))}
    for seed in range(60):
        one, two = busy(600, seed)
        pair = Paired(two, one)
        for quantity in held:
            if quantity is MEAN:
                said, true = np.mean(two - one), np.mean(truth_b - truth_a)
            else:
                z = float(quantity.names[0])
                said = np.quantile(two, z) - np.quantile(one, z)
                true = np.quantile(truth_b, z) - np.quantile(truth_a, z)
            below, above = pair.halves(quantity)  # type: ignore[misc]
            held[quantity] += said - below <= true <= said + above
    # 57 of 60 expected; a shortfall to 48 has a chance below one in 1,000.
    assert min(held.values()) >= 48, held


def test_only_what_both_completed_is_compared_and_a_cut_warm_up_is_left_out() -> None:
    one, two = busy(300, 4)
    gaps = [None if i % 7 == 0 else x for i, x in enumerate(two.tolist())]
    simulated = with_series("simulated", two).model_copy(
        update={"series": Series(stream="a", first=0, ttft=tuple(gaps))}
    )
    late = with_series("measured", one[50:], first=50)
    pair = Paired.of(simulated, late)
    assert pair is not None and len(pair) == sum(x is not None for x in gaps[50:])
    kept = [i for i in range(50, 300) if i % 7]
    np.testing.assert_array_equal(pair.reference, one[kept])
    np.testing.assert_array_equal(pair.answer, two[kept])


def test_a_quantile_that_the_sample_does_not_hold_is_judged_as_before() -> None:
    one, two = busy(300, 5)
    assert LEAST_BEYOND > 300 * 0.01
    assert Paired(two, one).halves(quantile(0.99)) is None
    case = compare([with_series("measured", one), with_series("simulated", two)]).cases[0]
    agreement = case.row("ttft.quantiles.0.99").agreements[1]  # type: ignore[union-attr]
    assert agreement is not None and agreement.paired == 0


def test_policies_on_one_trace_are_the_same_requests_and_seeds_are_not(tmp_path) -> None:
    from tests.unit.reporting_factory import scenario

    asked = scenario(
        intensity=0.5,
        workload={"arrivals": "gamma", "cv2": 2.0},
        simulation={"nodes": 2, "waits": "node", "warm_up": 0},
    )
    first, again = (
        simulate(Scenario.from_dict(asked.to_dict()), requests=200, seed=seed) for seed in (1, 1)
    )
    other = simulate(asked, requests=200, seed=2)
    assert first.series is not None and other.series is not None
    assert first.series == again.series
    assert first.series.stream != other.series.stream
    assert Outcome.from_json(first.to_json()).series == first.series
