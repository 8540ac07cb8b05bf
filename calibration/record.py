"""Calibration: everything measured on (or imported for) one engine on one device.

``calibration.json`` is one :class:`Calibration`. A value that a source cannot know is absent,
never zero; every value carries its standard error where a fit or repeats gave one. Seconds,
tokens and bytes throughout.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from testbed.errors import CalibrationError
from testbed.outcome import dump_json, write_atomically
from testbed.scenario import Prefill, first_problem
from testbed.step_time import AnyStepTime

SCHEMA_VERSION = 1

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


# --- Where it comes from ----------------------------------------------------------------------


class SourceFile(_Data):
    """A file that a value was read from, by content."""

    path: str = Field(description="as named by whoever ran the import or the measurement")
    sha256: str | None = None
    licence: str | None = None


class Source(_Data):
    """How this record came to be."""

    kind: Literal["measured", "imported", "emulated"]
    tool: str = Field(description="what measured: testbed, llmservingsim, distserve, guidellm, …")
    tool_version: str | None = None
    files: tuple[SourceFile, ...] = ()
    notes: tuple[str, ...] = Field(
        default=(), description="assumptions and derivations, one sentence each"
    )


class EngineFacts(_Data):
    """The engine as it was configured."""

    name: str = Field(description="vllm, sglang, emulated, …")
    version: str | None = None
    dtype: str | None = None
    tensor_parallel: int = Field(default=1, ge=1)
    block_size: int | None = Field(default=None, ge=1, description="tokens per KV block")
    num_blocks: int | None = Field(default=None, ge=1, description="KV pool, blocks")
    token_budget: int | None = Field(default=None, ge=1, description="tokens per step")
    max_sequences: int | None = Field(default=None, ge=1)
    max_model_len: int | None = Field(default=None, ge=1)
    prefix_caching: bool | None = None
    async_scheduling: bool | None = None
    arguments: dict[str, Any] = Field(default_factory=dict, description="the engine's own, as set")


class ModelFacts(_Data):
    """The model's shape."""

    name: str
    layers: int | None = Field(default=None, ge=1)
    hidden: int | None = Field(default=None, ge=1)
    heads: int | None = Field(default=None, ge=1)
    kv_heads: int | None = Field(default=None, ge=1)
    head_dim: int | None = Field(default=None, ge=1)
    intermediate: int | None = Field(default=None, ge=1)
    vocabulary: int | None = Field(default=None, ge=1)
    parameters: int | None = Field(default=None, ge=1)
    weight_bytes: Positive | None = None


class DeviceFacts(_Data):
    """The device that did the arithmetic."""

    kind: Literal["cpu", "gpu", "other"]
    name: str
    count: int = Field(default=1, ge=1)
    memory_bytes: Positive | None = None
    details: dict[str, Any] = Field(
        default_factory=dict, description="clocks, power limit, MIG, driver, cores, …"
    )


# --- What was measured ------------------------------------------------------------------------


class Estimate(_Data):
    """A number with its standard error, if one is known."""

    value: float = Field(allow_inf_nan=False)
    standard_error: NonNegative | None = None
    samples: int | None = Field(default=None, ge=0)

    def interval(self, z: float = 1.959963984540054) -> tuple[float, float]:
        """Normal interval, 95 % unless told; a point when the error is unknown."""
        half = z * (self.standard_error or 0.0)
        return self.value - half, self.value + half


class PrefillFit(_Data):
    """g(n | h) (Theory A8, H1) with the standard error of each coefficient."""

    coefficients: Prefill
    standard_errors: dict[str, NonNegative] = Field(default_factory=dict)
    relative_error: NonNegative | None = Field(
        default=None, description="held-out root-mean-square relative error"
    )
    alternatives: tuple[FitReport, ...] = Field(
        default=(), description="every form that was fitted, the chosen one among them"
    )

    @model_validator(mode="after")
    def _known(self) -> Self:
        if unknown := set(self.standard_errors) - set(Prefill.model_fields):
            raise ValueError(f"standard_errors: no coefficient {sorted(unknown)[0]!r}")
        return self


class FitReport(_Data):
    """How well one form fits the points it was fitted to, and those held out."""

    name: str
    points: int = Field(ge=0)
    relative_error: NonNegative = Field(description="root-mean-square relative error, fitted")
    held_out_error: NonNegative | None = Field(default=None, description="the same, held out")
    coefficients: dict[str, float] = Field(default_factory=dict)
    standard_errors: dict[str, NonNegative] = Field(default_factory=dict)


