"""Spawn: how an engine's own processes start, whatever script asked for the engine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def script_hidden() -> Iterator[None]:
    """Processes spawned inside do not import the caller's script again.

    ``multiprocessing`` runs the main script anew in each spawned process. An engine's process
    needs nothing of it, and what it imports can break the engine: vLLM 0.32 looks through every
    loaded module for kernels and falls over Numba's libraries.
    """
    main = sys.modules["__main__"]
    kept = {name: vars(main).get(name) for name in ("__file__", "__spec__") if name in vars(main)}
    vars(main).pop("__file__", None)
    main.__spec__ = None
    try:
        yield
    finally:
        vars(main).update(kept)
