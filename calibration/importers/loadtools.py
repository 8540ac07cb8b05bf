"""Load-test results: guidellm, aiperf and ``vllm bench serve``, as those tools write them.

A load test sees an engine from outside. The least loaded run gives g(n): time to first token
against prompt length, with network and server in it. Every run gives seconds a generated token
at its own number of requests in flight.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from calibration.fit import summarise
from calibration.importers.facts import fitted, model_facts, source_file
from calibration.record import (
    Calibration,
    DecodeModel,
    DeviceFacts,
    EngineFacts,
    MemoryRecord,
    PrefillFit,
    PrefillPoint,
    Source,
)
from testbed.environment import environment
from testbed.errors import CalibrationError
from testbed.measured_run import find_value
from testbed.model_facts import known_architecture
from testbed.scenario import Prefill

ALONE = 1.5
"""Mean requests in flight up to which a run counts as unloaded."""


@dataclass(frozen=True)
class LoadRun:
    """One load level. Arrays over requests (N,): tokens, seconds; NaN where a tool is silent."""

    name: str
    file: Path
    model: str
    concurrency: float
    input_tokens: np.ndarray
    output_tokens: np.ndarray
    ttft: np.ndarray
    token_seconds: np.ndarray
    engine: str | None = None


def import_load_test(
    tool: str, path: str | Path, *, model: str | None = None, device: str | None = None
) -> Calibration:
    """A record from one result file, or from every result file in a folder.

    Raises
    ------
    CalibrationError
        The tool is not known, a file is malformed, or no run is in it.
    """
    if tool not in _READERS:
        raise CalibrationError(f"import: {tool!r} is not one of {', '.join(_READERS)}")
    suffixes, reader = _READERS[tool]
    path = Path(path)
    files = (
        [f for suffix in suffixes for f in sorted(path.rglob(f"*{suffix}"))]
        if path.is_dir()
        else [path]
    )
    if not files:
        raise CalibrationError(f"{path}: no result file of {tool} ({', '.join(suffixes)})")
    runs = [run for file in files for run in reader(file)]
    if not runs:
        raise CalibrationError(f"{path}: no finished request in any run")
    runs.sort(key=lambda r: r.concurrency)
    names = sorted({r.model for r in runs if r.model})
    name = model or (names[0] if names else "unknown")
    if model is None and len(names) > 1:
        raise CalibrationError(f"{path}: runs of several models: {', '.join(names)}")
    if model is not None and names and model not in names:
        raise CalibrationError(f"{path}: model: {model!r} is not one of {', '.join(names)}")

    notes = [
        "times seen by a client: network and server are in them",
        f"runs, by requests in flight: {', '.join(f'{r.concurrency:.2f}' for r in runs)}",
    ]
    least = runs[0]
    if least.concurrency > ALONE:
        notes.append(
            f"the least loaded run had {least.concurrency:.1f} requests in flight: its times to "
            "first token contain waiting"
        )
    points, prefill = _prefill(least, notes)
    architecture = known_architecture(name)
    engines = sorted({r.engine for r in runs if r.engine})
    return Calibration(
        source=Source(
            kind="imported",
            tool=tool,
            files=tuple(source_file(f) for f in sorted({r.file for r in runs})),
            notes=tuple(notes),
        ),
        engine=EngineFacts(name=engines[0] if len(engines) == 1 else "unknown"),
        model=model_facts(name, architecture, "bfloat16"),
        device=DeviceFacts(kind="other", name=device or "not in the result file"),
        prefill=prefill,
        prefill_points=points,
        memory=MemoryRecord(
            kappa_nominal=None if architecture is None else architecture.kappa(2.0)
        ),
        decode=_decode(runs),
        environment=environment(),
        extra={
            "runs": [
                {
                    "name": r.name,
                    "concurrency": r.concurrency,
                    "requests": len(r.ttft),
                    "mean_ttft": _mean(r.ttft),
                    "mean_seconds_per_token": _mean(r.token_seconds),
                }
                for r in runs
            ]
        },
    )


# --- Fits -------------------------------------------------------------------------------------


def _mean(values: np.ndarray) -> float | None:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else None


def _prefill(run: LoadRun, notes: list[str]) -> tuple[tuple[PrefillPoint, ...], PrefillFit | None]:
    by_length: dict[int, list[float]] = defaultdict(list)
    for n, seconds in zip(run.input_tokens.tolist(), run.ttft.tolist(), strict=True):
        if math.isfinite(n) and n >= 1 and math.isfinite(seconds) and seconds > 0:
            by_length[round(n)].append(seconds)
    points = tuple(summarise(n, 0, by_length[n]) for n in sorted(by_length))
    if not points:
        notes.append("no time to first token with a prompt length: no prefill fit")
        return (), None
    if len(points) < 3:
        # One or two lengths carry a proportion, not a law.
        new = np.array([p.new for p in points], dtype=float)
        seconds = np.array([p.median for p in points])
        slope = float((new / seconds).sum() / ((new / seconds) ** 2).sum())
        notes.append(f"{len(points)} prompt length(s) only: prefill taken as proportional to it")
        return points, PrefillFit(
            coefficients=Prefill(linear=slope),
            relative_error=float(np.sqrt(np.mean((slope * new / seconds - 1.0) ** 2))),
        )
    return points, fitted(points)


def _decode(runs: list[LoadRun]) -> tuple[DecodeModel, ...]:
    models = []
    for run in runs:
        seconds = run.token_seconds[np.isfinite(run.token_seconds)]
        if len(seconds) == 0 or run.concurrency <= 0:
            continue
        context = run.input_tokens + 0.5 * run.output_tokens
        errors = {}
        if len(seconds) > 1:
            errors["per_token"] = float(seconds.std(ddof=1) / math.sqrt(len(seconds)))
        models.append(
            DecodeModel(
                per_token=float(seconds.mean()),
                standard_errors=errors,
                concurrency=run.concurrency,
                context_tokens=_mean(context),
            )
        )
    return tuple(models)


def _in_flight(latency: np.ndarray, duration: float) -> float:
    """Mean requests in flight by Little's law."""
    total = latency[np.isfinite(latency)].sum()
    return float(total / duration) if duration > 0 else math.nan


