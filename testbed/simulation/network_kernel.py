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
    Counters,
    Network,
    Nodes,
    Rules,
    Slots,
    Telemetry,
    X,
    Y,
)
from testbed.simulation.plane import Plane, nearest_of_each
from testbed.simulation.radio_table import RadioTable, drawn_delay, mean_delay

NEXT_CHUNK, MORE_ROOM, FLUSH, DONE = range(4)
"""Why :func:`advance` came back."""

_called = numba.njit(cache=True, no_cfunc_wrapper=True, no_cpython_wrapper=True)
_woven = numba.njit(cache=True, inline="always")
"""Rare events are calls; what every request goes through is woven into the loop, since handing
the network's many arrays from function to function is what takes a compiler long."""

_MASK = 2**32 - 1
_HEADROOM = 64
"""Events that one turn of the loop may add beyond one for each live request."""


@_woven
def _code(kind: int, who: int, generation: int) -> int:
    return kind + 16 * (who + (generation << 32))


@numba.njit(cache=True)
def start(rules: Rules, net: Network, rng: np.random.Generator) -> None:
    """Put the first telemetry tick, failures and catalogue epoch on the event list."""
    heap, nodes = net.heap, net.nodes
    rebuild(nodes)
    if rules.advertised or rules.close_at > 0:
        push(heap, rules.period, TICK, 0.0)
    if rules.mean_uptime > 0:
        for n in range(nodes.number.shape[0]):
            push(heap, rng.standard_exponential() * rules.mean_uptime, _code(FAILURE, n, 0), 0.0)
    if rules.epoch > 0:
        push(heap, rules.epoch, EPOCH, 0.0)


