"""Delay models: the law of a node's excess delay under its load (Theory B, H2, H3)."""

from testbed.theory.delay import (
    birth_death,
    delay_map,
    erlang_c,
    learned_map,
    mgc,
    phase_type,
    step_chain,
    step_chain_mix,
    token_server,
)
from testbed.theory.delay.base import (
    DELAY_MODELS,
    DelayModel,
    ExcessDelay,
    TierLoad,
    get_delay_model,
    independent_models,
    register,
)

__all__ = [
    "DELAY_MODELS",
    "DelayModel",
    "ExcessDelay",
    "TierLoad",
    "birth_death",
    "delay_map",
    "erlang_c",
    "get_delay_model",
    "independent_models",
    "learned_map",
    "mgc",
    "phase_type",
    "register",
    "step_chain",
    "step_chain_mix",
    "token_server",
]
