"""Step chain: prompts of several steps, and steps that are formed while one runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from testbed.simulation.engine_model import EngineConfig, simulate_engine
from testbed.step_time import StepTime
from testbed.theory.delay.base import TierLoad
from testbed.theory.delay.step_chain import StepChain
from testbed.theory.delay.step_chain_node import Chain, chunked

STEP = StepTime(
    c_pre=3.7e-3, p=1e-3, c_both=1e-3, a=39.5e-6, b=30e-9, d=62e-9, c_dec=2.7e-3, e=1.1e-4, f=2.6e-7
)
SLOW = StepTime(c_pre=15e-3, a=65e-6, c_dec=16.5e-3, e=2.2e-4)
"""Decodes that take a third of a prompt's time, as on a device that is memory bound."""
BUDGET = 2048


def node(rate, new, outputs, slots, weights=(1.0,), **more):
    n, o = np.array(new), np.array(outputs)
    prefill = np.array([chunked(STEP, x, 0.0, BUDGET) for x in n])
    return TierLoad(
        rate, np.array(weights), prefill, n, np.zeros(n.size), prefill + 0.003 * o, o, slots,
        step_time=STEP, token_budget=BUDGET, **more,
    )  # fmt: skip


def simulated_means(load, count=40_000):
    """Mean TTFT of each type by the step-exact engine, s."""
    rng = np.random.default_rng(5)
    q = rng.choice(load.weights.size, size=count, p=load.weights)
    arrival = np.cumsum(rng.exponential(size=count)) / load.arrival_rate
    trace = simulate_engine(
        EngineConfig(
            max_sequences=load.concurrency, token_budget=BUDGET, async_scheduling=load.lookahead,
            max_model_len=16_384,
        ),
        STEP, arrival, load.new_tokens[q].astype(int), load.output_tokens[q].astype(int),
    )  # fmt: skip
    return np.array([trace.ttft[q == k].mean() for k in range(load.weights.size)])


@pytest.mark.parametrize("steps", [0.4, 3.6, 5.5])
def test_prompts_one_by_one_take_what_their_chunks_take(steps):
    load = node(1.0, (BUDGET * steps,), (1.0,), 1)
    # Within a class the rest is as where prompts share steps, which one slot does not allow.
    seconds = float(load.residual_prefill[0])
    assert 1.0 / Chain.of(load, 0.0).capacity == pytest.approx(seconds, rel=0.05)


def test_long_prompts_go_through_all_their_steps():
    load = node(1.3, (500.0, 9000.0), (9.0, 9.0), 8, weights=(0.85, 0.15))
    said = load.residual_prefill + StepChain().mean(load)
    assert said == pytest.approx(simulated_means(load), rel=0.06)


def test_at_low_load_a_formed_step_holds_who_came_a_step_before():
    load = node(3.0, (512.0,), (12.0,), 6, lookahead=True)
    said = load.residual_prefill + StepChain().mean(load)
    assert said == pytest.approx(simulated_means(load), rel=0.02)


def simulated_ttft(load, outputs, count=200_000):
    """TTFT of every request by the step-exact engine, s, once it is under way."""
    rng = np.random.default_rng(3)
    q = rng.choice(load.weights.size, size=count, p=load.weights)
    trace = simulate_engine(
        EngineConfig(max_sequences=load.concurrency, token_budget=BUDGET, async_scheduling=True),
        load.step_time, np.cumsum(rng.exponential(size=count)) / load.arrival_rate,
        load.new_tokens[q].astype(int), outputs(rng, count),
    )  # fmt: skip
    return trace.ttft[count // 20 :]


@pytest.mark.parametrize(("rate", "step_time"), [(9.0, STEP), (2.7, SLOW), (5.4, SLOW)])
def test_ahead_whoever_waits_for_a_slot_waits_for_the_formed_step_too(rate, step_time):
    # Outputs as the chain has them, so that nothing but the order of steps is compared.
    load = replace(node(rate, (512.0,), (16.0,), 4, lookahead=True), step_time=step_time)
    chain = Chain.of(load, 0.0)
    seen = simulated_ttft(
        load,
        lambda rng, n: rng.geometric(chain.stages / 17.0, size=(n, chain.stages)).sum(axis=1) - 1,
    )
    law = StepChain().excess(load)
    for p in (0.5, 0.75, 0.9, 0.99):
        said = float(chain.alone[0]) + law.quantile(0, p)
        assert said == pytest.approx(np.quantile(seen, p), rel=0.05)
