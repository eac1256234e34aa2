# Each of demo, test, check and packages may be the first command on a fresh Debian 12: what is missing is installed.
VENV ?= .venv
BIN := $(VENV)/bin
SUDO := $(if $(filter 0,$(shell id -u)),,sudo)
# Variables that a command under sudo must still see.
comma := ,
space := $(subst ,, )
KEPT := EBB_STATE_DIR EBB_CACHE_DIR EBB_DEBIAN_MIRROR http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY
KEEP := $(if $(SUDO),--preserve-env=$(subst $(space),$(comma),$(KEPT)))
# Tests start Python again and again: what it compiles is kept, whatever the caller's environment says.
unexport PYTHONDONTWRITEBYTECODE
AS_ROOT = $(if $(SUDO),$(SUDO) $(KEEP))
CACHE := $(or $(EBB_CACHE_DIR),/var/cache/ebbtide)

.DEFAULT_GOAL := help
.PHONY: help install install-test demo lab lab-down test test-deep test-packages test-system test-vagrant check lint
.PHONY: openapi metrics pictures docs packages box bench clean

help: ## Show the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*## /\t/' | expand -t 16

$(VENV)/.installed-demo $(VENV)/.installed-test $(VENV)/.installed-docs: $(VENV)/.installed-%: pyproject.toml requirements.lock scripts/make-venv.sh $(wildcard tests/clients/typescript/package-lock.json tests/browser/package-lock.json)
	@scripts/make-venv.sh $(VENV) $*
	@touch $@

install: ## Install what the demo and a lab need: Debian packages, the virtual environment, the commands
	@scripts/install-deps.sh demo
	@$(MAKE) --silent --no-print-directory $(VENV)/.installed-demo

install-test: install ## Install what the tests need as well: services, a JDK, Slurm, development tools
	@scripts/install-deps.sh test
	@$(MAKE) --silent --no-print-directory $(VENV)/.installed-test

demo: install ## Bring a lab up, run the demo, take it down
	@$(AS_ROOT) $(BIN)/ebb demo --lab

lab: install ## Bring a lab up
	@$(AS_ROOT) $(BIN)/ebb lab up

lab-down: ## Take the lab down
	@$(AS_ROOT) $(BIN)/ebb lab down

lint: install-test ## ruff, mypy, import-linter
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/mypy
	@PYTHONPATH=. $(BIN)/lint-imports

# Lint and types are tests, too (tests/lint): they run beside the others. A fixed order of sets, so that what fails once
# fails again.
test: install-test ## All checks and all tests, with real guests (root)
	@$(AS_ROOT) env PYTHONHASHSEED=1 $(BIN)/python -m pytest -n 4 --dist loadfile

check: install-test ## The quick tests and lint: no root, no guests, no services
	@$(BIN)/python -m pytest -n 4 --dist loadfile -m "not guest and not service and not slow and not deep and not package and not system and not vagrant"

test-deep: install-test ## The long forms of the random searches (root)
	@$(AS_ROOT) $(BIN)/python -m pytest -n 2 --dist loadfile -m deep

test-packages: install-test ## Build the packages, install them into a Debian of its own and remove them (root, network)
	@$(AS_ROOT) $(BIN)/python -m pytest -n 0 -m package tests/packages

test-vagrant: install-test packages ## Bring the Vagrant cluster up once and apply the Ansible role to its host (root, network, 14 minutes)
	@$(AS_ROOT) $(BIN)/python -m pytest -n 0 -m vagrant tests/vagrant

box: ## The Vagrant box of manager and hosts, build/ebbtide-debian12.box (root, network)
	@mkdir -p build
	@$(AS_ROOT) vagrant/box/build.sh

test-system: install-test ## Two Debian machines with systemd, the packages in them, and VMs that shrink (root, network)
	@$(AS_ROOT) $(BIN)/python -m pytest -n 0 -m system tests/system

openapi: install ## Write docs/openapi/*.json
	@$(BIN)/python -m ebbtide.cli.openapi

metrics: install ## Write the tables of docs/reference/metrics.md and deploy/grafana/*.json
	@PYTHONPATH=. $(BIN)/python -m deploy.prometheus.reference
	@PYTHONPATH=. $(BIN)/python -m deploy.grafana.dashboards

docs: install $(VENV)/.installed-docs ## The documentation as a site in build/site; broken links and anchors are errors
	@PYTHONPATH=. NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

pictures: install-test ## Pictures of the dashboard's views for docs/reference/dashboard.md (Chromium)
	@PYTHONPATH=. $(BIN)/python -m tests.browser.pictures docs/assets/dashboard

packages: install ## Debian packages, wheels, sdist, and the guest agent as one file, in dist/
	@scripts/packages.sh $(BIN)/python

bench: install-test ## Benchmarks: make bench NAME=policies (all without NAME)
	@$(AS_ROOT) $(BIN)/python -m benchmarks $(NAME)

clean: ## Remove the lab, the virtual environment and all caches
	@if [ -x $(BIN)/ebb ]; then $(AS_ROOT) $(BIN)/ebb lab down; fi
	@$(AS_ROOT) rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .grimp_cache \
	    build dist *.egg-info $(CACHE)/image $(CACHE)/accelerator.json
	@$(AS_ROOT) find . -name __pycache__ -type d -prune -exec rm -rf {} +
