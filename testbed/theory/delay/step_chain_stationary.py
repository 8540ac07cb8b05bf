"""Stationary: the step chain at one arrival rate, and the time to first token that follows."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from testbed.errors import ScenarioError
from testbed.theory.delay import step_chain_ahead as ahead
from testbed.theory.delay import step_chain_forward as forward
from testbed.theory.delay import step_chain_tagged as tagged
from testbed.theory.delay.step_chain_law import TransformLaw
from testbed.theory.delay.step_chain_node import Chain
from testbed.theory.delay.step_chain_solver import (
    coarse_chain,
    queue_ranges,
    slot_ranges,
    stationary,
)

MOST_LEVELS = 2048
"""Most queue lengths that are told apart."""

TAIL = 1e-6
"""Share of steps that may start with the queue at its truncated length."""

NEGLIGIBLE = 1e-9

MOST_ERROR = 1e-5
"""Σ|π − πP| above which there is no answer."""

LAW_TAIL = 1e-6
"""Share of the arrivals in a step beyond the last number that is told apart."""

TOLERANCE = 1e-6
"""Σ|π − πP| at the solver's stop."""


@dataclass
class Stationary:
    """The chain at one arrival rate.

    ``law`` (V, F, L) is the share of steps that start in a state, after the slots moved.
    ``tail`` is the share with the queue at its truncated length: the bound on what is left out.
    """

    chain: Chain
    rate: float
    law: np.ndarray
    tail: float
    iterations: int
    _laws: tuple = field(repr=False)

    @cached_property
    def cycle(self) -> tuple[float, float]:
        """Mean seconds of a step, and of idling before one."""
        busy = self._mean_steps(self.law)
        more = self._ahead.idle if self._ahead else 0.0
        return busy - more, float(self.law[0, 0, 0]) / self.rate + more

    def _mean_steps(self, law: np.ndarray) -> float:
        batch, count = self.chain.batch, self.chain.count
        whole = batch.whole[..., 0] * batch.share + batch.whole[..., 1] * (1.0 - batch.share)
        present = forward.by_occupied(law, self.chain.slots.occupied, count)
        present[0, 0, 1] += present[0, 0, 0]
        present[0, 0, 0] = 0.0
        total = 0.0
        levels = present.shape[2]
        for n in range(count + 1):
            free = count - n
            for f in range(present.shape[1]):
                tail = np.concatenate([np.cumsum(present[n, f][::-1])[::-1], np.zeros(free + 2)])
                for j in range(min(free, levels) + 1):
                    here = tail[j] if j == free else tail[j] - tail[j + 1]
                    total += here * batch.fits[n, f, j] * whole[n, f, j]
                    if j < free and present.shape[1] > 1:
                        p = batch.fits[n, f, j] - batch.fits[n, f, j + 1]
                        total += tail[j + 1] * p * batch.cut[n, f, j]
        return total

    @property
    def idle(self) -> float:
        """Share of the time without any request: that of arrivals which wait for nobody."""
        busy, idle = self.cycle
        return idle / (busy + idle)

    def transform(self, q: int, s: np.ndarray) -> np.ndarray:
        """E[e^(−s·TTFT)] of type q, (N,)."""
        chain, (length_whole, length_cut) = self.chain, self._laws
        batch, slots = chain.batch, chain.slots
        s = np.asarray(s, dtype=np.complex128)
        law = self._ahead.present if self._ahead else self.law
        present = forward.by_occupied(law, slots.occupied, chain.count)
        z = np.exp(-np.multiply.outer(s, chain.mix.work)) @ chain.mix.weights
        own = tagged.own_step(
            s, present, batch.fits, batch.cut, batch.own_whole[q], batch.own_share[q], z
        )
        busy = np.zeros(s.size, dtype=np.complex128)
        formed = tagged.step_transforms(s, batch.whole, batch.share, batch.cut)
        waited = np.zeros((0, 0, 0), dtype=np.complex128)
        if chain.lookahead and not self._ahead:
            waited = np.ones((*batch.fits.shape[:2], s.size), dtype=np.complex128)
            # What is left of a cut prompt is in the request's own step, as if formed with it.
            waited[1:] = formed[0][1:, :1, 0]
            waited[:, 0] = tagged.formed_step(present, batch.fits, *formed)
        # E[z^B] of the B who come in a time t is e^(−λ(1 − z)t).
        for at, last in ((s, own[0]), (s + self.rate * (1.0 - z), own[1])):
            whole, cut = tagged.step_transforms(at, batch.whole, batch.share, batch.cut)
            before, first = tagged.remaining(
                slots.start, slots.target, slots.probability, slots.occupied, slots.joined,
                batch.fits, batch.own_fits[q], last, whole, cut, batch.left, batch.own_left[q],
                self.law.shape[2], waited,
            )  # fmt: skip
            if self._ahead:
                # Who comes while the request's own step is formed already is in a later one.
                busy += self._ahead.arriving(chain, self.rate, at, formed[0], formed[1], before)
            else:
                busy += tagged.arriving(
                    at, self.rate, self.law, slots.occupied, slots.joined, batch.fits,
                    batch.whole, batch.share, batch.cut, length_whole, length_cut, batch.left,
                    first, NEGLIGIBLE,
                )  # fmt: skip
        alone = np.exp(-s * chain.alone[q])
        running, idle = self.cycle
        return (busy + idle * alone) / (running + idle)

    @cached_property
    def _ahead(self) -> FormedAhead | None:
        # Where prompts are cut, it misses how long steps go on: there a formed step is only added
        # before a request that finds a slot.
        if not self.chain.lookahead or self.chain.batch.fits.shape[1] > 1:
            return None
        size = int(max(lengths.max() for lengths in self._laws))
        return FormedAhead.of(self.chain, self.rate, self.law, size, self._mean_steps(self.law))

    @cached_property
    def moments(self) -> tuple[np.ndarray, np.ndarray]:
        """E[X] and E[X²] of the excess delay of each type, (Q,), s and s²."""
        scale = 0.01 / max(self._rough_delay, 1e-9)
        s = scale * np.array([1.0, -1.0, 0.0])
        first, second = [], []
        for q, alone in enumerate(self.chain.alone):
            y = (self.transform(q, s) * np.exp(s * alone)).real
            first.append((y[1] - y[0]) / (2.0 * scale))
            # The transform at 0 is 1 but for what is left out as negligible, which 1/scale² lifts.
            second.append((y[0] + y[1] - 2.0 * y[2]) / scale**2)
        return np.array(first), np.array(second)

    @property
    def excess(self) -> TransformLaw:
        """The law of the excess delay of each type."""
        alone = self.chain.alone
        return TransformLaw(
            self.idle, *self.moments, lambda q, s: self.transform(q, s) * np.exp(s * alone[q])
        )

    @property
    def _rough_delay(self) -> float:
        """Seconds of the order of the time to first token."""
        present = self.law.sum(axis=(0, 1))
        mean = float(present @ np.arange(len(present)))
        return mean / self.rate + float(self.chain.alone.max())


