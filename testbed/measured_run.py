"""MeasuredRun: a serving run that somebody measured on a real GPU, read from its folder.

The layout is that of LLMServingSim's bench: ``meta.json`` (engine arguments, resolved
configuration, KV pool, hardware), ``requests.jsonl`` (one line a request with its stamps),
``timeseries.csv`` (running, waiting, KV use) and ``profile/``. Whatever a file leaves out is
taken from elsewhere or derived, and said in ``notes``.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from testbed.errors import CalibrationError
from testbed.model_facts import BYTES, Architecture, known_architecture

DEFAULT_TOKEN_BUDGET = 2048
DEFAULT_MAX_SEQUENCES = 256
DEFAULT_BLOCK_SIZE = 16
DEFAULT_UTILISATION = 0.9
"""vLLM's defaults, used where ``meta.json`` is silent."""

ASYNC_SINCE = (0, 14)
"""vLLM version from which scheduling is asynchronous unless switched off."""

RUNTIME_BYTES = 0.6e9
"""Memory of a device that is neither weights, activations nor pool: context and libraries."""

ONE_CLOCK = 1e5
"""s: stamps further apart than this come from different clocks."""


@dataclass(frozen=True)
class EngineFacts:
    """The engine of a run."""

    model: str
    architecture: Architecture
    precision: str
    tensor_parallel: int
    version: str
    device: str
    device_memory: float | None
    num_blocks: int
    block_size: int
    token_budget: int
    max_sequences: int
    max_model_len: int
    prefix_caching: bool
    async_scheduling: bool
    padding: tuple[int, ...]
    kappa: float


@dataclass(frozen=True)
class MeasuredRun:
    """N requests in order of arrival; times in seconds since the first arrival.

    ``queued``, ``scheduled``, ``first_token`` and ``finished`` are the engine's stamps, NaN
    where a request has none. ``series`` holds the columns of ``timeseries.csv``, its time moved
    to the same zero where ``meta.json`` says when the run started.
    """

    directory: Path
    meta: dict[str, Any]
    engine: EngineFacts
    names: tuple[str, ...]
    arrival: np.ndarray
    queued: np.ndarray
    scheduled: np.ndarray
    first_token: np.ndarray
    finished: np.ndarray
    input_tokens: np.ndarray
    output_tokens: np.ndarray
    lines: np.ndarray
    series: dict[str, np.ndarray]
    notes: tuple[str, ...]


