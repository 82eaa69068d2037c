# The same targets serve a newcomer, a developer and .ci/run. `make` alone lists them.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: bench-cache bench-engine bench-kernels bench-metrics buf clients help setup protos protos-bundle release-protos run up down smollm2 test test-fast test-gpu test-isa lint lint-style lint-types lint-protos bench-step tools clean

VENV := .venv
PY := $(VENV)/bin/python
# Packages that are type-checked; one that has no Python files yet is left out.
TYPED := $(sort $(patsubst %/,%,$(dir $(wildcard $(addsuffix /*.py,services kernels scripts benchmarks models))))) tests

PROTOS := $(shell find protos -name '*.proto' 2>/dev/null)
GENERATED := $(PROTOS:.proto=_pb2.py)

NPM := $(shell command -v npm 2>/dev/null)
BUF_VERSION := 1.75.0
BUF := build/npm/node_modules/.bin/buf
BUF_STAMP := build/npm/.buf-$(BUF_VERSION)
# The FileDescriptorSet of the last release, which must stay readable.
RELEASED := protos/released.binpb

GO := $(shell command -v go 2>/dev/null)
# Debian 12's own Go (1.19) builds these.
PROTOC_GEN_GO := google.golang.org/protobuf/cmd/protoc-gen-go@v1.33.0
PROTOC_GEN_GO_GRPC := google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.3.0

# A pip that asks, or that advertises its own update, only puzzles here.
export PIP_NO_INPUT := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# The prompt goes through the environment, as it was typed: neither make nor a shell may expand what is in it.
ifneq ($(origin PROMPT),undefined)
override export PROMPT := $(value PROMPT)
endif

help: ## List these targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(VENV)/.setup protos ## Make .venv with the pinned dependencies, and the generated code

$(VENV)/.setup: pyproject.toml constraints.txt scripts/venv.sh
	@test -x $(PY) || scripts/venv.sh $(VENV)
	@echo "Installing the pinned dependencies into $(VENV) ..."
	@# hatchling first: with it in place the project itself is installed without a second, unpinned environment.
	@$(PY) -m pip install --quiet -c constraints.txt hatchling
	@$(PY) -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

protos: $(GENERATED) ## Generate the Python code of protos/**/*.proto

# google/rpc/*.proto come with googleapis-common-protos, google/protobuf/*.proto with grpcio-tools.
protos/%_pb2.py protos/%_pb2.pyi protos/%_pb2_grpc.py: protos/%.proto $(VENV)/.setup
	@$(PY) -m grpc_tools.protoc -Iprotos -I"$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
	    --python_out=protos --pyi_out=protos --grpc_python_out=protos $<
	@touch protos/$*_pb2.py protos/$*_pb2.pyi protos/$*_pb2_grpc.py

run: setup ## Generate from PROMPT="..." and stream the answer
	@$(PY) scripts/demo.py run

up: setup ## Start both services in the background
	@$(PY) scripts/demo.py up

down: setup ## Stop what `make up` started
	@$(PY) scripts/demo.py down

smollm2: setup ## Fetch a small trained chat model, 98 MB, into build/models
	@$(PY) scripts/smollm2.py

tools: ## Install what else the tests and linters need: scripts/tools.txt (packages as root)
	@scripts/install-tools.sh

test: $(if $(INSTALL),tools) setup ## Run the tests; INSTALL=1, as root: install first what they need
	@$(PY) -m tests.simulators.rocm.standin build
	@# Whole files to a process: many share an engine, or what was compiled, among their tests.
	@$(PY) -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder tests

test-fast: setup ## Run the tests that start no process and compile nothing, in a minute
	@$(PY) -m pytest -q -n auto --maxprocesses 4 --dist loadfile --fast tests

test-gpu: setup ## Run the tests that a GPU is for, on this machine's; fails when it has none
	@# Compiling for AMD needs no GPU, but a clang that a machine with one may not have: CI does that.
	@ROCMFORGE_TEST_GPU=1 $(PY) -m pytest tests/gpu tests/kernels --ignore tests/kernels/device/test_targets.py -k "not amd_matrix_units_compile"

test-isa: setup ## Run every test of a kernel on AMD machine code, executed on this machine's CPU: hours on one core
	@ROCMFORGE_TEST_ISA=1 $(PY) -m pytest -n auto --maxprocesses 4 tests/kernels tests/simulators -k "gfx"

lint: lint-style lint-types lint-protos ## Check style, types and protos (make -k lint: all three, whatever fails)

lint-style: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

lint-types: setup
	$(PY) -m mypy $(TYPED)

# buf comes from npm. A newcomer without npm may do without it; CI may not.
# The second module of buf.yaml, the google/rpc protos that ours import, is a copy of the installed ones.
lint-protos: setup buf
ifdef NPM
	@rm -rf build/googleapis && mkdir -p build/googleapis/google/rpc
	@cp "$$($(PY) -c 'import google.rpc; print(google.rpc.__path__[0])')"/*.proto build/googleapis/google/rpc/
	$(BUF) lint protos
ifneq ($(wildcard $(RELEASED)),)
	$(BUF) breaking protos --against $(RELEASED) --exclude-imports
else
	@echo "buf breaking: nothing has been released yet, so nothing can break"
endif
else
	@if [ -n "$$CI" ]; then echo "buf lint: npm is missing, and CI must not skip it" >&2; exit 1; fi
	@echo "buf lint: SKIPPED, because npm is not installed; CI runs it."
endif

release-protos: lint-protos ## Have every later change of the protos checked against those of now: part of a release
	$(BUF) build protos --exclude-source-info -o $(RELEASED)

protos-bundle: setup ## Pack the protos, with all they import, for clients in other languages
	@$(PY) scripts/protos_bundle.py

clients: $(if $(NPM),build/node/.installed) $(if $(GO),build/bin/.go-clients) ## Fetch what the examples in other languages need

build/node/.installed: examples/node/package.json
	@mkdir -p build/node && cp $< build/node/
	@npm install --silent --no-fund --no-audit --no-package-lock --prefix build/node
	@touch $@

# What the example depends on is compiled here, so that it is in Go's caches when the tests come.
build/bin/.go-clients: examples/go/go.mod examples/go/go.sum
	@GOBIN=$(CURDIR)/build/bin go install $(PROTOC_GEN_GO)
	@GOBIN=$(CURDIR)/build/bin go install $(PROTOC_GEN_GO_GRPC)
	@cd examples/go && go build google.golang.org/grpc google.golang.org/grpc/credentials/insecure \
	    google.golang.org/genproto/googleapis/rpc/errdetails
	@touch $@

buf: $(if $(NPM),$(BUF_STAMP)) ## Fetch buf, which checks the protos

$(BUF_STAMP):
	@npm install --silent --no-fund --no-audit --no-save --prefix build/npm @bufbuild/buf@$(BUF_VERSION)
	@$(BUF) --version >/dev/null && touch $@

bench-step: setup ## Time one engine step, and what the scheduler and the daemon cost in it
	@$(PY) -m benchmarks.step

bench-cache: setup ## Time the daemon's calls beside a bare echo, and a page as the pool grows
	@$(PY) -m benchmarks.cache

bench-metrics: setup ## Time what observing adds to a step, and a scrape
	@$(PY) -m benchmarks.metrics

bench-kernels: setup ## Time every kernel on this machine's GPU beside a plain copy
	@$(PY) -m benchmarks.kernels

bench-engine: setup ## Time the engine as a whole on this machine's CPU: throughput, ablations, cached prefixes
	@$(PY) -m benchmarks.engine

clean: ## Remove generated code, build products and caches (not .venv)
	@rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find protos \( -name '*_pb2.py' -o -name '*_pb2.pyi' -o -name '*_pb2_grpc.py' \) -delete
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
