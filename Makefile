# Needs Python >= 3.11 (with venv and pip) and make; every target does its own set-up.
#   PYTHON      the interpreter that .venv is made from
#   ARGS        more arguments for pytest or the benchmarks, e.g. make test ARGS="-k golden"
#   TORCH       the version of torch for test-torch, e.g. make test-torch TORCH=2.14.1, or nightly

PYTHON ?= python3
ARGS ?=
TORCH ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
FRAMEWORKS := .integrations
NIGHTLIES := https://download.pytorch.org/whl/nightly/cpu
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadgroup

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test test-all test-full test-integrations test-torch lint format core docs package bench bench-full validate check-torch clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | \
	  while IFS='|' read -r target text; do printf '%-23s %s\n' "$$target" "$$text"; done

setup: $(STAMP) ## Create .venv with the pinned development environment and the package

$(STAMP): pyproject.toml requirements-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Weft needs Python >= 3.11, found: $$($(PYTHON) --version 2>&1). Try: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

demo: $(STAMP) ## Run weft demo: an 8b training step on 64 ranks, before and after; writes report.html and trace.json
	@$(BIN)/weft demo

test: $(STAMP) ## Run the quick tests: every pass, every layer, real ranks, the browser (five minutes on two cores)
	$(PYTEST) tests -m "not long and not slow" $(ARGS)

test-all: $(STAMP) ## Run all tests: the quick ones, the slow ones, then every way of training on real ranks
	$(PYTEST) tests -m "not long" $(ARGS)
	$(PYTEST) tests -m long $(ARGS)

test-full: $(STAMP) ## Run the long fuzzing tests
	WEFT_FUZZ=full $(PYTEST) --timeout 3600 tests/property tests/distributed tests/unit/advice $(ARGS)

test-integrations: $(FRAMEWORKS)/.stamp ## Train with torchtitan, Hugging Face and Lightning, which it installs (1.4 GB; five minutes)
	PYTHONPATH=$(CURDIR)/$(FRAMEWORKS) $(PYTEST) tests/integration -m needs_package $(ARGS)

# Without dependencies, and beside .venv: torch stays as requirements-dev.txt pins it.
$(FRAMEWORKS)/.stamp: $(STAMP) requirements-integrations.txt
	rm -rf $(FRAMEWORKS)
	$(BIN)/python -m pip install --quiet --no-deps --target $(FRAMEWORKS) -r requirements-integrations.txt
	@touch $@

# To 2.12, torch needs an older setuptools than the pinned one.
test-torch: VENV := .venv-torch-$(TORCH)
test-torch: NAMED := $(if $(filter nightly,$(TORCH)),torch,torch==$(TORCH))
test-torch: INDEX := $(if $(filter nightly,$(TORCH)),--upgrade --pre --extra-index-url $(NIGHTLIES))
test-torch: ## Run the quick tests with another torch in a venv of its own: make test-torch TORCH=2.14.1
	@test -n "$(TORCH)" || { echo "Name a version, or nightly: make test-torch TORCH=2.14.1"; exit 1; }
	@$(VENV)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	sed -e "s/^torch==.*/$(NAMED)/" -e "/^setuptools==/d" requirements-dev.txt > $(VENV)/requirements.txt
	$(VENV)/bin/python -m pip install --quiet $(INDEX) -r $(VENV)/requirements.txt
	@$(VENV)/bin/python -c "import torch; print('torch', torch.__version__)"
	$(VENV)/bin/python -m pip install --quiet --no-deps --no-build-isolation -e .
	$(VENV)/bin/python -m pytest -n 2 --dist loadgroup tests -m "not long and not slow" $(ARGS)

lint: $(STAMP) ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(STAMP) ## Format the code and mend what ruff can mend
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

core: $(STAMP) ## Compile the planner's inner loops; optional, needs a C compiler (a minute)
	$(BIN)/python -m pip install --quiet mypy==2.4.1 setuptools
	$(BIN)/python tools/build_core.py

docs: $(STAMP) ## Build the site into site/; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

package: $(STAMP) ## Build the wheel and the sdist into dist/, install the wheel elsewhere and use it
	$(BIN)/python -m hatchling build -d dist
	$(BIN)/python -m pytest tests/integration/test_package.py $(ARGS)

bench: $(STAMP) ## Weft side by side with Inductor's own passes: tables, JSON and pictures (a quarter of an hour on two cores)
	$(BIN)/python benchmarks/bench.py $(ARGS)

bench-full: $(STAMP) ## The same with 64 and 128 layers, and medians (hours)
	$(BIN)/python benchmarks/bench.py --full $(ARGS)

validate: $(STAMP) ## Predict every published training figure and print its error (tens of minutes on two cores the first time)
	$(BIN)/python benchmarks/validate.py $(ARGS)

check-torch: $(STAMP) ## Check the private torch names that Weft uses against the installed torch
	$(BIN)/python tools/check_torch.py

clean: ## Remove caches and build outputs; .venv stays
	rm -rf dist build site .hypothesis .benchmarks .pytest_cache .ruff_cache
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
