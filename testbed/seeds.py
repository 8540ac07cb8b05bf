"""One seed, many independent streams: each use of randomness has a name and its own generator.

The same seed gives the same requests, distances and lengths under every policy, because each
stream depends on the seed and its own name alone, never on how much another stream has drawn.
"""

from __future__ import annotations

import zlib

import numpy as np

WARM_UP = "warm-up"


def generator(seed: int, *names: str | int) -> np.random.Generator:
    """The generator of the stream ``names`` under ``seed``.

    >>> bool(generator(1, "arrivals").random() == generator(1, "arrivals").random())
    True
    >>> bool(generator(1, "arrivals").random() == generator(1, "distances").random())
    False
    """
    key = tuple(n if isinstance(n, int) else zlib.crc32(n.encode()) for n in names)
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)))
