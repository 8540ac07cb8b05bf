"""Progress: a live line of a replay with its rate, TTFT so far and time left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from cluster.replay import Progress


class ReplayBar:
    """Feeds :class:`cluster.replay.Progress` into a Rich bar."""

    def __init__(self, bar: Bar, title: str) -> None:
        self._bar = bar
        self._task = bar.add_task(title, total=None, rate=0.0, ttft="", left="")

    def __call__(self, state: Progress) -> None:
        ttft = "" if state.ttft_p50 is None else f"TTFT p50 {state.ttft_p50 * 1e3:.0f} ms"
        self._bar.update(
            self._task,
            total=state.total,
            completed=state.ended,
            rate=state.rate,
            ttft=ttft,
            left=f"{state.time_left:.0f} s of arrivals left",
        )


@contextmanager
def replay_progress(console: Console, title: str) -> Iterator[ReplayBar]:
    """A bar on ``console`` (stderr) for the length of one replay."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.1f}/s"),
        TextColumn("{task.fields[ttft]}"),
        TextColumn("{task.fields[left]}"),
    )
    with Bar(*columns, console=console, transient=not console.is_terminal) as bar:
        yield ReplayBar(bar, title)
