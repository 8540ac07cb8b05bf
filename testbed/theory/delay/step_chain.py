"""StepChain: first-token delay of continuous batching, from step time alone (Theory H2).

A semi-Markov chain embedded at step starts. A step admits waiting prompts in order of arrival, as
far as free slots and the token budget let it, and gives every decoding request one token; it takes
what the step-time formula says of its batch, and Poisson arrivals join the queue meanwhile. The
state is the occupation of the slots (:class:`SequenceSlots`), whether a prompt is cut, and how
many prompts are not yet whole. From the stationary law the time to first token follows by tagging
an arrival: the rest of the step under way, the steps until its turn, its own step.

An engine that forms a step while the one before it runs (vLLM on a GPU) is the same chain with two
differences: a request that could join the next step finds it formed, with what came one step
before it, and waits for it; and a slot is free a step later than its request ended.

What is approximated: lengths of waiting prompts are independent of the time they waited; what is
left of a cut prompt follows renewal theory; generated lengths are Erlang with as many stages as
``MOST_OCCUPATIONS`` leaves room for; step times of one batch are a law of two points with the
mean, variance and skewness that the mixture gives.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from scipy.interpolate import PchipInterpolator
from scipy.sparse import csc_matrix, csr_matrix, identity, kron
from scipy.sparse.csgraph import connected_components
from scipy.sparse.linalg import splu

from testbed.errors import ScenarioError
from testbed.step_time import AnyStepTime
from testbed.theory.delay import step_chain_kernel as kernel
from testbed.theory.delay.base import DelayModel, ExcessDelay, TierLoad, register
from testbed.theory.delay.engine_load import calibrated
from testbed.theory.delay.step_chain_batch import PrefillBatch, prefill_batch
from testbed.theory.delay.step_chain_law import TransformLaw
from testbed.theory.delay.step_chain_prompts import PromptMix
from testbed.theory.delay.step_chain_slots import SequenceSlots, stage_count
from testbed.theory.delay.step_chain_solver import coarse_chain as kernel_coarse
from testbed.theory.delay.step_chain_solver import (
    queue_ranges,
    slot_ranges,
    stationary,
)

MOST_OCCUPATIONS = 170
"""Bound on the occupations of the slots, from which the number of Erlang stages follows."""

MOST_LEVELS = 2048
"""Most queue lengths that are told apart."""

TAIL = 1e-6
"""Share of steps that may start with the queue at its truncated length."""

NEGLIGIBLE = 1e-9

MOST_ERROR = 1e-5
"""Σ|π − πP| above which there is no answer."""

LAW_TAIL = 1e-7
"""Share of the arrivals in a step beyond the last number that is told apart."""

TOLERANCE = 1e-7
"""Σ|π − πP| at the solver's stop."""


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
        return busy, float(self.law[0, 0, 0]) / self.rate

    def _mean_steps(self, law: np.ndarray) -> float:
        batch, count = self.chain.batch, self.chain.count
        whole = batch.whole[..., 0] * batch.share + batch.whole[..., 1] * (1.0 - batch.share)
        present = kernel.by_occupied(law, self.chain.slots.occupied, count)
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
        present = kernel.by_occupied(self.law, slots.occupied, chain.count)
        own = kernel.own_step(
            s, present, batch.fits, batch.cut, batch.own_whole[q], batch.own_share[q]
        )
        whole, cut = kernel.step_transforms(s, batch.whole, batch.share, batch.cut)
        formed = np.ones((*batch.fits.shape[:2], s.size), dtype=np.complex128)
        if chain.lookahead:
            # What is left of a cut prompt is in the request's own step, as if formed with it.
            formed[1:] = whole[1:, :1, 0]
            formed[:, 0] = kernel.formed_step(present, batch.fits, whole, cut)
        _, before = kernel.remaining(
            slots.start, slots.target, slots.probability, slots.occupied, slots.joined,
            batch.fits, batch.own_fits[q], own, whole, cut, batch.left, batch.own_left[q],
            self.law.shape[2], formed,
        )  # fmt: skip
        busy = kernel.arriving(
            s, self.rate, self.law, slots.occupied, slots.joined, batch.fits, batch.whole,
            batch.share, batch.cut, length_whole, length_cut, batch.left, before, NEGLIGIBLE,
        )  # fmt: skip
        alone = np.exp(-s * chain.alone[q])
        steps, idle = self.cycle
        return (busy + idle * alone) / (steps + idle)

    @cached_property
    def moments(self) -> tuple[np.ndarray, np.ndarray]:
        """E[X] and E[X²] of the excess delay of each type, (Q,), s and s²."""
        scale = 0.01 / max(self._rough_delay, 1e-9)
        s = scale * np.array([1.0, -1.0, 2.0, -2.0])
        first, second = [], []
        for q, alone in enumerate(self.chain.alone):
            y = (self.transform(q, s) * np.exp(s * alone)).real
            slope = (8.0 * (y[1] - y[0]) - (y[3] - y[2])) / (12.0 * scale)
            bend = (16.0 * (y[0] + y[1]) - (y[2] + y[3]) - 30.0) / (12.0 * scale**2)
            first.append(slope)
            second.append(bend)
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
    longest = rate * float(max(batch.whole.max(), batch.cut.max()))
    size = int(longest + 8.0 * np.sqrt(longest) + 16.0)
    for_whole, for_cut = kernel.poisson_laws(rate, batch.whole, batch.share, batch.cut, size)
    lengths = kernel.trim(for_whole, LAW_TAIL), kernel.trim(for_cut, LAW_TAIL)
    shape = (len(slots.occupied), kinds, levels)
    moved, result = np.empty(shape), np.empty(shape)
    stay = kernel.stay_probability(
        slots.start, slots.target, slots.probability, slots.occupied, batch.fits, for_whole,
        kinds, levels,
    ).ravel()  # fmt: skip

    def step(x: np.ndarray) -> np.ndarray:
        kernel.move(x.reshape(shape), slots.start, slots.target, slots.probability, moved)
        kernel.serve(
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
        return kernel_coarse(
            x.reshape(shape), slots.start, slots.target, slots.probability, slots.occupied,
            batch.fits, for_whole, for_cut, *lengths, by_slots, by_queue, NEGLIGIBLE,
        )  # fmt: skip

    x, used, error = stationary(step, coarse, group, 1.0 - stay, x, TOLERANCE)
    if error > MOST_ERROR:
        raise ScenarioError(
            f"delay_model: step_chain at {rate:.4g} requests/s, {rate / chain.capacity:.4g} of its "
            f"capacity, did not settle: {error:.1g} is left of its balance"
        )
    kernel.move(x.reshape(shape), slots.start, slots.target, slots.probability, moved)
    law = moved.copy()
    return Stationary(chain, rate, law, float(law[:, :, -1].sum()), used, lengths)


NODES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.875, 0.92, 0.95)
"""Utilisations at which mean delays are computed; in between they are interpolated."""


