# A fresh machine needs Python 3.11 to 3.13 with venv, and make.
#
#   make demo     train the digits example
#   make test     run every test on one of the backends, with one in three of
#                 its cases, and what takes long at some commits only
#                 (ONE_IN=1 for all); then what holds with Keras Core too, and
#                 the tests that come with Keras for its own training and
#                 callbacks, through a Trainer, divided as well; last the
#                 examples in docstrings. On TensorFlow, JAX and, where it is
#                 installed in .venv, PyTorch; for all three
#                 make test BACKENDS="tensorflow jax torch"
#   make test-accelerator  those of PyTorch on a device that is no CPU, which
#                 tests/support/accelerator.py makes; part of `make test` where
#                 PyTorch is
#   make test-keras_own-jax  those of Keras alone; what may fail, and why, is in
#                 tests/keras_own_tests/may_fail.py
#   make test-everything  the same, with every case of every test on every
#                 backend: before a release
#   make test-python3.12  the same with that Python, and the newest versions of
#                 everything, in .venv-3.12, without PyTorch; make test-pythons
#                 with each Python from 3.11 to 3.13 that is on the PATH or among
#                 pyenv's
#   make check    what continuous integration expects: format, lint, types,
#                 the site, tests
#   make docs     build the site, build/site/index.html
#   make release  build wheel and source distribution, and check both
#   make bench    compare the speed with Keras's own fit, and more
#   make bench-quick  three cells, against what was recorded
#   make bench-peers  compare with Lightning and Accelerate too
#   make bench-gpu  what there is to measure on a GPU, in less than ten minutes,
#                 with the Python that has JAX or PyTorch for it (GPU_PYTHON);
#                 benchmarks/RESULTS-GPU.md says how to bring it what it needs
#   make soak     kill training two hundred times on each backend, and compare
#                 where it ends (KILLS=20 for fewer)
#   make fuzz     train random models, and compare each with plain Keras
#                 (CASES=2000 SEED=0 PROCESSES=1; what fails prints a
#                 program)
#   make format   put the code into the shape that `make check` wants
#   make clean    remove what builds and tools leave behind, except .venv
#
# KERAS_BACKEND=jax make test      tests one backend only; where there is no
#                                  .venv yet, it gets that backend alone
# make test PYTEST_ARGS="-k tail"  passes options to pytest
# make bench BENCH_ARGS="--cells mlp"  and to the benchmark

PYTHON ?= python3
PYTHONS ?= 3.11 3.12 3.13
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
# PyTorch where it is installed; BACKENDS="tensorflow jax torch" installs it.
BACKENDS ?= tensorflow jax $(patsubst %/torch/,torch,$(firstword \
	$(wildcard $(VENV)/lib/python*/site-packages/torch/)))
PYTEST_ARGS ?=
BENCH_ARGS ?=
GPU_PYTHON ?= python3
KILLS ?= 200
CASES ?= 2000
PROCESSES ?= 1
SEED ?= 0
# One in how many cases of a test runs at a commit.
ONE_IN ?= 3

# A backend chosen in the environment is the only one that is tested.
ifneq ($(KERAS_BACKEND),)
BACKENDS := $(KERAS_BACKEND)
endif
export KERAS_BACKEND := $(firstword $(BACKENDS))
export TF_CPP_MIN_LOG_LEVEL ?= 2
# The tests start some hundred processes. Where Python is told to keep nothing
# of what it has compiled, each compiles its backend anew, for 15 seconds.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
INSTALLED := $(BACKENDS:%=$(VENV)/.installed-%)
TESTS := $(BACKENDS:%=test-%)
# Keras Core runs on the first two.
KERAS_CORE_TESTS := $(patsubst %,test-keras_core-%,$(filter-out torch,$(BACKENDS)))
KERAS_OWN_TESTS := $(BACKENDS:%=test-keras_own-%)
ACCELERATOR_TESTS := $(patsubst torch,test-accelerator,$(filter torch,$(BACKENDS)))

.PHONY: demo test $(TESTS) $(KERAS_CORE_TESTS) $(KERAS_OWN_TESTS) \
	test-accelerator test-everything test-pythons check lint types docs release doctest \
	bench bench-quick bench-peers bench-gpu soak fuzz format clean
.NOTPARALLEL:
.DEFAULT_GOAL := test

