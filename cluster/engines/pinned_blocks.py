"""PinnedBlocks: which blocks of a pool are pinned, and what that leaves for a request.

A paged engine names a block by the tokens in it and all before it, so that pinned chains share
their common beginning. A request that could not end in the blocks beside the pinned ones would
wait forever for room: it is refused before it is sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np


class PinnedBlocks:
    """Blocks of the chains that are pinned now.

    Parameters
    ----------
    block_size : tokens per block

    Examples
    --------
    >>> pinned = PinnedBlocks(block_size=2)
    >>> pinned.add("a", [1, 2, 3, 4]); pinned.add("b", [1, 2, 9, 9])
    >>> pinned.count, pinned.covered([1, 2, 3, 4, 5])
    (3, 2)
    """

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._chains: dict[str, list[int]] = {}
        self._held: Counter[int] = Counter()

    @property
    def count(self) -> int:
        """Blocks held, each counted once."""
        return len(self._held)

    def add(self, name: str, tokens: Sequence[int] | np.ndarray) -> None:
        """Pin the full blocks of a chain under a name, in place of what it named before."""
        self.remove(name)
        self._chains[name] = list(self._blocks(tokens))
        self._held.update(self._chains[name])

    def remove(self, name: str) -> None:
        """Give a name's blocks back; nothing happens for an unknown one."""
        for block in self._chains.pop(name, ()):
            self._held[block] -= 1
            if self._held[block] == 0:
                del self._held[block]

    def covered(self, tokens: Sequence[int] | np.ndarray) -> int:
        """Leading tokens of a prompt in pinned blocks; one token at least is always computed."""
        if not self._held:
            return 0
        found = 0
        for block in self._blocks(tokens[: len(tokens) - 1]):
            if block not in self._held:
                break
            found += self._size
        return found

    def needed(self, tokens: Sequence[int] | np.ndarray, output_tokens: int) -> int:
        """Blocks that a request takes of its own at its end, pinned ones left out.

        Its last token is never written to the cache.
        """
        total = len(tokens) + output_tokens - 1
        return -(-total // self._size) - self.covered(tokens) // self._size

    def _blocks(self, tokens: Sequence[int] | np.ndarray) -> Iterator[int]:
        """Each full block as a number that depends on it and on all before it."""
        values = np.asarray(tokens, dtype=np.int64)
        name = 0
        for start in range(0, len(values) // self._size * self._size, self._size):
            name = hash((name, values[start : start + self._size].tobytes()))
            yield name
