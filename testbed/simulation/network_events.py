"""What happens to nodes of a compiled network: service, telemetry, failures, migrations."""

from __future__ import annotations

import math

import numba
import numpy as np

from testbed.simulation.heap import Heap, push
from testbed.simulation.network_state import (
    ADVERTISED,
    ALIVE,
    ASSIGNED,
    AT_NODE,
    BUSY,
    BUSY_SECONDS,
    COMPLETED,
    COUNTED_UNTIL,
    COUNTING,
    DISTANCE,
    GENERATION,
    HEAD,
    INTENDED,
    KIND,
    LISTED,
    LOADED,
    LOADED_STATE,
    LOST,
    MOVES,
    NEXT,
    NODE,
    NOTICED,
    OCCUPANCY,
    PLACE,
    PREFILL,
    PROFILE,
    R_DISTANCE,
    R_ENDING,
    R_FULL,
    R_KIND,
    R_NODE,
    R_OCCUPANCY,
    R_PLACE,
    R_PROFILE,
    R_REUSED,
    R_SAVED,
    R_TTFT,
    R_WAIT,
    RECOVERY,
    RETRYING,
    REUSED,
    ROW,
    RUNNING,
    STARTED,
    STATE,
    TAIL,
    TICK,
    TICKS,
    TRUSTED,
    WAITING,
    WORK,
    Network,
    Rules,
)

# Handing tuples of many arrays from function to function is what takes a compiler long: the loop
# unpacks them once, rare events are called with the arrays that they need, and what every request
# goes through is woven in.
called = numba.njit(cache=True, no_cfunc_wrapper=True)
woven = numba.njit(cache=True, inline="always")


@woven
def code_of(kind: int, who: int, generation: int) -> int:
    return kind + 16 * (who + (generation << 32))


@called
def rebuild(node: np.ndarray, mark: np.ndarray, members: np.ndarray, present: np.ndarray) -> None:
    """Candidates by tier, after the catalogue or the router's trust has changed."""
    for s in range(present.shape[0]):
        present[s] = 0
    for n in range(node.shape[0]):
        s = node[n, LISTED] if node[n, TRUSTED] == 1 else -1
        mark[n] = s
        if s >= 0:
            members[s, present[s]] = n
            present[s] += 1


# --- A node ---------------------------------------------------------------------------------


@woven
def join(
    rules: Rules,
    slot: np.ndarray,
    slot_real: np.ndarray,
    node: np.ndarray,
    tier_work: np.ndarray,
    prefill: np.ndarray,
    reuse: np.ndarray,
    full: np.ndarray,
    decode: np.ndarray,
    i: int,
    n: int,
) -> None:
    """Request ``i`` stands last in the queue of node ``n``, with what it costs there."""
    row, s = slot[i, ROW], node[n, ASSIGNED]
    loaded = node[n, LOADED] == 1
    slot[i, PROFILE] = s
    slot_real[i, PREFILL] = prefill[row, s] if loaded else full[row, s]
    slot_real[i, REUSED] = reuse[row, s] if loaded else 0.0
    occupancy = slot_real[i, PREFILL] + decode[row, s]
    if rules.by_tier:
        tier_work[s, 0] += occupancy
        tier_work[s, 1] += 1
        occupancy = tier_work[s, 0] / tier_work[s, 1]
    slot_real[i, OCCUPANCY] = occupancy * slot_real[i, WORK]
    slot[i, STATE] = WAITING
    slot[i, NEXT] = -1
    if node[n, HEAD] < 0:
        node[n, HEAD] = i
    else:
        slot[node[n, TAIL], NEXT] = i
    node[n, TAIL] = i


@woven
def count_busy(node: np.ndarray, node_real: np.ndarray, n: int, now: float) -> None:
    node_real[n, BUSY_SECONDS] += node[n, BUSY] * (now - node_real[n, COUNTED_UNTIL])
    node_real[n, COUNTED_UNTIL] = now


@woven
def write(
    slot: np.ndarray,
    slot_real: np.ndarray,
    full: np.ndarray,
    record: np.ndarray,
    record_real: np.ndarray,
    r: int,
    i: int,
    ending: int,
) -> None:
    """Write down how request ``i`` ended."""
    record[r, R_PLACE], record[r, R_KIND] = slot[i, PLACE], slot[i, KIND]
    record[r, R_ENDING] = ending
    if ending == COMPLETED:
        record[r, R_NODE], record[r, R_PROFILE] = slot[i, NODE], slot[i, PROFILE]
        first = slot_real[i, STARTED] + slot_real[i, PREFILL]
        record_real[r, R_TTFT] = first - slot_real[i, INTENDED]
        record_real[r, R_WAIT] = slot_real[i, STARTED] - slot_real[i, AT_NODE]
        record_real[r, R_OCCUPANCY] = slot_real[i, OCCUPANCY]
        record_real[r, R_DISTANCE] = slot_real[i, DISTANCE]
        whole = full[slot[i, ROW], slot[i, PROFILE]]
        record_real[r, R_FULL] = whole
        record_real[r, R_SAVED] = whole - slot_real[i, PREFILL]
        record_real[r, R_REUSED] = slot_real[i, REUSED]


# --- Telemetry ------------------------------------------------------------------------------


@woven
def observe(kept: np.ndarray, n: int, now: float, wait: float, window: float) -> None:
    """Node ``n`` learns of a wait: :class:`testbed.routing.telemetry.AdvertisedWait`, compiled."""
    passed = now - kept[n, 2] if kept[n, 2] >= 0 else 0.0
    weight = -math.expm1(-passed / window)
    kept[n, 0] += weight * (wait - kept[n, 0])
    kept[n, 1] += weight * (wait * wait - kept[n, 1])
    kept[n, 2] = now


@called
def tick(
    rules: Rules,
    heap: Heap,
    node: np.ndarray,
    node_real: np.ndarray,
    concurrency: np.ndarray,
    kept: np.ndarray,
    load: np.ndarray,
    sent: np.ndarray,
    sent_load: np.ndarray,
    count: np.ndarray,
    now: float,
) -> None:
    """Every node sends its wait, an empty one after observing that nobody would wait."""
    snapshot = count[TICKS] % sent.shape[0]
    tiers = load.shape[0]
    busy, servers = np.zeros(tiers), np.zeros(tiers)
    for n in range(node.shape[0]):
        count_busy(node, node_real, n, now)
        alive = node[n, ALIVE] == 1
        if alive and node[n, BUSY] == 0 and node[n, HEAD] < 0:
            observe(kept, n, now, 0.0, rules.window)
        mean = kept[n, 0]
        sent[snapshot, n, 0] = mean
        sent[snapshot, n, 1] = math.sqrt(max(0.0, kept[n, 1] - mean * mean))
        if alive:
            s = node[n, ASSIGNED]
            busy[s] += node_real[n, BUSY_SECONDS]
            servers[s] += concurrency[s] * rules.period
        node_real[n, BUSY_SECONDS] = 0.0
    weight = -math.expm1(-rules.period / rules.window)
    for s in range(tiers):
        at_present = busy[s] / servers[s] if servers[s] > 0 else 0.0
        load[s] += weight * (at_present - load[s])
        sent_load[snapshot, s] = load[s]
    count[TICKS] += 1
    push(heap, now + rules.delay, code_of(ADVERTISED, snapshot, 0), 0.0)
    push(heap, now + rules.period, TICK, 0.0)


@called
def learn(
    sent: np.ndarray,
    sent_load: np.ndarray,
    seen: np.ndarray,
    closed: np.ndarray,
    snapshot: int,
    close_at: float,
    reopen_at: float,
) -> None:
    """A snapshot reaches the router: advertised waits, and admission's hysteresis (G3)."""
    for n in range(seen.shape[0]):
        seen[n, 0] = sent[snapshot, n, 0]
        seen[n, 1] = sent[snapshot, n, 1]
    for s in range(closed.shape[0]):
        if close_at > 0 and sent_load[snapshot, s] >= close_at:
            closed[s] = True
        elif sent_load[snapshot, s] <= reopen_at:
            closed[s] = False


