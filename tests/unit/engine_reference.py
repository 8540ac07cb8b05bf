"""vLLM's V1 scheduling written plainly, to test the compiled engine model against.

Lists, dictionaries and one step at a time; blocks are found in the prefix cache by comparing
contents. Slow and short: what it does can be checked by reading it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from testbed.simulation.engine_model import EngineConfig
from testbed.step_time import StepTime, step_seconds


@dataclass(eq=False)
class Block:
    references: int = 0
    content: object = None


@dataclass(eq=False)
class Sequence:
    number: int
    arrival: float
    prompt: int
    total: int
    contents: list[object]
    known: int = 0
    computed: int = 0
    flying: int = 0
    prompt_end: int = 0
    blocks: list[Block] = field(default_factory=list)
    noted: int = 0
    running: bool = False
    scheduled: float | None = None
    first: float | None = None
    finished: float | None = None
    cached: int = 0
    preemptions: int = 0

    def content(self, index: int) -> object:
        return self.contents[index] if index < len(self.contents) else (self.number, index)


class Reference:
    """One engine; :meth:`run` serves everything and fills in the sequences."""

    def __init__(self, config: EngineConfig, step_time: StepTime, sequences: list[Sequence]):
        self.config, self.vector = config, step_time.vector()
        self.pending = deque(sequences)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.free = [Block() for _ in range(config.usable_blocks)]
        self.cache: dict[object, list[Block]] = {}
        self.steps = 0

    # -- blocks --

    def take(self, count: int) -> list[Block]:
        taken, self.free = self.free[:count], self.free[count:]
        for block in taken:
            if block.content is not None:
                self.cache[block.content].remove(block)
                block.content = None
            block.references = 1
        return taken

    def note(self, s: Sequence) -> None:
        full = min(s.computed - s.flying, s.known) // self.config.block_size
        if not self.config.prefix_caching:
            return
        for i in range(s.noted, full):
            s.blocks[i].content = s.content(i)
            self.cache.setdefault(s.content(i), []).append(s.blocks[i])
        s.noted = max(s.noted, full)

    def release(self, s: Sequence) -> None:
        front, back = [], []
        for block in reversed(s.blocks):
            block.references -= 1
            if block.references == 0:
                (front if block.content is None else back).append(block)
        self.free = front + self.free + back
        s.blocks, s.noted = [], 0

    def hits(self, s: Sequence) -> list[Block]:
        found: list[Block] = []
        if not self.config.prefix_caching:
            return found
        for i in range((s.known - 1) // self.config.block_size):
            holders = self.cache.get(s.content(i))
            if not holders:
                break
            found.append(holders[0])
        return found

    # -- scheduling --

    def schedule(self, now: float):
        config, size = self.config, self.config.block_size
        budget, batch, sums, preempted = config.token_budget, [], [0, 0.0, 0.0, 0.0, 0, 0.0], False

        def serve(s: Sequence, n: int) -> None:
            nonlocal budget
            before = s.computed
            s.computed += n
            budget -= n
            if before >= s.prompt_end:
                sums[4] += 1
                sums[5] += before
            else:
                sums[0] += 1
                sums[1] += n
                sums[2] += float(n) * n
                sums[3] += float(n) * before
            self.note(s)
            if s.computed == s.known + s.flying:
                s.flying += 1
                batch.append(s)

        i = 0
        while i < len(self.running) and budget > 0:
            s = self.running[i]
            goal = s.known + s.flying
            if goal >= s.total:
                i += 1
                continue
            n = min(goal - s.computed, budget)
            need = -(-(s.computed + n) // size) - len(s.blocks)
            while need > len(self.free) and s.running:
                victim = self.running.pop()
                self.note(victim)
                self.release(victim)
                victim.running, victim.computed, victim.flying = False, 0, 0
                victim.preemptions += 1
                self.waiting.appendleft(victim)
                preempted = True
            if not s.running:
                break
            s.blocks += self.take(max(need, 0))
            serve(s, n)
            i += 1
        while not preempted and budget > 0 and self.waiting:
            if len(self.running) >= config.max_sequences:
                break
            s = self.waiting[0]
            found = self.hits(s)
            standing = sum(b.references == 0 for b in found)
            if -(-s.known // size) - len(found) + standing > len(self.free):
                break
            self.waiting.popleft()
            for block in found:
                if block.references == 0:
                    self.free.remove(block)
                block.references += 1
            s.blocks, s.noted, s.computed = list(found), len(found), len(found) * size
            s.running, s.prompt_end = True, s.known
            if s.scheduled is None:
                s.scheduled, s.cached = now, s.computed
            n = min(s.known - s.computed, budget)
            s.blocks += self.take(-(-(s.computed + n) // size) - len(found))
            self.running.append(s)
            serve(s, n)
        return batch, sums

    def run(self) -> None:
        depth = 2 if self.config.async_scheduling else 1
        now, last_end, under_way = 0.0, 0.0, deque()
        while self.pending or self.waiting or self.running or under_way:
            if not (self.waiting or self.running or under_way):
                now = max(now, self.pending[0].arrival)
            while self.pending and self.pending[0].arrival <= now:
                self.waiting.append(self.pending.popleft())
            while len(under_way) < depth:
                batch, sums = self.schedule(now)
                if sums[0] + sums[4] == 0:
                    break
                start = max(now, last_end) if under_way else now
                last_end = start + step_seconds(self.vector, *sums)
                under_way.append((last_end, batch))
                self.steps += 1
            if not under_way:
                continue
            now, batch = under_way.popleft()
            for s in batch:
                s.known += 1
                if s.running:
                    s.flying -= 1
                if s.known == s.prompt + 1:
                    s.first = now
                if s.known == s.total:
                    s.finished = now
                    if s.running:
                        self.note(s)
                        self.release(s)
                        self.running.remove(s)
                    else:
                        self.waiting.remove(s)
