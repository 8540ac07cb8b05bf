"""The analytical model: stochastic geometry, queues and their fixed point (Theory A-H)."""

from testbed.theory.predict import predict

__all__ = ["predict"]
