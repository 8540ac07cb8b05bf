"""Journal: every sample of a calibration, one JSON line each, so that a killed job goes on."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import orjson

from testbed.errors import CalibrationError
from testbed.outcome import dump_json


class Journal:
    """Append-only samples by stage; in memory alone without a folder.

    The first line says what is measured (engine, effort, seed, …). A journal of something else
    is refused rather than mixed in.
    """

    FILE = "points.jsonl"

    def __init__(self, folder: str | Path | None, header: dict[str, Any]) -> None:
        self._samples: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self._file: Any = None
        self.resumed = 0
        if folder is None:
            return
        path = Path(folder) / self.FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        header = orjson.loads(dump_json(header))
        kept = self._read(path, header) if path.exists() else 0
        self._file = open(path, "r+b" if kept else "wb", buffering=0)  # noqa: SIM115
        if kept:
            # A line cut short by a kill goes, so that the next one starts on its own.
            self._file.truncate(kept)
            self._file.seek(kept)
        else:
            self._file.write(dump_json(header) + b"\n")

    def _read(self, path: Path, header: dict[str, Any]) -> int:
        """Bytes of whole lines taken over; 0 when the file holds not even a header."""
        data = path.read_bytes()
        end = data.rfind(b"\n") + 1
        for number, line in enumerate(data[:end].splitlines(), 1):
            try:
                entry = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise CalibrationError(f"{path}:{number}: {error.msg}") from None
            if number == 1:
                for key in sorted(set(header) | set(entry)):
                    if entry.get(key) != header.get(key):
                        raise CalibrationError(
                            f"{path}: measured with {key} = {entry.get(key)!r}, not "
                            f"{header.get(key)!r}; use another folder"
                        )
            else:
                self._samples[entry.pop("stage")].append(entry)
                self.resumed += 1
        return end

    def add(self, stage: str, **sample: Any) -> None:
        """Keep a sample; on disk when this returns."""
        self._samples[stage].append(sample)
        if self._file is not None:
            self._file.write(dump_json({"stage": stage, **sample}) + b"\n")

    def samples(self, stage: str) -> list[dict[str, Any]]:
        return self._samples[stage]

    def is_done(self, stage: str) -> bool:
        """Whether a stage was closed with :meth:`done`."""
        return any(s["of"] == stage for s in self._samples["done"])

    def done(self, stage: str) -> None:
        if not self.is_done(stage):
            self.add("done", of=stage)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
