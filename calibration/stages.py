"""Stages: what is asked of the engine, in which order, and what is kept of its answers.

A stage reads what the journal holds of it, measures what is missing and journals each sample at
once. It computes nothing: that is left to the fits, which see resumed and fresh samples alike.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
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
POLL = 2e-3
"""s between two looks at the engine's load where no step log counts for us."""


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

    async def interference(self) -> None:
        """Prefills that arrive together while others decode: what each does to the other."""
        if self.journal.is_done("interference"):
            return
        design, facts = self.design, self.facts
        seats = facts.max_sequences
        room = (usable_blocks(facts) - await self._used_blocks()) * facts.block_size
        cases = [
            (m, k, n, repeat)
            for repeat in range(design.interference_repeats)
            for m in sorted({0, seats // 4, seats // 2})
            for k in (1, 2, 4)
            for n in (64, 256, 512)
            if m + k <= seats
            and k * n + m <= facts.token_budget
            and n < self.longest
            and m * (64 + LONG_OUTPUT) + k * (n + facts.block_size) <= room
            and facts.max_model_len >= 64 + LONG_OUTPUT
        ]
        have = {
            (s["decodes"], s["prefills"], s["new"], s["repeat"])
            for s in self.journal.samples("interference")
        }
        order = generator(self.seed, "calibration", "interference").permutation(len(cases))
        for at, i in enumerate(order):
            if cases[i] not in have:
                async with self._window("interference"):
                    await self._interfere(*cases[i])
            self.progress("interference", at + 1, len(cases))
        self.journal.done("interference")

    async def _interfere(self, m: int, k: int, n: int, repeat: int) -> None:
        await asyncio.sleep(self.design.spacing)
        decodes = [
            asyncio.create_task(self._generate(self._prompts.cold(64), LONG_OUTPUT))
            for _ in range(m)
        ]
        # By now every decode has its first token: it takes a prefill step and this many decodes.
        deadline = time.perf_counter() + 5.0
        while m and (await self.engine.load()).running < m and time.perf_counter() < deadline:
            await asyncio.sleep(POLL)
        await asyncio.sleep(self.design.spacing)
        sent = time.perf_counter()
        prompts = [self._prompts.cold(n) for _ in range(k)]
        prefilled = await asyncio.gather(*(self._generate(p, 1) for p in prompts))
        end = max(g.first_token for g in prefilled)
        running = await asyncio.gather(*decodes)
        pauses, stalls = [], []
        for g in running:
            times = np.array(g.token_times)
            gaps = np.diff(times)
            meanwhile = (times[1:] > sent) & (times[:-1] < end)
            pauses += gaps[~meanwhile].tolist()
            stalls += gaps[meanwhile].tolist()
        if m and not (stalls and pauses):
            return  # the decodes had ended before the prefills came: nothing was seen
        self.journal.add(
            "interference",
            decodes=m,
            prefills=k,
            new=n,
            repeat=repeat,
            ttft=[g.first_token - sent for g in prefilled],
            stall=max(stalls, default=None),
            pause=float(np.median(pauses)) if pauses else None,
            context=64 + LONG_OUTPUT / 2,
        )

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
                new = round(SHORT * (longest / SHORT) ** draw.random())
                deep = max(0, int(min(len(self.chain), longest - new) * draw.random()))
                cached = deep // facts.block_size * facts.block_size if draw.random() < 0.5 else 0
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

    async def concurrency(
        self, profiles: Mapping[str, Sequence[np.ndarray]], reference: tuple[int, int]
    ) -> None:
        """c_s, m_run and B_s of each profile: pin it, then send more than can run together."""
        for at, (name, chains) in enumerate(profiles.items()):
            stage = f"concurrency/{name}"
            if not self.journal.is_done(stage):
                await self._concurrency(stage, name, chains, reference)
                self.journal.done(stage)
            self.progress("concurrency", at + 1, len(profiles))

    async def _concurrency(
        self, stage: str, name: str, chains: Sequence[np.ndarray], reference: tuple[int, int]
    ) -> None:
        async with self.pinned(name, chains) as blocks:
            size = self.facts.block_size
            tokens = sum(len(c) // size * size for c in chains)
            self.journal.add(stage, pinned_blocks=blocks, pinned_tokens=tokens)
            base = await self._used_blocks()
            new, output = reference
            most = self.facts.max_sequences
            await self._burst(stage, "size", base, min(SMALL_BURST, most), new, output)
            # Outputs long enough that the first still runs when the last has been prefilled: each
            # step of prefills gives the others a token.
            steps = -(-most * new // max(1, self.facts.token_budget))
            held = min(max(output, 2 * steps + 16), self.facts.max_model_len - new)
            if not await self._burst(stage, "count", base, most + 2, new, held):
                # The pool gave way to growing sequences: look for the most that run undisturbed.
                low, high = 0, most + 1
                while high - low > 1:
                    k = (low + high) // 2
                    fits = await self._burst(stage, "count", base, k, new, held)
                    low, high = (k, high) if fits else (low, k)

    async def _burst(
        self, stage: str, role: str, base: float, size: int, new: int, output: int
    ) -> bool:
        """Send ``size`` requests at once; whether none was preempted."""
        await asyncio.sleep(self.design.spacing)
        first = self.rows()
        preempted = (await self.engine.load()).preemptions
        seen: list[tuple[int, int, float]] = []

        async def watch() -> None:
            while True:
                load = await self.engine.load()
                seen.append((load.running, load.waiting, load.kv_usage))
                await asyncio.sleep(POLL)

        watcher = asyncio.create_task(watch())
        try:
            prompts = [self._prompts.cold(new) for _ in range(size)]
            await asyncio.gather(*(self._generate(p, output) for p in prompts))
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
        preempted = (await self.engine.load()).preemptions - preempted
        last = self.rows()
        if last > first:
            log = np.fromfile(self.engine.placement.step_log, offset=8 * len(STEP_COLUMNS) * first)
            table = log[: (last - first) * len(STEP_COLUMNS)].reshape(-1, len(STEP_COLUMNS))
            columns = [STEP_COLUMNS.index(c) for c in ("running", "waiting", "kv_usage")]
            seen = [(int(a), int(b), float(c)) for a, b, c in table[:, columns]]
            self.journal.add("window", of="concurrency", first=first, last=last)
        peak = max((s[0] for s in seen), default=0)
        full = [s for s in seen if s[0] == peak]
        blocks = max((s[2] for s in full), default=0.0) * usable_blocks(self.facts) - base
        self.journal.add(
            stage,
            role=role,
            size=size,
            new=new,
            output=output,
            running=peak,
            waiting=max((s[1] for s in full), default=0),
            blocks=blocks,
            preemptions=preempted,
        )
        return preempted == 0


SHORT = 32
LONG_OUTPUT = 48
"""Tokens of a decode that prefills shall meet under way."""
SMALL_BURST = 4
"""Requests sent together to see what one of them holds."""


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
