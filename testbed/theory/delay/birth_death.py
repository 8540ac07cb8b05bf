"""BirthDeath: a Markov chain in the number present, with the engine's throughput (Theory H2).

With j requests in its slots the engine completes μ(j) = j/(j·G + D·T(j)) requests/s: in the time
that each of them decodes D steps of T(j) seconds, each is prefilled once, one after another. A
request waits when all c slots are taken. The simplest model with the right capacity; its
exponential service is too variable.
"""

from __future__ import annotations

import numpy as np

from testbed.theory.delay.base import DelayModel, TierLoad, without_argument
from testbed.theory.delay.engine_load import EngineLoad
from testbed.theory.delay.erlang_c import ExponentialWait


class BirthDeath(DelayModel):
    """M/M/c with a service rate that depends on how many are served."""

    name = "birth_death"
    uses_step_time = True

    def _rates(self, load: TierLoad) -> np.ndarray:
        """μ(1) … μ(c), requests/s."""
        engine = EngineLoad.of(load, self.name)
        j = np.arange(1, load.concurrency + 1)
        step = engine.base + engine.each * j
        return j / (j * engine.mean_prefill + engine.mean_decodes * step)

    def utilisation(self, load: TierLoad) -> float:
        return load.arrival_rate / float(self._rates(load).max())

    def excess(self, load: TierLoad) -> ExponentialWait:
        types = load.weights.size
        if load.arrival_rate <= 0:
            return ExponentialWait(0.0, 0.0, types)
        rates = self._rates(load)
        # Logarithms, so that hundreds of slots do not underflow.
        weight = np.concatenate([[0.0], np.cumsum(np.log(load.arrival_rate / rates))])
        weight = np.exp(weight - weight.max())
        rho = load.arrival_rate / rates[-1]
        full = weight[-1] / (1.0 - rho)
        chance = full / (weight[:-1].sum() + full)
        return ExponentialWait(float(chance), float(rates[-1] - load.arrival_rate), types)


without_argument("birth_death", BirthDeath)
