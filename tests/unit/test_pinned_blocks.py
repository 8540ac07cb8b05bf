"""PinnedBlocks: shared beginnings are held once; what is left decides who fits."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.engines.pinned_blocks import PinnedBlocks

CHAINS = st.lists(st.lists(st.integers(0, 1), min_size=0, max_size=16), max_size=5)


def prefixes(chains: list[list[int]], size: int) -> set[tuple[int, ...]]:
    return {tuple(chain[:end]) for chain in chains for end in range(size, len(chain) + 1, size)}


@settings(max_examples=80, deadline=None)
@given(chains=CHAINS, size=st.integers(1, 4))
def test_a_block_is_a_distinct_prefix_that_ends_where_a_block_ends(chains, size):
    pinned = PinnedBlocks(size)
    for i, chain in enumerate(chains):
        pinned.add(str(i), chain)
    assert pinned.count == len(prefixes(chains, size))
    for i in range(len(chains)):
        pinned.remove(str(i))
        assert pinned.count == len(prefixes(chains[i + 1 :], size))


@settings(max_examples=80, deadline=None)
@given(chains=CHAINS, size=st.integers(1, 4), prompt=st.lists(st.integers(0, 1), min_size=1))
def test_a_prompt_is_covered_as_far_as_its_blocks_are_pinned(chains, size, prompt):
    pinned = PinnedBlocks(size)
    for i, chain in enumerate(chains):
        pinned.add(str(i), chain)
    known = prefixes(chains, size)
    covered = 0
    while covered + size < len(prompt) and tuple(prompt[: covered + size]) in known:
        covered += size
    assert pinned.covered(prompt) == covered
    assert pinned.needed(prompt, 1) == -(-len(prompt) // size) - covered // size


def test_a_name_pinned_anew_and_an_unknown_one():
    pinned = PinnedBlocks(2)
    pinned.add("a", [1, 2, 3, 4])
    pinned.add("a", [1, 2])
    assert pinned.count == 1
    pinned.remove("b")
    assert pinned.count == 1
