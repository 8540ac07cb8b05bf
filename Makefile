# Two commands: `make demo` and `make test`. Both make their environment and skip what stands.
PYTHON ?= python3
EXTRA ?= cpu
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(EXTRA)
DEMO_OUT ?= out/demo

# Passed on to `testbed demo` when given.
DEMO_FLAGS := $(if $(TRACE),--trace "$(TRACE)") $(if $(MODEL),--model "$(MODEL)") \
	$(if $(ENGINE),--engine "$(ENGINE)") $(if $(DEEP_ENGINE),--deep-engine "$(DEEP_ENGINE)") \
	$(if $(DEVICE),--device "$(DEVICE)") \
	$(if $(TOKEN_SCALE),--token-scale "$(TOKEN_SCALE)") $(if $(filter vllm,$(EXTRA)),--gpus-per-replica 1)

.PHONY: demo test test-fast lint install clean help
.DEFAULT_GOAL := help

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

install: $(STAMP)  ## make the environment (EXTRA=cpu|vllm|sglang)

# CPU-only torch with a CUDA torchvision fails at import and takes transformers down with it;
# text serving needs none of the three. Where they work, on a CUDA machine, they stay.
$(STAMP): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "make: no $(PYTHON); Python 3.11 or newer is needed"; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "make: $(PYTHON) is older than 3.11"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRA),dev]'
	@if $(BIN)/python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torchvision") is None)' \
		&& ! $(BIN)/python -c 'import torchvision' >/dev/null 2>&1; then \
		echo "torchvision does not work with this torch: removing it (text serving needs none)"; \
		$(BIN)/python -m pip uninstall --quiet -y torchvision torchaudio torchcodec; fi
	touch $@

demo: $(STAMP)  ## calibrate, predict, run and compare on this machine (TRACE=, MODEL=, ENGINE=, DEEP_ENGINE=, DEVICE=)
	$(BIN)/testbed demo --out $(DEMO_OUT) $(DEMO_FLAGS)

include cluster/engines/sglang_cpu/sglang.mk

lint: $(STAMP)  ## format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint  ## lint, types, unit tests and tests on real engines
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/unit
	$(BIN)/python -m pytest tests/engine

test-fast: lint  ## without engines and without what compiles longest, under a minute
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow" tests/unit

clean:  ## remove environments, caches and outputs
	rm -rf $(VENV) .venv-sglang out .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
