"""TraceStatistics: what a trace is like, in the figures that decide about caching and queues."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from testbed.errors import ScenarioError
from testbed.scenario import EngineSpec, WorkloadSpec
from testbed.workload.forest import PrefixForest
from testbed.workload.lru import HitCurve, hit_curve, overlap_depth
from testbed.workload.scaling import scale_effect, scale_requests
from testbed.workload.trace import Trace

QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
WINDOWS = (1.0, 10.0, 60.0)
"""Seconds of the windows whose counts give the index of dispersion."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ArrivalStatistics(_Part):
    rate: float = Field(description="requests/s: gaps over the time that they span")
    cv2: float | None = Field(description="squared coefficient of variation of the gaps")
    lag1: float | None = Field(description="correlation of one gap with the next")
    dispersion: dict[str, float] = Field(
        description="{window s: variance/mean of the counts}; 1 for a Poisson process"
    )
    distinct_times: int
    most_at_once: int = Field(description="requests that share one recorded time, at most")
    time_grid: float = Field(description="s")


class PrefixStatistics(_Part):
    block_size: int
    block_accesses: int
    unique_blocks: int
    radix_edges: int = Field(description="vertices after chains without a branch are merged")
    roots: int
    common_blocks: int = Field(description="blocks that every request carries")
    common_tokens: int
    families: int = Field(description="subtrees below what every request carries")
    shared_blocks: int = Field(description="blocks that two requests or more carry")
    hit_ratio_blocks: float = Field(description="infinite cache")
    hit_ratio_tokens: float = Field(description="infinite cache, by prompt tokens")
    hit_curve: dict[str, tuple[float, float]] = Field(
        description="{LRU cache of blocks: hit ratio by blocks, by tokens}"
    )
    overlap_tokens: dict[str, float] = Field(
        description="quantiles of the tokens that earlier requests share with a prompt"
    )
    overlap_share: float = Field(description="requests that share anything with an earlier one")
    lifetime: dict[str, float] = Field(
        description="quantiles over shared blocks of the time from first to last use, s"
    )
    reuse_interval: dict[str, float] = Field(
        description="quantiles over all reuses of the time since the block's last use, s"
    )


class ScaleStatistics(_Part):
    """What a token scale and an engine's block size make of the sharing."""

    token_scale: float
    engine_block_size: int
    input_tokens: dict[str, float] = Field(description="quantiles and mean, scaled")
    hit_ratio_recorded: float = Field(description="infinite cache, by prompt tokens, as recorded")
    hit_ratio_scaled: float = Field(
        description="the same of the scaled prompts: whole engine blocks, the last token computed"
    )


class TraceStatistics(_Part):
    """Everything that ``testbed trace`` prints."""

    trace: dict[str, Any] = Field(description="provenance: file, hash, format, dropped rows")
    requests: int
    duration: float = Field(description="s")
    arrivals: ArrivalStatistics
    input_tokens: dict[str, float] = Field(description="quantiles and mean")
    output_tokens: dict[str, float] = Field(description="quantiles and mean")
    sessions: int
    types: dict[str, int] = Field(description="requests of each labelled type")
    prefixes: PrefixStatistics | None = Field(description="absent where none are recorded")
    scaled: ScaleStatistics | None = Field(default=None, description="where a scale was asked for")

    def to_dict(self) -> dict[str, Any]:
        return self.model_dump(mode="json")


def statistics(
    trace: Trace, forest: PrefixForest | None = None, curve: HitCurve | None = None
) -> TraceStatistics:
    """Measure a trace; the forest and its hit curve are built where they are not given."""
    labelled = trace.type.codes[trace.type.codes >= 0]
    counts = np.bincount(labelled, minlength=len(trace.type.names))
    return TraceStatistics(
        trace=trace.facts.to_dict(),
        requests=len(trace),
        duration=trace.duration,
        arrivals=arrival_statistics(trace.arrival, trace.time_grid),
        input_tokens=_spread(trace.input_tokens, mean=True),
        output_tokens=_spread(trace.output_tokens, mean=True),
        sessions=len(np.unique(trace.session.codes[trace.session.codes >= 0])),
        types={n: int(c) for n, c in zip(trace.type.names, counts, strict=True) if c},
        prefixes=_prefixes(trace, forest, curve) if len(trace.blocks) else None,
    )


