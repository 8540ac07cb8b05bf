"""Crowding: stages in which requests meet, on purpose and in known numbers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

import numpy as np

from calibration.design import usable_blocks
from calibration.stages import Stages
from cluster.engines.step_log import STEP_COLUMNS
from testbed.seeds import generator

LONG_OUTPUT = 48
"""Tokens of a decode that prefills shall meet under way."""
SMALL_BURST = 4
"""Requests sent together to see what one of them holds."""
POLL = 2e-3
"""s between two looks at the engine's load where no step log counts for us."""


class CrowdedStages(Stages):
    """All stages of a calibration: those of :class:`Stages`, interference and concurrency."""

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
