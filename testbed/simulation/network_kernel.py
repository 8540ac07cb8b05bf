"""The event loop of a network of nodes, compiled.

A request is routed at the time it is sent, by what the router knows then; it travels its radio
delay, queues at its node first come first served, and holds one of the node's servers for its
occupancy. Its first token comes one prefill after it starts. Nodes advertise the mean of the
waits whose first token fell into a window, each period, and the router learns of it a delay
later. A node that dies loses what it holds; who was waiting there tries the next-best node once
the loss is noticed. Profiles move between nodes at catalogue epochs; a request routed by a stale
catalogue gets the reuse that its node really has.
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


@numba.njit(cache=True, inline="always")
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
        if done < total and (heap.size[0] == 0 or chunk.time[done] < heap.time[0]):
            _send(rules, net, plane, radio, chunk, done, near, far)
            done += 1
            continue
        now, code, value = heap.time[0], heap.code[0], heap.value[0]
        drop_first(heap)
        if now < counters.real[NOW]:
            counters.real[BACK_IN_TIME] += 1
        counters.real[NOW] = now
        counters.number[EVENTS] += 1
        kind = code & 15
        who = (code >> 4) & _MASK
        generation = code >> 36
        if kind == AT_THE_NODE:
            _arrive(rules, net, who, now)
        elif kind == COMPLETION:
            if slots.number[who, GENERATION] == generation:
                _complete(rules, net, who, now)
        elif kind == FIRST_TOKEN:
            _observe(net, who, value)
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
        elif kind == LOST:
            if slots.number[who, GENERATION] == generation:
                _retry(rules, net, plane, radio, who, now, near, far)
        elif kind == EPOCH:
            _epoch(rules, net, now)
        elif kind == LOADED_STATE:
            net.nodes.number[who, LOADED] = 1


# --- The router -----------------------------------------------------------------------------


@numba.njit(cache=True)
def _send(
    rules: Rules,
    net: Network,
    plane: Plane,
    radio: RadioTable,
    chunk: Chunk,
    k: int,
    near: np.ndarray,
    far: np.ndarray,
) -> None:
    slots, counters = net.slots, net.counters
    now = chunk.time[k]
    if now < counters.real[NOW]:
        counters.real[BACK_IN_TIME] += 1
    counters.real[NOW] = now
    if chunk.place[k] == 0:
        _count_seconds(net.nodes, counters, now)
        counters.number[COUNTING] = 1
    slots.left[0] -= 1
    i = slots.spare[slots.left[0]]
    number, real = slots.number[i], slots.real[i]
    number[PLACE], number[ROW], number[KIND] = chunk.place[k], chunk.row[k], chunk.kind[k]
    number[ATTEMPTS] = 0
    number[STATE] = RETRYING
    real[INTENDED] = now
    real[WORK], real[CHANCE] = chunk.work[k], chunk.chance[k]
    slots.tried[i, :] = -1
    if rules.palm:
        slots.radius[i] = chunk.radius[k]
        slots.turn[i] = chunk.turn[k]
    else:
        real[X], real[Y] = chunk.position[k, 0], chunk.position[k, 1]
    counters.number[LIVE] += 1
    if not _route(rules, net, plane, radio, i, now, near, far):
        _end(rules, net, i, REJECTED, now)


@numba.njit(cache=True)
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
        _draw_of_each(nodes, slots.tried[i], slots.radius[i], slots.turn[i], near, far)
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
                seen = net.telemetry.seen
                cost += rules.wait_weight * (seen[n, 0] + rules.margin * seen[n, 1])
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


@numba.njit(cache=True)
def _draw_of_each(
    nodes: Nodes,
    tried: np.ndarray,
    radius: np.ndarray,
    turn: np.ndarray,
    near: np.ndarray,
    far: np.ndarray,
) -> None:
    """Palm: the nearest node of each profile is any of them, at the distance drawn (F4)."""
    for s in range(near.shape[0]):
        near[s, 0] = -1
        count = nodes.tier_count[s]
        at = int(turn[s] * count)
        for step in range(count):
            n = nodes.tier_members[s, (at + step) % count]
            known = False
            for j in range(tried.shape[0]):
                known = known or tried[j] == n
            if not known:
                near[s, 0] = n
                far[s, 0] = radius[s]
                break


@numba.njit(cache=True)
def rebuild(nodes: Nodes) -> None:
    """Candidates by tier, after the catalogue or the router's trust has changed."""
    nodes.tier_count[:] = 0
    for n in range(nodes.number.shape[0]):
        s = nodes.number[n, LISTED] if nodes.number[n, TRUSTED] == 1 else -1
        nodes.mark[n] = s
        if s >= 0:
            nodes.tier_members[s, nodes.tier_count[s]] = n
            nodes.tier_count[s] += 1


