"""Calibration, planning, figures, validation, doctor."""

from __future__ import annotations

COMMANDS: dict = {}
