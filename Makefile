# Everything a person or CI does with Treadle. `make demo` and `make test` set up whatever is missing.
PYTHON ?= python3
VENV := .venv
ENGINE_VENV := .venv-engine
BIN := $(VENV)/bin
MESH_READY := $(VENV)/.treadle-mesh-ready
ENGINE_READY := $(ENGINE_VENV)/.treadle-engine-ready
KERNELS_READY := $(VENV)/.treadle-kernels-ready
FRAMEWORKS := .cache/frameworks
FRAMEWORKS_READY := $(FRAMEWORKS)/.ready
RUFF_PATHS := clients core learned runtime services sim cli research examples tests scripts

# Bytecode is kept, also where the environment says otherwise: without it each of a thousand processes
# compiles the tree's modules anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup frameworks demo test test-quick test-full test-others test-frameworks fuzz test-research test-changed test-compose check lint types manifests check-protos wheels verify docs docs-serve release-wheels locks protos protos-bundle \
  protos-release bench-tools bench-shaping clean

help:            ## what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/'

setup:           ## both venvs: the mesh (.venv) and the SGLang engine (.venv-engine)
	@scripts/check-system.sh
	@$(MAKE) --no-print-directory -j2 $(KERNELS_READY) $(ENGINE_READY)

$(MESH_READY): pyproject.toml clients/python/pyproject.toml research/pyproject.toml requirements-mesh.txt services/sidecar/engine/install-torch.sh
	@echo "mesh: installing into $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@services/sidecar/engine/install-torch.sh $(BIN)/python -c requirements-mesh.txt torch
	@$(BIN)/python -m pip --disable-pip-version-check -q install -c requirements-mesh.txt pycosat 2>/dev/null || \
	  { echo "mesh: no C compiler for pycosat, so reasoning-gym makes no zebra puzzles"; \
	    $(BIN)/python -m pip --disable-pip-version-check -q install services/tools/pycosat; }
	@$(BIN)/python -m pip --disable-pip-version-check -q install -c requirements-mesh.txt -e clients/python -e '.[dev]' -e research
	@touch $@

# The script compiles nothing where it has compiled these sources: a hash says whether it has.
$(KERNELS_READY): $(MESH_READY) scripts/compile_kernels.py $(shell find core -name '*.py')
	@$(BIN)/python scripts/compile_kernels.py
	@touch $@

