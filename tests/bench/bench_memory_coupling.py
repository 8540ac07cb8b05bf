"""How many sequences run beside a pinned prefix: both accountings against vLLM itself (Theory H12).

Run: ``python tests/bench/bench_memory_coupling.py [--device rtx4090] [--time-scale 0.1]``.

vLLM in device time, its own scheduler and block pool; time does not matter here, only counts. For
each depth of a pinned prefix the engine is flooded with requests that start with it, and the
running sequences are counted step by step while somebody waits for memory. Beside them stands what
the two accountings promise:

- constant: c = floor((M − B)/m_run), m_run the whole request, shared blocks counted again (A9);
- own: c = floor((M − B)/own), own the blocks that a request takes beyond the prefix (H12).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

NEW, OUTPUTS = 512, 128
DEPTHS = (0, 1024, 2048, 4096, 8192, 16384)
FLOOD = 3.0
"""Requests sent at once, as a multiple of what the larger accounting promises."""


async def measure(device: str, scale: float, depths: tuple[int, ...]) -> list[dict[str, Any]]:
    from calibration.prompts import Prompts
    from cluster.engines import make_engine
    from cluster.engines.base import Placement
    from cluster.engines.step_log import read_steps
    from testbed.scenario import EngineSpec

    with tempfile.TemporaryDirectory() as folder:
        log = str(Path(folder) / "steps.bin")
        spec = EngineSpec(name="vllm", device=device, time_scale=scale, max_sequences=256)
        engine = make_engine(spec, Placement(step_log=log))
        facts = await engine.start()
        rows = []
        try:
            for depth in depths:
                prompts = Prompts(depth, facts.vocabulary, "memory")
                chain = prompts.cold(depth)
                if depth:
                    await engine.pin("prefix", chain)
                block, usable = facts.block_size, facts.num_blocks - 1
                pinned = depth // block
                own = math.ceil((depth + NEW + OUTPUTS - 1) / block) - pinned
                promised = {
                    "constant": (usable - pinned) // (own + pinned),
                    "own": (usable - pinned) // own,
                }
                before = len(read_steps(log)["running"]) if os.path.exists(log) else 0
                count = int(FLOOD * promised["own"])
                held = await asyncio.gather(
                    *(
                        engine.generate(f"{depth}-{i}", prompts.after(chain, depth, NEW), OUTPUTS)
                        for i in range(count)
                    )
                )
                await asyncio.sleep(0.2)
                steps = {k: v[before:] for k, v in read_steps(log).items()}
                full = (steps["waiting"] > 0) & (steps["decodes"] > 0)
                # The first fill of an empty pool is not yet a steady state.
                full[: int(np.argmax(steps["running"] >= steps["running"].max()))] = False
                load = await engine.load()
                rows.append(
                    {
                        "depth": depth,
                        "pinned_blocks": pinned,
                        "usable_blocks": usable,
                        "own_blocks": own,
                        **{f"c_{name}": c for name, c in promised.items()},
                        "running_mean": float(steps["running"][full].mean()),
                        "running_max": int(steps["running"].max()),
                        "steps": int(full.sum()),
                        "requests": count,
                        "cached_tokens": float(np.mean([g.cached_tokens for g in held])),
                        "preemptions": load.preemptions,
                        "kv_usage_max": float(steps["kv_usage"].max()),
                    }
                )
                if depth:
                    await engine.unpin("prefix")
                await engine.forget()
        finally:
            await engine.stop()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="rtx4090")
    parser.add_argument("--time-scale", type=float, default=0.1)
    parser.add_argument("--depths", type=int, nargs="+", default=list(DEPTHS))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = asyncio.run(measure(given.device, given.time_scale, tuple(given.depths)))
    print(f"{NEW} new tokens after the prefix, {OUTPUTS} outputs; sequences that run at once")
    print(
        f"{'prefix':>8} {'constant':>9} {'own':>6} {'seen, mean':>11} {'most':>6} {'preempted':>10}"
    )
    for row in rows:
        print(
            f"{row['depth']:8d} {row['c_constant']:9d} {row['c_own']:6d} "
            f"{row['running_mean']:11.1f} {row['running_max']:6d} {row['preemptions']:10d}"
        )
    if given.out is not None:
        given.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
