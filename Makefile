# The first command typed in a fresh clone may be any of these; .venv is made when missing and reused while current.

PYTHON     ?= python3
GPU_PYTHON ?= python3
# Keep compiled files, whatever the environment says: pytest's own way of compiling tests takes ten seconds a worker.
export PYTHONDONTWRITEBYTECODE =
# pytest-xdist workers; each runs torch on one thread, and whole files, whose cases share what they set up.
WORKERS    ?= -n auto --maxprocesses 2 --dist loadfile
# Files with tests for a GPU: its Python need not have what the others import.
GPU_TESTS   = $(shell grep -rlE 'mark\.gpu|^from tests.support.paths import' tests --include='test_*.py')
# Where the tests of pages have no browser, installs one if it can; they are skipped, loudly, where it cannot.
GET_BROWSER = $(VENV)/bin/python tests/support/browser_install.py
# More arguments for pytest: make test ARGS="-k gated -x"
ARGS       ?=

VENV  := .venv
STAMP := $(VENV)/.stamp
PIP   := $(VENV)/bin/python -m pip install -qq --no-compile --disable-pip-version-check --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-quick test-all test-gpu browser check bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# torch goes first, by its pin, and setuptools builds lineate without a second, unpinned environment.
$(STAMP): constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else "lineate needs Python 3.11 or later, got %d.%d; use make PYTHON=python3.11" % v[:2])'
	@echo "installing into $(VENV) (a minute or two) ..."
	@$(VENV)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@$(PIP) torch setuptools
	@$(PIP) --no-build-isolation --editable '.[dev]'
	@npm install --prefix $(VENV)/npm --no-save --ignore-scripts --fetch-retries 0 openai@6.49.0 >/dev/null 2>&1 || echo "no JavaScript client of OpenAI: its tests are skipped"
	@touch $@

demo: $(STAMP) ## run the demo
	$(VENV)/bin/lineate demo

test: $(STAMP) ## run the fast tests on the CPU (minutes)
	@$(GET_BROWSER) || true
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest $(WORKERS) $(ARGS)

test-quick: $(STAMP) ## run one quick case of each test function (a minute and a half)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest $(WORKERS) --quick --durations 5 --durations-min 1 $(ARGS)

test-all: $(STAMP) ## run the fast and the slow tests on the CPU (half an hour)
	@$(GET_BROWSER) || true
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest $(WORKERS) -m "not gpu" $(ARGS)

test-gpu: ## run the GPU tests with GPU_PYTHON, which must have torch and pytest
	$(GPU_PYTHON) tests/gpu.py $(GPU_TESTS) $(ARGS)

browser: $(STAMP) ## install a browser for the tests of the pages
	@$(GET_BROWSER)

check: $(STAMP) ## lint, check the format, check the types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

$(VENV)/.docs: $(STAMP)
	@$(PIP) --no-build-isolation --editable '.[docs]'
	@touch $@

.PHONY: docs
docs: $(VENV)/.docs ## build the documentation, with the reference, into site/
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

bench: $(STAMP) ## measure the ops on the CPU
	$(VENV)/bin/python -m bench.rules.cpu

clean: ## remove caches, builds and outputs; keep .venv
	rm -rf build dist out site bench/out *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +
