"""Extensions: each replaces one part of the baseline model and leaves the others as they are.

=====================  =====  ======================================================================
Module                 Label  Replaces
=====================  =====  ======================================================================
``radio_law``          H4     the power law: any radio model whose mean delay grows with distance
``bandwidth``          H5     a radio delay without load: ξ_s(n) inside the fixed point
``remote_fetch``       H6     local state only: local, fetch or recompute, whichever is least
``memory_nodes``       H7     one point process: compute nodes and memory nodes apart
``cell_load``          H8     the mean load of a tier: every node's own cell area
``periods``            H9     one stationary period: many, with a migration budget
``mobility``           H10    users that stand still: handover, warm state and its migration
``privacy``            H11    a fully known forest: a minimum support before a prefix is advertised
``shared_blocks``      H12    a constant m_run: what a request allocates beside its shared prefix
=====================  =====  ======================================================================

Prefill with context (H1), service laws (H2) and delay maps (H3) are parts of the baseline:
``theory.prefill`` and ``theory.delay``.
"""
