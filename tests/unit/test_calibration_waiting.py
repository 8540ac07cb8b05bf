"""Delay under load: models are judged rightly where the truth is known; speed and checks."""

from __future__ import annotations

import heapq
from dataclasses import replace

import numpy as np
import pytest

from calibration import waiting
from calibration.check import compare, differences
from calibration.derive import concurrency_records, decode_models, drift, kappa, moderate
from calibration.fit import summarise
from calibration.journal import Journal
from calibration.load import RequestClass, default_classes
from calibration.record import Calibration
from calibration.speed import relative_time
from calibration.under_load import seats
from calibration.waiting import SATURATED, SIMULATOR, Setting, load_record, relative_times
from cluster.engines.base import EngineFacts
from testbed.errors import CalibrationError
from testbed.simulation.engine_model import EngineConfig, simulate_engine
from testbed.step_time import StepTime

FACTS = EngineFacts(
    name="emulated",
    version="0",
    model="tiny-llama",
    dtype="bfloat16",
    device="none",
    num_blocks=1001,
    block_size=16,
    bytes_per_token=2048.0,
    vocabulary=4096,
    max_model_len=4096,
    max_sequences=4,
    token_budget=2048,
    clock="emulated",
    extra={"usable_blocks": 1000},
)
STEP = StepTime(c_pre=4e-3, a=4e-5, b=3e-8, d=6e-8, c_dec=2.7e-3, e=1e-4, f=2.5e-7)


def test_seats_are_what_the_pool_holds_of_the_mix_beside_the_pin():
    def mix(cached: int) -> list[RequestClass]:
        return [RequestClass("short", 3.0, 60, cached, 4.0), RequestClass("long", 1.0, 316, 0, 4.0)]

    many = replace(FACTS, max_sequences=500)
    # 4 blocks for three in four, 20 for the fourth: 8 in the mean of 1,000.
    assert seats(mix(0), many, 0) == 125
    assert seats(mix(512), many, 0) == 125  # cached tokens lie in the pinned blocks
    assert seats(mix(0), many, 200) == 100
    assert seats(mix(0), FACTS, 200) == FACTS.max_sequences
    assert seats(mix(0), many, 999) == 1


def mmc_run(rate: float, service: float, servers: int, prefill: float, count: int, seed: int):
    """Requests through an M/M/c queue; first token after the wait and the prefill."""
    draw = np.random.default_rng(seed)
    arrivals = np.cumsum(draw.exponential(1 / rate, count))
    free = [0.0] * servers
    started, ended = np.empty(count), np.empty(count)
    for i, at in enumerate(arrivals):
        started[i] = max(at, heapq.heappop(free))
        ended[i] = started[i] + draw.exponential(service)
        heapq.heappush(free, ended[i])
    return {
        "intended": arrivals,
        "received": arrivals,
        "queued": arrivals,
        "scheduled": started,
        "first": started + prefill,
        "finished": ended,
        "output": np.ones(count, dtype=int),
        "kind": np.zeros(count, dtype=int),
    }


def test_erlang_c_is_right_about_an_mmc_queue():
    prefill, service, servers, rate = 0.05, 0.5, 4, 6.0
    setting = Setting(
        classes=(RequestClass("q", 1.0, 100, 0, 1.0),),
        unloaded=np.array([prefill]),
        prefill=np.array([prefill]),
        decode=np.array([service - prefill]),
        capacity=servers / service,
        concurrency=servers,
        step_time=None,
        facts=FACTS,
        pinned_blocks=0,
    )
    run = mmc_run(rate, service, servers, prefill, 6000, seed=2)
    record = load_record("p", 0.75, rate, run, setting, (1.0, 1.0), {})
    by_name = {m.model: m for m in record.models}
    erlang = by_name["erlang_c"]
    assert erlang.ks_distance <= record.ks_noise
    low, high = record.mean[1], record.mean[2]
    assert low <= erlang.mean <= high
    for z, (_, low, high) in record.quantiles.items():
        assert low <= erlang.quantiles[z] * 1.02 and erlang.quantiles[z] * 0.98 <= (high or np.inf)
    # At the same rate, saturated and unloaded Erlang-C are one.
    assert by_name[SATURATED].mean == pytest.approx(erlang.mean)
    assert SIMULATOR not in by_name  # there is no step time to simulate with
    assert record.reasons["delayed_with_free_seat"] == 0
    assert record.reasons["occupancy_cv2"] == pytest.approx(1.0, abs=0.1)
    assert "of the requests that found a seat free" in waiting.explain(record)


