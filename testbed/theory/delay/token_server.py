"""TokenServer: prefills in series, decodes beside them, and a wait for a slot (Theory H2).

The engine is one server whose work is a request's prefill and the marginal cost of its decode
tokens. A request waits for the prefills ahead of it (M/G/1), for the rest of a decode step that it
finds under way, and for a slot (M/G/c over occupancies that prefills of others stretch). Cheaper
than the step chain by orders of magnitude; it knows nothing of batches of prefills.
"""

from __future__ import annotations

import numpy as np

from testbed.theory.delay.base import DelayModel, TierLoad, without_argument
from testbed.theory.delay.engine_load import EngineLoad
from testbed.theory.delay.erlang_c import erlang_c
from testbed.theory.delay.mgc import GammaWait, conditional_wait


class TokenServer(DelayModel):
    """M/G/1 over prefill and marginal decode work, with a slot wait."""

    name = "token_server"

    def _capacity(self, load: TierLoad, engine: EngineLoad) -> float:
        """Requests/s at which the server or the slots have no time left.

        Slots: λ·(G + D·(base + c·each)/(1 − λ·G)) = c, a quadratic in λ.
        """
        prefill, decodes = engine.mean_prefill, engine.mean_decodes
        server = 1.0 / (prefill + decodes * engine.each)
        slots = load.concurrency
        step = decodes * (engine.base + slots * engine.each)
        if prefill <= 0:
            return min(server, slots / step)
        # −G²·λ² + (G·(1 + c) + D·T)·λ − c = 0; the lesser root.
        a, b = prefill**2, prefill * (1.0 + slots) + step
        full = (b - np.sqrt(b * b - 4.0 * a * slots)) / (2.0 * a)
        return float(min(server, full))

    def utilisation(self, load: TierLoad) -> float:
        return load.arrival_rate / self._capacity(load, EngineLoad.of(load, self.name))

    def excess(self, load: TierLoad) -> GammaWait:
        engine = EngineLoad.of(load, self.name)
        rate, weights = load.arrival_rate, load.weights
        if rate <= 0:
            return GammaWait(0.0, 1.0, 1.0, weights.size)
        work = engine.prefill + engine.decodes * engine.each
        busy = rate * float(weights @ work)
        second = float(weights @ work**2)
        third = float(weights @ work**3)
        # Pollaczek and Khinchine, with the variance by Takács.
        mean = rate * second / (2.0 * (1.0 - busy))
        variance = mean**2 + rate * third / (3.0 * (1.0 - busy))

        # The server decodes through the time that prefills leave, unless nobody decodes.
        free = 1.0 - rate * engine.mean_prefill
        spare = free - rate * engine.mean_decodes * engine.each
        decoding = rate * engine.mean_decodes * engine.base / spare
        step = engine.base + engine.each * max(decoding, 1.0)
        under_way = free * (1.0 - np.exp(-decoding))
        mean += under_way * 0.5 * step
        variance += under_way * step**2 / 3.0 - (under_way * 0.5 * step) ** 2

        occupancy = engine.prefill + engine.decodes * step / free
        hold = float(weights @ occupancy)
        scv = max(float(weights @ occupancy**2) / hold**2 - 1.0, 0.0)
        slots = load.concurrency
        taken = min(rate * hold / slots, 1.0 - 1e-9)
        chance = erlang_c(slots, taken * slots)
        if chance > 0 and engine.mean_decodes > 0:
            wait, spread = conditional_wait(slots, taken, hold, scv)
            mean += chance * wait
            variance += chance * (spread + wait**2) - (chance * wait) ** 2
        else:
            chance = 0.0
        idle = (1.0 - busy) * (1.0 - under_way) * (1.0 - chance)
        waiting = 1.0 - idle
        conditional = mean / waiting
        around = max((variance + mean**2) / waiting - conditional**2, 1e-12 * conditional**2)
        return GammaWait(waiting, conditional**2 / around, around / conditional, weights.size)


without_argument("token_server", TokenServer)
