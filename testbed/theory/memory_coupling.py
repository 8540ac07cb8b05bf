"""MemoryCoupling: how many sequences fit beside a profile, under two accountings (Theory A9, H12).

The paper gives every active sequence the same m_run bytes, whatever its profile. A paged engine
does not allocate a shared prefix again: a request that reuses h of its L tokens takes blocks for
L − h and its outputs only, so concurrency depends on profile and mix. The first accounting is
:meth:`~testbed.scenario.Memory.concurrency`, the second stands here;
``tests/unit/test_memory_coupling.py`` shows that vLLM's block pool follows it.
"""

from __future__ import annotations

import math

import numpy as np

from testbed.scenario import Profile, RequestType, Scenario

_SLACK = 1e-12
"""Relative, so that an exact multiple written in decimal does not lose a sequence."""


def footprint_blocks(request: RequestType, reusable: float, block_size: int) -> int:
    """Blocks that a request takes for itself when it ends, beyond ``reusable`` shared tokens.

    Whole blocks are shared, and an engine computes at least a prompt's last token.
    """
    whole = math.ceil((request.tokens + request.output_tokens - 1.0) / block_size)
    return whole - math.floor(min(reusable, request.tokens - 1.0) / block_size)


def shared_concurrency(
    scenario: Scenario, profile: Profile, weights: np.ndarray, block_size: int
) -> int:
    """c_s when shared blocks are not allocated twice (Theory H12).

    Parameters
    ----------
    weights
        (Q,) shares of the types among running requests: those of the arrivals in proportion to
        how long each holds its sequence.
    block_size
        Tokens per KV block.
    """
    share = np.asarray(weights, dtype=float)
    own = [
        footprint_blocks(q, profile.reusable[q.name], block_size) * block_size
        for q in scenario.requests
    ]
    mean = float(share @ np.array(own)) / float(share.sum()) * scenario.memory.per_token
    free = scenario.memory.capacity - profile.persistent_bytes
    return math.floor(free / mean * (1.0 + _SLACK))
