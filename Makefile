# A fresh machine needs Python 3.11 to 3.13 with venv, and make.
#
#   make demo     train the digits example
#   make test     run the tests, once per backend
#   make check    what continuous integration expects: format, lint, types,
#                 tests, doctests
#   make bench    compare the speed with Keras's own fit
#   make format   put the code into the shape that `make check` wants
#   make clean    remove what builds and tools leave behind, except .venv
#
# KERAS_BACKEND=jax make test      tests one backend only
# make test PYTEST_ARGS="-k tail"  passes options to pytest

PYTHON ?= python3
BACKENDS ?= tensorflow jax
PYTEST_ARGS ?=

# A backend chosen in the environment is the only one that is tested.
ifneq ($(KERAS_BACKEND),)
BACKENDS := $(KERAS_BACKEND)
endif
export KERAS_BACKEND := $(firstword $(BACKENDS))
export TF_CPP_MIN_LOG_LEVEL ?= 2

BIN := .venv/bin
INSTALLED := .venv/.installed
TESTS := $(BACKENDS:%=test-%)

.PHONY: demo test $(TESTS) check lint types doctest bench format clean
.NOTPARALLEL:
.DEFAULT_GOAL := test

demo: $(INSTALLED)
	$(BIN)/python examples/digits.py

test: $(TESTS)

$(TESTS): test-%: $(INSTALLED)
	KERAS_BACKEND=$* $(BIN)/python -m pytest -n 2 $(PYTEST_ARGS)

check: lint types test doctest

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(INSTALLED)
	$(BIN)/mypy

doctest: $(INSTALLED)
	$(BIN)/python -m pytest --doctest-modules accumtrainer callbacks

bench: $(INSTALLED)
	$(BIN)/python benchmarks/bench.py

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build dist *.egg-info
	rm -rf .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find accumtrainer callbacks tests examples benchmarks \
		-name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# The stamp is older than what it depends on after either file changes, and
# the next target then installs again.
$(INSTALLED): pyproject.toml constraints.txt
	@echo "Installing into .venv; the first time takes some minutes."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--editable '.[dev]' --constraint constraints.txt
	@touch $@
