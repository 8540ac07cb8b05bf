"""Reference testbed for LLM serving at the wireless edge.

One :class:`~testbed.scenario.Scenario` is asked three ways, ``predict`` (analytical model),
``simulate`` (discrete events, virtual time) and ``run`` (real engines on Ray), and each answers
with the same :class:`~testbed.outcome.Outcome`.
"""

from testbed.compiled import key_cache

__version__ = "0.1.0"

key_cache()
