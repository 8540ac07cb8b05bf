"""Prompts: token ids that hit exactly as much of the cache as a measurement asks for."""

from __future__ import annotations

import numpy as np

from testbed.seeds import generator
from testbed.workload.stream import FIRST_TOKEN_ID


class Prompts:
    """Random prompts under one seed; each call draws new ones.

    Random tokens share no block with anything seen before (a block of 16 tokens repeats with
    probability below 10⁻⁵⁰), so a prompt is cold unless it starts with a pinned chain.
    """

    def __init__(self, seed: int, vocabulary: int, *stream: str | int) -> None:
        self._draw = generator(seed, "calibration", *stream)
        self._vocabulary = vocabulary
        self._low = min(FIRST_TOKEN_ID, vocabulary // 2)

    def cold(self, tokens: int) -> np.ndarray:
        """``tokens`` ids, shape (tokens,) int32."""
        return self._draw.integers(self._low, self._vocabulary, tokens, dtype=np.int32)

    def after(self, chain: np.ndarray, cached: int, new: int) -> np.ndarray:
        """The first ``cached`` ids of a chain, then ``new`` fresh ones that leave it at once."""
        own = self.cold(new)
        if cached < len(chain) and own[0] == chain[cached]:
            own[0] = self._low + (own[0] - self._low + 1) % (self._vocabulary - self._low)
        return np.concatenate([chain[:cached], own])
