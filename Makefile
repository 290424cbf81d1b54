# Two commands do everything, set-up included: `make demo` and `make test`.
SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help setup demo up down status test test-quick test-exact test-cluster chaos check format lock bench-launch bench-delivery clean

help: ## what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

$(READY): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo "TaaS needs Python 3.11, got $$($(PYTHON) --version). Install it, or name it: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	@echo "installing the packages of requirements.txt into $(VENV) (torch and Airflow among them): some minutes, once"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

setup: $(READY) ## the virtual environment, from the lock

demo: $(READY) ## the main job on real data: two requests, their reports and artifacts (var/demo)
	$(BIN)/python -m examples.demo

up: $(READY) ## start the local stack (S3, PostgreSQL, Airflow)
	$(BIN)/taas up

down: $(READY) ## stop the local stack
	$(BIN)/taas down

status: $(READY) ## health of the local stack
	$(BIN)/taas status

JOBS ?= 2

test: $(READY) ## all tests but those on a cluster, JOBS=2 side by side
	$(BIN)/python -m pytest --numprocesses $(JOBS) -m "not cluster"

test-quick: $(READY) ## all but the tests on the real Airflow
	$(BIN)/python -m pytest --numprocesses $(JOBS) -m "not stack and not cluster"

test-cluster: $(READY) ## requests on five hosts of their own, over SSH; makes the hosts' image first (needs podman, as root)
	$(BIN)/python -m tests.cluster.image
	$(BIN)/python -m pytest tests/cluster

CASES ?= 2000

test-exact: $(READY) ## thousands of drawn loaders, machines, ranks and kills against torch (CASES=2000)
	TAAS_EXACT_CASES=$(CASES) TAAS_EXACT_KILL_CASES=$$(( $(CASES) / 20 + 1 )) $(BIN)/python -m pytest tests/exact --timeout 36000

REQUESTS ?= 20

chaos: $(READY) ## requests on a cluster while parts of it die [SEED=n REQUESTS=20] (var/chaos; needs podman, as root)
	$(BIN)/python -m tests.cluster.chaos $(if $(SEED),--seed $(SEED)) --requests $(REQUESTS)

check: $(READY) ## format, lint, types, walls
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY) ## format and mend what ruff can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lock: ## make requirements.txt anew from requirements.in
	rm -rf $(VENV)-lock
	$(PYTHON) -m venv $(VENV)-lock
	$(VENV)-lock/bin/pip install --quiet --disable-pip-version-check -r requirements.in
	$(VENV)-lock/bin/pip check
	{ echo "# Full lock for Python 3.11, made by 'make lock' from requirements.in."; $(VENV)-lock/bin/pip freeze; } > requirements.txt
	rm -rf $(VENV)-lock

bench-launch: $(READY) ## launches, beside torchrun and an SSH operator: parts, faults [QUICK=1] (var/bench/launch.json, .md)
	$(BIN)/python -m benchmarks.bench_launch $(if $(QUICK),--quick)

bench-delivery: $(READY) ## preparing and delivering data beside the peers [QUICK=1] (var/bench/delivery.json, .md, .png)
	$(BIN)/python -m benchmarks.bench_delivery $(if $(QUICK),--quick)

clean: down ## stop the stack and remove what it made
	rm -rf var
