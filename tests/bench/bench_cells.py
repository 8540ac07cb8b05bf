"""Cells of different size: what each node's own load does to coverage (Theory H8).

    python tests/bench/bench_cells.py --out results/cell-areas [--seconds 150]

Preset ``paper-baseline``, three policies, at shares of the intensity at which the mean-load model
of each saturates. One assumption is given up at a time:

- ``mean``: every node of a tier has the tier's mean load (the paper); simulated with equal cells;
- ``cells``: loads are those of real cells, the tiers' mean waits advertised: theory mixed over
  the gamma law of areas, simulation on planes drawn at random;
- ``own``: the same, each node advertising the wait that it has itself (load-aware only);
- ``equal``: each node advertising its own wait, but equal cells: what such waits cost by
  themselves, being measured (simulated only);
- ``own3``: as ``own``, the three nearest nodes of each profile competing (simulated; theory lets
  all of them);
- ``own fast``, ``own slow``: as ``own`` with waits damped over 1 s and told every 0.1 s, and
  damped over 50 s, instead of 5 s and every 0.5 s (simulated only).

Beside them the law of areas by itself, drawn without any queue. Every seed of every cell of this
grid is a piece that is kept as it comes; ``--seconds`` stops between two of them, and the same
command goes on. The table and the figure are written when all are there.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from scipy import stats

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from testbed.environment import environment  # noqa: E402
from testbed.outcome import dump_json, write_atomically  # noqa: E402
from testbed.presets import preset  # noqa: E402
from testbed.scenario import Scenario  # noqa: E402
from testbed.simulation import simulate  # noqa: E402
from testbed.theory.extensions.cell_load import CellLatency, CellLaw, cell_shapes, own_waits  # noqa: E402
from testbed.theory.geometry import associate  # noqa: E402
from testbed.theory.latency import Latency  # noqa: E402
from testbed.theory.predict import latency_at, locate, pose, settle  # noqa: E402
from tests.bench.cells_page import draw, table  # noqa: E402
from tests.unit.plane import Torus, choose  # noqa: E402

PRESET = "paper-baseline"
SHARES = (0.3, 0.6, 0.8, 0.9)
DEADLINES = (0.8, 1.2, 2.0)
LEVELS = (0.1, 0.5, 0.9, 0.99)
NODES = 256
FEW = {"mean": 3, "equal": 4, "own3": 5, "own fast": 4, "own slow": 4}
"""Seeds where no layout is drawn, and of variants."""
DURATION = 150.0
"""Seconds that the measured requests of a run arrive in; a fifth as many come before."""
SEEDS = tuple(range(10, 18))
POLICIES: dict[str, tuple[str, ...]] = {
    "load_aware": ("mean", "cells", "own", "equal", "own3", "own fast", "own slow"),
    "prefix_only": ("mean", "cells"),
    "nearest": ("mean", "cells"),
}
TORUS = {"space": "torus", "nodes": NODES, "waits": "node"}
SPACES: dict[str, dict[str, Any]] = {
    "mean": {"space": "palm", "waits": "theory"},
    "cells": {**TORUS, "waits": "theory"},
    "equal": {**TORUS, "space": "palm"},
}
ROUTING: dict[str, dict[str, Any]] = {
    "own3": {"candidates_per_profile": 3},
    "own fast": {"telemetry_window": 1.0, "telemetry_period": 0.1},
    "own slow": {"telemetry_window": 50.0},
}
PLANES, SIDE, USERS = 16, 16.0, 60_000
"""Planes drawn for the law of areas alone: km, and points a plane."""


class Kept:
    """Pieces on disk, one line each."""

    def __init__(self, path: Path, seconds: float) -> None:
        self._path, self._until = path, time.monotonic() + seconds
        self.values: dict[str, Any] = {}
        if path.exists():
            lines = path.read_bytes().splitlines()
            self.values = {x["piece"]: x["value"] for x in map(orjson.loads, lines)}

    def get(self, piece: str, compute: Callable[[], Any]) -> Any:
        if piece not in self.values:
            if time.monotonic() > self._until:
                print(f"{len(self.values)} pieces are kept; the same command goes on", flush=True)
                sys.exit(3)
            self.values[piece] = orjson.loads(dump_json(compute()))
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:
                file.write(dump_json({"piece": piece, "value": self.values[piece]}) + b"\n")
            print(piece, flush=True)
        return self.values[piece]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    asked = parser.parse_args()
    kept = Kept(asked.out / "pieces.jsonl", asked.seconds)
    cells = list(grid(kept))
    made = environment()
    record = {
        "preset": PRESET,
        "seeds": SEEDS,
        "nodes": NODES,
        "duration": DURATION,
        "deadlines": DEADLINES,
        "node_levels": LEVELS,
        "telemetry_window": base("load_aware").routing.telemetry_window,
        "environment": {k: made[k] for k in ("testbed", "code", "python", "packages", "time")},
        "cells": cells,
    }
    write_atomically(asked.out / "cells.json", dump_json(record, indent=True) + b"\n")
    draw(cells, asked.out / "cells")
    print(table(cells))


def base(policy: str) -> Scenario:
    targets = {"coverage_at": list(DEADLINES), "quantiles": [0.5, 0.9, 0.99]}
    return preset(PRESET).replace(policy=policy, targets=targets)


def grid(kept: Kept) -> Iterator[dict[str, Any]]:
    """One mapping for each policy and share, with everything found."""
    for policy, kinds in POLICIES.items():
        scenario = base(policy)
        most = kept.get(f"{policy}/greatest", lambda s=scenario: greatest(s))
        for x in SHARES:
            name, at = f"{policy}/{x:g}", scenario.with_field("demand.intensity", x * most)
            yield {
                "policy": policy,
                "share": x,
                "intensity": x * most,
                "theory": kept.get(f"{name}/theory", lambda s=at, k=kinds: predicted(s, k)),
                "areas": kept.get(f"{name}/areas", lambda s=at: areas(s)),
                "simulated": {
                    kind: joined(
                        [
                            kept.get(
                                f"{name}/{kind}/{seed}",
                                lambda s=at, k=kind, seed=seed: simulated(s, k, seed),
                            )
                            for seed in SEEDS[: FEW.get(kind)]
                        ]
                    )
                    for kind in kinds
                },
            }


def greatest(scenario: Scenario) -> float:
    """The intensity at which the mean-load model has its first saturated tier."""
    low, high = 0.01, 100.0
    while high / low > 1.0005:
        middle = float(np.sqrt(low * high))
        stable = locate(scenario.with_field("demand.intensity", middle)).point.feasible
        low, high = (middle, high) if stable else (low, middle)
    return low


def predicted(scenario: Scenario, kinds: tuple[str, ...]) -> dict[str, Any]:
    """The mean-load model, the load mixed over cells as they are, and nodes with own waits."""
    system, policy, model = pose(scenario)
    mean = latency_at(system, settle(scenario, system, policy, model), model)
    shapes = cell_shapes(system, mean.point.costs)
    found = {"mean": figures(scenario, mean)}
    found["cells"] = figures(scenario, CellLatency.of(mean, policy, shapes, own=False))
    found["mean"]["node_utilisation"] = {
        s: [float(rho)] * len(LEVELS)
        for s, rho in zip(system.names, mean.point.utilisation, strict=True)
    }
    found["cells"]["node_utilisation"] = {
        s: (float(rho) * stats.gamma.ppf(LEVELS, shape, scale=1.0 / shape)).tolist()
        for s, rho, shape in zip(system.names, mean.point.utilisation, shapes, strict=True)
    }
    if "own" in kinds:
        found["own"] = figures(scenario, CellLatency.of(mean, policy, shapes))
        busy = {}
        for s, (profile, shape) in enumerate(zip(system.names, shapes, strict=True)):
            area = stats.gamma.ppf(LEVELS, shape, scale=1.0 / shape)
            law = CellLaw(area, np.full(len(LEVELS), 1.0 / len(LEVELS)))
            _, loads = own_waits(system, policy, model, mean.point, s, law)
            busy[profile] = [model.utilisation(load) for load in loads]
        found["own"]["node_utilisation"] = busy
    return found


def figures(scenario: Scenario, latency: Latency) -> dict[str, Any]:
    targets = scenario.targets
    return {
        "coverage": {f"{t:g}": latency.coverage(t) for t in targets.coverage_at},
        "quantiles": {f"{z:g}": latency.quantile(z) for z in targets.quantiles},
    }


def areas(scenario: Scenario) -> dict[str, Any]:
    """The gamma law of load areas against planes drawn under the mean-load model's costs."""
    latency = locate(scenario)
    system, costs = latency.system, latency.point.costs
    shapes = cell_shapes(system, costs)
    share = system.probability @ associate(system, costs)
    rng = np.random.default_rng(1)
    drawn: list[list[np.ndarray]] = [[] for _ in system.names]
    for _ in range(PLANES):
        torus = Torus(system.density, SIDE, rng)
        distance, index = torus.nearest(torus.users(USERS, rng))
        load = [np.zeros(len(points)) for points in torus.points]
        for q, p in enumerate(system.probability):
            tier = choose(system.radio, costs[q], distance)
            for s in range(len(load)):
                mine = index[tier == s, s]
                load[s] += p * np.bincount(mine, minlength=len(load[s]))
        for s, got in enumerate(load):
            unit = share[s] / system.density[s] * USERS / SIDE**2
            drawn[s].append(got / unit)
    found = {}
    for s, profile in enumerate(system.names):
        x, law = np.concatenate(drawn[s]), stats.gamma(shapes[s], scale=1.0 / shapes[s])
        # Points fall at random into a cell: a Poisson count of mean m adds 1/m to CV².
        count = share[s] / system.density[s] * USERS / SIDE**2
        found[profile] = {
            "cv2": 1.0 / shapes[s],
            "cv2_drawn": float(x.var(ddof=1)) - 1.0 / count,
            "quantiles": law.ppf(LEVELS).tolist(),
            "quantiles_drawn": np.quantile(x, LEVELS).tolist(),
            "distance": float(stats.kstest(x, law.cdf).statistic),
            "nodes": len(x),
        }
    return found