class _Curve:
    """(1 − ρ)·E[X] of one chain over its utilisation, monotone cubic between :data:`NODES`.

    A node is solved when an interval beside it is first asked for. Beyond the last one, (1 − ρ)·E
    goes on in a straight line to ρ = 1, the form of heavy traffic.
    """

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self._solved: dict[int, Stationary] = {}
        self._pieces: dict[int, PchipInterpolator] = {}

    def node(self, i: int) -> Stationary:
        if i not in self._solved:
            near = min(self._solved, key=lambda j: abs(j - i), default=None)
            start = None if near is None else self._solved[near]
            self._solved[i] = solve(self.chain, NODES[i] * self.chain.capacity, start=start)
        return self._solved[i]

    def _value(self, i: int) -> np.ndarray:
        if i == 0:
            return np.zeros(len(self.chain.alone))
        if i == len(NODES):
            last, before = self._value(i - 1), self._value(i - 2)
            ahead = last + (last - before) * (1.0 - NODES[-1]) / (NODES[-1] - NODES[-2])
            return np.where(ahead > 0, ahead, last)
        return (1.0 - NODES[i]) * self.node(i).moments[0]

    def mean(self, rho: float) -> np.ndarray:
        places = np.array([*NODES, 1.0])
        i = int(np.searchsorted(places, rho, side="right")) - 1
        i = min(max(i, 0), len(NODES) - 1)
        if i not in self._pieces:
            low, high = max(i - 1, 0), min(i + 2, len(NODES))
            values = np.array([self._value(k) for k in range(low, high + 1)])
            self._pieces[i] = PchipInterpolator(places[low : high + 1], values, axis=0)
        return self._pieces[i](rho) / (1.0 - rho)


