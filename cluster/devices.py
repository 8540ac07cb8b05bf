"""Devices: ``engine.device`` resolved to what device time needs of a calibration.

A device is a calibration record (``calibration.json``), given as a path or by name. Names are
those of the records that come with the package, and of the files in the folders that
``TESTBED_DEVICES`` lists; a name may leave out what follows it after a hyphen as long as it stays
unambiguous (``rtx4090`` for ``rtx4090-llama-3.1-8b.json``).
"""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Self

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cluster.engines.base import model_config, model_directory, nominal_bytes_per_token
from testbed.errors import EngineError
from testbed.scenario import EngineSpec, Scenario, first_problem
from testbed.step_time import AnyStepTime

FOLDERS_VARIABLE = "TESTBED_DEVICES"
WIDTHS = {"bfloat16": 2, "float16": 2, "float32": 4}
MEMORY_TOLERANCE = 0.01
SHAPE = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
}
"""Shape in a record -> key of a model's config.json."""


class _Part(BaseModel):
    """The part of a calibration record that device time reads; what else it holds is left."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class _Source(_Part):
    kind: str
    tool: str
    notes: tuple[str, ...] = ()


class _Engine(_Part):
    name: str
    version: str | None = None
    dtype: str | None = None
    block_size: int | None = None
    num_blocks: int | None = None
    token_budget: int | None = None
    max_sequences: int | None = None
    max_model_len: int | None = None
    async_scheduling: bool | None = None


class _Model(_Part):
    name: str
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None


class _Device(_Part):
    kind: Literal["cpu", "gpu", "other"]
    name: str


class _Memory(_Part):
    pool_bytes: float | None = None
    block_size: int | None = None
    num_blocks: int | None = None


class DeviceProfile(_Part):
    """A measured device: its step time, its engine's limits, its KV pool."""

    path: str
    sha256: str
    source: _Source
    engine: _Engine
    model: _Model
    device: _Device
    step_time: AnyStepTime = Field(discriminator="kind")
    memory: _Memory = _Memory()

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a calibration record.

        Raises
        ------
        EngineError
            The file is missing, is no calibration record, or has no step time.
        """
        path = Path(path).absolute()
        try:
            text = path.read_bytes()
            data = orjson.loads(text)
        except OSError as error:
            raise EngineError(f"engine.device: {path}: {error.strerror}") from None
        except orjson.JSONDecodeError as error:
            raise EngineError(f"engine.device: {path}:{error.lineno}: {error.msg}") from None
        if not isinstance(data, dict) or data.get("schema_version") != 1:
            raise EngineError(f"engine.device: {path}: not a calibration record of version 1")
        if data.get("step_time") is None:
            raise EngineError(f"engine.device: {path}: this calibration has no step time")
        digest = hashlib.sha256(text).hexdigest()
        try:
            return cls.model_validate({**data, "path": str(path), "sha256": digest})
        except ValidationError as error:
            raise EngineError(f"engine.device: {path}: {first_problem(error)}") from None

    @property
    def async_scheduling(self) -> bool:
        """Whether its engine schedules while a step runs: as recorded, else as vLLM on a GPU."""
        recorded = self.engine.async_scheduling
        return self.device.kind == "gpu" if recorded is None else recorded

    @property
    def preset(self) -> str:
        """The model's preset name: the last part of its hub name."""
        return self.model.name.rsplit("/", 1)[-1].lower()

    def pool_tokens(self, bytes_per_token: float) -> int:
        """Tokens that the device's KV pool holds, all blocks counted.

        Raises
        ------
        EngineError
            The record says nothing of a pool.
        """
        blocks = self.memory.num_blocks or self.engine.num_blocks
        size = self.memory.block_size or self.engine.block_size
        if blocks and size:
            return blocks * size
        if self.memory.pool_bytes:
            return int(self.memory.pool_bytes // bytes_per_token)
        raise EngineError(
            f"engine.device: {self.path}: this calibration has no KV pool; set engine.num_blocks"
        )

    def facts(self) -> dict[str, Any]:
        """What an outcome says of the device."""
        return {
            "name": self.device.name,
            "record": Path(self.path).name,
            "record_sha256": self.sha256,
            "model": self.model.name,
            "measured_with": f"{self.engine.name} {self.engine.version or ''}".strip(),
            "step_time": self.step_time.kind,
            "source": {"kind": self.source.kind, "tool": self.source.tool},
        }


def device_folders() -> list[Path]:
    """Folders in which device names are looked up, in order."""
    given = os.environ.get(FOLDERS_VARIABLE, "")
    shipped = resources.files("calibration") / "devices"
    return [*(Path(p) for p in given.split(os.pathsep) if p), Path(str(shipped))]


def known_devices() -> dict[str, Path]:
    """Record by name; a folder named first wins."""
    known: dict[str, Path] = {}
    for folder in device_folders():
        if folder.is_dir():
            for path in sorted(folder.glob("*.json")):
                known.setdefault(path.stem, path)
    return known


def device_path(device: str) -> Path:
    """The record that ``engine.device`` means.

    Raises
    ------
    EngineError
        No record has this name, or several do.
    """
    if device.endswith(".json") or os.sep in device:
        return Path(device)
    known = known_devices()
    if device in known:
        return known[device]
    fitting = [name for name in known if name.startswith(f"{device}-")]
    if len(fitting) == 1:
        return known[fitting[0]]
    if fitting:
        raise EngineError(f"engine.device: {device!r} may be any of {', '.join(fitting)}")
    names = ", ".join(known) or "none"
    raise EngineError(
        f"engine.device: no record {device!r} (known: {names}; a path to a calibration.json or a "
        f"folder in {FOLDERS_VARIABLE} works too)"
    )


@lru_cache(maxsize=16)
def _load(path: str, _modified: int) -> DeviceProfile:
    return DeviceProfile.load(path)


def load_device(device: str) -> DeviceProfile:
    """The profile that ``engine.device`` means.

    Raises
    ------
    EngineError
        There is no such record, or it cannot be used.
    """
    path = device_path(device).absolute()
    modified = path.stat().st_mtime_ns if path.exists() else 0
    return _load(str(path), modified)


def engine_on_device(spec: EngineSpec) -> EngineSpec:
    """An engine section with everything that its device decides written out.

    What the section leaves at its default is the record's: model, data type, block size, token
    budget, most sequences, longest request (written out or not: a scenario that was saved has
    every default written out). The pool is the record's unless ``num_blocks`` is set.

    Raises
    ------
    EngineError
        There is no such device, or it was measured with a model of another shape.
    """
    if spec.device is None:
        return spec
    profile = load_device(spec.device)
    recorded: dict[str, Any] = {
        "model": profile.preset,
        "dtype": profile.engine.dtype,
        "block_size": profile.engine.block_size or profile.memory.block_size,
        "token_budget": profile.engine.token_budget,
        "max_sequences": profile.engine.max_sequences,
        "max_model_len": profile.engine.max_model_len,
    }
    fields = EngineSpec.model_fields
    changes = {
        name: value
        for name, value in recorded.items()
        if value is not None and getattr(spec, name) == fields[name].default
    }
    spec = spec.model_copy(update=changes)
    config = model_config(model_directory(spec.model))
    for name, key in SHAPE.items():
        measured, given = getattr(profile.model, name), config.get(key)
        if measured is not None and given is not None and measured != given:
            raise EngineError(
                f"engine.model: {spec.model} has {key} {given}, but {profile.device.name} was "
                f"measured with {profile.model.name}, which has {measured}"
            )
    if spec.num_blocks is None:
        kappa = nominal_bytes_per_token(config, WIDTHS.get(spec.dtype, 2))
        spec = spec.model_copy(update={"num_blocks": profile.pool_tokens(kappa) // spec.block_size})
    return spec


def on_device(scenario: Scenario) -> Scenario:
    """The scenario with its engine section written out (see :func:`engine_on_device`).

    Raises
    ------
    EngineError
        As there.
    """
    if scenario.engine is None or scenario.engine.device is None:
        return scenario
    return scenario.replace(engine=engine_on_device(scenario.engine))


def memory_warnings(scenario: Scenario) -> tuple[str, ...]:
    """What the scenario says of memory and its device does not: theory would miss by it."""
    if scenario.engine is None or scenario.engine.device is None:
        return ()
    spec = engine_on_device(scenario.engine)
    assert spec.num_blocks is not None
    config = model_config(model_directory(spec.model))
    kappa = nominal_bytes_per_token(config, WIDTHS.get(spec.dtype, 2))
    pool = spec.num_blocks * spec.block_size * kappa
    said = scenario.memory.capacity
    if abs(said / pool - 1.0) <= MEMORY_TOLERANCE:
        return ()
    return (
        f"memory.capacity: {said:.4g} bytes; the pool of engine.device {spec.device} "
        f"has {pool:.4g}",
    )
