# Everything happens in .venv; nothing else on the machine is touched. A target adds to it what it needs, when it is
# first called. Another Python, or less: make venv PYTHON=python3.13 EXTRAS=test,dev

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# The first Python of the supported range that really runs here.
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c '$(SUPPORTED)' 2>/dev/null && echo $$p && break; done)

VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
# The panel of JupyterLab and the code of the widget: TypeScript; what is built of it is in git.
LAB := labextension
LAB_NODE := $(LAB)/node_modules/.installed
OUT := build
# Jupyter refuses to serve root unless told; in a container there is often no other user.
LAB_ARGS ?= $(if $(filter 0,$(shell id -u)),--allow-root)

# Of the extras in pyproject.toml, what each target needs.
EXTRAS ?= bench,demo,dev,docs,engines,environments,lab,test
NEEDS_demo := demo
NEEDS_lab := demo,lab
NEEDS_test := demo,lab,test
NEEDS_test-engines := demo,docs,engines,lab,test
NEEDS_check := bench,dev,docs,environments
NEEDS_bench := bench
NEEDS_docs := docs
NEEDS_notebooks := demo
NEEDS_release := test
NEEDS_lock :=
NEEDS_venv = $(EXTRAS)
# Those that also use the packages of labextension/, where there is a node.
USE_NODE := test test-engines check venv

# Jupyter must find this checkout's kernel, whatever is installed elsewhere for the user.
export JUPYTER_PREFER_ENV_PATH := 1

.PHONY: help venv test test-engines quick check format demo lab docs notebooks bench lock bundles release clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

$(PY):
	@test -n "$(PYTHON)" || { echo "No Python 3.11, 3.12 or 3.13 was found. Install one, or name it: make venv PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c '$(SUPPORTED)' || { echo "$(PYTHON) is not Python 3.11, 3.12 or 3.13: name one of these by PYTHON="; exit 1; }
	@$(PYTHON) -m venv $(VENV)

# What a target needs is there: the work of milliseconds when it was already.
set-up-%: $(PY)
	@$(PY) $(LAB)/bundles.py $(if $(filter $*,$(USE_NODE)),--packages)
	@$(PY) constraints/install.py "make $*" $(NEEDS_$*)

venv: set-up-venv ## .venv with all that tests, checks, notebooks and the bench need

test: set-up-test ## the tests, notebooks included; says first what is skipped on this machine
	@test ! -e $(LAB_NODE) || npm --prefix $(LAB) run --silent test
	$(PY) -m tests.run $(TEST_ARGS)

test-engines: set-up-test-engines ## tests against Ray, Slurm, Kubernetes, frameworks, a browser, RDMA in a virtual machine
	$(PY) -m tests.run --engines $(TEST_ARGS)

quick: set-up-test ## what tells most, in under three minutes
	$(PY) -m tests.run --quick $(TEST_ARGS)

check: set-up-check ## lint, format and types; that the panel and the widget are what their sources give
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	@test ! -e $(LAB_NODE) || npm --prefix $(LAB) run --silent lint
	@$(PY) $(LAB)/bundles.py --check
	@$(PY) -m tests.line_counts

format: set-up-check ## put the code in its format, and mend what ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	@test ! -e $(LAB_NODE) || npm --prefix $(LAB) run --silent format

demo: set-up-demo ## run the quickstart notebook on the real kernel, and say where the result lies
	@$(PY) notebooks/run.py notebooks/01_quickstart.ipynb --out $(OUT)/demo

lab: set-up-lab ## JupyterLab with the quickstart notebook
	$(BIN)/jupyter lab $(LAB_ARGS) notebooks/01_quickstart.ipynb

docs: set-up-docs ## the documentation as a site, with search, in build/site; a warning or a dead link is an error
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --strict --config-file website/mkdocs.yml
	@echo "The site is in $(OUT)/site: open $(OUT)/site/index.html, or serve it: $(PY) -m http.server -d $(OUT)/site"

notebooks: set-up-notebooks ## run all notebooks, and record their outputs for the site (website/recorded)
	-@for each in notebooks/*.ipynb; do $(PY) notebooks/run.py $$each --out $(OUT)/notebooks; done
	$(PY) -m website.tutorials $(OUT)/notebooks

bench: set-up-bench ## measure against torchmonarch (BENCH_ARGS="--quick", see docs/performance.md)
	$(PY) -m bench $(BENCH_ARGS)

lock: set-up-lock ## write constraints/ anew for the Python of .venv, from what the index offers today
	$(PY) constraints/lock.py

bundles: $(PY) ## build the panel and the widget anew
	@$(PY) $(LAB)/bundles.py --build

release: set-up-release ## VERSION=0.9.0, from a clean tree; DRY_RUN=1 leaves the repository as it is (RELEASING.md)
	@test -n "$(VERSION)" || { echo "Name the version: make release VERSION=0.9.0"; exit 1; }
	$(PY) release/release.py $(VERSION) $(if $(DRY_RUN),--dry-run) $(RELEASE_ARGS)

clean: ## remove all that make made
	rm -rf $(VENV) .bench $(OUT) dist .pytest_cache .ruff_cache .hypothesis
	rm -rf $(LAB)/node_modules $(LAB)/lib
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