# --- A node ---------------------------------------------------------------------------------


@numba.njit(cache=True)
def _arrive(rules: Rules, net: Network, i: int, now: float) -> None:
    nodes, slots = net.nodes, net.slots
    n = slots.number[i, NODE]
    if nodes.number[n, ALIVE] == 0:
        _lose(rules, net, i, now)
        return
    row, s = slots.number[i, ROW], nodes.number[n, ASSIGNED]
    loaded = nodes.number[n, LOADED] == 1
    prefill = rules.prefill[row, s] if loaded else rules.full[row]
    occupancy = prefill + rules.decode[row]
    if rules.by_tier:
        nodes.tier_work[s, 0] += occupancy
        nodes.tier_work[s, 1] += 1
        occupancy = nodes.tier_work[s, 0] / nodes.tier_work[s, 1]
    real = slots.real[i]
    real[AT_NODE], real[PREFILL] = now, prefill
    real[OCCUPANCY] = occupancy * real[WORK]
    real[REUSED] = rules.reuse[row, s] if loaded else 0.0
    slots.number[i, PROFILE] = s
    if nodes.number[n, HEAD] < 0 and nodes.number[n, BUSY] < rules.concurrency[s]:
        _begin(rules, net, n, i, now)
        return
    slots.number[i, STATE] = WAITING
    slots.number[i, NEXT] = -1
    if nodes.number[n, HEAD] < 0:
        nodes.number[n, HEAD] = i
    else:
        slots.number[nodes.number[n, TAIL], NEXT] = i
    nodes.number[n, TAIL] = i


@numba.njit(cache=True)
def _begin(rules: Rules, net: Network, n: int, i: int, now: float) -> None:
    slots, heap = net.slots, net.heap
    _count_busy(net.nodes, n, now)
    net.nodes.number[n, BUSY] += 1
    number, real = slots.number[i], slots.real[i]
    number[STATE] = RUNNING
    real[STARTED] = now
    push(heap, now + real[OCCUPANCY], _code(COMPLETION, i, number[GENERATION]), 0.0)
    if rules.advertised:
        push(heap, now + real[PREFILL], _code(FIRST_TOKEN, n, 0), now - real[AT_NODE])


@numba.njit(cache=True)
def _complete(rules: Rules, net: Network, i: int, now: float) -> None:
    n = net.slots.number[i, NODE]
    _count_busy(net.nodes, n, now)
    net.nodes.number[n, BUSY] -= 1
    _end(rules, net, i, COMPLETED, now)
    _serve_waiting(rules, net, n, now)


@numba.njit(cache=True)
def _serve_waiting(rules: Rules, net: Network, n: int, now: float) -> None:
    number = net.nodes.number[n]
    while number[HEAD] >= 0 and number[BUSY] < rules.concurrency[number[ASSIGNED]]:
        i = number[HEAD]
        number[HEAD] = net.slots.number[i, NEXT]
        _begin(rules, net, n, i, now)


