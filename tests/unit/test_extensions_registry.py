"""Extensions by name: outcomes like any other, and what they leave as it was."""

import numpy as np
import pytest

from testbed.errors import ScenarioError
from testbed.outcome import flatten
from testbed.presets import preset
from testbed.theory import parse_sweep, predict, sweep
from testbed.theory.extensions.registry import EXTENSIONS
from testbed.theory.extensions.shared_blocks import own_concurrency
from testbed.theory.memory_coupling import footprint_blocks
from testbed.theory.predict import locate
from tests.unit.scenarios import small

BASELINE = preset("paper-baseline")


def asked(intensity, policy="load_aware"):
    return BASELINE.replace(policy=policy).with_field("demand.intensity", intensity)


@pytest.mark.parametrize("name", sorted(EXTENSIONS))
@pytest.mark.parametrize(
    ("policy", "intensity"),
    [("nearest", 1e-6), ("nearest", 1e4), ("load_aware", 4.0), ("load_aware", 1e4)],
)
def test_no_figure_is_ever_nan(name, policy, intensity):
    outcome = predict(asked(intensity, policy), extension=name)
    assert outcome.extra["extension"] == name
    for path, value in flatten(outcome.model_dump()):
        assert not (isinstance(value, float) and np.isnan(value)), path
    for row in outcome.association.values():
        assert sum(row.values()) == pytest.approx(1.0, abs=1e-9)
    if intensity == 1e4:
        assert not outcome.feasible and outcome.reason and outcome.ttft.mean == np.inf


@pytest.mark.parametrize(
    ("name", "policy"), [("bandwidth", "load_aware"), ("cell_load", "nearest")]
)
def test_what_the_baseline_leaves_out_costs_coverage_and_vanishes_with_the_load(name, policy):
    for intensity, close in ((1e-3, True), (14.0 if policy == "nearest" else 4.0, False)):
        question = asked(intensity, policy)
        plain, extended = (predict(question, extension=e) for e in (None, name))
        gap = plain.ttft.coverage["0.8"] - extended.ttft.coverage["0.8"]
        assert (abs(gap) < 2e-4) if close else (gap > 1e-3)


def test_each_point_of_a_sweep_is_asked_with_the_extension():
    field, values = parse_sweep("demand.intensity=2:4:2")
    swept = sweep(asked(3.0, "nearest"), field, values, extension="cell_load")
    alone = [predict(asked(v, "nearest"), extension="cell_load") for v in values]
    for a, b in zip(swept, alone, strict=True):
        assert a.ttft.coverage == pytest.approx(b.ttft.coverage, abs=1e-9)


def test_shared_blocks_and_operating_point_agree():
    scenario = small(engine={"name": "emulated", "max_sequences": 256, "block_size": 32})
    latency = locate(scenario, extension="shared_blocks")
    again = own_concurrency(scenario, latency.system, latency.point.association)
    assert latency.system.concurrency.tolist() == again.tolist()
    # Nothing is shared at the fallback: its requests take what their own tokens take.
    mix = scenario.requests
    p = latency.system.probability * latency.point.association[:, 0]
    weights = p * latency.system.occupancy[:, 0]
    blocks = [footprint_blocks(q, 0.0, 32) for q in mix]
    mean = float(weights @ blocks) / weights.sum() * 32 * scenario.memory.per_token
    assert again[0] == int(scenario.memory.capacity // mean)
    capped = small(engine={"name": "emulated", "max_sequences": 3})
    assert (locate(capped, extension="shared_blocks").system.concurrency == 3).all()


def test_an_unknown_extension_is_refused():
    with pytest.raises(ScenarioError, match=r"'warp' is not one of bandwidth, cell_load"):
        predict(BASELINE, extension="warp")
