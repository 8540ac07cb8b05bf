"""Sweeps: a row and a point for every value, infinities said and never drawn."""

import io

import numpy as np
import pytest
from rich.console import Console

from testbed.errors import OutcomeError
from testbed.presets import preset
from testbed.reporting.sweeps import draw_sweep, render_sweep, sweep_figure, sweep_table
from testbed.theory import predict

FIELD = "demand.intensity"


def sweep_of(policy, values):
    scenario = preset("paper-baseline").replace(policy=policy)
    return [predict(scenario.with_field(FIELD, float(v))) for v in values]


def test_table_has_a_row_a_value_and_says_which_tier_is_overloaded():
    values = [1.0, 4.0]
    table = sweep_table(FIELD, values, sweep_of("prefix_only", values))
    assert [row[0].text for row in table.rows] == ["1", "4"]
    assert table.rows[0][-1].text == "" and table.rows[1][-1].text == "overloaded"
    assert "∞" in [c.text.split("\u00a0")[0] for c in table.rows[1]]
    assert "deep" in table.note


def test_lines_stop_where_ttft_becomes_infinite_and_the_ground_says_so():
    values = np.linspace(2.0, 5.0, 4)
    outcomes = sweep_of("prefix_only", values)
    figure = sweep_figure(FIELD, values, outcomes)
    coverage, ttft, load = figure.axes
    mean = ttft.lines[0].get_ydata()
    assert np.isfinite(mean).tolist() == [o.feasible for o in outcomes]
    np.testing.assert_array_equal(
        coverage.lines[0].get_ydata(), [o.ttft.coverage["0.8"] for o in outcomes]
    )
    np.testing.assert_array_equal(
        load.lines[2].get_ydata(), [o.tiers["deep"].utilisation for o in outcomes]
    )
    assert len(ttft.patches) == sum(not o.feasible for o in outcomes)


def test_values_in_any_order_give_the_same_figure():
    values = [3.0, 1.0, 2.0]
    outcomes = sweep_of("nearest", values)
    line = sweep_figure(FIELD, values, outcomes).axes[0].lines[0]
    np.testing.assert_array_equal(line.get_xdata(), [1.0, 2.0, 3.0])
    np.testing.assert_array_equal(
        line.get_ydata(), [outcomes[i].ttft.coverage["0.8"] for i in (1, 2, 0)]
    )


def test_draws_both_files_and_prints_one_table(tmp_path):
    outcomes = sweep_of("load_aware", [2.0])
    vector, raster = draw_sweep(FIELD, [2.0], outcomes, tmp_path / "sweep.png")
    assert vector.read_text().lstrip().startswith("<?xml") and raster.read_bytes()[:4] == b"\x89PNG"
    console = Console(file=io.StringIO(), width=120)
    render_sweep(console, FIELD, [2.0], outcomes)
    assert "paper-baseline against demand.intensity" in console.file.getvalue()


@pytest.mark.parametrize("values", [[], [1.0, 2.0]])
def test_refuses_values_without_outcomes(values):
    with pytest.raises(OutcomeError, match=r"demand\.intensity: "):
        sweep_table(FIELD, values, sweep_of("nearest", [1.0]))