@numba.njit(cache=True)
def advance(
    rules: Rules,
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
    heap, slots, counters = net.heap, net.slots, net.counters
    total = chunk.time.shape[0]
    while True:
        if done == total:
            if not last:
                return NEXT_CHUNK, done
            if counters.number[LIVE] == 0:
                return DONE, done
        # One event can end, or move, as many requests as a node holds.
        live, room = counters.number[LIVE], net.records.number.shape[0]
        if slots.left[0] == 0 or heap.size[0] + live + _HEADROOM > heap.time.shape[0]:
            return MORE_ROOM, done
        if counters.number[RECORDS] + live + 1 > room:
            return FLUSH if counters.number[RECORDS] > room // 4 else MORE_ROOM, done
        # What an event leaves to do: route request ``i``, end it, or start who waits at a node.
        i, node, route, ending = -1, -1, False, -1
        if done < total and (heap.size[0] == 0 or chunk.time[done] < heap.time[0]):
            now = chunk.time[done]
            _pass_time(net, now)
            i, route = _send(rules, net, chunk, done, now), True
            done += 1
        else:
            now, code, value = heap.time[0], heap.code[0], heap.value[0]
            drop_first(heap)
            _pass_time(net, now)
            counters.number[EVENTS] += 1
            kind = code & 15
            who = (code >> 4) & _MASK
            generation = code >> 36
            if kind == AT_THE_NODE:
                node = _arrive(rules, net, who, now)
            elif kind == COMPLETION:
                if slots.number[who, GENERATION] == generation:
                    i, ending, node = who, COMPLETED, slots.number[who, NODE]
                    _count_busy(net.nodes, node, now)
                    net.nodes.number[node, BUSY] -= 1
            elif kind == FIRST_TOKEN:
                if net.nodes.number[who, ALIVE] == 1:
                    observe(net.telemetry, who, now, value, rules.window)
            elif kind == LOST:
                if slots.number[who, GENERATION] == generation:
                    i = who
                    route = value == 0 and _may_retry(rules, net, who)
                    ending = -1 if route else FAILED
            elif kind == TICK:
                _tick(rules, net, now)
            elif kind == ADVERTISED:
                _learn(rules, net, who)
            elif kind == FAILURE:
                _fail(rules, net, who, now, rng)
            elif kind == RECOVERY:
                _recover(rules, net, who, now, rng)
            elif kind == NOTICED:
                net.nodes.number[who, TRUSTED] = int(value)
                rebuild(net.nodes)
            elif kind == EPOCH:
                _epoch(rules, net, now)
            else:
                net.nodes.number[who, LOADED] = 1
        if route and not _route(rules, net, plane, radio, i, now, near, far):
            ending = REJECTED if slots.number[i, ATTEMPTS] == 0 else FAILED
        if ending >= 0:
            _end(rules, net, i, ending)
        if node >= 0:
            _serve_waiting(rules, net, node, now)


# --- The router -----------------------------------------------------------------------------


@_woven
def _pass_time(net: Network, now: float) -> None:
    if now < net.counters.real[NOW]:
        net.counters.real[BACK_IN_TIME] += 1
    net.counters.real[NOW] = now


@_woven
def _send(rules: Rules, net: Network, chunk: Chunk, k: int, now: float) -> int:
    """Give the chunk's request ``k`` a slot."""
    slots, counters = net.slots, net.counters
    if chunk.place[k] == 0:
        _count_seconds(net.nodes, counters, now)
        counters.number[COUNTING] = 1
    slots.left[0] -= 1
    i = slots.spare[slots.left[0]]
    slots.number[i, PLACE] = chunk.place[k]
    slots.number[i, ROW] = chunk.row[k]
    slots.number[i, KIND] = chunk.kind[k]
    slots.number[i, ATTEMPTS] = 0
    slots.number[i, STATE] = RETRYING
    slots.real[i, INTENDED] = now
    slots.real[i, WORK] = chunk.work[k]
    slots.real[i, CHANCE] = chunk.chance[k]
    for j in range(slots.tried.shape[1]):
        slots.tried[i, j] = -1
    if rules.palm:
        for s in range(slots.radius.shape[1]):
            slots.radius[i, s] = chunk.radius[k, s]
            slots.turn[i, s] = chunk.turn[k, s]
    else:
        slots.real[i, X] = chunk.position[k, 0]
        slots.real[i, Y] = chunk.position[k, 1]
    counters.number[LIVE] += 1
    return i


@_woven
def _route(
    rules: Rules,
    net: Network,
    plane: Plane,
    radio: RadioTable,
    i: int,
    now: float,
    near: np.ndarray,
    far: np.ndarray,
) -> bool:
    """Send slot ``i`` to the candidate of least cost (Theory C1, G1-G3); False if there is none."""
    nodes, slots = net.nodes, net.slots
    if rules.palm:
        _draw_of_each(nodes, slots, i, near, far)
    else:
        nearest_of_each(
            plane,
            slots.real[i, X],
            slots.real[i, Y],
            nodes.mark,
            nodes.tier_count,
            slots.tried[i],
            near,
            far,
        )
    row, kind = slots.number[i, ROW], slots.number[i, KIND]
    best, best_cost, best_distance = -1, math.inf, 0.0
    for s in range(near.shape[0]):
        if nodes.closed[s] and s != rules.fallback:
            continue
        fixed = rules.prefill_weight * rules.prefill[row, s]
        if rules.wait_weight > 0 and not rules.advertised:
            fixed += rules.wait_weight * rules.wait[kind, s]
        for j in range(near.shape[1]):
            n = near[s, j]
            if n < 0:
                break
            cost = fixed + mean_delay(radio, far[s, j])
            if rules.advertised and rules.wait_weight > 0:
                told = net.telemetry.seen[n, 0] + rules.margin * net.telemetry.seen[n, 1]
                cost += rules.wait_weight * told
            if cost < best_cost:
                best, best_cost, best_distance = n, cost, far[s, j]
    if best < 0:
        return False
    slots.number[i, NODE] = best
    slots.number[i, STATE] = UNDER_WAY
    slots.real[i, DISTANCE] = best_distance
    delay = drawn_delay(radio, best_distance, slots.real[i, CHANCE])
    push(net.heap, now + delay, _code(AT_THE_NODE, i, 0), 0.0)
    return True


@_woven
def _draw_of_each(nodes: Nodes, slots: Slots, i: int, near: np.ndarray, far: np.ndarray) -> None:
    """Palm: the nearest node of each profile is any of them, at the distance drawn (F4)."""
    for s in range(near.shape[0]):
        near[s, 0] = -1
        count = nodes.tier_count[s]
        at = int(slots.turn[i, s] * count)
        for step in range(count):
            n = nodes.tier_members[s, (at + step) % count]
            known = False
            for j in range(slots.tried.shape[1]):
                known = known or slots.tried[i, j] == n
            if not known:
                near[s, 0] = n
                far[s, 0] = slots.radius[i, s]
                break


@_called
def rebuild(nodes: Nodes) -> None:
    """Candidates by tier, after the catalogue or the router's trust has changed."""
    for s in range(nodes.tier_count.shape[0]):
        nodes.tier_count[s] = 0
    for n in range(nodes.number.shape[0]):
        s = nodes.number[n, LISTED] if nodes.number[n, TRUSTED] == 1 else -1
        nodes.mark[n] = s
        if s >= 0:
            nodes.tier_members[s, nodes.tier_count[s]] = n
            nodes.tier_count[s] += 1


# --- A node ---------------------------------------------------------------------------------


@_woven
def _arrive(rules: Rules, net: Network, i: int, now: float) -> int:
    """Join the queue; the node, or -1 where it is dead."""
    nodes, slots = net.nodes, net.slots
    n = slots.number[i, NODE]
    if nodes.number[n, ALIVE] == 0:
        _lose(rules, net, i, now, 0.0)
        return -1
    row, s = slots.number[i, ROW], nodes.number[n, ASSIGNED]
    loaded = nodes.number[n, LOADED] == 1
    prefill = rules.prefill[row, s] if loaded else rules.full[row]
    occupancy = prefill + rules.decode[row]
    if rules.by_tier:
        nodes.tier_work[s, 0] += occupancy
        nodes.tier_work[s, 1] += 1
        occupancy = nodes.tier_work[s, 0] / nodes.tier_work[s, 1]
    slots.real[i, AT_NODE] = now
    slots.real[i, PREFILL] = prefill
    slots.real[i, OCCUPANCY] = occupancy * slots.real[i, WORK]
    slots.real[i, REUSED] = rules.reuse[row, s] if loaded else 0.0
    slots.number[i, PROFILE] = s
    slots.number[i, STATE] = WAITING
    slots.number[i, NEXT] = -1
    if nodes.number[n, HEAD] < 0:
        nodes.number[n, HEAD] = i
    else:
        slots.number[nodes.number[n, TAIL], NEXT] = i
    nodes.number[n, TAIL] = i
    return n


@_woven
def _serve_waiting(rules: Rules, net: Network, n: int, now: float) -> None:
    """Start requests of node ``n``, first come first served, while it has a free server."""
    number, slots, heap = net.nodes.number, net.slots, net.heap
    servers = rules.concurrency[number[n, ASSIGNED]]
    while number[n, HEAD] >= 0 and number[n, BUSY] < servers:
        i = number[n, HEAD]
        number[n, HEAD] = slots.number[i, NEXT]
        _count_busy(net.nodes, n, now)
        number[n, BUSY] += 1
        slots.number[i, STATE] = RUNNING
        slots.real[i, STARTED] = now
        code = _code(COMPLETION, i, slots.number[i, GENERATION])
        push(heap, now + slots.real[i, OCCUPANCY], code, 0.0)
        if rules.advertised:
            first = now + slots.real[i, PREFILL]
            push(heap, first, _code(FIRST_TOKEN, n, 0), now - slots.real[i, AT_NODE])


@_woven
def _count_busy(nodes: Nodes, n: int, now: float) -> None:
    since = now - nodes.real[n, COUNTED_UNTIL]
    nodes.real[n, BUSY_SECONDS] += nodes.number[n, BUSY] * since
    nodes.real[n, COUNTED_UNTIL] = now


@_woven
def _end(rules: Rules, net: Network, i: int, ending: int) -> None:
    """Write down how a request ended and free its slot."""
    slots, counters, nodes = net.slots, net.counters, net.nodes
    if slots.number[i, PLACE] >= 0:
        r = counters.number[RECORDS]
        counters.number[RECORDS] = r + 1
        out, figures = net.records.number, net.records.real
        out[r, R_PLACE] = slots.number[i, PLACE]
        out[r, R_KIND] = slots.number[i, KIND]
        out[r, R_ENDING] = ending
        if ending == COMPLETED:
            n, full = slots.number[i, NODE], rules.full[slots.number[i, ROW]]
            out[r, R_NODE] = n
            out[r, R_PROFILE] = slots.number[i, PROFILE]
            first = slots.real[i, STARTED] + slots.real[i, PREFILL]
            figures[r, R_TTFT] = first - slots.real[i, INTENDED]
            figures[r, R_WAIT] = slots.real[i, STARTED] - slots.real[i, AT_NODE]
            figures[r, R_OCCUPANCY] = slots.real[i, OCCUPANCY]
            figures[r, R_DISTANCE] = slots.real[i, DISTANCE]
            figures[r, R_FULL] = full
            figures[r, R_SAVED] = full - slots.real[i, PREFILL]
            figures[r, R_REUSED] = slots.real[i, REUSED]
            nodes.real[n, WORK_DONE] += slots.real[i, OCCUPANCY]
            nodes.real[n, SERVED] += 1
    slots.number[i, STATE] = FREE
    slots.number[i, GENERATION] += 1
    slots.spare[slots.left[0]] = i
    slots.left[0] += 1
    counters.number[LIVE] -= 1


# --- Telemetry ------------------------------------------------------------------------------


@_woven
def observe(telemetry: Telemetry, n: int, now: float, wait: float, window: float) -> None:
    """Node ``n`` learns of a wait: :class:`testbed.routing.telemetry.AdvertisedWait`, compiled."""
    kept = telemetry.kept
    passed = now - kept[n, 2] if kept[n, 2] >= 0 else 0.0
    weight = -math.expm1(-passed / window)
    kept[n, 0] += weight * (wait - kept[n, 0])
    kept[n, 1] += weight * (wait * wait - kept[n, 1])
    kept[n, 2] = now


@_called
def _tick(rules: Rules, net: Network, now: float) -> None:
    """Every node sends its wait, an empty one after observing that nobody would wait."""
    nodes, counters, telemetry = net.nodes, net.counters, net.telemetry
    sent, load = telemetry.sent, telemetry.load
    tick = counters.number[TICKS]
    snapshot = tick % sent.shape[0]
    tiers = load.shape[0]
    busy, servers = np.zeros(tiers), np.zeros(tiers)
    for n in range(nodes.number.shape[0]):
        _count_busy(nodes, n, now)
        alive = nodes.number[n, ALIVE] == 1
        if alive and nodes.number[n, BUSY] == 0 and nodes.number[n, HEAD] < 0:
            observe(telemetry, n, now, 0.0, rules.window)
        mean = telemetry.kept[n, 0]
        sent[snapshot, n, 0] = mean
        sent[snapshot, n, 1] = math.sqrt(max(0.0, telemetry.kept[n, 1] - mean * mean))
        if alive:
            s = nodes.number[n, ASSIGNED]
            busy[s] += nodes.real[n, BUSY_SECONDS]
            servers[s] += rules.concurrency[s] * rules.period
        nodes.real[n, BUSY_SECONDS] = 0.0
    weight = -math.expm1(-rules.period / rules.window)
    for s in range(tiers):
        now_busy = busy[s] / servers[s] if servers[s] > 0 else 0.0
        load[s] += weight * (now_busy - load[s])
        telemetry.sent_load[snapshot, s] = load[s]
    counters.number[TICKS] = tick + 1
    push(net.heap, now + rules.delay, _code(ADVERTISED, snapshot, 0), 0.0)
    push(net.heap, now + rules.period, TICK, 0.0)


@numba.njit(cache=True)
def _learn(rules: Rules, net: Network, snapshot: int) -> None:
    """A snapshot reaches the router: advertised waits, and admission's hysteresis (G3)."""
    seen, sent, closed = net.telemetry.seen, net.telemetry.sent, net.nodes.closed
    for n in range(seen.shape[0]):
        seen[n, 0] = sent[snapshot, n, 0]
        seen[n, 1] = sent[snapshot, n, 1]
    for s in range(closed.shape[0]):
        load = net.telemetry.sent_load[snapshot, s]
        if rules.close_at > 0 and load >= rules.close_at:
            closed[s] = True
        elif load <= rules.reopen_at:
            closed[s] = False


# --- Failures -------------------------------------------------------------------------------


@_called
def _fail(rules: Rules, net: Network, n: int, now: float, rng: np.random.Generator) -> None:
    nodes, slots, counters = net.nodes, net.slots, net.counters
    _count_seconds(nodes, counters, now)
    _count_busy(nodes, n, now)
    nodes.alive[nodes.number[n, ASSIGNED]] -= 1
    counters.number[FAILURES] += 1
    nodes.number[n, ALIVE] = 0
    nodes.number[n, BUSY] = 0
    nodes.number[n, HEAD] = -1
    down = rng.standard_exponential() * rules.mean_downtime
    push(net.heap, now + down, _code(RECOVERY, n, 0), 0.0)
    push(net.heap, now + rules.detection, _code(NOTICED, n, 0), 0.0)
    for i in range(slots.number.shape[0]):
        state = slots.number[i, STATE]
        if slots.number[i, NODE] == n and state in (WAITING, RUNNING):
            # Whose first token is out has the beginning of an answer, and loses the rest of it.
            begun = state == RUNNING and now >= slots.real[i, STARTED] + slots.real[i, PREFILL]
            slots.number[i, GENERATION] += 1
            _lose(rules, net, i, now, 1.0 if begun else 0.0)


@_woven
def _lose(rules: Rules, net: Network, i: int, now: float, begun: float) -> None:
    slots = net.slots
    slots.number[i, STATE] = RETRYING
    code = _code(LOST, i, slots.number[i, GENERATION])
    push(net.heap, now + rules.detection, code, begun)


@_woven
def _may_retry(rules: Rules, net: Network, i: int) -> bool:
    """Note the node that was lost; False where the request has used up its attempts."""
    number = net.slots.number
    net.slots.tried[i, number[i, ATTEMPTS]] = number[i, NODE]
    number[i, ATTEMPTS] += 1
    return number[i, ATTEMPTS] < rules.attempts


@_woven
def _recover(rules: Rules, net: Network, n: int, now: float, rng: np.random.Generator) -> None:
    """A node is back, its profile pinned again."""
    nodes = net.nodes
    _count_seconds(nodes, net.counters, now)
    _count_busy(nodes, n, now)
    nodes.number[n, ALIVE] = 1
    nodes.number[n, LOADED] = 1
    nodes.alive[nodes.number[n, ASSIGNED]] += 1
    up = rng.standard_exponential() * rules.mean_uptime
    push(net.heap, now + up, _code(FAILURE, n, 0), 0.0)
    push(net.heap, now + rules.detection, _code(NOTICED, n, 0), 1.0)


# --- Placement ------------------------------------------------------------------------------


@_called
def _epoch(rules: Rules, net: Network, now: float) -> None:
    """Publish the catalogue, then move profiles towards the target within the budget (G4)."""
    nodes, counters = net.nodes, net.counters
    nodes.number[:, LISTED] = nodes.number[:, ASSIGNED]
    rebuild(nodes)
    push(net.heap, now + rules.epoch, EPOCH, 0.0)
    if rules.target.shape[0] == 0:
        return
    _count_seconds(nodes, counters, now)
    excess = -rules.target.copy()
    for n in range(nodes.number.shape[0]):
        excess[nodes.number[n, ASSIGNED]] += 1
    left = rules.budget
    while True:
        best, source, goal = math.inf, -1, -1
        for s in range(excess.shape[0]):
            for t in range(excess.shape[0]):
                if excess[s] > 0 and excess[t] < 0 and rules.move_bytes[s, t] < best:
                    best, source, goal = rules.move_bytes[s, t], s, t
        if source < 0 or best > left:
            return
        mover = -1
        for n in range(nodes.number.shape[0]):
            number = nodes.number[n]
            if number[ASSIGNED] == source and number[ALIVE] == 1 and number[LOADED] == 1:
                mover = n
                break
        if mover < 0:
            return
        nodes.number[mover, ASSIGNED] = goal
        nodes.alive[source] -= 1
        nodes.alive[goal] += 1
        excess[source] -= 1
        excess[goal] += 1
        left -= best
        counters.number[MOVES] += 1
        counters.real[BYTES_MOVED] += best
        if rules.load_rate > 0 and best > 0:
            nodes.number[mover, LOADED] = 0
            code = _code(LOADED_STATE, mover, 0)
            push(net.heap, now + best / rules.load_rate, code, 0.0)


@_woven
def _count_seconds(nodes: Nodes, counters: Counters, now: float) -> None:
    """Node-seconds of each tier while measured requests are being sent."""
    tiers = nodes.alive.shape[0]
    if counters.number[COUNTING] == 1:
        for s in range(tiers):
            nodes.seconds[s] += nodes.alive[s] * (now - nodes.seconds[tiers])
    nodes.seconds[tiers] = now


@numba.njit(cache=True)
def stop_counting(net: Network, now: float) -> None:
    """The last measured request has been sent."""
    _count_seconds(net.nodes, net.counters, now)
    net.counters.number[COUNTING] = 0
