"""MemoryCoupling: the engine's pool holds as many as shared blocks leave room for."""

from __future__ import annotations

import numpy as np
import pytest

from testbed.simulation.engine_model import EngineConfig, simulate_engine
from testbed.step_time import StepTime
from testbed.theory.memory_coupling import shared_concurrency
from tests.unit.scenarios import small

BLOCK = 16
STEP = StepTime(c_pre=0.004, a=4e-5, c_dec=0.0025, e=1e-4)


def scenario(prompt: int, hit: int, outputs: int, blocks: int):
    """One type, one profile, a pool of ``blocks`` of which the pinned prefix takes its part."""
    token = 2048
    return small(
        memory={
            "capacity": blocks * BLOCK * token,
            "per_sequence": -(-(prompt + outputs - 1) // BLOCK) * BLOCK * token,
            "per_token": token,
        },
        requests=[{"name": "chat", "probability": 1.0, "tokens": prompt, "output_tokens": outputs}],
        profiles=[
            {
                "name": "deep",
                "fraction": 1.0,
                "persistent_bytes": hit * token,
                "reusable": {"chat": hit},
            }
        ],
    )


def most_running(prompt: int, hit: int, outputs: int, blocks: int) -> int:
    count = 200
    trace = simulate_engine(
        EngineConfig(
            token_budget=100_000,
            block_size=BLOCK,
            num_blocks=blocks + 1,
            pinned_blocks=hit // BLOCK,
        ),
        STEP,
        np.zeros(count),
        np.full(count, prompt),
        np.full(count, outputs),
        reusable_tokens=np.full(count, hit),
        log=True,
    )  # fmt: skip
    assert trace.log is not None
    assert not trace.preemptions.any()
    return int(trace.log["running"].max())


@pytest.mark.parametrize("hit", [0, 128, 256])
@pytest.mark.parametrize("blocks", [60, 101])
def test_the_pool_follows_the_shared_accounting(hit, blocks):
    # Outputs end in the prompt's last block, so that an admission takes all a request will hold.
    prompt, outputs = 330, 6
    asked = scenario(prompt, hit, outputs, blocks)
    profile = asked.profiles[0]
    running = most_running(prompt, hit, outputs, blocks)
    assert running == shared_concurrency(asked, profile, np.ones(1), BLOCK)
    assert running >= asked.memory.concurrency(profile.persistent_bytes)
    if hit:
        assert running > asked.memory.concurrency(profile.persistent_bytes)


def test_without_a_hit_both_accountings_agree():
    asked = scenario(330, 0, 6, 100)
    profile = asked.profiles[0]
    assert shared_concurrency(asked, profile, np.ones(1), BLOCK) == (
        asked.memory.concurrency(profile.persistent_bytes)
    )