def test_the_simulator_is_right_about_itself_and_erlang_c_is_not(monkeypatch):
    monkeypatch.setattr(waiting, "independent_models", lambda: ["erlang_c"])
    classes = (RequestClass("a", 0.5, 256, 0, 8.0), RequestClass("b", 0.5, 512, 512, 8.0))
    draw = np.random.default_rng(3)
    count, rate = 1500, 25.0
    arrivals = np.cumsum(draw.exponential(1 / rate, count))
    kinds = draw.integers(0, 2, count)
    outputs = draw.geometric(1 / 8, count)
    lengths = np.array([256, 1024])[kinds]
    config = EngineConfig(
        token_budget=2048, max_sequences=4, block_size=16, num_blocks=1001, max_model_len=4096
    )
    trace = simulate_engine(
        config, STEP, arrivals, lengths, outputs, reusable_tokens=np.array([0, 512])[kinds]
    )
    delivery = 1e-3
    unloaded = np.array([STEP.prefill_seconds(256), STEP.prefill_seconds(512, 512)])
    setting = Setting(
        classes=classes,
        unloaded=unloaded + delivery,
        prefill=unloaded,
        decode=np.array([7 * 3e-3] * 2),
        capacity=30.0,
        concurrency=4,
        step_time=STEP,
        facts=FACTS,
        pinned_blocks=32,
    )
    run = {
        "intended": arrivals,
        "received": arrivals,
        "queued": trace.queued,
        "scheduled": trace.scheduled,
        "first": trace.first_token + delivery,
        "finished": trace.finished + delivery,
        "output": outputs,
        "kind": kinds,
    }
    record = load_record("p", 0.8, rate, run, setting, (1.0, 1.0), {})
    by_name = {m.model: m for m in record.models}
    exact = by_name[SIMULATOR]
    assert exact.ks_distance == pytest.approx(0.0, abs=2 / count)
    assert all(abs(e) < 1e-6 for e in exact.errors.values())
    assert by_name["erlang_c"].ks_distance > record.ks_noise
    assert record.reasons["delayed_with_free_seat"] > 0.1


def test_noise_of_ks_shrinks_with_the_sample():
    draw = np.random.default_rng(0)
    noise = []
    for n in (200, 20000):
        half = waiting.interval_proportion(draw.random(n) > 0.5)
        noise.append(waiting.ks_noise(half))
    assert noise[0] > 5 * noise[1]


def test_default_classes_stay_behind_their_chain():
    short, long = default_classes(2000, 960)
    assert short.cached == long.cached == 960
    assert short.new < long.new <= 1040
    with pytest.raises(CalibrationError, match="leaves no room"):
        default_classes(1000, 999)


# --- quantities of the record ------------------------------------------------------------------


def test_kappa_is_bytes_held_per_token():
    pins = [{"tokens": 320, "blocks": 10.0}, {"tokens": 640, "blocks": 20.0}]
    found = kappa(pins, 32 * 2048.0)
    assert found.value == pytest.approx(2048.0) and found.standard_error == pytest.approx(0)


def test_decode_models_come_from_the_shortest_context():
    samples = [
        {"batch": 2, "context": c, "output": o, "repeat": 0, "seconds": [2e-3 + (o - 1) * t] * 2}
        for c, t in ((64, 3e-3), (512, 9e-3))
        for o in (9, 25)
    ]
    (model,) = decode_models(samples)
    assert model.concurrency == 2
    assert (model.base, model.per_token) == pytest.approx((2e-3, 3e-3))
    assert model.occupancy(1) == pytest.approx(model.base)


