"""Stages: what is asked of the engine, in which order, and what is kept of its answers.

A stage reads what the journal holds of it, measures what is missing and journals each sample at
once. It computes nothing: that is left to the fits, which see resumed and fresh samples alike.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from calibration.design import (
    Design,
    cached_depth,
    decode_batches,
    prefill_grid,
    usable_blocks,
)
from calibration.fit import is_tight
from calibration.journal import Journal
from calibration.prompts import Prompts
from cluster.engines.base import Engine, EngineFacts, Generation
from cluster.engines.step_log import STEP_COLUMNS
from testbed.seeds import generator

Progress = Callable[[str, int, int], None]
CHAIN = "calibration chain"
SHORT = 32
"""Tokens of the shortest prompt in the mix."""


class Stages:
    """The stages of one calibration on one started engine."""

    def __init__(
        self,
        engine: Engine,
        facts: EngineFacts,
        design: Design,
        journal: Journal,
        *,
        seed: int,
        longest: int,
        progress: Progress | None = None,
        points: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.points = list(points)
        self.engine = engine
        self.facts = facts
        self.design = design
        self.journal = journal
        self.seed = seed
        self.longest = longest
        self.chain = np.zeros(0, dtype=np.int32)
        self.progress: Progress = progress or (lambda *_: None)
        self._requests = 0
        # A resumed journal must not see its prompts again: they would be in no cache now, but
        # the numbers of a continued run should not depend on where it was cut.
        self._prompts = Prompts(seed, facts.vocabulary, "prompts", journal.resumed)

    # -- helpers --

    async def _generate(self, tokens: np.ndarray, output_tokens: int) -> Generation:
        self._requests += 1
        name = f"calibration-{self.seed}-{self.journal.resumed}-{self._requests}"
        return await self.engine.generate(name, tokens, output_tokens)

    async def _alone(self, tokens: np.ndarray, output_tokens: int = 1) -> Generation:
        """A request that finds the engine idle."""
        await asyncio.sleep(self.design.spacing)
        return await self._generate(tokens, output_tokens)

    def rows(self) -> int:
        path = self.engine.placement.step_log
        if not path or not Path(path).exists():
            return 0
        return Path(path).stat().st_size // (8 * len(STEP_COLUMNS))

    @asynccontextmanager
    async def _window(self, stage: str) -> AsyncIterator[None]:
        """Journal which rows of the step log belong to what is measured inside."""
        first = self.rows()
        yield
        last = self.rows()
        if last > first:
            self.journal.add("window", of=stage, first=first, last=last)

    async def _used_blocks(self) -> float:
        load = await self.engine.load()
        return load.kv_usage * usable_blocks(self.facts)

    @asynccontextmanager
    async def pinned(self, name: str, chains: Sequence[np.ndarray]) -> AsyncIterator[float]:
        """Hold a profile's chains for a while; yields the blocks that they take of the pool."""
        before = await self._used_blocks()
        names: list[str] = []
        try:
            # Longest first, so that shared ancestors are held once.
            for i, chain in enumerate(sorted(chains, key=len, reverse=True)):
                if len(chain) >= self.facts.block_size:
                    await self.engine.pin(f"calibration {name} {i}", chain)
                    names.append(f"calibration {name} {i}")
            yield await self._used_blocks() - before
        finally:
            for pin in names:
                await self.engine.unpin(pin)

    # -- stages --

    async def warm_up(self) -> None:
        """Run the engine's lazy initialisation off the record."""
        self.progress("warm-up", 0, 1)
        for n in (64, 64, min(512, self.longest), 64):
            await self._generate(self._prompts.cold(n), min(4, self.facts.max_model_len - n))
        self.progress("warm-up", 1, 1)

    async def pin_chain(self) -> None:
        """Pin the chain that cached points share; what the pool says of it is κ's measurement.

        The chain goes in by thirds, each nested in the next, so that κ is a slope as well as a
        ratio. Done anew on resume: a restarted engine has forgotten it.
        """
        free = usable_blocks(self.facts) - await self._used_blocks()
        block = self.facts.block_size
        depth = cached_depth(self.longest, block, int(free) * block)
        self.chain = Prompts(self.seed, self.facts.vocabulary, "chain").cold(depth)
        self.progress("memory", 0, 3)
        for part in (1, 2, 3):
            tokens = depth * part // 3 // block * block
            if tokens == 0:
                continue
            before = await self._used_blocks()
            async with self._window("memory"):
                await self.engine.pin(CHAIN, self.chain[:tokens])
            blocks = await self._used_blocks() - before
            self.journal.add("pin", tokens=tokens, blocks=blocks)
            if part < 3:
                # What an unpinned chain leaves in the cache would stand in the way of the next.
                await self.engine.unpin(CHAIN)
                await self.engine.forget()
            self.progress("memory", part, 3)

    async def unpin_chain(self) -> None:
        if len(self.chain):
            await self.engine.unpin(CHAIN)
            self.chain = self.chain[:0]

    async def prefill(self) -> None:
        """g(n | h) alone on the engine: passes over the grid, each in an order of its own."""
        if self.journal.is_done("prefill"):
            return
        design = self.design
        points = self.points or prefill_grid(
            design, self.longest, self.facts.block_size, len(self.chain) + self.longest
        )
        points = [p for p in points if p[1] <= len(self.chain)]
        seen: dict[tuple[int, int], list[float]] = {p: [] for p in points}
        have = set()
        for s in self.journal.samples("prefill"):
            point = tuple(s["point"])
            seen.setdefault(point, []).append(s["seconds"])
            have.add((s["round"], point))
        deadline = time.perf_counter() + design.prefill_budget
        for r in range(design.most_rounds):
            late = r >= design.least_rounds
            todo = [p for p in points if not (late and is_tight(seen[p], design.tight))]
            if not todo:
                break
            order = generator(self.seed, "calibration", "order", r).permutation(len(points))
            async with self._window("prefill"):
                for at, point in enumerate(points[i] for i in order):
                    if late and time.perf_counter() > deadline:
                        break
                    if point in todo and (r, point) not in have:
                        seen[point].append(await self._prefill_once(point, r))
                    self.progress(
                        "prefill", r * len(points) + at + 1, design.most_rounds * len(points)
                    )
            if r + 1 >= design.least_rounds and time.perf_counter() > deadline:
                break
        self.progress("prefill", design.most_rounds * len(points), design.most_rounds * len(points))
        self.journal.done("prefill")

    async def _prefill_once(self, point: tuple[int, int], r: int) -> float:
        new, cached = point
        prompt = self._prompts.after(self.chain, cached, new)
        g = await self._alone(prompt)
        start = g.received if g.queued is None else g.queued
        seconds = g.first_token - start
        self.journal.add(
            "prefill",
            point=point,
            round=r,
            new=len(prompt) - g.cached_tokens,
            cached=g.cached_tokens,
            seconds=seconds,
            submit=start - g.received,
            delivery=None if g.engine_first_token is None else g.first_token - g.engine_first_token,
            at=g.received,
        )
        return seconds

    async def decode(self) -> None:
        """Occupancy after the first token, by batch, context and tokens generated."""
        if self.journal.is_done("decode"):
            return
        design, facts = self.design, self.facts
        room = (usable_blocks(facts) - await self._used_blocks()) * facts.block_size
        cases = [
            (batch, context, output, repeat)
            for repeat in range(design.decode_repeats)
            for batch in decode_batches(facts.max_sequences)
            for context in design.decode_contexts
            for output in design.decode_outputs
            # Long contexts cost a prefill each: few batches and one length are enough for them.
            if (context == design.decode_contexts[0] or (repeat == 0 and output > 9))
            and batch * (context + output + facts.block_size) <= room
            and context + output <= facts.max_model_len
        ]
        have = {
            (s["batch"], s["context"], s["output"], s["repeat"])
            for s in self.journal.samples("decode")
        }
        order = generator(self.seed, "calibration", "decode").permutation(len(cases))
        for at, i in enumerate(order):
            batch, context, output, repeat = cases[i]
            if cases[i] not in have:
                await asyncio.sleep(design.spacing)
                prompts = [self._prompts.cold(context) for _ in range(batch)]
                async with self._window("decode"):
                    served = await asyncio.gather(*(self._generate(p, output) for p in prompts))
                self.journal.add(
                    "decode",
                    batch=batch,
                    context=context,
                    output=output,
                    repeat=repeat,
                    seconds=_undisturbed(served),
                )
            self.progress("decode", at + 1, len(cases))
        self.journal.done("decode")

    async def relay(self) -> None:
        """Two clients in turn, one output token each: prefills alone in steps that follow at once.

        A request that finds the engine idle pays for waking it as well; only a step that follows
        another tells what a prefill costs a busy engine.
        """
        if self.journal.is_done("relay"):
            return
        draw = generator(self.seed, "calibration", "relay")
        longest = min(2048, self.longest)
        deadline = time.perf_counter() + self.design.relay_budget
        served = 0

        async def client() -> None:
            nonlocal served
            while served < self.design.relay_least or time.perf_counter() < deadline:
                new, cached = self._mixed(draw, longest)
                await self._generate(self._prompts.after(self.chain, cached, new), 1)
                served += 1
                self.progress("relay", served, max(self.design.relay_least, served))

        async with self._window("relay"):
            await asyncio.gather(client(), client())
        self.journal.done("relay")

    def _mixed(self, draw: np.random.Generator, longest: int) -> tuple[int, int]:
        """(new, cached) of a request: log-uniform new tokens, half of them behind the chain."""
        new = round(SHORT * (longest / SHORT) ** draw.random())
        deep = max(0, int(min(len(self.chain), longest - new) * draw.random()))
        size = self.facts.block_size
        return new, deep // size * size if draw.random() < 0.5 else 0

    async def mix(self) -> None:
        """A closed loop of mixed requests: prefills beside decodes, as a busy engine has them."""
        if self.journal.is_done("mix"):
            return
        design, facts = self.design, self.facts
        draw = generator(self.seed, "calibration", "mix")
        longest = min(2048, self.longest)
        deadline = time.perf_counter() + design.mix_budget
        served = 0

        async def client() -> None:
            nonlocal served
            while served < design.mix_least or time.perf_counter() < deadline:
                new, cached = self._mixed(draw, longest)
                output = min(int(draw.geometric(1 / 16)), 64, facts.max_model_len - new - cached)
                await self._generate(self._prompts.after(self.chain, cached, new), output)
                # Clients at rest let the number present vary.
                await asyncio.sleep(float(draw.exponential(0.02)))
                served += 1
                self.progress("mix", served, max(design.mix_least, served))

        room = (usable_blocks(facts) - await self._used_blocks()) * facts.block_size
        clients = max(1, min(facts.max_sequences, int(room) // (longest + 64)))
        async with self._window("mix"):
            await asyncio.gather(*(client() for _ in range(clients)))
        self.journal.done("mix")


def _undisturbed(served: Sequence[Generation]) -> list[float]:
    """Seconds from first to last token of those whose decodes no other's prefill interrupted:
    the ones that the engine scheduled last."""
    starts = [g.first_token if g.scheduled is None else g.scheduled for g in served]
    last = max(starts)
    return [g.finished - g.first_token for g, s in zip(served, starts, strict=True) if s == last]


def sequence_reference(facts: EngineFacts, longest: int) -> tuple[int, int]:
    """(prompt, output) tokens of the request that m_run and c_s speak of unless told otherwise."""
    new = min(1024, longest // 4)
    return new, max(1, min(32, facts.max_model_len - new))
