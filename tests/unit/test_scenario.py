"""Scenario: what is refused and how it is said; what survives a round trip."""

from __future__ import annotations

import math

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.errors import ScenarioError
from testbed.presets import preset
from testbed.scenario import Scenario, scenario_hash
from tests.unit.scenarios import small


def test_yaml_round_trip_is_the_same_scenario(tmp_path):
    scenario = small()
    path = tmp_path / "s.yaml"
    path.write_text(scenario.to_yaml())
    assert Scenario.load(path) == scenario
    assert scenario_hash(Scenario.load(path)) == scenario_hash(scenario)


def test_preset_concurrencies_are_those_reported():
    scenario = preset("paper-baseline")
    assert [scenario.concurrency(s) for s in scenario.profiles] == [24, 22, 9]


@settings(max_examples=50, deadline=None)
@given(
    capacity=st.floats(1e6, 1e12),
    share=st.floats(0, 0.5),
    per_sequence=st.floats(1e4, 1e5),
)
def test_concurrency_is_the_floor_of_a9(capacity, share, per_sequence):
    profiles = small().to_dict()["profiles"]
    profiles[1]["persistent_bytes"] = 0
    scenario = small(
        memory={"capacity": capacity, "per_sequence": per_sequence, "per_token": 1.0},
        profiles=profiles,
        engine={"max_sequences": 2**62},
    )
    profile = scenario.profiles[1].model_copy(update={"persistent_bytes": share * capacity})
    c = scenario.concurrency(profile)
    free = capacity - share * capacity
    assert c * per_sequence <= free * (1 + 1e-9)
    assert (c + 1) * per_sequence > free * (1 - 1e-9)


BAD = [
    ("demand.intensity", -1, "demand.intensity: "),
    ("demand.intensity", math.nan, "demand.intensity: "),
    ("radio.alpha", 1.0, "radio.alpha: "),
    ("radio.model", "smoke signals", "radio: "),
    ("profiles[1].fraction", -0.1, "profiles[1].fraction: "),
    ("profiles[1].fraction", 0.2, "profiles[*].fraction: the sum is 0.7, not 1"),
    ("requests[0].probability", 0.6, "requests[*].probability: the sum is 1.1, not 1"),
    ("profiles[1].reusable.agent", 1201, "profiles[1].reusable.agent: 1201 tokens is more"),
    ("profiles[1].reusable.agent", -1, "profiles[1].reusable: agent: -1"),
    ("profiles[1].reusable.nobody", 5, "profiles[1].reusable: 'nobody' is not a request type"),
    ("profiles[1].persistent_bytes", 26e6, "profiles[1].persistent_bytes: "),
    ("profiles[1].name", "fallback", "profiles[1].name: 'fallback' is used twice"),
    ("prefill.linaer", 1.0, "prefill.linaer: unknown key"),
    ("colour", "red", "colour: unknown key"),
    ("engine.replicas", 0, "engine.replicas: "),
    ("targets.quantiles", [0.5, 1.0], "targets.quantiles: 1.0 is not in (0, 1)"),
    ("solver.damping", 0.0, "solver.damping: "),
]


@pytest.mark.parametrize(("path", "value", "said"), BAD, ids=[b[0] + repr(b[1]) for b in BAD])
def test_a_bad_field_is_named_in_one_line(path, value, said):
    with pytest.raises(ScenarioError) as refusal:
        small().with_field(path, value)
    line = str(refusal.value)
    assert said in line
    assert "\n" not in line


def test_a_missing_field_is_named():
    data = small().to_dict()
    del data["memory"]["per_token"]
    with pytest.raises(ScenarioError, match=r"memory\.per_token: missing"):
        Scenario.from_dict(data)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not a mapping"),
        ("- 1\n- 2\n", "not a mapping"),
        ("name: [", ":1: "),
        ("name: a\nname: b\n", "'name' is given twice"),
        ("? {a: b}\n: c\n", "not a plain value"),
        ("\x00", "s.yaml"),
        ("a: !!python/object:os.system {}\n", "s.yaml"),
    ],
)
def test_a_file_that_is_no_scenario_is_refused_in_one_line(tmp_path, text, said):
    path = tmp_path / "s.yaml"
    path.write_text(text)
    with pytest.raises(ScenarioError) as refusal:
        Scenario.load(path)
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_missing_or_binary_file_is_refused(tmp_path):
    with pytest.raises(ScenarioError, match="No such file"):
        Scenario.load(tmp_path / "none.yaml")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ScenarioError, match=r"b\.yaml"):
        Scenario.load(tmp_path / "b.yaml")


@pytest.mark.parametrize("text", ["2e-4", "2.0e-4", "2E-4", "0.0002", "+2e-4"])
def test_numbers_with_exponents_are_numbers(tmp_path, text):
    data = small().to_dict()
    data["prefill"]["linear"] = "@"
    path = tmp_path / "s.yaml"
    path.write_text(yaml.safe_dump(data).replace("'@'", text))
    assert Scenario.load(path).prefill.linear == pytest.approx(2e-4)


@settings(max_examples=60, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
        ),
        max_leaves=8,
    )
)
def test_no_input_but_a_scenario_error(data):
    with pytest.raises(ScenarioError):
        Scenario.from_dict(data)
