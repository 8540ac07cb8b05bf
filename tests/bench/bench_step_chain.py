"""Delay models against the step-exact engine model, and what they cost.

Run: ``python tests/bench/bench_step_chain.py [--requests 400000] [--workloads ABCDEF]
[--device rtx4090] [--speed]``; with a device its step time, and an engine that schedules ahead as
it does; with ``--speed`` no simulation, only CPU seconds, at shares of the chain's own capacity.

For each workload and load (share of the simulator's own capacity, found by keeping a queue): the
error of each model's time to first token, mean / p50 / p90 / p99 in per cent of the simulator's,
with the standard error of the simulator's own figures (40 batches) beside them. Models see the
step time, the mix and the engine's limits; nothing of the simulation.

A  512 new tokens, 16 outputs, 4 slots
B  half 128 new after 896 cached, half 1024 cold; 8 to 64 outputs, 8 slots
C  128 to 1536 new, 1 output, 16 slots
D  30 / 200 after 512 / 600 / 1500 after 256 new, 40 / 20 / 10 / 60 outputs, 16 slots
E  as D, outputs geometric with those means
F  as D, 64 slots

CPU seconds (``time.process_time``, best of three, once compiled): of the stationary law with the
means of all types, and of one type's whole law. ``--speed`` shows them apart: making the chain (its
batches and its capacity), solving it at one load, the means, the law of one type with its CDF at a
point; and what a fixed point pays, a mean interpolated over the arrival rate once its nodes are
solved.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import numpy as np

from calibration.fidelity.prediction import model_figures
from testbed.simulation.engine_model import EngineConfig, simulate_engine
from testbed.step_time import StepTime
from testbed.theory.delay.base import TierLoad, get_delay_model
from testbed.theory.delay.step_chain import StepChain
from testbed.theory.delay.step_chain_node import Chain
from testbed.theory.delay.step_chain_stationary import Stationary, solve

STEP = StepTime(
    c_pre=3.7e-3, p=1e-3, c_both=1e-3, a=39.5e-6, b=30e-9, d=62e-9, c_dec=2.7e-3, e=1.1e-4, f=2.6e-7
)
BUDGET = 2048
AHEAD = False
LOADS = (0.3, 0.6, 0.8, 0.9)
PROBABILITIES = (0.5, 0.9, 0.99)
BATCHES = 40


@dataclass(frozen=True)
class Workload:
    """One node's requests. ``outputs`` (low, high) per type, uniform; or a mean, geometric."""

    weights: np.ndarray
    new: np.ndarray
    cached: np.ndarray
    outputs: np.ndarray
    slots: int
    spread: str = "fixed"

    @property
    def output_scv(self) -> float:
        if self.spread == "uniform":
            return (57.0**2 - 1.0) / 12.0 / 36.0**2
        return (
            1.0 - float(self.weights @ (1.0 / self.outputs)) if self.spread == "geometric" else 0.0
        )

    def load(self, rate: float) -> TierLoad:
        prefill = np.array(
            [STEP.prefill_seconds(*p) for p in zip(self.new, self.cached, strict=True)]
        )
        decode = (self.outputs - 1.0) * STEP.seconds(
            (), 1, float(self.weights @ (self.new + self.cached))
        )
        return TierLoad(
            rate, self.weights, prefill, self.new, self.cached, prefill + decode, self.outputs,
            self.slots, step_time=STEP, token_budget=BUDGET, lookahead=AHEAD,
        )  # fmt: skip

    def simulate(self, rate: float | None, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """TTFT (N,) and end (N,), s; without a rate everybody is there at 0."""
        rng = np.random.default_rng(seed)
        q = rng.choice(len(self.weights), size=count, p=self.weights)
        outputs = self.outputs[q].astype(int)
        if self.spread == "uniform":
            outputs = rng.integers(8, 65, size=count)
        elif self.spread == "geometric":
            outputs = rng.geometric(1.0 / self.outputs[q])
        arrival = np.zeros(count) if rate is None else np.cumsum(rng.exponential(size=count)) / rate
        trace = simulate_engine(
            EngineConfig(
                token_budget=BUDGET, max_sequences=self.slots, async_scheduling=AHEAD
            ),
            STEP, arrival,
            (self.new + self.cached)[q].astype(int), outputs,
            reusable_tokens=self.cached[q].astype(int),
        )  # fmt: skip
        return trace.ttft, trace.finished

    def capacity(self, count: int = 60_000) -> float:
        end = np.sort(self.simulate(None, count, 1)[1])
        edge = count // 10
        return (count - 2 * edge) / float(end[count - edge] - end[edge])


def workloads() -> dict[str, Workload]:
    many = np.arange(128.0, 1537.0, 88.0)
    four = (np.array([0.4, 0.3, 0.2, 0.1]), np.array([30.0, 200.0, 600.0, 1500.0]),
            np.array([0.0, 512.0, 0.0, 256.0]), np.array([40.0, 20.0, 10.0, 60.0]))  # fmt: skip
    return {
        "A": Workload(np.ones(1), np.array([512.0]), np.zeros(1), np.array([16.0]), 4),
        "B": Workload(np.full(2, 0.5), np.array([128.0, 1024.0]), np.array([896.0, 0.0]),
                      np.full(2, 36.0), 8, "uniform"),
        "C": Workload(np.full(many.size, 1.0 / many.size), many, 0.0 * many, 0.0 * many + 1.0, 16),
        "D": Workload(*four, 16),
        "E": Workload(*four, 16, "geometric"),
        "F": Workload(*four, 64),
    }  # fmt: skip


def measured(ttft: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same figures of a sample, and their standard errors."""

    def of(x: np.ndarray) -> np.ndarray:
        return np.array([x.mean(), *np.quantile(x, PROBABILITIES)])

    batches = np.array([of(x) for x in np.array_split(ttft, BATCHES)])
    return of(ttft), batches.std(axis=0, ddof=1) / np.sqrt(BATCHES)


def timed(load: TierLoad, scv: float) -> tuple[np.ndarray, Stationary]:
    """CPU seconds, the best of three each: chain, stationary law, means, one type's law."""
    best = np.full(4, np.inf)
    for _ in range(3):
        marks = [time.process_time()]
        chain = Chain.of(load, scv)
        assert chain.capacity > load.arrival_rate
        marks.append(time.process_time())
        state = solve(chain, load.arrival_rate)
        marks.append(time.process_time())
        assert state.moments[0].min() >= 0
        marks.append(time.process_time())
        state.excess.cdf(0, np.array(1.0))
        marks.append(time.process_time())
        best = np.minimum(best, np.diff(marks))
    return best, state


def speeds(name: str, work: Workload) -> None:
    """CPU milliseconds of one workload at every load."""
    scv = work.output_scv
    chain = Chain.of(work.load(1.0), scv)
    print(
        f"\n{name}: {work.slots} slots, {len(work.new)} types, {chain.stages} stages, "
        f"{len(chain.slots.occupied)} occupations, {chain.batch.fits.shape[1]} classes; "
        f"capacity {chain.capacity:.3f}/s",
        flush=True,
    )
    for share in LOADS:
        load = work.load(share * chain.capacity)
        cost, state = timed(load, scv)
        model = StepChain(scv)
        model.mean(load)
        began = time.process_time()
        for part in np.linspace(0.98, 1.0, 200):
            model.mean(load.scaled(part))
        again = (time.process_time() - began) / 200
        shown = " + ".join(f"{1e3 * x:.1f}" for x in cost)
        print(
            f"  load {share}: chain + law + means + CDF {shown} ms = {1e3 * cost.sum():.0f} ms; "
            f"interpolated mean {1e6 * again:.0f} us; {state.iterations} chain steps, "
            f"{state.law.shape[2]} queue lengths, tail {state.tail:.0e}",
            flush=True,
        )


def main() -> None:
    global STEP, AHEAD
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=400_000)
    parser.add_argument("--workloads", default="ABCDEF")
    parser.add_argument("--device", help="step time and scheduling of this record")
    parser.add_argument("--speed", action="store_true", help="CPU seconds only, no simulation")
    given = parser.parse_args()
    if given.device is not None:
        from cluster.devices import load_device

        profile = load_device(given.device)
        STEP, AHEAD = profile.step_time, profile.async_scheduling
    for name in given.workloads:
        work = workloads()[name]
        if given.speed:
            speeds(name, work)
            continue
        capacity = work.capacity()
        scv = work.output_scv
        chain = Chain.of(work.load(1.0), scv)
        print(
            f"\n{name}: capacity {capacity:.3f}/s simulated, {chain.capacity:.3f}/s by the chain "
            f"({100 * (chain.capacity / capacity - 1):+.2f} %); {chain.stages} stages, "
            f"{len(chain.slots.occupied)} occupations, {chain.batch.fits.shape[1]} classes"
        )
        for share in LOADS:
            load = work.load(share * capacity)
            ttft, _ = work.simulate(load.arrival_rate, given.requests, 2)
            truth, error = measured(ttft[given.requests // 20 :])
            shown = "/".join(f"{1e3 * x:.1f}" for x in truth)
            noise = "/".join(f"{100 * x:.1f}" for x in error / truth)
            print(f"  load {share}: simulated {shown} ms, standard errors {noise} %")
            for label in ("erlang_c", "mgc", "birth_death", "token_server", f"step_chain:{scv}"):
                model = get_delay_model(label)
                found = model_figures(model, load, PROBABILITIES)
                if found is None:
                    print(f"    {label.partition(':')[0]:13s} unstable by this model")
                    continue
                off = " / ".join(
                    f"{100 * (a / b - 1):+.1f}" for a, b in zip(found, truth, strict=True)
                )
                print(f"    {label.partition(':')[0]:13s} {off}")
            cost, state = timed(load, scv)
            means, law = 1e3 * cost[:3].sum(), 1e3 * cost[3]
            print(
                f"    CPU: means {means:.0f} ms, one type's law {law:.0f} ms; "
                f"{state.iterations} chain steps, {state.law.shape[2]} queue lengths, "
                f"tail {state.tail:.0e}"
            )


if __name__ == "__main__":
    main()
