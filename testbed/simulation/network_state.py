"""State of a simulated network, as arrays that compiled code can hold (see ``network_kernel``)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from testbed.simulation.heap import Heap, grown, new_heap

# Columns of ``Slots.number``.
PLACE, ROW, KIND, NODE, ATTEMPTS, GENERATION, NEXT, STATE, PROFILE = range(9)
SLOT_NUMBERS = 9

# Columns of ``Slots.real``, seconds unless said; X and Y in km.
INTENDED, AT_NODE, STARTED, OCCUPANCY, WORK, CHANCE, DISTANCE, X, Y, PREFILL, REUSED = range(11)
SLOT_REALS = 11

FREE, UNDER_WAY, WAITING, RUNNING, RETRYING = range(5)
"""Values of STATE. ``UNDER_WAY`` is on the radio path to its node."""

# Columns of ``Nodes.number``.
ASSIGNED, LOADED, LISTED, TRUSTED, ALIVE, BUSY, HEAD, TAIL = range(8)
"""ASSIGNED profile and whether its state is LOADED; the profile that the catalogue LISTED;
TRUSTED by the router to be alive; ALIVE; BUSY servers; HEAD and TAIL of the queue."""
NODE_NUMBERS = 8

# Columns of ``Nodes.real``.
BUSY_SECONDS, COUNTED_UNTIL, WORK_DONE, SERVED = range(4)
NODE_REALS = 4

# Events. A code is kind + 16·(who + 2³²·generation).
(
    AT_THE_NODE,
    COMPLETION,
    FIRST_TOKEN,
    TICK,
    ADVERTISED,
    FAILURE,
    RECOVERY,
    NOTICED,
    LOST,
    EPOCH,
    (LOADED_STATE),
) = range(11)

UNSEEN = -1.0
"""Time of a node's last observation before its first."""

# Entries of ``Counters.number``.
LIVE, RECORDS, TICKS, COUNTING, FAILURES, MOVES, EVENTS, SPARE = range(8)
COUNTERS = 8

# Entries of ``Counters.real``.
NOW, BYTES_MOVED, BACK_IN_TIME = range(3)
REALS = 4

COMPLETED, REJECTED, FAILED = range(3)

# Columns of ``Records.number`` and ``Records.real``.
R_PLACE, R_KIND, R_PROFILE, R_ENDING, R_NODE = range(5)
R_TTFT, R_WAIT, R_OCCUPANCY, R_DISTANCE, R_REUSED, R_SAVED, R_FULL = range(7)


class Rules(NamedTuple):
    """Numbers that do not change in a run; seconds unless said."""

    palm: bool
    by_tier: bool
    advertised: bool  # nodes advertise their own waits; else ``Tables.wait`` holds
    attempts: int
    fallback: int
    prefill_weight: float
    wait_weight: float
    margin: float
    close_at: float
    reopen_at: float
    period: float
    delay: float
    window: float
    detection: float
    mean_uptime: float  # 0: nodes do not fail
    mean_downtime: float
    epoch: float  # 0: the catalogue is live
    budget: float  # bytes per epoch
    load_rate: float  # bytes/s at which a profile is loaded; 0: at once


class Tables(NamedTuple):
    """Arrays that do not change in a run: rows of costs, S profiles, Q types; seconds."""

    prefill: np.ndarray  # (rows, S)
    reuse: np.ndarray  # (rows, S) tokens
    full: np.ndarray  # (rows, S)
    decode: np.ndarray  # (rows, S)
    wait: np.ndarray  # (Q, S)
    concurrency: np.ndarray  # (S,)
    target: np.ndarray  # (S,) nodes; empty: nothing moves
    move_bytes: np.ndarray  # (S, S)


class Nodes(NamedTuple):
    number: np.ndarray  # (N, 8) int64
    real: np.ndarray  # (N, 4)
    mark: np.ndarray  # (N,) LISTED where TRUSTED, else -1
    tier_members: np.ndarray  # (S, N) nodes by mark
    tier_count: np.ndarray  # (S,)
    alive: np.ndarray  # (S,) nodes alive by ASSIGNED
    seconds: np.ndarray  # (S + 1,) node-seconds counted by tier, and until when
    tier_work: np.ndarray  # (S, 2) occupancy and requests so far
    closed: np.ndarray  # (S,) by admission


class Telemetry(NamedTuple):
    """What nodes keep of their waits; R snapshots on their way to the router; what it has seen."""

    kept: np.ndarray  # (N, 3) damped mean, damped mean square, time of the last observation
    load: np.ndarray  # (S,) damped utilisation
    sent: np.ndarray  # (R, N, 2) mean and deviation
    sent_load: np.ndarray  # (R, S)
    seen: np.ndarray  # (N, 2)


