"""`testbed plan` and its extensions as a planner types them."""

import json

import pytest
import yaml
from typer.testing import CliRunner

from testbed.cli.app import build
from testbed.errors import ScenarioError
from testbed.presets import preset

APP = build(["plan", "predict"])


def ask(*arguments):
    done = CliRunner().invoke(APP, [*map(str, arguments), "--json"], catch_exceptions=False)
    assert done.exit_code == 0
    return json.loads(done.stdout)


@pytest.fixture
def scenario(tmp_path):
    asked = preset("paper-baseline").replace(
        simulation={
            "users": {"mobility": "gauss_markov", "count": 100},
            "backhaul": {"rate": 1e9},
        }
    )
    path = tmp_path / "scenario.yaml"
    path.write_text(asked.to_yaml())
    return path


def test_periods_keep_the_budget_and_may_change_the_mix(tmp_path):
    day = tmp_path / "day.yaml"
    mix = {"short": 0.2, "medium": 0.3, "long": 0.5}
    day.write_text(yaml.safe_dump([{"intensity": 2.0}, {"intensity": 9.0, "probability": mix}]))
    common = ("plan", "paper-baseline", "--periods", day, "--parts", 4)
    free = ask(*common, "--budget", "10GB")
    bound = ask(*common, "--budget", "40MB")
    assert [len(found["periods"]) for found in (free, bound)] == [2, 2]
    assert all(p["moved_bytes_per_node"] <= 4e7 * (1 + 1e-9) for p in bound["periods"])
    assert bound["coverage"] <= free["coverage"] + 1e-12


def test_memory_nodes_and_next_turns(scenario):
    found = ask("plan", scenario, "--memory-nodes", 2.0, "--memory-path", 1e-3)
    assert found["feasible"]
    for row in found["association"].values():
        assert sum(row.values()) == pytest.approx(1.0)
    turns = ask("plan", scenario, "--next-turn", 200, "--after", 0)
    for turn in turns.values():
        # Nobody has moved: all three ways are the same node.
        assert turn["same"] == pytest.approx(1.0, abs=1e-3)
        assert turn["rehome"] == pytest.approx(turn["stay"], rel=2e-3)
        assert turn["migrate"] == pytest.approx(turn["stay"], rel=2e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "one of --placement"),
        (("--placement", "--next-turn", "5"), "one of --placement"),
        (("--periods", "absent.yaml"), "needs --budget"),
        (("--periods", "absent.yaml", "--budget", "1GB"), "absent.yaml"),
        (("--memory-nodes", "1"), "simulation.backhaul"),
        (("--next-turn", "5"), "simulation.backhaul"),
        (("--next-turn", "5", "--out", "x.yaml"), "--out: goes with"),
    ],
)
def test_what_cannot_be_planned_is_said(arguments, message):
    with pytest.raises(ScenarioError, match=message):
        CliRunner().invoke(APP, ["plan", "paper-baseline", *arguments], catch_exceptions=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "not a list of periods"),
        ("- {weight: 1}", r"\[0\].intensity: missing"),
        ("- {intensity: 1, hour: 3}", r"\[0\].hour: unknown key"),
        ("- {intensity: 1, probability: {long: 1}}", r"\[0\].probability"),
        ("- {intensity: many}", r"\[0\]: not a number"),
        ("- [", ":1: "),
    ],
)
def test_a_malformed_file_of_periods_is_refused(tmp_path, text, message):
    day = tmp_path / "day.yaml"
    day.write_text(text)
    arguments = ["plan", "paper-baseline", "--periods", str(day), "--budget", "1GB"]
    with pytest.raises(ScenarioError, match=message):
        CliRunner().invoke(APP, arguments, catch_exceptions=False)
