"""Devices: names and paths resolved, engine sections written out, misfits refused in one line."""

from __future__ import annotations

import orjson
import pytest

from cluster.devices import (
    FOLDERS_VARIABLE,
    DeviceProfile,
    device_path,
    engine_on_device,
    known_devices,
    load_device,
    memory_warnings,
    on_device,
)
from cluster.engines import make_engine
from cluster.engines.base import model_config, model_directory, nominal_bytes_per_token
from testbed.cli.answers import run
from testbed.errors import EngineError, ScenarioError
from testbed.presets import preset
from testbed.scenario import EngineSpec, Scenario
from testbed.step_time import StepTime

RTX4090_POOL_BYTES = 41_408 * 131_072


def record(**changes) -> dict:
    data = {
        "schema_version": 1,
        "source": {"kind": "measured", "tool": "testbed"},
        "engine": {"name": "vllm", "block_size": 32, "num_blocks": 64, "max_sequences": 8},
        "model": {"name": "tiny-llama", "layers": 4, "hidden": 256, "heads": 8, "kv_heads": 4},
        "device": {"kind": "cpu", "name": "some core"},
        "step_time": StepTime(c_pre=0.01, c_dec=0.002).model_dump(),
        "memory": {"num_blocks": 64, "block_size": 32},
        "prefill_points": [],  # parts that device time does not read are left alone
    }
    return {**data, **changes}


def write(path, data) -> str:
    path.write_bytes(orjson.dumps(data))
    return str(path)


def test_an_rtx_4090_has_the_pool_that_was_measured():
    """41,408 tokens of Llama-3.1-8B in 2,588 blocks of 16, as vLLM reported on the GPU."""
    spec = engine_on_device(EngineSpec(device="rtx4090"))
    assert (spec.num_blocks, spec.block_size) == (2588, 16)
    assert (spec.model, spec.dtype) == ("llama-3.1-8b", "bfloat16")
    assert (spec.token_budget, spec.max_sequences, spec.max_model_len) == (2048, 256, 32768)
    kappa = nominal_bytes_per_token(model_config(model_directory(spec.model)), 2)
    assert spec.num_blocks * spec.block_size * kappa == RTX4090_POOL_BYTES
    assert load_device("rtx4090").async_scheduling


@pytest.mark.parametrize("name", sorted(known_devices()))
def test_every_record_that_ships_fits_a_model_that_ships(name):
    profile = load_device(name)
    spec = engine_on_device(EngineSpec(device=name))
    assert spec.num_blocks is not None and spec.num_blocks * spec.block_size > spec.max_model_len
    assert profile.step_time.prefill_seconds(spec.max_model_len // 2) > 0
    assert profile.source.kind == "imported"


def test_what_a_section_says_beyond_its_defaults_stays():
    spec = engine_on_device(EngineSpec(device="rtx4090", max_sequences=32, num_blocks=1000))
    assert (spec.max_sequences, spec.num_blocks, spec.block_size) == (32, 1000, 16)


def test_another_block_size_keeps_the_pool_in_tokens():
    spec = engine_on_device(EngineSpec(device="rtx4090", block_size=64))
    assert spec.num_blocks == 41_408 // 64


def test_writing_out_is_idempotent_and_survives_a_saved_scenario():
    scenario = Scenario.from_dict(
        {
            "name": "on a device",
            "radio": {"model": "power_law", "xi": 0.05, "alpha": 2.0},
            "nodes": {"density": 1.0},
            "demand": {"intensity": 1.0},
            "prefill": {"linear": 1e-4},
            "memory": {"capacity": RTX4090_POOL_BYTES, "per_sequence": 2e8, "per_token": 131072},
            "requests": [{"name": "q", "probability": 1.0, "tokens": 100}],
            "profiles": [
                {"name": "s", "fraction": 1.0, "persistent_bytes": 0, "reusable": {"q": 0}}
            ],
            "engine": {"device": "rtx4090", "replicas": 3, "time_scale": 2.0},
        }
    )
    once = on_device(scenario)
    assert on_device(once) == once
    # A scenario that was saved has its defaults written out: they mean the device's all the same.
    assert on_device(Scenario.from_dict(scenario.to_dict())) == once
    assert once.engine is not None and once.engine.replicas == 3 and once.engine.time_scale == 2.0
    assert memory_warnings(scenario) == ()
    (said,) = memory_warnings(scenario.with_field("memory.capacity", 8e9))
    assert said.startswith("memory.capacity: 8e+09 bytes; the pool of engine.device rtx4090")


def test_without_a_device_nothing_changes():
    spec = EngineSpec()
    assert engine_on_device(spec) is spec


def test_a_path_is_read_and_a_cpu_schedules_between_steps(tmp_path):
    path = write(tmp_path / "calibration.json", record())
    profile = load_device(path)
    assert not profile.async_scheduling
    assert isinstance(profile.step_time, StepTime)
    assert engine_on_device(EngineSpec(device=path)).num_blocks == 64
    assert len(profile.sha256) == 64 and profile.facts()["name"] == "some core"


def test_names_are_looked_up_in_folders_that_the_environment_lists(tmp_path, monkeypatch):
    write(tmp_path / "mine-tiny-llama.json", record())
    monkeypatch.setenv(FOLDERS_VARIABLE, str(tmp_path))
    assert device_path("mine") == tmp_path / "mine-tiny-llama.json"
    write(tmp_path / "mine-other.json", record())
    with pytest.raises(EngineError, match="may be any of mine-other, mine-tiny-llama"):
        device_path("mine")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"schema_version": 2}, "not a calibration record of version 1"),
        ({"step_time": None}, "no step time"),
        ({"step_time": {"kind": "linear", "a": "fast"}}, "step_time"),
        ({"memory": {}, "engine": {"name": "vllm"}}, "no KV pool; set engine.num_blocks"),
        ({"model": {"name": "tiny-llama", "layers": 5}}, "num_hidden_layers 4"),
    ],
)
def test_a_record_that_will_not_do_is_refused_in_one_line(tmp_path, changes, line):
    path = write(tmp_path / "r.json", record(**changes))
    with pytest.raises(EngineError, match=line) as error:
        engine_on_device(EngineSpec(device=path))
    assert "\n" not in str(error.value) and str(error.value).startswith("engine.")


def test_the_time_of_an_engine_that_computes_cannot_be_scaled():
    with pytest.raises(EngineError, match=r"engine\.time_scale: 2: sglang computes"):
        make_engine(EngineSpec(name="sglang", time_scale=2.0))


def test_a_device_that_nobody_knows_names_those_that_are_known():
    with pytest.raises(EngineError, match=r"no record 'abacus' \(known: .*rtx4090-llama-3\.1-8b"):
        load_device("abacus")
    with pytest.raises(EngineError, match="No such file"):
        DeviceProfile.load("/nowhere/calibration.json")


def test_only_a_devices_time_is_scaled(tmp_path):
    path = tmp_path / "scenario.yaml"
    path.write_text(preset("paper-baseline").replace(engine={}).to_yaml())
    with pytest.raises(ScenarioError, match=r"--time-scale: .*engine\.device"):
        run(path, time_scale=2.0)
