"""What vLLM's V1 scheduler puts into a step (read from vLLM 0.32, first come first served).

Running requests first, in order of admission: one token, or the rest of a prompt, each within
what is left of the token budget. Then waiting ones, a preempted one before all others; a prompt is
cut where the budget ends. A request is admitted only when a sequence slot is free and the pool
could hold all tokens known of it beyond what it finds in the prefix cache. When a running request
needs a block and none is free, the last admitted one is preempted, and nobody is admitted in that
step. A prompt's blocks are in the prefix cache as soon as they are scheduled.
"""

from __future__ import annotations

import numba
import numpy as np

from testbed.simulation.engine_model_pool import FREE, take, touch
from testbed.simulation.engine_model_state import (
    ARRIVAL,
    BATCH,
    BLOCK_SIZE,
    BLOCKED,
    BLOCKS,
    BUDGET,
    CACHED_TOKENS,
    CACHING,
    COMPUTED,
    DONE,
    ENDS,
    FINISHED,
    FIRST,
    FLYING,
    FOLLOWING,
    FORMED,
    HASH_COUNT,
    HASHED,
    HEAD,
    INPUT,
    KNOWN,
    LAST_END,
    MAX_SEQUENCES,
    NOBODY,
    NOW,
    OLDEST,
    ORDER,
    OUTPUT,
    PAGED,
    PREEMPTED,
    PREFILLING,
    PROMPT_END,
    RESIDENT,
    REUSABLE,
    RUNNING,
    SCHEDULED,
    SCHEDULER,
    SPARE,
    SPARES,
    STACK,
    STEPS,
    TAIL,
    TOTAL,
    UNDER_WAY,
    UNSEEN,
    WAITING,
    WAITING_TOKENS,
    admit,
    hits,
    note_contents,
    preempt,
    prepare,
    push,
    take_in,
)
from testbed.step_time import decode_line, step_seconds


@numba.njit(cache=True)
def form_vllm(
    state: np.ndarray,
    clock: np.ndarray,
    step_time: np.ndarray,
    slots: np.ndarray,
    lists: np.ndarray,
    rows: np.ndarray,
    links: np.ndarray,
    content: np.ndarray,
    table: np.ndarray,
    counts: np.ndarray,
    times: np.ndarray,
    facts: np.ndarray,
    contents: np.ndarray,
    sums: np.ndarray,
) -> bool:
    """Form the next step at this boundary; False when there is nothing to do.

    ``sums`` (7,) receives what the step is made of: prefills, Σn, Σn², Σn·h, decodes, Σcontext,
    preemptions.
    """
    size = state[BLOCK_SIZE]
    paged = state[PAGED] != 0
    caching = state[CACHING] != 0
    batch = BATCH + (state[OLDEST] ^ state[UNDER_WAY])
    budget = state[BUDGET]
    produced = 0
    prefills = 0
    new_tokens = 0.0
    new_squared = 0.0
    new_context = 0.0
    decodes = 0
    decode_context = 0.0
    preempted = 0

    i = 0
    while i < state[RUNNING] and budget > 0:
        slot = lists[ORDER, i]
        goal = slots[slot, KNOWN] + slots[slot, FLYING]
        if goal >= slots[slot, TOTAL]:
            i += 1
            continue
        before = slots[slot, COMPUTED]
        n = min(goal - before, budget)
        if paged:
            have = slots[slot, BLOCKS]
            resident = slots[slot, RESIDENT]
            # Most steps need no block; a product tells sooner than a quotient.
            if before + n > (have + resident) * size:
                need = (before + n + size - 1) // size - resident
                gone = False
                while need - have > counts[FREE]:
                    preempted += 1
                    victim = preempt(
                        state,
                        slots,
                        lists,
                        rows,
                        links,
                        content,
                        table,
                        counts,
                        facts,
                        contents,
                        state[RUNNING] - 1,
                        rows.shape[1],
                    )
                    if victim == slot:
                        gone = True
                        break
                if gone:
                    break
                take(links, content, table, counts, rows, slot, have, need)
                slots[slot, BLOCKS] = need
        slots[slot, COMPUTED] = before + n
        budget -= n
        if before >= slots[slot, PROMPT_END]:
            decodes += 1
            decode_context += before
        else:
            prefills += 1
            new_tokens += n
            new_squared += float(n) * n
            new_context += float(n) * before
            if before + n >= slots[slot, PROMPT_END]:
                state[PREFILLING] -= 1
        if caching and slots[slot, HASHED] < slots[slot, HASH_COUNT]:
            note_contents(state, slots, rows, links, content, table, counts, contents, slot)
        if before + n == goal:
            slots[slot, FLYING] += 1
            lists[batch, produced] = slot
            produced += 1
        i += 1

    if preempted == 0:
        state[BLOCKED] = 0
        while budget > 0:
            if state[RUNNING] >= state[MAX_SEQUENCES]:
                state[BLOCKED] = 1
                break
            if state[PREEMPTED] > 0:
                slot = lists[STACK, state[PREEMPTED] - 1]
            elif state[WAITING] > 0:
                slot = lists[SPARE, state[SPARES] - 1]
                prepare(state, slots, slot, facts, state[HEAD])
            else:
                break
            hit = slots[slot, RESIDENT]
            found = 0
            if paged:
                standing = 0
                if caching:
                    found, standing = hits(
                        state, slots, rows, links, content, table, contents, slot
                    )
                whole = (slots[slot, KNOWN] + size - 1) // size - hit - found
                if whole + standing > counts[FREE]:
                    state[BLOCKED] = 1
                    break
                for index in range(found):
                    touch(links, counts, np.int64(rows[slot, index]))
                hit += found
                slots[slot, HASHED] = hit
            if state[PREEMPTED] == 0:
                head = facts[state[HEAD], FOLLOWING]
                state[HEAD] = head
                if head == NOBODY:
                    state[TAIL] = NOBODY
            cached = hit * size
            admit(state, clock[NOW], slots, lists, times, facts, slot, cached)
            goal = slots[slot, KNOWN]
            n = min(goal - cached, budget)
            if paged:
                need = (cached + n + size - 1) // size - slots[slot, RESIDENT]
                take(links, content, table, counts, rows, slot, found, need)
                slots[slot, BLOCKS] = need
            slots[slot, COMPUTED] = cached + n
            budget -= n
            prefills += 1
            new_tokens += n
            new_squared += float(n) * n
            new_context += float(n) * cached
            if slots[slot, HASHED] < slots[slot, HASH_COUNT]:
                note_contents(state, slots, rows, links, content, table, counts, contents, slot)
            if cached + n == goal:
                state[PREFILLING] -= 1
                slots[slot, FLYING] = 1
                lists[batch, produced] = slot
                produced += 1

    sums[6] = preempted
    if prefills == 0 and decodes == 0:
        return False
    lists[batch, state[MAX_SEQUENCES]] = produced
    sums[0] = prefills
    sums[1] = new_tokens
    sums[2] = new_squared
    sums[3] = new_context
    sums[4] = decodes
    sums[5] = decode_context
    seconds = step_seconds(
        step_time, prefills, new_tokens, new_squared, new_context, decodes, decode_context
    )
    push(state, clock, seconds)
    return True