class Slots(NamedTuple):
    """Requests in the system; the first SPARE entries of ``spare`` are free slots."""

    number: np.ndarray  # (L, 9) int64
    real: np.ndarray  # (L, 11)
    tried: np.ndarray  # (L, A) int64
    radius: np.ndarray  # (L, S) km, palm only
    turn: np.ndarray  # (L, S), palm only
    spare: np.ndarray  # (L,)


class Counters(NamedTuple):
    number: np.ndarray  # (8,) int64
    real: np.ndarray  # (4,)


class Records(NamedTuple):
    """Requests that have ended since the last flush."""

    number: np.ndarray  # (M, 5) int64
    real: np.ndarray  # (M, 7)


class Chunk(NamedTuple):
    """Requests about to be sent, (n,); ``place`` is negative in the warm-up."""

    time: np.ndarray
    place: np.ndarray
    kind: np.ndarray
    row: np.ndarray
    work: np.ndarray
    output_tokens: np.ndarray
    chance: np.ndarray
    position: np.ndarray  # (n, 2) km, torus
    radius: np.ndarray  # (n, S) km, palm
    turn: np.ndarray  # (n, S), palm


def no_requests(profiles: int) -> Chunk:
    """A chunk of nothing, for running on after the last request was sent."""
    none, whole = np.empty(0), np.empty(0, dtype=np.int64)
    wide = np.empty((0, profiles))
    return Chunk(none, whole, whole, whole, none, whole, none, np.empty((0, 2)), wide, wide)


class Network(NamedTuple):
    nodes: Nodes
    telemetry: Telemetry
    slots: Slots
    heap: Heap
    counters: Counters
    records: Records


def new_network(
    assigned: np.ndarray,
    profiles: int,
    *,
    snapshots: int,
    attempts: int,
    palm: bool,
    records: int,
    slots: int = 1024,
) -> Network:
    """N idle nodes with the profiles ``assigned`` (N,), all listed, trusted and alive."""
    count = len(assigned)
    number = np.zeros((count, NODE_NUMBERS), dtype=np.int64)
    number[:, ASSIGNED] = number[:, LISTED] = assigned
    number[:, [LOADED, TRUSTED, ALIVE]] = 1
    number[:, [HEAD, TAIL]] = -1
    nodes = Nodes(
        number=number,
        real=np.zeros((count, NODE_REALS)),
        mark=np.array(assigned, dtype=np.int64),
        tier_members=np.zeros((profiles, count), dtype=np.int64),
        tier_count=np.zeros(profiles, dtype=np.int64),
        alive=np.bincount(assigned, minlength=profiles).astype(np.int64),
        seconds=np.zeros(profiles + 1),
        tier_work=np.zeros((profiles, 2)),
        closed=np.zeros(profiles, dtype=np.bool_),
    )
    telemetry = Telemetry(
        kept=np.tile([0.0, 0.0, UNSEEN], (count, 1)),
        load=np.zeros(profiles),
        sent=np.zeros((snapshots, count, 2)),
        sent_load=np.zeros((snapshots, profiles)),
        seen=np.zeros((count, 2)),
    )
    counters = Counters(np.zeros(COUNTERS, dtype=np.int64), np.zeros(REALS))
    counters.number[SPARE] = slots
    return Network(
        nodes=nodes,
        telemetry=telemetry,
        slots=_new_slots(slots, attempts, profiles if palm else 0),
        heap=new_heap(4 * slots + 8 * count),
        counters=counters,
        records=Records(np.zeros((records, 5), dtype=np.int64), np.zeros((records, 7))),
    )


def with_more_room(network: Network) -> Network:
    """The same network with room for twice the requests, events and records."""
    old = network.slots
    size, (_, attempts), profiles = len(old.number), old.tried.shape, old.radius.shape[1]
    slots = _new_slots(2 * size, attempts, profiles)
    for name in ("number", "real", "tried", "radius", "turn"):
        getattr(slots, name)[:size] = getattr(old, name)
    left = int(network.counters.number[SPARE])
    slots.spare[size : size + left] = old.spare[:left]
    network.counters.number[SPARE] = size + left
    records, kept = network.records, len(network.records.number)
    larger = Records(
        np.zeros((2 * kept, records.number.shape[1]), dtype=np.int64),
        np.zeros((2 * kept, records.real.shape[1])),
    )
    larger.number[:kept], larger.real[:kept] = records.number, records.real
    return network._replace(slots=slots, heap=grown(network.heap), records=larger)


def _new_slots(size: int, attempts: int, profiles: int) -> Slots:
    return Slots(
        number=np.zeros((size, SLOT_NUMBERS), dtype=np.int64),
        real=np.zeros((size, SLOT_REALS)),
        tried=np.full((size, attempts), -1, dtype=np.int64),
        radius=np.zeros((size, profiles)),
        turn=np.zeros((size, profiles)),
        spare=np.arange(size, dtype=np.int64)[::-1].copy(),
    )
