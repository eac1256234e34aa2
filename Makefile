# Each of demo, test and check may be the first command on a fresh Debian 12: what is missing is installed.
VENV ?= .venv
BIN := $(VENV)/bin
SUDO := $(if $(filter 0,$(shell id -u)),,sudo)
# Variables that a command under sudo must still see.
comma := ,
KEEP := $(if $(SUDO),--preserve-env=EBB_STATE_DIR$(comma)EBB_CACHE_DIR$(comma)EBB_DEBIAN_MIRROR)
AS_ROOT = $(if $(SUDO),$(SUDO) $(KEEP))
STAMP := $(VENV)/.installed
CACHE := $(or $(EBB_CACHE_DIR),/var/cache/ebbtide)

.DEFAULT_GOAL := help
.PHONY: help deps install demo lab lab-down test check lint openapi bench clean

help: ## Show the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*## /\t/' | expand -t 12

deps:
	@scripts/install-deps.sh

$(STAMP): pyproject.toml scripts/make-venv.sh
	@scripts/make-venv.sh $(VENV)
	@touch $@

install: deps ## Install Debian packages, the virtual environment and the commands
	@$(MAKE) --silent --no-print-directory $(STAMP)

demo: install ## Bring a lab up, run the demo, take it down
	@$(AS_ROOT) $(BIN)/ebb demo --lab

lab: install ## Bring a lab up
	@$(AS_ROOT) $(BIN)/ebb lab up

lab-down: ## Take the lab down
	@$(AS_ROOT) $(BIN)/ebb lab down

lint: install ## ruff, mypy, import-linter
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/mypy
	@PYTHONPATH=. $(BIN)/lint-imports

# A fixed order of sets, so that what fails once fails again.
test: lint ## All checks and all tests, with real guests (root)
	@$(AS_ROOT) env PYTHONHASHSEED=1 $(BIN)/python -m pytest -n 2 --dist loadfile

check: lint ## What needs neither root nor guests
	@$(BIN)/python -m pytest -n auto -m "not guest and not service"

openapi: install ## Write docs/openapi/*.json
	@$(BIN)/python -m ebb.openapi

bench: install ## Benchmarks: make bench NAME=policies (all without NAME)
	@$(AS_ROOT) $(BIN)/ebb bench $(NAME)

clean: ## Remove the lab, the virtual environment and all caches
	@if [ -x $(BIN)/ebb ]; then $(AS_ROOT) $(BIN)/ebb lab down; fi
	@$(AS_ROOT) rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .grimp_cache \
	    build dist *.egg-info $(CACHE)/image $(CACHE)/accelerator.json
	@$(AS_ROOT) find . -name __pycache__ -type d -prune -exec rm -rf {} +
