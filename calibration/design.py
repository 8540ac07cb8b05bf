"""Design: what a calibration of each effort measures, and for how long."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from cluster.engines.base import EngineFacts
from testbed.errors import CalibrationError

Effort = Literal["quick", "full", "check"]

SHORTEST = 32
"""Tokens of the shortest prompt in the grid."""
LONG_OUTPUT = 48
"""Tokens of a decode that prefills shall meet under way."""
DECODE_PROMPT = 64
"""Tokens of that decode's prompt."""


@dataclass(frozen=True)
class Design:
    """Sizes of a calibration. Budgets are seconds; the least number of rounds comes first."""

    effort: Effort
    length_ratio: float
    cached_new: tuple[int, ...]
    cached_shares: tuple[float, ...]
    least_rounds: int
    most_rounds: int
    prefill_budget: float
    tight: float
    decode_outputs: tuple[int, ...]
    decode_repeats: int
    decode_contexts: tuple[int, ...]
    relay_budget: float
    relay_least: int
    mix_budget: float
    mix_least: int
    crowd_least: int = 0
    crowd_most: int = 0
    crowd_budget: float = 0.0
    crowd_tight: float = 0.02
    loads: tuple[float, ...] = ()
    load_seconds: float = 0.0
    capacity_seconds: float = 0.0
    alone_repeats: int = 5
    spacing: float = field(default=0.02)


DESIGNS: dict[Effort, Design] = {
    "check": Design(
        effort="check",
        length_ratio=4.0,
        cached_new=(64, 512),
        cached_shares=(0.5, 1.0),
        least_rounds=3,
        most_rounds=8,
        prefill_budget=8.0,
        tight=0.01,
        decode_outputs=(9, 25),
        decode_repeats=4,
        decode_contexts=(64,),
        relay_budget=2.0,
        relay_least=24,
        mix_budget=4.0,
        mix_least=20,
    ),
    "quick": Design(
        effort="quick",
        length_ratio=2.0,
        cached_new=(32, 128, 512, 2048),
        cached_shares=(0.25, 0.5, 1.0),
        least_rounds=3,
        most_rounds=12,
        prefill_budget=22.0,
        tight=0.01,
        decode_outputs=(9, 25),
        decode_repeats=5,
        decode_contexts=(64, 512),
        relay_budget=5.0,
        relay_least=60,
        mix_budget=8.0,
        mix_least=40,
    ),
    "full": Design(
        effort="full",
        length_ratio=math.sqrt(2.0),
        cached_new=(32, 64, 128, 256, 512, 1024, 2048, 4096),
        cached_shares=(0.125, 0.25, 0.5, 0.75, 1.0),
        least_rounds=5,
        most_rounds=40,
        prefill_budget=180.0,
        tight=0.004,
        decode_outputs=(5, 17, 65),
        decode_repeats=8,
        decode_contexts=(64, 512, 1024, 2048),
        relay_budget=25.0,
        relay_least=200,
        mix_budget=60.0,
        mix_least=200,
        crowd_least=3,
        crowd_most=10,
        crowd_budget=75.0,
        loads=(0.2, 0.3, 0.6, 0.8, 0.9, 0.95),
        load_seconds=75.0,
        capacity_seconds=25.0,
        alone_repeats=9,
    ),
}


def usable_tokens(facts: EngineFacts) -> int:
    """Tokens that the KV pool can hold. vLLM keeps one block of its pool for itself."""
    return usable_blocks(facts) * facts.block_size


def usable_blocks(facts: EngineFacts) -> int:
    """Blocks that requests can take; the engine's pool use is a fraction of these."""
    stated = facts.extra.get("usable_blocks")
    if stated is not None:
        return int(stated)
    return facts.num_blocks - 1 if facts.name == "vllm" else facts.num_blocks


