"""``python -m cluster run SCENARIO``: a run as a Ray job or by hand."""

from __future__ import annotations

from testbed.cli import main

if __name__ == "__main__":
    main(["run", "doctor"], name="python -m cluster")
