"""Command: ``testbed fidelity``; heavy imports happen inside."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer


def fidelity(
    out: Annotated[
        list[Path],
        typer.Option("--out", help="folder of the bench; what it holds is gone on with"),
    ],
    engine: Annotated[str, typer.Option("--engine", help="vllm, sglang or emulated")] = "vllm",
    device: Annotated[
        str | None, typer.Option("--device", help="device-time profile: the quiet ground")
    ] = None,
    model: Annotated[
        str, typer.Option("--model", help="preset, directory or hub name")
    ] = "tiny-llama",
    quick: Annotated[bool, typer.Option("--quick", help="A, B, C, 25 s a cell (default)")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="also policies and types fitted to --trace, 120 s")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="what 'trace' and 'deep' are fitted to")
    ] = None,
    workloads: Annotated[
        str | None, typer.Option("--workloads", help="of A,B,C,trace,deep,policies")
    ] = None,
    loads: Annotated[
        str | None, typer.Option("--loads", help="shares of capacity; default 0.3,0.6,0.8,0.9")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option("--seconds", min=1, help="wall-clock seconds of a cell")
    ] = None,
    time_scale: Annotated[
        float, typer.Option("--time-scale", min=0.01, help="wall seconds per device second")
    ] = 1.0,
    gpus: Annotated[float, typer.Option("--gpus", min=0, help="GPUs of the engine")] = 0.0,
    minutes: Annotated[
        float | None, typer.Option("--minutes", min=0.1, help="stop after the cells that fit")
    ] = None,
    predict_only: Annotated[
        bool, typer.Option("--predict-only", help="write the predictions, start no engine")
    ] = False,
    table: Annotated[
        bool,
        typer.Option("--table", help="print Markdown of what --out (several may be given) holds"),
    ] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="of every random stream")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document on stdout")] = False,
) -> None:
    """How far every delay model and the simulator are from a running engine, noise beside it."""
    from rich.console import Console
    from rich.progress import Progress

    from calibration.fidelity.bench import FidelityBench
    from calibration.fidelity.plan import LOADS, make_plan
    from calibration.fidelity.report import publish, read_benches
    from calibration.fidelity.verdict import markdown
    from testbed.errors import CalibrationError

    if table:
        for name, cells in read_benches(out):
            print(f"### {name[0].upper()}{name[1:]}\n\n{markdown(cells)}")
        return
    if len(out) > 1:
        raise CalibrationError("--out: one folder, except with --table")
    if quick and full:
        raise CalibrationError("--quick and --full: one or the other")
    deadline = None if minutes is None else time.monotonic() + 60.0 * minutes
    console = Console(stderr=True, highlight=False)
    plan = make_plan(
        engine=engine,
        device=device,
        model=model,
        trace=trace,
        effort="full" if full else "quick",
        workloads=tuple(_split(workloads)),
        loads=tuple(_number(x) for x in _split(loads)) or LOADS,
        seconds=seconds,
        time_scale=time_scale,
        gpus=gpus,
        seed=seed,
    )
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("fidelity", total=None)
        bench = FidelityBench(
            plan,
            out[0],
            say=lambda line: bar.console.print(line, style="dim"),
            progress=lambda stage, done, total: bar.update(
                task, description=stage, completed=done, total=total or None
            ),
        )
        if predict_only:
            if plan.step_time is None:
                raise CalibrationError("--predict-only: this engine must be calibrated first")
            if not bench.predict_all(deadline):
                bar.console.print("not all are predicted: the same command goes on with them")
        else:
            from cluster.session import ray_session

            with ray_session():
                complete = bench.run(deadline)
            if not complete:
                bar.console.print("not all cells are done: the same command goes on with them")
    results = publish(bench.folder)
    if as_json:
        import sys

        from testbed.outcome import dump_json

        sys.stdout.buffer.write(dump_json(results, indent=True) + b"\n")
        return
    from calibration.fidelity.report import error_table, summary_table
    from testbed.reporting.table import to_rich

    page = Console(highlight=False)
    page = page if page.is_terminal else Console(width=140, highlight=False)
    if results["cells"]:
        page.print(to_rich(error_table(results["cells"])))
        page.print(to_rich(summary_table(results["summary"])))
        page.print(f"report: {out[0] / 'report.html'}")


def _split(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _number(text: str) -> float:
    from testbed.errors import CalibrationError

    try:
        return float(text)
    except ValueError:
        raise CalibrationError(f"--loads: {text!r} is not a number") from None
