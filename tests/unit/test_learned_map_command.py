"""`testbed delay-map --learned` and `testbed predict` with what it made, as they are typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from testbed.cli.app import build
from testbed.errors import OutOfRangeError, ScenarioError
from testbed.scenario import Scenario
from testbed.theory.delay.learned_map_file import LearnedMapFile

pytestmark = pytest.mark.slow

APP = build(["delay-map", "predict"])
ROOT = Path(__file__).parents[2]
CELLS, HELD_OUT, REQUESTS, SEED = 32, 2, 5_000, 3


def typed(*arguments: object) -> dict[str, Any]:
    done = CliRunner().invoke(APP, [*map(str, arguments), "--json"], catch_exceptions=False)
    assert done.exit_code == 0
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.fixture(scope="module")
def asked() -> Scenario:
    """One of the profiles of the published map's scenario, alone."""
    published = Scenario.load(ROOT / "results" / "learned-delay-map" / "scenario.yaml")
    deep = published.to_dict()["profiles"][2]
    return published.replace(profiles=[{**deep, "fraction": 1.0}], demand={"intensity": 3.0})


@pytest.fixture(scope="module")
def made(asked: Scenario, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The scenario's file, and the map's."""
    folder = tmp_path_factory.mktemp("map")
    scenario, out = folder / "scenario.yaml", folder / "map.json"
    scenario.write_text(asked.to_yaml())
    slots = asked.concurrency(asked.profiles[0])
    told = typed(
        *("delay-map", scenario, "--learned", "--slots", f"{slots}:{slots}", "--seed", SEED),
        *("--cells", CELLS, "--held-out", HELD_OUT, "--requests", REQUESTS, "--out", out),
    )
    assert told["out"] == str(out)
    assert [p["profile"] for p in told["profiles"]] == ["deep"]
    return scenario, out


def test_a_map_says_what_it_was_made_of(made: tuple[Path, Path]) -> None:
    map_ = LearnedMapFile.load(str(made[1]))
    (profile,) = map_.profiles
    assert map_.seed == SEED
    assert (profile.fit.cells, profile.fit.requests) == (CELLS, REQUESTS)
    assert len(profile.held_out) == HELD_OUT
    for cell in profile.held_out:
        assert cell.capacity[1] == pytest.approx(cell.capacity[0], rel=0.03)
        assert cell.predicted is not None
        for found, truth in zip(cell.predicted, cell.simulated, strict=True):
            assert found[1] == pytest.approx(truth[1], rel=0.1), "the median"


def test_a_map_answers_predict_and_delays_grow_with_the_demand(
    made: tuple[Path, Path], asked: Scenario, tmp_path: Path
) -> None:
    """From hardly any delay with hardly any demand, up to the map's edge, where it refuses."""
    waits, quantiles = [], []
    for intensity in (0.01, 1.0, 3.0, 5.0, 6.0):
        scenario = tmp_path / f"at-{intensity:g}.yaml"
        scenario.write_text(asked.replace(demand={"intensity": intensity}).to_yaml())
        answer = typed("predict", scenario, "--delay-model", f"learned_map:{made[1]}")
        assert answer["delay_model"] == f"learned_map:{made[1]}"
        waits.append(answer["tiers"]["deep"]["mean_wait"])
        quantiles.append(answer["ttft"]["quantiles"]["0.99"])
    assert sorted(waits) == waits and sorted(quantiles) == quantiles
    assert waits[0] < 1e-2 * waits[-1]
    scenario.write_text(asked.replace(demand={"intensity": 6.95}).to_yaml())
    with pytest.raises(OutOfRangeError, match=r"the map was fitted up to 0\.95"):
        typed("predict", scenario, "--delay-model", f"learned_map:{made[1]}")


def test_a_map_of_other_prompts_is_refused(
    made: tuple[Path, Path], asked: Scenario, tmp_path: Path
) -> None:
    other = [q.model_copy(update={"tokens": 2 * q.tokens}) for q in asked.requests]
    scenario = tmp_path / "other.yaml"
    scenario.write_text(
        asked.replace(requests=[q.model_dump(mode="json") for q in other]).to_yaml()
    )
    with pytest.raises(ScenarioError, match="was fitted for new tokens"):
        typed("predict", scenario, "--delay-model", f"learned_map:{made[1]}")