@numba.njit(cache=True)
def serve_prefills(
    state: np.ndarray,
    clock: np.ndarray,
    step_time: np.ndarray,
    times: np.ndarray,
    facts: np.ndarray,
    until: float,
) -> None:
    """Serve whole steps of prompts with one output each, without giving them slots.

    Called at a boundary while nothing runs and memory has no limit. Stops before a step in which
    a prompt would be cut or somebody would go on to decode, or that ends at ``until`` or later.
    """
    size = state[BLOCK_SIZE]
    while state[WAITING] > 0:
        budget = state[BUDGET]
        count = 0
        new_tokens = 0.0
        new_squared = 0.0
        new_context = 0.0
        request = state[HEAD]
        while request != state[UNSEEN] and budget > 0 and count < state[MAX_SEQUENCES]:
            resident = min(facts[request, REUSABLE], facts[request, INPUT] - 1)
            cached = resident // size * size
            n = facts[request, INPUT] - cached
            if facts[request, OUTPUT] != 1 or n > budget:
                return
            budget -= n
            count += 1
            new_tokens += n
            new_squared += float(n) * n
            new_context += float(n) * cached
            request = facts[request, FOLLOWING]
        now = clock[NOW]
        end = now + step_seconds(step_time, count, new_tokens, new_squared, new_context, 0, 0.0)
        if end >= until:
            return
        last = request
        request = state[HEAD]
        while request != last:
            resident = min(facts[request, REUSABLE], facts[request, INPUT] - 1)
            facts[request, CACHED_TOKENS] = resident // size * size
            times[request, SCHEDULED] = now
            times[request, FIRST] = end
            times[request, DONE] = end
            state[WAITING_TOKENS] -= facts[request, INPUT]
            following = facts[request, FOLLOWING]
            facts[request, FOLLOWING] = state[FINISHED]
            state[FINISHED] = request
            request = following
        state[HEAD] = last
        if last == NOBODY:
            state[TAIL] = NOBODY
        state[WAITING] -= count
        state[STEPS] += 1
        clock[NOW] = end
        clock[LAST_END] = end
        take_in(state, end, times, facts)


