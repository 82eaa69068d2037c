# Newcomers, developers and .ci/run use the same targets. `make` without one lists them.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: images release test-compose atheris bench-cache bench-engine bench-kernels bench-metrics bench-recovery bench-tiers buf chaos clients fuzz first-light help setup protos protos-bundle reference release-protos run up down smollm2 soak test test-fast test-gpu test-isa test-transformers test-vllm lint lint-style lint-types lint-protos bench-step bench-tracing tools clean

VENV := .venv
PY := $(VENV)/bin/python
# Type-checked packages; one without Python files is left out.
TYPED := $(sort $(patsubst %/,%,$(dir $(wildcard $(addsuffix /*.py,services kernels scripts benchmarks models))))) clients tests

PROTOS := $(shell find protos -name '*.proto' 2>/dev/null)
GENERATED := $(PROTOS:.proto=_pb2.py)

NPM := $(shell command -v npm 2>/dev/null)
BUF_VERSION := 1.75.0
BUF := build/npm/node_modules/.bin/buf
BUF_STAMP := build/npm/.buf-$(BUF_VERSION)
# The FileDescriptorSet of the last release, with which the protos must stay compatible.
RELEASED := protos/released.binpb

GO := $(shell command -v go 2>/dev/null)
# These versions build with Debian 12's Go (1.19).
PROTOC_GEN_GO := google.golang.org/protobuf/cmd/protoc-gen-go@v1.33.0
PROTOC_GEN_GO_GRPC := google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.3.0

# Many containers set it. Here it costs minutes: each of the processes that the tests start compiles all that it imports,
# and each of pytest's workers rewrites all tests.
export PYTHONDONTWRITEBYTECODE :=

# pip must not prompt, nor advertise its own updates.
export PIP_NO_INPUT := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# PROMPT is passed through the environment, verbatim: neither make nor a shell may expand it.
ifneq ($(origin PROMPT),undefined)
override export PROMPT := $(value PROMPT)
endif

help: ## List these targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(VENV)/.setup protos ## Create .venv with the pinned dependencies, and generate the protobuf code

$(VENV)/.setup: pyproject.toml clients/python/pyproject.toml constraints.txt scripts/venv.sh
	@test -x $(PY) || scripts/venv.sh $(VENV)
	@echo "Installing the pinned dependencies into $(VENV) ..."
	@# What builds it first: then pip installs the project itself without an isolated, unpinned build environment.
	@$(PY) -m pip install --quiet -c constraints.txt hatchling grpcio-tools googleapis-common-protos
	@$(PY) -m pip install --quiet -c constraints.txt --no-build-isolation -e clients/python -e '.[dev]'
	@touch $@

protos: $(GENERATED) ## Generate the Python code of protos/**/*.proto

# googleapis-common-protos provides google/rpc/*.proto, grpcio-tools google/protobuf/*.proto.
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

tools: ## Install the other tools of the tests and linters, scripts/tools.txt (packages only as root)
	@scripts/install-tools.sh

test: $(if $(INSTALL),tools) setup ## Run the tests; with INSTALL=1, as root, install their tools first
	@$(PY) -m tests.simulators.rocm.standin build
	@# Distribute whole files: the tests of many share an engine, or compiled code.
	@$(PY) -m pytest -n 4 --dist loadfile --no-loadscope-reorder tests

test-fast: setup ## Run only tests that start no process and compile nothing, in a minute
	@$(PY) -m pytest -q -n auto --maxprocesses 4 --dist loadfile --fast tests

test-gpu: setup ## Run the GPU tests on this machine's GPU; fails without one
	@# Compiling for AMD needs no GPU but a clang that a GPU machine may lack, so CI does that.
	@ROCMFORGE_TEST_GPU=1 $(PY) -m pytest tests/gpu tests/kernels --ignore tests/kernels/device/test_targets.py -k "not amd_matrix_units_compile"

first-light: setup ## Try everything on this machine's GPU, and write a report to send
	@$(PY) -m services.doctor first-light $(if $(QUICK),--quick)

test-compose: setup ## Run docker-compose.yml on a real Docker engine: up, kill, upgrade, scale, TLS, down
	@$(PY) -m pytest -p no:cacheprovider -rA -x tests/compose/check_compose.py

release: setup ## Write everything that a release consists of to dist/
	@$(PY) -m scripts.release

images: ## Build the images, VARIANT=cpu (rocm, cuda), with the version as their tag
	@scripts/images.sh $(or $(VARIANT),cpu)

test-isa: setup ## Run all kernel tests as AMD machine code on this CPU
	@ROCMFORGE_TEST_ISA=1 $(PY) -m pytest -n auto --maxprocesses 4 tests/kernels tests/simulators -k "gfx"

# Another environment that has vLLM serves as well: make test-vllm VLLM=FOLDER
VLLM := build/vllm

test-vllm: smollm2 $(VLLM)/bin/vllm ## Run the tests of the vLLM connector, with the real vLLM in VLLM=build/vllm (6 GB, made if need be)
	@ROCMFORGE_VLLM=$(abspath $(VLLM))/bin/python $(PY) -m pytest tests/vllm

# vLLM's environment has transformers, too; another one serves as well: make test-transformers TRANSFORMERS=FOLDER
TRANSFORMERS := $(VLLM)

test-transformers: setup $(if $(filter $(VLLM),$(TRANSFORMERS)),$(VLLM)/bin/vllm) ## Run the tests of the engine on transformers, examples/transformers, with the real one in TRANSFORMERS=build/vllm
	@ROCMFORGE_TRANSFORMERS=$(abspath $(TRANSFORMERS))/bin/python $(PY) -m pytest tests/transformers

$(VLLM)/bin/vllm:
	@scripts/vllm-env.sh $(VLLM)

chaos: setup ## Run a daemon and two engines under faults for SECONDS=60, from SEED=n; the report is in build/chaos
	@$(PY) -m tests.chaos --seconds $(or $(SECONDS),60) $(if $(SEED),--seed $(SEED))

fuzz: atheris ## Search for bytes that break a reader or a servicer, SECONDS=60 for each, JOBS=1 at a time; finds are in build/fuzz
	@$(PY) -m tests.fuzz --seconds $(or $(SECONDS),60) --jobs $(or $(JOBS),1)

atheris: $(VENV)/.atheris protos

# hatchling is there from the setup; see there.
$(VENV)/.atheris: $(VENV)/.setup
	@$(PY) -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[fuzz]'
	@touch $@

soak: setup ## The same for MINUTES=60, with processes that live long, to see that none of them grows
	@$(PY) -m tests.chaos --soak --seconds $$(($(or $(MINUTES),60) * 60)) $(if $(SEED),--seed $(SEED))

lint: lint-style lint-types lint-protos ## Check style, types and protos (make -k lint: run all three even if one fails)

lint-style: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

lint-types: setup
	$(PY) -m mypy $(TYPED)

# buf comes from npm. Without npm this check is skipped, but not in CI.
# The second module of buf.yaml, the google/rpc protos that ours import, is copied from the installed package.
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

release-protos: lint-protos ## Record the protos, to check later changes against them: part of a release
	$(BUF) build protos --exclude-source-info -o $(RELEASED)

protos-bundle: setup ## Pack the protos and everything they import, for clients in other languages
	@$(PY) scripts/protos_bundle.py

reference: setup ## Write docs/settings.md and docs/reference from the settings' declarations and the protos
	@$(PY) -m scripts.reference

clients: $(if $(NPM),build/node/.installed) $(if $(GO),build/bin/.go-clients) ## Fetch what the examples in other languages need

build/node/.installed: examples/node/package.json
	@mkdir -p build/node && cp $< build/node/
	@npm install --silent --no-fund --no-audit --no-package-lock --prefix build/node
	@touch $@

# Compile the example's dependencies here, so that they are in Go's caches when the tests run.
build/bin/.go-clients: examples/go/go.mod examples/go/go.sum
	@GOBIN=$(CURDIR)/build/bin go install $(PROTOC_GEN_GO)
	@GOBIN=$(CURDIR)/build/bin go install $(PROTOC_GEN_GO_GRPC)
	@cd examples/go && go build google.golang.org/grpc google.golang.org/grpc/credentials/insecure \
	    google.golang.org/genproto/googleapis/rpc/errdetails
	@touch $@

buf: $(if $(NPM),$(BUF_STAMP)) ## Fetch buf, the linter of the protos

$(BUF_STAMP):
	@npm install --silent --no-fund --no-audit --no-save --prefix build/npm @bufbuild/buf@$(BUF_VERSION)
	@$(BUF) --version >/dev/null && touch $@

bench-step: setup ## Time an engine step, and the share of the scheduler and the daemon
	@$(PY) -m benchmarks.step

bench-cache: setup ## Time the daemon's calls against a bare echo, and a page as the pool grows
	@$(PY) -m benchmarks.cache

bench-metrics: setup ## Time what metrics add to a step, and a scrape
	@$(PY) -m benchmarks.metrics

bench-tracing: setup ## Time what OpenTelemetry traces add to a request
	@$(PY) -m benchmarks.tracing

bench-kernels: setup ## Time every kernel on this machine's GPU against a plain copy
	@$(PY) -m benchmarks.kernels

bench-engine: setup ## Time the whole engine on this machine's CPU: throughput, ablations, cached prefixes
	@$(PY) -m benchmarks.engine

bench-recovery: setup ## Time what a SIGKILL of an engine or of the daemon costs, in seconds
	@$(PY) -m benchmarks.recovery

bench-tiers: setup ## Time first tokens of prompts that the pool, the host tier or the outer tier holds
	@$(PY) -m benchmarks.tiers

clean: ## Remove generated code, build products and caches (not .venv)
	@rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find protos \( -name '*_pb2.py' -o -name '*_pb2.pyi' -o -name '*_pb2_grpc.py' \) -delete
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
