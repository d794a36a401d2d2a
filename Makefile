# What a developer and the CI call. `make` prints the targets.

.DEFAULT_GOAL := help
SHELL := /bin/sh
.DELETE_ON_ERROR:

# Settings of your own, one NAME=value a line: PYTHON, CONFIG, INPUT, OUTPUT, FLAGS, ... All of them reach the commands.
-include .env
export $(shell sed -n 's/^\([A-Za-z_][A-Za-z0-9_]*\) *[:?]*=.*/\1/p' .env 2>/dev/null)

CONFIG ?= configs/tfrecord.yaml
# What users set. Recipes take it from the environment, "$$INPUT", so that the shell never reads the value itself; and
# values of the command line and the environment stand as they are: make would run $(shell ...) in them.
SETTINGS := CONFIG INPUT OUTPUT FLAGS PROJECT REGION BUCKET MACHINE_TYPE DISK_SIZE_GB MAX_WORKERS NUM_WORKERS THREADS \
	SERVICE_ACCOUNT NETWORK SUBNETWORK PRIVATE LABELS JOB_NAME DETACH IMAGE TEMPLATE
export $(SETTINGS)
$(foreach name,$(SETTINGS),$(if $(filter command environment,$(firstword $(origin $(name)))), \
	$(eval override $(name) := $$(value $(name)))))

# A setting that is misspelt would be ignored without a word, and a job without MAX_WORKERS costs more.
KNOWN := $(SETTINGS) PYTHON VENV SHELL PYTEST_FLAGS TORTURE_FLAGS BENCH_FLAGS SIMULATE_FLAGS MAKE%
UNKNOWN := $(strip $(foreach name,$(filter-out $(KNOWN),$(.VARIABLES)), \
	$(if $(findstring command line,$(origin $(name))),$(name))))
$(if $(UNKNOWN),$(error there is no setting $(UNKNOWN); there are $(filter-out MAKE%,$(KNOWN))))

export GOALS := $(MAKECMDGOALS)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin/
READY := $(VENV)/.installed
SDK_VENV := .venv-sdk
SDK_READY := $(SDK_VENV)/.installed
SOURCES := pipelines transforms tests setup.py
DEMO := demo-output
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check

