"""Importers: third parties' files become calibration records, units and sources kept."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from calibration.importers import import_calibration
from calibration.record import Calibration
from testbed.errors import CalibrationError
from testbed.step_time import StepTime
from tests.unit.gpu_run import write_profile, write_run

SHARED = Path(__file__).parents[3] / "shared" / "data" / "gpu"
needs_data = pytest.mark.skipif(not SHARED.is_dir(), reason=f"{SHARED} is not there")


# --- LLMServingSim ----------------------------------------------------------------------------


def test_a_run_folder_becomes_a_record(tmp_path):
    folder = write_run(tmp_path / "run")
    record = import_calibration("llmservingsim", folder)
    assert record.step_time.kind == "operators"
    assert record.memory.kappa == 2 * 6 * 4 * 64 * 2
    assert record.memory.pool_bytes == 119 * 16 * record.memory.kappa
    assert record.engine.max_sequences == 16 and record.engine.token_budget == 512
    assert record.source.kind == "imported" and len(record.source.files) == 5
    assert all(f.sha256 for f in record.source.files)
    # g(n | h) of the record is the step time's, cut by the budget.
    point = next(p for p in record.prefill_points if (p.new, p.cached) == (1024, 0))
    pieces = record.step_time.seconds([(512, 0)]) + record.step_time.seconds([(512, 512)])
    assert point.median == pytest.approx(pieces)
    assert record.prefill.relative_error < 0.2
    steps = [d.per_token for d in record.decode]
    assert steps == sorted(steps)
    record.save(tmp_path / "calibration.json")
    assert Calibration.load(tmp_path / "calibration.json") == record


def test_the_stamps_of_a_run_change_nothing(tmp_path):
    folder = write_run(tmp_path / "run")
    before = import_calibration("llmservingsim", folder)
    lines = [json.loads(x) for x in (folder / "requests.jsonl").read_text().splitlines()]
    for row in lines:
        row["first_token_ts"] += 100.0
        row["last_token_ts"] += 200.0
    (folder / "requests.jsonl").write_text("\n".join(map(json.dumps, lines)))
    after = import_calibration("llmservingsim", folder)
    assert after.step_time == before.step_time
    assert after.prefill == before.prefill and after.m_run == before.m_run


def test_a_bare_profile_needs_a_known_model(tmp_path):
    folder = tmp_path / "profile"
    write_profile(folder)
    with pytest.raises(CalibrationError, match="made/up"):
        import_calibration("llmservingsim", folder)
    record = import_calibration("llmservingsim", folder, model="meta-llama/Llama-3.2-1B")
    assert record.model.layers == 16 and record.memory.pool_bytes is None


@needs_data
def test_rtx_4090():
    record = import_calibration("llmservingsim", SHARED / "rtx4090-llama-3.1-8b")
    assert record.memory.kappa == 131072 and record.memory.num_blocks == 2588
    assert record.device.name == "NVIDIA GeForce RTX 4090"
    assert record.model.parameters == pytest.approx(8.03e9, rel=1e-3)
    # One step of weights from memory at about 1 TB/s takes at least 16 ms.
    assert 0.015 < record.step_time.seconds(decodes=1, decode_context=512) < 0.02


# --- DistServe --------------------------------------------------------------------------------


def distserve(tmp_path, prefill):
    data = {
        "facebook/opt-13b": {
            "1": {
                "prefill": prefill,
                "decoding_smallbs": [20.0, 0.0006, 0.06],
                "decoding_largebs": [18.0, 0.0005, 0.12],
                "decoding_large_small_bs_threshold": 95,
            }
        }
    }
    path = tmp_path / "profiler-a100-80g.vllm.json"
    path.write_text(json.dumps(data))
    return path


def test_distserve_milliseconds_become_seconds(tmp_path):
    record = import_calibration("distserve", distserve(tmp_path, [22.0, 0.14, 8e-6]))
    step = record.step_time
    assert isinstance(step, StepTime)
    assert step.seconds([(1000, 0)]) == pytest.approx((22 + 140 + 8) * 1e-3)
    assert step.seconds(decodes=10, decode_context=5000) == pytest.approx((20 + 3 + 0.6) * 1e-3)
    # g of the scenario recovers the published law.
    fit = record.prefill.coefficients
    assert fit.overhead == pytest.approx(22e-3, rel=1e-3)
    assert fit.linear == pytest.approx(0.14e-3, rel=1e-3)
    assert fit.quadratic == pytest.approx(8e-9, rel=1e-3)
    assert record.device.name.startswith("NVIDIA A100")


def test_a_negative_coefficient_is_refitted_and_said(tmp_path):
    record = import_calibration("distserve", distserve(tmp_path, [58.0, 0.38, -7e-6]))
    assert record.step_time.b >= 0
    assert any("negative coefficient" in note for note in record.source.notes)
    assert record.step_time.seconds([(1000, 0)]) == pytest.approx(0.431, rel=0.03)


@needs_data
def test_distserve_asks_which_model():
    folder = SHARED / "a100-opt"
    with pytest.raises(CalibrationError, match="say which one of"):
        import_calibration("distserve", folder)
    with pytest.raises(CalibrationError, match="tensor_parallel"):
        import_calibration("distserve", folder, model="facebook/opt-66b", tensor_parallel=1)
    record = import_calibration("distserve", folder, model="facebook/opt-66b", tensor_parallel=4)
    assert record.engine.tensor_parallel == 4 and record.model.layers == 64


# --- Load tests -------------------------------------------------------------------------------


def requests(count: int, delay: float, gap: float):
    """Prompt, output, TTFT and seconds a token of an engine with g = 5 ms + 20 µs a token."""
    lengths = [100, 500, 1000, 2000]
    return [(n := lengths[i % 4], 11, 0.005 + 2e-5 * n + delay, gap) for i in range(count)]


def check(record: Calibration, tool: str) -> None:
    assert record.source.tool == tool
    assert record.model.name == "meta-llama/Llama-3.1-8B"
    assert record.prefill.coefficients.linear == pytest.approx(2e-5, rel=0.02)
    assert record.prefill.coefficients.overhead == pytest.approx(5e-3, rel=0.05)
    alone, busy = record.decode
    assert alone.per_token == pytest.approx(0.01) and busy.per_token == pytest.approx(0.02)
    assert alone.concurrency == pytest.approx(1.0, rel=0.01)
    assert busy.concurrency == pytest.approx(8.0, rel=0.01)


def latencies(rows):
    return sum(ttft + 10 * gap for _, _, ttft, gap in rows)


def test_vllm_bench(tmp_path):
    for name, rows, flight in (
        ("one", requests(40, 0.0, 0.01), 1.0),
        ("eight", requests(80, 0.1, 0.02), 8.0),
    ):
        result = {
            "date": "20260101-000000",
            "backend": "vllm",
            "model_id": "meta-llama/Llama-3.1-8B",
            "num_prompts": len(rows),
            "request_rate": "inf",
            "max_concurrency": flight,
            "duration": latencies(rows) / flight,
            "completed": len(rows),
            "total_input_tokens": sum(r[0] for r in rows),
            "total_output_tokens": sum(r[1] for r in rows),
            "mean_ttft_ms": 1e3 * float(np.mean([r[2] for r in rows])),
            "mean_tpot_ms": 1e3 * rows[0][3],
            "input_lens": [r[0] for r in rows],
            "output_lens": [r[1] for r in rows],
            "ttfts": [r[2] for r in rows],
            "itls": [[r[3]] * 10 for r in rows],
        }
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    check(import_calibration("vllm-bench", tmp_path), "vllm-bench")


def test_vllm_bench_without_details_is_a_proportion(tmp_path):
    result = {
        "model_id": "meta-llama/Llama-3.1-8B",
        "duration": 10.0,
        "completed": 10,
        "total_input_tokens": 10000,
        "total_output_tokens": 1010,
        "mean_ttft_ms": 50.0,
        "mean_tpot_ms": 9.5,
    }
    path = tmp_path / "result.json"
    path.write_text(json.dumps(result))
    record = import_calibration("vllm-bench", path)
    assert record.prefill.coefficients.linear == pytest.approx(5e-5)
    assert record.decode[0].per_token == pytest.approx(9.5e-3)
    assert record.decode[0].concurrency == pytest.approx(1.0)
    assert any("proportional" in note for note in record.source.notes)


def test_guidellm(tmp_path):
    benchmarks = []
    for kind, rows, flight in (
        ("synchronous", requests(40, 0.0, 0.01), 1.0),
        ("concurrent", requests(80, 0.1, 0.02), 8.0),
    ):
        span, total = latencies(rows) / flight, []
        for i, (n, out, ttft, gap) in enumerate(rows):
            latency = ttft + 10 * gap
            start = 0.0 if i == 0 else span - latency if i == 1 else 0.1
            total.append(
                {
                    "type_": "generative_request_stats",
                    "prompt_tokens": n,
                    "output_tokens": out,
                    "request_start_time": start,
                    "request_end_time": start + latency,
                    "request_latency": latency,
                    "time_to_first_token_ms": 1e3 * ttft,
                    "inter_token_latency_ms": 1e3 * gap,
                }
            )
        benchmarks.append(
            {
                "config": {
                    "strategy": {"type_": kind},
                    "backend": {"model": "meta-llama/Llama-3.1-8B"},
                },
                "requests": {"successful": total, "incomplete": [], "errored": []},
            }
        )
    path = tmp_path / "benchmarks.json"
    path.write_text(json.dumps({"benchmarks": benchmarks}))
    check(import_calibration("guidellm", path), "guidellm")


def test_aiperf_with_its_units(tmp_path):
    for name, rows, flight, unit, scale in (
        ("one", requests(40, 0.0, 0.01), 1.0, "ms", 1e3),
        ("eight", requests(80, 0.1, 0.02), 8.0, "us", 1e6),
    ):
        folder = tmp_path / name
        folder.mkdir()
        span, lines = latencies(rows) / flight, []
        for i, (n, out, ttft, gap) in enumerate(rows):
            latency = ttft + 10 * gap
            start = 0.0 if i == 0 else span - latency if i == 1 else 0.1
            lines.append(
                {
                    "metadata": {
                        "benchmark_phase": "profiling",
                        "request_start_ns": int(start * 1e9),
                        "request_end_ns": int((start + latency) * 1e9),
                    },
                    "metrics": {
                        "input_sequence_length": {"value": n, "unit": "tokens"},
                        "output_sequence_length": {"value": out, "unit": "tokens"},
                        "time_to_first_token": {"value": ttft * scale, "unit": unit},
                        "inter_token_latency": {"value": gap * scale, "unit": unit},
                        "request_latency": {"value": latency * scale, "unit": unit},
                    },
                    "error": None,
                }
            )
        lines.append({"metadata": {}, "metrics": {}, "error": {"code": 499}})
        (folder / "profile_export.jsonl").write_text("\n".join(map(json.dumps, lines)))
        (folder / "profile_export_aiperf.json").write_text(
            json.dumps({"input_config": {"endpoint": {"model_names": ["meta-llama/Llama-3.1-8B"]}}})
        )
    check(import_calibration("aiperf", tmp_path), "aiperf")


@pytest.mark.parametrize(
    ("tool", "text", "message"),
    [
        ("guidellm", "[]", "not a result of guidellm"),
        ("guidellm", "{", r"result\.json:1: "),
        ("vllm-bench", "{}", "not a result of vllm bench"),
        ("aiperf", '{"metrics": {}}\n{', r"result\.json:2: "),
        (
            "aiperf",
            '{"metrics": {"time_to_first_token": {"value": 1, "unit": "fortnights"}}}',
            r"result\.json:1: time_to_first_token: unit 'fortnights'",
        ),
        ("someone", "{}", "is not one of"),
    ],
)
def test_a_bad_result_is_named(tmp_path, tool, text, message):
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(CalibrationError, match=message):
        import_calibration(tool, path)
