"""ServiceVariability: how far an occupancy spreads around its mean (Theory H2).

The scenario gives mean occupancies; a queue beyond M/M/c needs their variability too. What is
assumed is named in the delay model's argument, ``mgc:deterministic`` for example:

- absent: the residual prefill is fixed, the decode occupancy exponential;
- ``deterministic``: every request of a type takes exactly its mean;
- ``exponential_by_type``: exponential around the type's mean;
- a number: the squared coefficient of variation (SCV) of each type around its mean;
- a file of measured occupancies, one number of seconds a line: their SCV around the mean.

Types of different means add variability of their own; the mixture carries both.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from testbed.errors import ScenarioError
from testbed.theory.delay.base import TierLoad


@dataclass(frozen=True)
class ServiceVariability:
    """Squared coefficient of variation of a type's occupancy around its mean.

    ``scv`` None: prefill fixed, decode exponential, so (D_q/S_q)² for type q.
    """

    scv: float | None = None

    def moments(self, load: TierLoad) -> tuple[float, float]:
        """Mean, s, and SCV of the occupancy of the mixture at a node.

        E[S²] = Σ_q w_q S_q² (1 + v_q); a mixture of equal fixed times has an SCV of 0.
        """
        mean = load.mean_service
        if mean <= 0:
            return 0.0, 0.0
        if self.scv is None:
            # S_q²·v_q is the variance, and all of it is the decode's.
            spread = (load.occupancy - load.residual_prefill) ** 2
        else:
            spread = self.scv * load.occupancy**2
        second = float(load.weights @ (load.occupancy**2 + spread))
        return mean, max(second / mean**2 - 1.0, 0.0)


def service_variability(argument: str | None, model: str) -> ServiceVariability:
    """The assumption named by a delay model's argument.

    Raises
    ------
    ScenarioError
        The argument is no name, number ≥ 0 or file of positive seconds.
    """
    if argument is None:
        return ServiceVariability()
    named = {"deterministic": 0.0, "exponential_by_type": 1.0}
    if argument in named:
        return ServiceVariability(named[argument])
    try:
        number = float(argument)
    except ValueError:
        return ServiceVariability(_measured_scv(argument, model))
    if not 0 <= number < np.inf:
        raise ScenarioError(f"delay_model: {model}:{argument}: an SCV is a number >= 0")
    return ServiceVariability(number)


def _measured_scv(path: str, model: str) -> float:
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ScenarioError(f"delay_model: {model}:{path}: {reason}") from None
    values = []
    for number, line in enumerate(text.splitlines(), 1):
        entry = line.split("#", 1)[0].strip()
        if not entry:
            continue
        try:
            seconds = float(entry)
        except ValueError:
            seconds = np.nan
        if not 0 < seconds < np.inf:
            raise ScenarioError(f"{path}:{number}: {entry!r} is not a positive number of seconds")
        values.append(seconds)
    if len(values) < 2:
        raise ScenarioError(f"{path}: a variability needs at least two measured occupancies")
    sample = np.array(values)
    return float(sample.var(ddof=1) / sample.mean() ** 2)
