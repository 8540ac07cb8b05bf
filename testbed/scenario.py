"""Scenario: what is asked, whole and validated, before anything is computed or started.

Units are the field's own everywhere: seconds, tokens, bytes, kilometres, requests per second,
nodes per square kilometre. Symbols and labels are those of the theory (``Theory A1`` ...).

Example
-------
>>> from testbed.scenario import Scenario
>>> scenario = Scenario.from_dict({
...     "name": "one tier",
...     "radio": {"model": "power_law", "xi": 0.05, "alpha": 2.0},
...     "nodes": {"density": 1.0},
...     "demand": {"intensity": 3.0},
...     "prefill": {"linear": 2.0e-4},
...     "memory": {"capacity": 8e9, "per_sequence": 5e8, "per_token": 131072},
...     "requests": [{"name": "chat", "probability": 1.0, "tokens": 1024,
...                   "decode_occupancy": 0.4}],
...     "profiles": [{"name": "fallback", "fraction": 1.0, "persistent_bytes": 0,
...                   "reusable": {"chat": 0}}],
... })
>>> scenario.concurrency(scenario.profiles[0])
16
"""

from __future__ import annotations

import hashlib
import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import orjson
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from testbed.errors import ScenarioError

FRACTION_TOLERANCE = 1e-6
"""How far probabilities and profile fractions may sum from 1 (decimal YAML rounding)."""

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, max_length=120, pattern=r"^[^\s\x00-\x1f](.*\S)?$")]


