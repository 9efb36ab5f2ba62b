# Everything sets itself up: a virtual environment in .venv, with pinned packages.
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
DOCS := .venv-docs/bin
SOURCES := service relay watcher keeper preload client checkpoint worker_sdk tests lab examples benchmarks dev

# Where it is set, each of the many processes of the tests compiles its modules anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv frameworks tools demo failover test quick thorough compat pin-base lint types stubs check-stubs dashboards docs dist unit bench bench-venv soak format clean

help: ## Show the targets.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

# Every package but torch is pinned with the hashes of its release's files; dev/hash-requirements.sh makes them.
INSTALL = -m pip install --quiet --disable-pip-version-check
HASHED = $(INSTALL) --require-hashes -r

.venv/.installed: requirements/torch.txt requirements/dev.txt requirements/peers.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Muster needs Python 3.11 or newer, and $(PYTHON) is %d.%d: make PYTHON=python3.11 ..." % sys.version_info[:2])'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python $(HASHED) requirements/dev.txt
	$(BIN)/python $(INSTALL) -r requirements/torch.txt
	$(BIN)/python $(HASHED) requirements/peers.txt --no-deps
	$(BIN)/python $(INSTALL) --no-deps --no-build-isolation -e .
	@touch $@

venv: .venv/.installed ## Set up .venv.

.venv/.frameworks-installed: .venv/.installed requirements/frameworks.txt requirements/frameworks-alone.txt
	$(BIN)/python $(HASHED) requirements/frameworks.txt
	$(BIN)/python $(HASHED) requirements/frameworks-alone.txt --no-deps
	@touch $@

frameworks: .venv/.frameworks-installed

# What cannot be fetched may be installed already; if not, the tests that need it say so.
.tools/%/.fetched:
	-dev/fetch-debian.sh $*

.tools/slurm/.fetched:
	-dev/fetch-debian.sh slurm slurmctld slurmd slurm-client munge

tools: $(foreach tool,prometheus chromium etcd-server strace slurm,.tools/$(tool)/.fetched)

demo: venv ## Show the main job: torchrun, train, save; kill a writer, a node and the coordinator; recover.
	$(BIN)/python examples/demo.py

failover: venv .tools/etcd-server/.fetched ## Show several coordinators on etcd: the leader killed, stopped, cut off; a job goes on.
	PYTHONPATH=. $(BIN)/python examples/failover.py

test: venv tools ## Everything that CI runs.
	$(MAKE) --no-print-directory -O -j 2 types check-stubs lint
	$(MAKE) --no-print-directory unit

# The loop while one works.
quick: venv frameworks ## Format, lint, types and the unit tests, in under three minutes.
	$(MAKE) --no-print-directory -O -j 2 types lint
	$(BIN)/pytest -q -n 3 --dist worksteal tests/unit

# Nothing in the protos may break what the last release says; its wheel has them.
LAST_RELEASE = $(wildcard tests/releases/*.whl)

lint: venv ## Format, lint, the walls between the packages, and the protos.
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check --output-format concise $(SOURCES)
	$(BIN)/lint-imports
	cd proto && ../$(BIN)/buf lint && ../$(BIN)/buf format --diff --exit-code
	cd proto && ../$(BIN)/buf breaking --against '../$(LAST_RELEASE)#format=zip'

types: venv ## mypy, strict.
	$(BIN)/mypy $(SOURCES)

stubs: ## Generate the stubs of the protos again.
	dev/generate-stubs.sh

check-stubs: venv ## The committed stubs are those of the protos, and load on the oldest libraries.
	dev/check-stubs.sh

# Five at a time on two cores: most tests wait for processes. A module's tests stay together, for they share what
# is dear; the integration tests come first, since the longest modules have the fewest tests.
unit: venv frameworks tools ## All tests.
	$(BIN)/pytest -q -n 5 --dist loadscope --no-loadscope-reorder

thorough: venv frameworks tools ## All tests, and those that are worth more the longer they run for longer.
	$(BIN)/pytest -q -n 5 --dist loadscope --no-loadscope-reorder --thorough --timeout 1800 -o faulthandler_timeout=2400

# The pinned torch is one without CUDA.
GPU_PYTHON ?= $(BIN)/python

test-gpu: venv ## The saves on a real GPU; GPU_PYTHON=… is a Python with a torch for CUDA, and requirements/dev.txt.
	$(GPU_PYTHON) -m pytest -q --gpu tests/gpu

# The first run fetches some 30 GB, and takes an hour; the environments in .tools/compat are used again.
compat: venv .tools/etcd-server/.fetched ## The SDK under torch 2.9 to 2.15, the service under Python 3.12 to 3.14; ONLY="torch-2.11 …" for some.
	$(BIN)/python -m dev.compat $(ONLY)

pin-base: ## Pin the base image of the Dockerfile by its digest, before a release; needs docker and its registry.
	dev/pin-base.sh

dashboards: venv ## Generate the dashboards' files again.
	$(BIN)/python -m dev.dashboards

# A virtual environment of its own: without torch, and with nothing that the tests need.
.venv-docs/.installed: requirements/docs.txt requirements/docs-assets.txt
	test -x $(DOCS)/python || $(PYTHON) -m venv .venv-docs
	$(DOCS)/python $(HASHED) requirements/docs.txt
	rm -rf .venv-docs/assets
	$(DOCS)/python -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes --only-binary :all: \
	  --python-version 3.12 --dest .venv-docs/assets -r requirements/docs-assets.txt
	cd .venv-docs/assets && ../bin/python -m zipfile --extract *.whl .
	@touch $@

docs: .venv-docs/.installed ## Make the site in build/site from docs/, the SDK's docstrings and the protos' comments.
	NO_MKDOCS_2_WARNING=1 $(DOCS)/python -m mkdocs build

.tools/twine/.installed: requirements/dist.txt
	test -x .tools/twine/bin/python || $(PYTHON) -m venv .tools/twine
	.tools/twine/bin/python $(HASHED) requirements/dist.txt
	@touch $@

dist: venv .tools/twine/.installed ## Make wheel and sdist in dist/, and check them in clean environments, with each extra.
	$(BIN)/pytest -q tests/unit/project/test_distribution.py
	rm -rf dist
	$(BIN)/hatchling build --directory dist
	.tools/twine/bin/twine check --strict dist/*
	$(BIN)/python dev/check-wheel.py dist/*.whl

.venv/.bench-installed: .venv/.installed requirements/bench.txt
	$(BIN)/python $(HASHED) requirements/bench.txt
	@touch $@

bench-venv: .venv/.bench-installed

bench: bench-venv frameworks ## Measure beside the peers and across the engines (about an hour), and write docs/benchmarks/.
	$(BIN)/python -m benchmarks.barrier
	$(BIN)/python -m benchmarks.rendezvous
	$(BIN)/python -m benchmarks.saves
	$(BIN)/python -m benchmarks.loads
	$(BIN)/python -m benchmarks.buckets
	$(BIN)/python -m benchmarks.engines
	$(BIN)/python -m benchmarks.failover
	$(BIN)/python -m benchmarks.relay
	$(BIN)/python -m benchmarks.size

soak: venv ## Churn a coordinator for half an hour; fails if what it uses does not level off.
	$(BIN)/python -m benchmarks.soak

format: venv ## Format the code and the protos.
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix-only --quiet $(SOURCES)
	cd proto && ../$(BIN)/buf format --write

clean: ## Remove what the targets made.
	rm -rf .venv .venv-docs .tools .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist
