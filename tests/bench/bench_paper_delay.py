"""The delay models of ``testbed figures --delay-models`` against the step-exact simulator.

    python tests/bench/bench_paper_delay.py

One tier of the preset ``paper-reproduction`` at a few cached depths (hence slots), its engine as
the figures have it: coverage and mean TTFT by every model, and by engines simulated step by step.
95 % confidence of the simulation over seeds.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

import numpy as np
from scipy import stats

from testbed.presets import preset
from testbed.reporting.paper_delay_case import BUDGET, OUTPUTS, DelayCase, in_steps
from testbed.reporting.paper_routing import uniform_depth
from testbed.scenario import Scenario
from testbed.simulation import simulate
from testbed.step_time import StepTime
from testbed.theory.system import System

MODELS = ("erlang_c", "token_server", "step_chain_mix")
DEPTHS = (0.0, 1024.0, 2624.0)
LOADS = (0.3, 0.6, 0.85)
NODES = 40


def engines(case: DelayCase, depth: float, slots: int, intensity: float) -> Scenario:
    """The tier as a scenario of engines; memory holds what the slots can."""
    scenario = case.scenario
    deep = scenario.profiles[case.paper.order[2]]
    only = {
        "name": "uniform",
        "fraction": 1.0,
        "persistent_bytes": 0.0,
        "reusable": {q: min(h, depth) for q, h in deep.reusable.items()},
    }
    types = [{**q.model_dump(mode="json"), "output_tokens": OUTPUTS} for q in scenario.requests]
    longest = max(q.tokens for q in scenario.requests) + OUTPUTS
    return scenario.replace(
        policy="nearest",
        profiles=[only],
        requests=types,
        demand={"intensity": intensity},
        engine={
            "token_budget": BUDGET,
            "max_sequences": slots,
            "num_blocks": int(2 * (slots + 1) * longest / 32),
        },
        simulation={"node_model": "engine", "nodes": NODES},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--depths", type=float, nargs="*", default=DEPTHS)
    asked = parser.parse_args()
    scenario = preset("paper-reproduction")
    cases = {name: DelayCase(scenario, name) for name in MODELS}
    chain = cases["step_chain_mix"]
    print("| depth | slots | load | | coverage | mean TTFT, s |\n|---|---|---|---|---|---|")
    for depth in asked.depths:
        plain = uniform_depth(chain.paper, depth)
        if plain is None:
            sys.exit(f"nothing fits beside {depth:g} tokens")
        system = in_steps(plain, scenario)
        step = system.step_time
        assert isinstance(step, StepTime)
        slots, most = int(system.concurrency[0]), chain.greatest_unaware("nearest", system)
        for load in LOADS:
            where = f"| {depth:g} | {slots} | {load:g} |"
            for name, case in cases.items():
                coverage, mean = predicted(case, system, load * most)
                print(f"{where} {name} | {coverage:.3f} | {mean:.3f} |", flush=True)
            found = []
            for seed in range(asked.seeds):
                outcome = simulate(
                    engines(chain, depth, slots, load * most),
                    requests=asked.requests,
                    seed=seed,
                    step_time=step,
                )
                found.append((outcome.ttft.coverage["0.8"], outcome.ttft.mean))
            middle, spread = np.mean(found, axis=0), np.std(found, axis=0, ddof=1)
            half = stats.t.ppf(0.975, asked.seeds - 1) * spread / np.sqrt(asked.seeds)
            print(
                f"{where} simulated | {middle[0]:.3f} ± {half[0]:.3f} | "
                f"{middle[1]:.3f} ± {half[1]:.3f} |",
                flush=True,
            )


def predicted(case: DelayCase, system: System, intensity: float) -> tuple[float, float]:
    latency = case.latency("nearest", replace(system, intensity=intensity))
    return latency.coverage(case.paper.deadline), latency.mean


if __name__ == "__main__":
    main()
