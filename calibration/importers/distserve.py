"""DistServe: coefficients of A100 step times as its simulator keeps them.

A JSON file ``{model: {tensor_parallel: {"prefill": [c0, c1, c2], "decoding_smallbs": [d0, d1,
d2], "decoding_largebs": [...], "decoding_large_small_bs_threshold": n}}}``, milliseconds: a
prefill takes c0 + c1·Σn + c2·Σn², a decode step d0 + d1·Σcontext + d2·sequences.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from calibration.fit import relative_nnls
from calibration.importers.facts import (
    decode_models,
    fitted,
    model_facts,
    one_of,
    prefill_grid,
    source_file,
)
from calibration.record import (
    Calibration,
    DeviceFacts,
    EngineFacts,
    FitReport,
    MemoryRecord,
    Source,
)
from testbed.environment import environment
from testbed.errors import CalibrationError
from testbed.model_facts import known_architecture
from testbed.step_time import StepTime

LICENCE = "Apache-2.0"
LONGEST = 2048
"""OPT models know 2,048 positions."""
_MILLISECONDS = 1e-3


def import_distserve(
    path: str | Path,
    *,
    model: str | None = None,
    tensor_parallel: int | None = None,
    device: str | None = None,
) -> Calibration:
    """A record for one model and degree of the file (a folder holds one such file).

    Raises
    ------
    CalibrationError
        The file is missing or malformed, or does not hold (or holds several of) what is asked.
    """
    path = _file(Path(path))
    try:
        data = orjson.loads(path.read_bytes())
    except OSError as error:
        raise CalibrationError(f"{path}: {error.strerror}") from None
    except orjson.JSONDecodeError as error:
        raise CalibrationError(f"{path}:{error.lineno}: {error.msg}") from None
    if not isinstance(data, dict) or not all(isinstance(v, dict) for v in data.values()):
        raise CalibrationError(f"{path}: not a mapping of models to degrees")
    name = one_of(data, model, "model", str(path))
    degree = one_of(
        data[name],
        None if tensor_parallel is None else str(tensor_parallel),
        "tensor_parallel",
        str(path),
    )
    entry = data[name][degree]
    where = f"{path}: {name}.{degree}"
    c0, c1, c2 = _three(entry, "prefill", where)
    small = _three(entry, "decoding_smallbs", where)
    large = _three(entry, "decoding_largebs", where)
    threshold = entry.get("decoding_large_small_bs_threshold")
    if not isinstance(threshold, int | float) or threshold < 1:
        raise CalibrationError(f"{where}.decoding_large_small_bs_threshold: {threshold!r}")

    notes = [
        "units: milliseconds in the source, seconds here",
        f"decode coefficients of batches below {threshold:g}; those above are in extra",
        "new tokens attending to cached ones were not measured: d = 2b, the cost of a pair of "
        "tokens within a prompt",
    ]
    if c2 < 0 or c1 < 0 or c0 < 0:
        c0, c1, c2, error = _nonnegative(c0, c1, c2)
        notes.append(
            "the source's prefill has a negative coefficient, so that time would fall with length "
            f"somewhere: refitted with all >= 0 over 1 to {LONGEST} tokens, relative error "
            f"{100 * error:.1f} %"
        )
    if min(small) < 0:
        raise CalibrationError(f"{where}.decoding_smallbs: a negative coefficient")
    step_time = StepTime(
        c_pre=c0 * _MILLISECONDS,
        p=0.0,
        a=c1 * _MILLISECONDS,
        b=c2 * _MILLISECONDS,
        d=2 * c2 * _MILLISECONDS,
        c_dec=small[0] * _MILLISECONDS,
        f=small[1] * _MILLISECONDS,
        e=small[2] * _MILLISECONDS,
    )
    architecture = known_architecture(name)
    points = prefill_grid(step_time, LONGEST, LONGEST)
    return Calibration(
        source=Source(
            kind="imported",
            tool="distserve",
            files=(source_file(path, LICENCE),),
            notes=tuple(notes),
        ),
        engine=EngineFacts(
            name=path.name.split(".")[-2] if path.name.count(".") > 1 else "vllm",
            dtype="float16",
            tensor_parallel=int(degree),
        ),
        model=model_facts(name, architecture, "float16"),
        device=DeviceFacts(
            kind="gpu", name=device or "NVIDIA A100-SXM4-80GB", count=int(degree), memory_bytes=80e9
        ),
        prefill=fitted(points),
        prefill_points=points,
        step_time=step_time,
        memory=MemoryRecord(
            kappa_nominal=None if architecture is None else architecture.kappa(2.0)
        ),
        decode=decode_models(step_time, int(threshold) - 1),
        fits=(
            FitReport(
                name="distserve prefill, as published (ms)",
                points=0,
                relative_error=0.0,
                coefficients=dict(
                    zip(("c0", "c1", "c2"), _three(entry, "prefill", where), strict=True)
                ),
            ),
        ),
        environment=environment(),
        extra={
            "decode_large_batch": {
                "threshold_sequences": float(threshold),
                "seconds": large[0] * _MILLISECONDS,
                "seconds_per_context_token": large[1] * _MILLISECONDS,
                "seconds_per_sequence": large[2] * _MILLISECONDS,
            }
        },
    )


def _file(path: Path) -> Path:
    if not path.is_dir():
        return path
    found = sorted(path.glob("*.json"))
    if len(found) != 1:
        raise CalibrationError(f"{path}: {len(found)} JSON files where one is wanted")
    return found[0]


def _three(entry: Any, key: str, where: str) -> tuple[float, float, float]:
    values = entry.get(key) if isinstance(entry, dict) else None
    if (
        not isinstance(values, list)
        or len(values) != 3
        or not all(isinstance(v, int | float) and math.isfinite(v) for v in values)
    ):
        raise CalibrationError(f"{where}.{key}: not three numbers")
    return float(values[0]), float(values[1]), float(values[2])


def _nonnegative(c0: float, c1: float, c2: float) -> tuple[float, float, float, float]:
    n = np.geomspace(1, LONGEST, 200)
    target = c0 + c1 * n + c2 * n * n
    if (target <= 0).any():
        raise CalibrationError("prefill: the published coefficients give no positive time")
    columns = np.stack([np.ones_like(n), n, n * n], axis=1)
    solution = relative_nnls(columns, target)
    error = float(np.sqrt(np.mean((columns @ solution / target - 1.0) ** 2)))
    return float(solution[0]), float(solution[1]), float(solution[2]), error
