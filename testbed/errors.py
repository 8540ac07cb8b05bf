"""Errors a person can act on: one line that names the file, line or field."""

from __future__ import annotations


class TestbedError(Exception):
    """Base of every error that the commands turn into one line and exit code 2."""

    __test__ = False  # the name starts with "Test"; pytest must not collect it


class ScenarioError(TestbedError, ValueError):
    """A scenario that cannot be used; the message starts with the field's path."""


class OutOfRangeError(ScenarioError):
    """A load beyond what a fitted model was fitted on."""


class TraceError(TestbedError, ValueError):
    """A trace that cannot be read; the message starts with ``file:line``."""


class CalibrationError(TestbedError, ValueError):
    """A calibration record that is missing, malformed or does not fit the engine."""


class EngineError(TestbedError, RuntimeError):
    """An engine that cannot start or cannot serve what was asked of it."""


class ClusterError(TestbedError, RuntimeError):
    """A Ray cluster, port or device that is not there or not ours."""


class OutcomeError(TestbedError, ValueError):
    """An outcome file that cannot be read or compared."""
