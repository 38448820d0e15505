# Headrace on a machine that has Python 3.11+ (with venv), make and git:
#
#   make serve    environment, install, fetch the embedded model, start the server
#   make chat     the same, and talk to the model in the terminal
#   make test     environment, install, lint, and the quick tests, which need only Python and a compiler
#   make test-integration  the rest: browser, emulator, nginx, npm, Prometheus, Ray, agents, faults, many seeds and shapes
#   make check    about a minute: lint, types, unit tests without servers or downloads
#   make test-changed  the tests of the modules that differ from the main branch (BASE=main)
#   make storm    minutes of load and faults
#   make test-builds  the tests with the AVX2 build of the C++ library alone (BUILDS="avx2 avx512 bf16")
#   make soak     an hour of everything at once (HOURS=8)
#
# Flags for the server: make serve ARGS="--port 9000 --model path/to/model". Another Python: make PYTHON=python3.12 test

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=

BIN := $(VENV)/bin
# Wheels only: a missing one fails at once with its name, instead of asking for a compiler.
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
QUIET := $(if $(CI),-qq)
INSTALL := $(PIP) install $(QUIET) --only-binary :all: --constraint requirements.lock

# Without compiled files every start would compile all modules anew: a second for a server, minutes for the tests.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help serve chat test test-integration test-changed test-builds check lint format storm soak chromium compiler emulator images nginx npm prometheus systemd templates lock clean

help:
	@sed -n 's/^#   //p' Makefile

serve: $(VENV)/.runtime
	@$(BIN)/headrace pull $(ARGS)
	@exec $(BIN)/headrace serve $(ARGS)

chat: $(VENV)/.runtime
	@exec $(BIN)/headrace chat $(ARGS)

# Three workers for two cores: one that waits for a server leaves its core to the third.
WORKERS := --numprocesses 3 --dist loadfile --no-loadscope-reorder --durations 15 --durations-min 5

test: compiler lint
	$(BIN)/headrace pull
	$(BIN)/pytest $(WORKERS) -m "not slow and not storm" --ignore tests/integration

test-integration: $(VENV)/.dev chromium compiler emulator nginx npm prometheus systemd templates
	$(BIN)/headrace pull
	$(BIN)/pytest $(WORKERS) -m "slow and not storm"

# Tests that take moments and start no process.
UNIT := "not seconds and not slow and not storm"

BASE ?= main
test-changed: $(VENV)/.dev
	tests=$$($(BIN)/python -m lint.changed $(BASE)) && if [ -n "$$tests" ]; \
	  then $(BIN)/pytest --numprocesses 2 -m $(UNIT) $$tests || [ $$? = 5 ]; \
	  else echo "Nothing that differs from $(BASE) has tests"; fi

# As an older processor runs them.
BUILDS ?= avx2
test-builds: $(VENV)/.dev
	bash .ci/with_builds "$(BUILDS)" $(MAKE) test test-integration

UNITS := $(addprefix tests/,engine protocol app lint test_tables_of_contents.py) \
  $(addprefix tests/gpu/,test_host.py test_kv_cache.py runner/test_rows.py sampling/test_masks.py checkpoint/test_gguf_file.py)
