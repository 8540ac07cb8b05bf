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


def _slot_capacity(slots: int, engine: EngineLoad) -> float:
    """Requests/s that keep all slots taken: λ·(G + D·(base + c·each)/(1 − λ·G)) = c."""
    prefill = engine.mean_prefill
    step = engine.mean_decodes * (engine.base + slots * engine.each)
    # −G²·λ² + (G·(1 + c) + D·T)·λ − c = 0; the lesser root, in the form that does not cancel.
    b = prefill * (1.0 + slots) + step
    return float(2.0 * slots / (b + np.sqrt(b * b - 4.0 * prefill**2 * slots)))


class TokenServer(DelayModel):
    """M/G/1 over prefill and marginal decode work, with a slot wait."""

    name = "token_server"
    uses_step_time = True

    def _capacity(self, load: TierLoad, engine: EngineLoad) -> float:
        """Requests/s at which the server or the slots have no time left."""
        server = 1.0 / (engine.mean_prefill + engine.mean_decodes * engine.each)
        return min(server, _slot_capacity(load.concurrency, engine))

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

        slots = load.concurrency
        taken = rate / _slot_capacity(slots, engine)
        hold = taken * slots / rate
        occupancy = engine.prefill + engine.decodes * step / free
        each = float(weights @ occupancy)
        scv = max(float(weights @ occupancy**2) / each**2 - 1.0, 0.0)
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
