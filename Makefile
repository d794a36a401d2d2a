# What a developer and the CI call. `make` prints the targets.

.DEFAULT_GOAL := help
SHELL := /bin/sh
.DELETE_ON_ERROR:

# Settings of your own, one NAME=value a line: PYTHON, CONFIG, INPUT, OUTPUT, FLAGS, ... All of them reach the commands.
-include .env
export $(shell sed -n 's/^\([A-Za-z_][A-Za-z0-9_]*\) *[:?]*=.*/\1/p' .env 2>/dev/null)

PYTHON ?= python3
CONFIG ?= configs/tfrecord.yaml
VENV := .venv
BIN := $(VENV)/bin/
READY := $(VENV)/.installed
SDK_VENV := .venv-sdk
SDK_READY := $(SDK_VENV)/.installed
SOURCES := pipelines transforms tests setup.py
DEMO := demo-output
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check

.PHONY: help venv install format lint typecheck docs-check check test test-slow test-sdk torture demo bench simulate \
	convert-local dry-run replay-local verify-local build clean

help: ## print this list
	@echo "usage: make TARGET [NAME=value ...]"
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/\1	\2/p' $(firstword $(MAKEFILE_LIST)) \
		| while IFS='	' read -r name text; do printf '  %-14s %s\n' "$$name" "$$text"; done

venv: $(READY) ## create .venv with Gristmill and all that its development needs

$(READY): setup.py pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "make: there is no $(PYTHON); install Python 3.11, 3.12 or 3.13," \
		"or name one: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "make: Gristmill needs Python 3.11 or newer, $(PYTHON) is `$(PYTHON) -V 2>&1`;" \
		"name another: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "installing into $(VENV), which takes some minutes the first time"
	@test -x $(BIN)python || $(PYTHON) -m venv $(VENV) || { echo "make: $(PYTHON) cannot create environments;" \
		"on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@$(BIN)python $(PIP_INSTALL) --editable '.[dev]'
	@touch $@

install: ## install Gristmill without development tools, into the environment of PYTHON
	$(PYTHON) $(PIP_INSTALL) .

format: venv ## bring all Python files into form and mend what can be mended
	$(BIN)ruff check --fix-only $(SOURCES)
	$(BIN)ruff format $(SOURCES)

lint: venv ## check form and style (ruff)
	$(BIN)ruff format --check $(SOURCES)
	$(BIN)ruff check $(SOURCES)

typecheck: venv ## check types (mypy, strict)
	$(BIN)mypy pipelines transforms

docs-check: venv ## check that everything public has a docstring (interrogate)
	$(BIN)interrogate pipelines transforms

check: lint typecheck docs-check ## all of the checks above; no test runs

test: PYTEST_FLAGS ?= --numprocesses=auto
test: venv ## run the tests that are not slow, one process a core (PYTEST_FLAGS=...)
	$(BIN)python -m pytest -m "not slow and not sdk" $(PYTEST_FLAGS)

test-slow: venv ## run the slow tests, one after the other (PYTEST_FLAGS=...)
	$(BIN)python -m pytest -m slow $(PYTEST_FLAGS)

SDK_TESTS := tests/sdk tests/pipelines/test_convert.py tests/transforms/test_shard_writer.py \
	tests/transforms/formats/test_array_record.py
test-sdk: $(SDK_READY) ## run what touches ArrayRecord with the extra [sdk] (array-record 0.5.0, Python 3.11)
	$(SDK_VENV)/bin/python -m pytest $(SDK_TESTS) $(PYTEST_FLAGS)

torture: venv ## random damage, kills and failing steps, at most 10 minutes (TORTURE_FLAGS="--seed 7 ...")
	$(BIN)python tests/torture/run.py $(TORTURE_FLAGS)

demo: venv ## damaged corpus -> convert -> verify -> read with Grain, in demo-output/; starts anew each time
	@rm -rf $(DEMO)
	@echo "== A corpus of handwritten digits, two of its files damaged"
	@$(BIN)python tests/demo/make_corpus.py $(DEMO)
	@echo; echo "== Convert"
	$(BIN)gristmill convert --config configs/tfrecord.yaml --input '$(DEMO)/raw/*' --output $(DEMO)/corpus \
		--name digits --shards 4
	@echo; echo "== What came out"
	@find $(DEMO)/corpus -type f | sort
	@echo; echo "== The dead letters"
	@cat $(DEMO)/corpus/_dead_letters/*.jsonl
	@echo; echo "== Verify: read every record back and recount"
	$(BIN)gristmill verify $(DEMO)/corpus
	@echo; echo "== Read it as a training job does"
	@$(BIN)python tests/demo/read_with_grain.py $(DEMO)/corpus --note $(DEMO)/corpus_note.json

bench: venv ## measure against a bare loop and the ArrayRecord Beam SDK (BENCH_FLAGS="--runs 1 ...")
	@if python3.11 -c '' 2>/dev/null && $(MAKE) --no-print-directory $(SDK_READY); then :; \
		else echo "no Python 3.11 with array-record-beam-sdk: the rows of the SDK are left out"; fi
	$(VENV)/bin/python tests/bench/run.py \
		`test -f $(SDK_READY) && echo "--sdk-python $(CURDIR)/$(SDK_VENV)/bin/python"` $(BENCH_FLAGS)

simulate: venv ## plan 10 million files, simulate 1,000 workers, add up the cost (SIMULATE_FLAGS="--files 100000 ...")
	$(BIN)python tests/simulate/run.py $(SIMULATE_FLAGS)

# The SDK pins an array-record that has no wheel past Python 3.11, so it has an environment of its own.
$(SDK_READY): setup.py
	@echo "installing the SDK into $(SDK_VENV), which takes some minutes the first time"
	@python3.11 -m venv $(SDK_VENV)
	@$(SDK_VENV)/bin/python $(PIP_INSTALL) --editable '.[sdk]' hypothesis pytest
	@touch $@

# Before anything is installed: a missing variable is named with an example.
EXAMPLE := INPUT='raw/*.tfrecord' OUTPUT=out/mine
need-%:
	@test -n "$($*)" || { echo "make: $* is missing; for example: make $(MAKECMDGOALS) $(EXAMPLE)" >&2; exit 2; }

convert-local: need-INPUT need-OUTPUT venv ## convert on this machine: INPUT='raw/*' OUTPUT=out [CONFIG=...] [FLAGS=...]
	$(BIN)gristmill convert --config '$(CONFIG)' --input '$(INPUT)' --output '$(OUTPUT)' $(FLAGS)

dry-run: need-INPUT need-OUTPUT venv ## print the plan, write nothing: INPUT=... OUTPUT=... [CONFIG=...] [FLAGS=...]
	$(BIN)gristmill convert --config '$(CONFIG)' --input '$(INPUT)' --output '$(OUTPUT)' --dry-run $(FLAGS)

replay-local verify-local: EXAMPLE := OUTPUT=out/mine
replay-local: need-OUTPUT venv ## run the dead letters of OUTPUT=... again [FLAGS=...]
	$(BIN)gristmill replay '$(OUTPUT)' $(FLAGS)

verify-local: need-OUTPUT venv ## read every record of OUTPUT=... back and recount
	$(BIN)gristmill verify '$(OUTPUT)'

build: venv ## build the source distribution, dist/gristmill-*.tar.gz
	$(BIN)python -m build --sdist

clean: ## delete what was built, the caches and demo-output; the environments stay
	rm -rf build dist *.egg-info $(DEMO) .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find pipelines transforms tests -name __pycache__ -type d -prune -exec rm -rf {} +
