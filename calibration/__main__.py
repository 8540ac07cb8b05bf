"""``python -m calibration``: measure an engine by hand or as a submitted Ray job.

Nothing heavy is imported here: engines start processes that import this module once more.
"""

from __future__ import annotations

from calibration.command import main

if __name__ == "__main__":
    main()