check: lint
	$(BIN)/pytest --numprocesses 2 -m $(UNIT) $(UNITS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m lint.words
	$(BIN)/python -m lint.rooms

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Minutes of load and faults; not part of `make test`.
storm: $(VENV)/.dev images nginx
	$(BIN)/pytest -m storm --timeout 900 --hypothesis-profile explored

# Whether a server is after hours what it was.
HOURS ?= 1
soak: $(VENV)/.dev
	$(BIN)/headrace pull
	$(BIN)/python -m loadtest.soak --hours $(HOURS)

# Pins what the environment holds now. Run it in a fresh environment after changing pyproject.toml.
lock: $(VENV)/.dev
	@sed -n '/^#/p' requirements.lock > requirements.lock.new
	@$(PIP) freeze --all --exclude-editable \
	  | sed 's/+[a-z0-9.]*$$//' \
	  | grep -ivE '^(pip|wheel|headrace|instructor|triton|nvidia[-_].*|cuda[-_].*)==' \
	  | tr '[:upper:]_' '[:lower:]-' | LC_ALL=C sort >> requirements.lock.new
	@mv requirements.lock.new requirements.lock

clean:
	rm -rf $(VENV) tests/integration/npm/node_modules build *.egg-info gpu/cpu/*.so app/http/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# ------------------------------------------------------------------------------------------- the environment
# A stamp is as new as the last install, so a second run starts at once. setuptools is installed first and the build
# not isolated, so that the pinned one builds the package. Compat: a plain path, which goes before a folder of the
# package's name wherever Python is started.

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Headrace needs Python 3.11 or newer; $(PYTHON) is not. Name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv --without-pip $(VENV) || \
	  { rm -rf $(VENV); echo "$(PYTHON) has no venv module. On Debian: apt install python3-venv" >&2; exit 1; }

# A step of its own: an interrupted one is repeated, although python is there.
$(VENV)/.pip: | $(BIN)/python
	@$(BIN)/python -m ensurepip --upgrade --default-pip >/dev/null || \
	  { rm -rf $(VENV); echo "$(PYTHON) has no ensurepip. On Debian: apt install python3-venv" >&2; exit 1; }
	@touch $@

$(VENV)/.runtime: pyproject.toml requirements.lock setup.py $(wildcard gpu/cpu/csrc/* app/http/csrc/*) | $(VENV)/.pip
	@echo "Installing into $(VENV) (torch is large: minutes the first time)"
	@$(INSTALL) setuptools
	@$(INSTALL) --no-build-isolation --config-settings editable_mode=compat --editable '.[torch]'
	@case "$$(uname -m)" in x86_64|aarch64) ;; *) exit ;; esac; ls gpu/cpu/*.so >/dev/null 2>&1 || { \
	  if command -v c++ >/dev/null; \
	  then echo "The C++ library did not compile; $(BIN)/python setup.py build_ext --inplace says why."; \
	  else echo "No C++ compiler was found. On Debian: apt install g++"; fi; \
	  echo "Models run on torch alone, several times slower."; } >&2
	@touch $@

# instructor bounds jiter below what the SDKs ask for, needlessly. Triton comes with CUDA builds of torch; elsewhere the
# kernels run in its interpreter.
$(VENV)/.dev: $(VENV)/.runtime
	@echo "Installing what the tests need"
	@$(INSTALL) --no-build-isolation --config-settings editable_mode=compat --editable '.[torch,dev,otel,load,ray]'
	@$(INSTALL) --no-deps instructor==1.17.0
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(INSTALL) triton==3.9.0
	@touch $@

# $(call from_debian,COMMAND,PACKAGES) installs what the tests need from the distribution, where COMMAND is missing.
define from_debian
	@PATH="$$PATH:/usr/sbin:/usr/local/sbin"; command -v $(1) >/dev/null && exit; \
	  if [ "$$(id -u)" = 0 ]; then root=; else root="sudo -n"; fi; \
	  echo "Installing $(2) for the tests"; \
	  { command -v apt-get && $$root true && \
	    $$root apt-get update -qq && $$root apt-get install -qq --no-install-recommends $(2); } >/dev/null || \
	  { echo "The tests need $(2), and it could not be installed. On Debian: apt install $(2)" >&2; exit 1; }
endef

# The proxy that the server's tests put before it.
nginx:
	$(call from_debian,nginx,nginx-light)

# What judges the shipped units, and knows the groups of system calls that they allow. It is not started.
systemd:
	$(call from_debian,systemd-analyze,systemd)

# What the library of gpu/cpu is built with: the tests hold it to its word.
compiler:
	$(call from_debian,c++,g++)

# What builds it for 64-bit ARM, and runs that.
emulator:
	$(call from_debian,aarch64-linux-gnu-g++,g++-aarch64-linux-gnu)
	$(call from_debian,qemu-aarch64,qemu-user)

# What the tests read the metrics with. Debian's package would start a server of its own, for good, so its two programs are
# taken out of it.
prometheus: | $(BIN)/python
	@PATH="$(abspath $(BIN)):$$PATH"; command -v promtool >/dev/null && command -v prometheus >/dev/null && exit; \
	  if [ "$$(id -u)" = 0 ]; then root=; else root="sudo -n"; fi; folder=$$(mktemp -d); \
	  echo "Fetching prometheus for the tests"; \
	  { command -v apt-get && $$root apt-get update -qq && (cd $$folder && apt-get download -qq -o APT::Sandbox::User=root prometheus) && \
	    dpkg-deb --extract $$folder/*.deb $$folder && mv $$folder/usr/bin/prom* $(BIN); } >/dev/null; \
	  status=$$?; rm -r $$folder; [ $$status = 0 ] || \
	  { echo "The tests need prometheus and promtool, and they could not be fetched. Put them on the PATH" >&2; exit 1; }

# The chat templates of many models, for the tests of syntaxes.
templates: $(VENV)/templates/.unpacked

$(VENV)/templates/.unpacked: | $(BIN)/python
	@echo "Fetching chat templates for the tests"
	@folder=$$(mktemp -d) && mkdir -p $(@D) && \
	  $(PIP) download -qq --no-deps --no-binary :all: --dest $$folder llama-cpp-python==0.3.36 && \
	  tar -xzf $$folder/*.tar.gz -C $(@D) --strip-components 5 --wildcards '*/vendor/llama.cpp/models/templates/*.jinja'; \
	  status=$$?; rm -r $$folder; [ $$status = 0 ] || \
	  { echo "The tests need the source archive of llama-cpp-python 0.3.36, and it could not be fetched" >&2; exit 1; }
	@touch $@

# What builds the container image without Docker.
images:
	$(call from_debian,buildah,buildah)
	$(call from_debian,mmdebstrap,mmdebstrap)

# What the tests open the pages with.
chromium:
	$(call from_debian,chromium,chromium)

# The clients from npm that the server's tests drive, and Node from the distribution, where they are missing.
npm: tests/integration/npm/node_modules/.installed

tests/integration/npm/node_modules/.installed: tests/integration/npm/package.json tests/integration/npm/package-lock.json
	$(call from_debian,npm,nodejs npm)
	@echo "Installing the clients from npm"
	@cd tests/integration/npm && npm ci --ignore-scripts --no-audit --no-fund --loglevel error
	@touch $@
