"""The paper's figures under other delay models: one engine, shares of capacity, pieces on disk."""

from dataclasses import replace

import numpy as np
import pytest

from testbed.errors import ScenarioError
from testbed.presets import preset
from testbed.reporting import paper_delay, paper_delay_answers, paper_mix
from testbed.reporting.paper_delay import conclusions
from testbed.reporting.paper_delay_answers import answers
from testbed.reporting.paper_delay_case import DelayCase, in_steps
from testbed.reporting.paper_delay_figures import delay_figures
from testbed.reporting.paper_delay_pieces import Pieces
from testbed.step_time import StepTime
from testbed.theory.delay.base import TierLoad
from testbed.theory.delay.step_chain import StepChain
from testbed.theory.delay.step_chain_mix import MixedStepChain, neighbours

SCENARIO = preset("paper-reproduction")


def test_one_request_alone_takes_the_same_time_under_every_model():
    case = DelayCase(SCENARIO, "erlang_c")
    system = case.system
    for q, occupancy in enumerate(system.occupancy):
        for s, seconds in enumerate(occupancy):
            hit = float(system.reusable[q, s])
            first = system.step_time.seconds([(float(system.tokens[q]) - hit, hit)])
            later = system.step_time.seconds((), 1, 0.0) * (system.output_tokens[q] - 1.0)
            assert first == pytest.approx(system.residual[q, s])
            assert first + later == pytest.approx(seconds)


def test_models_agree_where_nobody_waits():
    quiet = {
        name: case.coverage("load_aware", case.at(1e-4))
        for name in ("erlang_c", "token_server", "step_chain_mix")
        if (case := DelayCase(SCENARIO, name))
    }
    assert quiet["token_server"] == pytest.approx(quiet["erlang_c"], abs=1e-3)
    assert quiet["step_chain_mix"] == pytest.approx(quiet["erlang_c"], abs=1e-3)


def test_fixed_point_with_the_step_chain_conserves_arrivals():
    case = DelayCase(SCENARIO, "step_chain_mix")
    system = case.at(0.3)
    point = case.latency("load_aware", system).point
    assert point.converged and point.feasible
    np.testing.assert_allclose(point.association.sum(axis=1), 1.0, atol=1e-6)
    rates = np.array([load.arrival_rate for load in point.loads])
    assert rates @ system.density == pytest.approx(0.3, rel=1e-6)
    np.testing.assert_allclose(point.advertised, point.wait, rtol=1e-4, atol=1e-6)


def node(rate: float, weight: float) -> TierLoad:
    new, cached, outputs = np.array([128.0, 900.0]), np.array([512.0, 0.0]), np.full(2, 4.0)
    step = StepTime(c_pre=4e-3, a=4e-5, b=3e-8, d=6e-8, c_dec=3e-3, e=2e-4)
    prefill = np.array([step.prefill_seconds(n, h) for n, h in zip(new, cached, strict=True)])
    return TierLoad(
        arrival_rate=rate,
        weights=np.array([weight, 1.0 - weight]),
        residual_prefill=prefill,
        new_tokens=new,
        cached_tokens=cached,
        occupancy=prefill + 3.0 * 3.2e-3,
        output_tokens=outputs,
        concurrency=4,
        step_time=step,
        token_budget=2048,
    )


def test_mixed_law_is_the_chains_own_on_the_grid_and_near_it_between():
    model, exact = MixedStepChain(), StepChain()
    corner = node(1.0, 0.5)
    at = corner.scaled(0.6 / exact.utilisation(corner))
    times = np.linspace(0.0, 0.3, 40)
    for q in range(2):
        ours, own = model.excess(at).cdf(q, times), exact.excess(at).cdf(q, times)
        np.testing.assert_allclose(ours, own, atol=2e-3)
    between = node(1.0, 0.6)
    between = between.scaled(0.66 / exact.utilisation(between))
    law = model.excess(between)
    np.testing.assert_allclose(law.mean, model.mean(between))
    for q in range(2):
        ours, own = law.cdf(q, times), exact.excess(between).cdf(q, times)
        np.testing.assert_allclose(ours, own, atol=0.02)
        assert (np.diff(ours) >= -1e-9).all() and law.cdf(q, np.array(-1.0)) == 0.0
    # The mean that is told is that of the law.
    fine = np.linspace(0.0, 30.0 * float(law.mean.max()), 20_001)
    for q in range(2):
        tail = np.trapezoid(1.0 - law.cdf(q, fine), fine)
        assert tail == pytest.approx(law.mean[q], rel=0.01)


def test_neighbouring_loads_share_the_whole():
    for rho in (0.0, 0.05, 0.1, 0.49, 0.93, 0.95, 0.99):
        assert sum(w for _, w in neighbours(rho)) == pytest.approx(1.0)
        assert all(0.0 <= w <= 1.0 for _, w in neighbours(rho))


def test_greatest_intensity_is_where_stability_ends():
    case = DelayCase(SCENARIO, "token_server")
    most = case.greatest()
    assert most >= case.greatest_unaware("prefix_only", case.system)
    assert case.latency("load_aware", case.at(0.99 * most)).point.feasible
    assert not case.latency("load_aware", case.at(1.01 * most)).point.feasible


def test_conclusions_are_drawn_answered_and_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(paper_delay, "SHARES", paper_delay_answers.SHOWN)
    monkeypatch.setattr(paper_mix, "STEP", 0.25)
    monkeypatch.setattr(paper_delay, "FREE_STEP", 0.5)
    monkeypatch.setattr(paper_delay, "DEPTHS", 5)
    monkeypatch.setattr(paper_delay, "LONG_SHARES", (0.1, 0.4))
    monkeypatch.setattr(paper_delay, "DENSITIES", (0.5, 1.0, 2.0, 4.0))
    models = ("erlang_c", "token_server")
    kept = tmp_path / "pieces.json"
    found = conclusions(SCENARIO, models, Pieces(kept, SCENARIO))
    assert list(found["models"]) == list(models)
    for values in found["models"].values():
        for curve in values["policies"].values():
            assert all(0.0 <= y <= 1.0 for y in curve["coverage"])
        assert values["capacity"]["load_aware"] >= values["capacity"]["prefix_only"]
    rows = answers(found)
    assert all(set(row) == {"question", *models} for row in rows)
    assert set(delay_figures(found)) == {f"fig-{n}" for n in range(7, 13)}

    def refuse(*_):
        raise AssertionError("computed again")

    monkeypatch.setattr(paper_delay, "policy_curve", refuse)
    assert conclusions(SCENARIO, models, Pieces(kept, SCENARIO)) == found
    with pytest.raises(AssertionError, match="computed again"):
        conclusions(SCENARIO, models, Pieces(kept, preset("paper-baseline")))


def test_needs_one_decode_occupancy():
    other = SCENARIO.to_dict()["requests"]
    other[0]["decode_occupancy"] = 0.1
    changed = SCENARIO.replace(requests=other)
    with pytest.raises(ScenarioError, match="decode occupancies differ"):
        in_steps(replace(DelayCase(SCENARIO, "erlang_c").paper.system), changed)
