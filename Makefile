# Two commands are enough on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TESTED := $(VENV)/.tested
DOCS := $(VENV)/.docs
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# The releases of transformers beside the pinned one: make test-hf, or make test-hf TRANSFORMERS=5.21.1
TRANSFORMERS ?= 5.19.0 5.20.2 5.21.1 5.22.2

# The oldest torch that pyproject.toml allows: make test-torch, or make test-torch TORCH=2.11.0. The newest is a wheel built
# with CUDA, which needs its libraries, gigabytes of them: make test-torch TORCH=2.15.0 ALONE=
TORCH ?= 2.10.0
ALONE ?= --no-deps
TORCH_TESTS := residuals/test_residuals_compile residuals/test_contract models/test_decoder ops/test_ops ops/test_kernels train/test_loop train/test_run train/test_checkpoint train/test_stages train/test_parallel train/test_parallel_checkpoints

KILLS ?= 100

# Of `make test-mutants`.
N ?= 200
SEED ?= 0

# Three forks on two cores: some tests wait, for a process of theirs or a browser (tests/together.py). pytest's plugin for
# logging costs a test a millisecond, where a thousand loggers are known, and nobody asks for caplog.
TOGETHER := --processes 3 -p no:logging --durations 15 -m 'not faults and not alone and not compiled'

.PHONY: demo docs test test-crash test-engines test-faults test-gpu test-hf test-kernels test-mutants test-torch lint format clean

demo: $(INSTALLED)
	$(BIN)/headwater demo

# The site, in build/site: open build/site/index.html. A broken link, or a page that nothing leads to, is an error.
docs: $(DOCS)
	PYTHONPATH=$(CURDIR) NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "Open build/site/index.html"

# Bytecode is kept, whatever the shell says, and that of installed packages beside them, where it may be already: else each
# of a hundred processes compiles what it imports. Types are checked beside the tests: where nothing is known from before,
# that takes a core half a minute.
test: export PYTHONDONTWRITEBYTECODE =
test: export PYTHONPYCACHEPREFIX =
test: export OMP_NUM_THREADS = 1
test: $(TESTED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p build
	$(BIN)/mypy >build/mypy.txt & types=$$!; $(BIN)/python -m pytest $(TOGETHER); tests=$$?; \
	wait $$types; types=$$?; cat build/mypy.txt; exit $$((tests + types))
	$(BIN)/python -m pytest -m alone --noconftest $$(grep -rl 'mark\.alone' tests --include='test_*.py')  # they take the time

# Every GPU test, in several processes, on a machine that need not have .venv: make test-gpu PYTHON=python3.12
test-gpu:
	$(or $(wildcard $(BIN)/python),$(PYTHON)) tests/run_gpu.py

# Every kernel compiled for an H200, which takes a core two minutes and needs no GPU. CI runs it after `make test`.
test-kernels: $(TESTED)
	$(BIN)/python -m pytest -m compiled tests/ops/test_compiling.py

# All faults of several ranks; the rank that hangs, which needs the clock, only here: a busy machine must not fail the rest.
test-faults: $(TESTED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/train/test_parallel_faults.py

# N small faults, drawn by SEED and put into a copy of the tree one at a time: how many do the tests notice?
test-mutants: export PYTHONDONTWRITEBYTECODE =
test-mutants: $(TESTED)
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutate.py -n $(N) --seed $(SEED)

# Runs killed with kill -9 in each of four ways: one process and two, saving at once and in the background.
test-crash: $(TESTED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/train/test_crash.py -k kill_nine --kills $(KILLS) -rP

# $(call on_releases,package,versions,arguments of pytest). A folder shadows what is installed, in the processes that tests
# start too.
define on_releases
	set -e; for version in $(2); do \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check $(ALONE) --upgrade \
	    --target build/$(1)-$$version $(1)==$$version; \
	  export PYTHONPATH=$(CURDIR)/build/$(1)-$$version OMP_NUM_THREADS=1; \
	  $(BIN)/python -c "import $(1); print('$(1)', $(1).__version__)"; \
	  $(BIN)/python -m pytest $(3); \
	done
endef

test-hf: $(TESTED)
	$(call on_releases,transformers,$(TRANSFORMERS),tests/hf)

# Tracing, autocast, saving and sharding are what changes between releases.
test-torch: $(TESTED)
	$(call on_releases,torch,$(TORCH),--processes 2 $(TORCH_TESTS:%=tests/%.py))

# Inside other engines: torchtitan, Megatron-Core, vLLM and others, in an environment of their own. Some ask for torch with CUDA,
# so these come without their dependencies. INDEX names an index of torch for a CPU, where the usual one has torch with CUDA.
ENGINES := build/engines
INDEX ?=
PIP_OF_ENGINES := $(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check

test-engines: export OMP_NUM_THREADS = 1
test-engines: $(ENGINES)/.installed
	PYTHONPATH=$(CURDIR) $(ENGINES)/bin/python -m pytest -p no:logging -rs tests/engines

$(ENGINES)/.installed: tests/engines/requirements.txt tests/engines/alone.txt
	$(PYTHON) -m venv $(ENGINES)
	$(PIP_OF_ENGINES) $(INDEX:%=--index-url %) torch==2.13.0
	$(PIP_OF_ENGINES) torch==2.13.0 -r tests/engines/requirements.txt
	$(PIP_OF_ENGINES) --no-deps -r tests/engines/alone.txt
	touch $@

lint: $(TESTED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(TESTED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	began=$$(date +%s); \
	$(PIP) setuptools wheel torch && \
	$(PIP) --no-compile --no-build-isolation --editable . && \
	touch $@ && echo "Installed in $$(($$(date +%s) - began)) s."

# The demo needs the package alone; the tests and the site need more.
$(TESTED): $(INSTALLED)
	$(PIP) --no-compile --no-build-isolation --editable '.[dev]'
	touch $(TESTED)

$(DOCS): $(INSTALLED)
	$(PIP) --no-compile --no-build-isolation --editable '.[docs]'
	touch $(DOCS)

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache
