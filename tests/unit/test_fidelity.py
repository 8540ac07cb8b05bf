"""The fidelity bench without an engine: requests, errors, noise, causes, files."""

from __future__ import annotations

import numpy as np
import pytest

from calibration.fidelity.analysis import (
    CAUSE_NOT_FOUND,
    GOAL,
    SIMULATOR,
    Trial,
    analyse,
    resampled_noise,
)
from calibration.fidelity.measurement import run_speed, simulate_same
from calibration.fidelity.network import TwoTierNetwork
from calibration.fidelity.plan import Folder, make_plan
from calibration.fidelity.prediction import FIGURES, counted, figures_of
from calibration.fidelity.report import error_table, read_benches
from calibration.fidelity.two_tiers import TwoTiers
from calibration.fidelity.verdict import markdown, misses, noisy, summary, unanswered
from calibration.fidelity.workload import study_workloads
from cluster.engines.step_log import STEP_COLUMNS
from testbed.errors import CalibrationError
from testbed.outcome import RequestRecord
from testbed.radio import nearest_distances, radio_model
from testbed.seeds import generator
from testbed.simulation.engine_model import EngineConfig
from testbed.step_time import StepTime
from testbed.workload.stream import typed_stream

STEP = StepTime(c_pre=4e-3, a=4e-5, b=3e-8, d=6e-8, c_dec=2.7e-3, e=1e-4, f=2.5e-7)
CONFIG = EngineConfig(max_sequences=8, block_size=32, num_blocks=1024)


@pytest.mark.parametrize("name", "ABC")
def test_an_exact_draw_has_the_mix_of_its_workload(name):
    work = study_workloads()[name]
    drawn = work.draw(2.0, 101, 3, exact=True)
    counts = np.bincount(drawn.kind, minlength=len(work.weights))
    assert counts.sum() == 101
    assert (np.abs(counts - 101 * work.weights) <= 1).all()
    assert (np.diff(drawn.arrival) > 0).all()
    again = work.draw(2.0, 101, 3, exact=True)
    assert (again.arrival == drawn.arrival).all() and (again.outputs == drawn.outputs).all()


def test_slower_steps_are_the_same_run_in_slower_time():
    work = study_workloads()["B"]
    drawn = work.draw(1.5, 60, 1, exact=True)
    slow = StepTime(**{k: 1.25 * getattr(STEP, k) for k in ("c_pre", "a", "b", "d")},
                    c_dec=1.25 * STEP.c_dec, e=1.25 * STEP.e, f=1.25 * STEP.f)  # fmt: skip
    paced = simulate_same(work, drawn, STEP, CONFIG, 0.0, pace=1.25)
    assert paced == pytest.approx(simulate_same(work, drawn, slow, CONFIG, 0.0), rel=1e-9)


def test_overhead_and_late_sends_move_every_request():
    work = study_workloads()["A"]
    drawn = work.draw(1.0, 30, 1)
    plain = simulate_same(work, drawn, STEP, CONFIG, 0.0)
    assert simulate_same(work, drawn, STEP, CONFIG, 0.5) == pytest.approx(plain + 0.5)
    late = simulate_same(work, drawn, STEP, CONFIG, 0.0, arrival=drawn.arrival + 0.25)
    assert late == pytest.approx(plain + 0.25)


def prediction(long, models, sequential=None):
    return {
        "models": models,
        "left_out": {m: "no stable point at this rate" for m, f in models.items() if f is None},
        "simulator": {"figures": list(long), "standard_errors": [0.0] * 4},
        "simulator_without_lookahead": sequential,
    }


def sample(count=400):
    return 0.05 + np.random.default_rng(1).gamma(2.0, 0.05, count)


def test_an_engine_that_equals_its_simulation_leaves_the_models_own_error():
    ttft = sample()
    long = figures_of(ttft) * 1.3  # the long run need not look like this sample
    models = {"right": list(long), "low": list(0.8 * long), "none": None}
    found = analyse(prediction(long, models), ttft, ttft, [], overhead=0.0, seed=1)
    for name in FIGURES:
        assert found["errors"][SIMULATOR][name]["verdict"] == "within"
        assert found["errors"]["right"][name]["error"] == pytest.approx(0.0, abs=1e-12)
        low = found["errors"]["low"][name]
        assert low["error"] == pytest.approx(-0.2)
        assert (low["verdict"], low["cause"]) == ("misses", "model form")
        assert found["errors"]["none"][name]["error"] is None
    assert found["noise"] == pytest.approx([0.0] * 4, abs=1e-12)


