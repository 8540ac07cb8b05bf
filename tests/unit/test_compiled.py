"""Compiled code is kept apart for every state of the sources."""

from __future__ import annotations

import subprocess
import sys

from testbed.compiled import source_hash

SHOW = (
    "import testbed, os, numba; print(os.environ['NUMBA_CACHE_DIR']); print(numba.config.CACHE_DIR)"
)


def ask(**environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", SHOW], capture_output=True, text=True, check=True, env=environment
    )
    return done.stdout.split()


def test_the_folder_carries_the_hash_of_the_sources(tmp_path):
    given, used = ask(HOME=str(tmp_path))
    assert given == used
    assert given.endswith(f"numba-{source_hash()}")


def test_a_folder_that_the_user_names_is_left_alone(tmp_path):
    given, used = ask(HOME=str(tmp_path), NUMBA_CACHE_DIR=str(tmp_path))
    assert given == used == str(tmp_path)


def test_a_home_that_cannot_be_written_to_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    done = subprocess.run(
        [sys.executable, "-c", "import testbed; print(testbed.__version__)"],
        capture_output=True,
        text=True,
        check=True,
        env={"HOME": str(tmp_path / "file")},
    )
    assert done.stdout.strip() == "0.1.0"
