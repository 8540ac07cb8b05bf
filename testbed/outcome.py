"""Outcome and RequestRecord: what ``predict``, ``simulate`` and ``run`` all yield.

An outcome is plain data. JSON has no infinity and no NaN: an infinite value is written as the
string ``"inf"``; a NaN is a defect and is refused when the outcome is built.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, Self

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from testbed.errors import OutcomeError

Kind = Literal["predicted", "simulated", "measured"]
Clock = Literal["none", "virtual", "wall clock", "device time", "emulated"]
Ending = Literal["completed", "rejected", "failed"]


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class Tier(_Data):
    """One profile's nodes (Theory B)."""

    density: float = Field(description="λ_s, nodes per km²")
    concurrency: int = Field(description="c_s")
    arrival_rate: float = Field(description="λ^q_s, requests/s per node")
    service_rate: float = Field(description="μ_s, requests/s per server (1/mean occupancy)")
    utilisation: float = Field(description="ρ_s")
    wait_probability: float = Field(description="probability of an excess delay > 0")
    mean_wait: float = Field(description="mean excess delay, s: TTFT beyond unloaded prefill")


def figure_key(value: float) -> str:
    """How a deadline or a probability is written as a key of :class:`Ttft`.

    Fifteen digits: every decimal that a scenario gives has a key of its own.

    >>> figure_key(0.8), figure_key(1.0), figure_key(0.9999999)
    ('0.8', '1', '0.9999999')
    """
    return f"{value:.15g}"


class Ttft(_Data):
    """Time to first token over all requests, seconds."""

    mean: float
    coverage: dict[str, float] = Field(description="{τ: P(TTFT ≤ τ)}")
    quantiles: dict[str, float] = Field(description="{ζ: T_ζ}")
    upper_bound: dict[str, float] | None = Field(
        default=None, description="queue-free coverage bound (Theory E3)"
    )


class Counts(_Data):
    """How requests ended; ``sent`` is always the sum of the rest."""

    sent: int
    completed: int
    rejected: int
    failed: int

    @model_validator(mode="after")
    def _conserved(self) -> Self:
        if self.sent != self.completed + self.rejected + self.failed:
            raise ValueError(
                f"sent {self.sent} is not completed {self.completed} + rejected {self.rejected} "
                f"+ failed {self.failed}"
            )
        return self


class Curve(_Data):
    """TTFT distribution for plots and comparison: P(TTFT ≤ seconds[i]) = probability[i]."""

    seconds: tuple[float, ...]
    probability: tuple[float, ...]


class Series(_Data):
    """TTFT of one request after the other: two answers to the same requests are compared by it."""

    stream: str = Field(description="fingerprint of the requests; equal only for the same ones")
    first: int = Field(default=0, description="number of the first request here in the stream")
    ttft: tuple[float | None, ...] = Field(description="s; none where the request has none")


