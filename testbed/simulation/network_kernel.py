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

from testbed.simulation.heap import drop_first, push
from testbed.simulation.network_events import (
    code_of,
    count_busy,
    count_seconds,
    fail,
    join,
    learn,
    lose,
    migrate,
    observe,
    rebuild,
    tick,
    woven,
    write,
)
from testbed.simulation.network_state import (
    ADVERTISED,
    ALIVE,
    ASSIGNED,
    AT_NODE,
    AT_THE_NODE,
    ATTEMPTS,
    BACK_IN_TIME,
    BUSY,
    BYTES_MOVED,
    CHANCE,
    COMPLETED,
    COMPLETION,
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
    LOST,
    NEXT,
    NODE,
    NOTICED,
    NOW,
    OCCUPANCY,
    PLACE,
    PREFILL,
    RECORDS,
    RECOVERY,
    REJECTED,
    RETRYING,
    ROW,
    RUNNING,
    SERVED,
    SPARE,
    STARTED,
    STATE,
    TICK,
    TRUSTED,
    UNDER_WAY,
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

_MASK = 2**32 - 1
_HEADROOM = 64
"""Events that one turn of the loop may add beyond one for each live request."""


@numba.njit(cache=True)
def start(rules: Rules, net: Network, rng: np.random.Generator) -> None:
    """Put the first telemetry tick, failures and catalogue epoch on the event list."""
    heap, node = net.heap, net.nodes.number
    rebuild(node, net.nodes.mark, net.nodes.tier_members, net.nodes.tier_count)
    if rules.advertised or rules.close_at > 0:
        push(heap, rules.period, TICK, 0.0)
    if rules.mean_uptime > 0:
        for n in range(node.shape[0]):
            push(heap, rng.standard_exponential() * rules.mean_uptime, code_of(FAILURE, n, 0), 0.0)
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
                count_seconds(alive, seconds, count, now)
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
                    join(
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
                    lose(heap, slot, who, now + rules.detection, 0.0)
            elif kind == COMPLETION:
                if valid:
                    i, ending, n = who, COMPLETED, slot[who, NODE]
                    count_busy(node, node_real, n, now)
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
                tick(
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
                count_seconds(alive, seconds, count, now)
                alive[node[who, ASSIGNED]] -= 1
                count[FAILURES] += 1
                fail(rules, heap, slot, slot_real, node, node_real, who, now, rng)
            elif kind == RECOVERY:
                # The node is back, its profile pinned again.
                count_seconds(alive, seconds, count, now)
                alive[node[who, ASSIGNED]] += 1
                count_busy(node, node_real, who, now)
                node[who, ALIVE] = 1
                node[who, LOADED] = 1
                up = rng.standard_exponential() * rules.mean_uptime
                push(heap, now + up, code_of(FAILURE, who, 0), 0.0)
                push(heap, now + rules.detection, code_of(NOTICED, who, 0), 1.0)
            elif kind == NOTICED:
                node[who, TRUSTED] = int(value)
                rebuild(node, mark, members, present)
            elif kind == EPOCH:
                count_seconds(alive, seconds, count, now)
                for m in range(node.shape[0]):
                    node[m, LISTED] = node[m, ASSIGNED]
                rebuild(node, mark, members, present)
                push(heap, now + rules.epoch, EPOCH, 0.0)
                real[BYTES_MOVED] += migrate(
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
                push(heap, now + delay, code_of(AT_THE_NODE, i, 0), 0.0)
            else:
                ending = REJECTED if slot[i, ATTEMPTS] == 0 else FAILED
        if ending >= 0:
            if slot[i, PLACE] >= 0:
                write(slot, slot_real, full, record, record_real, count[RECORDS], i, ending)
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
                count_busy(node, node_real, n, now)
                node[n, BUSY] += 1
                slot[j, STATE] = RUNNING
                slot_real[j, STARTED] = now
                code = code_of(COMPLETION, j, slot[j, GENERATION])
                push(heap, now + slot_real[j, OCCUPANCY], code, 0.0)
                if rules.advertised:
                    first = now + slot_real[j, PREFILL]
                    push(heap, first, code_of(FIRST_TOKEN, n, 0), now - slot_real[j, AT_NODE])


# --- The router -----------------------------------------------------------------------------


@woven
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


@woven
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