def burst(role: str, size: int, running: int, waiting: int, blocks: float, preemptions: int = 0):
    return {
        "role": role,
        "size": size,
        "new": 96,
        "output": 33,
        "running": running,
        "waiting": waiting,
        "blocks": blocks,
        "preemptions": preemptions,
    }


@pytest.mark.parametrize(
    ("counts", "measured", "limit"),
    [
        ([burst("count", 10, 8, 2, 32)], 8, "sequences"),
        ([burst("count", 10, 5, 5, 20)], 5, "pool"),
        ([burst("count", 10, 7, 3, 28, 2), burst("count", 6, 6, 0, 24)], 6, "pool"),
        ([burst("count", 10, 5, 0, 20)], 5, None),
    ],
)
def test_concurrency_says_what_bound_it(counts, measured, limit):
    journal = Journal(None, {})
    stage = "concurrency/deep"
    journal.add(stage, pinned_blocks=40.0, pinned_tokens=1280)
    for sample in (burst("size", 4, 4, 0, 16), *counts):
        journal.add(stage, **sample)
    journal.done(stage)
    (record,) = concurrency_records(journal, 32, 100.0, 6000.0, 8)
    assert record.persistent_bytes == 4000.0
    assert record.per_sequence.value == 400.0
    assert record.formula == 5
    assert (record.measured, record.limit) == (measured, limit)
    assert record.fragmentation == pytest.approx(0.0)


def test_few_samples_lean_on_the_grid():
    lucky = summarise(32, 0, [1.0, 1.0, 1.0])
    usual = [summarise(64 * i, 0, [1.0, 0.97, 1.03, 1.01, 0.99]) for i in (1, 2, 3)]
    moderated = moderate([lucky, *usual])
    assert lucky.standard_error == 0.0 < moderated[0].standard_error
    assert moderated[0].standard_error > moderated[1].standard_error


def test_drift_is_the_speed_of_a_pass():
    points = [summarise(32, 0, [1.0, 1.1, 1.2]), summarise(64, 0, [2.0, 2.2, 2.4])]
    found = drift(points, [{0: 1.0, 1: 2.0}, {0: 1.1, 1: 2.2}, {0: 1.2, 1: 2.4}])
    assert found["relative_time_by_round"] == pytest.approx([1 / 1.1, 1.0, 1.2 / 1.1])


def test_relative_time_is_found_with_its_interval():
    points = moderate(
        [summarise(n, 0, n * 1e-4 * np.array([1, 1.01, 0.99, 1.0])) for n in (32, 128, 512)]
    )
    draw = np.random.default_rng(5)
    now = (
        np.array([[p.median] for p in points]) * 1.1 * np.exp(0.02 * draw.standard_normal((3, 30)))
    )
    ratio, low, high = relative_time(now, points)
    assert low < 1.1 < high and ratio == pytest.approx(1.1, rel=0.02) and high - low < 0.06
    assert relative_times([now, 2 * now]) == pytest.approx([1.0, 2.0])


def test_a_check_compares_points_of_both():
    then = moderate([summarise(n, 0, n * 1e-4 * np.array([1, 1.01, 0.99])) for n in (32, 64, 128)])
    now = moderate([summarise(n, 0, n * 1.2e-4 * np.array([1, 1.01, 0.99])) for n in (64, 128)])
    found = compare(then, now)
    assert found["relative_time"] == pytest.approx(1.2)
    assert found["interval"][0] > 1.1 and len(found["points"]) == 2
    assert all(p["z"] > 3 for p in found["points"])
    with pytest.raises(CalibrationError, match="none of the points"):
        compare(then, moderate([summarise(33, 0, [1.0, 1.0, 1.0])]))


def test_a_check_names_what_differs():
    record = Calibration.from_dict(
        {
            "schema_version": 1,
            "source": {"kind": "emulated", "tool": "testbed"},
            "engine": {"name": "emulated", "version": "0", "num_blocks": 500, "block_size": 16},
            "model": {"name": "tiny-llama"},
            "device": {"kind": "other", "name": "emulated"},
        }
    )
    assert differences(record, FACTS) == ["KV pool, blocks: calibrated with 500, here it is 1001"]