class MemoryRecord(_Data):
    """KV pool and bytes per cached token (Theory A4)."""

    pool_bytes: Positive | None = Field(default=None, description="M, bytes of KV pool")
    kappa_nominal: Positive | None = Field(
        default=None, description="2·layers·kv_heads·head_dim·bytes, bytes/token"
    )
    kappa_measured: Estimate | None = Field(default=None, description="bytes/token in the pool")
    block_size: int | None = Field(default=None, ge=1)
    num_blocks: int | None = Field(default=None, ge=1)
    source: str | None = Field(default=None, description="where the pool size comes from")

    @property
    def kappa(self) -> float | None:
        """The measured κ where there is one, else the nominal (Theory A4)."""
        return self.kappa_nominal if self.kappa_measured is None else self.kappa_measured.value


class ConcurrencyRecord(_Data):
    """Theory A9 on one profile: sequences before the engine queues or preempts."""

    profile: str
    persistent_bytes: NonNegative = 0.0
    measured: int | None = Field(default=None, ge=0, description="c_s as seen")
    formula: int | None = Field(default=None, ge=0, description="floor((M − B_s)/m_run)")
    per_sequence: Estimate | None = Field(default=None, description="m_run on this profile, bytes")
    preemptions: int | None = Field(default=None, ge=0)
    fragmentation: NonNegative | None = Field(
        default=None, description="share of a sequence's blocks that no token fills"
    )
    limit: Literal["sequences", "pool"] | None = Field(
        default=None, description="what bounded c_s: the engine's sequence limit or its KV pool"
    )


class PrefillPoint(_Data):
    """One point of the prefill grid with every time seen there, outliers kept."""

    new: int = Field(ge=1, description="n, tokens computed")
    cached: int = Field(ge=0, description="h, tokens reused, as the engine counted them")
    seconds: tuple[Positive, ...] = Field(min_length=1, description="in order of measurement")
    median: Positive
    standard_error: NonNegative | None = Field(default=None, description="of the median, s")
    outliers: int = Field(default=0, ge=0, description="beyond 5 robust deviations; none dropped")


class CrowdPoint(_Data):
    """One case of g(n | h; batch, chunk): ``prefills`` prompts at once while others decode.

    Times count from the first step that holds them to their first tokens, by the engine's own
    stamps, the mean over the prompts of a sample.
    """

    decodes: int = Field(ge=0, description="sequences decoding beside them")
    prefills: int = Field(ge=1, description="prompts that arrive together")
    new: int = Field(ge=1, description="n of each, tokens")
    cached: int = Field(ge=0, description="h of each, tokens")
    chunk: int = Field(ge=1, description="token budget of a step")
    seconds: tuple[Positive, ...] = Field(min_length=1)
    median: Positive
    standard_error: NonNegative | None = None
    outliers: int = Field(default=0, ge=0)
    apart: int = Field(default=0, ge=0, description="samples left out: they shared no steps")
    predicted: Positive | None = Field(default=None, description="the same by the step time, s")
    stall: NonNegative | None = Field(
        default=None, description="longest pause between two tokens of a decode meanwhile, s"
    )
    pause: NonNegative | None = Field(default=None, description="its usual pause, s")
    longest_step: Positive | None = Field(
        default=None, description="what the longest pause should be, by the step time, s"
    )


class DecodeModel(_Data):
    """D_q: seconds of occupancy beyond the residual prefill, by tokens generated.

    D(output) = base + per_token·(output − 1) for output ≥ 1, at the stated number of sequences
    running together; the first token comes out of the prefill step.
    """

    base: NonNegative = 0.0
    per_token: NonNegative
    standard_errors: dict[str, NonNegative] = Field(default_factory=dict)
    concurrency: Positive = Field(default=1.0, description="sequences running together")
    context_tokens: NonNegative | None = Field(
        default=None, description="tokens each decode attended to when this was measured"
    )

    def occupancy(self, output_tokens: float) -> float:
        """D_q for ``output_tokens`` ≥ 1, seconds."""
        return self.base + self.per_token * max(output_tokens - 1.0, 0.0)


