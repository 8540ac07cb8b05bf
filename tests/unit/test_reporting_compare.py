"""A comparison groups by question, hides nothing and judges in words."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import orjson
import pytest

from testbed.errors import OutcomeError
from testbed.outcome import Curve, dump_json
from testbed.reporting.compare import compare
from testbed.reporting.digest import digest
from testbed.reporting.drift import SENSITIVITY, SENSITIVITY_LOAD, drift, sensitivity
from tests.unit.reporting_factory import outcome, scenario, study


def test_one_question_gives_one_group_and_a_case_for_each_policy_and_load() -> None:
    outcomes = study()
    comparison = compare(outcomes)
    assert len(comparison.groups) == 1 and not comparison.differences
    assert [(c.policy, c.intensity) for c in comparison.cases] == [
        (policy, load) for policy in ("nearest", "prefix_only", "load_aware") for load in (2.0, 4.0)
    ]
    assert len(comparison.outcomes) == len(outcomes)
    assert all(case.reference.kind == "measured" for case in comparison.cases)
    assert all(len(set(case.labels)) == len(case.labels) for case in comparison.cases)


def test_the_order_of_the_files_does_not_matter() -> None:
    outcomes = study()[:8]
    there, back = compare(outcomes).to_dict(), compare(outcomes[::-1]).to_dict()
    key = lambda case: (case["policy"], case["intensity"])  # noqa: E731
    there_cases = sorted(there["groups"][0]["cases"], key=key)
    back_cases = sorted(back["groups"][0]["cases"], key=key)
    assert [c["reference"] for c in there_cases] == [c["reference"] for c in back_cases]
    figures = [{f["path"]: f["agreement"] for f in c["figures"]} for c in there_cases]
    assert figures == [{f["path"]: f["agreement"] for f in c["figures"]} for c in back_cases]


def test_another_system_is_another_question_and_the_difference_is_named() -> None:
    denser = scenario(nodes={"density": 2.0})
    comparison = compare([outcome(), outcome("predicted", asked=denser)])
    assert len(comparison.groups) == 2
    assert comparison.differences == {"nodes.density": (1.0, 2.0)}


def test_how_an_answer_is_computed_or_printed_leaves_the_question_alone() -> None:
    other = scenario(
        name="the same",
        solver={"damping": 0.3},
        targets={"coverage_at": [9.0]},
        simulation={"nodes": 5, "node_model": "deterministic"},
    )
    assert len(compare([outcome(), outcome("predicted", asked=other)]).groups) == 1


def test_every_error_is_that_of_the_figures_beside_it() -> None:
    for case in compare(study()).cases:
        for row in case.rows:
            reference = row.readings[0]
            for reading, agreement in zip(row.readings[1:], row.agreements[1:], strict=True):
                assert reading is not None and reference is not None and agreement is not None
                expected = 100 * (reading.value - reference.value) / reference.value
                assert agreement.error_percent == pytest.approx(expected, abs=1e-9)


def test_a_quantile_is_found_however_its_key_is_written() -> None:
    measured, predicted = outcome(), outcome("predicted")
    renamed = {f"{float(z):.3f}": t for z, t in predicted.ttft.quantiles.items()}
    ttft = predicted.ttft.model_copy(update={"quantiles": renamed})
    case = compare([measured, predicted.model_copy(update={"ttft": ttft})]).cases[0]
    row = case.row("ttft.quantiles.0.9")
    assert row is not None and all(r is not None for r in row.readings)


def test_without_a_measurement_the_simulation_is_the_reference() -> None:
    case = compare([outcome("predicted"), outcome("simulated")]).cases[0]
    assert case.reference.kind == "simulated"


def test_an_invalid_outcome_is_shown_marked_and_judged_invalid() -> None:
    bad = outcome(valid=False, invalid_reason="dispatch lag p99 of 90 ms")
    comparison = compare([bad, outcome("predicted")])
    (verdict,) = comparison.cases[0].verdicts
    assert verdict.level == "invalid"
    assert any("dispatch lag p99 of 90 ms" in ground for ground in verdict.grounds)
    case = comparison.to_dict()["groups"][0]["cases"][0]
    assert not case["answers"][case["reference"]]["valid"]
    good = outcome(seed=8)
    assert compare([bad, good]).cases[0].reference is good


def test_verdicts_say_where_and_by_how_much() -> None:
    case = compare([outcome(wait=0.08), outcome("predicted", wait=0.02)]).cases[0]
    (verdict,) = case.verdicts
    assert verdict.level == "misses"
    assert "43" in verdict.summary  # (0.08 − 0.14)/0.14
    assert any(ground.startswith("Farthest off: TTFT p99") for ground in verdict.grounds)
    assert compare([outcome(), outcome("predicted")]).cases[0].verdicts[0].level == "agrees"
    noisy = compare([outcome(noise=0.4), outcome("predicted", wait=0.09)]).cases[0]
    assert noisy.verdicts[0].level == "too noisy"
    bare = compare([outcome(confidence={}), outcome("predicted")]).cases[0]
    assert bare.verdicts[0].level == "not comparable"


def test_an_infinite_mean_is_a_miss_unless_both_find_the_load_infeasible() -> None:
    unstable = outcome("predicted", feasible=False, reason="deep: utilisation 1.2")
    ttft = unstable.ttft.model_copy(update={"mean": math.inf})
    unstable = unstable.model_copy(update={"ttft": ttft})
    case = compare([outcome(), unstable]).cases[0]
    assert case.verdicts[0].level == "misses"
    assert any("utilisation 1.2" in g for g in case.verdicts[0].grounds)
    both = compare([outcome(feasible=False, reason="deep at 1.1"), unstable]).cases[0]
    assert both.verdicts[0].level == "unstable"
    document = orjson.loads(dump_json(compare([outcome(), unstable]).to_dict()))
    mean = document["groups"][0]["cases"][0]["figures"][0]
    assert mean["values"]["predicted · erlang_c"]["value"] == "inf"


def test_the_document_is_strict_json() -> None:
    document = orjson.loads(dump_json(compare(study()).to_dict()))
    assert len(document["groups"][0]["cases"]) == 6


def test_one_outcome_is_no_comparison() -> None:
    with pytest.raises(OutcomeError, match="two"):
        compare([outcome()])


def test_the_digest_counts_every_case_once() -> None:
    sentences = {label: text for label, _, text in digest(compare(study()))}
    assert "misses in 6 of 6" in sentences["predicted · erlang_c"]
    assert "agrees in 6 of 6" in sentences["predicted · step_chain"]


# --- drift ------------------------------------------------------------------------------------


def test_sensitivity_meets_the_measured_loads_and_never_falls() -> None:
    assert [sensitivity(u) for u in SENSITIVITY_LOAD] == pytest.approx(list(SENSITIVITY))
    grid = [sensitivity(u) for u in np.linspace(0, 1.2, 50)]
    assert all(b >= a for a, b in pairwise(grid))


@pytest.mark.parametrize("change", [-8.0, -1.0, 0.0, 1.0, 8.0])
def test_a_slower_machine_can_make_a_right_answer_look_too_low_alone(change: float) -> None:
    moved = drift(outcome(extra={"machine_speed": {"drift_percent": change}}))
    assert moved is not None
    low, high = moved.error_percent
    assert low <= 0 <= high
    assert (low < 0) == (change < 0) and (high > 0) == (change > 0)


def test_speeds_relative_to_the_calibration_count_from_it() -> None:
    speed = {"before": 0.9, "after": 0.9, "drift_percent": 0.0}
    still = drift(outcome(extra={"machine_speed": speed}))
    assert still is not None and still.error_percent == (0.0, 0.0)
    moved = drift(outcome(extra={"machine_speed": {**speed, "relative_to": "calibration"}}))
    assert moved is not None and moved.slowest_percent == pytest.approx(-10)


def test_drift_explains_a_miss_in_its_own_direction_alone() -> None:
    def grounds(change: float) -> str:
        speed = {"before": 1.0, "after": 1 + change / 100, "drift_percent": change}
        measured = outcome(extra={"machine_speed": speed})
        predicted = outcome("predicted", wait=0.06)  # too low
        return " ".join(compare([measured, predicted]).cases[0].verdicts[0].grounds)

    assert "cannot tell" in grounds(-10.0)
    assert "cannot explain" in grounds(+10.0)
    words = compare([outcome(extra={}), outcome("predicted")]).cases[0].drift_words
    assert words is not None and "cannot be judged" in words


def test_a_device_that_keeps_its_own_time_does_not_drift() -> None:
    case = compare([outcome(clock="device time", extra={}), outcome("predicted")]).cases[0]
    assert case.drift_words is not None and "set pace" in case.drift_words


def test_curves_are_not_needed() -> None:
    assert compare([outcome(curve=None), outcome("predicted", curve=None)]).cases
    assert outcome(curve=Curve(seconds=(0.1,), probability=(1.0,))).curve is not None