class StretchedLaw(ExcessDelay):
    """Another law with its time stretched by a factor per type."""

    def __init__(self, law: ExcessDelay, mean: np.ndarray) -> None:
        self.wait_probability = law.wait_probability
        self.mean = mean
        self._law = law
        self._factor = mean / law.mean

    def cdf(self, q: int, seconds: np.ndarray) -> np.ndarray:
        return self._law.cdf(q, np.asarray(seconds, dtype=float) / self._factor[q])

    def decay(self, q: int) -> float:
        return self._law.decay(q) / float(self._factor[q])


class _Undelayed(ExcessDelay):
    """Nobody arrives, so nobody is delayed."""

    def __init__(self, types: int) -> None:
        self.wait_probability = 0.0
        self.mean = np.zeros(types)

    def cdf(self, q: int, seconds: np.ndarray) -> np.ndarray:
        return np.where(np.asarray(seconds) < 0, 0.0, 1.0)

    def decay(self, q: int) -> float:
        return 0.0


class StepChain(DelayModel):
    """The step chain as a delay model; needs the engine's step time and token budget.

    ``output_scv`` is the SCV of the tokens generated by one type around their mean.
    """

    name = "step_chain"
    uses_step_time = True

    def __init__(self, output_scv: float = 0.0) -> None:
        self.output_scv = output_scv
        self._curves: dict[tuple[bytes, ...], _Curve] = {}

    def curve(self, load: TierLoad) -> _Curve:
        key = (
            load.weights.tobytes(),
            np.asarray(load.new_tokens).tobytes(),
            np.asarray(load.cached_tokens).tobytes(),
            np.asarray(load.output_tokens).tobytes(),
            bytes(
                f"{load.concurrency} {load.token_budget} {load.lookahead} {id(load.step_time)}",
                "ascii",
            ),
        )
        if key not in self._curves:
            if len(self._curves) > 256:
                self._curves.clear()
            self._curves[key] = _Curve(Chain.of(load, self.output_scv))
        return self._curves[key]

    def utilisation(self, load: TierLoad) -> float:
        """λ over the rate at which the chain completes requests while somebody always waits."""
        return load.arrival_rate / self.curve(load).chain.capacity

    def mean(self, load: TierLoad) -> np.ndarray:
        return self.curve(load).mean(self.utilisation(load))

    def excess(self, load: TierLoad) -> ExcessDelay:
        if load.arrival_rate <= 0:
            return _Undelayed(load.weights.size)
        curve = self.curve(load)
        chain = curve.chain
        rho = self.utilisation(load)
        rate = min(rho, NODES[-1]) * chain.capacity
        found = curve.node(len(NODES) - 1) if rho >= NODES[-1] else solve(chain, rate)
        return StretchedLaw(found.excess, curve.mean(rho)) if rho > NODES[-1] else found.excess


def scv_of(argument: str | None, model: str) -> float:
    """The SCV of one type's generated tokens that a delay model's argument gives; 0 if absent.

    Raises
    ------
    ScenarioError
        It is no number >= 0.
    """
    if argument is None:
        return 0.0
    try:
        scv = float(argument)
    except ValueError:
        scv = -1.0
    if not 0 <= scv < np.inf:
        raise ScenarioError(f"delay_model: {model}:{argument}: an SCV is a number >= 0")
    return scv


register("step_chain", lambda argument: StepChain(scv_of(argument, "step_chain")))