demo: $(INSTALLED)
	$(BIN)/python examples/digits.py

test: $(TESTS) $(ACCELERATOR_TESTS) $(KERAS_CORE_TESTS) $(KERAS_OWN_TESTS) \
	doctest

# A backend that could not be installed is left out, and that is said.
if_installed = $(BIN)/python -c 'import importlib.util as u, sys; \
	sys.exit(not u.find_spec("$1"))' || { \
		echo "$1 is not installed: its tests are left out."; exit 0; };

# One backend at a time, none has any to leave to others.
test-everything:
	for backend in $(BACKENDS); do \
		$(MAKE) test BACKENDS=$$backend ONE_IN=1 || exit 1; \
	done

# The tests of a file on one worker make what they share once. In the order of
# their names, the files that take longest are not the last.
BY_FILE := --dist loadfile --no-loadscope-reorder

# A test runs on one of the backends with some of its cases, on another and with
# others at every commit (tests/support/divided.py).
DIVIDED := TESTED_BACKENDS="$(BACKENDS)" TESTED_ONE_IN="$(ONE_IN)" \
	TESTED_COMMIT="$(shell git rev-parse HEAD 2>/dev/null)"

$(TESTS): test-%: $(INSTALLED)
	$(call if_installed,$*) \
		KERAS_BACKEND=$* $(DIVIDED) \
		$(BIN)/python -m pytest -n 2 $(BY_FILE) $(PYTEST_ARGS)

# What stays on the CPU, or is read by NumPy from where it cannot, fails there. A
# third of the cases that run on each backend takes minutes.
ON_ACCELERATOR := $(addprefix tests/,diagnosis inside_fit observers saving \
	training window)

test-accelerator: $(INSTALLED)
	$(call if_installed,torch) export PYTHONPATH=tests/support; \
		$(BIN)/python -m accelerator || exit 0; \
		KERAS_BACKEND=torch $(DIVIDED) TESTED_BACKENDS="tensorflow jax torch" \
		$(BIN)/python -m pytest -p accelerator -n 2 $(BY_FILE) -rs \
		$(PYTEST_ARGS) $(ON_ACCELERATOR)

# tests/support/keras_core_contract.py says which of their tests Keras Core is
# held to; this prints which of those it cannot pass, and why. It has no PyTorch.
ON_KERAS_CORE := $(wildcard $(patsubst %,tests/*/test_%.py, \
	keras_core exactness exactness_losses exactness_outputs \
	exactness_optimizers exactness_fit schedules loss_scaling bad_windows \
	hooks hook_state hook_logs hook_order stock_callbacks))

$(KERAS_CORE_TESTS): test-keras_core-%: $(INSTALLED)
	ACCUMTRAINER_KERAS=keras_core KERAS_BACKEND=$* $(DIVIDED) \
		TESTED_BACKENDS="$(filter-out torch,$(BACKENDS))" \
		$(BIN)/python -m pytest \
		-n 2 $(BY_FILE) -rs $(PYTEST_ARGS) $(ON_KERAS_CORE)

# From where Keras is installed; once with a batch as one micro-batch, once with
# batches that are cut, of which most leave a smaller micro-batch over.
$(KERAS_OWN_TESTS): test-keras_own-%: $(INSTALLED)
	$(call if_installed,$*) for size in "" "--micro-batch-size 3"; do \
		PYTHONPATH=tests/keras_own_tests:tests/support KERAS_BACKEND=$* \
			$(DIVIDED) $(BIN)/python -m pytest -n 2 --noconftest \
			-p through_trainer -rs --disable-warnings $$size --pyargs \
			keras.src.trainers.trainer_test keras.src.callbacks \
			keras.src.optimizers.multi_optimizer_test || exit 1; \
	done

# The same in another environment. The backend that is exported above is not
# the only one there.
find_python = $(firstword $(foreach path, \
	python$1 $(wildcard $(HOME)/.pyenv/versions/$1.*/bin/python), \
	$(shell $(path) -c 'import sys; print(sys.executable)' 2>/dev/null)))

test-python%:
	@test -n "$(call find_python,$*)" || \
		(echo "There is no Python $* on the PATH or among pyenv's."; exit 1)
	env -u KERAS_BACKEND $(MAKE) test CONSTRAINTS= \
		BACKENDS="$(filter-out torch,$(BACKENDS))" \
		VENV=.venv-$* PYTHON=$(call find_python,$*)

