"""The paper's figures: claims judged rightly, a page that stands alone."""

import json
import re

import numpy as np
import pytest

from testbed.errors import ScenarioError
from testbed.presets import preset, preset_names
from testbed.reporting import (
    paper_association,
    paper_design,
    paper_figures,
    paper_mix,
    paper_routing,
    paper_waits,
)
from testbed.reporting.paper_claims import Claim, claim_table, signed
from testbed.reporting.paper_figures import compute_figures, draw_figures, write_figures_page
from testbed.reporting.paper_model import PaperModel

REPRODUCTION = PaperModel(preset("paper-reproduction"))
BASELINE = PaperModel(preset("paper-baseline"))


@pytest.fixture
def small(monkeypatch):
    """Grids and samples small enough for seconds; what is computed stays the same."""
    monkeypatch.setattr(paper_association, "SAMPLES", 5_000)
    monkeypatch.setattr(paper_association, "LUCK", 50)
    monkeypatch.setattr(paper_waits, "CUSTOMERS", 40_000)
    monkeypatch.setattr(paper_waits, "WARM_UP", 2_000)
    monkeypatch.setattr(paper_waits, "NEIGHBOURS", np.array([2.0, 3.25, 4.0]))
    monkeypatch.setattr(paper_routing, "DEPTHS", 8)
    monkeypatch.setattr(paper_routing, "INTENSITIES", np.array([1.0, 3.0, 4.0]))
    monkeypatch.setattr(paper_design, "LONG_SHARES", np.array([0.1, 0.3, 0.6]))
    monkeypatch.setattr(paper_mix, "MIX_LOADS", np.array([1.0, 3.0, 8.0, 16.0]))
    monkeypatch.setattr(paper_mix, "STEP", 0.25)
    monkeypatch.setattr(paper_design, "DENSITIES", np.array([0.5, 3.0]))


def test_every_figure_and_a_page_that_stands_alone(small, tmp_path):
    done = []
    drawn = compute_figures(REPRODUCTION.scenario, seed=1, progress=done.append)
    assert done == [item.number for item in drawn] == list(range(3, 13))
    claims = [claim for item in drawn for claim in item.claims]
    assert {c.figure for c in claims} == set(range(3, 13))
    # Laying out ten figures takes seconds; three show what the page does with each.
    shown = [drawn[i] for i in (0, 5, 7)]
    claims = [claim for item in shown for claim in item.claims]
    path = write_figures_page(tmp_path / "page.html", REPRODUCTION.scenario, shown, seed=1)
    page = path.read_text()
    assert page.count("<svg") == 3
    for reference in re.findall(r'(?:src|href)="([^"]*)"', page):
        assert reference.startswith(("#", "data:")), reference
    assert "<script" not in page and "http" not in page
    for claim in claims:
        assert claim.statement.split(":")[0].replace("'", "&#39;") in page


def test_writes_files_page_and_values(small, monkeypatch, tmp_path):
    one = paper_association.pairwise_boundary(REPRODUCTION)
    monkeypatch.setattr(paper_figures, "compute_figures", lambda *_, **__: [one])
    claims = draw_figures(tmp_path, seed=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "fig-3.png",
        "fig-3.svg",
        "figures.html",
        "figures.json",
    ]
    assert (tmp_path / "fig-3.png").read_bytes()[:4] == b"\x89PNG"
    assert json.loads((tmp_path / "figures.json").read_bytes()) == claims
    assert claims == [claim.to_dict() for claim in one.claims]


def test_same_seed_same_figures(small, tmp_path):
    first = paper_association.association(REPRODUCTION, 1)
    again = paper_association.association(REPRODUCTION, 1)
    other = paper_association.association(REPRODUCTION, 2)
    assert first.claims == again.claims and first.claims != other.claims


def test_values_of_the_text_against_the_reproduction_preset():
    """What the preset's header says of itself."""
    reported = [
        (0.69, {"intensity": 3.0}),
        (0.63, {"intensity": 4.0}),
        (0.55, {"policy": "prefix_only", "intensity": 3.0}),
        (0.23, {"policy": "prefix_only", "intensity": 4.0}),
        (0.52, {"policy": "nearest", "intensity": 4.0}),
        (0.48, {"density": 0.5}),
        (0.94, {"density": 3.0}),
        (0.52, {"policy": "nearest", "density": 3.0}),
    ]
    for value, asked in reported:
        assert REPRODUCTION.coverage(**asked) == pytest.approx(value, abs=0.01), asked


