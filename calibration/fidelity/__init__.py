"""Fidelity: every delay model and the step simulator against a running engine, cell by cell.

A cell is one workload at one load on one engine. Its predictions are files before its measurement
starts; model, simulator and engine are compared on the same arrivals, with the noise beside every
error.
"""
