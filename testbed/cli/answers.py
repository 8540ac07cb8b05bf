"""The three answers to a scenario, and laying them side by side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from testbed.cli.common import Json, Out, ScenarioFile, Seed, answer, emit, load_scenario, log, page
from testbed.errors import ScenarioError

if TYPE_CHECKING:
    from testbed.scenario import Scenario


def predict(
    scenario: ScenarioFile,
    delay_model: Annotated[
        str | None,
        typer.Option("--delay-model", help="instead of the scenario's; all: every one beside it"),
    ] = None,
    extension: Annotated[
        str | None,
        typer.Option(
            "--extension",
            help="replace a part: bandwidth (shared radio), cell_load (each node's own cell), "
            "shared_blocks (KV blocks counted once)",
        ),
    ] = None,
    sweep: Annotated[
        str | None, typer.Option("--sweep", help="FIELD=from:to:count, any numeric field")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="draw the sweep here (SVG and PNG)")
    ] = None,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Answer a scenario with the analytical model.

    Example: testbed predict paper-baseline --sweep demand.intensity=1:6:11
    """
    from testbed.theory import predict as ask

    question = load_scenario(scenario)
    if sweep is None:
        if plot is not None:
            raise ScenarioError("--plot: draws a sweep; give one with --sweep")
        if delay_model == "all":
            _every_model(question, extension, as_json)
        else:
            answer(ask(question, delay_model=delay_model, extension=extension), as_json, out)
        return
    from testbed.cli.sweeps import show_sweep

    show_sweep(
        question, sweep, delay_model=delay_model, extension=extension, as_json=as_json, plot=plot
    )


def _every_model(question: Scenario, extension: str | None, as_json: bool) -> None:
    """All delay models side by side; those that cannot apply with the reason."""
    from testbed.theory.predict_all import predict_all

    outcomes, left_out = predict_all(question, extension=extension)
    if as_json:
        emit({"outcomes": [o.model_dump() for o in outcomes], "left_out": left_out})
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    quantiles = list(outcomes[0].ttft.quantiles)
    deadlines = list(outcomes[0].ttft.coverage)
    for heading in (
        "delay model",
        "feasible",
        "mean, s",
        *(f"p{100 * float(z):g}, s" for z in quantiles),
        *(f"P(≤ {t} s)" for t in deadlines),
    ):
        table.add_column(heading)
    for o in outcomes:
        table.add_row(
            o.delay_model,
            "yes" if o.feasible else "no",
            f"{o.ttft.mean:.4g}",
            *(f"{o.ttft.quantiles[z]:.4g}" for z in quantiles),
            *(f"{o.ttft.coverage[t]:.4f}" for t in deadlines),
        )
    console = page()
    console.print(table)
    for name, reason in left_out.items():
        console.print(f"{name}: {reason}", style="dim")


def simulate(
    scenario: ScenarioFile,
    requests: Annotated[int, typer.Option("--requests", min=1, help="measured requests")] = 100_000,
    seed: Seed = 0,
    replications: Annotated[
        int, typer.Option("--replications", min=1, help="independent runs, a process each")
    ] = 1,
    space: Annotated[str | None, typer.Option("--space", help="palm or torus")] = None,
    node_model: Annotated[
        str | None,
        typer.Option("--node-model", help="engine (its step loop), exponential, measured, …"),
    ] = None,
    ray: Annotated[
        bool, typer.Option("--ray", help="replications as Ray tasks, not processes")
    ] = False,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Answer a scenario by discrete events in virtual time.

    Example: testbed simulate scenario.yaml --node-model engine --requests 20000
    """
    from contextlib import ExitStack

    from rich.progress import Progress

    from testbed.simulation import simulate as ask

    question = load_scenario(scenario)
    if space not in (None, "palm", "torus"):
        raise ScenarioError(f"--space: {space!r} is neither palm nor torus")
    if node_model is not None:
        question = question.with_field("simulation.node_model", node_model)
    with ExitStack() as stack:
        executor = None
        if ray:
            from cluster.executor import RayExecutor
            from cluster.session import ray_session

            stack.enter_context(ray_session())
            executor = stack.enter_context(RayExecutor())
        bar = stack.enter_context(Progress(console=log(), transient=True))
        task = bar.add_task("simulating", total=requests * replications)
        outcome = ask(
            question,
            requests=requests,
            seed=seed,
            replications=replications,
            space=space,  # type: ignore[arg-type]
            executor=executor,
            progress=lambda n: bar.advance(task, n),
        )
    answer(outcome, as_json, out)


def run(
    scenario: ScenarioFile,
    requests: Annotated[int, typer.Option("--requests", min=1)] = 500,
    seed: Seed = 0,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="folder for scenario, records, step logs and outcome"),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on with the records in --out")
    ] = False,
    time_scale: Annotated[
        float | None,
        typer.Option("--time-scale", help="device time: wall seconds per device second"),
    ] = None,
    bind: Annotated[
        str, typer.Option("--bind", help="address that replicas listen on")
    ] = "127.0.0.1",
    metrics_port: Annotated[
        int | None, typer.Option("--metrics-port", min=1, max=65535, help="on loopback")
    ] = None,
    as_json: Json = False,
) -> None:
    """Answer a scenario on real engines: Ray replicas, pinned profiles, open-loop replay."""
    from cluster.experiment import run_scenario
    from cluster.progress import replay_progress

    question = load_scenario(scenario)
    if resume and out is None:
        raise ScenarioError("--resume: needs --out")
    if time_scale is not None:
        engine = question.engine
        if engine is None or (engine.device is None and engine.name != "emulated"):
            raise ScenarioError("--time-scale: only a device's time can be scaled (engine.device)")
        question = question.with_field("engine.time_scale", time_scale)
    console = log()
    with replay_progress(console, question.name) as bar:
        outcome = run_scenario(
            question,
            requests=requests,
            seed=seed,
            out=out,
            resume=resume,
            bind=bind,
            metrics_port=metrics_port,
            say=lambda line: console.print(line, style="dim"),
            progress=bar,
        )
    answer(outcome, as_json)
    if not outcome.valid:
        console.print(f"invalid: {outcome.invalid_reason}", style="red")


def compare(
    outcomes: Annotated[list[Path], typer.Argument(metavar="OUTCOME...", help="JSON files")],
    report: Annotated[
        Path | None, typer.Option("--report", help="write a self-contained HTML page here")
    ] = None,
    as_json: Json = False,
) -> None:
    """Lay outcomes side by side: predicted, simulated, measured, with their intervals."""
    from testbed.errors import OutcomeError
    from testbed.outcome import Outcome
    from testbed.reporting.compare import compare as lay

    if len(outcomes) < 2:
        raise OutcomeError("compare: two outcomes or more")
    comparison = lay([Outcome.load(path) for path in outcomes])
    if report is not None:
        from testbed.reporting.report import write_report

        write_report(report, comparison, title="Comparison")
        log().print(f"report: {report}")
    if as_json:
        emit(comparison.to_dict())
        return
    from testbed.reporting.tables import render_comparison

    render_comparison(page(), comparison)


COMMANDS: dict[str, Callable[..., None]] = {
    "predict": predict,
    "simulate": simulate,
    "run": run,
    "compare": compare,
}
