"""Speed and memory of the workload path: `python tests/bench/bench_workload.py [REQUESTS]`.

Prints seconds of each stage, blocks per second, the time of each stage as a multiple of sorting
the same block ids with NumPy in the same run, and the peak memory of the process. The large
trace is drawn in memory (1,000,000 requests of 25 blocks by default); the published traces are
measured where `../shared/data` lies beside the repository.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from testbed.scenario import Prefill
from testbed.workload.forest import PrefixForest
from testbed.workload.lru import hit_curve
from testbed.workload.profiles import ForestValue, candidates
from testbed.workload.scaling import scale_requests
from testbed.workload.statistics import statistics
from testbed.workload.trace import Labels, Trace, TraceFacts, read_trace

BLOCKS = 25
TRACES = Path(__file__).parents[3] / "shared" / "data" / "traces" / "mooncake"
R = TypeVar("R")


def drawn_trace(requests: int, seed: int = 0) -> Trace:
    """Requests of 25 blocks of 16 tokens: half of them share 10 blocks with one of 1,000 others,
    the rest is their own; ids are scattered over 64 bits."""
    draw = np.random.default_rng(seed)
    families = draw.integers(0, 1000, requests)
    own = np.arange(requests * BLOCKS, dtype=np.uint64).reshape(requests, BLOCKS) + np.uint64(10**6)
    shared = families[:, None].astype(np.uint64) * np.uint64(BLOCKS) + np.arange(
        10, dtype=np.uint64
    )
    half = draw.random(requests) < 0.5
    own[half, :10] = shared[half]
    ids = own.ravel() * np.uint64(0x9E3779B97F4A7C15)  # a bijection of 64-bit numbers
    absent = Labels(np.full(requests, -1, dtype=np.int32))
    return Trace(
        arrival=np.sort(draw.random(requests)) * 3600,
        input_tokens=np.full(requests, BLOCKS * 16 - 3, dtype=np.int64),
        output_tokens=np.full(requests, 100, dtype=np.int64),
        block_size=16,
        blocks=ids,
        block_offsets=np.arange(requests + 1, dtype=np.int64) * BLOCKS,
        time_grid=0.0,
        session=absent,
        type=absent,
        tenant=absent,
        adapter=absent,
        turn=np.zeros(requests, dtype=np.int32),
        facts=TraceFacts("drawn", "drawn"),
    )


def stage(name: str, work: Callable[[], R], blocks: int = 0, yardstick: float = 0.0) -> R:
    start = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    rate = f"{blocks / seconds / 1e6:8.2f} M blocks/s" if blocks else " " * 19
    ratio = f"{seconds / yardstick:7.2f} × sort" if yardstick else " " * 14
    print(f"{name:34} {seconds:9.3f} s {rate} {ratio}   peak {peak:6.2f} GiB", flush=True)
    return result


def everything(name: str, trace: Trace) -> None:
    m = len(trace.blocks)
    start = time.perf_counter()
    np.sort(trace.blocks)
    sort = time.perf_counter() - start
    forest = stage(f"{name}: forest", lambda: PrefixForest.of(trace), m, sort)
    print(f"    {len(forest):,} vertices of {m:,} blocks")
    curve = stage(f"{name}: LRU stack distances", lambda: hit_curve(trace, forest), m, sort)
    stage(f"{name}: statistics, the rest", lambda: statistics(trace, forest, curve), 0, sort)
    requests = scale_requests(trace, forest)
    prefill = Prefill(linear=2e-4, quadratic=2e-8)
    value = stage(
        f"{name}: vertex values", lambda: ForestValue.of(requests, prefill, 131072.0), m, sort
    )
    stage(f"{name}: candidate profiles", lambda: candidates(value, 8e9), 0, sort)


def main() -> None:
    requests = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    everything("warm-up (compilation)", drawn_trace(1000))
    for name in ("conversation", "synthetic"):
        path = TRACES / f"{name}_trace.jsonl"
        if not path.exists():
            print(f"{path.name}: not there, not measured")
            continue
        trace = stage(f"{name}: read", lambda path=path: read_trace(path))
        everything(name, trace)
    everything(f"{requests:,} × {BLOCKS}", stage("draw", lambda: drawn_trace(requests)))


if __name__ == "__main__":
    main()
