"""Pieces: values computed one after another and kept on disk; an interrupted run goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson

from testbed.compiled import source_hash
from testbed.outcome import dump_json, write_atomically
from testbed.scenario import Scenario, scenario_hash


class Pieces:
    """Plain values by name, in a file that is written after each.

    Values of another scenario, or of other sources, are not used.

    >>> from testbed.presets import preset
    >>> pieces = Pieces(None, preset("paper-baseline"))
    >>> pieces.get(("a", "b"), lambda: 1), pieces.get(("a", "b"), lambda: 2)
    (1, 1)
    """

    def __init__(self, path: Path | None, scenario: Scenario) -> None:
        self._path = path
        self._of = {"scenario": scenario_hash(scenario), "code": source_hash()}
        self._values: dict[str, Any] = {}
        if path is not None and path.exists():
            before = orjson.loads(path.read_bytes())
            if before["of"] == self._of:
                self._values = before["values"]

    def get(self, name: Sequence[str], compute: Callable[[], Any]) -> Any:
        """The value of that name, computed where it is not there yet."""
        key = "/".join(name)
        if key not in self._values:
            self._values[key] = compute()
            if self._path is not None:
                record = {"of": self._of, "values": self._values}
                write_atomically(self._path, dump_json(record))
        return self._values[key]
