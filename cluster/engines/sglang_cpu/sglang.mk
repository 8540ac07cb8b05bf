# SGLang's own environment: its versions clash with those of the CPU build of vLLM.
# Included by the Makefile; the paths are relative to the repository.

# The same minor version as the other environment: Ray passes objects between the two.
SGLANG_BASE ?= $(PYTHON)
SGLANG_ENV := .venv-sglang
SGLANG_CPU := cluster/engines/sglang_cpu
SGLANG_LISTS := $(SGLANG_CPU)/requirements.txt $(SGLANG_CPU)/requirements-alone.txt

.PHONY: sglang
sglang: $(SGLANG_ENV)/.made  ## make the environment of SGLang (its own, on a CPU machine)

# Written last: an installation that was cut short is taken up again.
$(SGLANG_ENV)/.made: $(SGLANG_LISTS) $(SGLANG_CPU)/pyproject.toml
	test -x $(SGLANG_ENV)/bin/python || $(SGLANG_BASE) -m venv $(SGLANG_ENV)
	$(SGLANG_ENV)/bin/python -m pip install -q -r $(SGLANG_CPU)/requirements.txt
	$(SGLANG_ENV)/bin/python -m pip install -q --no-deps -r $(SGLANG_CPU)/requirements-alone.txt
	$(SGLANG_ENV)/bin/python -m pip install -q --no-deps -e $(SGLANG_CPU) -e .
	touch $@

# On a CUDA machine (EXTRA=sglang) SGLang shares the main environment.
ifeq ($(EXTRA),cpu)
ifneq ($(filter sglang,$(ENGINE) $(DEEP_ENGINE)),)
demo: $(SGLANG_ENV)/.made
endif
endif
