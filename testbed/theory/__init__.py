"""The analytical model: stochastic geometry, queues and their fixed point (Theory A-H)."""

from testbed.theory.predict import predict
from testbed.theory.sweep import parse_sweep, sweep

__all__ = ["parse_sweep", "predict", "sweep"]
