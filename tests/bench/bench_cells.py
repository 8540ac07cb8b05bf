"""Where simulate and predict part: cells of different size, and waits that nodes tell themselves.

    python tests/bench/bench_cells.py

Coverage at 0.8 s of the preset ``paper-baseline`` (load-aware), by theory and by simulation, one
assumption given up at a time:

- every tier's mean load, its mean wait advertised (`predict` as the paper has it);
- real cells (a torus), the tiers' mean waits still advertised: theory with the load mixed over
  cells (Theory H8), simulation on drawn planes;
- real cells and each node advertising its own wait: theory (H8), simulation;
- equal cells and each node advertising its own measured wait: simulation.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import numpy as np

from testbed.presets import preset
from testbed.routing.policies import get_policy
from testbed.scenario import Scenario
from testbed.simulation import simulate
from testbed.theory import predict
from testbed.theory.delay import get_delay_model
from testbed.theory.delay.base import ExcessDelay
from testbed.theory.extensions.cell_load import CellLatency, CellLaw, fixed_cells
from testbed.theory.latency import Latency
from testbed.theory.operating_point import solve
from testbed.theory.system import System

NODES = 400


class FixedCells(CellLatency):
    """The cells as they are under the tiers' mean waits, which a crowded node cannot correct."""

    @property
    def laws(self) -> tuple[ExcessDelay | None, ...]:
        return tuple(
            fixed_cells(self.model, load, CellLaw.gamma(shape))
            if load.arrival_rate > 0
            else self.model.excess(load)
            for load, shape in zip(self.point.loads, self.shapes, strict=True)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--layouts", type=int, default=4)
    asked = parser.parse_args()
    base = preset("paper-baseline")
    policy, model = get_policy(base.policy), get_delay_model(base.delay_model)
    system = System.from_scenario(base)
    solver = base.solver
    point = solve(
        system,
        policy,
        model,
        damping=solver.damping,
        tolerance=solver.tolerance,
        max_iterations=solver.max_iterations,
    )
    latency = Latency(system, point, model)

    def simulated(**spec: Any) -> tuple[float, float]:
        return layouts(base.replace(simulation=spec), asked.requests, asked.layouts)

    line("mean load, theory", predict(base).ttft.coverage["0.8"])
    line("mean load, simulated", *simulated())
    line("real cells, tiers' mean waits, theory", FixedCells.of(latency, policy).coverage(0.8))
    torus = {"space": "torus", "nodes": NODES}
    line("real cells, tiers' mean waits, simulated", *simulated(**torus, waits="theory"))
    line("real cells, own waits, theory", CellLatency.of(latency, policy).coverage(0.8))
    line("real cells, own waits, simulated", *simulated(**torus))
    line("equal cells, own waits, simulated", *simulated(space="palm", nodes=100, waits="node"))


def layouts(scenario: Scenario, requests: int, count: int) -> tuple[float, float]:
    """Coverage over ``count`` drawn planes and its 95 % half-width."""
    seen = [
        simulate(scenario, requests=requests, seed=10 + k).ttft.coverage["0.8"]
        for k in range(count)
    ]
    return float(np.mean(seen)), 1.96 * float(np.std(seen, ddof=1)) / math.sqrt(count)


def line(name: str, coverage: float, half: float | None = None) -> None:
    width = "" if half is None else f" ± {half:.4f}"
    print(f"{name:<44} {coverage:.4f}{width}", flush=True)


if __name__ == "__main__":
    main()
