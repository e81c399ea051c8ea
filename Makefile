# onceward. `make` alone prints what there is; every target does its own set-up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Most tests wait for a server or a process, so there are more of them at once than processors.
WORKERS ?= 4
# What the tests run on. Without one of them, its tests are skipped.
SERVICES := $(foreach name,postgres pgbouncer valkey kafka rabbitmq,$(VENV)/$(name).stamp)

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast bench check format clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

demo: $(VENV)/demo.stamp ## A shop, a broker that repeats itself, workers that get killed: then the audit
	@$(BIN)/python -m onceward.demo

test: $(VENV)/dev.stamp $(SERVICES) ## All tests, on SQLite and throwaway servers
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

test-fast: $(VENV)/dev.stamp $(SERVICES) ## The inner loop: stop at the first failure, leave out the slow ones
	@$(BIN)/python -m pytest -x -q -m "not slow"

bench: $(VENV)/bench.stamp $(VENV)/postgres.stamp $(VENV)/kafka.stamp $(VENV)/rabbitmq.stamp ## What it costs, beside hand-written code and others (ARGS=--quick)
	@$(BIN)/python -m bench $(ARGS)

check: $(VENV)/dev.stamp ## Lint, format, types, and that imports point down only
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache

format: $(VENV)/dev.stamp ## Let ruff format and fix what it can
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

clean: ## Remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Set-up. The stamps make it happen once.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "onceward needs Python 3.11 or later: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "Could not make a virtual environment. On Debian: apt-get install python3-venv"; exit 1; }

$(VENV)/demo.stamp: pyproject.toml | $(VENV)/bin/python
	@echo "Setting up (once) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[demo]'
	@touch $@

$(VENV)/bench.stamp: pyproject.toml | $(VENV)/bin/python
	@echo "Setting up (once) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[bench]'
	@touch $@

$(VENV)/dev.stamp: pyproject.toml | $(VENV)/bin/python
	@echo "Setting up (once) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

$(VENV)/postgres.stamp: tests/services/postgres.py | $(VENV)/dev.stamp
	@$(BIN)/python -m tests.services.postgres ensure
	@touch $@

$(VENV)/pgbouncer.stamp: tests/services/pgbouncer.py | $(VENV)/dev.stamp
	@$(BIN)/python -m tests.services.pgbouncer ensure
	@touch $@

$(VENV)/valkey.stamp: tests/services/valkey.py | $(VENV)/dev.stamp
	@$(BIN)/python -m tests.services.valkey ensure
	@touch $@

$(VENV)/kafka.stamp: tests/services/kafka.py | $(VENV)/dev.stamp
	@$(BIN)/python -m tests.services.kafka ensure
	@touch $@

$(VENV)/rabbitmq.stamp: tests/services/rabbitmq.py | $(VENV)/dev.stamp
	@$(BIN)/python -m tests.services.rabbitmq ensure
	@touch $@
