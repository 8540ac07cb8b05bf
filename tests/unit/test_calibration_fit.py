"""Fits recover what made the data, in any unit, with errors that shrink as they should."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibration.fit import (
    PREFILL_TERMS,
    fit_prefill,
    is_tight,
    prefill_columns,
    relative_nnls,
    robust_nnls,
    summarise,
)
from calibration.record import Calibration, PrefillFit, PrefillPoint
from calibration.steps import CONTIGUOUS, fit_steps, movement_of, step_rows
from testbed.errors import CalibrationError
from testbed.step_time import COEFFICIENTS, StepTime, step_seconds

GRID = [
    (n, h)
    for n in (32, 64, 128, 256, 512, 1024, 2048, 4096)
    for h in (0, 1024, 2048)
    if n + h <= 4096
]
STEP = StepTime(
    c_pre=4e-3, p=1e-3, c_both=5e-4, a=4e-5, b=3e-8, d=6e-8, c_dec=2.7e-3, e=1e-4, f=2.5e-7
)


def grid_points(coefficients: np.ndarray, noise: float = 0.0, seed: int = 0) -> list[PrefillPoint]:
    draw = np.random.default_rng(seed)
    points = []
    for n, h in GRID:
        true = float(prefill_columns(np.array([n]), np.array([h]))[0] @ coefficients)
        points.append(summarise(n, h, true * np.exp(noise * draw.standard_normal(5))))
    return points


def coefficients(fit: PrefillFit) -> np.ndarray:
    return np.array([getattr(fit.coefficients, t) for t in PREFILL_TERMS])


@settings(max_examples=25, deadline=None)
@given(
    st.tuples(
        st.floats(1e-4, 1e-1), st.floats(1e-6, 1e-3), st.floats(1e-9, 1e-6), st.floats(1e-9, 1e-6)
    )
)
def test_exact_data_give_back_their_coefficients(true):
    fit = fit_prefill(grid_points(np.array(true)))
    assert coefficients(fit) == pytest.approx(np.array(true), rel=1e-4)
    assert fit.relative_error == pytest.approx(0.0, abs=1e-5)


@settings(max_examples=25, deadline=None)
@given(st.floats(1e-6, 1e6))
def test_the_unit_of_time_does_not_matter(scale):
    columns = prefill_columns(*np.array(GRID, dtype=float).T)
    seconds = columns @ np.array([5e-3, 4e-5, 3e-8, 6e-8])
    seconds *= np.exp(0.05 * np.sin(np.arange(len(seconds))))
    assert relative_nnls(columns, seconds * scale) == pytest.approx(
        relative_nnls(columns, seconds) * scale, rel=1e-6
    )


def test_the_baseline_is_chosen_where_it_is_the_truth():
    points = grid_points(np.array([0.0, 2e-4, 2e-8, 0.0]), noise=0.01)
    fit = fit_prefill(points)
    named = {r.name: r for r in fit.alternatives}
    assert set(named) == {"baseline", "overhead", "context", "piecewise"}
    assert named["baseline"].held_out_error == pytest.approx(
        min(r.held_out_error for r in fit.alternatives[:3]), rel=0.2
    )
    assert fit.coefficients.linear == pytest.approx(2e-4, rel=0.02)


def test_without_context_in_the_form_deep_hits_are_missed():
    fit = fit_prefill(grid_points(np.array([5e-3, 4e-5, 3e-8, 6e-8])))
    named = {r.name: r.relative_error for r in fit.alternatives}
    assert named["context"] < 1e-6 < named["overhead"] < named["baseline"]


def test_standard_errors_cover_the_truth():
    """The error of the linear term, in its own standard errors, is of the size of one."""
    true = np.array([5e-3, 4e-5, 3e-8, 6e-8])
    z = []
    for seed in range(6):
        draw = np.random.default_rng(seed)
        columns = prefill_columns(*np.array(GRID, dtype=float).T)
        passes = (columns @ true) * np.exp(0.05 * draw.standard_normal((6, len(GRID))))
        points = [summarise(n, h, passes[:, i]) for i, (n, h) in enumerate(GRID)]
        fit = fit_prefill(points, [dict(enumerate(row)) for row in passes], seed=seed)
        z.append((fit.coefficients.linear - true[1]) / fit.standard_errors["linear"])
    assert 0.2 < np.sqrt(np.mean(np.square(z))) < 1.6


def test_too_few_points_are_refused():
    with pytest.raises(CalibrationError, match="2 points"):
        fit_prefill(grid_points(np.array([0, 1e-4, 0, 0]))[:2])


def test_outliers_are_kept_and_counted():
    point = summarise(64, 0, [1.0, 1.01, 0.99, 1.0, 1.02, 9.0])
    assert len(point.seconds) == 6 and point.outliers == 1
    assert point.median == pytest.approx(1.0, abs=0.01)


def test_tightness_is_that_of_the_median():
    assert not is_tight([1.0, 1.0], 0.01)
    assert is_tight([1.0, 1.001, 0.999], 0.01)
    assert not is_tight([1.0, 1.3, 0.8], 0.01)


def test_huber_weights_resist_interruptions():
    draw = np.random.default_rng(1)
    columns = np.stack([np.ones(400), draw.uniform(1, 100, 400)], axis=1)
    seconds = columns @ np.array([1.0, 0.1]) * np.exp(0.01 * draw.standard_normal(400))
    seconds[::10] *= 3.0
    solution, weights = robust_nnls(columns, seconds)
    assert solution == pytest.approx([1.0, 0.1], rel=0.02)
    assert weights[::10].max() < 0.2 < weights[1::10].mean()


# --- step time ---------------------------------------------------------------------------------


def step_log(noise: float = 0.0, seed: int = 0, count: int = 600) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    rows = {name: np.zeros(count) for name in ("prefills", "new_tokens", "new_squared")}
    rows |= {name: np.zeros(count) for name in ("new_context", "decodes", "decode_context")}
    started, finished, now = np.zeros(count), np.zeros(count), 0.0
    for i in range(count):
        kind = i % 3
        if kind != 1:
            chunks = draw.integers(16, 1024, draw.integers(1, 4)).astype(float)
            context = draw.integers(0, 2048, len(chunks)).astype(float)
            rows["prefills"][i] = len(chunks)
            rows["new_tokens"][i] = chunks.sum()
            rows["new_squared"][i] = (chunks**2).sum()
            rows["new_context"][i] = (chunks * context).sum()
        if kind != 0:
            decodes = draw.integers(1, 9)
            rows["decodes"][i] = decodes
            rows["decode_context"][i] = draw.integers(64, 2048, decodes).sum()
        seconds = columns_of(rows, i) @ STEP.vector() * np.exp(noise * draw.standard_normal())
        now += 0.02 if i % 50 == 0 else 1e-4
        started[i], finished[i] = now, now + seconds - 1e-4
        now = finished[i]
    return {**rows, "started": started, "finished": finished}


def columns_of(rows: dict[str, np.ndarray], i: int) -> np.ndarray:
    prefill, decode = rows["prefills"][i] > 0, rows["decodes"][i] > 0
    return np.array(
        [
            prefill,
            prefill * (rows["prefills"][i] - 1),
            prefill and decode,
            rows["new_tokens"][i],
            rows["new_squared"][i],
            rows["new_context"][i],
            decode and not prefill,
            rows["decodes"][i],
            rows["decode_context"][i],
        ],
        dtype=float,
    )


def test_step_time_comes_back_from_its_own_log():
    step, report = fit_steps(step_rows(step_log()))
    for name in COEFFICIENTS:
        assert getattr(step, name) == pytest.approx(getattr(STEP, name), rel=1e-3), name
    assert report.relative_error < 1e-4
    assert report.coefficients["gap"] == pytest.approx(1e-4, rel=1e-6)


def test_columns_of_the_regression_are_the_formula():
    log = step_log()
    rows = step_rows(log)
    sums = ("prefills", "new_tokens", "new_squared", "new_context", "decodes", "decode_context")
    for i in range(0, 60, 7):
        prefills, *middle, decodes, context = (log[c][i] for c in sums)
        expected = step_seconds(STEP.vector(), int(prefills), *middle, int(decodes), context)
        assert rows.columns[i] @ STEP.vector() == pytest.approx(expected)


def test_step_errors_are_of_the_size_of_the_noise():
    step, report = fit_steps(step_rows(step_log(noise=0.03, seed=3)))
    z = [
        (getattr(step, n) - getattr(STEP, n)) / report.standard_errors[n]
        for n in ("a", "c_dec", "d")
    ]
    assert np.abs(z).max() < 4
    assert report.held_out_error == pytest.approx(0.03, rel=0.4)


def test_windows_choose_rows_and_keep_the_neighbours_for_gaps():
    log = step_log(count=120)
    rows = step_rows(log, [(10, 20), (30, 35)])
    assert len(rows) == 15
    assert not rows.idle[0] and CONTIGUOUS < 0.02


def test_too_few_steps_are_refused():
    with pytest.raises(CalibrationError, match="too few"):
        fit_steps(step_rows(step_log(count=20)))


# --- occupancy ---------------------------------------------------------------------------------


def record(**parts) -> Calibration:
    return Calibration.from_dict(
        {
            "schema_version": 1,
            "source": {"kind": "measured", "tool": "testbed"},
            "engine": {"name": "emulated"},
            "model": {"name": "m"},
            "device": {"kind": "other", "name": "d"},
            **parts,
        }
    )


@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 200),
    st.integers(0, 4000),
    st.integers(0, 4000),
    st.integers(1, 16),
)
def test_occupancy_is_the_sum_of_its_decode_steps(output, new, cached, batch):
    calibration = record(step_time=STEP.model_dump())
    total = sum(
        STEP.seconds(decodes=batch, decode_context=batch * (new + cached + k))
        for k in range(output - 1)
    )
    got = calibration.occupancy(output, new, cached, batch=batch)
    assert got == pytest.approx(total, rel=1e-9, abs=1e-12)


def test_sequence_bytes_are_whole_blocks():
    calibration = record(memory={"kappa_nominal": 2048.0, "block_size": 32})
    assert calibration.sequence_bytes(64, 1) == 2 * 32 * 2048
    assert calibration.sequence_bytes(64, 2) == 3 * 32 * 2048
    with pytest.raises(CalibrationError, match="bytes per token"):
        record().sequence_bytes(64)


def test_errors_of_a_step_time_hold_how_the_speed_of_its_own_kind_moved():
    log = step_log(0.005)
    pure = log["prefills"] == 0
    slow = np.repeat([1.0, 1.4], len(pure) // 2)
    taken = (log["finished"] - log["started"]) * np.where(pure, slow, 1.0)
    begun = np.concatenate([[0.0], np.cumsum(taken + 1e-4)[:-1]])
    steady = fit_steps(step_rows(log))[1]
    moved = fit_steps(step_rows({**log, "started": begun, "finished": begun + taken}))[1]
    assert steady.coefficients["movement_decode"] < 0.01
    # Half at 1, half at 1.4: least squares of relative errors stand at 1.135, six parts at 0.88 of
    # it and six at 1.23.
    parts = np.repeat([1.0, 1.4], 6) / ((1 + 1 / 1.4) / (1 + 1 / 1.4**2))
    expected = float(np.std(parts, ddof=1))
    assert moved.coefficients["movement_decode"] == pytest.approx(expected, rel=0.15)
    assert moved.coefficients["movement_prefill"] < 0.01
    for name in ("c_dec", "e"):
        # What another half of the log would have found lies within two standard errors.
        apart = abs(moved.coefficients[name] - steady.coefficients[name])
        assert apart < 2.0 * moved.standard_errors[name]


def test_too_few_steps_tell_no_movement():
    assert movement_of(np.ones(5), np.ones(5)) == 0.0
    assert movement_of(np.full(240, 2.0), np.full(240, 1.0)) == pytest.approx(0.0)


def test_a_changed_copy_of_a_step_time_computes_with_what_was_changed():
    before = STEP.seconds([(100, 0)])
    slower = STEP.model_copy(update={"c_pre": STEP.c_pre + 1.0})
    assert slower.seconds([(100, 0)]) == pytest.approx(before + 1.0)
    assert STEP.seconds([(100, 0)]) == before
