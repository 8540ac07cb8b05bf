"""An engine that schedules ahead, as its step chain's tagged request meets it: compiled.

Such an engine forms a step while the one before it runs. Who arrives during a step can join the
second step after it: the next one is formed already, of what came in the step before. So batches
follow each other as in the chain, each of them a step later than there, and between the step in
which a request arrives and the first that can take it in runs one that was formed without it:
its prompts take slots and time, and whoever they leave waiting stands before the request.

Where nothing is left to form a step of (nobody decodes, waits or is cut), none is formed ahead:
the next one takes who came while the last one ran.

What is approximated: the two steps are a stretch of the chain, whose law is that of arrivals which
join the next step. Steps are told apart by class (:data:`CLASSES`), for how long they take and who
comes in them.
"""

from __future__ import annotations

import numba
import numpy as np

from testbed.theory.delay.step_chain_forward import move
from testbed.theory.delay.step_chain_tagged import arrival_kernel

CLASSES = 5
"""Steps without a prompt, and those with some by their seconds."""


@numba.njit(cache=True)
def step_shares(
    x: np.ndarray, occupied: np.ndarray, fits: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Share of steps with each batch, (c + 1, F, c + 1), whole and cut, for the law ``x``
    (V, F, L) when steps start."""
    states, kinds, levels = x.shape
    slots = fits.shape[0] - 1
    whole = np.zeros((slots + 1, kinds, slots + 1))
    cut = np.zeros((slots + 1, kinds, slots + 1))
    for v in range(states):
        n = occupied[v]
        for f in range(kinds):
            for q in range(levels):
                waiting = 1 if n == 0 and f == 0 and q == 0 else q
                j = min(waiting, slots - n)
                whole[n, f, j] += x[v, f, q] * fits[n, f, j]
                for i in range(j):
                    cut[n, f, i] += x[v, f, q] * (fits[n, f, i] - fits[n, f, i + 1])
    return whole, cut


def step_classes(
    shares_whole: np.ndarray,
    shares_cut: np.ndarray,
    whole: np.ndarray,
    share: np.ndarray,
    cut: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Class of each batch, (c + 1, F, c + 1), whole and cut; mean seconds of each, (CLASSES,).

    Class 0 is of batches without a prompt; edges between the others are even in the logarithm.
    """
    mean = whole[..., 0] * share + whole[..., 1] * (1.0 - share)
    seconds = np.array([mean, cut])
    shares = np.array([shares_whole, shares_cut])
    with_prompts = np.ones(seconds.shape, dtype=bool)
    with_prompts[0, :, :, 0] = False
    used = seconds[with_prompts & (shares > 0)]
    edges = np.geomspace(used.min(), used.max(), CLASSES)[1:-1]
    classes = np.where(with_prompts, 1 + np.searchsorted(edges, seconds), 0)
    weight = np.bincount(classes.ravel(), weights=shares.ravel(), minlength=CLASSES)
    total = np.bincount(classes.ravel(), weights=(shares * seconds).ravel(), minlength=CLASSES)
    means = np.divide(total, weight, out=np.zeros(CLASSES), where=weight > 0)
    return classes[0], classes[1], means


@numba.njit(cache=True)
def arrivals_in(
    whole: np.ndarray,
    cut: np.ndarray,
    class_whole: np.ndarray,
    class_cut: np.ndarray,
    for_whole: np.ndarray,
    for_cut: np.ndarray,
) -> np.ndarray:
    """Law of the arrivals in a step of each class, (CLASSES, K), from the shares of batches."""
    slots = whole.shape[0] - 1
    result = np.zeros((CLASSES, for_whole.shape[3]))
    for n in range(slots + 1):
        for f in range(whole.shape[1]):
            for j in range(slots - n + 1):
                result[class_whole[n, f, j]] += whole[n, f, j] * for_whole[n, f, j]
                result[class_cut[n, f, j]] += cut[n, f, j] * for_cut[n, f, j]
    for i in range(CLASSES):
        total = result[i].sum()
        if total > 0.0:
            result[i] /= total
        else:
            result[i, 0] = 1.0
    return result


@numba.njit(cache=True)
def _serve(
    x: np.ndarray,
    occupied: np.ndarray,
    joined: np.ndarray,
    fits: np.ndarray,
    left: np.ndarray,
    class_whole: np.ndarray,
    class_cut: np.ndarray,
    least: float,
    y: np.ndarray,
) -> None:
    """Add to y (CLASSES, V, F, L) what a step makes of x (V, F, L), by its class; nobody joins."""
    states, kinds, levels = x.shape
    slots = fits.shape[0] - 1
    for v in range(states):
        n = occupied[v]
        for f in range(kinds):
            for q in range(levels):
                mass = x[v, f, q]
                if mass <= least:
                    continue
                waiting = 1 if n == 0 and f == 0 and q == 0 else q
                j = min(waiting, slots - n)
                p = mass * fits[n, f, j]
                if p > 0.0:
                    y[class_whole[n, f, j], joined[v, j], 0, waiting - j] += p
                for i in range(j):
                    p = mass * (fits[n, f, i] - fits[n, f, i + 1])
                    if p <= least:
                        continue
                    into = y[class_cut[n, f, i], joined[v, i]]
                    for g in range(1, kinds):
                        into[g, waiting - i] += p * left[n, f, i, g]


@numba.njit(cache=True)
def _join(x: np.ndarray, law: np.ndarray) -> None:
    """x (…, L) after arrivals of ``law`` (K,) have joined; the top level keeps what is above."""
    levels = x.shape[2]
    row = np.zeros(levels)
    size = law.size
    while size > 1 and law[size - 1] < 1e-12:
        size -= 1
    for v in range(x.shape[0]):
        for f in range(x.shape[1]):
            row[:] = 0.0
            for q in range(levels):
                mass = x[v, f, q]
                if mass > 0.0:
                    for k in range(size):
                        row[min(q + k, levels - 1)] += mass * law[k]
            x[v, f] = row


@numba.njit(cache=True)
def formed_ahead(
    x: np.ndarray,
    start: np.ndarray,
    target: np.ndarray,
    probability: np.ndarray,
    occupied: np.ndarray,
    joined: np.ndarray,
    fits: np.ndarray,
    left: np.ndarray,
    class_whole: np.ndarray,
    class_cut: np.ndarray,
    arrivals: np.ndarray,
    least: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """States when a step is formed ahead, (CLASSES, V, F, L), by the class of the step that runs
    meanwhile; who waits, (CLASSES, L), where none is; states when steps are formed, ahead or not.

    Also the share of steps in which nothing runs but slots that are not known to be free yet.
    ``x`` is the law when steps start and ``arrivals`` that of who comes in a step of each class.
    Followed from it are the step before the one that runs, and that one. Who came in the step
    before stands in the state; where that one was not formed ahead, they are in the one that runs.
    """
    shape = x.shape
    moved = np.empty(shape)
    alone = np.zeros(shape)
    served = np.zeros((CLASSES, *shape))
    entered = np.zeros((CLASSES, *shape))
    # Where nobody decodes, a queue begins with a step and the one formed along with it, of what
    # that leaves: who comes meanwhile is in neither.
    alone[0] = x[0]
    ahead = x.copy()
    ahead[0] = 0.0
    _serve(ahead, occupied, joined, fits, left, class_whole, class_cut, least, served)
    _serve(alone, occupied, joined, fits, left, class_whole, class_cut, least, entered)
    result = np.zeros((CLASSES, *shape))
    later = np.empty(shape)
    present = np.zeros(shape)
    at_once = np.zeros(shape)
    for i in range(CLASSES):
        move(entered[i], start, target, probability, moved)
        # Who waits beyond a cut prompt, or without one, waits for slots that are all in use.
        _join(moved[:1, :1], arrivals[i])
        at_once[0, 0] += moved[0, 0]
        moved[0, 0] = 0.0
        _join(served[i], arrivals[i])
        move(served[i], start, target, probability, later)
        at_once[0, 0] += later[0, 0]
        later[0, 0] = 0.0
        moved += later
        step = np.zeros((CLASSES, *shape))
        _serve(moved, occupied, joined, fits, left, class_whole, class_cut, least, step)
        for c in range(CLASSES):
            _join(step[c], arrivals[i])
            result[c] += step[c]
    step = np.zeros((CLASSES, *shape))
    _serve(at_once, occupied, joined, fits, left, class_whole, class_cut, least, step)
    unformed = np.zeros((CLASSES, shape[2]))
    for c in range(CLASSES):
        move(step[c], start, target, probability, later)
        unformed[c] = later[0, 0]
        later[0, 0] = 0.0
        move(result[c].copy(), start, target, probability, result[c])
        unformed[c, 0] += result[c, 0, 0, 0]
        result[c, 0, 0, 0] = 0.0
        result[c] += later
        present += result[c]
    # Its last token out, nobody decodes: a step without prompts that ends with empty slots is none.
    ended = result[0, 0, 0].sum() + unformed[0].sum()
    result[0, 0, 0] = 0.0
    unformed[0] = 0.0
    present[0, 0] = x[0, 0]
    return result, unformed, present, ended


@numba.njit(cache=True)
def arrival_kernels(
    s: np.ndarray,
    rate: float,
    shares_whole: np.ndarray,
    shares_cut: np.ndarray,
    class_whole: np.ndarray,
    class_cut: np.ndarray,
    whole: np.ndarray,
    share: np.ndarray,
    cut: np.ndarray,
    size: int,
) -> np.ndarray:
    """What an arrival in a step of each class finds, (CLASSES, size, N): see
    :func:`~testbed.theory.delay.step_chain_tagged.arrival_kernel`; mean over its batches."""
    slots = whole.shape[0] - 1
    result = np.zeros((CLASSES, size, s.size), dtype=np.complex128)
    total = np.zeros(CLASSES)
    row = np.zeros((size, s.size), dtype=np.complex128)
    for n in range(slots + 1):
        for f in range(whole.shape[1]):
            for j in range(slots - n + 1):
                for part in range(3):
                    if part == 2:
                        weight, seconds, c = shares_cut[n, f, j], cut[n, f, j], class_cut[n, f, j]
                    else:
                        p = share[n, f, j] if part == 0 else 1.0 - share[n, f, j]
                        weight, seconds = shares_whole[n, f, j] * p, whole[n, f, j, part]
                        c = class_whole[n, f, j]
                    if weight <= 0.0:
                        continue
                    total[c] += weight
                    if seconds > 0.0:
                        arrival_kernel(s, rate, seconds, row)
                        result[c] += weight * row
    for c in range(CLASSES):
        if total[c] > 0.0:
            result[c] /= total[c]
    return result


@numba.njit(cache=True)
def arriving_ahead(
    y: np.ndarray,
    unformed: np.ndarray,
    kernels: np.ndarray,
    lengths: np.ndarray,
    start: np.ndarray,
    target: np.ndarray,
    probability: np.ndarray,
    occupied: np.ndarray,
    joined: np.ndarray,
    fits: np.ndarray,
    whole: np.ndarray,
    cut: np.ndarray,
    left: np.ndarray,
    before: np.ndarray,
    least: float,
) -> np.ndarray:
    """Σ over steps of ∫ over their time of E[e^(−s·TTFT)], (N,): arrivals within a step.

    ``y`` and ``unformed`` as of :func:`formed_ahead`, ``whole`` and ``cut`` transforms of steps,
    ``before`` that of the rest from a step's end on. ``lengths`` (CLASSES,) says how much of a
    kernel counts.
    """
    _, states, kinds, levels = y.shape
    slots = fits.shape[0] - 1
    size = kernels.shape[2]
    result = np.zeros(size, dtype=np.complex128)
    # Steps that lead to the same slots are taken together: by class and by who is left waiting.
    step = np.zeros((CLASSES, levels, size), dtype=np.complex128)
    used = np.zeros((CLASSES, levels), dtype=np.bool_)
    top = before.shape[0] - 1
    source = np.full((states, slots + 1), -1, dtype=np.int64)
    for v in range(states):
        for j in range(slots - occupied[v] + 1):
            source[joined[v, j], j] = v
    for u in range(states):
        for g in range(kinds):
            used[:] = False
            for j in range(slots + 1):
                v = source[u, j]
                if v < 0:
                    continue
                n = occupied[v]
                free = slots - n
                for f in range(kinds):
                    if g > 0:
                        if j >= free:
                            continue
                        p = (fits[n, f, j] - fits[n, f, j + 1]) * left[n, f, j, g]
                    else:
                        p = fits[n, f, j]
                    if p <= 0.0:
                        continue
                    first = j + 1 if g > 0 else j
                    last = levels if g > 0 or j == free else j + 1
                    for c in range(CLASSES):
                        for q in range(first, min(last, levels)):
                            m = p * y[c, v, f, q]
                            if m <= least:
                                continue
                            if not used[c, q - j]:
                                used[c, q - j] = True
                                step[c, q - j] = 0.0
                            row = step[c, q - j]
                            if g > 0:
                                for a in range(size):
                                    row[a] += m * cut[n, f, j, a]
                            else:
                                for a in range(size):
                                    row[a] += m * whole[n, f, j, a]
            if u == 0 and g == 0:
                for c in range(CLASSES):
                    for r in range(levels):
                        if unformed[c, r] > least:
                            if not used[c, r]:
                                used[c, r] = True
                                step[c, r] = 0.0
                            step[c, r] += unformed[c, r]
                # Where all have had their last token, the step is none.
                for v in range(1, states):
                    p = 0.0
                    for e in range(start[v], start[v + 1]):
                        if target[e] == 0:
                            p = probability[e]
                    for c in range(CLASSES):
                        m = p * y[c, v, 0, 0]
                        if m <= least:
                            continue
                        if not used[c, 0]:
                            used[c, 0] = True
                            step[c, 0] = 0.0
                        for a in range(size):
                            step[c, 0, a] += m * (1.0 - whole[occupied[v], 0, 0, a])
            for c in range(CLASSES):
                for r in range(levels):
                    if not used[c, r]:
                        continue
                    for k in range(lengths[c]):
                        rest = before[min(r + k + 1, top), u, g]
                        kernel = kernels[c, k]
                        row = step[c, r]
                        for a in range(size):
                            result[a] += row[a] * kernel[a] * rest[a]
    return result
