"""App: the Typer application put together from its commands."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import typer

from testbed.cli import answers, delay_maps, demo, measure, planning, workloads

COMMANDS: dict[str, Callable[..., None]] = {
    **demo.COMMANDS,
    **workloads.COMMANDS,
    **measure.COMMANDS,
    **answers.COMMANDS,
    **planning.COMMANDS,
    **delay_maps.COMMANDS,
}
"""Name on the command line -> function, in the order of the help page."""


def build(only: Sequence[str] | None = None, name: str = "testbed") -> typer.Typer:
    """The application with all commands, or only those named."""
    app = typer.Typer(
        name=name,
        help="LLM serving at the wireless edge: one scenario, predicted, simulated and run.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=False,
    )
    app.callback()(_root)
    for command, function in COMMANDS.items():
        if only is None or command in only:
            app.command(command)(function)
    return app


def _root() -> None:
    """LLM serving at the wireless edge: one scenario, predicted, simulated and run."""
