"""Hand-built outcomes for the reporting tests: a shifted gamma law of TTFT, nothing measured."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import stats

from testbed.outcome import Counts, Curve, Kind, Outcome, Tier, Ttft
from testbed.scenario import Scenario

TARGETS = (0.2, 0.5)
QUANTILES = (0.5, 0.9, 0.95, 0.99)


def scenario(policy: str = "load_aware", intensity: float = 3.0, **changes: Any) -> Scenario:
    return Scenario.from_dict(
        {
            "name": "two tiers",
            "policy": policy,
            "radio": {"model": "power_law", "xi": 0.05, "alpha": 2.0},
            "nodes": {"density": 1.0},
            "demand": {"intensity": intensity},
            "prefill": {"linear": 4.0e-5, "quadratic": 3.0e-8},
            "memory": {"capacity": 8e9, "per_sequence": 5e8, "per_token": 131072},
            "requests": [
                {"name": "chat", "probability": 0.6, "tokens": 1024, "decode_occupancy": 0.4},
                {"name": "agent", "probability": 0.4, "tokens": 4096, "decode_occupancy": 0.8},
            ],
            "profiles": [
                {
                    "name": "fallback",
                    "fraction": 0.5,
                    "persistent_bytes": 0,
                    "reusable": {"chat": 0, "agent": 0},
                },
                {
                    "name": "deep",
                    "fraction": 0.5,
                    "persistent_bytes": 2e9,
                    "reusable": {"chat": 512, "agent": 3072},
                },
            ],
            "targets": {"coverage_at": TARGETS, "quantiles": QUANTILES},
            **changes,
        }
    )


def outcome(
    kind: Kind = "measured",
    *,
    policy: str = "load_aware",
    intensity: float = 3.0,
    wait: float = 0.08,
    noise: float = 0.04,
    asked: Scenario | None = None,
    **changes: Any,
) -> Outcome:
    """An outcome whose TTFT is 0.06 s plus a gamma wait of mean ``wait`` seconds.

    ``noise`` is the relative half-width of every interval; a prediction has none.
    """
    law = stats.gamma(0.8, loc=0.06, scale=wait / 0.8)
    grid = np.linspace(0.0, 1.0, 201)[1:-1]
    ttft = Ttft(
        mean=float(law.mean()),
        coverage={str(t): float(law.cdf(t)) for t in TARGETS},
        quantiles={str(z): float(law.ppf(z)) for z in QUANTILES},
    )
    deep = 0.5 + 0.2 * (policy != "nearest") + (0.03 if kind == "measured" else 0.0)
    association = {
        "chat": {"fallback": 1 - deep + 0.1, "deep": deep - 0.1},
        "agent": {"fallback": 1 - deep - 0.1, "deep": deep + 0.1},
    }
    load = intensity / 5.0
    tiers = {
        name: Tier(
            density=0.5,
            concurrency=c,
            arrival_rate=intensity * share * 2,
            service_rate=1.2,
            utilisation=load * share * 1.6,
            wait_probability=load * share,
            mean_wait=wait * share,
        )
        for name, c, share in (("fallback", 16, 1 - deep), ("deep", 12, deep))
    }
    figures = {
        "ttft.mean": ttft.mean,
        **{f"ttft.quantiles.{z}": v for z, v in ttft.quantiles.items()},
        **{f"tiers.{n}.utilisation": t.utilisation for n, t in tiers.items()},
        **{f"tiers.{n}.mean_wait": t.mean_wait for n, t in tiers.items()},
        "reusable_prefix_tokens": 900.0,
    }
    shares = {
        **{f"ttft.coverage.{t}": v for t, v in ttft.coverage.items()},
        **{f"association.{q}.{s}": v for q, row in association.items() for s, v in row.items()},
    }
    values: dict[str, Any] = {
        "kind": kind,
        "clock": {"measured": "wall clock", "simulated": "virtual", "predicted": "none"}[kind],
        "policy": policy,
        "delay_model": "erlang_c" if kind == "predicted" else None,
        "feasible": True,
        "association": association,
        "tiers": tiers,
        "ttft": ttft,
        "mean_distance": 0.61,
        "reusable_prefix_tokens": 900.0 if kind == "measured" else 870.0,
        "offloading_ratio": 0.31,
        "capacity_margin": 0.4,
        "curve": Curve(seconds=tuple(law.ppf(grid)), probability=tuple(grid)),
    }
    if kind != "predicted":
        values["requests"] = Counts(sent=500, completed=500, rejected=0, failed=0)
        values["seed"] = 7
        values["confidence"] = {
            **{p: (v * (1 - noise), v * (1 + noise)) for p, v in figures.items()},
            **{p: (max(v - noise, 0.0), min(v + noise, 1.0)) for p, v in shares.items()},
        }
    if kind == "measured":
        values["extra"] = {
            "machine_speed": {"before": 0.0410, "after": 0.0424, "drift_percent": 3.4},
            "dispatch_lag": {"p50": 0.0011, "p99": 0.0046},
            "ttft_from_send": {"mean": ttft.mean - 0.001},
            "records": "records.jsonl",
        }
        values["environment"] = {
            "engine": "vllm 0.32.0",
            "model": "tiny-llama",
            "device": "cpu",
            "block_size": 32,
            "trace_sha256": "9f2c",
        }
    asked = asked or scenario(policy, intensity)
    return Outcome(
        **{**values, "scenario_name": asked.name, "scenario": asked.to_dict(), **changes}
    )


def study() -> list[Outcome]:
    """Three policies at two loads: measured, simulated, and predicted by two delay models."""
    outcomes = []
    for policy, factor in (("nearest", 2.0), ("prefix_only", 1.4), ("load_aware", 1.0)):
        for intensity in (2.0, 4.0):
            wait = 0.02 * factor * intensity
            case = {"policy": policy, "intensity": intensity}
            outcomes += [
                outcome("measured", wait=wait, **case),
                outcome("simulated", wait=wait * 1.02, noise=0.01, **case),
                outcome("predicted", wait=wait * 0.4, **case),
                outcome("predicted", wait=wait * 0.98, **case, delay_model="step_chain"),
            ]
    return outcomes
