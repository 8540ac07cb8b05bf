"""Traces, and the profiles that come out of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from testbed.cli.common import Json, TraceFile, emit, load_scenario, log, page
from testbed.errors import ScenarioError

Format = Annotated[
    str | None, typer.Option("--format", help="reader's name, if content does not tell")
]
SkipBad = Annotated[
    bool, typer.Option("--skip-bad", help="count unusable rows in place of refusing the file")
]


def trace(
    file: TraceFile,
    format: Format = None,
    skip_bad: SkipBad = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="folder that gets the figures (SVG and PNG)")
    ] = None,
    as_json: Json = False,
) -> None:
    """Statistics of a trace: arrivals, lengths, prefix sharing, hit ratio against cache size."""
    from testbed.workload.statistics import statistics
    from testbed.workload.trace import read_trace

    console = log()
    with console.status(f"reading {file}"):
        source = read_trace(file, format=format, skip_bad=skip_bad)
        found = statistics(source)
    if plot is not None:
        from testbed.reporting.trace_figures import save_trace_figures

        for path in save_trace_figures(source, plot):
            console.print(f"figure: {path}", style="dim")
    if as_json:
        emit(found.to_dict())
        return
    from testbed.reporting.trace_tables import render_statistics

    render_statistics(page(), found)


def profiles(
    file: TraceFile,
    budget: Annotated[str, typer.Option("--budget", help="bytes a profile may pin: 8GB, 512MiB")],
    count: Annotated[
        int, typer.Option("--count", min=1, help="profiles, the fallback included")
    ] = 6,
    scenario: Annotated[
        Path | None,
        typer.Option("--scenario", help="prefill, memory and engine from this scenario"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="write --scenario with these profiles here")
    ] = None,
    types: Annotated[
        int, typer.Option("--types", min=1, help="request types written with --out")
    ] = 4,
    min_support: Annotated[
        int | None,
        typer.Option("--min-support", min=1, help="least requests a prefix must have (privacy)"),
    ] = None,
    supports: Annotated[
        str | None,
        typer.Option("--supports", help="what minimum supports would cost: 2,5,10 (privacy)"),
    ] = None,
    format: Format = None,
    skip_bad: SkipBad = False,
    as_json: Json = False,
) -> None:
    """Candidate cache profiles of a trace: scored, pruned of dominated ones, written on demand."""
    from testbed.outcome import write_atomically
    from testbed.theory.extensions.privacy import observed_value
    from testbed.workload.profiles import MIN_SUPPORT
    from testbed.workload.proposal import EXAMPLE_PREFILL, parse_bytes, profiles_into, propose
    from testbed.workload.trace import read_trace

    if out is not None and scenario is None:
        raise ScenarioError("--out: needs --scenario, whose profiles are replaced")
    given = None if scenario is None else load_scenario(scenario)
    size = parse_bytes(budget)
    thresholds = [] if supports is None else _thresholds(supports)
    support = MIN_SUPPORT if min_support is None else min_support
    console = log()
    with console.status(f"reading {file}"):
        source = read_trace(file, format=format, skip_bad=skip_bad)
        measured: dict[str, Any] = {}
        if given is not None:
            measured = {
                "prefill": given.prefill,
                "memory": given.memory,
                "engine": given.engine,
                "workload": given.workload,
            }
        proposal = propose(source, budget=size, count=count, min_support=support, **measured)
        prices = []
        if thresholds:
            prefill = measured.get("prefill", EXAMPLE_PREFILL)
            prices = observed_value(source, prefill, thresholds).to_dict()
    if out is not None and given is not None:
        from testbed.scenario import WorkloadSpec

        workload = (given.workload or WorkloadSpec()).model_copy(update={"trace": str(file)})
        written = profiles_into(
            given,
            source,
            budget=size,
            count=count,
            types=types,
            min_support=support,
            workload=workload,
        )
        write_atomically(out, written.to_yaml())
        console.print(f"scenario: {out}", style="dim")
    if as_json:
        emit({**proposal.to_dict(), **({"supports": prices} if prices else {})})
        return
    from testbed.reporting.trace_tables import render_profiles

    console = page()
    render_profiles(console, proposal, assumed=given is None)
    for row in prices:
        console.print(
            f"advertised only with {row['support']} requests or more: {row['advertised']:.0f} "
            f"prefixes, {100 * row['loss']:.1f} % of the possible saving is lost"
        )


def _thresholds(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ScenarioError(f"--supports: {text!r} is not a list of whole numbers >= 1")
    return found


COMMANDS: dict[str, Callable[..., None]] = {"trace": trace, "profiles": profiles}
