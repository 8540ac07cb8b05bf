"""Command: ``testbed calibrate`` and ``python -m calibration``; heavy imports happen inside."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from calibration.job import Job, Progress
    from calibration.record import Calibration

ENGINES = ("vllm", "sglang", "emulated")


def calibrate(
    engine: Annotated[str, typer.Option(help=f"one of {', '.join(ENGINES)}")] = "vllm",
    model: Annotated[str, typer.Option(help="preset or model directory")] = "tiny-llama",
    out: Annotated[
        Path | None, typer.Option("--out", help="record to write; page and plots beside it")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="about a minute (the default)")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="fine grid, and delay under load; up to 20 minutes")
    ] = False,
    check: Annotated[
        Path | None, typer.Option("--check", metavar="FILE", help="does this record still hold?")
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--import",
            metavar="KIND",
            help="llmservingsim, distserve, guidellm, aiperf or vllm-bench; its path follows",
        ),
    ] = None,
    path: Annotated[Path | None, typer.Argument(metavar="[PATH]", help="of --import")] = None,
    scenario: Annotated[
        Path | None,
        typer.Option(help="take engine, profiles and request types from this scenario"),
    ] = None,
    max_prompt: Annotated[
        int | None, typer.Option(min=64, help="longest prompt of the grid, tokens")
    ] = None,
    num_blocks: Annotated[int | None, typer.Option(min=2, help="KV pool, blocks")] = None,
    block_size: Annotated[int | None, typer.Option(min=1, help="tokens per block")] = None,
    token_budget: Annotated[int | None, typer.Option(min=1, help="tokens per step")] = None,
    max_sequences: Annotated[int | None, typer.Option(min=1, help="most running")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=2, help="prompt and output")] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16, float32, auto")] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="step time of the emulated engine")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="device profile: pace of the engine, or GPU of an import")
    ] = None,
    gpus: Annotated[float | None, typer.Option(min=0, help="GPUs per engine, on a cluster")] = None,
    tensor_parallel: Annotated[int | None, typer.Option(min=1, help="of an import")] = None,
    core: Annotated[int | None, typer.Option(min=0, help="CPU core for the engine")] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="of every random stream")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document on stdout")] = False,
) -> None:
    """Measure an engine (or import what others measured): prefill, steps, memory, delay."""
    from testbed.errors import CalibrationError

    if full and quick:
        raise CalibrationError("--quick and --full: one or the other")
    if (source is None) != (path is None):
        raise CalibrationError("--import: needs a kind and a path (--import llmservingsim DIR)")
    if source is not None and path is not None:
        _import(source, path, out, as_json, _if(model, "tiny-llama"), tensor_parallel, device)
        return
    given = {
        "num_blocks": num_blocks,
        "block_size": block_size,
        "token_budget": token_budget,
        "max_sequences": max_sequences,
        "max_model_len": max_model_len,
        "dtype": dtype,
        "calibration": None if calibration is None else str(calibration),
        "device": device,
        "gpus_per_replica": gpus,
    }
    changes = {k: v for k, v in given.items() if v is not None}
    if check is not None:
        _check(check, changes, core, seed, as_json)
        return
    if out is None:
        raise CalibrationError("--out: where shall the record go?")
    job = _job(engine, model, scenario, changes, "full" if full else "quick", seed, max_prompt)
    _measure(job, out, core, as_json)


def _if(value: str, default: str) -> str | None:
    return None if value == default else value


def _job(
    engine: str,
    model: str,
    scenario: Path | None,
    changes: dict[str, Any],
    effort: Any,
    seed: int,
    max_prompt: int | None,
) -> Job:
    from pydantic import ValidationError

    from calibration.job import Job, job_of
    from testbed.errors import CalibrationError
    from testbed.scenario import EngineSpec, Scenario, first_problem

    asked = None if scenario is None else Scenario.load(scenario)
    base: dict[str, Any] = {"name": engine, "model": model}
    if asked is not None and asked.engine is not None:
        base = asked.engine.model_dump()
    try:
        spec = EngineSpec.model_validate({**base, **changes})
    except ValidationError as error:
        raise CalibrationError(f"engine.{first_problem(error)}") from None
    options = {"effort": effort, "seed": seed, "max_prompt": max_prompt}
    return Job(spec=spec, **options) if asked is None else job_of(asked, spec, **options)


def _measure(job: Job, out: Path, core: int | None, as_json: bool) -> None:
    from calibration.job import keep_samples, partial_folder, save_all

    out.parent.mkdir(parents=True, exist_ok=True)
    folder = partial_folder(out)
    if folder.exists():
        _say(f"going on with the samples in {folder}")
    try:
        records = _run(job, folder, core)
    except (KeyboardInterrupt, asyncio.CancelledError):
        _say(f"interrupted; what was measured is in {folder}, and the same command goes on")
        sys.exit(130)
    written = save_all(out, records)
    samples = keep_samples(out)
    for file in [*written, *([samples] if samples else [])]:
        _say(f"wrote {file}")
    if as_json:
        documents = [r.model_dump(mode="json", exclude_none=True) for r in records.values()]
        _emit(documents[0] if len(documents) == 1 else documents)
        return
    for record in records.values():
        render(record)


def _check(file: Path, changes: dict[str, Any], core: int | None, seed: int, as_json: bool) -> None:
    from calibration.job import Job, spec_of
    from calibration.record import Calibration

    record = Calibration.load(file)
    spec = spec_of(record, file.absolute()).model_copy(update=changes)
    answers = _run(Job(spec=spec, seed=seed, record=record), None, core)
    if as_json:
        found = list(answers.values())
        _emit(found[0] if len(found) == 1 else answers)
    else:
        for answer in answers.values():
            render_check(answer)
    if not all(a["holds"] for a in answers.values()):
        sys.exit(1)


def _import(
    kind: str,
    path: Path,
    out: Path | None,
    as_json: bool,
    model: str | None,
    tensor_parallel: int | None,
    device: str | None,
) -> None:
    from calibration.importers import import_calibration

    record = import_calibration(
        kind, path, model=model, tensor_parallel=tensor_parallel, device=device
    )
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        record.save(out)
        _say(f"wrote {out}")
    if as_json:
        _emit(record.model_dump(mode="json", exclude_none=True))
        return
    render(record)


def _run(job: Job, folder: Path | None, core: int | None) -> dict[str, Any]:
    """Here, or on the cluster that RAY_ADDRESS names (inside a submitted job it does).

    An engine that lives in an environment of its own gets a private cluster, whose actors can.
    """
    from calibration.job import on_cluster, run_here, run_on_cluster
    from cluster.deployment import engine_environment

    with _progress() as show:
        if on_cluster() or engine_environment(job.spec):
            from cluster.session import ray_session

            with ray_session() as where:
                _say(f"using {where}")
                return run_on_cluster(job, folder, show, core)
        return {"here": run_here(job, folder, show, core)}


# --- Showing -----------------------------------------------------------------------------------


def render(record: Calibration) -> None:
    """The record's tables on stdout."""
    from testbed.cli.common import page
    from testbed.reporting.calibration_tables import calibration_tables
    from testbed.reporting.tables import show

    console = page()
    for table in calibration_tables(record.model_dump(mode="json", exclude_none=True)):
        show(console, table)
    if record.c_s:
        from calibration.report import concurrency_table

        show(console, concurrency_table(record))
    if record.waiting:
        from calibration.report import load_table, waiting_table

        for name in dict.fromkeys(x.profile for x in record.waiting):
            loads = [x for x in record.waiting if x.profile == name]
            show(console, load_table(loads))
            show(console, waiting_table(loads))