@numba.njit(cache=True)
def skip_decodes(
    state: np.ndarray,
    clock: np.ndarray,
    step_time: np.ndarray,
    slots: np.ndarray,
    lists: np.ndarray,
    rows: np.ndarray,
    links: np.ndarray,
    content: np.ndarray,
    table: np.ndarray,
    counts: np.ndarray,
    times: np.ndarray,
    contents: np.ndarray,
    until: float,
) -> None:
    """Take all steps at once that differ in nothing but context, up to ``until``.

    Called at a boundary where a step is to be formed, while every running request decodes and
    nobody can be admitted. In the steps taken nobody arrives, leaves or lacks a block; which
    block a sequence gets does not matter, only how many leave the front of the free queue. The
    step after them is formed at once where it is known to hold the same sequences: FORMED says.
    """
    running = state[RUNNING]
    flying = state[UNDER_WAY]
    size = state[BLOCK_SIZE]
    limit = until
    if state[UNSEEN] != NOBODY:
        limit = min(limit, times[state[UNSEEN], ARRIVAL])
    # Boundary 0 is now; the next one ends the step under way, if there is one.
    first = clock[NOW] if flying == 0 else clock[LAST_END]
    room = limit - first
    if room <= 0.0 or running > state[BUDGET]:
        return
    if flying == 1 and lists[BATCH + state[OLDEST], state[MAX_SEQUENCES]] != running:
        return
    least = np.int64(1) << 60
    context = 0
    for i in range(running):
        slot = lists[ORDER, i]
        if slots[slot, FLYING] != flying:
            return
        if state[BLOCKED] != 0 and slots[slot, HASHED] < slots[slot, HASH_COUNT]:
            return  # its outputs may be what the waiting one shares
        if slots[slot, KNOWN] == slots[slot, PROMPT_END]:
            return  # its first output is still under way
        least = min(least, slots[slot, TOTAL] - slots[slot, KNOWN])
        context += slots[slot, COMPUTED]
    steps = least - 1 - flying
    if steps < 2:
        return

    seconds, slope, valid = decode_line(step_time, running, float(context))
    # The step after which somebody leaves has the same sequences as those taken: it is formed
    # here as well, if nobody comes and nothing changes until it starts.
    one_more = state[SCHEDULER] == 0 and steps < valid
    steps = min(steps, valid)
    if steps * (seconds + 0.5 * slope * (steps - 1)) >= room:
        # The fewest steps m whose total m·seconds + slope·m(m−1)/2 fills the room.
        if slope > 0.0:
            half = seconds - 0.5 * slope
            m = (np.sqrt(half * half + 2.0 * slope * room) - half) / slope
        elif seconds > 0.0:
            m = room / seconds
        else:
            m = float(steps)
        enough = np.int64(m)
        while enough * (seconds + 0.5 * slope * (enough - 1)) < room:
            enough += 1
        # A step formed under way ends one step later.
        steps = min(steps, enough + flying)
        one_more = False
    if steps < 2:
        return

    paged = state[PAGED] != 0
    if paged:
        free = counts[FREE]
        if running * ((steps + size) // size) > free:
            one_more = False
            low, high = np.int64(0), steps
            while low < high:
                middle = (low + high + 1) // 2
                need = 0
                for i in range(running):
                    slot = lists[ORDER, i]
                    whole = (slots[slot, COMPUTED] + middle + size - 1) // size
                    need += whole - slots[slot, RESIDENT] - slots[slot, BLOCKS]
                if need <= free:
                    low = middle
                else:
                    high = middle - 1
            steps = low
            if steps < 2:
                return
    batch = BATCH + (state[OLDEST] ^ flying)
    formed = np.int64(one_more)
    for i in range(running):
        slot = lists[ORDER, i]
        lists[batch, i] = slot
        slots[slot, KNOWN] += steps
        computed = slots[slot, COMPUTED] + steps + formed
        slots[slot, COMPUTED] = computed
        if paged:
            have = slots[slot, BLOCKS]
            resident = slots[slot, RESIDENT]
            if computed > (have + resident) * size:
                need = (computed + size - 1) // size - resident
                take(links, content, table, counts, rows, slot, have, need)
                slots[slot, BLOCKS] = need
            if slots[slot, HASHED] < slots[slot, HASH_COUNT]:
                note_contents(state, slots, rows, links, content, table, counts, contents, slot)
        slots[slot, FLYING] += formed
    state[STEPS] += steps
    last = seconds + slope * (steps - 1)
    total = steps * (seconds + 0.5 * slope * (steps - 1))
    if flying == 0:
        clock[NOW] = first + total
        clock[LAST_END] = clock[NOW]
    else:
        clock[NOW] = first + (total - last)
        clock[LAST_END] = clock[NOW] + last
        clock[ENDS + state[OLDEST]] = clock[LAST_END]
    if one_more:
        lists[batch, state[MAX_SEQUENCES]] = running
        push(state, clock, seconds + slope * steps)
        state[FORMED] = 1
