# Everstep: every command a newcomer needs. `make help` lists them.
.DEFAULT_GOAL := help
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
# .ci/run has its own, which runs what failed once more
PYTEST ?= $(BIN)/python -m pytest
STAMP := $(VENV)/.installed
# what a service and the demo need, without tests, documentation and adapters
SERVER := $(VENV)/.server
export OMP_NUM_THREADS ?= 1
# glibc reports damage of the heap to stderr, where test output is kept
export LIBC_FATAL_STDERR_ ?= 1

export NO_MKDOCS_2_WARNING ?= 1
SLOWEST := --durations 20 --durations-min 1
# tests that share a cluster stay together; see tests/support/two_groups.py
TWO_GROUPS := -n 2 --dist loadfile

.PHONY: help install demo serve test test-rest test-all test-unit test-one chaos versions hosts compose kubernetes gpu check format docs bench sbom audit lock clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

install: $(STAMP)  ## Make .venv with everything pinned by constraints.txt

$(STAMP): pyproject.toml constraints.txt scripts/make-venv.sh
	@scripts/make-venv.sh "$(VENV)" server,dev,adapters,docs,wandb
	@touch "$@" "$(SERVER)"

$(SERVER): pyproject.toml constraints.txt scripts/make-venv.sh
	@scripts/make-venv.sh "$(VENV)" server
	@touch "$@"

demo: $(SERVER)  ## Train on three local nodes, kill one in the middle, watch it carry on (KEEP=1 leaves the service up)
	@$(BIN)/everstep demo $(if $(KEEP),--keep,)

serve: $(SERVER)  ## Start the service with a local cluster of two nodes (ARGS="--nodes 3 --port 9000" to change that)
	@$(BIN)/everstep serve $(ARGS)

test: $(STAMP)  ## In ten minutes: checks, documentation, quick unit tests, and the core of recovery on a real cluster; prints the slowest 20
	@$(MAKE) --no-print-directory check docs
	@scripts/get-test-tools.sh || true
	$(PYTEST) tests/unit -m "not slow and not chaos" --hypothesis-profile quick -n auto $(SLOWEST) $(ARGS)
	$(PYTEST) tests/integration tests/chaos -m "core" $(TWO_GROUPS) $(SLOWEST) $(ARGS)

test-rest: $(STAMP)  ## What make test leaves out: slow unit tests, long property tests, all other integration tests, the short part of the chaos suite
	@scripts/get-test-tools.sh || true
	$(PYTEST) tests/unit -m "(slow or hypothesis) and not chaos" -n auto $(SLOWEST) $(ARGS)
	$(PYTEST) tests/integration tests/chaos -m "not core and not chaos and not gpu and not alone" $(TWO_GROUPS) $(SLOWEST) $(ARGS)
	$(PYTEST) tests/integration tests/chaos -m "not core and not chaos and not gpu and alone" $(SLOWEST) $(ARGS)

test-all: test test-rest  ## Everything that CI runs: make test, then make test-rest

test-unit: $(STAMP)  ## Unit tests only
	@scripts/get-test-tools.sh || true
	$(PYTEST) tests/unit -m "not chaos" -n auto $(ARGS)

test-one: $(STAMP)  ## One file or folder of unit tests, in seconds (T=tests/unit/train_fn/step)
	@test -e "$(firstword $(subst ::, ,$(T)))" || { echo "T=$(T) names no test; for example make test-one T=tests/unit/train_fn/step" >&2; exit 2; }
	@$(PYTEST) -q "$(T)" $(ARGS)

chaos: $(STAMP)  ## The long fault-injection suites
	$(PYTEST) tests -m chaos $(ARGS)

versions:  ## make demo in fresh clones on other Debians, each with its own Python, in a chroot (root, mmdebstrap; DEBIAN="trixie testing")
	@scripts/try-debian.sh $(or $(DEBIAN),bookworm trixie)

hosts: $(STAMP)  ## The compose file's parts on hosts of their own (network namespaces, needs root), with a network that fails
	$(PYTEST) tests/hosts -m chaos $(ARGS)

compose: $(STAMP)  ## docker-compose.yml on a Docker engine: what an operator does and fears (root where no engine runs yet)
	$(PYTEST) tests/compose -m chaos -s $(ARGS)

kubernetes: $(STAMP)  ## Manifests against Kubernetes's own API server (built from Debian's source, ten minutes the first time)
	@scripts/get-kubernetes-tools.sh
	@[ -n "$$KUBEBUILDER_ASSETS" ] || scripts/get-kubernetes-api-server.sh
	$(PYTEST) tests/kubernetes -m chaos $(ARGS)

gpu: $(STAMP)  ## What only a CUDA device shows, in ten minutes, a line each; then the tests that need one (ARGS="--device cpu" tries the code)
	@$(BIN)/python -m tests.gpu $(ARGS)
	$(PYTEST) tests/gpu

check: $(STAMP)  ## Lint, format, types, layering, the picture of the rooms, the references of spec, settings and checks, the manifests for Kubernetes
	@echo "ruff, ruff format, mypy, import-linter"
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/python scripts/draw_house.py --check
	@$(BIN)/python scripts/measure_house.py --check
	@$(BIN)/python scripts/spec_reference.py --check
	@$(BIN)/python scripts/settings_reference.py --check
	@$(BIN)/python scripts/checks_reference.py --check
	@$(BIN)/python scripts/check_kubernetes.py

format: $(STAMP)  ## Rewrite the code in the house format, the picture of its rooms and the references of spec, settings and checks
	@$(BIN)/ruff check --quiet --fix .
	@$(BIN)/ruff format --quiet .
	@$(BIN)/python scripts/draw_house.py
	@$(BIN)/python scripts/spec_reference.py
	@$(BIN)/python scripts/settings_reference.py
	@$(BIN)/python scripts/checks_reference.py

docs: $(STAMP)  ## The documentation as a site in out/docs; every link, anchor, field and setting must be right
	@$(BIN)/python scripts/spec_reference.py --check
	@$(BIN)/python scripts/settings_reference.py --check
	@$(BIN)/mkdocs build --strict

bench: $(STAMP)  ## Measure speed beside torchrun and plain Ray Train; JSON in out/benchmarks
	$(BIN)/python -m benchmarks $(ARGS)

sbom: $(STAMP)  ## Write the bill of materials, CycloneDX, to out/sbom.json
	@scripts/sbom.sh $(BIN)/python out/sbom.json

audit: $(STAMP)  ## Known vulnerabilities of the pinned packages; says so where the advisories cannot be asked
	@$(BIN)/python scripts/audit.py

lock: $(STAMP)  ## Write constraints.txt anew from what is installed, and the locks with hashes
	@scripts/lock.sh $(BIN)/python

clean:  ## Remove the virtual environment and what builds and tests left
	rm -rf $(VENV) out build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
