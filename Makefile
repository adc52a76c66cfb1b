# On a fresh Debian 12, as root:
#
#   make demo    set-up, then the main job on the shipped tasks
#   make test    set-up, then every test
#
# Every target can be run again: what is there already is not done twice.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory
# Hundreds of processes of the tests' import the same modules; compiled once they start faster.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
COLDFRAME := $(BIN)/coldframe
SOURCES := src tests benchmarks setup.py
HARNESS := oracle
SAMPLES := 2
CONCURRENCY := 2
# Most tests wait more than they compute. A file's tests stay together, in the order of collection.
PYTEST_SPREAD := -n 5 --dist loadfile --no-loadscope-reorder
PYTEST_SLOWEST := --durations=30 --durations-min=5
PYTEST_ARGS :=
FUZZ_SECONDS := 300

.PHONY: help setup demo test test-long harbor harnesses lint format fuzz compiled native-check bench clean distclean

help:  ## Show this list
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

setup:  ## Packages, .venv, the native program, base images
	@tools/setup

demo: setup  ## The main job: tasks in; sandboxes, a harness, a verifier; trajectories out
	@tools/demo --harness $(HARNESS) --samples $(SAMPLES) --concurrency $(CONCURRENCY)

test: setup  ## Every test
	@$(MAKE) -j2 native-check compiled
	@$(BIN)/python -m pytest $(PYTEST_SPREAD) $(PYTEST_SLOWEST) $(PYTEST_ARGS)

test-long:  ## Every test, those that take minutes too
	@tools/setup --long
	@$(MAKE) test PYTEST_ARGS=--long

harbor:  ## The tests with the true Harbor, 0.18.0 and the newest (Python >= 3.12)
	@tools/harbor-lane

harnesses: setup  ## mini-swe-agent from PyPI through the inference proxy
	@tools/mini-swe-agent-lane

lint: setup  ## Formats, lints, types, import walls, generated code, C warnings and analyser
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m coldframe.client._generate --check
	$(MAKE) -C native all analyze

format:  ## Format the Python sources
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

fuzz:  ## The native program's parser for FUZZ_SECONDS, by libFuzzer (installs clang)
	@tools/fuzz $(FUZZ_SECONDS)

compiled:  # The tests as pytest compiles them, once: each of its workers would do it for itself
	@said=$$($(BIN)/python -m pytest -qq --collect-only 2>&1) || { echo "$$said"; exit 1; }

native-check:  ## The native program's own tests, with sanitizers
	$(MAKE) -C native test asan
	$(MAKE) -C native fuzz FUZZ_SECONDS=10

bench: setup  ## Numbers of this machine
	$(BIN)/python -m benchmarks.sandbox
	$(BIN)/python -m benchmarks.burst --sandboxes 1000 --commands 4

clean:  ## Remove what was built; runs, images and .venv stay
	rm -rf build dist native/build src/coldframe/_native .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests benchmarks -name __pycache__ -prune -exec rm -rf {} +

distclean: clean  ## Remove .venv too
	rm -rf .venv src/coldframe.egg-info
