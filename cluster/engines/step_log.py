"""Step log: one row for each engine step, written inside the engine, read by calibration."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from testbed.errors import CalibrationError

STEP_LOG_VARIABLE = "TESTBED_STEP_LOG"

STEP_COLUMNS = (
    "started",  # s, monotonic: the scheduler was asked for the step
    "scheduled",  # s: the step was put together
    "computed",  # s: the worker's result was there
    "finished",  # s: outputs were processed
    "prefills",  # chunks of prompts in the step
    "new_tokens",  # Σ n over them
    "new_squared",  # Σ n²
    "new_context",  # Σ n·h, h the tokens computed before the chunk
    "decodes",
    "decode_context",  # Σ tokens the decodes attend to
    "running",
    "waiting",
    "kv_usage",  # fraction of the pool, after scheduling
)


def read_steps(path: str | Path) -> dict[str, np.ndarray]:
    """Columns of a step log, each of shape (steps,); a row cut short by a kill is dropped."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise CalibrationError(f"{path}: {error.strerror}") from None
    width = 8 * len(STEP_COLUMNS)
    rows = np.frombuffer(data[: len(data) // width * width], dtype=np.float64)
    table = rows.reshape(-1, len(STEP_COLUMNS))
    return {name: table[:, i] for i, name in enumerate(STEP_COLUMNS)}