class ModelFit(_Data):
    """One delay model beside a measured load, from the calibration alone."""

    model: str
    note: str | None = Field(default=None, description="why there is no prediction, or a caveat")
    ks_distance: NonNegative | None = Field(
        default=None, description="largest gap of the excess-delay CDFs, above the resolution"
    )
    mean: float | None = Field(default=None, description="predicted mean TTFT, s")
    quantiles: dict[str, float] = Field(default_factory=dict, description="predicted TTFT, s")
    errors: dict[str, float] = Field(
        default_factory=dict, description="predicted/measured − 1 of the mean and each quantile"
    )


class LoadRecord(_Data):
    """Poisson load on one profile: what requests waited, and what each model said they would.

    Excess delay is TTFT from the intended send beyond the unloaded TTFT of the same class.
    """

    profile: str
    load: Positive = Field(description="arrival rate over measured capacity")
    arrival_rate: Positive = Field(description="requests/s")
    capacity: Positive = Field(description="requests/s of a saturated closed loop")
    capacity_error: NonNegative | None = Field(default=None, description="its standard error")
    capacity_from_steps: Positive | None = Field(
        default=None, description="the same by the engine model and the step time alone"
    )
    requests: int = Field(ge=1, description="after the warm-up cut")
    warm_up: int = Field(ge=0, description="requests cut")
    stationary: bool = Field(description="whether the warm-up test found the rest stationary")
    seconds: Positive
    resolution: Positive = Field(description="excess delays below this count as none, s")
    mean: tuple[float, float, float] = Field(description="TTFT, s: estimate, 95 % interval")
    quantiles: dict[str, tuple[float, float | None, float | None]] = Field(
        description="TTFT, s: estimate and 95 % interval; an end that the sample lacks is absent"
    )
    wait_probability: tuple[float, float, float]
    engine_wait: float = Field(description="mean queued to scheduled, the engine's stamps, s")
    ks_noise: NonNegative = Field(
        description="95 % KS distance of a sample of this size, its own correlation counted"
    )
    relative_time: tuple[float, float] = Field(
        description="unloaded TTFT before and after this load, over that at the start"
    )
    step_relative_time: Positive | None = Field(
        default=None, description="seconds of this load's own steps over those of the step time"
    )
    reliable: bool = Field(description="whether the intervals hold their level")
    curve: dict[str, tuple[float, ...]] = Field(
        default_factory=dict, description="excess seconds, measured CDF, and each model's"
    )
    models: tuple[ModelFit, ...] = ()
    reasons: dict[str, float] = Field(
        default_factory=dict, description="measurements that say why an M/M/c queue misses"
    )


# --- The record -------------------------------------------------------------------------------