def test_a_slow_engine_is_named_as_the_cause_where_its_speed_explains_it():
    ttft = sample()
    slow = 1.2 * ttft
    long = figures_of(ttft)
    said = {"right": list(long)}
    blind = analyse(prediction(long, said), slow, ttft, [], overhead=0.0, seed=1)
    error = blind["errors"][SIMULATOR]["mean"]
    assert error["error"] == pytest.approx(1 / 1.2 - 1)
    assert error["cause"] == CAUSE_NOT_FOUND
    trial = Trial("steps took +20.0 %", slow)
    told = analyse(prediction(long, said), slow, ttft, [trial], overhead=0.0, seed=1)
    assert told["errors"][SIMULATOR]["mean"]["cause"] == "steps took +20.0 %"
    assert told["errors"]["right"]["mean"]["cause"] == "engine: steps took +20.0 %"


def test_scheduling_ahead_is_named_where_the_model_meets_the_engine_without_it():
    ttft = sample()
    long = figures_of(ttft)
    plain = {"figures": list(0.8 * long)}
    found = analyse(
        prediction(long, {"m": list(0.8 * long)}, plain), ttft, ttft, [], overhead=0.0, seed=1
    )
    assert found["errors"]["m"]["p90"]["cause"] == "model form: what scheduling ahead adds"
    both = prediction(long, {"m": list(0.8 * long)}, {"figures": list(0.9 * long)})
    both["simulator_with_steady_waits"] = plain
    found = analyse(both, ttft, ttft, [], overhead=0.0, seed=1)
    assert found["errors"]["m"]["p90"]["cause"].startswith("model form: routing by steady waits")


def test_what_the_noise_hides_is_not_told():
    ttft = sample(100)
    other = np.random.default_rng(2).permutation(ttft)  # the same law, nothing paired
    long = figures_of(ttft)
    found = analyse(prediction(long, {"m": list(long)}), ttft, other, [], overhead=0.0, seed=1)
    error = found["errors"]["m"]["p99"]
    assert error["noise"] > GOAL
    assert error["verdict"] == "cannot be told"


def test_pairing_takes_away_what_both_share():
    ttft = sample(1000)
    paired, alone = resampled_noise(ttft * 1.05, ttft, 1)
    assert paired == pytest.approx([0.0] * 4, abs=1e-12)
    assert (alone > 0).all()


def steps_at(factor: float, count: int = 60) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    table = {name: np.zeros(count) for name in STEP_COLUMNS}
    table["prefills"][::3] = 1
    table["new_tokens"][::3] = rng.integers(50, 500, len(table["prefills"][::3]))
    table["new_squared"] = table["new_tokens"] ** 2
    table["decodes"][:] = rng.integers(1, 9, count)
    table["decode_context"] = 400.0 * table["decodes"]
    rows = zip(*(table[c] for c in ("new_tokens", "decodes", "decode_context")), strict=True)
    taken = [STEP.seconds([(n, 0)] if n else (), int(d), c) for n, d, c in rows]
    end = factor * np.cumsum(taken)
    table["started"], table["finished"] = np.concatenate([[0.0], end[:-1]]), end
    return table


def test_a_runs_speed_is_that_of_its_steps():
    assert run_speed(steps_at(1.0), STEP)["speed"] == pytest.approx(1.0)
    slow = run_speed(steps_at(1.25), STEP)
    assert slow["speed"] == pytest.approx(0.8)
    assert slow["by_third"] == pytest.approx([0.8] * 3)
    assert run_speed(None, STEP) is None


def test_the_first_requests_do_not_count():
    assert counted(1000) == slice(50, 1000)


def test_a_folder_refuses_another_bench(tmp_path):
    Folder(tmp_path / "a", {"seed": 1}).write({"x": 2.0}, "cell", "models.json")
    again = Folder(tmp_path / "a", {"seed": 1})
    assert again.read("cell", "models.json")["x"] == 2.0
    assert again.read("cell", "analysis.json") is None
    with pytest.raises(CalibrationError, match="another seed"):
        Folder(tmp_path / "a", {"seed": 2})
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine.txt").write_text("x")
    with pytest.raises(CalibrationError, match="is not empty"):
        Folder(tmp_path / "b", {"seed": 1})


def test_until_something_is_measured_a_folder_takes_other_seconds(tmp_path):
    header = {"seconds": 20.0, "seed": 1, "engine": {"name": "emulated", "time_scale": 1.0}}
    other = {**header, "seconds": 40.0, "engine": {"name": "emulated", "time_scale": 0.5}}
    Folder(tmp_path, header).write({"x": 1.0}, "A-0.6", "models.json")
    with pytest.raises(CalibrationError, match="another engine"):
        Folder(tmp_path, {**other, "engine": {"name": "vllm"}})
    measured = Folder(tmp_path, other)
    assert Folder.existing(tmp_path).header == other
    measured.write({"x": 1.0}, "A-0.6", "prediction.json")
    with pytest.raises(CalibrationError, match="another"):
        Folder(tmp_path, header)
    with pytest.raises(CalibrationError, match="holds no bench"):
        Folder.existing(tmp_path / "A-0.6")


