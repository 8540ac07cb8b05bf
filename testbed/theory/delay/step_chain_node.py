"""Chain: the step chain of one node and mix of types; the arrival rate is left open."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.sparse import csc_matrix, csr_matrix, identity, kron
from scipy.sparse.csgraph import connected_components
from scipy.sparse.linalg import splu

from testbed.step_time import AnyStepTime
from testbed.theory.delay.base import TierLoad
from testbed.theory.delay.engine_load import calibrated
from testbed.theory.delay.step_chain_batch import PrefillBatch, prefill_batch
from testbed.theory.delay.step_chain_prompts import PromptMix
from testbed.theory.delay.step_chain_slots import SequenceSlots, stage_count

MOST_OCCUPATIONS = 170
"""Bound on the occupations of the slots, from which the number of Erlang stages follows."""


@dataclass(frozen=True)
class Chain:
    """The chain of one node and mix; the arrival rate is left open.

    Attributes
    ----------
    mix : prompts of the mixture
    alone : (Q,) unloaded time to first token by the step time, s
    slots : occupations of the sequence slots
    batch : what a step completes
    stages : Erlang stages of a request's stay in its slot
    lookahead : steps are formed while the one before runs
    """

    mix: PromptMix
    alone: np.ndarray
    slots: SequenceSlots
    batch: PrefillBatch
    stages: int
    lookahead: bool = False

    @classmethod
    def of(cls, load: TierLoad, output_scv: float, most: int = MOST_OCCUPATIONS) -> Chain:
        step_time, budget = calibrated(load, "step_chain")
        new = np.maximum(load.new_tokens, 1.0)
        cached = np.asarray(load.cached_tokens, dtype=float)
        outputs = np.maximum(load.output_tokens, 1.0)
        first = np.array([step_time.prefill_seconds(1.0, h) for h in cached])
        each = np.array([step_time.prefill_seconds(n, h) for n, h in zip(new, cached, strict=True)])
        mix = PromptMix(load.weights, new, cached, each - first)
        alone = np.array(
            [chunked(step_time, n, h, budget) for n, h in zip(new, cached, strict=True)]
        )
        # Scheduling ahead, the end of a request is known when the next step is formed already.
        held = outputs + (outputs > 1.0) * float(load.lookahead)
        mean = float(load.weights @ held)
        second = float(load.weights @ (held**2 + outputs**2 * output_scv))
        stages = stage_count(mean, second / mean**2 - 1.0, load.concurrency, most)
        later = load.weights * (outputs - 1.0)
        context = 0.0
        if later.sum() > 0:
            context = float(later @ (new + cached + 0.5 * outputs) / later.sum())
        return cls(
            mix,
            alone,
            SequenceSlots.of(load.concurrency, stages, min(stages / mean, 1.0)),
            prefill_batch(step_time.packed, mix, load.concurrency, budget, context),
            stages,
            load.lookahead,
        )

    @property
    def count(self) -> int:
        """c, slots."""
        return self.batch.fits.shape[0] - 1

    @cached_property
    def moves(self) -> csr_matrix:
        """(V, V), from a row to a column."""
        v = len(self.slots.occupied)
        slots = self.slots
        return csr_matrix((slots.probability, slots.target, slots.start), shape=(v, v))

    @cached_property
    def capacity(self) -> float:
        """Requests/s that are completed while somebody always waits."""
        slots, batch = self.slots, self.batch
        kinds = batch.fits.shape[1]
        v = len(slots.occupied)
        rows, columns, values = [], [], []
        done, seconds = np.zeros((kinds, v)), np.zeros((kinds, v))
        for f in range(kinds):
            for i, n in enumerate(slots.occupied):
                free = self.count - n
                fits = batch.fits[n, f, : free + 1]
                cut = fits[:-1] - fits[1:]
                whole = batch.whole[n, f, free] @ [
                    batch.share[n, f, free],
                    1.0 - batch.share[n, f, free],
                ]
                done[f, i] = cut @ np.arange(free) + fits[-1] * free
                seconds[f, i] = cut @ batch.cut[n, f, :free] + fits[-1] * whole
                for j in np.flatnonzero(cut > 0) if kinds > 1 else ():
                    for g in range(1, kinds):
                        rows.append(f * v + i)
                        columns.append(g * v + slots.joined[i, j])
                        values.append(cut[j] * batch.left[n, f, j, g])
                rows.append(f * v + i)
                columns.append(slots.joined[i, free])
                values.append(fits[-1])
        served = csr_matrix((values, (rows, columns)), shape=(kinds * v, kinds * v))
        both = csr_matrix(served.shape)
        for f in range(kinds):
            left = csr_matrix(([1.0], ([f], [f])), shape=(kinds, kinds))
            both = both + kron(left, self.moves)
        step = csr_matrix(served @ both)
        # π(I − P) = 0 with π at the emptiest reached state set to 1, the last row left out.
        matrix = csc_matrix((identity(kinds * v) - step).T)
        reached = _reachable(step, 0)
        matrix = matrix[reached][:, reached]
        rest = splu(csc_matrix(matrix[1:, 1:])).solve(-matrix[1:, 0].toarray().ravel())
        law = np.zeros(kinds * v)
        law[reached] = np.concatenate([[1.0], rest])
        return float(law @ done.ravel()) / float(law @ seconds.ravel())


def _reachable(step: csr_matrix, start: int) -> np.ndarray:
    """States of the recurrent class that ``start`` leads to; sorted."""
    count, labels = connected_components(step, directed=True, connection="strong")
    coarse = csr_matrix(
        (np.ones(step.nnz), (labels[step.tocoo().row], labels[step.tocoo().col])),
        shape=(count, count),
    )
    label = labels[start]
    while True:
        after = [c for c in coarse[label].indices if c != label]
        if not after:
            return np.flatnonzero(labels == label)
        label = after[0]


def chunked(step_time: AnyStepTime, new: float, cached: float, budget: int) -> float:
    """Seconds of an unloaded prefill in chunks of the budget."""
    seconds = 0.0
    while new > budget:
        seconds += step_time.prefill_seconds(budget, cached)
        new -= budget
        cached += budget
    return seconds + step_time.prefill_seconds(new, cached)