@dataclass(frozen=True)
class FormedAhead:
    """What runs while steps are formed ahead (:mod:`step_chain_ahead`).

    Attributes
    ----------
    formed : (CLASSES, V, F, L) states when a step is formed, by what runs meanwhile
    unformed : (CLASSES, L) who waits where none is formed ahead
    present : (V, F, L) states when steps are formed, ahead or not
    shares : share of steps with each batch, whole and cut, and their classes
    lengths : (CLASSES,) how many arrivals in a step count
    idle : seconds a step, on average, in which nothing runs but the chain has a step
    scale : steps of the chain's mean length by those that ``formed`` gives
    """

    formed: np.ndarray
    unformed: np.ndarray
    present: np.ndarray
    shares: tuple[np.ndarray, ...]
    lengths: np.ndarray
    idle: float
    scale: float

    @classmethod
    def of(cls, chain: Chain, rate: float, law: np.ndarray, size: int, mean: float) -> FormedAhead:
        """``law`` when steps start, up to ``size`` arrivals in one, ``mean`` seconds of a step."""
        batch, slots = chain.batch, chain.slots
        whole, cut = ahead.step_shares(law, slots.occupied, batch.fits)
        *classes, seconds = ahead.step_classes(whole, cut, batch.whole, batch.share, batch.cut)
        arrivals = ahead.arrivals_in(
            whole,
            cut,
            *classes,
            *forward.poisson_laws(rate, batch.whole, batch.share, batch.cut, size),
        )
        formed, unformed, present, ended = ahead.formed_ahead(
            law, slots.start, slots.target, slots.probability, slots.occupied, slots.joined,
            batch.fits, batch.left, *classes, arrivals, NEGLIGIBLE**2,
        )  # fmt: skip
        counts = np.cumsum(arrivals[:, ::-1], axis=1)[:, ::-1] > LAW_TAIL
        idle = ended * float(batch.whole[min(1, chain.count), 0, 0, 0])
        scale = (mean - idle) / float((formed.sum(axis=(1, 2, 3)) + unformed.sum(axis=1)) @ seconds)
        return cls(
            formed, unformed, present, (whole, cut, *classes), counts.sum(axis=1), idle, scale
        )

    def arriving(
        self,
        chain: Chain,
        rate: float,
        s: np.ndarray,
        whole: np.ndarray,
        cut: np.ndarray,
        before: np.ndarray,
    ) -> np.ndarray:
        """Σ over steps of ∫ over their time of E[e^(−s·TTFT)], (N,), from the transforms of steps
        and of the rest after one."""
        batch, slots = chain.batch, chain.slots
        kernels = ahead.arrival_kernels(
            s, rate, *self.shares, batch.whole, batch.share, batch.cut, int(self.lengths.max())
        )
        return self.scale * ahead.arriving_ahead(
            self.formed, self.unformed, kernels, self.lengths,
            slots.start, slots.target, slots.probability, slots.occupied, slots.joined,
            batch.fits, whole, cut, batch.left, before, NEGLIGIBLE,
        )  # fmt: skip