def arrival_statistics(arrival: np.ndarray, grid: float = 0.0) -> ArrivalStatistics:
    """Variability of a point process given by its sorted times (N,), seconds."""
    gaps = np.diff(arrival)
    span = float(arrival[-1] - arrival[0])
    _, multiplicity = np.unique(arrival, return_counts=True)
    return ArrivalStatistics(
        rate=len(gaps) / span if span > 0 else 0.0,
        cv2=float(gaps.var() / gaps.mean() ** 2) if len(gaps) > 1 and span > 0 else None,
        lag1=_lag1(gaps),
        dispersion={
            f"{w:g}": d for w in WINDOWS if (d := index_of_dispersion(arrival, w)) is not None
        },
        distinct_times=len(multiplicity),
        most_at_once=int(multiplicity.max()),
        time_grid=grid,
    )


def index_of_dispersion(arrival: np.ndarray, window: float) -> float | None:
    """Variance over mean of the counts in whole windows; ``None`` with fewer than ten windows."""
    span = float(arrival[-1] - arrival[0])
    windows = math.floor(span / window)
    if not 10 <= windows <= 10_000_000:
        return None
    index = ((arrival - arrival[0]) / window).astype(np.int64)
    counts = np.bincount(index[index < windows], minlength=windows)
    return float(counts.var() / counts.mean()) if counts.any() else None


def _lag1(gaps: np.ndarray) -> float | None:
    if len(gaps) < 3 or gaps[:-1].std() == 0 or gaps[1:].std() == 0:
        return None
    return float(np.corrcoef(gaps[:-1], gaps[1:])[0, 1])


def scale_statistics(trace: Trace, token_scale: float, engine_block_size: int) -> ScaleStatistics:
    """Measure what scaling every block by ``token_scale`` does to lengths and hits.

    Raises
    ------
    ScenarioError
        A scale of 0 or below, or a block of less than one token.
    """
    if not 0 < token_scale < math.inf:
        raise ScenarioError(f"token_scale: {token_scale:g} is not a number > 0")
    if engine_block_size < 1:
        raise ScenarioError(f"engine block: {engine_block_size} is not a number of tokens >= 1")
    requests = scale_requests(
        trace,
        PrefixForest.of(trace),
        WorkloadSpec(token_scale=token_scale),
        EngineSpec(block_size=engine_block_size, max_model_len=2**62),
    )
    effect = scale_effect(requests)
    return ScaleStatistics(
        token_scale=token_scale,
        engine_block_size=engine_block_size,
        input_tokens=_spread(requests.input_tokens, mean=True),
        hit_ratio_recorded=effect["trace"],
        hit_ratio_scaled=effect["scaled"],
    )


def _spread(values: np.ndarray, mean: bool = False) -> dict[str, float]:
    if not len(values):
        return {}
    out = {
        f"{q:g}": float(v) for q, v in zip(QUANTILES, np.quantile(values, QUANTILES), strict=True)
    }
    return {"mean": float(values.mean()), **out} if mean else out


def _prefixes(
    trace: Trace, forest: PrefixForest | None, curve: HitCurve | None
) -> PrefixStatistics:
    forest = forest if forest is not None else PrefixForest.of(trace)
    curve = curve if curve is not None else hit_curve(trace, forest)
    overlap = overlap_depth(trace, forest)
    shared = forest.count > 1
    sizes = [2**k for k in range(max(1, len(forest)).bit_length()) if 2**k < len(forest)]
    return PrefixStatistics(
        block_size=trace.block_size,
        block_accesses=len(forest.path),
        unique_blocks=len(forest),
        radix_edges=len(forest.edges()),
        roots=len(forest.roots),
        common_blocks=len(forest.common),
        common_tokens=int(forest.depth[forest.common].max(initial=0)),
        families=len(np.unique(forest.family[forest.family >= 0])),
        shared_blocks=int(shared.sum()),
        hit_ratio_blocks=1.0 - len(forest) / len(forest.path),
        hit_ratio_tokens=float(curve.tokens[-1]),
        hit_curve={str(c): curve.at(c) for c in [*sizes, len(forest)]},
        overlap_tokens=_spread(overlap),
        overlap_share=float((overlap > 0).mean()),
        lifetime=_spread((forest.last_use - forest.first_use)[shared]),
        reuse_interval=_spread(forest.reuse_intervals(trace.arrival)[1]),
    )
