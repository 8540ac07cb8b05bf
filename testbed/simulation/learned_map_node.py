"""Node: one node of a profile whose slots alone are short, simulated at any load (Theory H3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from testbed.errors import ScenarioError
from testbed.scenario import Scenario
from testbed.seeds import generator
from testbed.simulation.delay_maps import saturation
from testbed.simulation.engine_farm import NOISE
from testbed.simulation.engine_model import EngineConfig, simulate_engine
from testbed.simulation.engine_network import engine_config
from testbed.step_time import AnyStepTime
from testbed.theory.delay.base import TierLoad
from testbed.theory.delay.engine_load import calibrated
from testbed.theory.delay.learned_map_fit import SimulatedLaw
from testbed.theory.delay.step_chain_node import chunked
from testbed.theory.system import System

_WARM_UP = 0.1
_SOONER = 0.01


@dataclass(frozen=True)
class Node:
    """One node of a profile whose slots alone are short, as the simulator takes it.

    Attributes
    ----------
    load : its prompts and engine as the theory takes them, nobody arriving
    tokens, reuse : (Q,) whole tokens of a prompt, and of them in the pinned prefix
    alone : (Q,) seconds of an unloaded prefill after what the engine reuses of that
    """

    profile: str
    load: TierLoad
    config: EngineConfig
    step_time: AnyStepTime
    tokens: np.ndarray
    reuse: np.ndarray
    alone: np.ndarray
    seed: int
    progress: Callable[[int], None] | None

    @classmethod
    def of(
        cls,
        scenario: Scenario,
        system: System,
        s: int,
        seed: int,
        progress: Callable[[int], None] | None = None,
    ) -> Node:
        load = system.tier_load(np.zeros(system.shape), s)
        step_time, budget = calibrated(load, "learned_map")
        config = engine_config(scenario, s)
        tokens = np.array([max(1, round(q.tokens)) for q in scenario.requests])
        reuse = np.floor(load.cached_tokens).astype(int)
        # The engine reuses whole blocks and computes at least the last token.
        blocks = np.minimum(reuse, tokens - 1) // config.block_size * config.block_size
        alone = np.array(
            [
                chunked(step_time, float(n - h), float(h), budget)
                for n, h in zip(tokens, blocks, strict=True)
            ]
        )
        return cls(
            scenario.profiles[s].name,
            load,
            config,
            step_time,
            tokens,
            reuse,
            alone,
            seed,
            progress,
        )

    def at(self, slots: int) -> EngineConfig:
        """The engine with so many slots and no other limit."""
        return self.config.model_copy(
            update={
                "max_sequences": slots,
                "token_budget": max(self.config.token_budget, slots),
                "num_blocks": None,
                "pinned_blocks": 0,
            }
        )

    def simulate(
        self, name: str, mix: np.ndarray, slots: int, load: float, requests: int
    ) -> SimulatedLaw:
        """Excess delays at a share ``load`` of the capacity that the same requests show."""
        draw = generator(self.seed, "learned map", self.profile, name)
        kind = draw.choice(len(mix), requests, p=mix)
        tokens, reuse = self.tokens[kind], self.reuse[kind]
        outputs = draw.geometric(1.0 / np.maximum(self.load.output_tokens, 1.0)[kind])
        outputs = np.minimum(outputs, self.config.max_model_len - tokens)
        if (outputs < 1).any():
            raise ScenarioError(
                f"engine.max_model_len: {self.config.max_model_len} is no longer than a prompt of "
                f"{tokens.max()} tokens"
            )
        config = self.at(slots)
        capacity = saturation(config, self.step_time, tokens, outputs, reuse)
        rate = load * capacity
        arrival = np.cumsum(draw.standard_exponential(requests)) / rate
        trace = simulate_engine(
            config, self.step_time, arrival, tokens, outputs, reusable_tokens=reuse
        )
        delay = trace.ttft - self.alone[kind]
        # A prompt that others cut may be done a hair sooner than whole: that is no delay.
        if delay.min() < -_SOONER * self.alone.min():
            raise ScenarioError(
                f"profile {self.profile!r}: a first token came {-delay.min():.3g} s before an "
                f"unloaded engine's"
            )
        delay = np.where(delay < NOISE, 0.0, delay)
        counted = slice(int(_WARM_UP * requests), None)
        if self.progress is not None:
            self.progress(requests)
        return SimulatedLaw(
            rate,
            mix,
            slots,
            capacity,
            tuple(delay[counted][kind[counted] == q] for q in range(len(mix))),
        )
