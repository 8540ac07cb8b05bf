"""Engine model: one engine of continuous batching, step by step in virtual time.

The scheduler is vLLM's V1 (or one in the manner of SGLang), the step time a calibration's. Three
ways in: :func:`simulate_engine` for a whole list of requests; :class:`EngineState` for whoever
drives an engine step by step, in virtual or wall-clock time; and the compiled functions of
``engine_model_kernel`` for a simulation that is compiled itself.

>>> from testbed.step_time import StepTime
>>> step_time = StepTime(c_pre=0.004, a=4e-5, c_dec=0.0025, e=1e-4)
>>> trace = simulate_engine(EngineConfig(), step_time, [0.0], [500], [3])
>>> trace.first_token.round(4).tolist(), trace.finished.round(4).tolist()
([0.024], [0.0292])
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from testbed.errors import EngineError
from testbed.simulation import engine_model_state as kernel
from testbed.simulation.engine_model_config import EngineConfig, never_fits, new_engine
from testbed.simulation.engine_model_kernel import LOG_COLUMNS, advance_arrays, arrays
from testbed.simulation.engine_model_live import EngineState, StepEvents
from testbed.simulation.engine_model_state import Engine, Requests
from testbed.step_time import OperatorStepTime, StepTime
from testbed.workload.blocks import first_seen

__all__ = [
    "LOG_COLUMNS",
    "EngineConfig",
    "EngineState",
    "EngineTrace",
    "StepEvents",
    "new_engine",
    "simulate_engine",
]

_NO_LOG = np.empty((0, len(LOG_COLUMNS)))


@dataclass(frozen=True)
class EngineTrace:
    """What happened to each of N requests, in their order; times in seconds.

    A request that could never fit is ``rejected``: its times are NaN.
    """

    arrival: np.ndarray
    queued: np.ndarray
    scheduled: np.ndarray
    first_token: np.ndarray
    finished: np.ndarray
    cached_tokens: np.ndarray
    preemptions: np.ndarray
    rejected: np.ndarray
    steps: int
    log: dict[str, np.ndarray] | None = field(default=None, repr=False)

    @property
    def ttft(self) -> np.ndarray:
        """Time to first token from arrival, (N,), s."""
        return self.first_token - self.arrival


def simulate_engine(
    config: EngineConfig,
    step_time: StepTime | OperatorStepTime,
    arrivals: npt.ArrayLike,
    input_tokens: npt.ArrayLike,
    output_tokens: npt.ArrayLike,
    *,
    block_hashes: npt.ArrayLike | None = None,
    block_offsets: npt.ArrayLike | None = None,
    reusable_tokens: npt.ArrayLike | None = None,
    log: bool = False,
) -> EngineTrace:
    """Serve N requests on one engine, from empty to empty.

    Parameters
    ----------
    arrivals
        (N,) seconds, not decreasing.
    input_tokens, output_tokens
        (N,) tokens, at least 1 each.
    block_hashes, block_offsets
        Contents of full blocks: those of request i are ``block_hashes[offsets[i]:offsets[i + 1]]``
        from its first block on, prompt and outputs; equal numbers are equal tokens after equal
        tokens. What they do not reach is like nothing else.
    reusable_tokens
        (N,) tokens of each prompt in a pinned prefix, which takes none of the request's blocks.
        Whole blocks count, and an engine computes at least the last token.
    log
        Keep one row a step (then no steps are taken together).

    Raises
    ------
    EngineError
        Arrays of different lengths, time that runs back, or a request without tokens.
    """
    arrival = np.ascontiguousarray(arrivals, dtype=np.float64)
    count = len(arrival)
    facts = np.zeros((count, 8), dtype=np.int64)
    facts[:, kernel.INPUT] = _tokens("input_tokens", input_tokens, count, 1)
    facts[:, kernel.OUTPUT] = _tokens("output_tokens", output_tokens, count, 1)
    if reusable_tokens is not None:
        facts[:, kernel.REUSABLE] = _tokens("reusable_tokens", reusable_tokens, count, 0)
    if (np.diff(arrival) < 0).any() or not np.isfinite(arrival).all():
        raise EngineError("arrivals: time runs back or is not a number")
    contents, known = np.zeros(0, dtype=np.int64), 0
    if block_hashes is not None:
        if block_offsets is None:
            raise EngineError("block_offsets: needed with block_hashes")
        contents, known = _contents(block_hashes)
        offsets = np.asarray(block_offsets, dtype=np.int64)
        if len(offsets) != count + 1 or (np.diff(offsets) < 0).any() or offsets[-1] > len(contents):
            raise EngineError(f"block_offsets: not {count + 1} positions in block_hashes")
        facts[:, kernel.START] = offsets[:-1]
        facts[:, kernel.COUNT] = _shared(contents, offsets, known)

    times = np.full((count, 5), np.nan)
    times[:, kernel.ARRIVAL] = arrival
    total = facts[:, kernel.INPUT] + facts[:, kernel.OUTPUT]
    rejected = never_fits(config, facts)
    keep = np.flatnonzero(~rejected)
    requests = Requests(times=times, facts=facts, contents=contents)
    longest = -(-int(total[keep].max(initial=1)) // config.block_size)
    facts[keep[:-1], kernel.FOLLOWING] = keep[1:]
    if len(keep):
        facts[keep[-1], kernel.FOLLOWING] = kernel.NOBODY

    # Where nothing is shared only a preempted request can find blocks again: they are told apart
    # once there is one.
    counted = not config.prefix_caching or not facts[:, kernel.COUNT].any()
    engine, rows = _serve_all(
        config, new_engine(config, step_time, longest, known, counted), requests, keep, log
    )
    if engine.state[kernel.STUCK] == kernel.UNTOLD:
        facts[:, [kernel.CACHED_TOKENS, kernel.TIMES_PREEMPTED]] = 0
        facts[keep[:-1], kernel.FOLLOWING] = keep[1:]
        facts[keep[-1], kernel.FOLLOWING] = kernel.NOBODY
        engine, rows = _serve_all(
            config, new_engine(config, step_time, longest, known, False), requests, keep, log
        )
    _check(engine)
    table = None
    if log:
        table = {n: c.copy() for n, c in zip(LOG_COLUMNS, np.concatenate(rows).T, strict=True)}
    return EngineTrace(
        arrival=arrival,
        queued=times[:, kernel.QUEUED],
        scheduled=times[:, kernel.SCHEDULED],
        first_token=times[:, kernel.FIRST],
        finished=times[:, kernel.DONE],
        cached_tokens=facts[:, kernel.CACHED_TOKENS],
        preemptions=facts[:, kernel.TIMES_PREEMPTED],
        rejected=rejected,
        steps=int(engine.state[kernel.STEPS]),
        log=table,
    )


def _serve_all(
    config: EngineConfig, engine: Engine, requests: Requests, keep: np.ndarray, log: bool
) -> tuple[Engine, list[np.ndarray]]:
    """Serve the requests ``keep`` (in a list already) to the end; the engine and log rows."""
    if len(keep):
        engine.state[[kernel.HEAD, kernel.UNSEEN]] = keep[0]
        engine.state[kernel.TAIL] = keep[-1]
        engine.clock[kernel.NOW] = min(requests.times[keep[0], kernel.ARRIVAL], 0.0)
    rows: list[np.ndarray] = []
    buffer = np.empty((4096, len(LOG_COLUMNS))) if log else _NO_LOG
    sums = np.empty(7)
    while not advance_arrays(*arrays(engine, requests), math.inf, buffer, sums):
        rows.append(buffer[: engine.state[kernel.LOGGED]].copy())
        engine.state[kernel.LOGGED] = 0
    rows.append(buffer[: engine.state[kernel.LOGGED]])
    return engine, rows


def _tokens(name: str, values: npt.ArrayLike, count: int, least: int) -> np.ndarray:
    array = np.asarray(values)
    if array.shape != (count,):
        raise EngineError(f"{name}: shape {array.shape} for {count} arrivals")
    if not np.issubdtype(array.dtype, np.integer) and (array != np.floor(array)).any():
        raise EngineError(f"{name}: not whole tokens")
    if count and array.min() < least:
        raise EngineError(f"{name}[{int(array.argmin())}]: {array.min()} is below {least}")
    return array.astype(np.int64)


def _contents(block_hashes: npt.ArrayLike) -> tuple[np.ndarray, int]:
    """Contents numbered from 0 on, in order of appearance unless that dense already, and how
    many numbers there are: the pool then looks them up directly."""
    array = np.asarray(block_hashes)
    if len(array) == 0:
        return np.zeros(0, dtype=np.int64), 0
    if array.min() >= 0 and array.max() < 4 * len(array):
        return array.astype(np.int64), int(array.max()) + 1
    numbers, count = first_seen(array.astype(np.uint64))
    return numbers.astype(np.int64), int(count)


def _shared(contents: np.ndarray, offsets: np.ndarray, known: int) -> np.ndarray:
    """Leading blocks, (N,), of each request that another block of the run equals.

    A content stands for a block and all before it, so that what follows one that is unique is
    unique too and can never be found.
    """
    counts = np.diff(offsets)
    if known == 0:
        return counts
    once = np.flatnonzero(np.bincount(contents, minlength=known)[contents] == 1)
    first = np.searchsorted(once, offsets[:-1])
    end = np.append(once, len(contents))[first]
    return np.minimum(end - offsets[:-1], counts)


def _check(engine: Engine) -> None:
    if engine.state[kernel.STUCK]:
        raise EngineError("a request waits that the pool can never hold")
