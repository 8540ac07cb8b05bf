"""Rests: what is left of prompts that a step's token budget cut, by class.

What one step completes is known by a few classes, of all types together; of each type of longer
prompts there is one class for every step that it still fills. Within a class the law is that which
full steps reproduce.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np

from testbed.theory.delay.step_chain_prompts import CELLS, SUMS, PromptMix, prompt_sums

CLASSES = 4
"""Classes of what is left of a cut prompt where a step completes it, about equally likely."""

LONG = 1.5
"""Steps that a prompt fills from which it counts as long."""

MOST_STEPS = 8
"""Most steps of one long prompt that are told apart."""

MOST_LONG = 14
"""Most classes of long prompts apart by type; beyond, types share them."""

ROUNDS = 40
"""Most iterations of the law of what is left of a cut prompt."""


@dataclass(frozen=True)
class Rests:
    """What is left of cut prompts, by F − 1 classes. Groups are the short types together, and the
    long ones each or together.

    Attributes
    ----------
    group : (Q,) group of each type
    table : (groups, cells) class of a rest, by its tokens in cells
    owner, share : (F − 1,) group of each class, and how often a cut leaves one
    laws : (F − 1, SUMS, cells) law within each class
    """

    group: np.ndarray
    table: np.ndarray
    owner: np.ndarray
    share: np.ndarray
    laws: np.ndarray

    @classmethod
    def none(cls, mix: PromptMix) -> Rests:
        """Nothing is ever cut."""
        types = np.zeros(mix.new.size, dtype=np.int64)
        none = np.zeros(0, dtype=np.int64)
        table = np.zeros((1, 1), dtype=np.int64)
        return cls(types, table, none, np.zeros(0), np.zeros((0, SUMS, 1)))

    @classmethod
    def of(cls, mix: PromptMix, fresh: np.ndarray, slots: int, cell: float, window: float) -> Rests:
        """``fresh`` : sums of prompts, none cut before; ``window`` tokens of a step."""
        long = (mix.new > LONG * window) & (mix.weights > 0)
        steps = np.minimum(np.ceil(mix.new / window), MOST_STEPS)[long].sum()
        group = np.where(long, np.cumsum(long) if steps <= MOST_LONG else 1, 0).astype(np.int64)
        laws = _rest(mix, group, fresh, slots, cell, window)
        table = np.zeros((len(laws), laws.shape[2]), dtype=np.int64)
        owner: list[int] = []
        shares: list[float] = []
        parts: list[np.ndarray] = []
        for g, law in enumerate(laws):
            low = 0
            for high in _edges(law[0], cell, window, 1 if g else CLASSES):
                inside = np.zeros_like(law)
                inside[:, low:high] = law[:, low:high]
                share = float(inside[0].sum())
                if share > 0:
                    # Rests between this class and the one before are taken as this one's.
                    table[g, low:] = len(owner)
                    owner.append(g)
                    shares.append(share)
                    parts.append(inside / share)
                    low = high
        return cls(group, table, np.array(owner), np.array(shares), np.array(parts))


def _edges(mass: np.ndarray, cell: float, window: float, classes: int) -> np.ndarray:
    """Ends of a group's classes, in cells: ``classes`` within a window, one for each further."""
    each = window / cell
    near = min(int(each) + 1, mass.size)
    within = np.cumsum(mass[:near])
    wanted = np.arange(1, classes) / classes * within[-1]
    further = (np.arange(2, MOST_STEPS) * each).astype(int) + 1
    ends = [np.searchsorted(within, wanted) + 1, [near], further[further < mass.size], [mass.size]]
    return np.unique(np.concatenate(ends).astype(int))


def _rest(
    mix: PromptMix, group: np.ndarray, fresh: np.ndarray, slots: int, cell: float, window: float
) -> np.ndarray:
    """(groups, SUMS, cells) of what is left of a cut prompt, by tokens.

    The law that reproduces itself from one full step to the next, found by iteration from a step
    without a cut prompt before it.
    """
    cells = max(CELLS, int(np.ceil(mix.new.max() / cell))) + 2
    law = np.zeros((int(group.max()) + 1, SUMS, cells))
    _leave(fresh, group, mix.weights, mix.new, mix.cached, mix.work, window, cell, law)
    law /= law[:, 0].sum()
    for _ in range(ROUNDS):
        after = np.zeros_like(law)
        table = prompt_sums(mix, slots, cell, law.sum(axis=0)[:, : CELLS + 1])
        _leave(table[1:], group, mix.weights, mix.new, mix.cached, mix.work, window, cell, after)
        _go_on(law, window, cell, after)
        total = after[:, 0].sum()
        if total <= 0:
            break
        before, law = law, 0.5 * (law + after / total)
        if np.abs(law[:, 0] - before[:, 0]).sum() < 1e-6:
            break
    return law


@numba.njit(cache=True)
def _go_on(law: np.ndarray, window: float, cell: float, after: np.ndarray) -> None:
    """Add what is left of rests that are longer than a window, after one more."""
    for g in range(law.shape[0]):
        for x in range(law.shape[2]):
            p = law[g, 0, x]
            n = x * cell - window
            if p <= 0.0 or n <= 0.0:
                continue
            share = n / (x * cell)
            values = (
                1.0, n * n, n * (law[g, 2, x] / law[g, 6, x] + window), share * law[g, 3, x] / p,
                share * share * law[g, 4, x] / p, share**3 * law[g, 5, x] / p, n,
            )  # fmt: skip
            low = int(n / cell)
            part = n / cell - low
            for i in range(7):
                after[g, i, low] += p * (1.0 - part) * values[i]
                if part > 0.0:
                    after[g, i, low + 1] += p * part * values[i]


@numba.njit(cache=True)
def _leave(
    table: np.ndarray,
    group: np.ndarray,
    weights: np.ndarray,
    new: np.ndarray,
    cached: np.ndarray,
    work: np.ndarray,
    window: float,
    cell: float,
    law: np.ndarray,
) -> None:
    """Add what is left of the prompt that a full window cuts after any number of whole ones."""
    last = law.shape[2] - 1
    for j in range(table.shape[0]):
        for x in range(table.shape[1]):
            p = table[j, x, 0]
            left = window - x * cell
            if p <= 0.0 or left < 0.0:
                continue
            for q in range(new.size):
                n = new[q] - left
                if n <= 0.0:
                    continue
                # Attention of the rest to what is computed: both quadratic terms of equal worth.
                values = (
                    1.0, n * n, n * (cached[q] + left), work[q] * n / new[q],
                    (work[q] * n / new[q]) ** 2, (work[q] * n / new[q]) ** 3, n,
                )  # fmt: skip
                low = min(int(n / cell), last)
                part = n / cell - low
                if low == last:
                    part = 0.0
                for i in range(7):
                    law[group[q], i, low] += p * weights[q] * (1.0 - part) * values[i]
                    if part > 0.0:
                        law[group[q], i, low + 1] += p * weights[q] * part * values[i]
