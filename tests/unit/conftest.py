"""Which unit tests `make test-fast` leaves out.

A first run after any change of the sources compiles every kernel that it meets. The network
simulator, the engine model and the step chain take longer to compile than all other tests take to
run; the modules that run one of them carry the mark `slow`.
"""

from __future__ import annotations

import pytest

COMPILES_MUCH = {
    "test_calibration_crowds",
    "test_calibration_waiting",
    "test_delay_step_chain",
    "test_engine_model",
    "test_fidelity",
    "test_importers",
    "test_learned_map",
    "test_memory_coupling",
    "test_paper_delay",
    "test_simulation_engines",
    "test_simulation_network",
    "test_simulation_simulate",
    "test_tier_engine",
    "test_validate",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem in COMPILES_MUCH:
            item.add_marker(pytest.mark.slow)