class Outcome(_Data):
    """The answer to one scenario, whichever way it was asked."""

    schema_version: Literal[1] = 1
    kind: Kind
    clock: Clock
    scenario_name: str
    scenario: dict[str, Any] = Field(description="the scenario asked, whole")
    policy: str
    delay_model: str | None = None
    feasible: bool
    reason: str | None = None
    converged: bool = True
    iterations: int = 0
    association: dict[str, dict[str, float]] = Field(description="{request: {profile: p}}")
    tiers: dict[str, Tier]
    ttft: Ttft
    mean_distance: float = Field(description="R̄, km")
    reusable_prefix_tokens: float
    offloading_ratio: float
    capacity_margin: float = Field(
        description="(capacity − least demand)/capacity of Theory D2; negative: cannot be served"
    )
    requests: Counts | None = None
    confidence: dict[str, tuple[float, float]] = Field(
        default_factory=dict, description="95 % interval of a figure, by its dotted path"
    )
    curve: Curve | None = None
    series: Series | None = None
    valid: bool = True
    invalid_reason: str | None = None
    warnings: tuple[str, ...] = ()
    seed: int | None = None
    extra: dict[str, Any] = Field(
        default_factory=dict, description="figures only this kind has (lag, speed, history)"
    )
    environment: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _numbers(self) -> Self:
        for path, value in flatten(self.model_dump(exclude={"scenario", "environment"})):
            if isinstance(value, float) and math.isnan(value):
                raise ValueError(f"{path} is not a number")
        return self

    def figure(self, path: str) -> float:
        """The figure at a dotted path, ``ttft.quantiles.0.99``; raises :class:`OutcomeError`."""
        for key, value in flatten(self.model_dump(exclude={"scenario", "environment", "series"})):
            if key == path and isinstance(value, int | float):
                return float(value)
        raise OutcomeError(f"{self.scenario_name}: no figure {path!r} in this outcome")

    def to_json(self) -> bytes:
        return dump_json(self.model_dump(mode="python", exclude_none=False))

    @classmethod
    def from_json(cls, text: bytes | str, source: str = "outcome") -> Self:
        try:
            return cls.model_validate(_infinite(orjson.loads(text)))
        except orjson.JSONDecodeError as error:
            raise OutcomeError(f"{source}:{error.lineno}: {error.msg}") from None
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            where = ".".join(str(p) for p in problem["loc"])
            raise OutcomeError(f"{source}: {where}: {problem['msg']}") from None

    def save(self, path: str | Path) -> None:
        write_atomically(path, self.to_json() + b"\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            raise OutcomeError(f"{path}: {error.strerror}") from None
        return cls.from_json(text, str(path))


class RequestRecord(_Data):
    """One request's life. Times are seconds on the driver's clock since the run's start.

    ``ttft`` counts from ``intended`` (coordinated omission): radio delay, dispatch, queue and
    prefill are all in it. ``ttft_from_send`` stands beside it and counts from the actual send,
    the radio delay included in both.
    """

    index: int
    type: str
    ending: Ending
    reason: str | None = None
    profile: str | None = None
    node: int | None = None
    distance: float | None = Field(default=None, description="km")
    radio: float = Field(default=0.0, description="s")
    intended: float = Field(description="start of the request at the user")
    sent: float | None = Field(default=None, description="radio emulation began")
    dispatched: float | None = Field(default=None, description="left the router for the replica")
    received: float | None = Field(default=None, description="arrived in the replica's process")
    queued: float | None = Field(default=None, description="the engine took it in")
    scheduled: float | None = Field(default=None, description="first scheduled in a step")
    first_token: float | None = Field(default=None, description="first token at the replica")
    engine_first_token: float | None = Field(default=None, description="the engine's own stamp")
    finished: float | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = Field(default=0, description="as the engine reported")
    reusable_tokens: float = Field(default=0.0, description="as the catalogue promised")
    attempts: int = 1

    @property
    def ttft(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.intended

    @property
    def ttft_from_send(self) -> float | None:
        if self.first_token is None or self.sent is None:
            return None
        return self.first_token - self.sent

    @property
    def dispatch_lag(self) -> float | None:
        """How late the request left for its replica, s; the emulated radio is not lateness."""
        if self.dispatched is None:
            return None
        return self.dispatched - self.intended - self.radio


class RecordWriter:
    """Append-only JSONL: each record is on disk when ``write`` returns to the event loop."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - closed by close()

    def write(self, record: RequestRecord) -> None:
        self._file.write(dump_json(record.model_dump(exclude_none=True)) + b"\n")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_records(path: str | Path) -> Iterator[RequestRecord]:
    """Records of a JSONL file; a last line cut short by a kill is dropped, others are errors."""
    lines = Path(path).read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            yield RequestRecord.model_validate(orjson.loads(line))
        except (orjson.JSONDecodeError, ValidationError) as error:
            if number == len(lines):
                return
            raise OutcomeError(f"{path}:{number}: {str(error).splitlines()[0]}") from None


# --- JSON ------------------------------------------------------------------------------------


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested mappings and sequences with their dotted paths."""
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        yield path, value
        return
    for key, inner in items:
        yield from flatten(inner, f"{path}.{key}" if path else str(key))


def dump_json(value: Any, *, indent: bool = False) -> bytes:
    """Strict JSON: infinity as ``"inf"``, NaN refused, NumPy scalars and arrays accepted."""
    option = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    return orjson.dumps(_finite(value), option=option | (orjson.OPT_INDENT_2 if indent else 0))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    if hasattr(value, "tolist"):  # NumPy scalars and arrays
        return _finite(value.tolist())
    if isinstance(value, float):
        if math.isnan(value):
            raise OutcomeError("a figure is not a number (NaN)")
        if math.isinf(value):
            return "inf" if value > 0 else "-inf"
    return value


def _infinite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _infinite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_infinite(v) for v in value]
    return (
        {"inf": math.inf, "-inf": -math.inf}.get(value, value) if isinstance(value, str) else value
    )


def write_atomically(path: str | Path, data: bytes | str) -> None:
    """Write a whole file or nothing: a temporary file beside it, flushed, then renamed."""
    path = Path(path)
    payload = data.encode() if isinstance(data, str) else data
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
