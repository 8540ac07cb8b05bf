"""The command line: one question a command, one module a group; heavy imports happen inside.

Exit codes: 0 done, 1 a run that failed, 2 bad input with one clear line on stderr.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from testbed.errors import TestbedError


def main(only: Sequence[str] | None = None, name: str = "testbed") -> None:
    """Run the command line; an error that a person can act on is one line and exit code 2.

    Parameters
    ----------
    only : the commands offered (those of a package's ``python -m``); all by default
    """
    from testbed.cli.app import build

    try:
        build(only, name)()
    except TestbedError as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        # The reader of our output left (`| head`): not an error of ours.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
