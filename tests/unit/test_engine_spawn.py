"""An engine's process does not run the script that asked for the engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ENV = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
SCRIPT = """
import multiprocessing, sys
from contextlib import nullcontext
from cluster.engines.spawn import script_hidden

print("script runs as", __name__, flush=True)

if __name__ == "__main__":
    here = __file__
    with script_hidden() if sys.argv[1] == "hidden" else nullcontext():
        process = multiprocessing.get_context("spawn").Process(target=print, args=("child",))
        process.start()
    process.join()
    assert process.exitcode == 0 and __file__ == here
"""


def test_a_hidden_script_runs_once_and_is_back_afterwards(tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    for mode, runs in (("hidden", ["__main__"]), ("seen", ["__main__", "__mp_main__"])):
        done = subprocess.run(
            [sys.executable, str(script), mode], capture_output=True, text=True, check=True, env=ENV
        )
        lines = done.stdout.splitlines()
        assert [x.split()[-1] for x in lines if x.startswith("script")] == runs
        assert lines[-1] == "child"