$(ENGINE_READY): $(wildcard services/sidecar/engine/*.sh services/sidecar/engine/*.txt)
	@PYTHON=$(PYTHON) services/sidecar/engine/install.sh $(ENGINE_VENV)

frameworks: $(FRAMEWORKS_READY) ## packages of RL frameworks whose own clients the tests run

# Without their dependencies, and each in a folder that only its own processes import from.
$(FRAMEWORKS_READY): $(MESH_READY) $(wildcard tests/support/frameworks/*.txt)
	@for list in tests/support/frameworks/*.txt; do name=$$(basename $$list .txt); rm -rf $(FRAMEWORKS)/$$name; \
	  $(BIN)/python -m pip --disable-pip-version-check -q install --no-deps --target $(FRAMEWORKS)/$$name -r $$list || exit; done
	@touch $@

demo: setup      ## 32 real trajectories, 7 times: pinned FCFS and Treadle; writes runs/<id>/report.html
	@$(BIN)/treadle demo $(ARGS)

# A file's tests stay together, since they share fixtures, and those with engines are two pieces of work (tests/conftest.py).
# Most wait more than they compute, so more run at a time than there are cores. Those with engines come first; unit tests come
# last: they are short, and no core is idle at the end.
PYTEST := $(BIN)/python -m pytest
AT_ONCE := -n 5 --dist loadfile --no-loadscope-reorder

test: setup      ## every test but those of `make test-full`: real services, real engines
	@$(PYTEST) -m "not full" $(AT_ONCE) $(ARGS)

test-quick: setup ## unit, contract and architecture tests
	@$(PYTEST) tests/unit tests/contract tests/architecture -m "not engine and not full" $(AT_ONCE) $(ARGS)

test-full: test-others test-frameworks fuzz test-research ## what `make test` leaves

test-others: setup $(FRAMEWORKS_READY) ## Ray clusters, other languages, frameworks before real engines, the built site, other long tests
	@$(PYTEST) -m "full and not engine" $(ARGS)
	@$(PYTEST) -m "full and engine" $(ARGS)

test-frameworks: $(FRAMEWORKS_READY) ## the adapters on the frameworks' own classes, with packages that nothing else here imports
	@TREADLE_TEST_OWN_CLASSES=1 PYTHONPATH=$(FRAMEWORKS)/adapters $(PYTEST) tests/contract/test_adapters_installed.py

# `make test` tries 100 of each, the same ones each time.
fuzz: setup ## 10,000 hostile requests to each service and as many answers of engines, others each time
	@TREADLE_TEST_FUZZ_EXAMPLES=$${TREADLE_TEST_FUZZ_EXAMPLES:-10000} $(PYTEST) tests/fuzz $(ARGS)

test-research: setup ## the figures of research/ and the models that only they use
	@$(PYTEST) research -m "not engine" $(AT_ONCE) $(ARGS)
	@$(PYTEST) research -m engine $(ARGS)

test-changed: setup ## tests that import what differs from the commit BASE (default: HEAD)
	@$(BIN)/python scripts/changed_tests.py $(or $(BASE),HEAD) | xargs -r $(PYTEST) $(AT_ONCE) $(ARGS)

test-compose: $(MESH_READY) ## the compose file on a real Docker daemon: built, used, each container killed; docs/operations.md
	@$(BIN)/python tests/compose/run.py $(ARGS)

check: setup lint types manifests check-protos figures ## everything that needs no run

lint:            ## ruff: style and format
	@$(BIN)/ruff check $(RUFF_PATHS)
	@$(BIN)/ruff format --check $(RUFF_PATHS)

types:           ## mypy, strict
	@$(BIN)/mypy

manifests:       ## compose and Kubernetes files against their schemas
	@scripts/check-manifests.sh $(BIN)

figures:         ## which committed figures are older than the code that decides them
	@$(BIN)/treadle bench --older

bench-tools: $(MESH_READY) ## tools and rewards: ARL-Tangram's evaluation, and the live service; ARGS="--data DIR" for public runs
	@$(BIN)/treadle bench tools $(ARGS)

bench-shaping: $(MESH_READY) ## which samples are trained: DARTS, RollArt, a lesson's patches, with a model of learning; 20 minutes
	@$(BIN)/treadle bench shaping --repeats 3 --pictures research/results $(ARGS)

check-protos:    ## lint of protos/, and no change that would break clients of the last release
	@scripts/check-protos.sh

locks:           ## hashes of the packages that images install, after a change of the tested versions
	@scripts/lock-images.sh

protos:          ## regenerate the stubs under clients/python
	@scripts/generate-protos.sh

protos-bundle:   ## dist/treadle-protos-VERSION.tar.gz: the protos with their documentation, for teams in other languages
	@scripts/bundle-protos.sh

protos-release:  ## for whoever makes a release: later protos must be compatible with those of now
	@scripts/check-protos.sh --release

docs: $(MESH_READY) ## the documentation site, into site/; a broken link is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict # not --quiet: it hides warnings from --strict

docs-serve: $(MESH_READY) ## the documentation site on http://127.0.0.1:8000, built anew when a page changes
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

release-wheels: $(MESH_READY) ## the wheels in dist/; ARGS=--with-dependencies: and all that they need, to install without an index
	@$(BIN)/python scripts/check_wheels.py --release dist $(ARGS)

wheels: $(MESH_READY) ## build the wheels, install them into empty environments, start every service from them
	@$(BIN)/python scripts/check_wheels.py

verify: check wheels test   ## what must be green before every commit
	@test -z "$$(git status --porcelain)" || { echo "verify: the tree is not clean:"; git status --short; exit 1; }

clean:           ## remove what setup made
	rm -rf $(VENV) $(ENGINE_VENV) .venv-codegen build dist site