def test_a_plan_names_what_is_wrong():
    with pytest.raises(CalibrationError, match="--workloads: 'D'"):
        make_plan(engine="emulated", workloads=("D",))
    with pytest.raises(CalibrationError, match=r"--loads: 1\.2"):
        make_plan(engine="emulated", loads=(1.2,))
    with pytest.raises(CalibrationError, match="--trace"):
        make_plan(engine="emulated", workloads=("deep",))


def test_every_prediction_has_its_row(tmp_path):
    ttft = sample()
    long = figures_of(ttft)
    said = prediction(long, {"m": list(long), "low": list(0.5 * long), "n": None})
    found = analyse(said, ttft, ttft, [], overhead=0.0, seed=1)
    cells = [{"workload": "A", "load": 0.6, **found}]
    assert len(error_table(cells).rows) == 4
    assert sum(summary(cells)["m"].values()) == len(FIGURES)
    assert summary(cells)["n"]["no answer"] == len(FIGURES)
    assert unanswered(cells) == {"n": {"no stable point at this rate": ["A 0.6"]}}
    assert misses(cells) == {
        "low": {"model form": ["A 0.6: " + ", ".join(f"{f} -50 %" for f in FIGURES)]}
    }
    text = markdown(cells)
    assert "| A 0.6 | 380 | 0.0/0.0/0.0/0.0 |" in text and "**-50**" in text
    assert "- `low` misses, model form: A 0.6" in text and "Nothing is claimed" not in text

    folder = Folder(tmp_path, {"engine": {"name": "emulated"}, "workloads": {"A": "a"},
                               "loads": [0.6, 0.9]})  # fmt: skip
    with pytest.raises(CalibrationError, match="no cell has been measured"):
        read_benches([tmp_path])
    folder.write({"rate": 1.0, **said}, "A-0.6", "prediction.json")
    folder.write(found, "A-0.6", "analysis.json")
    ((engine, read),) = read_benches([tmp_path, tmp_path])
    assert engine == "the emulated engine"
    assert [c["errors"] for c in read] == 2 * [found["errors"]]


def test_nothing_is_claimed_where_the_noise_alone_is_beyond_the_goal():
    ttft = sample(100)
    other = np.random.default_rng(2).permutation(ttft)
    long = figures_of(ttft)
    found = analyse(prediction(long, {"m": list(long)}), ttft, other, [], overhead=0.0, seed=1)
    cells = [{"workload": "A", "load": 0.9, **found}]
    beyond = dict(zip(FIGURES, found["noise"], strict=True))
    assert (
        {f: n for _, f, n, _ in noisy(cells)} == {f: n for f, n in beyond.items() if n > GOAL} != {}
    )
    assert all(found["errors"]["m"][f]["verdict"] != "within" for _, f, *_ in noisy(cells))
    assert "Nothing is claimed of" in markdown(cells)


def two_tiers() -> TwoTiers:
    plan = make_plan(engine="emulated", workloads=("policies",))
    assert plan.cells[0] == ("nearest", 0.3) and len(plan.cells) == 12
    assert plan.step_time is not None
    return TwoTiers(plan.spec, plan.step_time)


def test_the_prefill_law_of_two_tiers_is_the_step_time_at_its_prompts():
    tiers = two_tiers()
    assert tiers.prefill_error < 1e-6
    assert tiers.scenario.prefill.linear > 0


def test_the_engine_model_at_the_nodes_of_the_network_is_the_network():
    tiers, count, seed = two_tiers(), 300, 5
    asked = tiers.scenario.replace(policy="nearest").with_field("demand.intensity", 3.0)
    stream = typed_stream(asked, count, tiers.rate(asked), seed)
    far = nearest_distances(np.array([0.5, 0.5]), count, generator(seed, "distances"))
    radio = radio_model(asked.radio, 1.0).sample(far, generator(seed, "radio"))
    node = radio.argmin(axis=1)
    records = [
        RequestRecord(
            index=i, type="any", ending="completed", profile=("fallback", "deep")[s],
            radio=radio[i, s], intended=stream.arrival[i], dispatched=stream.arrival[i],
            input_tokens=stream.input_tokens[i], output_tokens=stream.output_tokens[i],
            reusable_tokens=stream.reusable[i, s],
        )
        for i, s in enumerate(node)
    ]  # fmt: skip
    network = TwoTierNetwork(tiers)
    routed = network.as_routed(records, late=False)
    assert routed == pytest.approx(network.simulate(asked, count, seed), rel=1e-9)
