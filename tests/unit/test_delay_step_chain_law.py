"""Step chain: what makes delays long, held against the step-exact engine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cluster.devices import load_device
from testbed.simulation.engine_model import EngineConfig, simulate_engine
from testbed.step_time import AnyStepTime, StepTime
from testbed.theory.delay.base import TierLoad
from testbed.theory.delay.step_chain import StepChain
from testbed.theory.delay.step_chain_node import Chain
from testbed.theory.delay.step_chain_stationary import solve

pytestmark = pytest.mark.slow

STEP = StepTime(
    c_pre=3.7e-3, p=1e-3, c_both=1e-3, a=39.5e-6, b=30e-9, d=62e-9, c_dec=2.7e-3, e=1.1e-4, f=2.6e-7
)
GEOMETRIC = 1.0 - 1.0 / 30.0
"""SCV of geometric outputs of 30 tokens."""


def node(
    weights: list[float],
    new: list[float],
    slots: int,
    step_time: AnyStepTime = STEP,
    outputs: float = 30.0,
    budget: int = 2048,
) -> TierLoad:
    n = np.array(new)
    alone = np.array([step_time.prefill_seconds(x) for x in n])
    return TierLoad(
        1.0, np.array(weights), alone, n, 0.0 * n, alone + 0.1, 0.0 * n + outputs, slots,
        step_time=step_time, token_budget=budget,
    )  # fmt: skip


def served(load: TierLoad, rate: float | None, count: int, *, geometric: bool = True):
    """TTFT (N,) and end (N,) of requests at a rate, or all there at 0; s."""
    rng = np.random.default_rng(11)
    q = rng.choice(load.weights.size, size=count, p=load.weights)
    mean = load.output_tokens[0]
    outputs = rng.geometric(1.0 / mean, size=count) if geometric else np.full(count, int(mean))
    arrival = np.zeros(count) if rate is None else np.cumsum(rng.exponential(size=count)) / rate
    trace = simulate_engine(
        EngineConfig(token_budget=load.token_budget, max_sequences=load.concurrency),
        load.step_time, arrival, load.new_tokens[q].astype(int), outputs,
    )  # fmt: skip
    return trace.ttft, trace.finished


@pytest.mark.parametrize("slots", [16, 40])
def test_who_waited_longer_shares_its_step_with_more(slots):
    # One type and geometric outputs: nothing of the chain's states is approximated. If as many
    # joined after a short wait as after a long one, the 90th percentile would be 4 to 6 % low.
    load = node([1.0], [345.0], slots)
    model = StepChain(GEOMETRIC)
    load = load.scaled(0.7 / model.utilisation(load))
    law = model.excess(load)
    ttft, _ = served(load, load.arrival_rate, 300_000)
    for p in (0.5, 0.9, 0.99):
        at = np.quantile(ttft, p) - load.residual_prefill[0]
        assert float(law.cdf(0, at)) == pytest.approx(p, abs=0.01)


def test_contexts_that_come_with_long_prompts_lengthen_the_queue():
    load = node([0.9, 0.1], [200.0, 1500.0], 16, budget=16_384)
    model = StepChain(GEOMETRIC)
    load = load.scaled(0.75 / model.utilisation(load))
    chain = Chain.of(load, GEOMETRIC)
    assert chain.drag > 0.05
    ttft, _ = served(load, load.arrival_rate, 1_000_000)
    said = float(load.weights @ (load.residual_prefill + model.mean(load)))
    batches = np.array([x.mean() for x in np.array_split(ttft[20_000:], 40)])
    error = batches.std(ddof=1) / np.sqrt(40)
    assert abs(said - batches.mean()) < 0.03 * said + 2.0 * error


def test_prompts_that_are_alike_but_for_rounding_bring_nothing_with_their_length():
    load = node([0.3, 0.6, 0.1], [77.7, 77.7, 77.7], 2)
    alike = replace(load, output_tokens=np.linspace(10, 90, 3))
    assert Chain.of(alike, GEOMETRIC).drag == 0.0


def test_capacity_where_tokens_are_padded():
    # Steps of this device take tokens by the tile: a mean number of them takes no mean time.
    step_time = load_device("rtx4090").step_time
    load = node([0.4, 0.3, 0.2, 0.1], [30.0, 200.0, 600.0, 1500.0], 16, step_time)
    count = 40_000
    _, end = served(load, None, count)
    end, edge = np.sort(end), count // 10
    simulated = (count - 2 * edge) / float(end[count - edge] - end[edge])
    assert Chain.of(load, GEOMETRIC).capacity == pytest.approx(simulated, rel=0.01)


@pytest.mark.parametrize("rho", [0.2, 0.7])
def test_second_moments_are_those_of_a_law(rho):
    load = node([0.4, 0.3, 0.2, 0.1], [30.0, 200.0, 600.0, 1500.0], 8)
    chain = Chain.of(load, GEOMETRIC)
    first, second = solve(chain, rho * chain.capacity).moments
    assert (second > first**2).all()
