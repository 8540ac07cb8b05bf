"""Engine: the small surface through which calibration, replicas and tests drive a serving engine.

Token ids go in; stamps, generated token ids and the number of cached tokens come out. All stamps
are ``time.perf_counter()`` seconds of the engine's machine: on Linux that clock is system-wide,
so stamps of the engine's own processes compare with those of its caller.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar

from cluster.engines.device_time_clock import Pace
from testbed.errors import EngineError
from testbed.scenario import EngineSpec


@dataclass(frozen=True)
class Placement:
    """Where a replica runs and what it may write."""

    core: int | None = None
    step_log: str | None = None
    seed: int = 0


@dataclass(frozen=True)
class Generation:
    """One served request. Stamps are perf_counter seconds on the engine's machine.

    ``received`` entered :meth:`Engine.generate`; ``queued``, ``scheduled`` and
    ``engine_first_token`` are the engine's own stamps where it gives them; ``first_token`` is when
    the caller's process held the first token; ``finished`` when it held the last.
    """

    received: float
    first_token: float
    finished: float
    queued: float | None = None
    scheduled: float | None = None
    engine_first_token: float | None = None
    cached_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    token_times: tuple[float, ...] = ()
    preemptions: int = 0


@dataclass(frozen=True)
class EngineLoad:
    """A live look at an engine."""

    running: int
    waiting: int
    kv_usage: float
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    pace: Pace | None = None
    """In device time: how well it was kept since the last :meth:`Engine.forget`."""


@dataclass(frozen=True)
class EngineFacts:
    """What an outcome must say about the engine that served it."""

    name: str
    version: str
    model: str
    dtype: str
    device: str
    num_blocks: int
    block_size: int
    bytes_per_token: float
    vocabulary: int
    max_model_len: int
    max_sequences: int
    token_budget: int
    clock: str
    extra: dict[str, Any] = field(default_factory=dict)


class Engine(ABC):
    """One serving engine with prefix caching on. Not started until :meth:`start`."""

    name: ClassVar[str]
    can_limit_step: ClassVar[bool] = False
    """Whether :meth:`limit_step` works while the engine runs."""

    def __init__(self, spec: EngineSpec, placement: Placement | None = None) -> None:
        self.spec = spec
        self.placement = placement or Placement()

    @abstractmethod
    async def start(self) -> EngineFacts:
        """Start and wait until it serves. Raises :class:`EngineError` with one clear line."""

    @abstractmethod
    async def generate(
        self, request_id: str, tokens: Sequence[int], output_tokens: int
    ) -> Generation:
        """Serve one request greedily to exactly ``output_tokens`` tokens."""

    @abstractmethod
    async def pin(self, name: str, tokens: Sequence[int]) -> int:
        """Compute a prefix and keep its full blocks out of eviction; returns tokens pinned."""

    @abstractmethod
    async def unpin(self, name: str) -> None:
        """Give a pinned prefix's blocks back; raises :class:`EngineError` for an unknown name."""

    @abstractmethod
    async def forget(self) -> None:
        """Drop every cached prefix that is not pinned. The engine must be idle."""

    async def limit_step(self, tokens: int | None) -> None:
        """Let steps hold at most so many tokens; None: the engine's own budget again.

        The engine must be idle. Raises :class:`EngineError` where the budget is fixed once the
        engine has started, or where ``tokens`` is not between 1 and that budget.
        """
        raise EngineError(f"{self.name}: the tokens of a step are fixed once it has started")

    @abstractmethod
    async def load(self) -> EngineLoad:
        """Running, waiting and pool use, as the engine counts them."""

    @abstractmethod
    async def stop(self) -> None:
        """Stop and leave no process behind. Safe to call twice, and after a failed start."""

    def check_fits(self, tokens: int, output_tokens: int) -> None:
        """Refuse a request that cannot be served, before it is sent."""
        if tokens < 1 or output_tokens < 1:
            raise EngineError(f"a request of {tokens} + {output_tokens} tokens is empty")
        if tokens + output_tokens > self.spec.max_model_len:
            raise EngineError(
                f"a prompt of {tokens} tokens with {output_tokens} output tokens is longer than "
                f"the engine's limit of {self.spec.max_model_len} (engine.max_model_len)"
            )


def model_directory(model: str) -> str:
    """Directory of a preset (``tiny-llama``), or the given directory or hub name unchanged.

    Raises
    ------
    EngineError
        The path looks local but holds no ``config.json``.
    """
    preset = resources.files("cluster.engines") / "models" / model
    if "/" not in model and (preset / "config.json").is_file():
        return str(preset)
    path = Path(model)
    if path.is_dir() and not (path / "config.json").is_file():
        raise EngineError(f"engine.model: {model}: no config.json in this directory")
    if not path.exists() and (path.is_absolute() or model.startswith(".")):
        raise EngineError(f"engine.model: {model}: no such directory")
    if not path.exists() and "/" not in model:
        known = ", ".join(sorted(p.name for p in preset.parent.iterdir() if p.is_dir()))
        raise EngineError(f"engine.model: {model!r} is neither a preset ({known}) nor a directory")
    return str(path) if path.exists() else model


def is_random_model(directory: str) -> bool:
    """Whether a model directory holds no weights, so that they must be random."""
    path = Path(directory)
    if not path.is_dir():
        return False
    weights = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
    return not any(next(path.glob(pattern), None) for pattern in weights)


def nominal_bytes_per_token(config: dict[str, Any], bytes_per_value: int) -> float:
    """Nominal κ = 2·layers·kv_heads·head_dim·bytes (Theory A4) from a model's config.json."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads = config.get("num_key_value_heads") or heads
    return 2.0 * config["num_hidden_layers"] * kv_heads * head_dim * bytes_per_value


def model_config(directory: str) -> dict[str, Any]:
    """The model's ``config.json``."""
    path = Path(directory) / "config.json"
    try:
        return json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise EngineError(f"{path}: {error}") from None
