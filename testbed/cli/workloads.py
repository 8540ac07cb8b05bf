"""Traces, the profiles that come out of them, and traces made to order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from testbed.cli.common import Json, Seed, TraceFile, emit, load_scenario, log, page
from testbed.errors import ScenarioError

if TYPE_CHECKING:
    from testbed.workload.trace import Trace

Format = Annotated[
    str | None, typer.Option("--format", help="reader's name, if content does not tell")
]
SkipBad = Annotated[
    bool, typer.Option("--skip-bad", help="count unusable rows in place of refusing the file")
]
Tokenizer = Annotated[
    Path | None,
    typer.Option("--tokenizer", help="of chat text: tokenizer.json or a model directory"),
]
BlockSize = Annotated[
    int | None,
    typer.Option("--block-size", min=1, help="tokens per block of the trace, if not its format's"),
]
Window = Annotated[
    str | None, typer.Option("--window", help="only requests of these seconds: 600:1200")
]


def trace(
    file: TraceFile,
    format: Format = None,
    skip_bad: SkipBad = False,
    tokenizer: Tokenizer = None,
    block_size: BlockSize = None,
    window: Window = None,
    token_scale: Annotated[
        float | None,
        typer.Option("--token-scale", help="also say what keeping this share of tokens does"),
    ] = None,
    engine_block: Annotated[
        int, typer.Option("--engine-block", min=1, help="tokens per KV block, with --token-scale")
    ] = 16,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="folder that gets the figures (SVG and PNG)")
    ] = None,
    forest: Annotated[
        Path | None, typer.Option("--forest", help="CSV of the prefix forest, an edge a line")
    ] = None,
    as_json: Json = False,
) -> None:
    """Statistics of a trace: arrivals, lengths, prefix sharing, hit ratio against cache size."""
    from testbed.workload.statistics import scale_statistics, statistics

    console = log()
    with console.status(f"reading {file}"):
        source = _read(file, format, skip_bad, tokenizer, block_size)
        if window is not None:
            source = source.window(*_window(window))
        found = statistics(source)
        if token_scale is not None:
            scaled = scale_statistics(source, token_scale, engine_block)
            found = found.model_copy(update={"scaled": scaled})
    if plot is not None:
        from testbed.reporting.trace_figures import save_trace_figures

        with _writing(plot):
            drawn = save_trace_figures(source, plot)
        for path in drawn:
            console.print(f"figure: {path}", style="dim")
    if forest is not None:
        from testbed.outcome import write_atomically
        from testbed.workload.forest import PrefixForest, no_prefixes
        from testbed.workload.radix import RadixEdges

        if not len(source.blocks):
            raise no_prefixes(source)
        edges = RadixEdges.of(PrefixForest.of(source))
        with _writing(forest):
            write_atomically(forest, edges.to_csv(source.arrival))
        console.print(f"forest: {forest}, {len(edges):,} edges", style="dim")
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
    types: Annotated[int, typer.Option("--types", min=1, help="request types")] = 4,
    error_bound: Annotated[
        float | None,
        typer.Option(
            "--error-bound", min=0, help="as many types as lose at most these tokens, Σ p|h − ĥ|"
        ),
    ] = None,
    min_support: Annotated[
        int | None,
        typer.Option("--min-support", min=1, help="least requests a prefix must have (privacy)"),
    ] = None,
    support_of: Annotated[
        str, typer.Option("--support-of", help="what it counts: requests, sessions or tenants")
    ] = "requests",
    supports: Annotated[
        str | None,
        typer.Option("--supports", help="what minimum supports would cost: 2,5,10 (privacy)"),
    ] = None,
    format: Format = None,
    skip_bad: SkipBad = False,
    tokenizer: Tokenizer = None,
    block_size: BlockSize = None,
    window: Window = None,
    as_json: Json = False,
) -> None:
    """Candidate cache profiles of a trace: scored, pruned of dominated ones, written on demand."""
    from testbed.outcome import write_atomically
    from testbed.scenario import WorkloadSpec
    from testbed.theory.extensions.privacy import observed_value
    from testbed.workload.profiles import MIN_SUPPORT
    from testbed.workload.proposal import EXAMPLE_PREFILL, parse_bytes, profiles_into, propose

    if out is not None and scenario is None:
        raise ScenarioError("--out: needs --scenario, whose profiles are replaced")
    if out is not None and skip_bad:
        raise ScenarioError("--out: a scenario's trace must have no bad rows; --skip-bad would")
    if support_of not in ("requests", "sessions", "tenants"):
        raise ScenarioError(f"--support-of: {support_of!r} is not requests, sessions or tenants")
    given = None if scenario is None else load_scenario(scenario)
    size = parse_bytes(budget)
    thresholds = [] if supports is None else _thresholds(supports)
    stated = (None if given is None else given.workload) or WorkloadSpec()
    changes: dict[str, Any] = {
        "trace": str(file),
        "format": format or stated.format,
        "block_size": block_size or stated.block_size,
        "tokenizer": str(tokenizer) if tokenizer else stated.tokenizer,
        "window": _window(window) if window else stated.window,
    }
    workload = stated.model_copy(update=changes)
    options: dict[str, Any] = {
        "budget": size,
        "count": count,
        "types": types,
        "error_bound": error_bound,
        "min_support": MIN_SUPPORT if min_support is None else min_support,
        "support_of": support_of,
        "workload": workload,
    }
    measured: dict[str, Any] = {}
    if given is not None:
        measured = {"prefill": given.prefill, "memory": given.memory, "engine": given.engine}
    console = log()
    with console.status(f"reading {file}"):
        source = _read(file, workload.format, skip_bad, workload.tokenizer, workload.block_size)
        proposal = propose(source, **options, **measured)
        prices = []
        if thresholds:
            prefill = measured.get("prefill", EXAMPLE_PREFILL)
            seen = source.window(*workload.window) if workload.window else source
            prices = observed_value(seen, prefill, thresholds).to_dict()
    if out is not None and given is not None:
        written = profiles_into(given, source, **options).scenario
        with _writing(out):
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


def synthesize(
    out: Annotated[Path, typer.Option("--out", help="the trace: .jsonl, .jsonl.gz, .jsonl.zst")],
    knobs: Annotated[
        Path | None, typer.Option("--knobs", help="YAML of the knobs: agents, retrieval, chat, …")
    ] = None,
    requests: Annotated[int | None, typer.Option("--requests", min=1)] = None,
    rate: Annotated[float | None, typer.Option("--rate", help="requests/s")] = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Make a seeded trace of agents, retrieval and chat, in the project's own format."""
    from testbed.workload.readers.own import write_trace
    from testbed.workload.statistics import statistics
    from testbed.workload.synthetic import SyntheticSpec, synthetic_trace

    spec = SyntheticSpec.load(knobs) if knobs is not None else SyntheticSpec()
    given = {"requests": requests, "rate": rate, "seed": seed or None}
    spec = spec.changed({k: v for k, v in given.items() if v is not None})
    made = synthetic_trace(spec)
    with _writing(out):
        write_trace(made, out)
    log().print(f"trace: {out}", style="dim")
    if as_json:
        emit(statistics(made).to_dict())
        return
    from testbed.reporting.trace_tables import render_statistics

    render_statistics(page(), statistics(made))


def _read(
    file: Path,
    format: str | None,
    skip_bad: bool,
    tokenizer: str | Path | None,
    block_size: int | None,
) -> Trace:
    from testbed.workload.trace import read_trace

    return read_trace(
        file, format=format, skip_bad=skip_bad, tokenizer=tokenizer, block_size=block_size
    )


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """One line about a file or folder that cannot be written."""
    try:
        yield
    except OSError as error:
        raise ScenarioError(f"{path}: cannot be written: {error.strerror or error}") from None


def _window(text: str) -> tuple[float, float]:
    try:
        start, stop = (float(part) for part in text.split(":"))
    except ValueError:
        start, stop = 0.0, 0.0
    if not 0 <= start < stop < float("inf"):
        raise ScenarioError(f"--window: {text!r} is not START:STOP in seconds")
    return start, stop


def _thresholds(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ScenarioError(f"--supports: {text!r} is not a list of whole numbers >= 1")
    return found


COMMANDS: dict[str, Callable[..., None]] = {
    "trace": trace,
    "profiles": profiles,
    "synthesize": synthesize,
}
