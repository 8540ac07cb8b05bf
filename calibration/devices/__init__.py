"""Calibration records of measured GPUs that come with the package (``engine.device``)."""
