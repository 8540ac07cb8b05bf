"""Figures: plots that every report shares; ``svg`` and ``save`` turn them into markup or files."""

from testbed.reporting.style import panels, save, styled, svg

__all__ = ["panels", "save", "styled", "svg"]
