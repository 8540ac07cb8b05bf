"""Placement search by a learned map, beside the models that it stands for.

Run: ``python tests/bench/bench_learned_map.py SCENARIO --learned map.json [--table table.json]
[--models learned_map,delay_map,step_chain_mix] [--parts 10] [--evaluations 2000] [--json FILE]
[--plot FILE]``

Every model is asked for the coverage of every placement on the same grid: its best placement, what
the learned map says of that placement (how much coverage is lost by believing the other model),
CPU seconds for the grid, and evaluations a second, the first pass with everything that the model
keeps still to be made, the second with it made. Then the searches themselves, along the slope and
by SPSA, with the learned map, and what a mean with and without its gradient costs. ``delay_map``
reads a table, by default one made here of the learned map's own nodes (their slots alone are short)
at the mixes that the learned map leads to at the scenario's placement; a table of ``testbed
delay-map SCENARIO`` is of nodes whose slots follow from the engine's pool instead. ``--plot``
draws the map's held-out errors beside the noise of what they are held against (SVG and PNG).
"""

from __future__ import annotations

import argparse
import atexit
import shutil
import time
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from testbed.outcome import dump_json, write_atomically
from testbed.reporting.style import INK, MARKERS, PALETTE, panels, save, styled
from testbed.scenario import Scenario
from testbed.simulation.delay_maps import LOADS
from testbed.simulation.learned_map_node import Node
from testbed.theory.constraints import PlacementSet
from testbed.theory.delay.base import TierLoad
from testbed.theory.delay.delay_map import DelayMapFile, DelayTable
from testbed.theory.delay.learned_map import LearnedMap
from testbed.theory.delay.learned_map_file import FIGURES, LearnedMapFile
from testbed.theory.placement import Objective, objective, plan_placement, simplex_grid
from testbed.theory.predict import locate
from testbed.theory.system import System
from testbed.tier_engine import tier_step_times


