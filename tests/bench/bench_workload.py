"""Speed and memory of the workload path: `python tests/bench/bench_workload.py PIECE [REQUESTS]`.

Pieces: `mooncake` (the published traces, where `../shared/data` lies beside the repository),
`drawn` (a trace of REQUESTS × 25 blocks drawn in memory), `file` (the same written as a file of
Mooncake's form and read), `knapsack` (greedy and price against the proven bound). Each prints the
seconds of every stage, on the wall and of the processor, blocks per second, the processor's time as
a multiple of sorting the same block ids with NumPy in the same run, and the peak memory so far.
Compilation is a piece of its own and comes first.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import orjson

from testbed.scenario import Prefill
from testbed.workload.forest import PrefixForest
from testbed.workload.knapsack import pack_by_price, pack_exactly, pack_greedily
from testbed.workload.lru import hit_curve
from testbed.workload.profiles import ForestValue, candidates
from testbed.workload.scaling import scale_requests
from testbed.workload.statistics import statistics
from testbed.workload.trace import Labels, Trace, TraceFacts, read_trace

BLOCKS = 25
TRACES = Path(__file__).parents[3] / "shared" / "data" / "traces" / "mooncake"
PREFILL = Prefill(linear=2e-4, quadratic=2e-8)
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
    wall, start = time.perf_counter(), time.process_time()
    result = work()
    seconds, wall = time.process_time() - start, time.perf_counter() - wall
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    rate = f"{blocks / seconds / 1e6:7.2f} M blocks/s" if blocks else " " * 18
    ratio = f"{seconds / yardstick:6.2f} × sort" if yardstick else " " * 13
    print(
        f"{name:38} {wall:7.2f} s, CPU {seconds:7.2f} s {rate} {ratio}   peak {peak:5.2f} GiB",
        flush=True,
    )
    return result


def everything(name: str, trace: Trace) -> None:
    m = len(trace.blocks)
    start = time.process_time()
    np.sort(trace.blocks)
    sort = time.process_time() - start
    forest = stage(f"{name}: forest", lambda: PrefixForest.of(trace), m, sort)
    print(f"    {len(forest):,} vertices of {m:,} blocks; sort {sort:.3f} s")
    curve = stage(f"{name}: LRU stack distances", lambda: hit_curve(trace, forest), m, sort)
    stage(f"{name}: statistics, the rest", lambda: statistics(trace, forest, curve), 0, sort)
    requests = scale_requests(trace, forest)
    value = stage(
        f"{name}: vertex values", lambda: ForestValue.of(requests, PREFILL, 131072.0), m, sort
    )
    stage(f"{name}: candidate profiles", lambda: candidates(value, 8e9), 0, sort)


def mooncake() -> None:
    for name in ("conversation", "synthetic"):
        path = TRACES / f"{name}_trace.jsonl"
        if not path.exists():
            print(f"{path.name}: not there, not measured")
            continue
        trace = stage(f"{name}: read", lambda path=path: read_trace(path))
        everything(name, trace)


def drawn(requests: int) -> None:
    trace = stage("draw", lambda: drawn_trace(requests))
    everything(f"{requests:,} × {BLOCKS}", trace)


def file(requests: int) -> None:
    trace = drawn_trace(requests)
    ids = trace.blocks.reshape(requests, BLOCKS)
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as out:
        for i in range(requests):
            row = {
                "timestamp": int(1000 * trace.arrival[i]),
                "input_length": int(trace.input_tokens[i]),
                "output_length": 100,
                "hash_ids": ids[i].tolist(),
            }
            out.write(orjson.dumps(row) + b"\n")
        out.flush()
        size = Path(out.name).stat().st_size
        del trace, ids
        read = stage(
            f"read {requests:,} rows, {size / 1e6:,.0f} MB",
            lambda: read_trace(out.name, block_size=16),
            requests * BLOCKS,
        )
        stage("its forest", lambda: PrefixForest.of(read), requests * BLOCKS)


def knapsack(requests: int) -> None:
    """What the two fast ways leave of the proven bound, and of the optimum where that is found."""
    paths = [TRACES / f"{n}_trace.jsonl" for n in ("conversation", "synthetic")]
    traces = {p.stem: read_trace(p) for p in paths if p.exists()}
    traces[f"{requests:,} drawn"] = drawn_trace(requests)
    for name, trace in traces.items():
        requests_of = scale_requests(trace, PrefixForest.of(trace))
        for support in (2, 10):
            value = ForestValue.of(requests_of, PREFILL, 131072.0, min_support=support)
            keep = np.flatnonzero(value.supported)
            number = np.full(len(value.saving) + 1, -1, dtype=np.int32)
            number[keep] = np.arange(len(keep), dtype=np.int32)
            parent = number[value.requests.forest.parent[keep]]
            print(f"{name}: {len(keep):,} vertices of {support} requests or more")
            for budget in (1e9, 8e9, 64e9, 512e9):
                packed(parent, value.saving[keep], value.state_tokens[keep], budget)


def packed(parent: np.ndarray, saving: np.ndarray, tokens: np.ndarray, budget: float) -> None:
    unit = int(np.gcd.reduce(tokens))
    work = parent, saving, tokens // unit, int(budget // 131072) // unit
    start = time.process_time()
    price = pack_by_price(*work)
    middle = time.process_time()
    greedy = float(saving[pack_greedily(*work)].sum())
    end = time.process_time()
    exact = ""
    if len(parent) * (min(work[3], int(work[2].sum())) + 1) <= 1e8:
        exact = f", optimum {pack_exactly(*work).value / price.upper_bound:.6f}"
    print(
        f"    {budget / 1e9:3.0f} GB: of the bound, price {price.value / price.upper_bound:.6f} in "
        f"{middle - start:.2f} s, greedy {greedy / price.upper_bound:.6f} in "
        f"{end - middle:.2f} s{exact}",
        flush=True,
    )


def main() -> None:
    piece = sys.argv[1] if len(sys.argv) > 1 else "mooncake"
    requests = int(sys.argv[2]) if len(sys.argv) > 2 else 1_000_000
    everything("compilation", drawn_trace(1000))
    pieces = {
        "mooncake": mooncake,
        "drawn": lambda: drawn(requests),
        "file": lambda: file(requests),
        "knapsack": lambda: knapsack(min(requests, 200_000)),
    }
    if piece not in pieces:
        sys.exit(f"bench_workload: {piece!r} is not one of {', '.join(pieces)}")
    pieces[piece]()


if __name__ == "__main__":
    main()
