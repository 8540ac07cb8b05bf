"""What one SGLang engine leaves on its machine: processes, sockets, shared memory."""

from __future__ import annotations

import atexit
import ctypes
import gc
import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

PREFIX = "testbed-sglang-"
"""Of folders in the temporary directory; the number of the owner's process follows."""


class Workplace:
    """A folder for an engine's sockets, and the processes that were started there.

    SGLang kills every child of its process when it shuts down, Ray's and other engines' among
    them, and removes no file. This ends what the engine started and nothing else; what an engine
    left whose process was killed, the next one on the machine removes.
    """

    def __init__(self) -> None:
        _sweep()
        self._folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._sockets: list[Any] = []
        atexit.register(self.clear)

    @property
    def failure(self) -> Path:
        """Where the scheduler's process writes why it could not start."""
        return self._folder / "failure"

    @contextmanager
    def founding(self) -> Iterator[None]:
        """What is started inside belongs here; temporary files go to the folder."""
        processes, contexts = multiprocessing.active_children(), _socket_contexts()
        previous, variable = tempfile.tempdir, os.environ.get("TMPDIR")
        tempfile.tempdir = os.environ["TMPDIR"] = str(self._folder)
        try:
            yield
        finally:
            tempfile.tempdir = previous
            if variable is None:
                os.environ.pop("TMPDIR")
            else:
                os.environ["TMPDIR"] = variable
            self._processes = [p for p in multiprocessing.active_children() if p not in processes]
            self._sockets = [c for c in _socket_contexts() if c not in contexts]

    def note_shared_memory(self, path: str) -> None:
        """Have a file outside the folder removed with it."""
        (self._folder / "shared").write_text(path)

    def close_sockets(self) -> None:
        """Close them before they are collected as garbage, which would wait for ever.

        From the thread of the event loop that they belong to.
        """
        sockets, self._sockets = self._sockets, []
        for context in sockets:
            context.destroy(linger=0)

    def clear(self) -> None:
        """Kill the processes and what they started, wait for their end, remove the files."""
        atexit.unregister(self.clear)
        family: list[psutil.Process] = []
        for process in self._processes:
            try:
                parent = psutil.Process(process.pid)
                family += [*parent.children(recursive=True), parent]
            except psutil.NoSuchProcess:
                continue
        for member in family:
            try:
                member.kill()
            except psutil.NoSuchProcess:
                continue
        for process in self._processes:
            process.join()
        self._processes = []
        psutil.wait_procs(family, timeout=30)
        _remove(self._folder)


def let_sigquit_end_this_process() -> None:
    """SGLang ends its process by SIGQUIT when a child died: that must not be ignored.

    It is in whatever a shell without job control started in the background. From the C library,
    because Python sets signals in a main thread alone, and an actor's code runs in another.
    """
    if signal.getsignal(signal.SIGQUIT) == signal.SIG_IGN:
        ctypes.CDLL(None).signal(int(signal.SIGQUIT), ctypes.c_void_p(0))  # SIG_DFL


def _socket_contexts() -> list[Any]:
    import zmq

    # type(): isinstance would wake lazy proxies.
    return [x for x in gc.get_objects() if issubclass(type(x), zmq.Context) and not x.closed]


def _remove(folder: Path) -> None:
    note = folder / "shared"
    shared = note.read_text() if note.exists() else ""
    if shared:
        Path(shared).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _sweep() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*"):
        pid = folder.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            _remove(folder)
