# Three commands do everything on a fresh machine with Python 3.11 and pip:
#   make chat    talk to the default model      make serve    serve it      make test    run every check
# Set-up happens once, in .venv, and again only when pyproject.toml or constraints.txt change.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: help kernels chat serve test test-clients test-schema lint clean
.DELETE_ON_ERROR:

help:
	@echo "make chat    set up what is missing and talk to the default model (no torch needed)"
	@echo "make serve   set up what is missing and serve the OpenAI API with the default model; ARGS='--port 9000'"
	@echo "make test    set up what is missing and run ruff, mypy and pytest"
	@echo "make test-schema   a long run of schemathesis and of the request fuzzer against the server; COUNT=200000"
	@echo "make test-clients   the clients people use against the real server; writes docs/clients.md"
	@echo "make kernels   build the C++ kernels again after a change"
	@echo "make lint    the first two of those alone"
	@echo "make clean   remove the environment, build output and caches"
	@echo "PYTHON=...   the interpreter to build .venv with (now: $(PYTHON))"

chat: $(VENV)/.kernels
	@$(BIN)/weft chat $(ARGS)

# exec: Ctrl-C and SIGTERM go to the server itself, which ends what it started.
serve: $(VENV)/.kernels
	@exec $(BIN)/weft serve $(ARGS)

test: lint
	@echo "==> pytest"
	@$(BIN)/python -m pytest -q

# What CI does in seconds, for minutes.
test-schema: $(VENV)/.dev
	@cd tests/server && ../../$(BIN)/python schema_run.py --max-examples 1000
	@cd tests/server && ../../$(BIN)/python fuzz_requests.py --count $(or $(COUNT),200000)

lint: $(VENV)/.dev
	@echo "==> ruff check"
	@$(BIN)/ruff check .
	@echo "==> ruff format --check"
	@$(BIN)/ruff format --check .
	@echo "==> mypy"
	@$(BIN)/mypy

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(0 if sys.version_info >= (3, 11) else f"weft needs Python 3.11 or newer, and $(PYTHON) is {v}. Name another: make PYTHON=python3.12 ...")'
	@echo "==> creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.runtime: $(VENV)/.created pyproject.toml constraints.txt
	@echo "==> installing weft and what it runs on (about 150 MB; a minute or so, silent unless something is wrong)"
	@WEFT_NO_KERNELS=1 $(PIP) install --quiet -c constraints.txt -e . nanobind cmake ninja
	@touch $@

# The C++ kernels, built into the source tree; again only when something under csrc changed.
kernels: $(VENV)/.kernels

$(VENV)/.kernels: $(VENV)/.runtime CMakeLists.txt $(wildcard csrc/*)
	@echo "==> building the kernels (half a minute)"
	@PATH="$(abspath $(BIN)):$$PATH" cmake -S . -B build/kernels -G Ninja --log-level=WARNING -DCMAKE_BUILD_TYPE=Release \
		-DPython_EXECUTABLE="$(abspath $(BIN))/python" -Dnanobind_DIR="$$($(BIN)/python -m nanobind --cmake_dir)"
	@PATH="$(abspath $(BIN)):$$PATH" cmake --build build/kernels -- --quiet
	@touch $@

# torch is the reference of the parity tests; it goes in first and pinned, so that no other package can pull a newer one.
$(VENV)/.dev: $(VENV)/.kernels
	@echo "==> installing torch, the reference of the parity tests (the largest download; some minutes)"
	@$(PIP) install --quiet -c constraints.txt torch
	@echo "==> installing the other test tools (a minute or so)"
	@WEFT_NO_KERNELS=1 $(PIP) install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

# An environment of its own: the clients pin versions of openai and others that the tests do not.
$(VENV)-clients/.installed: pyproject.toml constraints-clients.txt
	@$(PYTHON) -m venv $(VENV)-clients
	@echo "==> installing the clients (about 1.1 GB; some minutes, silent unless something is wrong)"
	@$(VENV)-clients/bin/python -m pip --disable-pip-version-check install --quiet -c constraints-clients.txt -e . \
		httpx pytest openai 'litellm[mcp]' langchain-openai llm instructor 'lm_eval[api]'
	@touch $@

test-clients: $(VENV)-clients/.installed
	@OPENBLAS_NUM_THREADS=1 $(VENV)-clients/bin/python tests/clients/record.py

clean:
	rm -rf $(VENV) $(VENV)-clients dist build src/weft/*.so .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