test-pythons:
	for version in $(foreach v,$(PYTHONS),$(if $(call find_python,$v),$v)); do \
		$(MAKE) test-python$$version BACKENDS="$(BACKENDS)" || exit 1; \
	done

check: lint types docs test

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(INSTALLED)
	$(BIN)/mypy

# Material for MkDocs would announce its successor at every build.
docs: .venv-docs/.installed
	NO_MKDOCS_2_WARNING=1 PYTHONDONTWRITEBYTECODE=1 \
		.venv-docs/bin/python -m mkdocs build --quiet --strict
	@echo "The site is build/site/index.html."

release:
	PYTHON=$(PYTHON) .ci/release

doctest: $(INSTALLED)
	$(BIN)/python -m pytest --doctest-modules \
		--doctest-ignore-import-errors accumtrainer callbacks

bench: $(INSTALLED)
	for backend in $(BACKENDS); do \
		KERAS_BACKEND=$$backend $(BIN)/python benchmarks/bench.py \
			--k1 --measure times peaks second-runs $(BENCH_ARGS) || exit 1; \
	done

bench-quick: $(INSTALLED)
	for backend in $(BACKENDS); do \
		KERAS_BACKEND=$$backend $(BIN)/python benchmarks/bench.py \
			--quick $(BENCH_ARGS) || exit 1; \
	done

bench-peers: .venv-peers/.installed
	$(MAKE) bench BENCH_ARGS="--peers .venv-peers/bin/python $(BENCH_ARGS)"

# Installs nothing. Each of its processes chooses its own backend.
bench-gpu:
	PYTHONPATH=benchmarks$(if $(PYTHONPATH),:$(PYTHONPATH)) \
		$(GPU_PYTHON) -m gpu $(BENCH_ARGS)

soak: $(INSTALLED)
	for backend in $(BACKENDS); do \
		KERAS_BACKEND=$$backend $(BIN)/python tests/saving/soak.py \
			--kills $(KILLS) || exit 1; \
	done

fuzz: $(INSTALLED)
	for backend in $(BACKENDS); do \
		PYTHONPATH=tests/support KERAS_BACKEND=$$backend \
			$(BIN)/python -m fuzz --cases $(CASES) --seed $(SEED) \
			--processes $(PROCESSES) \
			|| exit 1; \
	done

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build dist *.egg-info
	rm -rf .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find accumtrainer callbacks tests examples benchmarks \
		-name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# The stamps are older than what they depend on after either file changes, and
# the next target then installs again, all backends at once.
EMPTY :=
HUB := $(if $(filter tensorflow,$(BACKENDS)),keras-hub)
OTHERS := $(filter-out torch,$(BACKENDS))
EXTRAS := $(subst $(EMPTY) ,$(EMPTY),dev $(OTHERS:%=,%) $(HUB:%=,%))
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check
INSTALL = $(PIP) $(CONSTRAINTS:%=--constraint %) --editable
# Takes half a minute where pip takes three, but reads none of pip's settings,
# which may say where a PyTorch without CUDA is.
UV = $(BIN)/uv pip install --quiet --python $(BIN)/python \
	$(CONSTRAINTS:%=--constraint %) --editable
$(INSTALLED) &: pyproject.toml $(CONSTRAINTS)
	@echo "Installing for $(BACKENDS) into $(VENV); this may take minutes."
	$(PYTHON) -m venv $(VENV)
	{ $(PIP) uv && $(UV) '.[$(EXTRAS)]'; } || $(INSTALL) '.[$(EXTRAS)]'
	$(if $(filter torch,$(BACKENDS)),$(INSTALL) '.[torch]' || \
		$(if $(OTHERS),echo "PyTorch cannot be installed here.",false))
	@touch $(INSTALLED)

.venv-peers/.installed: benchmarks/requirements-peers.txt
	@echo "Installing PyTorch and others into .venv-peers."
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet \
		--disable-pip-version-check --requirement $<
	@touch $@

.venv-docs/.installed: docs/requirements.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet \
		--disable-pip-version-check --requirement $<
	@touch $@

# The one of all the backends in use.
$(VENV)/.installed: $(INSTALLED)
	@touch $@
