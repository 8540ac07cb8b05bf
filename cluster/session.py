"""Session: the Ray cluster a run lives in, its own unless RAY_ADDRESS names another."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from testbed.errors import ClusterError

AUTH_VARIABLE = "RAY_AUTH_MODE"


@contextmanager
def ray_session(cpus: int | None = None) -> Iterator[str]:
    """Connect to the cluster RAY_ADDRESS names, or start a private one and stop it at the end.

    A cluster that already runs on the machine is left alone unless RAY_ADDRESS names it (inside a
    submitted Ray job it does). Token authentication is on unless RAY_AUTH_MODE says otherwise.
    Yields a line that says which cluster it is.

    Raises
    ------
    ClusterError
        The named cluster does not answer, or no cluster can be started.
    """
    address = os.environ.get("RAY_ADDRESS")
    if "ray" not in sys.modules:
        # Ray reads the mode once, at its import: changed later, it would reach the cluster's
        # servers and not this process. Left unset, ``ray.init`` turns tokens on by itself.
        os.environ.setdefault(AUTH_VARIABLE, "token")
    # Zero-GPU actors keep their devices hidden, as Ray announces for its next versions.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray runs its workers at niceness 15 unless told: an engine would yield to whatever else runs.
    os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        import ray
    except ImportError:
        raise ClusterError(
            "Ray is not installed; install the extra that fits this machine: "
            "pip install '.[cpu]', '.[vllm]' or '.[sglang]'"
        ) from None
    if ray.is_initialized():
        yield "the caller's Ray connection"
        return
    try:
        if address:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        else:
            _start_private(cpus)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError, OSError) as error:
        where = f"RAY_ADDRESS={address}" if address else "a private Ray cluster"
        reason = next((x for x in str(error).splitlines() if x.strip()), repr(error))
        raise ClusterError(f"{where}: {reason}") from None
    try:
        yield f"the Ray cluster at {address}" if address else "a private Ray cluster"
    finally:
        with suppress(RuntimeError):
            ray.shutdown()


def _start_private(cpus: int | None, attempts: int = 3) -> None:
    """Start a cluster of our own; on a busy machine its server may miss Ray's own time limit."""
    import ray

    for attempt in range(1, attempts + 1):
        try:
            ray.init(
                address="local",
                num_cpus=cpus,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
            return
        except RuntimeError as error:
            if attempt == attempts or "Failed to start" not in str(error):
                raise
            with suppress(RuntimeError):
                ray.shutdown()
