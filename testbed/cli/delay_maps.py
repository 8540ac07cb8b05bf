"""Delay maps: the delays of a scenario's own nodes, simulated once and kept in a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from testbed.cli.common import Json, ScenarioFile, Seed, emit, load_scenario, log, page
from testbed.errors import ScenarioError

if TYPE_CHECKING:
    from rich.console import Console

    from testbed.theory.delay.learned_map_file import LearnedMapFile


def delay_map(
    scenario: ScenarioFile,
    out: Annotated[Path, typer.Option("--out", help="write the map here (JSON)")],
    learned: Annotated[
        bool,
        typer.Option("--learned", help="a surface over load, mix and slots, not a table of a mix"),
    ] = False,
    requests: Annotated[
        int, typer.Option("--requests", min=1000, help="simulated at each load")
    ] = 100_000,
    slots: Annotated[
        str | None, typer.Option("--slots", help="with --learned: least:most sequences at once")
    ] = None,
    cells: Annotated[
        int, typer.Option("--cells", help="with --learned: loads that each profile is fitted on")
    ] = 160,
    held_out: Annotated[
        int, typer.Option("--held-out", min=0, help="with --learned: loads that no fit sees")
    ] = 16,
    profile: Annotated[
        str | None,
        typer.Option("--profile", help="with --learned: this one alone, beside those in --out"),
    ] = None,
    queues: Annotated[
        bool, typer.Option("--queues", help="nodes are queues as simulation.node_model, no engines")
    ] = False,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Simulate a node of every profile and keep the law of its delays (Theory H3).

    A table holds for the mix of requests that the scenario leads to, and is read by --delay-model
    delay_map:FILE; a learned map holds for every mix, and for other slots, and is read by
    --delay-model learned_map:FILE. Nodes are engine models by the scenario's calibration.

    Example: testbed delay-map scenario.yaml --learned --slots 4:16 --out map.json
    """
    from rich.progress import Progress

    from testbed.simulation.delay_maps import delay_map as tabulate
    from testbed.simulation.learned_maps import beside, learned_map
    from testbed.theory.delay.learned_map_file import LearnedMapFile
    from testbed.tier_engine import tier_step_times

    question = load_scenario(scenario)
    step_times = None if queues else tier_step_times(question)
    if step_times is None and not queues:
        raise ScenarioError("engine.calibration: needed for the nodes' step time (or --queues)")
    if learned and queues:
        raise ScenarioError("--learned: simulates engines, not queues")
    if (slots or profile) and not learned:
        raise ScenarioError("--slots, --profile: go with --learned")
    with Progress(console=log(), transient=True) as bar:
        task = bar.add_task("simulated requests", total=None)
        if not learned:
            table = tabulate(
                question,
                requests=requests,
                seed=seed,
                step_time=step_times,
                progress=lambda n: bar.advance(task, n),
            )
            table.save(out)
            mean = {t.profile: t.capacity for t in table.tables}
            document: object = {"out": str(out), "capacity": mean}
            fitted = None
        else:
            assert step_times is not None
            fitted = learned_map(
                question,
                step_times,
                slots=None if slots is None else _range(slots),
                cells=cells,
                held_out=held_out,
                requests=requests,
                seed=seed,
                profile=profile,
                progress=lambda n: bar.advance(task, n),
            )
            if profile is not None and out.exists():
                fitted = beside(LearnedMapFile.load(out), fitted)
            fitted.save(out)
            document = {
                "out": str(out),
                "profiles": [
                    p.model_dump(mode="json", include={"profile", "fit", "held_out"})
                    for p in fitted.profiles
                ],
            }
    log().print(f"delay map: {out}", style="dim")
    if as_json:
        emit(document)
    elif fitted is not None:
        render(page(), fitted)


def _range(text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    try:
        return int(least), int(most)
    except ValueError:
        raise ScenarioError(f"--slots: {text!r} is not least:most") from None


def render(console: Console, fitted: LearnedMapFile) -> None:
    """What the map misses of loads that it has not seen, one line each; types weighted."""
    from rich.table import Table

    from testbed.theory.delay.learned_map_file import FIGURES

    for p in fitted.profiles:
        console.print(
            f"{p.profile}: {p.fit.cells} loads of {p.fit.requests:,} requests, "
            f"{p.least_slots} to {p.most_slots} slots; root mean square of the logit "
            f"{p.fit.misfit:.3f} (noise {p.fit.noise:.3f}), of the capacity "
            f"{100 * p.fit.capacity_misfit:.2f} %"
        )
        table = Table(box=None, pad_edge=False)
        for heading in ("load", "slots", "mix", "capacity", "type", *FIGURES):
            table.add_column(heading)
        for cell in p.held_out:
            for q, name in enumerate(p.types):
                table.add_row(
                    f"{cell.load:.2g}" if q == 0 else "",
                    str(cell.slots) if q == 0 else "",
                    " ".join(f"{w:.2f}" for w in cell.mix) if q == 0 else "",
                    f"{100 * (cell.capacity[1] / cell.capacity[0] - 1):+.2f} %" if q == 0 else "",
                    name,
                    *(cell.shown(q, f) for f in range(len(FIGURES))),
                )
        console.print(table)


COMMANDS: dict[str, Callable[..., None]] = {"delay-map": delay_map}