@numba.njit(cache=True)
def _count_busy(nodes: Nodes, n: int, now: float) -> None:
    real = nodes.real[n]
    real[BUSY_SECONDS] += nodes.number[n, BUSY] * (now - real[COUNTED_UNTIL])
    real[COUNTED_UNTIL] = now


@numba.njit(cache=True)
def _end(rules: Rules, net: Network, i: int, ending: int, now: float) -> None:
    """Write down how a request ended and free its slot."""
    slots, counters, records, nodes = net.slots, net.counters, net.records, net.nodes
    number, real = slots.number[i], slots.real[i]
    if number[PLACE] >= 0:
        r = counters.number[RECORDS]
        counters.number[RECORDS] = r + 1
        n, row = number[NODE], number[ROW]
        out, figures = records.number[r], records.real[r]
        out[R_PLACE], out[R_KIND], out[R_ENDING] = number[PLACE], number[KIND], ending
        out[R_NODE] = n if ending == COMPLETED else -1
        if ending == COMPLETED:
            out[R_PROFILE] = number[PROFILE]
            figures[R_TTFT] = real[STARTED] + real[PREFILL] - real[INTENDED]
            figures[R_WAIT] = real[STARTED] - real[AT_NODE]
            figures[R_OCCUPANCY] = real[OCCUPANCY]
            figures[R_DISTANCE] = real[DISTANCE]
            figures[R_FULL] = rules.full[row]
            figures[R_SAVED] = rules.full[row] - real[PREFILL]
            figures[R_REUSED] = real[REUSED]
            nodes.real[n, WORK_DONE] += real[OCCUPANCY]
            nodes.real[n, SERVED] += 1
    number[STATE] = FREE
    number[GENERATION] += 1
    slots.spare[slots.left[0]] = i
    slots.left[0] += 1
    counters.number[LIVE] -= 1


# --- Telemetry ------------------------------------------------------------------------------


@numba.njit(cache=True)
def _observe(net: Network, n: int, wait: float) -> None:
    if net.nodes.number[n, ALIVE] == 0:
        return
    bucket = net.telemetry.bucket
    k = net.counters.number[TICKS] % bucket.shape[1]
    for store in (bucket[n, k], net.telemetry.total[n]):
        store[0] += 1
        store[1] += wait
        store[2] += wait * wait


@numba.njit(cache=True)
def _tick(rules: Rules, net: Network, now: float) -> None:
    """Close a period: every node sends its windowed wait, and the oldest bucket is emptied."""
    nodes, telemetry, counters = net.nodes, net.telemetry, net.counters
    buckets, snapshots = telemetry.bucket.shape[1], telemetry.sent.shape[0]
    tick = counters.number[TICKS]
    k, snapshot = tick % buckets, tick % snapshots
    after = (tick + 1) % buckets
    load, servers = telemetry.sent_load[snapshot], np.zeros(nodes.closed.shape[0])
    load[:] = 0.0
    covered = min(tick + 1, buckets) * rules.period
    for n in range(nodes.number.shape[0]):
        _count_busy(nodes, n, now)
        busy = nodes.real[n, BUSY_SECONDS]
        nodes.real[n, BUSY_SECONDS] = 0.0
        telemetry.bucket[n, k, 3] += busy
        total = telemetry.total[n]
        total[3] += busy
        sent = telemetry.sent[snapshot, n]
        if total[0] > 0:
            mean = total[1] / total[0]
            sent[0] = mean
            sent[1] = math.sqrt(max(0.0, total[2] / total[0] - mean * mean))
        else:
            # As a real node does: one that served nobody in its window has no queue to tell of.
            sent[:] = 0.0
        s = nodes.number[n, ASSIGNED]
        if nodes.number[n, ALIVE] == 1:
            load[s] += total[3]
            servers[s] += rules.concurrency[s] * covered
        total -= telemetry.bucket[n, after]
        telemetry.bucket[n, after, :] = 0.0
        if total[0] <= 0:
            total[:3] = 0.0
    for s in range(load.shape[0]):
        load[s] = load[s] / servers[s] if servers[s] > 0 else 0.0
    counters.number[TICKS] = tick + 1
    push(net.heap, now + rules.delay, _code(ADVERTISED, snapshot, 0), 0.0)
    push(net.heap, now + rules.period, TICK, 0.0)


