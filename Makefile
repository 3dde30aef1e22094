# demo, test, check, bench and torture, each with its own set-up. Everything is made inside this folder, and nothing has
# a fixed port or a shared cache, so two clones may run at the same time.

PYTHON ?= python3
BENCH ?=
JSON ?=
PAIRS ?=
ROUNDS ?= 300
SEED ?= 1
WITH ?=
ARGS ?=
WORKERS ?= 2

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.stormproof-set-up
SOURCES := core trident sinks migrations tests examples benchmarks $(wildcard src/stormproof/*.py*) src/stormproof/testing
# ruff is told the real folders; src/stormproof holds links to them
EXISTING = $(wildcard $(SOURCES))

# Containers often set it. The tests start hundreds of processes; each would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-classes check ruff mypy pyright format docs fresh-install bench torture versions other-spark clean

help:
	@echo "make demo      the word count through kill -9, with its proof (a few minutes)"
	@echo "make test      every test, of the longest files a share drawn by the seed (ARGS=--all for all of them; ARGS='-k name')"
	@echo "make check     formatter, linter, type checkers"
	@echo "make docs      the documentation's site, in build/site; a broken link is an error"
	@echo "make fresh-install   the wheel in a fresh environment, without Java and Postgres, then with the extras"
	@echo "make bench     measurements                  (BENCH='P1a P2' JSON=file PAIRS=n)"
	@echo "make torture   every failpoint in every way, two drivers at once, random rounds, Spark    (ROUNDS=n SEED=s)"
	@echo "make versions  the tests that rest on Spark, with other PySparks, pandas, lower bounds   (WITH=lowest, WITH=drawn)"
	@echo "make setup     what the others do first      (PYTHON=python3.12 for another interpreter)"
	@echo "make clean     remove all that these made"

setup: $(STAMP)

# One set-up at a time in one clone: a second make waits, finds the stamp and goes on.
$(STAMP): pyproject.toml constraints.txt tools/setup.sh
	@PYTHON="$(PYTHON)" STAMP="$(STAMP)" sh tools/setup.sh

demo: $(STAMP)
	@$(PY) examples/demo.py $(ARGS)

test: $(STAMP)
	@tools/run_tests.sh $(PY) -m pytest -n $(WORKERS) --dist loadgroup $(ARGS)

# What `test` makes first; .ci/run has it made beside the checks.
test-classes: $(STAMP)
	@tools/run_tests.sh

# The two type checkers take the longest, and one core each.
check: $(STAMP)
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target pyright mypy ruff

versions: $(STAMP)
	@tools/other_versions.sh $(foreach one,$(WITH),"$(one)")

# The Spark that `make versions WITH=drawn` takes; .ci/run has it installed beside the checks.
other-spark: $(STAMP)
	@tools/other_versions.sh drawn-set-up

ruff: $(STAMP)
	$(VENV)/bin/ruff format --check $(EXISTING)
	$(VENV)/bin/ruff check $(EXISTING)

mypy: $(STAMP)
	$(VENV)/bin/mypy -p stormproof
	$(VENV)/bin/mypy $(wildcard tests examples benchmarks)

pyright: $(STAMP)
	$(VENV)/bin/pyright

format: $(STAMP)
	$(VENV)/bin/ruff format $(EXISTING)
	$(VENV)/bin/ruff check --fix $(EXISTING)

docs: $(STAMP)
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build
	@echo "the site is in build/site: open build/site/index.html"

fresh-install: $(STAMP)
	@tools/fresh_install.sh $(ARGS)

bench: $(STAMP)
	@$(PY) -m benchmarks $(BENCH) $(if $(JSON),--json $(JSON)) $(if $(PAIRS),--pairs $(PAIRS)) $(ARGS)

torture: $(STAMP)
	@$(PY) tests/torture.py --rounds $(ROUNDS) --seed $(SEED) $(ARGS)

clean:
	rm -rf $(VENV) .jars .brokers .java .stormproof .demo .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build
	find core trident sinks migrations src/stormproof/testing tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