def simulated(scenario: Scenario, kind: str, seed: int) -> dict[str, Any]:
    routing = scenario.routing.model_dump(mode="json", exclude_none=True)
    spec = {
        "simulation": SPACES.get(kind, TORUS),
        "routing": {**routing, **ROUTING.get(kind, {})},
    }
    requests = round(scenario.demand.intensity * NODES / scenario.nodes.density * DURATION)
    outcome = simulate(scenario.replace(**spec), requests=requests, seed=seed)
    facts = outcome.extra["simulation"]
    busy = facts.get("node_utilisation", {})
    return {
        "coverage": {f"{t:g}": outcome.ttft.coverage[f"{t:g}"] for t in DEADLINES},
        "quantiles": {f"{z:g}": outcome.ttft.quantiles[f"{z:g}"] for z in (0.5, 0.9, 0.99)},
        "node_utilisation": {s: [found[f"{z:g}"] for z in LEVELS] for s, found in busy.items()},
        "overloaded_nodes": facts.get("overloaded_nodes", 0),
    }


def joined(seeds: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over seeds with their 95 % half-widths (Student's t)."""
    t = float(stats.t.ppf(0.975, len(seeds) - 1)) / np.sqrt(len(seeds))

    def over(pick: Callable[[dict[str, Any]], float]) -> list[float]:
        values = np.array([pick(seed) for seed in seeds])
        return [float(values.mean()), t * float(values.std(ddof=1))]

    first = seeds[0]
    return {
        **{
            part: {k: over(lambda seed, p=part, k=k: seed[p][k]) for k in first[part]}
            for part in ("coverage", "quantiles")
        },
        "node_utilisation": {
            s: [over(lambda seed, s=s, i=i: seed["node_utilisation"][s][i])[0] for i in range(4)]
            for s in first["node_utilisation"]
        },
        "overloaded_nodes": over(lambda seed: seed["overloaded_nodes"]),
    }


if __name__ == "__main__":
    main()
