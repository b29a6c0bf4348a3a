# make demo and make test each make .venv, install what they need and run. Nothing here needs a GPU; with one, the demo also
# runs and times the operator, and the tests of tests/gpu run.
#
#   TORCH="torch --index-url <index of CPU wheels>" make demo     another build of torch (pip arguments)
#   make test PYTEST="-k layouts -x"                              arguments for pytest
#   make test WORKERS=8                                           processes that run tests; 0: this one alone
#   make test-slow SEED=12                                        random cases of another run again
#   make attack TIMES=50 PYTEST=tests/lowering                    fifty times as many tries as `make test`, of one floor

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST ?=
WORKERS ?= 2
TARGETS ?= sm_90a
TIMES ?= 20
COUNT ?= 150
JOBS ?= 2
SEED ?= $(shell od -An -N4 -tu4 /dev/urandom | tr -d ' ')

# One fixed torch where no GPU is used, so that runs are alike; with a GPU the newest that pip finds.
HAS_GPU := $(shell nvidia-smi -L 2>/dev/null | grep -q GPU && echo yes)
ifneq ($(and $(HAS_GPU),$(if $(CI),,local)),)
TORCH ?= torch
else
TORCH ?= torch==2.13.0
endif

.PHONY: help demo test test-slow test-gpu attack lint format bench gpu wheels mutants digests docs docs-check docs-site release-check clean

help:
	@echo "make demo         one quantized layer through the whole library"
	@echo "make test         install, lint and run the quick tests, the same cases every time"
	@echo "make test-slow    the slow tests, and the random cases of a new seed; SEED=12: of that one"
	@echo "make attack       damage of a new seed for every reader, twenty times as much as in make test; TIMES=50"
	@echo "make test-gpu     the tests of a GPU, with a record of what ran on which card (docs/gpu-tests.md)"
	@echo "make lint         ruff check and ruff format --check"
	@echo "make format       rewrite what the linter can rewrite"
	@echo "make bench        measure linear layers on this machine's GPU; BENCH='--formats w4a16 --shapes tuned' for some"
	@echo "make gpu          GPU tests and benchmarks on every GPU, in 29 minutes; ARGS='--budget 600'"
	@echo "make wheels       wheels of ready kernels, to dist/; TARGETS='sm_90a sm_89'"
	@echo "make mutants      put COUNT=150 faults into copies of the tree, SEED=1, JOBS=2 at once: which do no tests find?"
	@echo "make digests      rewrite the digests of all kernels, after a change that was meant and measured"
	@echo "make docs         rewrite the generated parts of README.md and docs/"
	@echo "make docs-check   fail if a generated part is out of date"
	@echo "make docs-site    the documentation site, to build/site"
	@echo "make release-check  build sdist and wheel, install the wheel in a new environment, and try it"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: | $(BIN)/python
	$(BIN)/python -m pip install --quiet --upgrade "pip>=23.2"
	$(BIN)/python -m pip install --quiet $(TORCH)
	@touch $@

$(VENV)/.demo: pyproject.toml $(VENV)/.torch
	$(BIN)/python -m pip install --quiet -e ".[compile,sass]"
	@touch $@

$(VENV)/.test: pyproject.toml $(VENV)/.torch
	$(BIN)/python -m pip install --quiet -e ".[test,bench,docs]"
	@touch $@ $(VENV)/.demo

demo: $(VENV)/.demo
	$(BIN)/python -m terrazzo demo

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: $(VENV)/.test
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow" $(PYTEST)

# Tests that draw random cases run here again, with a seed; `hypothesis` is the mark that Hypothesis gives its own.
test-slow: SEED := $(SEED)
test-slow: $(VENV)/.test
	@echo "Random cases of seed $(SEED): make test-slow SEED=$(SEED) runs them again."
	$(BIN)/python -m pytest -n $(WORKERS) -m "slow or random or hypothesis" --hypothesis-seed=$(SEED) $(PYTEST)

test-gpu: $(VENV)/.test
	$(BIN)/python -m pytest tests/gpu --record benchmarks/results/gpu_tests.json $(PYTEST)

bench: $(VENV)/.test
	$(BIN)/python -m benchmarks.linear $(BENCH)

gpu: $(VENV)/.test
	$(BIN)/python -m benchmarks.host $(ARGS)

# The tests of the fixture `tries`, outside of CI.
attack: SEED := $(SEED)
attack: $(VENV)/.test
	@echo "Tries of seed $(SEED): make attack SEED=$(SEED) TIMES=$(TIMES) runs them again."
	TERRAZZO_ATTACK=$(TIMES) $(BIN)/python -m pytest -n $(WORKERS) -m attack --timeout 3600 --hypothesis-seed=$(SEED) $(PYTEST)

# Kernels that are in the cache are not compiled again: a build that was interrupted goes on.
wheels: $(VENV)/.demo
	for arch in $(TARGETS); do $(BIN)/python -m terrazzo compile --target $$arch --wheel dist || exit 1; done

# Faults put into copies of the tree, which quick tests should find; tests/data/mutants.json is about those they did not.
mutants: $(VENV)/.test
	$(BIN)/python tests/tools/mutants.py --seed $(SEED) --count $(COUNT) --jobs $(JOBS)

digests: $(VENV)/.test
	$(BIN)/python tests/tools/kernel_digest.py --write

docs: $(VENV)/.test
	$(BIN)/python -m benchmarks.readme && $(BIN)/python -m benchmarks.choice && $(BIN)/python -m benchmarks.kv_choice
	$(BIN)/python -m benchmarks.plot

docs-check: $(VENV)/.test
	$(BIN)/python -m benchmarks.readme --check

$(VENV)/.docs: pyproject.toml $(VENV)/.torch
	$(BIN)/python -m pip install --quiet -e ".[docs]"
	@touch $@

docs-site: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "build/site/index.html"

release-check: $(VENV)/.test
	$(BIN)/python tests/tools/release_check.py --torch "$(TORCH)"

clean:
	rm -rf $(VENV) build dist *.egg-info
