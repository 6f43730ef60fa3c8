# One command each; every target makes what it needs first. `make help` lists them.
VENV ?= .venv
PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
# One stamp for each torch: another one is installed when it is asked for.
STAMP := $(VENV)/.ready-$(subst =,,$(TORCH))
export HF_HUB_OFFLINE ?= 1

.PHONY: help setup run test lint up down bench loadtest audit docs protos clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) ## virtual environment, dependencies, embedded model, compiled kernels
	@$(BIN)/python -m engine_service.embedded_model >/dev/null
	@# without a compiler the engine computes in plain torch, and says so
	@$(BIN)/python -m engine_service.worker.kernels.build >/dev/null || true

$(STAMP): pyproject.toml
	@echo "setup: virtual environment in $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit("Tokenwire needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	@$(PYTHON) -m venv $(VENV)
	@echo "setup: $(TORCH)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	@echo "setup: dependencies"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@rm -f $(VENV)/.ready*
	@touch $@

run: setup ## start both services, stream an answer (PROMPT="..."), stop both
	@$(BIN)/python -m deploy.local run $(if $(PROMPT),--prompt="$$PROMPT")

up: setup ## both services in the background on the default ports
	@$(BIN)/python -m deploy.local up

down: ## stop what `make up` started
	@$(BIN)/python -m deploy.local down

lint: setup ## style, types, import rules, protos
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	cd protos && ../$(BIN)/buf lint

test: lint ## everything that must be green: lint, then the whole default suite
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not slow and not gpu and not load"

bench: setup ## compare targets, write .run/bench (TARGETS="tokenwire vllm" PEERS=folder BENCH="--rounds 3")
	@$(BIN)/python -m benchmarks.serving.compare --targets $(or $(TARGETS),tokenwire tokenwire-engine inprocess) \
		$(if $(PEERS),--peers "$(PEERS)") $(BENCH)

loadtest: setup ## sweep what is up to its knee, write .run/load/report.html (LOADTEST="run --rate 4")
	@$(BIN)/tokenwire load $(or $(LOADTEST),sweep --duration 15 --warmup 3 --ttft 1 --tpot 0.1)

audit: setup ## known vulnerabilities of the installed packages (asks pypi.org, fails where it cannot)
	@mkdir -p .run && $(PYTHON) -m venv .run/audit
	@.run/audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit
	@$(BIN)/python -m pip freeze --exclude-editable | sed 's/+.*//' > .run/audit/installed.txt
	@.run/audit/bin/pip-audit --strict --no-deps --disable-pip --requirement .run/audit/installed.txt

docs: setup ## the documents as a site in .run/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build
	@echo "docs: .run/site/index.html"

protos: setup ## regenerate the stubs
	$(BIN)/python protos/generate.py

clean: ## remove the virtual environment and caches of this folder
	rm -rf $(VENV) .run .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