def longest_prompt(facts: EngineFacts, max_prompt: int | None) -> int:
    """The longest prompt to measure: as asked, if the engine and half its pool can hold it.

    Raises
    ------
    CalibrationError
        A prompt of :data:`SHORTEST` tokens does not fit twice.
    """
    limit = min(facts.max_model_len - 1, usable_tokens(facts) // 2)
    longest = limit if max_prompt is None else min(max_prompt, limit)
    if longest < 2 * SHORTEST:
        raise CalibrationError(
            f"max_prompt: {longest} tokens (engine limit {facts.max_model_len}, pool "
            f"{usable_tokens(facts)}) are too few to calibrate; at least {2 * SHORTEST} are needed"
        )
    return longest


def prefill_grid(
    design: Design, longest: int, block: int, free_tokens: int
) -> list[tuple[int, int]]:
    """Points (n, h): cold lengths in geometric steps, then residuals after cached prefixes.

    h is a whole number of blocks, the only depths a paged cache can hit; ``free_tokens`` bounds
    prefix and prompt together.
    """
    count = max(1, round(math.log(longest / SHORTEST) / math.log(design.length_ratio)))
    cold = {round(SHORTEST * (longest / SHORTEST) ** (k / count)) for k in range(count + 1)}
    deepest = cached_depth(longest, block, free_tokens)
    points = [(n, 0) for n in sorted(cold)]
    for share in design.cached_shares:
        h = int(deepest * share) // block * block
        if h > 0:
            points += [(n, h) for n in design.cached_new if n + h <= longest]
    return list(dict.fromkeys(points))


class Crowd(NamedTuple):
    """A prefill among others: g(n | h; batch, chunk) with its co-batched work.

    ``prefills`` prompts of ``new`` tokens after ``cached`` ones arrive together at a boundary of
    steps while ``decodes`` others generate; steps hold at most ``chunk`` tokens.
    """

    decodes: int
    prefills: int
    new: int
    cached: int
    chunk: int

    @property
    def steps(self) -> int:
        """Steps that the prefills take."""
        room = self.chunk - self.decodes
        return -(-self.prefills * self.new // room) if room > 0 else 1 << 30


def crowd_grid(
    facts: EngineFacts, longest: int, depth: int, room: int, chunks: bool
) -> list[Crowd]:
    """A third of the grid over decodes, prefills, new and cached tokens, and chunk budget.

    Three levels each (a regular fraction, 3⁴⁻¹, for either depth of the cache: main effects stay
    apart), less what does not fit: the pool's ``room`` in tokens, the engine's seats, and decodes
    that would end before the prefills do. ``depth`` bounds the cached tokens; without ``chunks``
    the engine's own budget is the only one.
    """
    seats, budget = facts.max_sequences, facts.token_budget
    decodes = sorted({0, seats // 4, seats // 2})
    sizes = sorted({max(1, budget // 16), max(1, budget // 4), budget}) if chunks else [budget]
    depths = [0, min(depth, longest // 2) // 2 // facts.block_size * facts.block_size]
    found = []
    for (i, m), (j, k), (u, n), (v, c), (w, h) in itertools.product(
        enumerate(decodes),
        enumerate((1, 2, 4)),
        enumerate((64, 256, 1024)),
        enumerate(sizes),
        enumerate(sorted(set(depths))),
    ):
        crowd = Crowd(m, k, n, h, c)
        held = m * (DECODE_PROMPT + LONG_OUTPUT) + k * (n + facts.block_size)
        if (
            (i + j + u + v) % 3 == w
            and m + k <= seats
            and n + h <= longest
            and held <= room
            and (m == 0 or crowd.steps <= LONG_OUTPUT // 2)
            and crowd.steps < 1 << 30
            and (m == 0 or facts.max_model_len >= DECODE_PROMPT + LONG_OUTPUT)
        ):
            found.append(crowd)
    return found


def cached_depth(longest: int, block: int, free_tokens: int) -> int:
    """Tokens of the one pinned chain that all cached points share a part of."""
    return max(0, min(longest - SHORTEST, free_tokens - longest)) // block * block


def decode_batches(most: int) -> list[int]:
    """1, 2, 4, … and the engine's limit."""
    batches = [1 << k for k in range(most.bit_length()) if 1 << k <= most]
    return batches if batches[-1] == most else [*batches, most]