CONFIGS := $(filter-out configs/reference.yaml,$(sort $(wildcard configs/*.yaml)))
CONFIG_TARGETS := $(CONFIGS:configs/%.yaml=dataflow-%)

.PHONY: help venv install format lint typecheck docs-check check test test-slow test-sdk torture demo bench simulate \
	convert-local dry-run replay-local verify-local dataflow-convert $(CONFIG_TARGETS) dataflow-replay dataflow-verify \
	dataflow-status dataflow-cancel dataflow-image dataflow-template dataflow-run-template build clean

help: ## print this list
	@echo "usage: make TARGET [NAME=value ...]"
	@sed -n 's/^\([a-z-]*\|$$(CONFIG_TARGETS)\):[^#]*## \(.*\)/\1	\2/p' $(firstword $(MAKEFILE_LIST)) \
		| while IFS='	' read -r names text; do \
			test "$$names" != '$$(CONFIG_TARGETS)' || names='$(CONFIG_TARGETS)'; \
			for name in $$names; do printf '  %-21s %s\n' "$$name" "$$text"; done; done

venv: $(READY) ## create .venv with Gristmill and all that its development needs

$(READY): setup.py pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "make: there is no $(PYTHON); install Python 3.11, 3.12 or 3.13," \
		"or name one: make PYTHON=/path/to/python3.12 $$GOALS" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "make: Gristmill needs Python 3.11 or newer, $(PYTHON) is `$(PYTHON) -V 2>&1`;" \
		"name another: make PYTHON=python3.12 $$GOALS" >&2; exit 1; }
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

test-slow: PYTEST_FLAGS ?= --numprocesses=auto --dist=loadfile
test-slow: venv ## run the slow tests, half an hour of them (PYTEST_FLAGS=...)
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
	@test -n "$$$*" || { echo "make: $* is missing; for example: make $$GOALS $(EXAMPLE)" >&2; exit 2; }

# Prints and runs a command with the words of FLAGS behind its own: split and unquoted as a shell does, but never run.
define RUN_WITH_FLAGS
import os, shlex, sys
try:
    command = sys.argv[1:] + shlex.split(os.environ.get("FLAGS", ""))
except ValueError as error:
    sys.exit(f"make: FLAGS cannot be split into words: {error}")
print(shlex.join(command), flush=True)
os.execvp(command[0], command)
endef
export RUN_WITH_FLAGS
RUN = $(PYTHON) -S -c "$$RUN_WITH_FLAGS"
GRISTMILL = $(RUN) $(BIN)gristmill

convert-local: need-INPUT need-OUTPUT venv ## convert on this machine: INPUT='raw/*' OUTPUT=out [CONFIG=...] [FLAGS=...]
	@$(GRISTMILL) convert --config "$$CONFIG" --input "$$INPUT" --output "$$OUTPUT"

dry-run: need-INPUT need-OUTPUT venv ## print the plan, write nothing: INPUT=... OUTPUT=... [CONFIG=...] [FLAGS=...]
	@$(GRISTMILL) convert --config "$$CONFIG" --input "$$INPUT" --output "$$OUTPUT" --dry-run

replay-local verify-local: EXAMPLE := OUTPUT=out/mine
replay-local: need-OUTPUT venv ## run the dead letters of OUTPUT=... again [FLAGS=...]
	@$(GRISTMILL) replay "$$OUTPUT"

verify-local: need-OUTPUT venv ## read every record of OUTPUT=... back and recount [FLAGS=...]
	@$(GRISTMILL) verify "$$OUTPUT"

# On Dataflow. What is derived from settings reaches the recipes through the environment, as they do.
VERSION := $(shell sed -n 's/^ *version="\(.*\)",$$/\1/p' setup.py)
export BUCKET_URL = gs://$(patsubst %/,%,$(patsubst gs://%,%,$(BUCKET)))
export IMAGE_NAME = $(or $(IMAGE),$(REGION)-docker.pkg.dev/$(subst :,/,$(PROJECT))/gristmill/worker:$(VERSION))
export TEMPLATE_URL = $(or $(TEMPLATE),$(BUCKET_URL)/gristmill/templates/gristmill-$(VERSION).json)
is_on = $(filter-out 0 no false off,$($(1)))

DATAFLOW_EXAMPLE := PROJECT=my-project REGION=us-central1 BUCKET=my-bucket
NEED_DATAFLOW := need-PROJECT need-REGION need-BUCKET
NEED_CONVERT := need-INPUT need-OUTPUT $(NEED_DATAFLOW)
SPLIT_LABELS := set -f; for label in $$LABELS; do set -- "$$@" "--labels=$$label"; done;
ON_DATAFLOW = --runner=DataflowRunner "--project=$$PROJECT" "--region=$$REGION" \
	"--temp_location=$$BUCKET_URL/gristmill/temp" \
	$${MACHINE_TYPE:+"--worker_machine_type=$$MACHINE_TYPE"} \
	$${DISK_SIZE_GB:+"--disk_size_gb=$$DISK_SIZE_GB"} \
	$${MAX_WORKERS:+"--max_num_workers=$$MAX_WORKERS"} \
	$${NUM_WORKERS:+"--num_workers=$$NUM_WORKERS"} \
	$${THREADS:+"--number_of_worker_harness_threads=$$THREADS"} \
	$${SERVICE_ACCOUNT:+"--service_account_email=$$SERVICE_ACCOUNT"} \
	$${NETWORK:+"--network=$$NETWORK"} \
	$${SUBNETWORK:+"--subnetwork=$$SUBNETWORK"} \
	$(if $(call is_on,PRIVATE),--no_use_public_ips) \
	"$$@" \
	$${IMAGE:+"--sdk_container_image=$$IMAGE"} \
	$${JOB_NAME:+"--job_name=$$JOB_NAME"} \
	$(if $(call is_on,DETACH),--detach)

dataflow-convert $(CONFIG_TARGETS) dataflow-run-template: EXAMPLE := \
	INPUT='gs://my-bucket/raw/*' OUTPUT=gs://my-bucket/corpus $(DATAFLOW_EXAMPLE)
dataflow-convert: $(NEED_CONVERT) venv ## convert on Dataflow: INPUT=gs://... OUTPUT=gs://... [CONFIG=...]
	@$(SPLIT_LABELS) $(GRISTMILL) convert --config "$$CONFIG" --input "$$INPUT" --output "$$OUTPUT" $(ON_DATAFLOW)

$(CONFIG_TARGETS): dataflow-%: $(NEED_CONVERT) venv ## the same with the config of this name
	@$(SPLIT_LABELS) $(GRISTMILL) convert --config 'configs/$*.yaml' --input "$$INPUT" --output "$$OUTPUT" $(ON_DATAFLOW)

dataflow-replay dataflow-verify: EXAMPLE := OUTPUT=gs://my-bucket/corpus $(DATAFLOW_EXAMPLE)
dataflow-replay: need-OUTPUT $(NEED_DATAFLOW) venv ## run the dead letters of OUTPUT=gs://... again on Dataflow
	@$(SPLIT_LABELS) $(GRISTMILL) replay "$$OUTPUT" $(ON_DATAFLOW)

dataflow-verify: need-OUTPUT $(NEED_DATAFLOW) venv ## read every record of OUTPUT=gs://... back on Dataflow and recount
	@$(SPLIT_LABELS) $(GRISTMILL) verify "$$OUTPUT" $(ON_DATAFLOW)

dataflow-status dataflow-cancel: EXAMPLE := OUTPUT=gs://my-bucket/corpus
dataflow-status: need-OUTPUT venv ## how far the job of OUTPUT=gs://... is [FLAGS=--json]
	@$(GRISTMILL) status "$$OUTPUT"

dataflow-cancel: need-OUTPUT venv ## cancel the job that writes to OUTPUT=gs://...; the same convert resumes it
	@$(GRISTMILL) cancel "$$OUTPUT"

# The image gets the versions that the submitting environment has, where there is one; else those in the Dockerfile.
define PRINT_VERSIONS
import sys
from importlib.metadata import version
print("PYTHON_VERSION=%d.%d" % sys.version_info[:2])
print("BEAM_VERSION=" + version("apache-beam"))
print("ARRAY_RECORD_VERSION=" + version("array-record"))
endef
export PRINT_VERSIONS
dataflow-image: EXAMPLE := PROJECT=my-project REGION=us-central1
dataflow-image: $(if $(IMAGE),,need-PROJECT need-REGION) ## build the workers' image and push it, with docker or gcloud
	@versions=$$($(BIN)python -c "$$PRINT_VERSIONS" 2>/dev/null); substitutions=_IMAGE=$$IMAGE_NAME; \
	for version in $$versions; do \
		set -- "$$@" "--build-arg=$$version"; substitutions=$$substitutions,_$$version; done; \
	if docker info >/dev/null 2>&1; then \
		$(RUN) docker build --platform=linux/amd64 "--tag=$$IMAGE_NAME" "$$@" . \
			&& FLAGS= $(RUN) docker push "$$IMAGE_NAME"; \
	elif command -v gcloud >/dev/null; then \
		$(RUN) gcloud builds submit --config=cloudbuild.yaml $${PROJECT:+"--project=$$PROJECT"} \
			"--substitutions=$$substitutions" .; \
	else \
		echo "make: an image is built with docker or gcloud; neither can be used here: start Docker, or install the" \
			"Google Cloud CLI, https://cloud.google.com/sdk/docs/install" >&2; exit 2; \
	fi
	@echo "now name it: make dataflow-convert IMAGE=$$IMAGE_NAME ..."

NEED_GCLOUD := command -v gcloud >/dev/null || { echo "make: there is no gcloud; install the Google Cloud CLI," \
	"https://cloud.google.com/sdk/docs/install" >&2; exit 2; };
dataflow-template: EXAMPLE := $(DATAFLOW_EXAMPLE)
dataflow-template: $(NEED_DATAFLOW) ## write the Flex template of the image to TEMPLATE=gs://... (default: in BUCKET)
	@$(NEED_GCLOUD) $(RUN) gcloud dataflow flex-template build "$$TEMPLATE_URL" "--image=$$IMAGE_NAME" \
		--sdk-language=PYTHON --metadata-file=pipelines/flex_template.json "--project=$$PROJECT"

# gcloud splits what --parameters is given at commas, or at what stands between two ^ in front.
PARAMETER := --parameters=^:::^
dataflow-run-template: $(NEED_CONVERT) ## run the Flex template: INPUT=gs://... OUTPUT=gs://...
	@$(NEED_GCLOUD) set -f; labels=$$(set -- $$LABELS; IFS=,; printf %s "$$*"); \
	$(RUN) gcloud dataflow flex-template run "$${JOB_NAME:-gristmill-$$(date +%Y%m%d-%H%M%S)}" \
		"--template-file-gcs-location=$$TEMPLATE_URL" "--project=$$PROJECT" "--region=$$REGION" \
		"--temp-location=$$BUCKET_URL/gristmill/temp" "--staging-location=$$BUCKET_URL/gristmill/staging" \
		"$(PARAMETER)input=$$INPUT" "$(PARAMETER)output=$$OUTPUT" "$(PARAMETER)config=$$CONFIG" \
		"$(PARAMETER)sdk_container_image=$$IMAGE_NAME" \
		$${DISK_SIZE_GB:+"$(PARAMETER)disk_size_gb=$$DISK_SIZE_GB"} \
		$${THREADS:+"$(PARAMETER)number_of_worker_harness_threads=$$THREADS"} \
		$${MACHINE_TYPE:+"--worker-machine-type=$$MACHINE_TYPE"} \
		$${MAX_WORKERS:+"--max-workers=$$MAX_WORKERS"} \
		$${NUM_WORKERS:+"--num-workers=$$NUM_WORKERS"} \
		$${SERVICE_ACCOUNT:+"--service-account-email=$$SERVICE_ACCOUNT"} \
		$${NETWORK:+"--network=$$NETWORK"} \
		$${SUBNETWORK:+"--subnetwork=$$SUBNETWORK"} \
		$(if $(call is_on,PRIVATE),--disable-public-ips) \
		$${labels:+"--additional-user-labels=$$labels"}

build: venv ## build the source distribution, dist/gristmill-*.tar.gz
	$(BIN)python -m build --sdist

clean: ## delete what was built, the caches and demo-output; the environments stay
	rm -rf build dist *.egg-info $(DEMO) .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find pipelines transforms tests -name __pycache__ -type d -prune -exec rm -rf {} +