def read_run(directory: str | Path) -> MeasuredRun:
    """Read a folder.

    Raises
    ------
    CalibrationError
        A file is missing or malformed (named with its line), or the model is not known.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise CalibrationError(f"{directory}: no such directory")
    notes: list[str] = []
    meta = _json(directory / "meta.json")
    engine = _engine(directory, meta, notes)
    stamps = _requests(directory / "requests.jsonl", notes)
    started = _epoch(meta.get("started_at"))
    series = _series(directory / "timeseries.csv", notes)
    if series and started is not None and abs(stamps["wall"][0] - started) < 60:
        series["t"] = series["t"] - (stamps["wall"][0] - started)
    return MeasuredRun(
        directory=directory,
        meta=meta,
        engine=engine,
        names=stamps["names"],
        arrival=stamps["arrival"],
        queued=stamps["queued"],
        scheduled=stamps["scheduled"],
        first_token=stamps["first"],
        finished=stamps["last"],
        input_tokens=stamps["input"],
        output_tokens=stamps["output"],
        lines=stamps["lines"],
        series=series,
        notes=tuple(notes),
    )


# --- The engine -------------------------------------------------------------------------------


def _json(path: Path) -> dict[str, Any]:
    try:
        data = orjson.loads(path.read_bytes())
    except OSError as error:
        raise CalibrationError(f"{path}: {error.strerror}") from None
    except orjson.JSONDecodeError as error:
        raise CalibrationError(f"{path}:{error.lineno}: {error.msg}") from None
    if not isinstance(data, dict):
        raise CalibrationError(f"{path}: not a JSON object")
    return data


def find_value(data: Any, *keys: str) -> Any:
    """The first value that is not null under any of ``keys``, nearest to the root first."""
    level = [data]
    while level:
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                for key in keys:
                    if item.get(key) is not None:
                        return item[key]
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
        level = [x for x in below if isinstance(x, dict | list)]
    return None


def _engine(directory: Path, meta: dict[str, Any], notes: list[str]) -> EngineFacts:
    path = directory / "meta.json"
    resolved = meta.get("resolved_config") or {}
    arguments = meta.get("engine_kwargs") or {}

    def fact(*keys: str) -> Any:
        for source in (meta.get("kv_cache") or {}, resolved, arguments, meta):
            value = find_value(source, *keys)
            if value is not None:
                return value
        return None

    def number(default: float, *keys: str) -> float:
        value = fact(*keys)
        if value is None:
            notes.append(f"meta.json has no {keys[0]}: vLLM's default of {default:g} is used")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise CalibrationError(f"{path}: {keys[0]}: {value!r} is not a positive number")
        return float(value)

    model = str(fact("model") or "")
    architecture = _architecture(directory, meta, model)
    ranks = int(fact("tensor_parallel_size") or 1)
    precision = str(fact("dtype") or "bfloat16").removeprefix("torch.")
    if precision == "auto":
        precision = "bfloat16"
    if precision not in BYTES:
        raise CalibrationError(f"{path}: dtype: {precision!r} is not known")
    cache_dtype = str(fact("kv_cache_dtype", "cache_dtype") or "auto").removeprefix("torch.")
    cache_bytes = 1 if "fp8" in cache_dtype else BYTES.get(cache_dtype, BYTES[precision])
    version = str(meta.get("vllm_version") or "")
    budget = int(number(DEFAULT_TOKEN_BUDGET, "max_num_batched_tokens"))
    sequences = int(number(DEFAULT_MAX_SEQUENCES, "max_num_seqs"))
    block_size = int(number(DEFAULT_BLOCK_SIZE, "block_size"))
    kappa = architecture.kappa(cache_bytes)
    memory = find_value(meta.get("hardware") or {}, "device_total_memory_bytes", "memory_bytes")
    blocks = fact("num_gpu_blocks", "num_gpu_blocks_override")
    if blocks is None:
        share = number(DEFAULT_UTILISATION, "gpu_memory_utilization")
        blocks = _derived_blocks(
            path,
            architecture,
            fact("kv_cache_memory_bytes"),
            memory,
            share,
            ranks=ranks,
            weight_bytes=BYTES[precision],
            block_bytes=kappa * block_size / ranks,
            budget=budget,
            sequences=sequences,
            notes=notes,
        )
    blocks = int(blocks)
    if blocks < 2:
        raise CalibrationError(f"{path}: num_gpu_blocks: {blocks} is not a pool")
    length = fact("max_model_len")
    caching = fact("enable_prefix_caching")
    overlapped = fact("async_scheduling")
    if overlapped is None:
        overlapped = _version(version) >= ASYNC_SINCE
        notes.append(
            f"meta.json does not say whether scheduling was asynchronous: "
            f"{'yes' if overlapped else 'no'}, as vLLM {version or '(unknown)'} does"
        )
    eager = bool(fact("enforce_eager"))
    padding = () if eager else _padding(fact("cudagraph_capture_sizes"), sequences, notes)
    return EngineFacts(
        model=model,
        architecture=architecture,
        precision=precision,
        tensor_parallel=ranks,
        version=version,
        device=str(find_value(meta.get("hardware") or {}, "device_name", "name") or "unknown GPU"),
        device_memory=None if memory is None else float(memory),
        num_blocks=blocks,
        block_size=block_size,
        token_budget=budget,
        max_sequences=sequences,
        max_model_len=int(length) if length else blocks * block_size,
        prefix_caching=True if caching is None else bool(caching),
        async_scheduling=bool(overlapped),
        padding=padding,
        kappa=kappa,
    )


def _architecture(directory: Path, meta: dict[str, Any], model: str) -> Architecture:
    for path in (directory / "config.json", directory / "profile" / "config.json"):
        if path.exists():
            found = Architecture.from_config(_json(path))
            if found is None:
                raise CalibrationError(f"{path}: not the config.json of a transformer")
            return found
    known = known_architecture(model)
    level: list[Any] = [meta]
    while level:
        item = level.pop()
        if isinstance(item, dict):
            if "num_hidden_layers" in item:
                base = {} if known is None else _as_config(known)
                found = Architecture.from_config({**base, **item})
                if found is not None:
                    return found
            level.extend(item.values())
        elif isinstance(item, list):
            level.extend(item)
    if known is None:
        raise CalibrationError(
            f"{directory / 'meta.json'}: the layers of model {model!r} are not known; put its "
            "config.json beside meta.json"
        )
    return known


def _as_config(architecture: Architecture) -> dict[str, Any]:
    return {
        "num_hidden_layers": architecture.layers,
        "hidden_size": architecture.hidden,
        "num_attention_heads": architecture.heads,
        "num_key_value_heads": architecture.kv_heads,
        "head_dim": architecture.head_dim,
        "intermediate_size": architecture.intermediate,
        "vocab_size": architecture.vocabulary,
        "tie_word_embeddings": architecture.tied,
    }


def _derived_blocks(
    path: Path,
    architecture: Architecture,
    pool_bytes: Any,
    memory: Any,
    share: float,
    *,
    ranks: int,
    weight_bytes: int,
    block_bytes: float,
    budget: int,
    sequences: int,
    notes: list[str],
) -> int:
    """Blocks of a pool whose size nobody wrote down (one rank's memory; ranks hold alike)."""
    if pool_bytes:
        notes.append("num_gpu_blocks follows from kv_cache_memory_bytes")
        return int(float(pool_bytes) / block_bytes)
    if not memory:
        raise CalibrationError(
            f"{path}: neither num_gpu_blocks nor the device's memory is given: the KV pool "
            "cannot be derived"
        )
    weights = architecture.parameters * weight_bytes / ranks
    # What vLLM's own profiling run holds at its peak: the widest layer's activations of a full
    # step, and the logits of a full batch in 16 and twice in 32 bits.
    width = 6 * architecture.hidden + 3 * architecture.intermediate / ranks
    activations = budget * width * weight_bytes + sequences * architecture.vocabulary * 10 / ranks
    free = float(memory) * share - weights - activations - RUNTIME_BYTES
    if free < block_bytes:
        raise CalibrationError(
            f"{path}: {float(memory):.4g} bytes of device memory leave no KV pool beside "
            f"{weights:.4g} bytes of weights"
        )
    blocks = int(free / block_bytes)
    notes.append(
        f"num_gpu_blocks is not in meta.json: {blocks} derived from {float(memory) / 1e9:.2f} GB "
        f"x {share:g} - {weights / 1e9:.2f} GB weights - {activations / 1e9:.2f} GB activations "
        f"- {RUNTIME_BYTES / 1e9:.1f} GB runtime (expect a few per cent of error)"
    )
    return blocks


def _padding(sizes: Any, sequences: int, notes: list[str]) -> tuple[int, ...]:
    if isinstance(sizes, list):
        return tuple(int(s) for s in sizes)
    top = min(2 * sequences, 512)
    notes.append("meta.json lists no captured graph sizes: vLLM's default list is used")
    usual = [1, 2, 4, *range(8, min(top, 256), 8), *range(256, top + 1, 16)]
    return tuple(s for s in usual if s <= top)


def _version(text: str) -> tuple[int, ...]:
    parts = []
    for part in text.split(".")[:2]:
        digits = "".join(c for c in part if c.isdigit())
        if not digits:
            break
        parts.append(int(digits))
    # An unknown version is taken for a recent one.
    return tuple(parts) if parts else (999,)


def _epoch(text: Any) -> float | None:
    try:
        return datetime.fromisoformat(str(text).replace("Z", "+00:00")).timestamp()
    except ValueError:
        return None


# --- Requests and time series -----------------------------------------------------------------


def _requests(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise CalibrationError(f"{path}: {error.strerror}") from None
    rows: list[tuple[str, int, list[float]]] = []
    unfinished = 0
    fields = ("arrival_time", "queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")
    for line, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            row = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise CalibrationError(f"{path}:{line}: {error.msg}") from None
        if not isinstance(row, dict):
            raise CalibrationError(f"{path}:{line}: not a JSON object")
        values = []
        for name in ("input_toks", "output_toks"):
            value = row.get(name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise CalibrationError(f"{path}:{line}: {name}: {value!r} is not a token count")
            values.append(float(value))
        for name in fields:
            value = row.get(name)
            if value is None:
                values.append(math.nan)
            elif isinstance(value, bool) or not isinstance(value, int | float):
                raise CalibrationError(f"{path}:{line}: {name}: {value!r} is not a time")
            else:
                values.append(float(value))
        if math.isnan(values[2]) and math.isnan(values[3]):
            raise CalibrationError(f"{path}:{line}: neither arrival_time nor queued_ts")
        unfinished += math.isnan(values[5]) or math.isnan(values[6])
        rows.append((str(row.get("request_id", line)), line, values))
    if not rows:
        raise CalibrationError(f"{path}: no requests")
    if unfinished:
        notes.append(f"{unfinished} requests have no first or last token: they load the engine")
    table = np.array([r[2] for r in rows])
    wall, queued = table[:, 2], table[:, 3]
    arrival = _arrivals(wall, queued, notes)
    order = np.argsort(arrival, kind="stable")
    zero = arrival[order[0]]
    column = {name: table[order, i] for i, name in enumerate(("input", "output", "wall"))}
    return {
        "names": tuple(rows[i][0] for i in order),
        "lines": np.array([rows[i][1] for i in order]),
        "wall": column["wall"],
        "input": column["input"].astype(np.int64),
        "output": column["output"].astype(np.int64),
        "arrival": arrival[order] - zero,
        "queued": queued[order] - zero,
        "scheduled": table[order, 4] - zero,
        "first": table[order, 5] - zero,
        "last": table[order, 6] - zero,
    }


def _arrivals(wall: np.ndarray, queued: np.ndarray, notes: list[str]) -> np.ndarray:
    """Arrivals on the engine's clock."""
    if np.isnan(queued).all():
        return wall
    if np.isnan(wall).any():
        notes.append("some requests have no arrival_time: arrivals are the engine's queued_ts")
        return np.where(np.isnan(queued), wall, queued)
    lag = queued - wall
    if np.nanmax(np.abs(lag)) < ONE_CLOCK:
        return wall
    notes.append(
        "arrival_time is on another clock than the engine's stamps: laid so that the request "
        "taken in fastest was taken in at once"
    )
    return np.asarray(wall + np.nanmin(lag))


def _series(path: Path, notes: list[str]) -> dict[str, np.ndarray]:
    if not path.exists():
        notes.append(f"{path.name} is not there: running and waiting cannot be compared")
        return {}
    rows: list[list[float]] = []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            header = [name.strip() for name in next(reader, [])]
            if "t" not in header:
                raise CalibrationError(f"{path}:1: no column 't'")
            for row in reader:
                if not row:
                    continue
                try:
                    rows.append([float(x) for x in row])
                except ValueError:
                    raise CalibrationError(
                        f"{path}:{reader.line_num}: not a row of numbers"
                    ) from None
                if len(row) != len(header):
                    raise CalibrationError(
                        f"{path}:{reader.line_num}: {len(row)} values for {len(header)} columns"
                    )
    except OSError as error:
        raise CalibrationError(f"{path}: {error.strerror}") from None
    if not rows:
        return {}
    table = np.array(rows)
    return {name: table[:, i].copy() for i, name in enumerate(header)}
