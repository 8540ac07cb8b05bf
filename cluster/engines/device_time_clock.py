"""DeviceClock: when the steps of an absent device begin and end, and how late the host was.

A device works through its steps one after another. While the engine has work, a step begins where
the one before it ended, however late the host handed it over: lateness is counted and never
shifts what follows. After idleness a step begins when the scheduler was asked for it. Seconds of
the device are stretched by the time scale into seconds of the wall clock.

Nothing here knows an engine; scheduler and worker of one engine process share one clock.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

LATE = 0.05
"""A step is late when its result is handed over later than this share of the step after its end."""
LATE_LIMIT = 0.01
"""Share of late steps past which an outcome is marked invalid."""
SPIN = 1.5e-4
"""s at the end of a step that are spun, not slept: the kernel wakes nobody more precisely."""
SWITCH_INTERVAL = 1e-4
"""s after which a thread of the engine gives way to the one that ends a step."""
ENGINE_NICENESS, OWNER_NICENESS, DRIVER_NICENESS = -15, -5, -10
"""Asked for the process that keeps the time, where it may not run in real time, for the one that
owns it, and for the one that sends requests: late there, they would arrive late everywhere."""
PR_SET_TIMERSLACK = 29
_LAYOUT = struct.Struct("<5d")


@dataclass(frozen=True)
class Pace:
    """How well the host kept the device's time. Seconds are the device's.

    ``late_seconds`` sums how late results were handed over; ``worst_late`` is the most of one.
    """

    steps: int = 0
    late_steps: int = 0
    device_seconds: float = 0.0
    late_seconds: float = 0.0
    worst_late: float = 0.0

    @property
    def late_share(self) -> float:
        return self.late_steps / self.steps if self.steps else 0.0


class Ledger:
    """Counters in a small mapped file: written by the engine's process, read by its owner's."""

    def __init__(self, path: str) -> None:
        self.path = path
        handle = os.open(path, os.O_RDWR)
        try:
            self._map = mmap.mmap(handle, _LAYOUT.size)
        finally:
            os.close(handle)

    @classmethod
    def create(cls) -> Ledger:
        """A new one, all zero, in the folder for temporary files."""
        handle, path = tempfile.mkstemp(prefix="testbed-device-time-")
        try:
            os.ftruncate(handle, _LAYOUT.size)
        finally:
            os.close(handle)
        return cls(path)

    def unlink(self) -> None:
        """Take its name away once both ends hold it, so that nothing is left behind."""
        with suppress(FileNotFoundError):
            os.unlink(self.path)

    def write(self, pace: Pace) -> None:
        _LAYOUT.pack_into(
            self._map,
            0,
            float(pace.steps),
            float(pace.late_steps),
            pace.device_seconds,
            pace.late_seconds,
            pace.worst_late,
        )

    def read(self) -> Pace:
        steps, late, device, behind, worst = _LAYOUT.unpack_from(self._map, 0)
        return Pace(int(steps), int(late), device, behind, worst)

    def restart(self) -> None:
        """Count from zero. Call while no step is under way."""
        self.write(Pace())

    def close(self) -> None:
        self._map.close()


@dataclass(frozen=True)
class Step:
    """One step: its bounds on the wall clock and its length in device seconds."""

    start: float
    end: float
    seconds: float


class DeviceClock:
    """The clock of one device.

    Parameters
    ----------
    scale : wall seconds per device second
    ledger : where counters go
    now, sleep : the host's clock and its way to wait (others in tests)

    Examples
    --------
    >>> clock = DeviceClock(2.0, now=lambda: 10.0)
    >>> clock.ask()
    >>> clock.submit(0.5)
    Step(start=10.0, end=11.0, seconds=0.5)
    """

    def __init__(
        self,
        scale: float,
        ledger: Ledger | None = None,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.scale = scale
        self._ledger = ledger
        self._now = now
        self._sleep = sleep
        self._free = -float("inf")
        self._asked = 0.0
        self._busy = False
        self._under_way = 0

    def ask(self) -> None:
        """The scheduler begins to put a step together."""
        self._asked = self._now()

    def submit(self, seconds: float) -> Step:
        """The device gets a step of so many of its seconds."""
        start = self._free if self._busy else max(self._asked, self._free)
        step = Step(start, start + seconds * self.scale, seconds)
        self._free = step.end
        self._busy = True
        self._under_way += 1
        return step

    def nothing_to_do(self) -> None:
        """The scheduler found nothing that can run: unless a step is under way, time passes."""
        if self._under_way == 0:
            self._busy = False

    def rest(self, unfinished: bool) -> None:
        """The outputs of a step were taken in; without unfinished requests the device idles."""
        self._busy = unfinished or self._under_way > 0

    def finish(self, step: Step) -> None:
        """Wait until a step ends, and note how late that was noticed."""
        self._wait(step.end)
        self._under_way -= 1
        late = max(0.0, self._now() - step.end) / self.scale
        if self._ledger is None:
            return
        pace = self._ledger.read()
        self._ledger.write(
            Pace(
                steps=pace.steps + 1,
                late_steps=pace.late_steps + (late > LATE * step.seconds),
                device_seconds=pace.device_seconds + step.seconds,
                late_seconds=pace.late_seconds + late,
                worst_late=max(pace.worst_late, late),
            )
        )

    def _wait(self, end: float) -> None:
        while (left := end - self._now()) > SPIN:
            self._sleep(left - SPIN)
        while self._now() < end:
            pass


def prepare_engine() -> dict[str, Any]:
    """Ask for punctual waking of the process that keeps the time; says what was granted.

    All its threads are preferred: one that held Python's lock at a lower priority would hold up
    the one that ends a step. They work a millisecond or two a step, so that real-time priority
    costs others little. It needs a right that a user may not have; without it lateness grows and
    is counted.
    """
    sys.setswitchinterval(SWITCH_INTERVAL)
    granted: dict[str, Any] = {"scheduling": "normal", "timer_slack": False}
    if sys.platform != "linux":
        return granted
    for way, scheduling in ((_round_robin, "round robin"), (_nice, "nice")):
        try:
            _each_thread(way)
        except PermissionError:
            continue
        granted["scheduling"] = scheduling
        break
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    granted["timer_slack"] = prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0) == 0
    return granted


def end_with_owner(period: float = 1.0) -> None:
    """End this process soon after the one that started it, however that ended.

    An engine whose owner was killed would otherwise wait for requests for ever.
    """
    owner = os.getppid()

    def watch() -> None:
        while os.getppid() == owner:
            time.sleep(period)
        os._exit(1)

    threading.Thread(target=watch, name="end-with-owner", daemon=True).start()


def prepare_owner() -> None:
    """Prefer the process that passes tokens on, less than the one that keeps the time."""
    sys.setswitchinterval(SWITCH_INTERVAL)
    _prefer(OWNER_NICENESS)


def prepare_driver() -> None:
    """Prefer all threads of the process that sends requests.

    One of them that held Python's lock while others computed would hold up the one that sends.
    """
    sys.setswitchinterval(SWITCH_INTERVAL)
    _prefer(DRIVER_NICENESS)


def _prefer(niceness: int) -> None:
    if sys.platform == "linux":
        with suppress(PermissionError):
            _each_thread(lambda t: os.setpriority(os.PRIO_PROCESS, t, niceness))


def _each_thread(do: Callable[[int], None]) -> None:
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it ended meanwhile
            do(int(thread))


def _round_robin(thread: int) -> None:
    policy = os.SCHED_RR | os.SCHED_RESET_ON_FORK
    os.sched_setscheduler(thread, policy, os.sched_param(os.sched_get_priority_min(os.SCHED_RR)))


def _nice(thread: int) -> None:
    os.setpriority(os.PRIO_PROCESS, thread, ENGINE_NICENESS)


_clock: DeviceClock | None = None


def install(clock: DeviceClock) -> DeviceClock:
    """Make ``clock`` the one of this process: the worker does, before its scheduler is made."""
    global _clock
    _clock = clock
    return clock


def installed() -> DeviceClock:
    """The clock of this process.

    Raises
    ------
    RuntimeError
        No worker has installed one: scheduler and worker are not in one process.
    """
    if _clock is None:
        raise RuntimeError("device time needs scheduler and worker in one process")
    return _clock
