"""Seeds: streams by name, independent of each other and of how much another drew."""

from __future__ import annotations

import numpy as np

from testbed.seeds import generator


def test_same_seed_and_name_same_stream():
    assert np.array_equal(generator(3, "a", 1).random(8), generator(3, "a", 1).random(8))


def test_names_and_seeds_part_the_streams():
    draws = [
        generator(seed, *names).random(2000)
        for seed in (0, 1)
        for names in (("a",), ("b",), ("a", 1), ("a", 2))
    ]
    correlation = np.corrcoef(draws) - np.eye(len(draws))
    # 28 pairs of 2,000 draws: five standard errors.
    assert np.abs(correlation).max() < 5 / np.sqrt(2000)