def coverages(value: Objective, places: list[np.ndarray]) -> tuple[np.ndarray, float]:
    """Coverage of every placement (negative: none, or beyond the model), and CPU seconds."""
    began = time.process_time()
    return np.array([value(place) for place in places]), time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scenario", type=Path)
    parser.add_argument("--learned", required=True)
    parser.add_argument("--table")
    parser.add_argument("--models", default="learned_map,delay_map,step_chain_mix")
    parser.add_argument("--parts", type=int, default=10)
    parser.add_argument("--evaluations", type=int, default=2000)
    parser.add_argument("--requests", type=int, default=100_000, help="a load of the made table")
    parser.add_argument("--seed", type=int, default=0, help="of the made table")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    if given.plot is not None:
        save(held_out(LearnedMapFile.load(given.learned)), given.plot)
    scenario = Scenario.load(given.scenario)
    allowed = PlacementSet.of(scenario)
    places = [p for p in simplex_grid(len(scenario.profiles), given.parts) if allowed.contains(p)]
    labels = {"learned_map": f"learned_map:{given.learned}"}
    if "delay_map" in given.models.split(","):
        labels["delay_map"] = f"delay_map:{given.table or tabulated(scenario, given)}"
    target = scenario.targets.coverage_at[-1]
    names = [s.name for s in scenario.profiles]
    print(f"{len(places)} placements of {', '.join(names)}; coverage at {target:g} s")

    # One evaluation compiles what is compiled.
    objective(scenario, delay_model="erlang_c")(places[len(places) // 2])
    judge = objective(scenario, delay_model=labels["learned_map"])
    told, _ = coverages(judge, places)
    best = float(told.max())
    rows: list[dict[str, Any]] = []
    for name in given.models.split(","):
        value = objective(scenario, delay_model=labels.get(name, name))
        found, first = coverages(value, places)
        again, second = coverages(value, places)
        at = int(found.argmax())
        both = (found >= 0) & (told >= 0)
        if not both.any():
            raise SystemExit(f"{name}: no placement that it and the learned map both answer")
        apart = found[both] - told[both]
        rows.append(
            {
                "model": name,
                "best": dict(zip(names, places[at].tolist(), strict=True)),
                "coverage": float(found[at]),
                "lost_by_learned_map": best - float(told[at]) if told[at] >= 0 else None,
                "without_answer": int((found < 0).sum()),
                "mean_apart": float(np.abs(apart).mean()),
                "most_apart": float(np.abs(apart).max()),
                "per_second_first": len(places) / first,
                "per_second_again": len(places) / second,
                "repeats": float(np.abs(again - found).max()),
            }
        )
        r = rows[-1]
        judged = "nothing" if told[at] < 0 else f"{told[at]:.4f}"
        print(
            f"{name:15s} best {'/'.join(f'{x:.2f}' for x in places[at])} coverage "
            f"{r['coverage']:.4f}, by the learned map {judged} of "
            f"{best:.4f}; apart from it {r['mean_apart']:.4f} mean, {r['most_apart']:.4f} most; "
            f"{r['without_answer']} without an answer; {r['per_second_first']:.3g} evaluations/s, "
            f"then {r['per_second_again']:.3g}",
            flush=True,
        )

    searches = []
    for method in ("gradient", "spsa"):
        began = time.process_time()
        plan = plan_placement(
            scenario,
            allowed,
            delay_model=labels["learned_map"],
            method=method,
            evaluations=given.evaluations,
        )
        seconds = time.process_time() - began
        searches.append({**plan.to_dict(), "cpu_seconds": seconds})
        print(
            f"{method}: {'/'.join(f'{x:.4f}' for x in plan.fraction.values())} coverage "
            f"{plan.coverage:.4f}; {plan.evaluations} evaluations ({plan.refused} beyond the map) "
            f"in {seconds:.1f} s, {plan.evaluations / seconds:.3g} a second",
            flush=True,
        )
    latency = locate(scenario, delay_model=labels["learned_map"])
    assert isinstance(latency.model, LearnedMap)
    costs = means(latency.model, latency.point.loads[0])
    print(f"one mean {1e6 * costs[0]:.0f} us, with its gradient {1e6 * costs[1]:.0f} us")
    if given.json is not None:
        document = {
            "placements": len(places),
            "target": target,
            "models": rows,
            "searches": searches,
            "mean_seconds": costs[0],
            "gradient_seconds": costs[1],
        }
        write_atomically(given.json, dump_json(document, indent=True))


def tabulated(scenario: Scenario, given: argparse.Namespace) -> str:
    """Where the made table lies until the process ends."""
    folder = mkdtemp()
    atexit.register(shutil.rmtree, folder)
    path = str(Path(folder) / "table.json")
    table(scenario, f"learned_map:{given.learned}", given.requests, given.seed).save(path)
    return path


def table(scenario: Scenario, learned: str, requests: int, seed: int) -> DelayMapFile:
    """Laws of every profile's node at the mix that the learned map leads to."""
    step_times = tier_step_times(scenario)
    if step_times is None:
        raise SystemExit("engine.calibration: needed for the nodes' step time")
    system = System.from_scenario(scenario, step_times)
    loads = locate(scenario, delay_model=learned).point.loads
    tables = []
    for s, name in enumerate(system.names):
        node = Node.of(scenario, system, s, seed)
        slots, mix = loads[s].concurrency, np.asarray(loads[s].weights, dtype=float)
        # One name for all loads: the same requests, and so the same capacity.
        laws = [node.simulate("table", mix, slots, share, requests) for share in LOADS]
        made = DelayTable.from_samples(
            name,
            dict(zip(system.types, map(float, mix), strict=True)),
            slots,
            laws[0].capacity,
            {law.rate: dict(zip(system.types, law.delays, strict=True)) for law in laws},
            source=f"engine model, slots alone short; {requests} requests a load, seed {seed}",
        )
        tables.append(made.model_copy(update={"cdf": ordered(np.array(made.cdf))}))
    return DelayMapFile(tables=tuple(tables))


def ordered(cdf: np.ndarray) -> tuple[tuple[tuple[float, ...], ...], ...]:
    """CDFs (rates, types, seconds) that fall with the rate: the lowest of those at lesser ones."""
    falling = np.minimum.accumulate(cdf, axis=0)
    return tuple(tuple(tuple(map(float, row)) for row in at_rate) for at_rate in falling)


@styled
def held_out(map_: LearnedMapFile) -> Figure:
    """Errors of every held-out load, a panel for each figure and profile, ± 2 standard errors."""
    shown = ("mean", "p99")
    figure, axes = panels(len(shown), len(map_.profiles), sharex=True, sharey="row")
    for row, name in zip(axes, shown, strict=True):
        at = FIGURES.index(name)
        for axis, profile in zip(row, map_.profiles, strict=True):
            axis.axhline(0.0, color=INK, linewidth=0.7)
            for q, kind in enumerate(profile.types):
                cells = [c for c in profile.held_out if c.predicted and c.simulated[q][at] > 0]
                order = np.argsort([c.load for c in cells], kind="stable")
                load = np.array([cells[i].load for i in order])
                # Cells of one load stand beside one another.
                place = load + 0.006 * (np.arange(len(load)) - np.searchsorted(load, load - 0.01))
                truth = np.array([cells[i].simulated[q][at] for i in order])
                told = np.array([(cells[i].predicted or ())[q][at] for i in order])
                noise = np.array([cells[i].standard_errors[q][at] for i in order])
                axis.errorbar(
                    place + 0.003 * q,
                    100 * (told / truth - 1.0),
                    yerr=200 * noise / truth,
                    fmt=MARKERS[q],
                    color=PALETTE[q],
                    linewidth=0.8,
                    label=kind,
                )
            axis.set_title(f"{profile.profile}: {name}")
        row[0].set_ylabel("error of the map, %")
    for axis in axes[-1]:
        axis.set_xlabel("share of the capacity")
    axes[0][0].legend()
    return figure


def means(model: LearnedMap, load: TierLoad) -> tuple[float, float]:
    """CPU seconds of one mean, and of one with its gradient."""
    costs = []
    for ask in (model.mean, model.gradient):
        began = time.process_time()
        for part in np.linspace(0.9, 1.0, 500):
            ask(load.scaled(part))
        costs.append((time.process_time() - began) / 500)
    return costs[0], costs[1]


if __name__ == "__main__":
    main()
