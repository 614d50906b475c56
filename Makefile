# `make help` lists what there is. Everything is installed in .venv, at the versions of constraints.txt.
#
#   PYTHON=python3.12     the Python of the environment (default: the first one found that is 3.11 or newer)
#   MODEL=DIR_OR_NAME     the model of `make run` (default: the embedded one)
#   ARGS='...'            more arguments for the command behind run, test, test-long, bench, soak and train-embedded

PYTHON ?=
MODEL ?=
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -c constraints.txt
TORCH := $(shell sed -n '/^torch==/p' constraints.txt)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help run check test test-long test-part lint format docs site wheel try-wheel bench soak train-embedded clean

help:
	@sed -n 's/^\([a-z][a-z-]*\):.*## \(.*\)/  make \1 \2/p' Makefile | awk '{t = $$2; $$1 = $$2 = ""; printf "  make %-15s%s\n", t, $$0}'

# Without a terminal the embedded model completes the text from stdin, or a sample.
SAMPLE := def read_lines(path):
run: $(VENV)/.run ## chat with the embedded model, or with MODEL
ifneq ($(strip $(MODEL)$(ARGS)),)
	@$(BIN)/kvcellar run $(MODEL) $(ARGS)
else
	@if [ -t 0 ]; then $(BIN)/kvcellar run; \
	else text=$$(cat); $(BIN)/kvcellar run embedded --max-tokens 100 "$${text:-$(SAMPLE)}"; fi
endif

check: $(VENV)/.dev ## what changed against main, in a minute: style, types, and the tests nearest to it
	@$(BIN)/python scripts/check.py

# A process for each core, up to eight: each takes about 1 GB. ARGS=-n0 runs them in one process, for a debugger.
PARALLEL := -n auto --maxprocesses 8 --dist worksteal
# Wall time, and CPU time of all processes.
TIMED := TIMEFORMAT='%lR passed; all processes together took %lU and %lS of CPU time'; time
test test-part: SHELL := bash
test: $(VENV)/.dev ## all tests except the slow ones and, without an accelerator, those that need one
	@$(TIMED) $(BIN)/python -m pytest $(PARALLEL) $(ARGS)

# Consecutive commits run all parts, each of which takes some minutes. A shallow clone does not know how many there
# are: the time of its commit chooses.
PARTS := 48
COMMITS = $$([ "$$(git rev-parse --is-shallow-repository)" = true ] && git log -1 --format=%ct || git rev-list --count HEAD)
test-part: $(VENV)/.dev ## one of 48 parts of the slow tests, chosen by the number of commits
	@part=$$((($(COMMITS)) % $(PARTS) + 1))/$(PARTS); echo "Part $$part of the slow tests"; \
	$(TIMED) $(BIN)/python -m pytest $(PARALLEL) --part $$part -o faulthandler_timeout=1200 $(ARGS)

test-long: $(VENV)/.dev ## the slow tests too, with many more examples
	$(BIN)/python -m pytest $(PARALLEL) --long -o faulthandler_timeout=3600 $(ARGS)

lint: $(VENV)/.dev ## style, format, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/python scripts/weight.py

format: $(VENV)/.dev ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.dev ## generate the documents that are made from the code
	$(BIN)/python scripts/source_map.py
	$(BIN)/python -m scripts.reference
	$(BIN)/python -m scripts.models_page
	PYTHONPATH=tests/images/beside:$(VENV)/vision $(BIN)/python -m scripts.models_page --images
	$(BIN)/python -m tests.serve.faults.table

site: $(VENV)/.wheel ## the documentation as pages with a search, in build/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet && echo "open build/site/index.html"

wheel: $(VENV)/.wheel ## an sdist, and a wheel with compiled kernels for each processor that there is a compiler for, in dist/
	@$(BIN)/python scripts/release.py $(ARGS)

try-wheel: $(VENV)/.torch ## install the wheel in dist/ into an empty environment without a compiler, and run it
	@$(BIN)/python scripts/try_wheel.py $(ARGS)

bench: $(VENV)/.run ## measure kvcellar, part by part; a table, then one line of JSON (ARGS=--help lists the parts)
	@$(BIN)/python -m benchmarks $(ARGS)

soak: $(VENV)/.run ## twenty minutes of random requests on three models; fails if memory grows (ARGS='--minutes 3')
	@$(BIN)/python -m benchmarks.soak $(ARGS)

train-embedded: $(VENV)/.run ## train the embedded model again, from the Python standard library
	$(BIN)/python scripts/train_embedded.py $(ARGS)

clean: ## remove everything that make has created
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests benchmarks scripts examples docs -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# Stamp files record what is installed, so that a second call starts at once. torch is installed first and alone, so that
# packages installed after it do not choose another build.
$(VENV)/.torch: constraints.txt
	@python=; \
	for p in $(or $(PYTHON),python3 python3.13 python3.12 python3.11); do \
	  if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then python=$$p; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "kvcellar needs Python 3.11 or newer; $(or $(PYTHON),python3) is $$($(or $(PYTHON),python3) --version 2>&1 | head -n 1)." >&2; \
	  echo "Install one, or name it: make PYTHON=/path/to/python3.12 ..." >&2; \
	  exit 1; \
	fi; \
	echo "Making $(VENV) with $$($$python --version) and installing $(TORCH). This happens once and takes a few minutes." >&2; \
	$$python -m venv $(VENV)
	@$(PIP) $(TORCH)
	@touch $@

$(VENV)/.run: $(VENV)/.torch pyproject.toml
	@echo "Installing kvcellar into $(VENV)." >&2
	@$(PIP) --quiet -e .
	@touch $@

# Packages that some types of models need are in a folder of their own (tests/images/packages.py says why).
$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	@echo "Installing kvcellar and its development tools into $(VENV)." >&2
	@$(PIP) --quiet -e '.[dev]'
	@$(PIP) --quiet --no-deps --upgrade --target $(VENV)/vision torchvision timm scipy || echo "torchvision, timm or scipy cannot be installed here: the tests that need them are skipped." >&2
	@$(PIP) --quiet -e '.[cluster]' || echo "Ray cannot be installed here: the tests that need it are skipped." >&2
	@touch $(VENV)/.run $@

$(VENV)/.wheel: $(VENV)/.dev
	@$(PIP) --quiet -e '.[release,site]'
	@touch $@