def test_reproduction_preset_is_one_nested_chain():
    scenario = REPRODUCTION.scenario
    assert "paper-reproduction" in preset_names()
    assert [scenario.concurrency(s) for s in scenario.profiles] == [33, 27, 9]
    deepest = scenario.profiles[2].reusable
    for profile in scenario.profiles:
        held = profile.persistent_bytes / scenario.memory.per_token
        assert profile.reusable == {q: min(h, held) for q, h in deepest.items()}


def test_association_within_four_standard_errors_of_the_papers_sample_size():
    drawn = paper_association.association(REPRODUCTION, 7)
    assert float(drawn.claims[0].ours) < 4.5e-3


def test_optimal_depth_is_interior_and_moves_shallower_under_load():
    depths = np.linspace(0.0, paper_routing.deepest(REPRODUCTION), 24)
    systems = [paper_routing.uniform_depth(REPRODUCTION, d) for d in depths]
    slots = [0 if s is None else int(s.concurrency[0]) for s in systems]
    assert (np.diff(slots) <= 0).all() and slots[0] == 33

    def best(load):
        values = [
            0.0 if s is None else REPRODUCTION.coverage(system=s, intensity=load) for s in systems
        ]
        return int(np.argmax(values))

    light, heavy = best(2.0), best(12.0)
    assert 0 < heavy < light < len(depths) - 1


def test_search_over_mixes_is_the_best_of_each_load(monkeypatch):
    monkeypatch.setattr(paper_mix, "MIX_LOADS", np.array([2.0, 6.0]))
    mixes = BASELINE.mixes(0.25, 0.25, 0.5)
    assert (mixes[:, 0] >= 0.25).all() and (mixes[:, 2] <= 0.5).all()
    np.testing.assert_allclose(mixes.sum(axis=1), 1.0)
    found = paper_mix.search_mixes(BASELINE, mixes)
    for i, load in enumerate((2.0, 6.0)):
        alone = [BASELINE.coverage(intensity=load, fraction=pi) for pi in mixes]
        np.testing.assert_allclose(found.coverage[i], alone, atol=1e-6)
        assert found.best[i].tolist() == mixes[int(np.argmax(alone))].tolist()


def test_a_changed_probability_keeps_the_others_in_proportion():
    p = BASELINE.with_probability(BASELINE.long, 0.5)
    assert p.sum() == pytest.approx(1.0) and p[BASELINE.long] == 0.5
    assert p[0] / p[1] == pytest.approx(0.4 / 0.4)


def test_a_value_counts_as_reproduced_up_to_one_unit_of_its_last_digit():
    assert Claim.value(8, "x", 0.69, 0.70).reproduced
    assert Claim.value(8, "x", 0.69, 0.68).reproduced
    assert not Claim.value(8, "x", 0.94, 0.951).reproduced
    claim = Claim.value(8, "x", 0.94, 0.951)
    assert claim.distance == pytest.approx(0.011)
    assert Claim(3, "x", "curved", "curved", True).distance is None
    assert [signed(v) for v in (0.011, -0.0304, 0.0, 2e-4)] == [
        "+0.011",
        "−0.030",
        "0.000",
        "0.000",
    ]


def test_table_shows_every_claim_with_its_verdict():
    claims = (Claim.value(8, "a", 0.5, 0.5), Claim(9, "b", "falls", "rises", False, "why"))
    table = claim_table(claims, "all")
    assert [row[0].text for row in table.rows] == ["Fig.\u00a08", "Fig.\u00a09"]
    assert [row[5].text for row in table.rows] == ["reproduced", "not reproduced"]
    assert len(claim_table(claims, "own", numbered=False).head) == len(table.head) - 1


def test_needs_three_profiles():
    scenario = preset("paper-baseline")
    two = scenario.to_dict()["profiles"][:2]
    for profile in two:
        profile["fraction"] = 0.5
    with pytest.raises(ScenarioError, match="three profiles"):
        PaperModel(scenario.replace(profiles=two))
