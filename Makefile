# Everything runs from .venv, which is made when it is missing and renewed when the pinned versions change.
#
#     make demo       the main job in small, on this machine
#     make finetune-demo   a language model from a folder, trained in two stages, and back into a folder
#     make test       format, lint, types, import directions, tests
#     make test-all   the slow tests too
#     make docs       the site of guides and reference, in site/
#     make rehearsal  our plans and the peers on emulated hosts, measured (root; about an hour on 2 quiet cores)
#     make rehearsal-short   its short form, in minutes
#     make rehearsal-slices  the same comparison on one card that is cut into eight slices (CUDA MPS)
#
# PYTHON chooses the interpreter, PIP_ARGS is for pip: PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
# takes torch's small build for CPUs. TESTS_AT_ONCE files of tests run side by side: most of their time they wait for processes.

PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt
PYTEST := $(BIN)/python -m pytest
EXTRAS := data,gpu,dev,docs,hf,foreign
OUT ?= runs/rehearsal
TESTS_AT_ONCE ?= 3

.PHONY: demo finetune-demo test test-all docs rehearsal rehearsal-short rehearsal-slices lint types format venv clean

demo: $(VENV)/.for-use
	@$(BIN)/python scripts/demo.py

finetune-demo: $(VENV)/.for-tests
	@$(BIN)/python scripts/finetune_demo.py

test: lint types
	$(PYTEST) tests/test_imports.py
	$(PYTEST) -m "not slow" --ignore tests/test_imports.py -n $(TESTS_AT_ONCE) --dist loadfile

test-all: lint types
	$(PYTEST)

docs: $(VENV)/.for-tests
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "site/index.html"

rehearsal: $(VENV)/.for-use
	$(BIN)/python -m benchmarks.rehearsal suites/rehearsal.yaml --out $(OUT) --results docs/results.md

rehearsal-short: $(VENV)/.for-use
	$(BIN)/python -m benchmarks.rehearsal suites/rehearsal.yaml --out $(OUT)-short --short

rehearsal-slices: $(VENV)/.for-use
	$(BIN)/python -m benchmarks.rehearsal suites/slices.yaml --out $(OUT)-slices

lint: $(VENV)/.for-tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.for-tests
	$(BIN)/mypy

format: $(VENV)/.for-tests
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

venv: $(VENV)/.for-tests

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build site

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, and this is " + sys.version.split()[0] + ": make PYTHON=python3.12 …")'
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.for-use: $(VENV)/.made pyproject.toml constraints.txt
	@echo "installing what running needs (once, a minute or two)"
	@$(INSTALL) -e .
	@touch $@

$(VENV)/.for-tests: $(VENV)/.made pyproject.toml constraints.txt
	@echo "installing what the tests need (once, a few minutes)"
	@$(INSTALL) -e ".[$(EXTRAS)]"
	@touch $(VENV)/.for-use $@