# --- Failures and placement -----------------------------------------------------------------


@called
def fail(
    rules: Rules,
    heap: Heap,
    slot: np.ndarray,
    slot_real: np.ndarray,
    node: np.ndarray,
    node_real: np.ndarray,
    n: int,
    now: float,
    rng: np.random.Generator,
) -> None:
    """Node ``n`` dies with all that waits or runs there."""
    count_busy(node, node_real, n, now)
    node[n, ALIVE] = 0
    node[n, BUSY] = 0
    node[n, HEAD] = -1
    down = rng.standard_exponential() * rules.mean_downtime
    push(heap, now + down, code_of(RECOVERY, n, 0), 0.0)
    push(heap, now + rules.detection, code_of(NOTICED, n, 0), 0.0)
    for i in range(slot.shape[0]):
        state = slot[i, STATE]
        if slot[i, NODE] == n and (state == WAITING or state == RUNNING):  # noqa: SIM109
            # Whose first token is out has the beginning of an answer, and loses the rest of it.
            begun = state == RUNNING and now >= slot_real[i, STARTED] + slot_real[i, PREFILL]
            slot[i, GENERATION] += 1
            lose(heap, slot, i, now + rules.detection, 1.0 if begun else 0.0)


@woven
def lose(heap: Heap, slot: np.ndarray, i: int, noticed: float, begun: float) -> None:
    slot[i, STATE] = RETRYING
    push(heap, noticed, code_of(LOST, i, slot[i, GENERATION]), begun)


@called
def migrate(
    rules: Rules,
    heap: Heap,
    node: np.ndarray,
    alive: np.ndarray,
    target: np.ndarray,
    move_bytes: np.ndarray,
    count: np.ndarray,
    now: float,
) -> float:
    """Move profiles towards the target, cheapest first, within the budget; bytes moved (G4)."""
    tiers = target.shape[0]
    excess = np.zeros(tiers, dtype=np.int64)
    for n in range(node.shape[0]):
        if tiers > 0:
            excess[node[n, ASSIGNED]] += 1
    for s in range(tiers):
        excess[s] -= target[s]
    moved = 0.0
    while True:
        best, source, goal = math.inf, -1, -1
        for s in range(tiers):
            for t in range(tiers):
                if excess[s] > 0 and excess[t] < 0 and move_bytes[s, t] < best:
                    best, source, goal = move_bytes[s, t], s, t
        if source < 0 or moved + best > rules.budget:
            return moved
        mover = -1
        for n in range(node.shape[0]):
            if node[n, ASSIGNED] == source and node[n, ALIVE] == 1 and node[n, LOADED] == 1:
                mover = n
                break
        if mover < 0:
            return moved
        node[mover, ASSIGNED] = goal
        alive[source] -= 1
        alive[goal] += 1
        excess[source] -= 1
        excess[goal] += 1
        moved += best
        count[MOVES] += 1
        if rules.load_rate > 0 and best > 0:
            node[mover, LOADED] = 0
            push(heap, now + best / rules.load_rate, code_of(LOADED_STATE, mover, 0), 0.0)


@woven
def count_seconds(alive: np.ndarray, seconds: np.ndarray, count: np.ndarray, now: float) -> None:
    """Node-seconds of each tier while measured requests are being sent."""
    tiers = alive.shape[0]
    if count[COUNTING] == 1:
        for s in range(tiers):
            seconds[s] += alive[s] * (now - seconds[tiers])
    seconds[tiers] = now


def stop_counting(net: Network, now: float) -> None:
    """The last measured request has been sent."""
    nodes = net.nodes
    nodes.seconds[:-1] += nodes.alive * (now - nodes.seconds[-1])
    nodes.seconds[-1] = now
    net.counters.number[COUNTING] = 0
