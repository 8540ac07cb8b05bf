"""OperatorProfile: a step time from a profile of each operator on a device.

The layout is that of LLMServingSim's profiler: ``dense.csv`` (layer, tokens, time_us),
``per_sequence.csv`` (layer, sequences, time_us), ``attention.csv`` (prefill_chunk, kv_prefill,
n_decode, kv_decode, time_us) and ``meta.yaml``, flat or below ``tp<N>``. Operators are measured
on one decoder layer, so a step is embedding + layers × (operators of a layer) + final norm,
vocabulary projection and sampler. Every assumption made on the way is kept as a note.
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from testbed.errors import CalibrationError
from testbed.step_time import OperatorStepTime

ONCE_A_STEP = ("embedding", "final_layernorm", "final_norm", "norm_f")
"""Token-wise operators outside the decoder layers."""
TWICE_A_LAYER = ("layernorm",)
"""Operators that a decoder layer runs twice and a profile times once."""
REPLICATED = ("embedding", "layernorm", "final_layernorm", "sampler")
"""Operators that every rank of a tensor-parallel engine runs whole."""
PROJECTIONS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")

_MICROSECONDS = 1e-6


@dataclass(frozen=True)
class OperatorProfile:
    """A step time, where it came from, and what had to be assumed."""

    step_time: OperatorStepTime
    layers: int
    meta: dict[str, Any]
    files: tuple[Path, ...]
    notes: tuple[str, ...]


def read_profile(
    directory: str | Path,
    *,
    layers: int,
    tensor_parallel: int = 1,
    padding: Sequence[int] = (),
    overhead: float = 0.0,
) -> OperatorProfile:
    """Read the profile in ``directory``.

    Parameters
    ----------
    layers
        Decoder layers of the model that is to be served.
    tensor_parallel
        Ranks; the profile of that degree is used, or that of one rank with its work divided.
    padding
        Batch sizes that the engine captured as graphs (see :class:`OperatorStepTime`).
    overhead
        Seconds that every step takes beside the operators.

    Raises
    ------
    CalibrationError
        A file is missing, a line cannot be read, or a table is empty; names file and line.
    """
    directory = Path(directory)
    if layers < 1:
        raise CalibrationError(f"layers: {layers} is not at least 1")
    if not directory.is_dir():
        raise CalibrationError(f"{directory}: no such directory")
    notes: list[str] = []
    folder, share = _folder(directory, tensor_parallel, notes)
    meta = _meta(directory)
    if (folder / "moe.csv").exists() or (folder / "linear_attention.csv").exists():
        raise CalibrationError(
            f"{folder}: a profile with expert or linear-attention tables; only dense attention "
            "models are read"
        )
    paths = [folder / n for n in ("dense.csv", "per_sequence.csv", "attention.csv")]
    tokens, dense = _dense(paths[0], layers, share, notes)
    sequences, head = _head(paths[1], share)
    attention = _attention(paths[2], layers, share, notes)
    step_time = OperatorStepTime(
        tokens=tokens,
        dense=dense,
        sequences=sequences,
        head=head,
        overhead=overhead,
        padding=tuple(float(p) for p in sorted(set(padding))),
        **attention,
    )
    if meta.get("engine_effective", {}).get("enforce_eager") is True:
        notes.append("operators were timed without graphs or compilation")
    files = [*paths, directory / "meta.yaml"]
    return OperatorProfile(
        step_time=step_time,
        layers=layers,
        meta=meta,
        files=tuple(p for p in files if p.exists()),
        notes=tuple(notes),
    )


# --- Files ------------------------------------------------------------------------------------


def _folder(directory: Path, ranks: int, notes: list[str]) -> tuple[Path, float]:
    """Folder with the tables, and the share of each operator's work that a rank has."""
    if (directory / f"tp{ranks}").is_dir():
        return directory / f"tp{ranks}", 1.0
    folder = directory if (directory / "dense.csv").exists() else directory / "tp1"
    if not folder.is_dir():
        raise CalibrationError(f"{directory}: neither dense.csv nor tp{ranks}/ is there")
    if ranks == 1:
        return folder, 1.0
    degrees = _meta(directory).get("tp_degrees", [1])
    if folder == directory and degrees == [ranks]:
        return folder, 1.0
    notes.append(
        f"the profile is of one rank: time of sharded operators divided by {ranks}, no time for "
        "communication between ranks"
    )
    return folder, 1.0 / ranks