def solve(
    chain: Chain, rate: float, *, tail: float = TAIL, start: Stationary | None = None
) -> Stationary:
    """The stationary law at an arrival rate below the chain's capacity."""
    spare = 1.0 - rate / chain.capacity
    levels = 8 + int(10.0 / spare)
    while True:
        found = _solve(chain, rate, levels, start)
        if found.tail < tail or levels >= MOST_LEVELS:
            return found
        # The tail is geometric; go on as far as its decay asks.
        present = found.law.sum(axis=(0, 1))
        decay = np.log(present[-levels // 3 - 2] / present[-2]) / (levels // 3)
        more = np.log(found.tail / tail) / max(decay, 0.5 / levels)
        levels = min(levels + max(int(1.1 * more), levels // 8), MOST_LEVELS)
        start = found


def _solve(chain: Chain, rate: float, levels: int, start: Stationary | None) -> Stationary:
    batch, slots = chain.batch, chain.slots
    kinds = batch.fits.shape[1]
    whole, share, cut = chain.felt
    longest = rate * float(max(whole.max(), cut.max()))
    size = int(longest + 8.0 * np.sqrt(longest) + 16.0)
    for_whole, for_cut = forward.poisson_laws(rate, whole, share, cut, size)
    lengths = forward.trim(for_whole, LAW_TAIL), forward.trim(for_cut, LAW_TAIL)
    shape = (len(slots.occupied), kinds, levels)
    moved, result = np.empty(shape), np.empty(shape)
    stay = forward.stay_probability(
        slots.start, slots.target, slots.probability, slots.occupied, batch.fits, for_whole,
        kinds, levels,
    ).ravel()  # fmt: skip

    def step(x: np.ndarray) -> np.ndarray:
        forward.move(x.reshape(shape), slots.start, slots.target, slots.probability, moved)
        forward.serve(
            moved,
            slots.occupied,
            slots.joined,
            batch.fits,
            for_whole,
            for_cut,
            *lengths,
            batch.left,
            result,
        )
        return result.ravel()

    spare = 1.0 - rate / chain.capacity
    guess = np.ones(shape) * np.exp(-spare * np.arange(levels))
    if start is not None and start.law.shape[:2] == shape[:2]:
        keep = min(levels, start.law.shape[2])
        guess *= float(start.law[:, :, keep - 1].sum()) / float(guess[:, :, keep - 1].sum())
        guess[:, :, :keep] = start.law[:, :, :keep]
    x = guess.ravel() / guess.sum()
    for _ in range(10):
        x = step(x).copy()
    by_slots, by_queue = slot_ranges(chain.count), queue_ranges(levels)
    columns = int(by_queue[-1]) + 1
    group = np.broadcast_to(
        (by_slots[slots.occupied] * columns)[:, None, None] + by_queue, shape
    ).ravel()

    def coarse(x: np.ndarray) -> np.ndarray:
        return coarse_chain(
            x.reshape(shape), slots.start, slots.target, slots.probability, slots.occupied,
            batch.fits, for_whole, for_cut, *lengths, by_slots, by_queue, NEGLIGIBLE,
        )  # fmt: skip

    x, used, error = stationary(step, coarse, group, 1.0 - stay, x, TOLERANCE)
    if error > MOST_ERROR:
        raise ScenarioError(
            f"delay_model: step_chain at {rate:.4g} requests/s, {rate / chain.capacity:.4g} of its "
            f"capacity, did not settle: {error:.1g} is left of its balance"
        )
    forward.move(x.reshape(shape), slots.start, slots.target, slots.probability, moved)
    law = moved.copy()
    return Stationary(chain, rate, law, float(law[:, :, -1].sum()), used, lengths)
