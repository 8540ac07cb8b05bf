"""How far the moments at which a router polls move a policy's TTFT, on the same arrivals.

    python tests/bench/bench_telemetry_phase.py scenario.yaml --requests 255 --seed 1 \\
        [--measured measured.json] [--calibration calibration.json] [--nodes 2]

A router learns of waits by polling; on a cluster nobody chooses at which phase of the arrivals the
polls fall. The scenario is simulated with ``routing.telemetry_period`` a few per cent shorter and
longer: each time the polls drift otherwise through the same requests, nothing else changes. The
spread of the answers is a noise that no error of a model can be told from. A policy that looks at
no wait has none.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from testbed.outcome import Outcome
from testbed.scenario import Scenario
from testbed.simulation import simulate

FIGURES = ("mean", "0.5", "0.9", "0.99")


def figures(outcome: Outcome) -> list[float]:
    return [outcome.ttft.mean, *(outcome.ttft.quantiles[q] for q in FIGURES[1:])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scenario", type=Path)
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--measured", type=Path, help="outcome to set beside the spread")
    parser.add_argument("--calibration", type=Path, help="instead of engine.calibration")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--answers", type=int, default=21)
    parser.add_argument("--width", type=float, default=0.1, help="of the period, to either side")
    options = parser.parse_args()
    asked = Scenario.load(options.scenario).replace(
        simulation={"node_model": "engine", "nodes": options.nodes, "waits": "node"}
    )
    if options.calibration is not None:
        asked = asked.with_field("engine.calibration", str(options.calibration))
    period = asked.routing.telemetry_period
    found = []
    for factor in np.linspace(1.0 - options.width, 1.0 + options.width, options.answers):
        moved = asked.with_field("routing.telemetry_period", float(period * factor))
        found.append(figures(simulate(moved, requests=options.requests, seed=options.seed)))
    table = 1e3 * np.array(found)
    print(
        f"{asked.name}, {asked.policy}: {options.requests} requests, seed {options.seed}, TTFT, ms"
    )
    print(
        f"{'':26}"
        + "".join(f"{f if f == 'mean' else 'p' + f[2:].ljust(2, '0'):>9}" for f in FIGURES)
    )
    for q, name in (
        (0.0, "least"),
        (0.25, "quarter"),
        (0.5, "median"),
        (0.75, "3 quarters"),
        (1.0, "most"),
    ):
        print(f"{name:26}" + "".join(f"{x:9.0f}" for x in np.quantile(table, q, axis=0)))
    if options.measured is not None:
        measured = 1e3 * np.array(figures(Outcome.load(options.measured)))
        below = (table < measured).mean(axis=0)
        print(f"{'measured':26}" + "".join(f"{x:9.0f}" for x in measured))
        print(f"{'share of answers below it':26}" + "".join(f"{x:9.0%}" for x in below))


if __name__ == "__main__":
    main()
