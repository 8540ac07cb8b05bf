"""Traces and the profiles that come out of them."""

from __future__ import annotations

COMMANDS: dict = {}
