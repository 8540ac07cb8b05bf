"""Compiled code on disk, kept apart for every state of the sources.

Numba's cache notices an edit in the file of a function, not in the functions that it calls or in
the constants that it froze: after an update, stale machine code would run against new data and
give wrong figures or crash. So the cache's folder carries a hash of all sources.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import time
from pathlib import Path

FOLDER = "edge-serving-testbed"
KEEP_SECONDS = 30 * 86400.0
"""Compiled code of other states of the sources is removed when unused for this long."""


def source_hash() -> str:
    """SHA-256 (first 16 hex digits) of every source file of the package, by name and content."""
    root = Path(__file__).resolve().parent
    total = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        total.update(str(path.relative_to(root)).encode())
        total.update(path.read_bytes())
    return total.hexdigest()[:16]


def key_cache() -> None:
    """Point Numba at the folder of these sources, unless NUMBA_CACHE_DIR says where.

    Where no home can be written to, Numba's own place beside the sources stays.
    """
    if "NUMBA_CACHE_DIR" in os.environ:
        return
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / FOLDER
    folder = base / f"numba-{source_hash()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
    except OSError:
        return
    # Child processes get it too: they run the same sources.
    os.environ["NUMBA_CACHE_DIR"] = str(folder)
    if "numba" in sys.modules:
        sys.modules["numba"].config.CACHE_DIR = str(folder)
    for other in base.glob("numba-*"):
        if other != folder and other.stat().st_mtime < time.time() - KEEP_SECONDS:
            shutil.rmtree(other, ignore_errors=True)
