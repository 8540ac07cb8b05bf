"""What a scheduler in the manner of SGLang puts into a step (read from SGLang 0.5.23).

A step is a prefill or a decode, never both, and a prefill goes first. A prompt that was cut goes
on before others; then waiting requests, the longest prefix in the cache first (first come first
served when more than 128 wait), those last that share an uncached prefix with one before them. A
request is admitted when the pool holds its prompt and the outputs that it and all running ones
may still generate, so that decodes seldom lack a block; when they do, those with the fewest
outputs are retracted. A prompt's blocks are in the radix cache once its step has ended.
"""

from __future__ import annotations

import numba
import numpy as np

from testbed.simulation.engine_model_pool import FREE, take, touch
from testbed.simulation.engine_model_state import (
    BATCH,
    BLOCK_SIZE,
    BLOCKED,
    BLOCKS,
    BUDGET,
    CACHING,
    COMPUTED,
    COUNT,
    FLYING,
    FOLLOWING,
    HASH_COUNT,
    HASHED,
    HEAD,
    INPUT,
    KNOWN,
    MAX_SEQUENCES,
    NOBODY,
    NOW,
    OLDEST,
    ORDER,
    PAGED,
    PREEMPTED,
    PREFILLING,
    PROMPT_END,
    REQUEST,
    RESERVED,
    RESIDENT,
    RUNNING,
    SPARE,
    SPARES,
    STACK,
    START,
    TAIL,
    TOTAL,
    UNDER_WAY,
    UNSEEN,
    WAITING,
    admit,
    hits,
    note_contents,
    preempt,
    prepare,
    push,
)
from testbed.step_time import step_seconds

LONGEST_SORTED = 128
"""Waiting requests up to which they are sorted by their prefix."""
SHARED_TOKENS = 32
"""A prefix shared with a waiting request counts beyond this many tokens."""
MOST_RESERVED = 4096
"""Outputs reserved for one request at most."""


@numba.njit(cache=True)
def _candidates(
    state: np.ndarray,
    slots: np.ndarray,
    lists: np.ndarray,
    rows: np.ndarray,
    links: np.ndarray,
    content: np.ndarray,
    table: np.ndarray,
    facts: np.ndarray,
    contents: np.ndarray,
) -> np.ndarray:
    """Waiting requests in the order to admit them: a request's number, or −2 − slot of a
    retracted one."""
    waiting = state[WAITING] + state[PREEMPTED]
    order = np.empty(waiting, dtype=np.int64)
    count = 0
    request = state[HEAD]
    while request != state[UNSEEN]:
        order[count] = request
        count += 1
        request = facts[request, FOLLOWING]
    for i in range(state[PREEMPTED]):
        order[count] = -2 - lists[STACK, i]
        count += 1
    if state[CACHING] == 0 or waiting > LONGEST_SORTED or waiting < 2:
        return order
    size = state[BLOCK_SIZE]
    matched = np.empty(waiting, dtype=np.int64)
    spare = lists[SPARE, state[SPARES] - 1] if state[SPARES] > 0 else np.int64(NOBODY)
    probe = SHARED_TOKENS // size
    for i in range(waiting):
        if order[i] >= 0 and spare == NOBODY:
            matched[i] = 0
            continue
        if order[i] >= 0:
            slot = spare
            prepare(state, slots, slot, facts, order[i])
        else:
            slot = -2 - order[i]
        found, _ = hits(state, slots, rows, links, content, table, contents, slot)
        matched[i] = (found + slots[slot, RESIDENT]) * size
        if matched[i] > SHARED_TOKENS or order[i] < 0 or facts[order[i], COUNT] <= probe:
            continue
        key = contents[facts[order[i], START] + probe]
        for j in range(i):
            other = order[j]
            if (
                other >= 0
                and matched[j] >= 0
                and facts[other, COUNT] > probe
                and contents[facts[other, START] + probe] == key
            ):
                matched[i] = -1  # behind everybody: the other one brings the prefix
                break
    # Insertion keeps equals in order of arrival and compiles in no time.
    for i in range(1, waiting):
        who, length = order[i], matched[i]
        j = i - 1
        while j >= 0 and matched[j] < length:
            order[j + 1], matched[j + 1] = order[j], matched[j]
            j -= 1
        order[j + 1], matched[j + 1] = who, length
    return order


