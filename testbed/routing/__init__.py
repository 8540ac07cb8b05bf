"""Routing: the association policies and node costs that theory, simulation and cluster share."""
