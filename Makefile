# Every target makes the environment it needs when that is missing or older than pyproject.toml or constraints.txt.
#   make demo | test | check | bench | docs | clean          PYTHON=python3.12 make demo   chooses the interpreter

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do $$p -c '$(SUPPORTED)' 2>/dev/null && echo $$p && break; done)

MODEL := smollm2-135m
# page=module that prints it
GENERATED := docs/generated/statemachines.md=statemachines docs/reference/rollout.schema.json=aengine.audit
SPECS := pyproject.toml constraints.txt
BENCHMARKS := cache update scheduler reference throughput numerics

.PHONY: help demo test check bench docs clean

help:
	@sed -n '1,2s/^# *//p' Makefile

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11, 3.12 or 3.13 is needed; name one with PYTHON=..." >&2; exit 1; }
	$(PYTHON) -c '$(SUPPORTED)' || { echo "$(PYTHON) is not Python 3.11, 3.12 or 3.13" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# One stamp for each set of packages, so that the demo does not wait for the test tools.
$(VENV)/.stamp-demo: $(SPECS) | $(BIN)/python
	$(PIP) install -c constraints.txt -e '.[demo]'
	@touch $@

$(VENV)/.stamp-test: $(SPECS) | $(BIN)/python
	$(PIP) install -c constraints.txt -e '.[test,dev]'
	@touch $@ $(VENV)/.stamp-demo

demo: $(VENV)/.stamp-demo
	$(BIN)/aengine models get $(MODEL)
	$(BIN)/aengine demo --model $(MODEL)

check: $(VENV)/.stamp-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@for pair in $(GENERATED); do \
		diff -u $${pair%=*} <($(BIN)/python -m $${pair#*=}) \
			|| { echo "$${pair%=*} is out of date: run make docs" >&2; exit 1; }; \
	done

test: check
	$(BIN)/python -m pytest --cov

bench: $(VENV)/.stamp-test
	@set -e; for name in $(BENCHMARKS); do echo "== $$name"; $(BIN)/python -m benchmarks.$$name; done

docs: $(VENV)/.stamp-test
	@set -e; for pair in $(GENERATED); do \
		mkdir -p $$(dirname $${pair%=*}); \
		$(BIN)/python -m $${pair#*=} > $${pair%=*}; \
	done

clean:
	rm -rf $(VENV) build dist htmlcov .coverage .coverage.* .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find aengine statemachines tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