@numba.njit(cache=True)
def _leave_queue(state: np.ndarray, facts: np.ndarray, request: int) -> None:
    """Take a waiting request out of the list, wherever it stands."""
    after = facts[request, FOLLOWING]
    if state[HEAD] == request:
        state[HEAD] = after
        if after == NOBODY:
            state[TAIL] = NOBODY
        return
    before = state[HEAD]
    while facts[before, FOLLOWING] != request:
        before = facts[before, FOLLOWING]
    facts[before, FOLLOWING] = after
    if after == NOBODY:
        state[TAIL] = before


@numba.njit(cache=True)
def form_sglang(
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
    """Form the next step at this boundary; False when there is nothing to do (see
    ``form_vllm``)."""
    size = state[BLOCK_SIZE]
    paged = state[PAGED] != 0
    batch = BATCH + (state[OLDEST] ^ state[UNDER_WAY])
    chunk = state[BUDGET]
    produced = 0
    prefills = 0
    new_tokens = 0.0
    new_squared = 0.0
    new_context = 0.0
    preempted = 0
    ratio = clock[RESERVED]

    # What running requests may still need, and the prompt that was cut.
    promised = 0.0
    cut = np.int64(NOBODY)
    for i in range(state[RUNNING]):
        slot = lists[ORDER, i]
        if state[CACHING] != 0 and slots[slot, HASHED] < slots[slot, HASH_COUNT]:
            note_contents(state, slots, rows, links, content, table, counts, contents, slot)
        if slots[slot, COMPUTED] < slots[slot, PROMPT_END]:
            cut = slot
        else:
            left = slots[slot, TOTAL] - slots[slot, KNOWN] - slots[slot, FLYING]
            promised += min(left, MOST_RESERVED) * ratio
    if cut != NOBODY:
        before = slots[cut, COMPUTED]
        n = min(slots[cut, PROMPT_END] - before, chunk)
        have = slots[cut, BLOCKS]
        if paged:
            room = (have + slots[cut, RESIDENT] + counts[FREE]) * size - before
            n = min(n, room)
            if n > 0:
                need = (before + n + size - 1) // size - slots[cut, RESIDENT]
                take(links, content, table, counts, rows, cut, have, need)
                slots[cut, BLOCKS] = max(have, need)
        if n > 0:
            slots[cut, COMPUTED] = before + n
            prefills += 1
            new_tokens += n
            new_squared += float(n) * n
            new_context += float(n) * before
            chunk -= (n + size - 1) // size * size
            if before + n == slots[cut, PROMPT_END]:
                state[PREFILLING] -= 1
                slots[cut, FLYING] = 1
                lists[batch, produced] = cut
                produced += 1
                left = slots[cut, TOTAL] - slots[cut, KNOWN]
                promised += min(left, MOST_RESERVED)

    if state[RUNNING] == 0:
        state[BLOCKED] = 0
    if state[BLOCKED] == 0 and chunk > 0 and state[WAITING] + state[PREEMPTED] > 0:
        order = _candidates(state, slots, lists, rows, links, content, table, facts, contents)
        for i in range(order.size):
            if chunk <= 0:
                break
            if state[RUNNING] >= state[MAX_SEQUENCES]:
                state[BLOCKED] = 1
                break
            if order[i] >= 0:
                if state[SPARES] == 0:
                    continue  # retracted ones hold every slot; they come first
                slot = lists[SPARE, state[SPARES] - 1]
                prepare(state, slots, slot, facts, order[i])
            else:
                slot = -2 - order[i]
            hit = slots[slot, RESIDENT]
            found = 0
            standing = 0
            if state[CACHING] != 0:
                found, standing = hits(state, slots, rows, links, content, table, contents, slot)
                hit += found
            cached = hit * size
            whole = slots[slot, KNOWN] - cached
            outputs = min(slots[slot, TOTAL] - slots[slot, KNOWN], MOST_RESERVED)
            if paged:
                # The prefix is locked while the rest is judged: it is no longer evictable.
                room = (counts[FREE] - standing) * size - promised
                if whole + outputs + size >= room:
                    state[BLOCKED] = 1 if state[RUNNING] > 0 else 0
                    break
            n = whole
            if (whole + size - 1) // size * size > chunk:
                n = chunk // size * size
                if n <= 0 or cut != NOBODY:
                    break
                outputs = 0
                cut = slot
            if order[i] >= 0:
                _leave_queue(state, facts, order[i])
            else:
                # ``admit`` wants it last of the stack.
                for j in range(state[PREEMPTED] - 1):
                    if lists[STACK, j] == slot:
                        lists[STACK, j] = lists[STACK, j + 1]
                        lists[STACK, j + 1] = slot
            if paged:
                for index in range(found):
                    touch(links, counts, np.int64(rows[slot, index]))
                need = (cached + n + size - 1) // size - slots[slot, RESIDENT]
                take(links, content, table, counts, rows, slot, found, need)
                slots[slot, BLOCKS] = need
                slots[slot, HASHED] = hit
            admit(state, clock[NOW], slots, lists, times, facts, slot, cached)
            slots[slot, COMPUTED] = cached + n
            prefills += 1
            new_tokens += n
            new_squared += float(n) * n
            new_context += float(n) * cached
            chunk -= (n + size - 1) // size * size
            promised += outputs + size
            if n == whole:
                state[PREFILLING] -= 1
                slots[slot, FLYING] = 1
                lists[batch, produced] = slot
                produced += 1

    decodes = 0
    decode_context = 0.0
    if prefills == 0:
        # Retract those with the fewest outputs, the longer prompt first, until a step fits.
        while paged:
            need = 0
            able = 0
            victim = np.int64(NOBODY)
            fewest = np.int64(0)
            longest = np.int64(0)
            for i in range(state[RUNNING]):
                slot = lists[ORDER, i]
                known = slots[slot, KNOWN] + slots[slot, FLYING]
                if slots[slot, COMPUTED] < slots[slot, PROMPT_END] or known >= slots[slot, TOTAL]:
                    continue
                able += 1
                blocks = (slots[slot, COMPUTED] + size) // size - slots[slot, RESIDENT]
                need += max(blocks - slots[slot, BLOCKS], 0)
                prompt = facts[slots[slot, REQUEST], INPUT]
                outputs = known - prompt
                if (
                    victim == NOBODY
                    or outputs < fewest
                    or (outputs == fewest and prompt >= longest)
                ):
                    victim, fewest, longest = np.int64(i), outputs, prompt
            if need <= counts[FREE] or able == 0 or (able == 1 and cut == NOBODY):
                break
            slot = lists[ORDER, victim]
            preempt(
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
                victim,
                facts[slots[slot, REQUEST], INPUT] // size,
            )
            preempted += 1
        for i in range(state[RUNNING]):
            slot = lists[ORDER, i]
            before = slots[slot, COMPUTED]
            if before < slots[slot, PROMPT_END]:
                continue
            if slots[slot, KNOWN] + slots[slot, FLYING] >= slots[slot, TOTAL]:
                continue
            if paged:
                have = slots[slot, BLOCKS]
                need = (before + size) // size - slots[slot, RESIDENT]
                if need - have > counts[FREE]:
                    continue  # those under way free theirs first
                if need > have:
                    take(links, content, table, counts, rows, slot, have, need)
                    slots[slot, BLOCKS] = need
            slots[slot, COMPUTED] = before + 1
            slots[slot, FLYING] += 1
            lists[batch, produced] = slot
            produced += 1
            decodes += 1
            decode_context += before

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
