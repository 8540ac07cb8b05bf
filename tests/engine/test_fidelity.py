"""The fidelity bench on the emulated engine: predictions first, cells kept, one page."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def bench(out: Path, *more: str) -> dict:
    command = [
        sys.executable, "-c", "from testbed.cli import main; main()", "fidelity",
        "--engine", "emulated", "--workloads", "A", "--loads", "0.3,0.6", "--seconds", "3",
        "--out", str(out), "--json", *more,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_predictions_are_there_before_the_measurement_and_cells_are_kept(tmp_path):
    out = tmp_path / "bench"
    predicted = bench(out, "--predict-only")
    assert predicted["cells"] == [] and not predicted["complete"]
    models = json.loads((out / "A-0.6" / "models.json").read_text())
    assert models["models"]["step_chain"] is not None

    results = bench(out)
    assert results["complete"] and len(results["cells"]) == 2
    for cell in results["cells"]:
        stamps = [cell[k] for k in ("models_written_at", "predicted_at", "started_at")]
        stamps.append(cell["written_at"])
        assert stamps == sorted(stamps, key=datetime.fromisoformat)
        assert set(cell["errors"]) == {"simulator", *models["models"]}
        assert cell["speed"]["steps"] > 20
        assert cell["cached_as_asked"] == 1.0
    assert [c["when"] for c in results["checks"]["A"]] == ["before", "between", "after"]
    assert "cannot be told" in (out / "report.html").read_text()

    again = bench(out)
    assert [c["written_at"] for c in again["cells"]] == [c["written_at"] for c in results["cells"]]