def render_check(answer: dict[str, Any]) -> None:
    """Whether a record holds, why not, and the points measured again."""
    from testbed.cli.common import page
    from testbed.reporting.table import Table, figure
    from testbed.reporting.tables import show
    from testbed.reporting.wording import seconds

    console = page()
    console.print(
        "This record still holds here." if answer["holds"] else "This record does not hold here:"
    )
    for reason in answer["reasons"]:
        console.print(f"  {reason}", markup=False)
    low, high = answer["interval"]
    rows = tuple(
        (
            figure(f"{p['new']:,}"),
            figure(f"{p['cached']:,}"),
            figure(seconds(p["calibrated"])),
            figure(seconds(p["now"])),
            figure(f"{p['relative_time']:.3f}"),
        )
        for p in answer["points"]
    )
    note = f"Relative time {answer['relative_time']:.3f}, 95 %: {low:.3f} to {high:.3f}"
    head = ("new", "cached", "calibrated", "now", "relative time")
    show(console, Table("Unloaded prefill, then and now", head, rows, note=note))


@contextmanager
def _progress() -> Iterator[Progress | None]:
    """A bar a stage with its time left on a terminal, a line a stage elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        last: list[str] = [""]

        def line(stage: str, done: int, total: int) -> None:
            if stage != last[0]:
                last[0] = stage
                console.print(stage, markup=False)

        yield line
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=console, transient=True) as bar:
        tasks: dict[str, Any] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done, total=total)

        yield show


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _emit(document: Any) -> None:
    from testbed.cli.common import emit

    emit(document)


def main() -> None:
    """``python -m calibration``: errors that a person can act on are one line and exit code 2."""
    from testbed.errors import TestbedError

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(calibrate)
    try:
        app(prog_name="python -m calibration")
    except TestbedError as error:
        _say(f"python -m calibration: {error}")
        sys.exit(2)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
