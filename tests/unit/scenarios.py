"""Scenarios that several tests ask."""

from __future__ import annotations

from typing import Any

from testbed.scenario import Scenario


def small(**changes: Any) -> Scenario:
    """Two types, two profiles, an emulated engine; every figure moderate."""
    data: dict[str, Any] = {
        "name": "small",
        "policy": "load_aware",
        "radio": {"model": "power_law", "xi": 0.05, "alpha": 2.0},
        "nodes": {"density": 1.0},
        "demand": {"intensity": 3.0},
        "prefill": {"linear": 4e-5, "quadratic": 3e-8, "context": 6e-8, "overhead": 4e-3},
        "memory": {"capacity": 400 * 32 * 2048, "per_sequence": 40 * 32 * 2048, "per_token": 2048},
        "requests": [
            {
                "name": "agent",
                "probability": 0.5,
                "tokens": 1200,
                "decode_occupancy": 0.05,
                "output_tokens": 8,
            },
            {
                "name": "chat",
                "probability": 0.5,
                "tokens": 500,
                "decode_occupancy": 0.05,
                "output_tokens": 8,
            },
        ],
        "profiles": [
            {
                "name": "fallback",
                "fraction": 0.5,
                "persistent_bytes": 0,
                "reusable": {"agent": 0, "chat": 0},
            },
            {
                "name": "deep",
                "fraction": 0.5,
                "persistent_bytes": 1024 * 2048,
                "reusable": {"agent": 1024, "chat": 0},
            },
        ],
        "engine": {"name": "emulated", "replicas": 2, "max_sequences": 8, "max_model_len": 4096},
    }
    data.update(changes)
    return Scenario.from_dict(data)
