"""Replay: an open loop on an absolute schedule, honest stamps, every request accounted for.

The moments at which requests start are fixed before the run; a late send never shifts later
ones. At its intended moment a request is routed; its emulated radio delay is slept; then it
leaves for its replica. Two threads do it: one keeps the schedule, one per replica reads replies.
"""

from __future__ import annotations

import heapq
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cluster.deployment import Node
from cluster.metrics import RouterMetrics
from cluster.router import Choice, Router
from cluster.wire import ReplicaLost
from testbed.errors import ScenarioError
from testbed.outcome import RequestRecord
from testbed.workload.stream import RequestStream

MAX_ATTEMPTS = 3
_ARRIVE, _DISPATCH = 0, 1


@dataclass(frozen=True)
class Progress:
    """How a replay stands."""

    sent: int
    ended: int
    total: int
    elapsed: float
    time_left: float
    rate: float
    ttft_p50: float | None


@dataclass
class _Life:
    """One request on its way."""

    index: int
    intended: float
    choice: Choice | None = None
    sent: float | None = None
    dispatched: float | None = None
    attempts: int = 0
    excluded: set[int] = field(default_factory=set)


class Replay:
    """Replays one stream through a router; call :meth:`run` once.

    Parameters
    ----------
    stream : requests with arrivals from 0
    router : chooses the node of each request
    on_record : called with every finished record, in the order of ending
    patience : seconds after the last arrival before unanswered requests count as failed
    """

    def __init__(
        self,
        stream: RequestStream,
        router: Router,
        *,
        on_record: Callable[[RequestRecord], None],
        metrics: RouterMetrics | None = None,
        on_node_lost: Callable[[Node], None] | None = None,
        patience: float = 60.0,
        time_scale: float = 1.0,
        skip: frozenset[int] = frozenset(),
    ) -> None:
        self._stream = stream
        self._router = router
        self._on_record = on_record
        self._metrics = metrics
        self._on_node_lost = on_node_lost
        self._patience = patience * time_scale
        self._scale = time_scale
        self._names = [q.name for q in router.scenario.requests]
        self._profiles = [s.name for s in router.scenario.profiles]
        self._heap: list[tuple[float, int, int, _Life]] = []
        self._wake = threading.Condition()
        self._order = 0
        self._open: dict[int, _Life] = {}
        self._ended = 0
        self._sent = 0
        self._start = 0.0
        self._stop = False
        self._ttfts: list[float] = []
        self._todo = [i for i in range(len(stream)) if i not in skip]
        # Token ids are made before the clock starts: making them late would delay sends.
        self._tokens = {i: stream.tokens(i) for i in self._todo}

    def run(
        self,
        progress: Callable[[Progress], None] | None = None,
        period: float = 0.25,
        lead: float = 0.2,
    ) -> list[RequestRecord]:
        """Replay and return the records in order of arrival. Ctrl-C ends it early, counted."""
        self._records: dict[int, RequestRecord] = {}
        self._start = time.perf_counter() + lead
        for i in self._todo:
            at = self._start + float(self._stream.arrival[i]) * self._scale
            self._push(at, _ARRIVE, _Life(index=i, intended=at))
        dispatcher = threading.Thread(target=self._dispatch_loop, name="dispatcher", daemon=True)
        last = self._start + (float(self._stream.arrival[-1]) if self._todo else 0.0) * self._scale
        dispatcher.start()
        total = len(self._todo)
        try:
            while self._ended < total:
                with self._wake:
                    self._wake.wait_for(lambda: self._ended >= total, timeout=period)
                if progress is not None:
                    progress(self._progress(total, last))
                if time.perf_counter() > last + self._patience:
                    self._give_up(f"no answer within {self._patience:g} s of the last arrival")
        except KeyboardInterrupt:
            self._give_up("interrupted")
            raise
        finally:
            with self._wake:
                self._stop = True
                self._wake.notify_all()
            dispatcher.join(timeout=5)
        return [self._records[i] for i in sorted(self._records)]

    # -- the schedule --

    def _push(self, at: float, kind: int, life: _Life) -> None:
        with self._wake:
            self._order += 1
            heapq.heappush(self._heap, (at, self._order, kind, life))
            self._wake.notify_all()

    def _dispatch_loop(self) -> None:
        _prefer_this_thread()
        while True:
            with self._wake:
                while not self._stop:
                    if not self._heap:
                        self._wake.wait()
                        continue
                    ahead = self._heap[0][0] - time.perf_counter()
                    if ahead <= 0:
                        break
                    # The condition's own wait is late by scheduling alone; the last stretch is
                    # slept outside it, precisely.
                    if ahead > 0.002:
                        self._wake.wait(ahead - 0.0015)
                    else:
                        break
                if self._stop:
                    return
                at, _, kind, life = heapq.heappop(self._heap)
            ahead = at - time.perf_counter()
            if ahead > 0:
                time.sleep(ahead)
            if kind == _ARRIVE:
                self._arrive(life)
            else:
                self._dispatch(life)

    def _arrive(self, life: _Life) -> None:
        life.sent = time.perf_counter()
        self._sent += 1
        self._open[life.index] = life
        self._route(life)

    def _route(self, life: _Life) -> None:
        choice = self._router.choose(life.index, life.excluded)
        if choice is None:
            reason = "no node takes this request" if life.attempts == 0 else "no node is left"
            self._end(life, "rejected" if life.attempts == 0 else "failed", reason)
            return
        life.choice = choice
        # A retry pays the new node's radio delay from now; the first try from its intended time.
        base = life.intended if life.attempts == 0 else time.perf_counter()
        self._push(base + choice.radio * self._scale, _DISPATCH, life)

    def _dispatch(self, life: _Life) -> None:
        assert life.choice is not None
        life.attempts += 1
        node = life.choice.node
        life.dispatched = time.perf_counter()
        if self._metrics is not None:
            self._metrics.in_flight.inc()
        request = {
            "do": "generate",
            "id": f"{self._router.run_id}-{life.index}-{life.attempts}",
            "output_tokens": int(self._stream.output_tokens[life.index]),
        }
        try:
            node.link.submit(
                request, self._tokens[life.index], lambda reply: self._reply(life, reply)
            )
        except ReplicaLost as lost:
            self._reply(life, lost)

    # -- replies (reader threads) --

    def _reply(self, life: _Life, reply: dict[str, Any] | ReplicaLost) -> None:
        assert life.choice is not None
        node = life.choice.node
        if self._metrics is not None:
            self._metrics.in_flight.dec()
        if isinstance(reply, ReplicaLost):
            self._router.lost(node)
            if self._on_node_lost is not None:
                self._on_node_lost(node)
            life.excluded.add(node.id)
            if life.attempts < MAX_ATTEMPTS:
                self._route(life)
            else:
                self._end(life, "failed", str(reply))
            return
        if reply["ending"] != "completed":
            self._end(life, reply["ending"], reply["reason"])
            return
        self._end(life, "completed", None, reply)

    def _end(
        self, life: _Life, ending: str, reason: str | None, reply: dict[str, Any] | None = None
    ) -> None:
        i = life.index
        with self._wake:
            if self._open.pop(i, None) is None:
                return  # given up before
        choice = life.choice
        values: dict[str, Any] = {}
        if choice is not None:
            values.update(
                profile=self._profiles[choice.node.profile],
                node=choice.node.id,
                distance=choice.distance,
                radio=choice.radio,
                reusable_tokens=choice.reusable,
            )
        if reply is not None and choice is not None:
            offset = choice.node.clock_offset
            stamps = ("received", "queued", "scheduled", "engine_first_token", "first_token")
            for name in (*stamps, "finished"):
                if reply.get(name) is not None:
                    values[name] = self._seconds(reply[name] - offset)
            values["cached_tokens"] = reply["cached_tokens"]
            values["output_tokens"] = reply["output_tokens"]
        record = RequestRecord(
            index=i,
            type=self._names[int(self._stream.type_index[i])],
            ending=ending,  # type: ignore[arg-type]
            reason=reason,
            intended=self._seconds(life.intended),
            sent=None if life.sent is None else self._seconds(life.sent),
            dispatched=None if life.dispatched is None else self._seconds(life.dispatched),
            input_tokens=int(self._stream.input_tokens[i]),
            attempts=max(1, life.attempts),
            **values,
        )
        self._observe(record)
        self._on_record(record)
        with self._wake:
            self._records[i] = record
            self._ended += 1
            if record.ttft is not None:
                self._ttfts.append(record.ttft)
            self._wake.notify_all()

    def _seconds(self, stamp: float) -> float:
        """Driver clock to seconds since the start, in the run's own (device) time."""
        return (stamp - self._start) / self._scale

    def _observe(self, record: RequestRecord) -> None:
        if self._metrics is None:
            return
        profile = record.profile or "none"
        self._metrics.requests.labels(profile, record.ending).inc()
        if record.ttft is not None:
            self._metrics.ttft.labels(profile).observe(record.ttft)
        if record.dispatch_lag is not None:
            self._metrics.dispatch_lag.observe(record.dispatch_lag)

    def _give_up(self, reason: str) -> None:
        """End what is open or still to come, each with a reason: the sum stays whole."""
        with self._wake:
            waiting = [life for _, _, kind, life in self._heap if kind == _ARRIVE]
            self._heap.clear()
            for life in waiting:
                self._open[life.index] = life
            left = list(self._open.values())
        for life in left:
            self._end(life, "failed", reason)

    def _progress(self, total: int, last: float) -> Progress:
        now = time.perf_counter()
        elapsed = max(1e-9, now - self._start)
        recent = self._ttfts[-500:]
        return Progress(
            sent=self._sent,
            ended=self._ended,
            total=total,
            elapsed=elapsed,
            time_left=max(0.0, last - now),
            rate=self._ended / elapsed,
            ttft_p50=float(np.median(recent)) if recent else None,
        )


def _prefer_this_thread() -> None:
    """Ask the kernel not to let the schedule wait for the engines that it loads.

    Where that needs a right which the process does not have, the dispatch lag tells.
    """
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), -10)


def check_stream(stream: RequestStream, max_model_len: int) -> None:
    """Refuse a stream with a request that the engines cannot hold.

    Raises
    ------
    ScenarioError
        Naming the request and ``engine.max_model_len``.
    """
    longest = stream.input_tokens + stream.output_tokens
    worst = int(np.argmax(longest))
    if longest[worst] > max_model_len:
        raise ScenarioError(
            f"engine.max_model_len: request {worst} has {stream.input_tokens[worst]} + "
            f"{stream.output_tokens[worst]} tokens, more than {max_model_len} "
            "(workload.max_tokens drops such requests and counts them)"
        )