class Part(BaseModel):
    """A frozen part of a scenario that rejects unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


# --- Radio (Theory A7, H4) ------------------------------------------------------------------


class PowerLawRadio(Part):
    """Theory A7: delay = ξ·r^α seconds at r kilometres."""

    model: Literal["power_law"] = "power_law"
    xi: Positive = Field(description="ξ, seconds · km^-α")
    alpha: float = Field(gt=1, allow_inf_nan=False, description="α, path-loss-like exponent > 1")


class SinrRadio(Part):
    """Theory H4: delay = payload / rate, rate = bandwidth · log2(1 + SINR), Rayleigh fading."""

    model: Literal["sinr"]
    bandwidth: Positive = Field(description="Hz for one request")
    payload: Positive = Field(description="bits sent for one request")
    path_loss_exponent: float = Field(default=4.0, gt=2, allow_inf_nan=False)
    snr_at_1km: Positive = Field(description="mean SNR at 1 km without interference, linear")
    interference: bool = Field(default=True, description="all other nodes transmit (full buffer)")
    spectral_cap: Positive = Field(default=8.0, description="bit/s/Hz, highest modulation")
    overhead: NonNegative = Field(default=0.0, description="s added to every transfer")
    coherence: Positive = Field(
        default=0.005, description="s after which fading and interference are drawn anew"
    )


class HistogramRadio(Part):
    """One-way delay drawn from a measured histogram file, the same at every distance."""

    model: Literal["histogram"]
    file: str = Field(description="lines `bin lower bound ms, relative count`")
    packets: int = Field(default=1, ge=1, description="packets sent back to back per request")


class PacketTraceRadio(Part):
    """Packet-opportunity trace (Mahimahi): each line a millisecond when one packet may cross."""

    model: Literal["packet_trace"]
    file: str
    payload: Positive = Field(description="bytes sent for one request")
    packet: int = Field(default=1500, ge=1, description="bytes per opportunity")


Radio = Annotated[
    PowerLawRadio | SinrRadio | HistogramRadio | PacketTraceRadio, Field(discriminator="model")
]


# --- Space, demand, compute, memory ---------------------------------------------------------


class Nodes(Part):
    density: Positive = Field(description="λ_b, nodes per km² (Theory A1)")


class Demand(Part):
    intensity: Positive = Field(description="λ_req, requests/s per km² (Theory A1)")


class Prefill(Part):
    """Theory A8 with H1: g(n | h) = overhead + linear·n + quadratic·n² + context·n·h for n > 0.

    g(0) = 0. ``context = 0`` and ``overhead = 0`` give the paper's baseline.
    """

    overhead: NonNegative = Field(default=0.0, description="t₀, s per prefill")
    linear: NonNegative = Field(default=0.0, description="a, s/token")
    quadratic: NonNegative = Field(default=0.0, description="b, s/token²")
    context: NonNegative = Field(default=0.0, description="d, s/token² (new × cached, H1)")

    @model_validator(mode="after")
    def _takes_time(self) -> Self:
        if self.overhead + self.linear + self.quadratic == 0:
            raise ValueError("overhead, linear and quadratic are all 0: prefill would be free")
        return self


class Memory(Part):
    capacity: Positive = Field(description="M, bytes usable for KV state")
    per_sequence: Positive = Field(description="m_run, bytes per active sequence (Theory A9)")
    per_token: Positive = Field(description="κ, bytes per cached token (Theory A4)")

    def concurrency(self, persistent_bytes: float = 0.0) -> int:
        """c = floor((M − B)/m_run), sequences at once beside B pinned bytes (Theory A9).

        The quotient gets a relative slack of 1e-12 so that an exact multiple written in decimal
        does not lose a sequence to rounding.
        """
        return math.floor((self.capacity - persistent_bytes) / self.per_sequence * (1 + 1e-12))


class RequestType(Part):
    """Theory A2: one path of the prefix forest, or the mean of a cluster of paths."""

    name: Name
    probability: Probability = Field(description="p_q")
    tokens: Positive = Field(description="L_q, input tokens (may be a fractional mean)")
    decode_occupancy: NonNegative = Field(
        default=0.0, description="D_q, s of occupancy beyond the residual prefill"
    )
    output_tokens: Positive = Field(default=1.0, description="mean tokens generated")
    family: Name | None = Field(
        default=None,
        description="types of one family share one nested prefix chain; default: its own",
    )

    @property
    def prefix_family(self) -> str:
        return self.family if self.family is not None else self.name


class Profile(Part):
    """Theory A3-A6: an ancestor-closed set of cached prefixes and how many nodes hold it."""

    name: Name
    fraction: Probability = Field(description="π_s")
    persistent_bytes: NonNegative = Field(description="B_s")
    reusable: dict[str, float] = Field(description="h_sq, tokens, for every request type")
    pinned_blocks: tuple[int, ...] = Field(
        default=(),
        description="trace block ids of the deepest pinned vertices; their ancestors are implied",
    )
    engine: Literal["vllm", "sglang", "emulated"] | None = Field(
        default=None, description="engine of this profile's replicas, if not the scenario's"
    )
    calibration: str | None = Field(
        default=None, description="that engine's calibration.json, if not engine.calibration"
    )
    prefill: Prefill | None = Field(
        default=None, description="that engine's g(n | h), if not the scenario's"
    )
    decode_occupancy: dict[str, float] | None = Field(
        default=None, description="D_q on that engine, s, for every request type"
    )

    @field_validator("reusable")
    @classmethod
    def _tokens(cls, value: dict[str, float]) -> dict[str, float]:
        for name, tokens in value.items():
            if not (math.isfinite(tokens) and tokens >= 0):
                raise ValueError(f"{name}: {tokens} is not a number of tokens >= 0")
        return value

    @field_validator("decode_occupancy")
    @classmethod
    def _seconds(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for name, seconds in (value or {}).items():
            if not (math.isfinite(seconds) and seconds >= 0):
                raise ValueError(f"{name}: {seconds} is not a number of seconds >= 0")
        return value


class Targets(Part):
    coverage_at: tuple[Positive, ...] = Field(default=(0.5, 0.8), description="τ, seconds")
    quantiles: tuple[float, ...] = Field(default=(0.5, 0.9, 0.95, 0.99), description="ζ in (0, 1)")

    @field_validator("quantiles")
    @classmethod
    def _open_interval(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        for z in value:
            if not 0 < z < 1:
                raise ValueError(f"{z} is not in (0, 1)")
        return value


class Solver(Part):
    """Theory D1."""

    damping: float = Field(default=0.5, gt=0, le=1, description="η")
    tolerance: Positive = Field(default=1e-10, description="relative change of W̄ at the stop")
    max_iterations: int = Field(default=2000, ge=1)


# --- Optional sections used by simulate and run ---------------------------------------------


class WorkloadSpec(Part):
    """Where requests come from; without it, request types are drawn as Poisson streams."""

    trace: str | None = Field(default=None, description="trace file; found by content")
    format: str | None = Field(default=None, description="reader name, if not to be detected")
    block_size: int | None = Field(
        default=None, ge=1, description="tokens per block of the trace; absent: its format's own"
    )
    arrivals: Literal["verbatim", "jitter", "poisson", "gamma", "diurnal", "per_type"] = "poisson"
    cv2: Positive = Field(
        default=1.0,
        description="squared coefficient of variation of the gaps (gamma, diurnal, per_type)",
    )
    course: tuple[tuple[Positive, NonNegative], ...] | None = Field(
        default=None,
        description="diurnal: (seconds, relative rate) of each part of a day, again and again",
    )
    window: tuple[NonNegative, Positive] | None = Field(
        default=None, description="only the trace's requests of [start, stop) seconds"
    )
    tokenizer: str | None = Field(
        default=None,
        description="of a chat trace: tokenizer.json or a model directory; absent: the engine's",
    )
    tokens: Literal["drawn", "recorded"] | None = Field(
        default=None, description="token ids: drawn from block ids (if absent), or the trace's own"
    )
    token_scale: Positive = Field(default=1.0, description="tokens kept of each trace token")
    requests: int | None = Field(default=None, ge=1, description="first N requests of the trace")
    max_tokens: int | None = Field(
        default=None, ge=2, description="drop requests longer than this (counted, after scaling)"
    )
    output_tokens: int | None = Field(
        default=None, ge=1, description="fix the number of generated tokens (said in the outcome)"
    )
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.arrivals == "diurnal") != (self.course is not None):
            raise ValueError("course: diurnal arrivals need it, and no others have it")
        if self.course is not None and not any(rate > 0 for _, rate in self.course):
            raise ValueError("course: no part has a rate above 0")
        if self.window is not None and self.window[0] >= self.window[1]:
            raise ValueError("window: it ends before it begins")
        return self


class EngineSpec(Part):
    """The serving engine of every replica."""

    name: Literal["vllm", "sglang", "emulated"] = "vllm"
    model: str = Field(default="tiny-llama", description="preset name or a model directory")
    calibration: str | None = Field(default=None, description="calibration.json")
    num_blocks: int | None = Field(default=None, ge=2, description="KV pool, blocks")
    block_size: int = Field(default=32, ge=1, description="tokens per KV block")
    token_budget: int = Field(default=2048, ge=1, description="tokens per step")
    max_sequences: int = Field(default=16, ge=1, description="most running sequences")
    max_model_len: int = Field(default=8192, ge=2, description="prompt plus output, tokens")
    replicas: int = Field(default=2, ge=1)
    dtype: Literal["bfloat16", "float16", "float32", "auto"] = "bfloat16"
    device: str | None = Field(
        default=None, description="device-time profile: real scheduler, paced by a measured GPU"
    )
    time_scale: Positive = Field(default=1.0, description="wall seconds per device second")
    gpus_per_replica: float = Field(default=0, ge=0)
    reuse: Literal["pinned", "any"] = Field(
        default="pinned",
        description="pinned: only a profile's prefixes are reused, as the scenario says; any: "
        "whatever the engine's own cache still holds as well",
    )


class RoutingSpec(Part):
    """Theory G1-G3, shared by simulate and run."""

    margin_z: NonNegative = Field(default=0.0, description="z_δ of ψ = z_δ·σ̂ (G1)")
    admission_high: Positive | None = Field(
        default=None, description="ρ at which a tier closes; absent: never"
    )
    admission_low: Positive | None = Field(
        default=None, description="ρ at which it reopens; absent: admission_high"
    )
    candidates_per_profile: int = Field(default=1, ge=1, description="nearest few kept (G2)")
    telemetry_period: NonNegative = Field(default=0.5, description="s between advertised waits")
    telemetry_delay: NonNegative = Field(default=0.0, description="s an advertised wait is old")
    telemetry_window: Positive = Field(
        default=5.0, description="time constant, s, of the wait that a node advertises"
    )

    @model_validator(mode="after")
    def _hysteresis(self) -> Self:
        if self.admission_low is None:
            return self
        if self.admission_high is None or self.admission_low > self.admission_high:
            raise ValueError("admission_low is above admission_high")
        return self


class Users(Part):
    """Where requests come from in the plane, and how their senders move."""

    pattern: Literal["uniform", "clustered"] = Field(
        default="uniform", description="clustered: a Thomas process, Gaussian about its parents"
    )
    count: int | None = Field(
        default=None, ge=1, description="users that stay; absent: a new user for every request"
    )
    cluster_density: Positive = Field(default=0.2, description="Thomas parents per km²")
    cluster_spread: Positive = Field(default=0.3, description="standard deviation, km")
    mobility: Literal["none", "random_waypoint", "gauss_markov"] = Field(
        default="none", description="how the `count` users move (Theory H10)"
    )
    speed: Positive = Field(default=0.0015, description="mean speed, km/s (0.0015: walking)")
    memory: Positive = Field(default=60.0, description="s over which Gauss-Markov velocity fades")

    @model_validator(mode="after")
    def _somebody_moves(self) -> Self:
        if self.mobility != "none" and self.count is None:
            raise ValueError("mobility needs users that stay: give count")
        return self


class Failures(Part):
    """Nodes fail and come back, each on its own, after exponential times."""

    mean_uptime: Positive = Field(description="s between a recovery and the next failure")
    mean_downtime: Positive = Field(description="s until a failed node serves again")
    detection: NonNegative = Field(default=1.0, description="s until the router knows of either")
    attempts: int = Field(default=3, ge=1, description="nodes tried for one request")


class Migration(Part):
    """Profiles move towards a target placement, one catalogue epoch after another (Theory G4)."""

    target: dict[str, Probability] = Field(description="{profile: fraction π_s} to reach")
    budget: NonNegative = Field(description="bytes moved per epoch over the whole network")


class Backhaul(Part):
    """Remote KV fetch between nodes (Theory H6): local, fetch or recompute, the least."""

    rate: Positive = Field(description="bytes/s of one transfer")
    latency: NonNegative = Field(default=0.0, description="s per transfer")
    decompression: NonNegative = Field(default=0.0, description="s per byte at the receiver")
    interference: NonNegative = Field(
        default=0.0, description="s of foreground inference held up per s of decompression"
    )


class SimulationSpec(Part):
    """What ``simulate`` is free to choose; every choice is printed with its outcome."""

    space: Literal["palm", "torus"] = Field(
        default="palm", description="palm: exact nearest distances (Theory F4); torus: points"
    )
    nodes: int = Field(default=100, ge=1, description="nodes simulated (torus: expected number)")
    positions: str | None = Field(
        default=None, description="CSV of nodes `x,y[,profile]`, km; sets nodes and the torus"
    )
    node_model: Literal[
        "exponential", "exponential_by_type", "deterministic", "measured", "engine"
    ] = Field(default="exponential", description="exponential: one rate per tier (Theory B3)")
    service_file: str | None = Field(
        default=None, description="measured occupancy, one number of seconds a line"
    )
    waits: Literal["theory", "node"] | None = Field(
        default=None,
        description="what the policy sees: the tier means that predict finds, or each node's own "
        "mean; absent: theory for queues in palm, node otherwise",
    )
    warm_up: int | None = Field(
        default=None, ge=0, description="requests before the measured ones; absent: a fifth"
    )
    users: Users = Users()
    failures: Failures | None = None
    catalogue_period: Positive | None = Field(
        default=None, description="s between catalogue epochs; absent: the catalogue is live"
    )
    migration: Migration | None = None
    backhaul: Backhaul | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.node_model == "measured" and self.service_file is None:
            raise ValueError("node_model: measured needs a service_file")
        if self.migration is not None and self.catalogue_period is None:
            raise ValueError("migration: needs a catalogue_period, its epoch")
        return self


class Scenario(Part):
    """One question, asked of theory, simulation and cluster alike."""

    name: Name
    policy: Name = "load_aware"
    delay_model: Name = "erlang_c"
    radio: Radio
    nodes: Nodes
    demand: Demand
    prefill: Prefill
    memory: Memory
    requests: tuple[RequestType, ...] = Field(min_length=1)
    profiles: tuple[Profile, ...] = Field(min_length=1)
    targets: Targets = Targets()
    solver: Solver = Solver()
    routing: RoutingSpec = RoutingSpec()
    workload: WorkloadSpec | None = None
    engine: EngineSpec | None = None
    simulation: SimulationSpec | None = None

    # -- laws between the parts --

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _distinct([q.name for q in self.requests], "requests")
        _distinct([s.name for s in self.profiles], "profiles")
        _sums_to_one([q.probability for q in self.requests], "requests[*].probability")
        _sums_to_one([s.fraction for s in self.profiles], "profiles[*].fraction")
        known = {q.name for q in self.requests}
        for i, s in enumerate(self.profiles):
            if missing := known - set(s.reusable):
                raise ValueError(
                    f"profiles[{i}].reusable: no entry for request type {sorted(missing)[0]!r}"
                )
            if extra := set(s.reusable) - known:
                raise ValueError(
                    f"profiles[{i}].reusable: {sorted(extra)[0]!r} is not a request type"
                )
            if s.decode_occupancy is not None and set(s.decode_occupancy) != known:
                odd = sorted(set(s.decode_occupancy) ^ known)[0]
                raise ValueError(
                    f"profiles[{i}].decode_occupancy: {odd!r} is "
                    + ("missing" if odd in known else "not a request type")
                )
            for q in self.requests:
                if s.reusable[q.name] > q.tokens:
                    raise ValueError(
                        f"profiles[{i}].reusable.{q.name}: {s.reusable[q.name]:g} tokens is more "
                        f"than the prompt's {q.tokens:g}"
                    )
            if self.concurrency(s) < 1:
                raise ValueError(
                    f"profiles[{i}].persistent_bytes: {s.persistent_bytes:g} of "
                    f"{self.memory.capacity:g} bytes leaves no room for one sequence of "
                    f"{self.memory.per_sequence:g} bytes (Theory A9)"
                )
        if self.simulation is not None and self.simulation.migration is not None:
            target = self.simulation.migration.target
            field = "simulation.migration.target"
            if unknown := set(target) - {s.name for s in self.profiles}:
                raise ValueError(f"{field}: {sorted(unknown)[0]!r} is not a profile")
            _sums_to_one(list(target.values()), field)
        return self

    def concurrency(self, profile: Profile) -> int:
        """c_s (Theory A9), capped by the engine's sequence limit."""
        c = self.memory.concurrency(profile.persistent_bytes)
        return c if self.engine is None else min(c, self.engine.max_sequences)

    # -- in and out --

    @classmethod
    def from_dict(cls, data: Any, source: str = "scenario") -> Self:
        """Validate a mapping; raise :class:`ScenarioError` with one line that names the field."""
        if not isinstance(data, dict):
            raise ScenarioError(f"{source}: not a mapping of scenario fields")
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise ScenarioError(f"{source}: {first_problem(error)}") from None

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a scenario from YAML (or JSON, which is YAML).

        Raises
        ------
        ScenarioError
            The file is missing, is not YAML, or does not describe a scenario.
        """
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8 text"
            raise ScenarioError(f"{path}: {reason}") from None
        try:
            data = yaml.load(text, Loader=_Loader)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            where = f"{path}:{mark.line + 1}" if mark else str(path)
            reason = getattr(error, "problem", None) or str(error).splitlines()[0]
            raise ScenarioError(f"{where}: {reason}") from None
        return cls.from_dict(data, str(path))

    def to_dict(self) -> dict[str, Any]:
        """Plain values; optional sections that are absent stay absent."""
        return self.model_dump(mode="json", exclude_none=True)

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)

    def replace(self, **changes: Any) -> Self:
        """A validated copy with top-level fields replaced.

        >>> scenario.replace(policy="nearest")  # doctest: +SKIP
        """
        return self.from_dict({**self.to_dict(), **_plain(changes)})

    def with_field(self, path: str, value: Any) -> Self:
        """A validated copy with one field replaced, named as in an error message.

        ``path`` is dotted, with ``[i]`` for lists: ``demand.intensity``,
        ``profiles[1].fraction``.
        """
        data = self.to_dict()
        keys = [k for k in path.replace("[", ".").replace("]", "").split(".") if k]
        if not keys:
            raise ScenarioError("an empty field name")
        at: Any = data
        for depth, key in enumerate(keys):
            index: Any = int(key) if isinstance(at, list) and key.isdigit() else key
            last = depth == len(keys) - 1
            try:
                if last:
                    at[index] = value
                else:
                    at = at.setdefault(index, {}) if isinstance(at, dict) else at[index]
            except (IndexError, TypeError, KeyError):
                raise ScenarioError(f"{path}: no such field") from None
        return self.from_dict(data, self.name)


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice and reads 2e-4 as a number (YAML 1.2)."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str | int | float | bool):
            raise yaml.constructor.ConstructorError(
                None, None, "a key that is not a plain value", key_node.start_mark
            )
        if key in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"key {key!r} is given twice", key_node.start_mark
            )
        seen.add(key)
    loader.flatten_mapping(node)
    return {
        loader.construct_object(k, deep=True): loader.construct_object(v, deep=True)
        for k, v in node.value
    }


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
_Loader.yaml_implicit_resolvers = {
    key: list(value) for key, value in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_none=True)
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def _distinct(names: list[str], field: str) -> None:
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ValueError(f"{field}[{i}].name: {name!r} is used twice")


def _sums_to_one(values: list[float], field: str) -> None:
    total = math.fsum(values)
    if abs(total - 1.0) > FRACTION_TOLERANCE:
        raise ValueError(f"{field}: the sum is {total:g}, not 1")


def first_problem(error: ValidationError) -> str:
    """The first validation problem as ``field.path[2].name: what is wrong``."""
    problem = error.errors(include_url=False)[0]
    path = ""
    for part in problem["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part in ("power_law", "sinr", "histogram", "packet_trace"):
            continue  # pydantic's tag of the radio union, not a field
        else:
            path += f".{part}" if path else str(part)
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        message = "unknown key"
    elif problem["type"] == "missing":
        message = "missing"
    elif problem["type"] not in ("value_error", "assertion_error"):
        message = f"{message[0].lower()}{message[1:]} (got {_shown(problem.get('input'))})"
    more = error.error_count() - 1
    tail = f" (and {more} more)" if more else ""
    return f"{path}: {message}{tail}" if path else f"{message}{tail}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def scenario_hash(scenario: Scenario) -> str:
    """SHA-256 (first 16 hex digits) of the scenario's canonical JSON: its identity in outcomes."""
    payload = orjson.dumps(scenario.to_dict(), option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(payload).hexdigest()[:16]
