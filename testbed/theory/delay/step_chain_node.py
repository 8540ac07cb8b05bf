"""Chain: the step chain of one node and mix of types; the arrival rate is left open."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.sparse import csc_matrix, csr_matrix, identity, kron
from scipy.sparse.linalg import splu

from testbed.step_time import AnyStepTime
from testbed.theory.delay.base import TierLoad
from testbed.theory.delay.engine_load import calibrated
from testbed.theory.delay.step_chain_batch import PrefillBatch, prefill_batch
from testbed.theory.delay.step_chain_prompts import PromptMix
from testbed.theory.delay.step_chain_slots import SequenceSlots, stage_count
from testbed.theory.delay.step_chain_solver import slot_ranges, stationary

MOST_OCCUPATIONS = 170
"""Bound on the occupations of the slots, from which the number of Erlang stages follows."""

CAPACITY_TOLERANCE = 1e-8
"""Σ|π − πP| of an engine that is never without work."""


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
    drag : by how much the work of requests varies more than that of their prefills (standard
        deviations, ratio less 1). A step's decodes attend to the mean context; a request's own is
        the longer the longer its prompt
    """

    mix: PromptMix
    alone: np.ndarray
    slots: SequenceSlots
    batch: PrefillBatch
    stages: int
    lookahead: bool = False
    drag: float = 0.0

    @classmethod
    def of(cls, load: TierLoad, output_scv: float, most: int = MOST_OCCUPATIONS) -> Chain:
        step_time, budget = calibrated(load, "step_chain")
        new = np.maximum(load.new_tokens, 1.0)
        cached = np.asarray(load.cached_tokens, dtype=float)
        outputs = np.maximum(load.output_tokens, 1.0)
        first = np.array([step_time.prefill_seconds(1.0, h) for h in cached])
        each = np.array([step_time.prefill_seconds(n, h) for n, h in zip(new, cached, strict=True)])
        later = load.weights * (outputs - 1.0)
        contexts = new + cached + 0.5 * outputs
        context = float(later @ contexts / later.sum()) if later.sum() > 0 else 0.0
        mix = PromptMix(load.weights, new, cached, each - first)
        # Among others of the mean context, with all slots in use.
        c = load.concurrency
        attended = np.array([step_time.seconds((), c, (c - 1) * context + x) for x in contexts])
        beyond = (attended - step_time.seconds((), c, c * context)) * (outputs - 1.0)
        spread = _spread(load.weights, mix.work)
        # Where prompts are alike, rounding apart, nothing goes with their length.
        drag = 0.0
        if spread > 1e-9 * mix.work.max():
            drag = _spread(load.weights, mix.work + beyond) / spread - 1.0
        alone = np.array(
            [chunked(step_time, n, h, budget) for n, h in zip(new, cached, strict=True)]
        )
        # Scheduling ahead, the end of a request is known when the next step is formed already.
        held = outputs + (outputs > 1.0) * float(load.lookahead)
        mean = float(load.weights @ held)
        second = float(load.weights @ (held**2 + outputs**2 * output_scv))
        stages = stage_count(mean, second / mean**2 - 1.0, load.concurrency, most)
        decoding = 1.0
        if later.sum() > 0:
            # For its last step a slot waits to be known free, and nobody decodes in it.
            decoding = float(later.sum() / (load.weights @ (held - 1.0)))
        batch = prefill_batch(step_time.packed, mix, load.concurrency, budget, context, decoding)
        # Where nobody decodes and nothing is cut there is never a step to form ahead.
        ever = later.sum() > 0 or batch.fits.shape[1] > 1
        return cls(
            mix,
            alone,
            SequenceSlots.of(load.concurrency, stages, min(stages / mean, 1.0)),
            batch,
            stages,
            load.lookahead and bool(ever),
            drag,
        )

    @property
    def count(self) -> int:
        """c, slots."""
        return self.batch.fits.shape[0] - 1

    @cached_property
    def felt(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Batches' ``whole``, ``share`` and ``cut`` as the queue feels them: with a step's prefill
        come or go the seconds that its requests' decodes will differ from the mean by.

        Work adds up over time, so that for a queue it hardly matters when, within the time that a
        request decodes. No step is felt as less than 0.
        """
        whole, share, cut = self.batch.whole, self.batch.share, self.batch.cut
        usual = self._saturation[1] * np.arange(self.count + 1)
        decodes = whole[:, :1, :1, 0]
        felt_cut = np.maximum(cut + self.drag * (cut - decodes - usual), 0.0)
        more = self.drag * (whole - decodes[..., None] - usual[:, None])
        # A step without prompts carries no request's prefill.
        more[:, 0, 0] = 0.0
        felt = whole + more
        mean = felt[..., 0] * share + felt[..., 1] * (1.0 - share)
        below = (felt[..., 0] < 0.0) & (mean > 0.0)
        # Two values at 0 or more with that mean and variance.
        variance = share[below] * (1.0 - share[below]) * np.ptp(felt[below], axis=-1) ** 2
        rest = mean[below] ** 2 / (mean[below] ** 2 + variance)
        felt[below] = np.stack([np.zeros_like(rest), mean[below] / rest], axis=-1)
        share = share.copy()
        share[below] = 1.0 - rest
        return np.maximum(felt, 0.0), share, felt_cut

    @property
    def capacity(self) -> float:
        """Requests/s that are completed while somebody always waits."""
        return self._saturation[0]

    @cached_property
    def _saturation(self) -> tuple[float, float]:
        """While somebody always waits: requests/s that are completed, and seconds of prefill that
        each of them takes."""
        served, done, seconds = self._saturated()
        kinds, v = self.batch.fits.shape[1], len(self.slots.occupied)
        moves = csr_matrix((self.slots.probability, self.slots.target, self.slots.start), (v, v))
        both = kron(identity(kinds), moves, format="csr")
        served_back, both_back = csr_matrix(served.T), csr_matrix(both.T)
        by_slots = slot_ranges(self.count)[self.slots.occupied]
        group = (by_slots + (int(by_slots[-1]) + 1) * np.arange(kinds)[:, None]).ravel()
        spread = csr_matrix((np.ones(group.size), (np.arange(group.size), group)))

        def step(x: np.ndarray) -> np.ndarray:
            return np.asarray(both_back @ (served_back @ x))

        def coarse(x: np.ndarray) -> np.ndarray:
            after = csr_matrix(spread.T.multiply(x)) @ served
            return np.asarray((after @ both @ spread).toarray())

        # From an empty engine, so that nothing stands in a state which is never reached.
        law = np.zeros(kinds * v)
        law[0] = 1.0
        for _ in range(10):
            law = step(law)
        stay = np.asarray(served.multiply(both_back).sum(axis=1)).ravel()
        law, _, error = stationary(
            step, coarse, group, np.where(stay < 1.0, 1.0 - stay, 1.0), law, CAPACITY_TOLERANCE
        )
        if error > 1e3 * CAPACITY_TOLERANCE:
            # Slots that hardly move from step to step (long outputs) are too slow for it.
            law = _law_of(csr_matrix(served @ both), law)
        decodes = np.tile(self.batch.whole[self.slots.occupied, 0, 0, 0], kinds)
        completed = float(law @ done)
        return completed / float(law @ seconds), float(law @ (seconds - decodes)) / completed

    def _saturated(self) -> tuple[csr_matrix, np.ndarray, np.ndarray]:
        """Where a step takes (f, v) before the slots move, the prompts that it completes and its
        seconds: (F·V, F·V), (F·V,) twice."""
        slots, batch = self.slots, self.batch
        kinds, v = batch.fits.shape[1], len(slots.occupied)
        n = slots.occupied
        free = self.count - n
        served = np.arange(self.count + 1)
        fits = batch.fits[n]
        inside = served < free[:, None]
        cut = np.where(inside[:, None], fits[..., :-1] - fits[..., 1:], 0.0)
        at = np.arange(v)
        all_fit = fits[at, :, free]
        share = batch.share[n, :, free]
        whole = batch.whole[n, :, free, 0] * share + batch.whole[n, :, free, 1] * (1.0 - share)
        done = cut @ served + all_fit * free[:, None]
        seconds = np.einsum("vfj,vfj->vf", cut, batch.cut[n]) + all_fit * whole
        i, f, j = np.nonzero(cut > 0)
        i, f, j = (np.repeat(x, kinds - 1) for x in (i, f, j))
        g = np.tile(np.arange(1, kinds), i.size // max(kinds - 1, 1))
        rows = np.concatenate([f * v + i, (np.arange(kinds)[:, None] * v + at).ravel()])
        columns = np.concatenate(
            [g * v + slots.joined[i, j], np.tile(slots.joined[at, free], kinds)]
        )
        values = np.concatenate([cut[i, f, j] * batch.left[n[i], f, j, g], all_fit.T.ravel()])
        step = csr_matrix((values, (rows, columns)), shape=(kinds * v, kinds * v))
        return step, done.T.ravel(), seconds.T.ravel()


def _law_of(step: csr_matrix, like: np.ndarray) -> np.ndarray:
    """π = πP by elimination, over the states where ``like`` is not 0, up to a factor."""
    states = np.flatnonzero(like)
    balance = csc_matrix((identity(states.size) - step[states][:, states]).T)
    # π is 1 where it is likely to be large, and what the others get from there is known.
    fixed = int(like[states].argmax())
    others = np.delete(np.arange(states.size), fixed)
    law = np.zeros(like.size)
    law[states[fixed]] = 1.0
    law[states[others]] = splu(csc_matrix(balance[others][:, others])).solve(
        -balance[others, fixed].toarray().ravel()
    )
    return law


def _spread(weights: np.ndarray, values: np.ndarray) -> float:
    """Standard deviation over types."""
    return float(np.sqrt(weights @ (values - weights @ values) ** 2))


def chunked(step_time: AnyStepTime, new: float, cached: float, budget: int) -> float:
    """Seconds of an unloaded prefill in chunks of the budget."""
    seconds = 0.0
    while new > budget:
        seconds += step_time.prefill_seconds(budget, cached)
        new -= budget
        cached += budget
    return seconds + step_time.prefill_seconds(new, cached)
