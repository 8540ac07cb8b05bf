"""The event loop of a network of nodes, compiled.

A request is routed at the time it is sent, by what the router knows then; it travels its radio
delay, queues at its node first come first served, and holds one of the node's servers for its
occupancy. Its first token comes one prefill after it starts. Nodes advertise the mean of their
waits, damped in time, each period, and the router learns of it a delay later. A node that dies
loses what it holds; who was waiting there tries the next-best node once the loss is noticed.
Profiles move between nodes at catalogue epochs; a request routed by a stale catalogue gets the
reuse that its node really has.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from testbed.simulation.heap import Heap, drop_first, push
from testbed.simulation.network_state import (
    ADVERTISED,
    ALIVE,
    ASSIGNED,
    AT_NODE,
    AT_THE_NODE,
    ATTEMPTS,
    BACK_IN_TIME,
    BUSY,
    BUSY_SECONDS,
    BYTES_MOVED,
    CHANCE,
    COMPLETED,
    COMPLETION,
    COUNTED_UNTIL,
    COUNTING,
    DISTANCE,
    EPOCH,
    EVENTS,
    FAILED,
    FAILURE,
    FAILURES,
    FIRST_TOKEN,
    FREE,
    GENERATION,
    HEAD,
    INTENDED,
    KIND,
    LISTED,
    LIVE,
    LOADED,
    LOADED_STATE,
    LOST,
    MOVES,
    NEXT,
    NODE,
    NOTICED,
    NOW,
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
    RECORDS,
    RECOVERY,
    REJECTED,
    RETRYING,
    REUSED,
    ROW,
    RUNNING,
    SERVED,
    SPARE,
    STARTED,
    STATE,
    TAIL,
    TICK,
    TICKS,
    TRUSTED,
    UNDER_WAY,
    WAITING,
    WORK,
    WORK_DONE,
    Chunk,
    Network,
    Rules,
    Tables,
    X,
    Y,
)
from testbed.simulation.plane import Plane, nearest_of_each
from testbed.simulation.radio_table import RadioTable, drawn_delay, mean_delay

NEXT_CHUNK, MORE_ROOM, FLUSH, DONE = range(4)
"""Why :func:`advance` came back."""

# Handing tuples of many arrays from function to function is what takes a compiler long: the loop
# unpacks them once, rare events are called with the arrays that they need, and what every request
# goes through is woven in.
_called = numba.njit(cache=True, no_cfunc_wrapper=True)
_woven = numba.njit(cache=True, inline="always")

_MASK = 2**32 - 1
_HEADROOM = 64
"""Events that one turn of the loop may add beyond one for each live request."""


@_woven
def _code(kind: int, who: int, generation: int) -> int:
    return kind + 16 * (who + (generation << 32))


@numba.njit(cache=True)
def start(rules: Rules, net: Network, rng: np.random.Generator) -> None:
    """Put the first telemetry tick, failures and catalogue epoch on the event list."""
    heap, node = net.heap, net.nodes.number
    rebuild(node, net.nodes.mark, net.nodes.tier_members, net.nodes.tier_count)
    if rules.advertised or rules.close_at > 0:
        push(heap, rules.period, TICK, 0.0)
    if rules.mean_uptime > 0:
        for n in range(node.shape[0]):
            push(heap, rng.standard_exponential() * rules.mean_uptime, _code(FAILURE, n, 0), 0.0)
    if rules.epoch > 0:
        push(heap, rules.epoch, EPOCH, 0.0)


@numba.njit(cache=True)
def advance(
    rules: Rules,
    tables: Tables,
    net: Network,
    plane: Plane,
    radio: RadioTable,
    chunk: Chunk,
    done: int,
    last: bool,
    rng: np.random.Generator,
    near: np.ndarray,
    far: np.ndarray,
) -> tuple[int, int]:
    """Run until the chunk's requests are sent, or if it is the last, until all have ended.

    ``done`` requests of the chunk have been sent before; ``near`` (S, K) and ``far`` (S, K) are
    room for candidates and their distances.

    Returns
    -------
    (why it stopped, requests of the chunk sent by now)
    """
    heap = net.heap
    event_time, event_code, event_value, events = heap.time, heap.code, heap.value, heap.size
    slot, slot_real, tried = net.slots.number, net.slots.real, net.slots.tried
    radius, turn, spare = net.slots.radius, net.slots.turn, net.slots.spare
    node, node_real, mark = net.nodes.number, net.nodes.real, net.nodes.mark
    members, present, alive = net.nodes.tier_members, net.nodes.tier_count, net.nodes.alive
    seconds, tier_work, closed = net.nodes.seconds, net.nodes.tier_work, net.nodes.closed
    kept, load, sent = net.telemetry.kept, net.telemetry.load, net.telemetry.sent
    sent_load, seen = net.telemetry.sent_load, net.telemetry.seen
    count, real = net.counters.number, net.counters.real
    record, record_real = net.records.number, net.records.real
    prefill, reuse, full, decode = tables.prefill, tables.reuse, tables.full, tables.decode
    fixed_wait, concurrency = tables.wait, tables.concurrency
    time, total = chunk.time, chunk.time.shape[0]
    while True:
        if done == total:
            if not last:
                return NEXT_CHUNK, done
            if count[LIVE] == 0:
                return DONE, done
        # One event can end, or move, as many requests as a node holds.
        if count[SPARE] == 0 or events[0] + count[LIVE] + _HEADROOM > event_time.shape[0]:
            return MORE_ROOM, done
        if count[RECORDS] + count[LIVE] + 1 > record.shape[0]:
            return FLUSH if count[RECORDS] > record.shape[0] // 4 else MORE_ROOM, done
        # What an event leaves to do: route request ``i``, end it, or start who waits at node ``n``.
        i, n, route, ending = -1, -1, False, -1
        if done < total and (events[0] == 0 or time[done] < event_time[0]):
            now = time[done]
            if chunk.place[done] == 0:
                _count_seconds(alive, seconds, count, now)
                count[COUNTING] = 1
            count[LIVE] += 1
            count[SPARE] -= 1
            i, route = spare[count[SPARE]], True
            slot[i, PLACE], slot[i, ROW] = chunk.place[done], chunk.row[done]
            slot[i, KIND], slot[i, ATTEMPTS] = chunk.kind[done], 0
            slot[i, STATE] = RETRYING
            slot_real[i, INTENDED] = now
            slot_real[i, WORK], slot_real[i, CHANCE] = chunk.work[done], chunk.chance[done]
            for j in range(tried.shape[1]):
                tried[i, j] = -1
            if rules.palm:
                for s in range(radius.shape[1]):
                    radius[i, s], turn[i, s] = chunk.radius[done, s], chunk.turn[done, s]
            else:
                slot_real[i, X] = chunk.position[done, 0]
                slot_real[i, Y] = chunk.position[done, 1]
            done += 1
        else:
            now, code, value = event_time[0], event_code[0], event_value[0]
            drop_first(heap)
            count[EVENTS] += 1
            kind = code & 15
            who = (code >> 4) & _MASK
            valid = slot[who, GENERATION] == code >> 36 if who < slot.shape[0] else False
            if kind == AT_THE_NODE:
                n = slot[who, NODE]
                if node[n, ALIVE] == 1:
                    _join(
                        rules,
                        slot,
                        slot_real,
                        node,
                        tier_work,
                        prefill,
                        reuse,
                        full,
                        decode,
                        who,
                        n,
                    )
                    slot_real[who, AT_NODE] = now
                else:
                    n = -1
                    _lose(heap, slot, who, now + rules.detection, 0.0)
            elif kind == COMPLETION:
                if valid:
                    i, ending, n = who, COMPLETED, slot[who, NODE]
                    _count_busy(node, node_real, n, now)
                    node[n, BUSY] -= 1
            elif kind == FIRST_TOKEN:
                if node[who, ALIVE] == 1:
                    observe(kept, who, now, value, rules.window)
            elif kind == LOST:
                if valid:
                    i = who
                    tried[i, slot[i, ATTEMPTS]] = slot[i, NODE]
                    slot[i, ATTEMPTS] += 1
                    route = value == 0 and slot[i, ATTEMPTS] < rules.attempts
                    ending = -1 if route else FAILED
            elif kind == TICK:
                _tick(
                    rules,
                    heap,
                    node,
                    node_real,
                    concurrency,
                    kept,
                    load,
                    sent,
                    sent_load,
                    count,
                    now,
                )
            elif kind == ADVERTISED:
                learn(sent, sent_load, seen, closed, who, rules.close_at, rules.reopen_at)
            elif kind == FAILURE:
                _count_seconds(alive, seconds, count, now)
                alive[node[who, ASSIGNED]] -= 1
                count[FAILURES] += 1
                _fail(rules, heap, slot, slot_real, node, node_real, who, now, rng)
            elif kind == RECOVERY:
                # The node is back, its profile pinned again.
                _count_seconds(alive, seconds, count, now)
                alive[node[who, ASSIGNED]] += 1
                _count_busy(node, node_real, who, now)
                node[who, ALIVE] = 1
                node[who, LOADED] = 1
                up = rng.standard_exponential() * rules.mean_uptime
                push(heap, now + up, _code(FAILURE, who, 0), 0.0)
                push(heap, now + rules.detection, _code(NOTICED, who, 0), 1.0)
            elif kind == NOTICED:
                node[who, TRUSTED] = int(value)
                rebuild(node, mark, members, present)
            elif kind == EPOCH:
                _count_seconds(alive, seconds, count, now)
                for m in range(node.shape[0]):
                    node[m, LISTED] = node[m, ASSIGNED]
                rebuild(node, mark, members, present)
                push(heap, now + rules.epoch, EPOCH, 0.0)
                real[BYTES_MOVED] += _migrate(
                    rules, heap, node, alive, tables.target, tables.move_bytes, count, now
                )
            else:
                node[who, LOADED] = 1
        if now < real[NOW]:
            real[BACK_IN_TIME] += 1
        real[NOW] = now
        if route:
            if rules.palm:
                draw_of_each(members, present, tried, radius, turn, i, near, far)
            else:
                x, y = slot_real[i, X], slot_real[i, Y]
                nearest_of_each(plane, x, y, mark, present, tried[i], near, far)
            best, distance = cheapest(
                rules,
                radio,
                prefill,
                fixed_wait,
                seen,
                closed,
                near,
                far,
                slot[i, ROW],
                slot[i, KIND],
            )
            if best >= 0:
                slot[i, NODE], slot[i, STATE] = best, UNDER_WAY
                slot_real[i, DISTANCE] = distance
                delay = drawn_delay(radio, distance, slot_real[i, CHANCE])
                push(heap, now + delay, _code(AT_THE_NODE, i, 0), 0.0)
            else:
                ending = REJECTED if slot[i, ATTEMPTS] == 0 else FAILED
        if ending >= 0:
            if slot[i, PLACE] >= 0:
                _write(slot, slot_real, full, record, record_real, count[RECORDS], i, ending)
                count[RECORDS] += 1
                if ending == COMPLETED:
                    node_real[n, WORK_DONE] += slot_real[i, OCCUPANCY]
                    node_real[n, SERVED] += 1
            slot[i, STATE] = FREE
            slot[i, GENERATION] += 1
            spare[count[SPARE]] = i
            count[SPARE] += 1
            count[LIVE] -= 1
        if n >= 0:
            # First come first served, while there is a free server.
            servers = concurrency[node[n, ASSIGNED]]
            while node[n, HEAD] >= 0 and node[n, BUSY] < servers:
                j = node[n, HEAD]
                node[n, HEAD] = slot[j, NEXT]
                _count_busy(node, node_real, n, now)
                node[n, BUSY] += 1
                slot[j, STATE] = RUNNING
                slot_real[j, STARTED] = now
                code = _code(COMPLETION, j, slot[j, GENERATION])
                push(heap, now + slot_real[j, OCCUPANCY], code, 0.0)
                if rules.advertised:
                    first = now + slot_real[j, PREFILL]
                    push(heap, first, _code(FIRST_TOKEN, n, 0), now - slot_real[j, AT_NODE])


# --- The router -----------------------------------------------------------------------------


@_woven
def cheapest(
    rules: Rules,
    radio: RadioTable,
    prefill: np.ndarray,
    wait: np.ndarray,
    seen: np.ndarray,
    closed: np.ndarray,
    near: np.ndarray,
    far: np.ndarray,
    row: int,
    kind: int,
) -> tuple[int, float]:
    """The candidate of least cost in an open tier, or -1, and its distance (C1, G1-G3)."""
    best, best_cost, distance = -1, math.inf, 0.0
    for s in range(near.shape[0]):
        if not closed[s] or s == rules.fallback:
            fixed = rules.prefill_weight * prefill[row, s]
            if not rules.advertised:
                fixed += rules.wait_weight * wait[kind, s]
            for j in range(near.shape[1]):
                n = near[s, j]
                if n >= 0:
                    cost = fixed + mean_delay(radio, far[s, j])
                    if rules.advertised:
                        cost += rules.wait_weight * (seen[n, 0] + rules.margin * seen[n, 1])
                    if cost < best_cost:
                        best, best_cost, distance = n, cost, far[s, j]
    return best, distance


@_woven
def draw_of_each(
    members: np.ndarray,
    present: np.ndarray,
    tried: np.ndarray,
    radius: np.ndarray,
    turn: np.ndarray,
    i: int,
    near: np.ndarray,
    far: np.ndarray,
) -> None:
    """Palm: the nearest node of each profile is any of them, at the distance drawn (F4)."""
    for s in range(near.shape[0]):
        near[s, 0] = -1
        far[s, 0] = radius[i, s]
        at = int(turn[i, s] * present[s])
        for step in range(present[s]):
            n = members[s, (at + step) % present[s]]
            known = False
            for j in range(tried.shape[1]):
                known = known or tried[i, j] == n
            if not known:
                near[s, 0] = n
                break


@_called
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


@_woven
def _join(
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
    slot_real[i, PREFILL] = prefill[row, s] if loaded else full[row]
    slot_real[i, REUSED] = reuse[row, s] if loaded else 0.0
    occupancy = slot_real[i, PREFILL] + decode[row]
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


@_woven
def _count_busy(node: np.ndarray, node_real: np.ndarray, n: int, now: float) -> None:
    node_real[n, BUSY_SECONDS] += node[n, BUSY] * (now - node_real[n, COUNTED_UNTIL])
    node_real[n, COUNTED_UNTIL] = now


@_woven
def _write(
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
        record_real[r, R_FULL] = full[slot[i, ROW]]
        record_real[r, R_SAVED] = full[slot[i, ROW]] - slot_real[i, PREFILL]
        record_real[r, R_REUSED] = slot_real[i, REUSED]


# --- Telemetry ------------------------------------------------------------------------------


@_woven
def observe(kept: np.ndarray, n: int, now: float, wait: float, window: float) -> None:
    """Node ``n`` learns of a wait: :class:`testbed.routing.telemetry.AdvertisedWait`, compiled."""
    passed = now - kept[n, 2] if kept[n, 2] >= 0 else 0.0
    weight = -math.expm1(-passed / window)
    kept[n, 0] += weight * (wait - kept[n, 0])
    kept[n, 1] += weight * (wait * wait - kept[n, 1])
    kept[n, 2] = now


@_called
def _tick(
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
        _count_busy(node, node_real, n, now)
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
    push(heap, now + rules.delay, _code(ADVERTISED, snapshot, 0), 0.0)
    push(heap, now + rules.period, TICK, 0.0)


@_called
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


@_called
def _fail(
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
    _count_busy(node, node_real, n, now)
    node[n, ALIVE] = 0
    node[n, BUSY] = 0
    node[n, HEAD] = -1
    down = rng.standard_exponential() * rules.mean_downtime
    push(heap, now + down, _code(RECOVERY, n, 0), 0.0)
    push(heap, now + rules.detection, _code(NOTICED, n, 0), 0.0)
    for i in range(slot.shape[0]):
        state = slot[i, STATE]
        if slot[i, NODE] == n and (state == WAITING or state == RUNNING):  # noqa: SIM109
            # Whose first token is out has the beginning of an answer, and loses the rest of it.
            begun = state == RUNNING and now >= slot_real[i, STARTED] + slot_real[i, PREFILL]
            slot[i, GENERATION] += 1
            _lose(heap, slot, i, now + rules.detection, 1.0 if begun else 0.0)


@_woven
def _lose(heap: Heap, slot: np.ndarray, i: int, noticed: float, begun: float) -> None:
    slot[i, STATE] = RETRYING
    push(heap, noticed, _code(LOST, i, slot[i, GENERATION]), begun)


@_called
def _migrate(
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
            push(heap, now + best / rules.load_rate, _code(LOADED_STATE, mover, 0), 0.0)


@_woven
def _count_seconds(alive: np.ndarray, seconds: np.ndarray, count: np.ndarray, now: float) -> None:
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