@numba.njit(cache=True)
def _learn(rules: Rules, net: Network, snapshot: int) -> None:
    """A snapshot reaches the router: advertised waits, and admission's hysteresis (G3)."""
    net.telemetry.seen[:] = net.telemetry.sent[snapshot]
    if rules.close_at <= 0:
        return
    closed, load = net.nodes.closed, net.telemetry.sent_load[snapshot]
    for s in range(closed.shape[0]):
        if load[s] >= rules.close_at:
            closed[s] = True
        elif load[s] <= rules.reopen_at:
            closed[s] = False


# --- Failures -------------------------------------------------------------------------------


@numba.njit(cache=True)
def _fail(rules: Rules, net: Network, n: int, now: float, rng: np.random.Generator) -> None:
    nodes, slots, counters = net.nodes, net.slots, net.counters
    _count_seconds(nodes, counters, now)
    _count_busy(nodes, n, now)
    nodes.alive[nodes.number[n, ASSIGNED]] -= 1
    counters.number[FAILURES] += 1
    number = nodes.number[n]
    number[ALIVE], number[BUSY], number[HEAD] = 0, 0, -1
    down = rng.standard_exponential() * rules.mean_downtime
    push(net.heap, now + down, _code(RECOVERY, n, 0), 0.0)
    push(net.heap, now + rules.detection, _code(NOTICED, n, 0), 0.0)
    for i in range(slots.number.shape[0]):
        state = slots.number[i, STATE]
        if slots.number[i, NODE] == n and state in (WAITING, RUNNING):
            started = state == RUNNING and now >= slots.real[i, STARTED] + slots.real[i, PREFILL]
            if started:
                # Its user has the first tokens; the rest of the answer is gone.
                _end(rules, net, i, FAILED, now)
            else:
                slots.number[i, GENERATION] += 1
                _lose(rules, net, i, now)


@numba.njit(cache=True)
def _lose(rules: Rules, net: Network, i: int, now: float) -> None:
    slots = net.slots
    slots.number[i, STATE] = RETRYING
    code = _code(LOST, i, slots.number[i, GENERATION])
    push(net.heap, now + rules.detection, code, 0.0)


@numba.njit(cache=True)
def _retry(
    rules: Rules,
    net: Network,
    plane: Plane,
    radio: RadioTable,
    i: int,
    now: float,
    near: np.ndarray,
    far: np.ndarray,
) -> None:
    number = net.slots.number[i]
    net.slots.tried[i, number[ATTEMPTS]] = number[NODE]
    number[ATTEMPTS] += 1
    if number[ATTEMPTS] >= rules.attempts or not _route(
        rules, net, plane, radio, i, now, near, far
    ):
        _end(rules, net, i, FAILED, now)


@numba.njit(cache=True)
def _recover(rules: Rules, net: Network, n: int, now: float, rng: np.random.Generator) -> None:
    """A node is back, its profile pinned again."""
    nodes = net.nodes
    _count_seconds(nodes, net.counters, now)
    _count_busy(nodes, n, now)
    nodes.number[n, ALIVE] = nodes.number[n, LOADED] = 1
    nodes.alive[nodes.number[n, ASSIGNED]] += 1
    up = rng.standard_exponential() * rules.mean_uptime
    push(net.heap, now + up, _code(FAILURE, n, 0), 0.0)
    push(net.heap, now + rules.detection, _code(NOTICED, n, 0), 1.0)


# --- Placement ------------------------------------------------------------------------------


@numba.njit(cache=True)
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
        _serve_waiting(rules, net, mover, now)


@numba.njit(cache=True)
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
