"""PromptMix: new prompts of a node, and sums of several, counted on a grid of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np

CELLS = 512
"""Cells of the token budget on which sums of prompt lengths are counted."""

SUMS = 7
"""Tabulated with the number of tokens: probability, Σn², Σnh, work, work², work³, Σn."""


@dataclass(frozen=True)
class PromptMix:
    """New prompts of a node. Arrays are (Q,); work is what a prompt adds to a step, s."""

    weights: np.ndarray
    new: np.ndarray
    cached: np.ndarray
    work: np.ndarray

    @property
    def mean_new(self) -> float:
        return float(self.weights @ self.new)


def prompt_sums(mix: PromptMix, most: int, cell: float, first: np.ndarray | None) -> np.ndarray:
    """(most + 1, CELLS + 1, SUMS): sums of j prompts, by their tokens, ``first`` one apart."""
    result = np.zeros((most + 1, CELLS + 1, SUMS))
    result[0, 0, 0] = 1.0
    if first is not None and most > 0:
        result[1] = first.T
    for j in range(1 if first is None else 2, most + 1):
        _convolve(result[j - 1], result[j], mix.weights, mix.new, mix.cached, mix.work, cell)
        if result[j, :, 0].sum() < 1e-12:
            break
    return result


@numba.njit(cache=True)
def _convolve(
    before: np.ndarray,
    after: np.ndarray,
    weights: np.ndarray,
    new: np.ndarray,
    cached: np.ndarray,
    work: np.ndarray,
    cell: float,
) -> None:
    cells = before.shape[0]
    for q in range(weights.size):
        if weights[q] <= 0.0:
            continue
        low = int(new[q] / cell)
        split = new[q] / cell - low
        w = work[q]
        for side in range(2):
            part = weights[q] * (1.0 - split if side == 0 else split)
            if part <= 0.0:
                continue
            for x in range(cells - low - side):
                p = before[x, 0]
                if p <= 0.0:
                    continue
                y = x + low + side
                after[y, 0] += part * p
                after[y, 1] += part * (before[x, 1] + p * new[q] * new[q])
                after[y, 2] += part * (before[x, 2] + p * new[q] * cached[q])
                after[y, 3] += part * (before[x, 3] + p * w)
                after[y, 4] += part * (before[x, 4] + 2 * w * before[x, 3] + p * w * w)
                after[y, 5] += part * (
                    before[x, 5] + 3 * w * before[x, 4] + 3 * w * w * before[x, 3] + p * w**3
                )
                after[y, 6] += part * (before[x, 6] + p * new[q])