# --- Readers ----------------------------------------------------------------------------------


def _json(path: Path) -> Any:
    try:
        return orjson.loads(path.read_bytes())
    except OSError as error:
        raise CalibrationError(f"{path}: {error.strerror}") from None
    except orjson.JSONDecodeError as error:
        raise CalibrationError(f"{path}:{error.lineno}: {error.msg}") from None


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise CalibrationError(f"{path}: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield number, orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise CalibrationError(f"{path}:{number}: {error.msg}") from None


def _real(value: Any) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if good else math.nan


def _vllm_bench(path: Path) -> list[LoadRun]:
    """``vllm bench serve --save-result``; ``--append-result`` puts one document a line."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise CalibrationError(f"{path}: {error.strerror}") from None
    try:
        documents = [orjson.loads(text)]
    except orjson.JSONDecodeError:
        documents = [document for _, document in _lines(path)]
    runs = []
    for place, data in enumerate(documents, 1):
        where = f"{path}: result {place}"
        if not isinstance(data, dict) or "total_input_tokens" not in data:
            raise CalibrationError(f"{where}: not a result of vllm bench serve")
        completed = int(_real(data.get("completed")) if data.get("completed") else 0)
        if completed < 1:
            continue
        duration = _real(data.get("duration"))
        ttfts, itls = data.get("ttfts"), data.get("itls")
        if isinstance(ttfts, list) and isinstance(itls, list) and "input_lens" in data:
            input_tokens = np.array([_real(x) for x in data["input_lens"]])
            output_tokens = np.array([_real(x) for x in data.get("output_lens", [])])
            first = np.array([_real(x) for x in ttfts])
            gaps = np.array([sum(x) if x else 0.0 for x in itls])
            if not len(input_tokens) == len(output_tokens) == len(first) == len(gaps):
                raise CalibrationError(f"{where}: per-request lists of different lengths")
            done = (first > 0) & (output_tokens >= 1)
            latency = (first + gaps)[done]
            input_tokens, output_tokens = input_tokens[done], output_tokens[done]
            first, gaps = first[done], gaps[done]
            with np.errstate(invalid="ignore", divide="ignore"):
                each = np.where(output_tokens > 1, gaps / (output_tokens - 1), math.nan)
        else:
            input_tokens = np.array([_real(data.get("total_input_tokens")) / completed])
            output_tokens = np.array([_real(data.get("total_output_tokens")) / completed])
            first = np.array([_real(data.get("mean_ttft_ms")) / 1e3])
            each = np.array([_real(data.get("mean_tpot_ms", data.get("mean_itl_ms"))) / 1e3])
            mean = first + np.nan_to_num(each) * (output_tokens - 1)
            latency = np.repeat(mean, completed)
        in_flight = _in_flight(latency, duration)
        most = _real(data.get("max_concurrency"))
        runs.append(
            LoadRun(
                name=str(data.get("label") or data.get("date") or place),
                file=path,
                model=str(data.get("model_id") or ""),
                concurrency=in_flight if math.isfinite(in_flight) else most,
                input_tokens=input_tokens,
                output_tokens=output_tokens,
                ttft=first,
                token_seconds=each,
                engine=str(data.get("backend") or data.get("endpoint_type") or "") or None,
            )
        )
    return runs


def _guidellm(path: Path) -> list[LoadRun]:
    """``guidellm benchmark --output-path x.json``: benchmarks, each with its requests."""
    data = _json(path)
    if not isinstance(data, dict) or not isinstance(data.get("benchmarks"), list):
        raise CalibrationError(f"{path}: not a result of guidellm (no list of benchmarks)")
    runs = []
    for place, benchmark in enumerate(data["benchmarks"], 1):
        requests = benchmark.get("requests") if isinstance(benchmark, dict) else None
        if isinstance(requests, dict):
            requests = requests.get("successful")
        if not isinstance(requests, list):
            raise CalibrationError(f"{path}: benchmarks[{place - 1}].requests: not there")
        rows = [r for r in requests if isinstance(r, dict)]
        if not rows:
            continue
        latency = np.array([_real(r.get("request_latency")) for r in rows])
        starts = np.array([_real(find_value(r, "request_start_time", "start_time")) for r in rows])
        ends = np.array([_real(find_value(r, "request_end_time", "end_time")) for r in rows])
        latency = np.where(np.isfinite(latency), latency, ends - starts)
        span = np.nan
        if np.isfinite(starts).any() and np.isfinite(ends).any():
            span = float(np.nanmax(ends) - np.nanmin(starts))
        in_flight = _in_flight(latency, span)
        if not math.isfinite(in_flight):
            in_flight = _real(find_value(benchmark.get("metrics"), "mean"))
        strategy = find_value(benchmark, "strategy") or {}
        kind = strategy.get("type_") if isinstance(strategy, dict) else strategy
        runs.append(
            LoadRun(
                name=str(kind or place),
                file=path,
                model=str(find_value(benchmark, "model") or find_value(data, "model") or ""),
                concurrency=in_flight,
                input_tokens=np.array([_real(r.get("prompt_tokens")) for r in rows]),
                output_tokens=np.array([_real(r.get("output_tokens")) for r in rows]),
                ttft=np.array([_real(r.get("time_to_first_token_ms")) for r in rows]) / 1e3,
                token_seconds=np.array([_real(r.get("inter_token_latency_ms")) for r in rows])
                / 1e3,
            )
        )
    return runs


_UNITS = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "us": 1e-6, "ns": 1e-9, "tokens": 1.0, "token": 1.0}


def _aiperf(path: Path) -> list[LoadRun]:
    """aiperf's ``profile_export.jsonl``: one record a request, values with their units."""
    rows = []
    times = []
    for line, record in _lines(path):
        if not isinstance(record, dict) or "metrics" not in record:
            raise CalibrationError(f"{path}:{line}: not a record of aiperf (no metrics)")
        metadata = record.get("metadata") or {}
        if record.get("error") or metadata.get("benchmark_phase") == "warmup":
            continue
        values = []
        for name in (
            "input_sequence_length",
            "output_sequence_length",
            "time_to_first_token",
            "inter_token_latency",
            "request_latency",
        ):
            metric = record["metrics"].get(name)
            if metric is None:
                values.append(math.nan)
                continue
            unit = str(metric.get("unit"))
            if unit not in _UNITS:
                raise CalibrationError(f"{path}:{line}: {name}: unit {unit!r} is not known")
            values.append(_real(metric.get("value")) * _UNITS[unit])
        rows.append(values)
        times.append(
            [_real(metadata.get(k)) * 1e-9 for k in ("request_start_ns", "request_end_ns")]
        )
    if not rows:
        return []
    table, stamps = np.array(rows), np.array(times)
    return [
        LoadRun(
            name=path.parent.name,
            file=path,
            model=_aiperf_model(path),
            concurrency=_in_flight(
                table[:, 4], float(np.nanmax(stamps[:, 1]) - np.nanmin(stamps[:, 0]))
            ),
            input_tokens=table[:, 0],
            output_tokens=table[:, 1],
            ttft=table[:, 2],
            token_seconds=table[:, 3],
        )
    ]


def _aiperf_model(path: Path) -> str:
    """The model stands in the summary beside the records."""
    summary = path.with_name("profile_export_aiperf.json")
    if not summary.exists():
        return ""
    names = find_value(_json(summary), "model_names", "model")
    return str(names[0]) if isinstance(names, list) and names else str(names or "")


_READERS: dict[str, tuple[tuple[str, ...], Callable[[Path], list[LoadRun]]]] = {
    "guidellm": ((".json",), _guidellm),
    "aiperf": (("profile_export.jsonl",), _aiperf),
    "vllm-bench": ((".json",), _vllm_bench),
}
