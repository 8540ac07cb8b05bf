"""Grids, prompts and the journal: what is measured, with what, and what survives a kill."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibration.design import (
    DESIGNS,
    SHORTEST,
    cached_depth,
    decode_batches,
    longest_prompt,
    prefill_grid,
    usable_blocks,
)
from calibration.journal import Journal
from calibration.prompts import Prompts
from cluster.engines.base import EngineFacts
from testbed.errors import CalibrationError


def facts(**changes) -> EngineFacts:
    values = {
        "name": "vllm",
        "version": "0",
        "model": "tiny-llama",
        "dtype": "bfloat16",
        "device": "cpu",
        "num_blocks": 601,
        "block_size": 32,
        "bytes_per_token": 2048.0,
        "vocabulary": 4096,
        "max_model_len": 8192,
        "max_sequences": 16,
        "token_budget": 2048,
        "clock": "wall clock",
    }
    return EngineFacts(**{**values, **changes})


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(DESIGNS)),
    st.integers(64, 16000),
    st.sampled_from([1, 16, 32, 128]),
    st.integers(0, 40000),
)
def test_every_point_fits_and_hits_whole_blocks(effort, longest, block, room):
    points = prefill_grid(DESIGNS[effort], longest, block, longest + room)
    assert len(points) == len(set(points))
    assert {n for n, h in points if h == 0} >= {SHORTEST, longest}
    for n, h in points:
        assert n >= 1 and h >= 0 and n + h <= longest and h % block == 0
        assert h <= cached_depth(longest, block, longest + room) <= room


def test_the_pool_bounds_the_longest_prompt():
    assert longest_prompt(facts(), None) == 8191
    assert longest_prompt(facts(num_blocks=101), None) == 1600
    assert longest_prompt(facts(), 1000) == 1000
    with pytest.raises(CalibrationError, match="too few to calibrate"):
        longest_prompt(facts(num_blocks=3), None)


def test_an_engine_may_state_its_usable_blocks():
    assert usable_blocks(facts()) == 600
    assert usable_blocks(facts(name="sglang")) == 601
    assert usable_blocks(facts(extra={"usable_blocks": 590})) == 590


@given(st.integers(1, 300))
def test_batches_double_up_to_the_limit(most):
    batches = decode_batches(most)
    assert batches[0] == 1 and batches[-1] == most and batches == sorted(set(batches))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 5), st.integers(0, 12), st.integers(1, 50))
def test_a_prompt_leaves_its_chain_exactly_where_it_should(seed, cached, new):
    prompts = Prompts(seed, 300, "x")
    chain = prompts.cold(12)
    prompt = prompts.after(chain, cached, new)
    assert len(prompt) == cached + new and prompt.max() < 300
    assert (prompt[:cached] == chain[:cached]).all()
    if cached < 12:
        assert prompt[cached] != chain[cached]


def test_prompts_are_new_each_time_and_the_same_for_a_seed():
    first, second = Prompts(1, 4096, "x"), Prompts(1, 4096, "x")
    a, b = first.cold(64), first.cold(64)
    assert (a != b).any() and (second.cold(64) == a).all()
    assert (Prompts(2, 4096, "x").cold(64) != a).any()


# --- journal -----------------------------------------------------------------------------------

HEADER = {"schema_version": 1, "engine": "emulated", "seed": 3}


def test_a_killed_job_finds_its_samples(tmp_path):
    journal = Journal(tmp_path, HEADER)
    journal.add("prefill", point=(32, 0), seconds=0.5)
    journal.add("pin", blocks=np.float64(3.0))
    journal.done("prefill")
    journal.close()
    path = tmp_path / Journal.FILE
    path.write_bytes(path.read_bytes() + b'{"stage": "prefill", "poi')
    again = Journal(tmp_path, HEADER)
    assert again.resumed == 3
    assert again.samples("prefill") == [{"point": [32, 0], "seconds": 0.5}]
    assert again.is_done("prefill") and not again.is_done("decode")
    again.add("prefill", point=(64, 0), seconds=0.7)
    again.close()
    assert len(Journal(tmp_path, HEADER).samples("prefill")) == 2


def test_a_journal_of_something_else_is_refused(tmp_path):
    Journal(tmp_path, HEADER).close()
    with pytest.raises(CalibrationError, match="seed = 3, not 4"):
        Journal(tmp_path, {**HEADER, "seed": 4})


def test_a_broken_line_is_named(tmp_path):
    (tmp_path / Journal.FILE).write_text('{"schema_version":1,"engine":"emulated","seed":3}\nno\n')
    with pytest.raises(CalibrationError, match=r"points.jsonl:2: "):
        Journal(tmp_path, HEADER)


def test_a_journal_without_a_folder_writes_nothing(tmp_path):
    journal = Journal(None, HEADER)
    journal.add("pin", blocks=1)
    assert journal.samples("pin") == [{"blocks": 1}] and not list(tmp_path.iterdir())
