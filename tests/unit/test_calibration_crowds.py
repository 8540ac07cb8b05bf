"""Prefills among others: the grid fits the engine, and the step time says what its steps take."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibration.crosscheck import crowd_points, crowded_prefill
from calibration.design import DECODE_PROMPT, LONG_OUTPUT, Crowd, crowd_grid
from cluster.engines.base import EngineFacts
from testbed.simulation.engine_model import EngineConfig, EngineState, simulate_engine
from testbed.step_time import StepTime

STEP = StepTime(
    c_pre=4e-3, p=1e-3, c_both=5e-4, a=4e-5, b=3e-8, d=6e-8, c_dec=2.7e-3, e=1e-4, f=2.5e-7
)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 64),
    st.integers(16, 8192),
    st.integers(64, 8000),
    st.integers(0, 8000),
    st.integers(100, 50_000),
    st.booleans(),
)
def test_every_crowd_fits_the_engine(seats, budget, longest, depth, room, chunks):
    facts = EngineFacts(
        name="vllm",
        version="0",
        model="tiny-llama",
        dtype="bfloat16",
        device="cpu",
        num_blocks=601,
        block_size=32,
        bytes_per_token=2048.0,
        vocabulary=4096,
        max_model_len=8192,
        max_sequences=seats,
        token_budget=budget,
        clock="wall clock",
    )
    grid = crowd_grid(facts, longest, depth, room, chunks)
    assert len(grid) == len(set(grid))
    for c in grid:
        assert c.decodes + c.prefills <= seats and c.decodes < c.chunk <= budget
        assert c.new + c.cached <= longest and c.cached <= depth and c.cached % 32 == 0
        held = c.decodes * (DECODE_PROMPT + LONG_OUTPUT) + c.prefills * c.new
        assert held <= room
        assert c.decodes == 0 or c.steps < LONG_OUTPUT
        assert chunks or c.chunk == budget


@pytest.mark.parametrize("chunk", [64, 200, 2048])
@pytest.mark.parametrize("prefills", [1, 3])
@pytest.mark.parametrize("cached", [0, 320])
def test_prompts_alone_take_the_steps_of_the_engine_model(chunk, prefills, cached):
    crowd = Crowd(0, prefills, 300, cached, chunk)
    ends, longest = crowded_prefill(crowd, 0.0, STEP)
    trace = simulate_engine(
        EngineConfig(token_budget=chunk),
        STEP,
        np.zeros(prefills),
        np.full(prefills, 300 + cached),
        np.ones(prefills, dtype=int),
        reusable_tokens=np.full(prefills, cached),
        log=True,
    )
    assert ends == pytest.approx(trace.first_token)
    assert longest == pytest.approx((trace.log["end"] - trace.log["start"]).max())


@pytest.mark.parametrize("chunk", [70, 512])
def test_prompts_among_decodes_take_the_steps_of_the_engine_model(chunk):
    decodes, prefills = 4, 2
    engine = EngineState(EngineConfig(token_budget=chunk, max_sequences=16), STEP)
    for _ in range(decodes):
        engine.submit(0.0, input_tokens=64, output_tokens=48)
    now, context = 0.0, 0.0
    for _ in range(12):
        events = engine.step(now)
        now = events.end
        context = events.formed[0][7] / max(events.formed[0][6], 1)
    mine = [engine.submit(now, input_tokens=150, output_tokens=1) for _ in range(prefills)]
    start, firsts = now, {}
    while len(firsts) < prefills:
        events = engine.step(now)
        now = events.end
        firsts |= {r: now - start for r in events.first if r in mine}
    ends, _ = crowded_prefill(Crowd(decodes, prefills, 150, 0, chunk), context + 1, STEP)
    assert ends == pytest.approx([firsts[r] for r in mine])


def test_a_limited_engine_model_cuts_its_chunks_and_goes_back():
    engine = EngineState(EngineConfig(token_budget=512), STEP)

    def steps(tokens: int) -> int:
        engine.submit(engine_now[0], input_tokens=tokens, output_tokens=1)
        count = 0
        while (events := engine.step(engine_now[0])) is not None:
            engine_now[0] = events.end
            count += 1
        return count

    engine_now = [0.0]
    assert steps(512) == 1
    engine.limit_step(100)
    assert steps(512) == 6
    engine.limit_step(None)
    assert steps(512) == 1


def test_points_keep_their_samples_and_say_which_were_left_out():
    crowd = Crowd(2, 2, 64, 0, 512)
    ends, longest = crowded_prefill(crowd, 70.0, STEP)
    good = {
        "crowd": list(crowd),
        "seconds": ends.tolist(),
        "together": True,
        "stall": longest,
        "pause": 3e-3,
        "context": 70.0,
    }
    bad = {**good, "seconds": [1.0, 1.0], "together": False}
    (point,), report = crowd_points([good, bad, good, good], STEP)
    assert (point.apart, len(point.seconds)) == (1, 3)
    assert point.median == pytest.approx(point.predicted) == pytest.approx(ends.mean())
    assert point.stall == pytest.approx(point.longest_step)
    assert report.points == 1 and report.relative_error == pytest.approx(0)
    (alone,), none = crowd_points([good], None)
    assert alone.predicted is None and none is None
