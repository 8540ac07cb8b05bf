"""Workloads: traces, prefix forests, cache profiles, arrivals and token realisation."""
