"""What a terminal shows: the same figures, marked where they are not to be relied on."""

from __future__ import annotations

import io
import math
import re

import pytest
from rich.console import Console

from testbed.outcome import Outcome
from testbed.reporting.calibration_tables import calibration_tables
from testbed.reporting.case_tables import figures_table, pair_table, summary_table
from testbed.reporting.compare import compare
from testbed.reporting.quantities import COVERAGE, LATENCY
from testbed.reporting.table import Cell, Table, to_rich
from testbed.reporting.tables import render_comparison, render_outcome
from testbed.reporting.wording import asked, percent, seconds, significant, span
from tests.unit.reporting_factory import outcome, study


def shown(*outcomes: Outcome, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    if len(outcomes) == 1:
        render_outcome(console, outcomes[0])
    else:
        render_comparison(console, compare(list(outcomes)))
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0842, "84.2\u00a0ms"), (3.2, "3.20\u00a0s"), (2e-5, "20.0\u00a0µs"), (0.0, "0\u00a0s")],
)
def test_a_duration_has_its_unit(value: float, text: str) -> None:
    assert seconds(value) == text


def test_an_interval_says_its_unit_once_and_an_open_end_in_words() -> None:
    assert span((0.081, 0.0876), "s") == "81.0–87.6\u00a0ms"
    assert span((0.9, 1.5), "s") == "900\u00a0ms–1.50\u00a0s"
    assert span((0.334, math.inf), "s") == "≥\u00a0334\u00a0ms"
    assert span((1.0, 2.0), "/s") == "1.00–2.00/s"
    assert seconds(1e-30) == "<\u00a01\u00a0ns"  # not nothing, but nothing to a reader


def test_numbers_keep_three_digits_and_their_sign() -> None:
    assert significant(1234.5) == "1,234"
    assert significant(float("-inf")) == "−∞"
    assert significant(-2e-8) == "−2.00×10⁻⁸"
    assert asked(4096.0) == "4,096" and asked(2.63769) == "2.638"
    assert percent(-49.2) == "−49\u00a0%"
    assert percent(-0.04) == "0.0\u00a0%"  # no sign on nothing


def test_the_table_shows_the_error_of_the_figures_it_shows() -> None:
    case = compare([outcome(wait=0.08), outcome("predicted", wait=0.02)]).cases[0]
    table = pair_table(case, (LATENCY, COVERAGE), 1)
    error = table.head.index("error")
    mean = next(row for row in table.rows if row[0].text == "TTFT mean")
    assert mean[error].text == percent(100 * (0.08 - 0.14) / 0.14)
    wide = figures_table(case, (LATENCY, COVERAGE), "TTFT")
    assert mean[error].text in [cell.text for cell in wide.rows[0]]


def test_clock_and_kind_stand_in_every_heading() -> None:
    for clock in ("wall clock", "device time", "emulated"):
        comparison = compare([outcome(clock=clock), outcome("predicted")])
        assert clock in shown(outcome(clock=clock)).splitlines()[0]
        assert f"measured: {clock}" in summary_table(comparison, comparison.cases).caption
        for case in comparison.cases:
            assert clock in figures_table(case, (LATENCY,), "TTFT").caption
            assert clock in pair_table(case, (LATENCY,), 1).caption


def test_invalid_and_infeasible_outcomes_are_marked() -> None:
    bad = outcome(valid=False, invalid_reason="the lag was too long")
    assert "INVALID: the lag was too long" in shown(bad)
    text = shown(bad, outcome("predicted"))
    assert "(INVALID)" in text and "the lag was too long" in text
    infeasible = outcome("predicted", feasible=False, reason="deep: utilisation 1.2")
    assert "infeasible: deep: utilisation 1.2" in shown(infeasible)
    assert "(infeasible)" in shown(outcome(), infeasible)


def test_lost_requests_are_said() -> None:
    lost = outcome(requests={"sent": 500, "completed": 490, "rejected": 7, "failed": 3})
    assert "7 rejected, 3 failed" in shown(lost)
    assert "7 rejected and 3 failed of 500" in shown(lost, outcome("predicted"))


def test_a_name_is_never_markup_nor_a_terminal_command() -> None:
    hostile = outcome(policy="[bold red]x[/] \x1b[2J", scenario_name="[link=evil]y[/link]")
    text = shown(hostile, hostile.model_copy(update={"kind": "predicted", "clock": "none"}))
    assert "[bold red]x[/]" in text and "[link=evil]y[/link]" in text
    assert "\x1b" not in text


def test_nothing_is_wider_than_the_terminal() -> None:
    for width in (80, 100):
        lines = shown(*study()[:2], width=width).splitlines()
        assert max(map(len, lines)) <= width
    assert "95 % interval" in shown(*study()[:2], width=100)
    assert "noise" in shown(*study()[:2], width=80)


def test_a_row_that_does_not_fit_its_heads_is_refused() -> None:
    with pytest.raises(ValueError, match="1 cells under 2 heads"):
        Table("x", ("a", "b"), ((Cell("1"),),))
    assert to_rich(Table("x", ("a",), ((Cell("1"),),))).row_count == 1


def test_calibration_is_shown_with_errors_before_and_after() -> None:
    def record(linear: float) -> dict[str, object]:
        return {
            "source": {"kind": "measured", "tool": "testbed"},
            "engine": {"name": "vllm", "version": "0.32.0"},
            "prefill": {
                "coefficients": {"linear": linear, "quadratic": 3e-8},
                "standard_errors": {"linear": 4e-7},
                "relative_error": 0.021,
                "alternatives": [
                    {
                        "name": "quadratic",
                        "points": 24,
                        "relative_error": 0.02,
                        "held_out_error": 0.03,
                        "coefficients": {"linear": linear},
                    }
                ],
            },
            "memory": {"kappa_nominal": 1024.0},
            "m_run": {"value": 5e5, "standard_error": 1e3},
            "c_s": [{"profile": "deep", "measured": 12, "formula": 13}],
            "decode": [{"base": 0.0, "per_token": 0.0026, "concurrency": 4.0}],
        }

    tables = calibration_tables(record(4.0e-5), record(4.2e-5))
    figures = next(t for t in tables if "what was measured" in t.caption)
    linear = next(row for row in figures.rows if row[0].text == "prefill linear")
    assert linear[figures.head.index("change")].text == percent(5.0)
    assert re.search(r"\+3\.5", linear[-1].text)  # 2e-6 / hypot(4e-7, 4e-7)
    fits = tables[-1]
    assert [c.text for c in fits.rows[0]][:4] == ["quadratic", "24", "2.0\u00a0%", "3.0\u00a0%"]
    assert "change" not in calibration_tables(record(4.0e-5))[1].head