class Calibration(_Data):
    """``calibration.json``. Optional parts are absent where the source could not know them."""

    schema_version: Literal[1] = 1
    created_at: datetime = Field(default_factory=lambda: datetime.now(UTC))
    measured_at: datetime | None = Field(
        default=None, description="when the source took its measurements, if it says"
    )
    source: Source
    engine: EngineFacts
    model: ModelFacts
    device: DeviceFacts
    prefill: PrefillFit | None = None
    prefill_points: tuple[PrefillPoint, ...] = ()
    crowds: tuple[CrowdPoint, ...] = Field(
        default=(), description="g(n | h; batch, chunk): prefills among others"
    )
    step_time: AnyStepTime | None = Field(default=None, discriminator="kind")
    memory: MemoryRecord = MemoryRecord()
    m_run: Estimate | None = Field(default=None, description="bytes per active sequence")
    c_s: tuple[ConcurrencyRecord, ...] = ()
    waiting: tuple[LoadRecord, ...] = ()
    decode: tuple[DecodeModel, ...] = Field(
        default=(), description="one per measured concurrency, ascending"
    )
    fits: tuple[FitReport, ...] = Field(default=(), description="step-time and other regressions")
    environment: dict[str, Any] = Field(default_factory=dict)
    extra: dict[str, Any] = Field(
        default_factory=dict, description="figures only this source has, plain JSON"
    )

    def save(self, path: str | Path) -> None:
        """Write ``calibration.json`` whole or not at all."""
        data = self.model_dump(mode="json", exclude_none=True)
        write_atomically(path, dump_json(data, indent=True) + b"\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a record.

        Raises
        ------
        CalibrationError
            The file is missing, is not JSON, or is not a calibration of a version known here.
        """
        try:
            data = orjson.loads(Path(path).read_bytes())
        except OSError as error:
            raise CalibrationError(f"{path}: {error.strerror}") from None
        except orjson.JSONDecodeError as error:
            raise CalibrationError(f"{path}:{error.lineno}: {error.msg}") from None
        return cls.from_dict(data, str(path))

    @classmethod
    def from_dict(cls, data: Any, source: str = "calibration") -> Self:
        if not isinstance(data, dict) or "schema_version" not in data:
            raise CalibrationError(f"{source}: not a calibration record (no schema_version)")
        if data["schema_version"] != SCHEMA_VERSION:
            raise CalibrationError(
                f"{source}: schema_version {data['schema_version']!r}, this version reads "
                f"{SCHEMA_VERSION}"
            )
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise CalibrationError(f"{source}: {first_problem(error)}") from None

    @property
    def idle_start(self) -> float:
        """Seconds that the first step after idleness takes more than the step time says; 0 where
        no step log told."""
        fit = next((f for f in self.fits if f.name == "step_time"), None)
        return 0.0 if fit is None else fit.coefficients.get("idle_start", 0.0)

    def decode_at(self, concurrency: float) -> DecodeModel:
        """The decode model measured at the concurrency nearest to the one asked for.

        Raises :class:`CalibrationError` when the record has none.
        """
        if not self.decode:
            raise CalibrationError("decode: this calibration has no decode model")
        return min(self.decode, key=lambda d: abs(d.concurrency - concurrency))

    def occupancy(
        self, output_tokens: float, new: float = 0.0, cached: float = 0.0, *, batch: float = 1.0
    ) -> float:
        """D_q, seconds of occupancy beyond the residual prefill (Theory A10), at a stated batch.

        The first token comes out of the prefill; each of the other ``output_tokens − 1`` takes a
        step of ``batch`` decodes, each attending to as much context as this request. Prefills of
        others do not interrupt: at a batch of 1 this is the unloaded occupancy. From the step
        time where there is one (counts between whole numbers are interpolated), else from the
        decode model measured nearest to ``batch``.

        Parameters
        ----------
        output_tokens
            Tokens generated, at least 1; may be a mean.
        new, cached
            Prompt tokens computed and reused; together the context of the first decode.
        batch
            Sequences decoding together, at least 1; may be a mean.

        Raises
        ------
        CalibrationError
            The record has neither step time nor decode model, or an argument is out of range.
        """
        if not (output_tokens >= 1 and batch >= 1 and new >= 0 and cached >= 0):
            raise CalibrationError(
                f"occupancy: {output_tokens:g} output tokens after {new:g} + {cached:g} at a "
                f"batch of {batch:g} is not a request"
            )
        if self.step_time is None:
            return self.decode_at(batch).occupancy(output_tokens)
        steps = output_tokens - 1.0
        # Decode k of output − 1 finds new + cached + k − 1 tokens computed; the step is smooth in
        # context, so the mean context stands for them.
        context = new + cached + max(0.5 * output_tokens - 1.0, 0.0)
        low, high = math.floor(batch), math.ceil(batch)
        at_low = self.step_time.seconds(decodes=low, decode_context=low * context)
        at_high = self.step_time.seconds(decodes=high, decode_context=high * context)
        return steps * (at_low + (batch - low) * (at_high - at_low))

    def sequence_bytes(self, new: float, output_tokens: float = 0.0) -> float:
        """Bytes that one active request holds of its own at its end (Theory H12).

        ``new`` prompt tokens (the reused ones are shared) and the generated ones but the last,
        which is never written to the cache, in whole blocks where the block size is known.

        Raises :class:`CalibrationError` when the record has no κ.
        """
        kappa = self.memory.kappa
        if kappa is None:
            raise CalibrationError("memory: this calibration has no bytes per token")
        tokens = new + max(output_tokens - 1.0, 0.0)
        size = self.memory.block_size or 1
        return math.ceil(tokens / size) * size * kappa

    def prefill_or_raise(self) -> Prefill:
        """g(n | h); raises :class:`CalibrationError` when the record has none."""
        if self.prefill is None:
            raise CalibrationError("prefill: this calibration has no prefill fit")
        return self.prefill.coefficients


PrefillFit.model_rebuild()
