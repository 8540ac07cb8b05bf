"""Load: requests of a mix sent to the engine, alone, saturating it, or as a Poisson stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from calibration.prompts import Prompts
from cluster.engines.base import Engine, EngineFacts, Generation
from testbed.errors import CalibrationError
from testbed.seeds import generator

LONGEST_OUTPUT = 8
"""Geometric outputs are cut at this multiple of their mean, so that one request cannot outlast
the load it belongs to; the cut takes e⁻⁸ of them."""
IN_FLIGHT = 2.0
"""Requests in flight of a saturated engine, as a multiple of its seats."""
COLUMNS = ("intended", "received", "queued", "scheduled", "first", "finished", "output", "kind")


@dataclass(frozen=True)
class RequestClass:
    """One kind of request: ``new`` tokens after ``cached`` pinned ones, outputs geometric."""

    name: str
    weight: float
    new: int
    cached: int
    output: float


def default_classes(longest: int, chain: int) -> tuple[RequestClass, ...]:
    """Half short and half long prompts, all behind the profile's first chain if it has one."""
    room = longest - chain
    short, long = min(256, room // 4), min(1024, room)
    if short < 1:
        raise CalibrationError(
            f"profiles: a chain of {chain} tokens leaves no room in prompts of {longest}"
        )
    return (
        RequestClass("short", 0.5, short, chain, 16.0),
        RequestClass("long", 0.5, long, chain, 16.0),
    )


class Load:
    """Sends a mix of request classes to one engine, with prompts that nobody has sent before."""

    def __init__(
        self,
        engine: Engine,
        facts: EngineFacts,
        classes: Sequence[RequestClass],
        chain: np.ndarray,
        *,
        seed: int,
        stream: str,
    ) -> None:
        self.engine = engine
        self.facts = facts
        self.classes = tuple(classes)
        self.chain = chain
        self.weights = np.array([c.weight for c in classes]) / sum(c.weight for c in classes)
        self._seed = seed
        self._stream = stream
        self._sent = 0
        fresh = time.perf_counter_ns() & 0x7FFFFFFF
        self._prompts = Prompts(seed, facts.vocabulary, stream, fresh)

    async def _send(self, kind: int, output: int) -> Generation:
        c = self.classes[kind]
        self._sent += 1
        prompt = self._prompts.after(self.chain, c.cached, c.new)
        return await self.engine.generate(
            f"{self._stream}-{self._seed}-{self._sent}", prompt, output
        )

    def outputs(self, draw: np.random.Generator, kinds: np.ndarray) -> np.ndarray:
        """Tokens to generate, geometric with the class's mean, (N,)."""
        means = np.array([c.output for c in self.classes])[kinds]
        longest = np.array([self.facts.max_model_len - c.new - c.cached for c in self.classes])[
            kinds
        ]
        return np.minimum(draw.geometric(1.0 / means), np.minimum(LONGEST_OUTPUT * means, longest))

    async def unloaded(self, repeats: int, spacing: float) -> np.ndarray:
        """TTFT of each class alone on the engine, shape (classes, repeats), in mixed order.

        Counted as under load: from when the request is meant to go out to the first token here.
        """
        order = generator(self._seed, self._stream, "alone").permutation(
            np.repeat(np.arange(len(self.classes)), repeats)
        )
        times: list[list[float]] = [[] for _ in self.classes]
        for kind in order:
            await asyncio.sleep(spacing)
            sent = time.perf_counter()
            g = await self._send(int(kind), 1)
            if g.cached_tokens != self.classes[kind].cached:
                raise CalibrationError(
                    f"class {self.classes[kind].name!r}: {g.cached_tokens} tokens were cached "
                    f"where {self.classes[kind].cached} are pinned"
                )
            times[kind].append(g.first_token - sent)
        return np.array(times)

    async def capacity(self, seconds: float) -> tuple[float, float]:
        """Requests/s of a closed loop that keeps the engine saturated, and its standard error.

        The mix is stratified: each run of requests holds the classes in their shares.
        """
        draw = generator(self._seed, self._stream, "capacity")
        clients = max(2, round(IN_FLIGHT * self.facts.max_sequences))
        shares = np.repeat(
            np.arange(len(self.classes)), np.maximum(np.rint(self.weights * 20), 1).astype(int)
        )
        queue: list[int] = []
        ended: list[float] = []
        deadline = time.perf_counter() + seconds

        async def client() -> None:
            while time.perf_counter() < deadline:
                if not queue:
                    queue.extend(draw.permutation(shares).tolist())
                kind = queue.pop()
                output = int(self.outputs(draw, np.array([kind]))[0])
                await self._send(kind, output)
                ended.append(time.perf_counter())

        await asyncio.gather(*(client() for _ in range(clients)))
        times = np.sort(ended)
        # The first seats fill and the last drain outside of saturation.
        inside = times[(times > deadline - 0.8 * seconds) & (times < deadline)]
        if len(inside) < 20:
            raise CalibrationError(
                f"capacity: {len(inside)} requests ended in {0.8 * seconds:.0f} s; too few to "
                "measure it"
            )
        parts = np.array_split(inside, 5)
        edges = [inside[0], *(p[-1] for p in parts)]
        rates = [
            (len(p) - (i == 0)) / (b - a)
            for i, (p, a, b) in enumerate(zip(parts, edges[:-1], edges[1:], strict=True))
        ]
        rate = (len(inside) - 1) / (inside[-1] - inside[0])
        return float(rate), float(np.std(rates, ddof=1) / np.sqrt(len(rates)))

    async def poisson(self, rate: float, seconds: float, at: str) -> dict[str, Any]:
        """An open-loop Poisson stream: intended send times are fixed before the first goes out.

        Returns columns in order of arrival, stamps in seconds since the start.
        """
        draw = generator(self._seed, self._stream, at)
        count = max(20, round(rate * seconds))
        arrivals = np.cumsum(draw.exponential(1.0 / rate, count))
        kinds = draw.choice(len(self.classes), size=count, p=self.weights)
        outputs = self.outputs(draw, kinds).astype(int)
        start = time.perf_counter() + 0.05
        tasks = []
        for i in range(count):
            wait = start + arrivals[i] - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(self._send(int(kinds[i]), int(outputs[i]))))
        served = await asyncio.gather(*tasks)
        rows = np.array(
            [
                (
                    g.received,
                    g.queued or g.received,
                    g.scheduled or g.received,
                    g.first_token,
                    g.finished,
                )
                for g in served
            ]
        )
        stamps = dict(zip(COLUMNS[1:6], (rows - start).T, strict=True))
        return {"intended": arrivals, **stamps, "output": outputs, "kind": kinds, "start": start}
