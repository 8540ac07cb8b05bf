"""Importers: calibrations from what others measured on GPUs. One module a source."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from calibration.record import Calibration
from testbed.errors import CalibrationError

SOURCES = ("llmservingsim", "distserve", "guidellm", "aiperf", "vllm-bench")


def import_calibration(
    source: str,
    path: str | Path,
    *,
    model: str | None = None,
    tensor_parallel: int | None = None,
    device: str | None = None,
) -> Calibration:
    """A calibration record from a third party's files.

    Parameters
    ----------
    source
        One of :data:`SOURCES`.
    path
        A folder or file of that tool.
    model, tensor_parallel, device
        What the files do not say, or which of several they hold.

    Raises
    ------
    CalibrationError
        The source is not known, or a file is missing or malformed (named with its line).
    """
    from calibration.importers.distserve import import_distserve
    from calibration.importers.llmservingsim import import_llmservingsim
    from calibration.importers.loadtools import import_load_test

    readers: dict[str, Callable[[], Calibration]] = {
        "llmservingsim": lambda: import_llmservingsim(
            path, model=model, tensor_parallel=tensor_parallel, device=device
        ),
        "distserve": lambda: import_distserve(
            path, model=model, tensor_parallel=tensor_parallel, device=device
        ),
        **{
            tool: lambda tool=tool: import_load_test(tool, path, model=model, device=device)
            for tool in ("guidellm", "aiperf", "vllm-bench")
        },
    }
    if source not in readers:
        raise CalibrationError(f"import: {source!r} is not one of {', '.join(SOURCES)}")
    return readers[source]()


def plain(value: Any) -> Any:
    """JSON-ready copy of a mapping that YAML or JSON gave."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)
