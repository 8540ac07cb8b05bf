"""Scores: what a cached prefix is worth, and how deep to cache (Theory F1, F5)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from testbed.scenario import Scenario
from testbed.theory.delay.erlang_c import mean_wait
from testbed.theory.prefill import prefill_saving, residual_prefill
from testbed.tier_engine import one_engine


def prefix_score(
    scenario: Scenario, probability: ArrayLike, tokens: ArrayLike, depth: ArrayLike
) -> np.ndarray:
    """Γ_v = p̂_v·[g(L_v) − g(L_v − ℓ_v)]/B_v, s saved per byte (Theory F1).

    Parameters
    ----------
    scenario : gives g and κ; B_v = κ·ℓ_v
    probability : p̂_v, share of the requests that pass through the prefix; any shape
    tokens : L_v, mean prompt length of those requests
    depth : ℓ_v, tokens of the prefix, at most L_v; a prefix of 0 tokens scores 0
    """
    depth = np.asarray(depth, dtype=float)
    saved = np.asarray(probability) * prefill_saving(scenario.prefill, tokens, depth)
    size = scenario.memory.per_token * depth
    return np.divide(saved, size, out=np.zeros_like(size + saved), where=size > 0)


@dataclass(frozen=True)
class DepthChoice:
    """A uniform cached depth and what it does at one node.

    ``depth`` tokens, ``concurrency`` sequences, ``saved`` s of prefill saved per request against
    no cache, ``wait`` s, ``total`` s: mean residual prefill plus mean wait.
    """

    depth: float
    concurrency: int
    saved: float
    wait: float
    total: float


def marginal_depth(scenario: Scenario, arrival_rate: float) -> tuple[DepthChoice, ...]:
    """Deepen a common prefix while that saves more prefill than it costs in waits (Theory F5).

    A node holds the first h tokens of every prompt (all of a shorter one) and serves
    ``arrival_rate`` requests/s of the scenario's mix. Depth costs concurrency in whole sequences,
    so the rule g'(L − h)·dh > dW̄ is taken from one concurrency to the next: each step caches as
    deep as the memory of one sequence less allows.

    Returns
    -------
    The steps in order from no cache to the depth where the rule stops; the last one is the
    choice. Where even an uncached node is overloaded its wait is infinite, and any depth that
    makes it finite is a gain.
    """
    one_engine(scenario, "the marginal depth")
    memory = scenario.memory
    p = np.array([q.probability for q in scenario.requests])
    tokens = np.array([q.tokens for q in scenario.requests])
    decode = np.array([q.decode_occupancy for q in scenario.requests])

    def at(depth: float, concurrency: int) -> DepthChoice:
        hit = np.minimum(depth, tokens)
        residual = residual_prefill(scenario.prefill, tokens, hit)
        service = float(p @ (residual + decode))
        wait = float(mean_wait(concurrency, arrival_rate * service, service))
        return DepthChoice(
            depth=depth,
            concurrency=concurrency,
            saved=float(p @ prefill_saving(scenario.prefill, tokens, hit)),
            wait=wait,
            total=float(p @ residual) + wait,
        )

    steps = [at(0.0, memory.concurrency())]
    longest = float(tokens.max())
    while steps[-1].depth < longest and steps[-1].concurrency >= 1:
        last = steps[-1]
        fits = (memory.capacity - last.concurrency * memory.per_sequence) / memory.per_token
        depth = min(fits, longest)
        c = last.concurrency
        if depth <= last.depth:
            if c == 1:
                break
            c -= 1
            depth = min((memory.capacity - c * memory.per_sequence) / memory.per_token, longest)
        step = at(depth, c)
        if step.total >= last.total and np.isfinite(last.total):
            break
        steps.append(step)
    return tuple(steps)
