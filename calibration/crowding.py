"""Crowding: stages in which requests meet, on purpose and in known numbers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import numpy as np

from calibration.design import DECODE_PROMPT, LONG_OUTPUT, Crowd, crowd_grid, usable_blocks
from calibration.fit import is_tight
from calibration.stages import Stages
from cluster.engines.step_log import STEP_COLUMNS
from testbed.seeds import generator

AHEAD = 256
"""Tokens of the prompt that keeps an engine busy while others arrive."""
SMALL_BURST = 4
"""Requests sent together to see what one of them holds."""
POLL = 2e-3
"""s between two looks at the engine's load where no step log counts for us."""


class CrowdedStages(Stages):
    """All stages of a calibration: those of :class:`Stages`, crowds and concurrency."""

    _chunk = 0
    """Tokens that a step may hold now."""

    async def crowds(self) -> None:
        """g(n | h; batch, chunk): prompts that arrive together while others decode, in chunks."""
        design = self.design
        if design.crowd_most == 0 or self.journal.is_done("crowd"):
            return
        room = (usable_blocks(self.facts) - await self._used_blocks()) * self.facts.block_size
        cases = crowd_grid(
            self.facts, self.longest, len(self.chain), int(room), self.engine.can_limit_step
        )
        seen: dict[Crowd, list[float]] = {c: [] for c in cases}
        have = set()
        for s in self.journal.samples("crowd"):
            crowd = Crowd(*s["crowd"])
            have.add((s["round"], crowd))
            if s["together"]:
                seen[crowd].append(float(np.mean(s["seconds"])))
        deadline = time.perf_counter() + design.crowd_budget
        total = design.crowd_most * len(cases)
        for r in range(design.crowd_most):
            late = r >= design.crowd_least
            todo = [c for c in cases if not (late and is_tight(seen[c], design.crowd_tight))]
            if not todo or (late and time.perf_counter() > deadline):
                break
            order = generator(self.seed, "calibration", "crowd", r).permutation(len(cases))
            async with self._window("crowd"), self._own_budget_after():
                for at, crowd in enumerate(cases[i] for i in order):
                    if late and time.perf_counter() > deadline:
                        break
                    if crowd in todo and (r, crowd) not in have:
                        mean = await self._crowd_once(crowd, r)
                        if mean is not None:
                            seen[crowd].append(mean)
                    self.progress("crowd", r * len(cases) + at + 1, total)
        self.progress("crowd", total, total)
        self.journal.done("crowd")

    @asynccontextmanager
    async def _own_budget_after(self) -> AsyncIterator[None]:
        self._chunk = self.facts.token_budget
        try:
            yield
        except asyncio.CancelledError:
            self._chunk = self.facts.token_budget  # whoever cancels stops the engine as well
            raise
        finally:
            if self._chunk != self.facts.token_budget:
                await self.engine.limit_step(None)

    async def _crowd_once(self, crowd: Crowd, r: int) -> float | None:
        """Mean seconds to the first tokens, None when the prompts did not share their steps."""
        await asyncio.sleep(self.design.spacing)
        if crowd.chunk != self._chunk:
            await self.engine.limit_step(crowd.chunk)
            self._chunk = crowd.chunk
        prompts = [
            self._prompts.after(self.chain, crowd.cached, crowd.new) for _ in range(crowd.prefills)
        ]
        others = [
            asyncio.create_task(self._generate(self._prompts.cold(DECODE_PROMPT), LONG_OUTPUT))
            for _ in range(crowd.decodes)
        ]
        if crowd.decodes:
            # Sent, and served, after all of them: when it has its token, so has every decode.
            await asyncio.sleep(POLL)
            await self._generate(self._prompts.cold(1), 1)
        else:
            # Whoever finds the engine idle starts at once and alone: one ahead keeps it busy
            # until all have come.
            ahead = self._prompts.cold(min(AHEAD, crowd.chunk, self.longest))
            others.append(asyncio.create_task(self._generate(ahead, 1)))
            await asyncio.sleep(POLL)
        sent = time.perf_counter()
        served = await asyncio.gather(*(self._generate(p, 1) for p in prompts))
        running = await asyncio.gather(*others)
        starts = [sent if g.scheduled is None else g.scheduled for g in served]
        ends = [
            g.first_token if g.engine_first_token is None else g.engine_first_token for g in served
        ]
        first, last = min(starts), max(ends)
        pauses, stalls, context = [], [], []
        together = all(g.queued is None or g.queued <= first for g in served)
        together &= all(g.cached_tokens == crowd.cached for g in served)
        for g in running if crowd.decodes else ():
            times = np.array(g.token_times)
            begun = times[0] if g.engine_first_token is None else g.engine_first_token
            together &= bool(begun <= first and times[-1] >= last)
            gaps = np.diff(times)
            meanwhile = (times[1:] > first) & (times[:-1] < last)
            pauses += gaps[~meanwhile].tolist()
            stalls += gaps[meanwhile].tolist()
            # What the newest token adds is computed in the step itself.
            context.append(DECODE_PROMPT + max(int((times <= first).sum()), 1) - 1)
        self.journal.add(
            "crowd",
            crowd=crowd,
            round=r,
            seconds=[e - first for e in ends],
            together=together,
            stall=max(stalls, default=None),
            pause=float(np.median(pauses)) if pauses else None,
            context=float(np.mean(context)) if context else 0.0,
        )
        return float(np.mean(ends) - first) if together else None

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
