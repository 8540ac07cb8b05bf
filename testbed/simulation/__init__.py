"""Simulation: queues, engines and networks in virtual time."""

from testbed.simulation.simulate import simulate

__all__ = ["simulate"]
