"""Speed and memory of queues and networks in virtual time (`python tests/bench/…` runs it).

Everything is measured in one run, after warm-up, in CPU seconds of one core, which a busy machine
stretches less than those of a clock; goals stand beside what is reached.
"""

from __future__ import annotations

import argparse
import platform
import resource
import time
from collections.abc import Callable
from typing import Any

import ciw
import numpy as np

from testbed.scenario import Scenario
from testbed.simulation import simulate
from testbed.simulation.queue import mmc_waits, waits
from testbed.step_time import StepTime

PROFILES = [
    {"name": "plain", "fraction": 0.4, "persistent_bytes": 0, "reusable": {"chat": 0, "agent": 0}},
    {
        "name": "shallow",
        "fraction": 0.4,
        "persistent_bytes": 1.0e9,
        "reusable": {"chat": 256, "agent": 256},
    },
    {
        "name": "deep",
        "fraction": 0.2,
        "persistent_bytes": 3.0e9,
        "reusable": {"chat": 500, "agent": 2400},
    },
]
SCENARIO: dict[str, Any] = {
    "name": "1,000 nodes, 3 profiles",
    "radio": {"model": "power_law", "xi": 0.1, "alpha": 2.0},
    "nodes": {"density": 1.0},
    "demand": {"intensity": 3.0},
    "prefill": {"overhead": 0.004, "linear": 2.0e-4},
    "memory": {"capacity": 8.0e9, "per_sequence": 5.0e8, "per_token": 131072},
    "requests": [
        {
            "name": "chat",
            "probability": 0.6,
            "tokens": 1000,
            "decode_occupancy": 0.3,
            "output_tokens": 16,
        },
        {
            "name": "agent",
            "probability": 0.4,
            "tokens": 3000,
            "decode_occupancy": 0.5,
            "output_tokens": 16,
        },
    ],
    "profiles": PROFILES,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=500_000)
    count = parser.parse_args().requests
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}")
    memory(count)  # first: the peak is that of the whole process
    queues()
    networks(count)


def queues() -> None:
    rng = np.random.default_rng(1)
    mmc_waits(1.0, 1.0, 9, 10, rng)
    n = 5_000_000
    ours = rate(n, lambda: mmc_waits(0.82 * 9, 1.0, 9, n, rng))
    arrival = np.cumsum(rng.exponential(1 / (0.82 * 9), n))
    service = rng.gamma(2.0, 0.5, n)
    waits(arrival[:9], service[:9], 9)
    general = rate(n, lambda: waits(arrival, service, 9))
    few = 5_000
    theirs = rate(few, lambda: ciw_queue(few))
    line("M/M/9, ρ = 0.82", ours, "customers/s", f"goal 1e7; {ours / theirs:,.0f} × Ciw")
    line("G/G/9 from arrays", general, "customers/s", f"{general / theirs:,.0f} × Ciw")
    line("Ciw, M/M/9", theirs, "customers/s", "")


def ciw_queue(customers: int) -> None:
    network = ciw.create_network(
        arrival_distributions=[ciw.dists.Exponential(0.82 * 9)],
        service_distributions=[ciw.dists.Exponential(1.0)],
        number_of_servers=[9],
    )
    ciw.seed(1)
    ciw.Simulation(network).simulate_until_max_customers(customers, method="Finish")


def networks(count: int) -> None:
    torus = {"space": "torus", "nodes": 1000}
    for label, simulation, changes in (
        ("palm, independent tiers", {}, {}),
        ("palm, 100 nodes, own waits", {"nodes": 100, "waits": "node"}, {}),
        ("torus, nearest", torus, {"policy": "nearest"}),
        ("torus, prefix_only", torus, {"policy": "prefix_only"}),
        ("torus, load_aware, own waits", torus, {}),
        (
            "torus, load_aware, 3 nearest a profile",
            torus,
            {"routing": {"candidates_per_profile": 3}},
        ),
        (
            "torus, failures, moving users",
            {
                **torus,
                "failures": {"mean_uptime": 300.0, "mean_downtime": 30.0},
                "users": {"count": 3000, "mobility": "random_waypoint"},
            },
            {},
        ),
    ):
        asked = Scenario.from_dict({**SCENARIO, **changes, "simulation": simulation})
        simulate(asked, requests=1000, seed=1)
        speed = network_rate(asked, count)
        line(label, speed, "requests/s", f"{speed * 60:.3g}/min; goal 1e6/min")
    engine = Scenario.from_dict(
        {
            **SCENARIO,
            "simulation": {**torus, "node_model": "engine"},
            "engine": {"max_sequences": 16, "block_size": 16},
        }
    )
    step = StepTime(c_pre=0.004, a=2e-4, c_dec=0.006, e=1e-4)
    simulate(engine, requests=1000, seed=1, step_time=step)
    speed = network_rate(engine, count // 4, step_time=step)
    line(
        "torus, 1,000 engine models", speed, "requests/s", f"{speed * 60:.3g}/min, 16 outputs each"
    )


def network_rate(scenario: Scenario, count: int, **options: Any) -> float:
    """Requests simulated a second, the warm-up counted as what it is: requests simulated."""
    begun = time.process_time()
    outcome = simulate(scenario, requests=count, seed=2, **options)
    seconds = time.process_time() - begun
    return (count + outcome.extra["simulation"]["warm_up"]["requests"]) / seconds


def memory(count: int) -> None:
    """Peak memory of two runs, one four times as long: it must not follow the requests seen."""
    asked = Scenario.from_dict({**SCENARIO, "simulation": {"space": "torus", "nodes": 1000}})
    peaks = []
    simulate(asked, requests=1000, seed=3)
    for n in (count, 4 * count):
        simulate(asked, requests=n, seed=3)
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    print(
        f"peak memory after {count:,} and {4 * count:,} requests: "
        f"{peaks[0]:.0f} and {peaks[1]:.0f} MiB ({peaks[1] - peaks[0]:+.1f})"
    )


def rate(count: int, job: Callable[[], object]) -> float:
    begun = time.process_time()
    job()
    return count / (time.process_time() - begun)


def line(label: str, value: float, unit: str, note: str) -> None:
    print(f"{label:<42} {value:>13,.0f} {unit:<12} {note}", flush=True)


if __name__ == "__main__":
    main()
