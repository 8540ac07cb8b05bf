"""What every command shares: its options, how it loads, how it answers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from testbed.outcome import Outcome
    from testbed.scenario import Scenario

PAGE_WIDTH = 120
"""Columns of a table that is piped or redirected."""

Json = Annotated[bool, typer.Option("--json", help="one JSON document on stdout")]
ScenarioFile = Annotated[
    Path, typer.Argument(metavar="SCENARIO", help="scenario YAML, or a preset's name")
]
TraceFile = Annotated[Path, typer.Argument(metavar="FILE", help="trace, found by content")]
Out = Annotated[Path | None, typer.Option("--out", help="also save the outcome here (JSON)")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="of every random stream")]


def log() -> Console:
    """Everything that is not the answer goes to stderr."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def page() -> Console:
    """Where answers go: stdout, as wide as the terminal, or wide enough for a file or a pipe."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=PAGE_WIDTH, highlight=False)


def emit(document: Any) -> None:
    """One JSON document on stdout."""
    from testbed.outcome import dump_json

    sys.stdout.buffer.write(dump_json(document, indent=True) + b"\n")
    sys.stdout.flush()


def load_scenario(path: Path) -> Scenario:
    """A scenario file, or a named preset where no such file exists."""
    from testbed.presets import preset
    from testbed.scenario import Scenario

    if not path.exists() and path.suffix == "":
        return preset(str(path))
    return Scenario.load(path)


def answer(outcome: Outcome, as_json: bool, out: Path | None = None) -> None:
    """Save and print an outcome; a run in which nothing was measured validly exits with 1."""
    if out is not None:
        outcome.save(out)
    if as_json:
        emit(outcome.model_dump())
        return
    from testbed.reporting.tables import render_outcome

    render_outcome(page(), outcome)