def _meta(directory: Path) -> dict[str, Any]:
    path = directory / "meta.yaml"
    if not path.exists():
        return {}
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise CalibrationError(f"{where}: not YAML") from None
    return data if isinstance(data, dict) else {}


def _rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Line number and row of a CSV file with at least these columns."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            present = reader.fieldnames or []
            for column in columns:
                if column not in present:
                    raise CalibrationError(f"{path}:1: no column {column!r}")
            for row in reader:
                yield reader.line_num, row
    except OSError as error:
        raise CalibrationError(f"{path}: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise CalibrationError(f"{path}: {error}") from None


def _number(path: Path, line: int, column: str, text: str | None, *, least: float) -> float:
    try:
        value = float(text or "")
    except ValueError:
        raise CalibrationError(f"{path}:{line}: {column}: {text!r} is not a number") from None
    if not math.isfinite(value) or value < least:
        raise CalibrationError(f"{path}:{line}: {column}: {text!r} is not at least {least:g}")
    return value


# --- Tables -----------------------------------------------------------------------------------


def _curves(path: Path, axis: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Seconds of each operator against ``axis``; a point measured twice is averaged."""
    seen: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line, row in _rows(path, ("layer", axis, "time_us")):
        at = _number(path, line, axis, row[axis], least=1)
        seen[row["layer"]][at].append(_number(path, line, "time_us", row["time_us"], least=0))
    if not seen:
        raise CalibrationError(f"{path}: no rows")
    curves = {}
    for name, points in seen.items():
        grid = np.array(sorted(points))
        curves[name] = grid, np.array([np.mean(points[x]) for x in grid]) * _MICROSECONDS
    return curves


def _sum(curves: dict[str, tuple[np.ndarray, np.ndarray]], weights: dict[str, float]) -> Any:
    """Weighted sum of curves on the union of their grids, linear between their points."""
    grid = np.array(sorted({float(x) for g, _ in curves.values() for x in g}))
    total = np.zeros(len(grid))
    for name, (points, seconds) in curves.items():
        total += weights[name] * np.interp(grid, points, seconds)
    return tuple(grid.tolist()), tuple(total.tolist())


def _share(name: str, share: float) -> float:
    return 1.0 if name in REPLICATED else share


def _dense(path: Path, layers: int, share: float, notes: list[str]) -> Any:
    curves = _curves(path, "tokens")
    notes.extend(
        f"{path.name} has no {name!r}: it is not in the step"
        for name in PROJECTIONS
        if name not in curves
    )
    weights = {}
    for name in curves:
        if name in ONCE_A_STEP:
            times = 1.0
        elif name in TWICE_A_LAYER:
            times = 2.0 * layers
        else:
            times = 1.0 * layers
        weights[name] = times * _share(name, share)
    return _sum(curves, weights)


def _head(path: Path, share: float) -> Any:
    curves = _curves(path, "sequences")
    return _sum(curves, {name: _share(name, share) for name in curves})


def _attention(path: Path, layers: int, share: float, notes: list[str]) -> dict[str, Any]:
    """Grids and tables of :class:`OperatorStepTime`, points that were not measured filled."""
    alone: dict[tuple[float, float], float] = {}
    decode: dict[tuple[float, float], float] = {}
    mixed: dict[tuple[float, float, float, float], float] = {}
    axes = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
    scale = layers * share * _MICROSECONDS
    for line, row in _rows(path, (*axes, "time_us")):
        if row.get("decode_q_len") not in (None, "", "1"):
            continue  # speculative decoding
        if row.get("layer") not in (None, "", "attention"):
            raise CalibrationError(
                f"{path}:{line}: layer {row['layer']!r}; only plain attention is read"
            )
        chunk, h, n, context = (_number(path, line, a, row[a], least=0) for a in axes)
        seconds = _number(path, line, "time_us", row["time_us"], least=0) * scale
        if seconds <= 0:
            raise CalibrationError(f"{path}:{line}: time_us: 0 is not a time")
        if chunk == 0 and n > 0:
            decode[n, context] = seconds
        elif chunk > 0 and n == 0:
            alone[chunk, h] = seconds
        elif chunk > 0:
            mixed[chunk, h, n, context] = seconds
    if not alone:
        raise CalibrationError(f"{path}: no rows of a prefill alone (n_decode 0)")
    if not decode:
        raise CalibrationError(f"{path}: no rows of decodes alone (prefill_chunk 0)")
    chunks = sorted({k[0] for k in alone} | {k[0] for k in mixed})
    hs = sorted({k[1] for k in alone} | {k[1] for k in mixed})
    ns = sorted({k[0] for k in decode} | {k[2] for k in mixed})
    contexts = sorted({k[1] for k in decode} | {k[3] for k in mixed})

    alone_table = _table(alone, (chunks, hs), "prefill attention", notes)
    decode_table = _table(decode, (ns, contexts), "decode attention", notes)
    if mixed:
        mixed_table = _table(mixed, (chunks, hs, ns, contexts), "mixed attention", notes)
    else:
        notes.append(f"{path.name} has no steps of both kinds: their attention is added")
        mixed_table = alone_table[:, :, None, None] + decode_table[None, None, :, :]
    return {
        "chunk": tuple(chunks),
        "chunk_context": tuple(hs),
        "decodes": tuple(ns),
        "decode_context": tuple(contexts),
        "prefill_attention": tuple(alone_table.ravel().tolist()),
        "decode_attention": tuple(decode_table.ravel().tolist()),
        "mixed_attention": tuple(mixed_table.ravel().tolist()),
        "attention_floor": float(alone_table.min()),
    }


def _table(
    points: dict[Any, float], grids: tuple[list[float], ...], name: str, notes: list[str]
) -> np.ndarray:
    table = np.full(tuple(len(g) for g in grids), np.nan)
    places = [{x: i for i, x in enumerate(g)} for g in grids]
    for key, seconds in points.items():
        table[tuple(places[axis][x] for axis, x in enumerate(key))] = seconds
    missing = int(np.isnan(table).sum())
    if missing:
        # Decodes first: what lacks is most often the corner of many decodes.
        order = (2, 3, 1, 0) if len(grids) == 4 else tuple(range(len(grids)))
        for axis in order:
            table = np.apply_along_axis(
                _fill, axis, table, np.asarray(grids[axis], dtype=np.float64)
            )
        if np.isnan(table).any():
            raise CalibrationError(f"{name}: too few points to fill {missing} missing ones")
        notes.append(
            f"{name}: {missing} of {table.size} grid points were not measured and follow their "
            "neighbours in a line"
        )
    return table


def _fill(values: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """A line through the nearest two known points where a value lacks; one point holds."""
    known = np.flatnonzero(~np.isnan(values))
    if len(known) in (0, len(values)):
        return values
    filled = values.copy()
    for i in np.flatnonzero(np.isnan(values)):
        if len(known) == 1:
            filled[i] = values[known[0]]
            continue
        at = int(np.clip(np.searchsorted(known, i), 1, len(known) - 1))
        a, b = known[at - 1], known[at]
        slope = (values[b] - values[a]) / (grid[b] - grid[a])
        filled[i] = max(values[a] + slope * (grid[i] - grid[a]), min(values[a], values[b]))
    return filled
