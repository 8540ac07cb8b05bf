"""Calibration, validation against measured GPU runs, and what can run here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from calibration.command import calibrate
from calibration.fidelity.command import fidelity
from testbed.cli.common import Json, emit, log, page


def validate(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="meta.json, requests.jsonl, profile/")
    ],
    trace: Annotated[
        Path | None, typer.Option("--trace", help="what was replayed; found by hash if absent")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="draw CDFs and time series here (SVG and PNG)")
    ] = None,
    as_json: Json = False,
) -> None:
    """Simulate a measured GPU run from its own operator profile, against its own stamps."""
    from testbed.simulation.validate import render_validation
    from testbed.simulation.validate import validate as ask

    console = log()
    with console.status(f"simulating {directory}"):
        result = ask(directory, trace)
    if plot is not None:
        from testbed.reporting.validate_figures import save_validation_figure

        for path in save_validation_figure(result, plot):
            console.print(f"figure: {path}", style="dim")
    if as_json:
        emit(result.to_dict())
        return
    render_validation(page(), result)


def figures(
    out: Annotated[Path, typer.Option("--out", help="folder for figures, page and values")],
    preset: Annotated[str, typer.Option("--preset", help="named scenario")] = "paper-reproduction",
    seed: Annotated[int, typer.Option("--seed", min=0)] = 1,
    delay_models: Annotated[
        str | None,
        typer.Option(
            "--delay-models",
            help="figures 7 to 12 under each of these instead, as erlang_c,step_chain_mix; an "
            "interrupted run goes on",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """The paper's figures 3 to 12, with the values it reports beside ours."""
    if delay_models is not None:
        _by_delay_model(out, preset, delay_models.split(","), as_json)
        return
    from testbed.reporting.paper_figures import draw_figures

    console = log()
    with console.status("drawing"):
        claims = draw_figures(out, preset, seed=seed)
    console.print(f"page: {out / 'figures.html'}", style="dim")
    if as_json:
        emit(claims)
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in FIGURE_COLUMNS:
        table.add_column(heading, overflow="fold")
    for claim in claims:
        table.add_row(*(_shown(claim[k]) for k in FIGURE_COLUMNS))
    page().print(table)


def _by_delay_model(out: Path, preset: str, models: list[str], as_json: bool) -> None:
    from testbed.reporting.paper_delay_answers import draw_delay_figures

    console = log()
    with console.status("solving and drawing; minutes"):
        answers = draw_delay_figures(out, preset, models=models)
    console.print(f"figures: {out}", style="dim")
    if as_json:
        emit(answers)
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in answers[0]:
        table.add_column("" if heading == "question" else heading, overflow="fold")
    for answer in answers:
        table.add_row(*answer.values())
    page().print(table)


FIGURE_COLUMNS = ("figure", "statement", "reported", "ours", "distance", "reproduced")


def _shown(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def doctor(as_json: Json = False) -> None:
    """What is installed, which engines can run here, and what to do about the rest."""
    from cluster.engines.doctor import engine_status
    from testbed.environment import environment

    found = {"environment": environment(), "engines": engine_status()}
    if as_json:
        emit(found)
        return
    from rich.table import Table

    console = page()
    machine = found["environment"]["machine"]
    console.print(
        f"testbed {found['environment']['testbed']} ({found['environment']['code']}), Python "
        f"{found['environment']['python']}, {machine['cores']} cores, "
        f"{machine['memory_bytes'] / 2**30:.1f} GiB, {machine['processor']}"
    )
    packages = ", ".join(f"{k} {v}" for k, v in found["environment"]["packages"].items())
    console.print(packages, style="dim")
    table = Table(box=None, pad_edge=False)
    for heading in ("engine", "runs", "version", "environment or remedy"):
        table.add_column(heading, overflow="fold")
    for engine in found["engines"]:
        what = engine["python"] if engine["runs"] else f"{engine['problem']}: {engine['remedy']}"
        table.add_row(
            engine["engine"], "yes" if engine["runs"] else "no", engine["version"] or "–", what
        )
    console.print(table)


COMMANDS: dict[str, Callable[..., None]] = {
    "calibrate": calibrate,
    "fidelity": fidelity,
    "validate": validate,
    "figures": figures,
    "doctor": doctor,
}
