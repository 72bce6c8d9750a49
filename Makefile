# Everything happens in .venv; nothing else on the machine is touched.
# make venv PYTHON=python3.13 EXTRAS=test,dev   another Python, or without torch and JupyterLab

SHELL := /bin/bash
.DEFAULT_GOAL := help

# The first Python of the supported range that really runs here.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null && echo $$p && break; done)
EXTRAS ?= torch,demo,frameworks,test,dev

VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
STAMP := $(VENV)/.installed
KERNELSPEC := $(wildcard monarch_kernel/kernel/kernelspec/*)
# The panel of JupyterLab and the code of the widget: TypeScript, built where there is a node.
LAB := labextension
LAB_NODE := $(LAB)/node_modules/.installed
LAB_STAMP := $(VENV)/.lab
LAB_SOURCES := $(wildcard $(LAB)/*.* $(LAB)/README.md) $(shell find $(LAB)/src $(LAB)/style $(LAB)/schema -type f 2>/dev/null)
NODE := $(shell node -e 'process.exit(process.versions.node.split(".")[0] < 20 ? 1 : 0)' 2>/dev/null && command -v npm)
OUT := build
# Jupyter refuses to serve root unless told; in a container there is often no other user.
LAB_ARGS ?= $(if $(filter 0,$(shell id -u)),--allow-root)

# Jupyter must find this checkout's kernel, whatever is installed elsewhere for the user.
export JUPYTER_PREFER_ENV_PATH := 1

.PHONY: help venv test test-engines quick check format demo lab bench lock clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

venv: $(STAMP) $(LAB_STAMP) ## .venv with the project (editable) and all that its tests and notebooks need

$(STAMP): pyproject.toml $(wildcard constraints/*.txt) $(KERNELSPEC)
	@test -n "$(PYTHON)" || { echo "No Python 3.11, 3.12 or 3.13 was found. Install one, or name it: make venv PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@set -e; c=constraints/py$$($(PY) -c 'import sys; print("%d.%d" % sys.version_info[:2])').txt; \
	test -f $$c || { echo "$(VENV) has an unsupported Python; remove $(VENV) and run make again with Python 3.11, 3.12 or 3.13."; exit 1; }; \
	echo "Installing monarch_kernel[$(EXTRAS)] into $(VENV) (a few minutes the first time) ..."; \
	export PIP_DISABLE_PIP_VERSION_CHECK=1; \
	$(PY) -m pip install --quiet -c $$c hatchling editables; \
	$(PY) -m pip install --quiet -c $$c --no-build-isolation -e '.[$(EXTRAS)]'
	@touch $@

ifneq ($(NODE),)
$(LAB_NODE): $(LAB)/package-lock.json $(LAB)/.npmrc
	@echo "Installing what the panel of JupyterLab is built with (300 MB, half a minute the first time) ..."
	@npm --prefix $(LAB) ci --ignore-scripts --loglevel=error
	@touch $@

$(LAB_STAMP): $(STAMP) $(LAB_NODE) $(LAB_SOURCES)
	@npm --prefix $(LAB) run --silent build
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(PY) -m pip install --quiet --no-build-isolation --no-deps --force-reinstall ./$(LAB)
	@touch $@
else
.PHONY: $(LAB_STAMP)
$(LAB_STAMP): $(STAMP)
	@test -e $@ || echo "The panel of JupyterLab and the widget are not built: that needs node 20 or later, with npm. All else works."
endif

test: venv ## the tests, notebooks included; says first what is skipped on this machine
	@test ! -e $(LAB_NODE) || npm --prefix $(LAB) run --silent test
	$(PY) -m tests.run $(TEST_ARGS)

test-engines: venv ## tests against Ray, Slurm, Kubernetes, frameworks, a browser, RDMA in a virtual machine
	$(PY) -m tests.run --engines $(TEST_ARGS)

quick: venv ## what tells most, in under three minutes
	$(PY) -m tests.run --quick $(TEST_ARGS)

check: venv ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	@test ! -e $(LAB_NODE) || npm --prefix $(LAB) run --silent lint

format: venv ## put the code in its format, and mend what ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	@test ! -e $(LAB_NODE) || npm --prefix $(LAB) run --silent format

demo: venv ## run the quickstart notebook on the real kernel, and say where the result lies
	@$(PY) notebooks/run.py notebooks/01_quickstart.ipynb --out $(OUT)/demo

lab: venv ## JupyterLab with the quickstart notebook
	$(BIN)/jupyter lab $(LAB_ARGS) notebooks/01_quickstart.ipynb

bench: venv ## measure against torchmonarch (BENCH_ARGS="--quick", see docs/performance.md)
	$(PY) -m bench $(BENCH_ARGS)

lock: venv ## write constraints/ anew for the Python of .venv, from what the index offers today
	$(PY) constraints/lock.py

clean: ## remove all that make made
	rm -rf $(VENV) .bench $(OUT) dist .pytest_cache .ruff_cache .hypothesis
	rm -rf $(LAB)/node_modules $(LAB)/lib $(LAB)/prebuilt monarch_kernel/widgets/static
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
