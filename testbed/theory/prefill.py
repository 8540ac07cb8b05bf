"""Prefill time (Theory A8, H1): the law that workload, theory and cluster share."""

from testbed.prefill import marginal_saving, prefill_saving, prefill_time, residual_prefill

__all__ = ["marginal_saving", "prefill_saving", "prefill_time", "residual_prefill"]
