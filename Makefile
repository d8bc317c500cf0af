# Everything works from a fresh clone with Python 3.11 or newer: targets make what they need.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup check test quick bench demo format clean

setup: $(READY)

# torch's pinned release is a small CPU build where one lies at hand; anywhere else, or where that
# release is not to be had, any torch that satisfies pyproject.toml will do.
$(READY): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import torch' 2>/dev/null \
		|| $(BIN)/python -m pip install --quiet torch==2.13.0 \
		|| $(BIN)/python -m pip install --quiet 'torch>=2.6'
	@$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

check: setup
	$(BIN)/ruff format --check mergegit tests examples benchmarks
	$(BIN)/ruff check mergegit tests examples benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

test: setup
	$(BIN)/python -m pytest -q -n auto --dist worksteal

quick: setup
	$(BIN)/python -m pytest -q -n auto --dist worksteal -m 'not slow'

bench: setup
	$(BIN)/python -m benchmarks

demo: setup
	PYTHON=$(abspath $(BIN)/python) bash examples/demo.sh demo

format: setup
	$(BIN)/ruff format mergegit tests examples benchmarks
	$(BIN)/ruff check --fix mergegit tests examples benchmarks

clean:
	rm -rf $(VENV) demo build dist *.egg-info
