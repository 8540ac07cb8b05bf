"""NodeWorkload: the requests of one engine, as an engine, the simulator and theory take them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from testbed.errors import ScenarioError
from testbed.scenario import Memory, Prefill, WorkloadSpec
from testbed.seeds import generator
from testbed.simulation.engine_model import EngineConfig, EngineTrace, simulate_engine
from testbed.step_time import AnyStepTime
from testbed.theory.delay.base import TierLoad
from testbed.theory.delay.step_chain_node import chunked

TYPES = 4
"""Request types fitted to a trace."""
MOST_OUTPUTS = 64
"""Generated tokens of a fitted type are cut here, so that a cell holds enough requests."""
PINNED_SHARE = 0.3
"""Most of the pool that the deep profile of a trace may pin."""


@dataclass(frozen=True)
class Requests:
    """N requests of a workload: arrival (s), type, tokens; each of shape (N,)."""

    arrival: np.ndarray
    kind: np.ndarray
    new: np.ndarray
    cached: np.ndarray
    outputs: np.ndarray

    def __len__(self) -> int:
        return len(self.arrival)


@dataclass(frozen=True)
class NodeWorkload:
    """What one engine is asked for. Arrays have the axis of types, (Q,).

    Attributes
    ----------
    weights : share of each type; sums to 1
    new, cached : tokens to compute after tokens that are pinned
    outputs : tokens generated, or the middle of ``spread``
    slots : most running sequences of the engine
    spread : (least, most) tokens generated, uniform, of every type; absent: ``outputs`` exactly
    """

    name: str
    what: str
    weights: np.ndarray
    new: np.ndarray
    cached: np.ndarray
    outputs: np.ndarray
    slots: int
    spread: tuple[int, int] | None = None

    @property
    def output_scv(self) -> float:
        """Squared coefficient of variation of one type's generated tokens."""
        if self.spread is None:
            return 0.0
        low, high = self.spread
        return ((high - low + 1.0) ** 2 - 1.0) / 12.0 / ((low + high) / 2.0) ** 2

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and outputs."""
        most = self.outputs if self.spread is None else np.full(len(self.new), self.spread[1])
        return int((self.new + self.cached + most).max())

    @property
    def chain(self) -> int:
        """Tokens of the prefix that is pinned: types share it from its start."""
        return int(self.cached.max())

    def draw(self, rate: float | None, count: int, seed: int, *, exact: bool = False) -> Requests:
        """``count`` requests, Poisson at ``rate``; without one everybody is there at 0.

        ``exact`` gives every type its own share of the requests, in random order: a small sample
        then has the mix that it stands for.
        """
        draw = generator(seed, "fidelity", self.name)
        if exact:
            quota = self.weights * count
            counts = np.floor(quota).astype(int)
            order = np.argsort(counts - quota, kind="stable")
            counts[order[: count - counts.sum()]] += 1
            kind = draw.permutation(np.repeat(np.arange(len(counts)), counts))
        else:
            kind = draw.choice(len(self.weights), size=count, p=self.weights)
        outputs = self.outputs[kind].astype(int)
        if self.spread is not None:
            outputs = draw.integers(self.spread[0], self.spread[1] + 1, size=count)
        arrival = np.zeros(count)
        if rate is not None:
            arrival = np.cumsum(draw.exponential(size=count)) / rate
        return Requests(
            arrival, kind, self.new[kind].astype(int), self.cached[kind].astype(int), outputs
        )

    def load(self, rate: float, step_time: AnyStepTime, config: EngineConfig) -> TierLoad:
        """The engine's load as the delay models take it (Theory B)."""
        prefill = np.array(
            [
                chunked(step_time, n, h, config.token_budget)
                for n, h in zip(self.new, self.cached, strict=True)
            ]
        )
        context = self.new + self.cached + 0.5 * self.outputs
        each = np.array([step_time.seconds((), 1, c) for c in context])
        return TierLoad(
            arrival_rate=rate,
            weights=self.weights,
            residual_prefill=prefill,
            new_tokens=self.new,
            cached_tokens=self.cached,
            occupancy=prefill + (self.outputs - 1.0) * each,
            output_tokens=self.outputs,
            concurrency=self.concurrency(config),
            profile=self.name,
            types=tuple(f"type-{q}" for q in range(len(self.new))),
            step_time=step_time,
            token_budget=config.token_budget,
            lookahead=config.async_scheduling,
        )

    def concurrency(self, config: EngineConfig) -> int:
        """Sequences at once: the slots, or what the pool holds of the mean request (Theory A9,
        with blocks of the pinned prefix counted once, H12)."""
        if config.num_blocks is None:
            return self.slots
        own = float(self.weights @ np.ceil((self.new + self.outputs) / config.block_size))
        return max(1, min(self.slots, int(config.usable_blocks // own)))

    def simulate(
        self, requests: Requests, step_time: AnyStepTime, config: EngineConfig
    ) -> EngineTrace:
        """The step-exact engine on these requests."""
        return simulate_engine(
            config,
            step_time,
            requests.arrival,
            requests.new + requests.cached,
            requests.outputs,
            reusable_tokens=requests.cached,
        )

    def capacity(self, step_time: AnyStepTime, config: EngineConfig, count: int = 20_000) -> float:
        """Requests/s that the simulated engine completes while somebody always waits."""
        trace = self.simulate(self.draw(None, count, 1), step_time, config)
        end = np.sort(trace.finished)
        edge = count // 10
        return (count - 2 * edge) / float(end[count - edge] - end[edge])


def study_workloads() -> dict[str, NodeWorkload]:
    """A, B and C of the study of first-token delay that the step chain comes from."""
    many = np.arange(128.0, 1537.0, 88.0)
    return {
        "A": NodeWorkload(
            "A", "512 new tokens, 16 outputs, 4 slots",
            np.ones(1), np.array([512.0]), np.zeros(1), np.array([16.0]), 4,
        ),
        "B": NodeWorkload(
            "B", "half 128 new after 896 cached, half 1,024 cold, 8 to 64 outputs, 8 slots",
            np.full(2, 0.5), np.array([128.0, 1024.0]), np.array([896.0, 0.0]),
            np.full(2, 36.0), 8, (8, 64),
        ),
        "C": NodeWorkload(
            "C", "128 to 1,536 new tokens, 1 output, 16 slots",
            np.full(many.size, 1.0 / many.size), many, np.zeros(many.size), np.ones(many.size), 16,
        ),
    }  # fmt: skip


def trace_workloads(
    path: Path, prefill: Prefill, memory: Memory, block_size: int, scale: float, longest: int
) -> dict[str, NodeWorkload]:
    """Types fitted to a trace: ``trace`` without any prefix, ``deep`` on the profile that pins
    the most.

    Raises
    ------
    ScenarioError
        The trace shares no prefix that fits.
    """
    from testbed.workload.derivation import derive
    from testbed.workload.trace import read_trace

    scenario = derive(
        read_trace(path),
        prefill=prefill,
        memory=memory,
        radio={"model": "power_law", "xi": 0.05, "alpha": 2.0},
        budget=PINNED_SHARE * memory.capacity,
        profiles=2,
        types=TYPES,
        workload=WorkloadSpec(trace=str(path), token_scale=scale, max_tokens=longest),
        intensity=1.0,
        name="fidelity",
    ).scenario
    if len(scenario.profiles) < 2:
        raise ScenarioError(f"{path}: no shared prefix fits in {PINNED_SHARE:.0%} of the pool")
    deep = max(scenario.profiles, key=lambda s: s.persistent_bytes)
    weights = np.array([q.probability for q in scenario.requests])
    tokens = np.maximum(np.rint([q.tokens for q in scenario.requests]), 1.0)
    outputs = np.clip(np.rint([q.output_tokens for q in scenario.requests]), 1.0, MOST_OUTPUTS)
    hits = np.array([deep.reusable[q.name] for q in scenario.requests])
    cached = np.minimum(hits, tokens - 1.0) // block_size * block_size
    fitted = f"types fitted to {path.name}, tokens × {scale:g}; {{}}; 16 slots"
    none = np.zeros_like(cached)
    return {
        name: NodeWorkload(
            name, fitted.format(_in_words(weights, tokens - h, h, outputs)),
            weights, tokens - h, h, outputs, 16,
        )
        for name, h in (("trace", none), ("deep", cached))
    }  # fmt: skip


def _in_words(weights: np.ndarray, new: np.ndarray, cached: np.ndarray, outputs: np.ndarray) -> str:
    each = zip(weights, new, cached, outputs, strict=True)
    return ", ".join(
        f"{p:.1%} {n:.0f} new{f' after {h:.0f} cached' if h else ''} ({m:.0f} outputs)"
        for p, n, h, m in each
    )
