# Three commands do everything on a fresh machine with Python 3.11 and pip:
#     make chat    talk to the default model      make serve    serve it      make test    run every check
# Set-up runs once, in .venv, and again only if pyproject.toml or constraints.txt change.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The tests of a file stay together: they share what is slow to start. Files keep their order, so the short ones of
# tests/unit are last and all workers end together; by default files with few but long tests would be last. Some tests
# wait for processes, so there is one worker more than there are cores. torch computes in one thread for each: more
# would wait for each other.
WORKERS = $(shell $(PYTHON) -c 'import os; print(min(4, 1 + len(os.sched_getaffinity(0))))')
SPREAD = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
test test-machines: export OMP_NUM_THREADS ?= 1
PIP := $(BIN)/python -m pip --disable-pip-version-check

# With WEFT_NO_KERNELS=1 nothing is compiled and numpy computes, for machines without a C++ compiler.
ifneq ($(filter-out 0 false no off,$(WEFT_NO_KERNELS)),)
READY := $(VENV)/.runtime
PIP_DONE := $(VENV)/.runtime
export WEFT_KERNELS := numpy
else
READY := $(VENV)/.kernels
PIP_DONE := $(VENV)/.build-tools
endif
# Independent of each other: `make --jobs=2 setup` builds the kernels while pip installs the test tools. pip itself runs
# once at a time.
TESTABLE := $(VENV)/.dev $(READY)

.PHONY: help setup kernels chat serve test test-machines test-gpu test-sanitize test-clients test-agents test-browser screenshots test-schema lint docs reference charts clean
.DELETE_ON_ERROR:

help:
	@echo "make chat    set up if needed, then talk to the default model (no torch needed)"
	@echo "make serve   set up if needed, then serve the default model over HTTP, with the APIs of OpenAI, Anthropic and Ollama; ARGS='--port 9000'"
	@echo "make test    set up if needed, then run ruff, mypy and pytest"
	@echo "make test-machines   the tests that depend on the machine, as on one core with AVX2, then as on a processor without AVX"
	@echo "make test-schema   a long run of schemathesis and of the request fuzzer against the server; COUNT=200000"
	@echo "make test-gpu   the CUDA kernels and the engine on this machine's GPU; PYTHON=... with torch and pytest; installs nothing"
	@echo "make test-clients   widely used clients against the real server; writes docs/guide/clients.md"
	@echo "make test-agents   coding agents and client libraries complete their loops offline; writes docs/guide/clients.md; 3 GB, npm"
	@echo "make test-browser   the page in a real browser; writes docs/internals/testing.md; installs Debian's chromium if it can; SHORT=1 as in CI"
	@echo "make screenshots   take the pictures of the page for the guide anew, with the default model under load; 2 minutes"
	@echo "make test-sanitize   the kernel tests under AddressSanitizer and UBSan, the thread pool tests under ThreadSanitizer"
	@echo "make --jobs=2 setup   set up for the tests, and nothing else"
	@echo "make kernels   rebuild the C++ kernels after a change; WEFT_NO_KERNELS=1 make ... skips them"
	@echo "make lint    ruff and mypy alone"
	@echo "make docs    build the document site into build/site; make reference and make charts make its generated parts"
	@echo "make clean   remove the environment, build output and caches"
	@echo "PYTHON=...   the interpreter for .venv (now: $(PYTHON))"

chat: $(READY)
	@$(BIN)/weft chat $(ARGS)

# exec: Ctrl-C and SIGTERM reach the server itself, which ends its child processes.
serve: $(READY)
	@exec $(BIN)/weft serve $(ARGS)

setup: $(TESTABLE)

test: lint
	@echo "==> pytest"
	@$(BIN)/python -m pytest -q $(SPREAD)

# The tests that depend on the machine, run as if this machine were another one. Numbers depend on the kernel table
# and on the products of numpy and torch; engine steps depend on the number of cores; Ctrl-C depends on whether the
# parent ignores SIGINT (`trap`, as for a background job of a script). tests/kernels is not included: it always runs
# every table that the processor supports.
SAME_BITS := test_in_the_invariant_mode_a_token_has_the_same_bits_in_a_chunk_and_in_decode
BY_NUMBERS := engine/test_llm.py engine/test_llm_vectors.py parity/test_native_program.py parity/test_requests_in_blocks.py \
	parity/test_blocks_in_flow.py parity/test_text_models.py triton/test_interpreter.py \
	triton/test_gpu_attention.py::$(SAME_BITS) triton/test_tiers_attention.py::$(SAME_BITS)
# Skipped without AVX, where the real model takes six minutes.
REAL_MODEL := engine/test_real_model.py engine/test_real_model_drafts.py engine/test_real_model_learned.py \
	engine/test_real_model_predictions.py
BY_CORES_AND_SIGNALS := engine/test_cpu_company.py engine/test_commands.py engine/test_engine_client.py engine/test_serving.py \
	engine/test_wire_steps.py unit/test_cli.py unit/test_batch_lines.py unit/test_step_thread.py
ONE_CORE = $$($(BIN)/python -c 'import os; print(min(os.sched_getaffinity(0)))')
# The best table of a processor with AVX2, or without AVX. Features that numpy cannot switch off stay on, without a
# warning.
TABLE = $(or $(WEFT_KERNELS),$$($(BIN)/python -c \
	'from weft import _kernels as k; print([t for t in k.available() if t in ("avx2", "portable")][$(1)])'))
NO_AVX512 := X86_V4 AVX512_ICL AVX512_SPR

test-machines: $(TESTABLE)
	@echo "==> pytest, as on one core of a processor with AVX2, with a parent that ignores SIGINT"
	@trap '' INT; WEFT_KERNELS=$(call TABLE,0) OPENBLAS_CORETYPE=Haswell ATEN_CPU_CAPABILITY=avx2 NPY_DISABLE_CPU_FEATURES="$(NO_AVX512)" \
		taskset -c $(ONE_CORE) $(BIN)/python -m pytest -q $(addprefix tests/,$(BY_CORES_AND_SIGNALS) $(REAL_MODEL) $(BY_NUMBERS))
	@echo "==> pytest, as on a processor without AVX"
	@WEFT_KERNELS=$(call TABLE,-1) OPENBLAS_CORETYPE=Nehalem ATEN_CPU_CAPABILITY=default NPY_DISABLE_CPU_FEATURES="X86_V3 $(NO_AVX512)" \
		$(BIN)/python -m pytest -q $(SPREAD) $(addprefix tests/,$(BY_NUMBERS))

# The same checks as in CI, but for minutes instead of seconds.
test-schema: $(TESTABLE)
	@cd tests/server && PYTHONPATH=.. ../../$(BIN)/python schema_run.py --max-examples 1000
	@cd tests/server && PYTHONPATH=.. ../../$(BIN)/python fuzz_requests.py --count $(or $(COUNT),200000)

# For a machine with a GPU, with its own torch: the interpreter named by PYTHON needs torch, Triton, transformers and
# pytest. The kernel tests run on the GPU instead of in the Triton interpreter. They run one after the other.
test-gpu:
	@WEFT_TEST_DEVICE=cuda PYTHONPATH=src $(PYTHON) -m pytest -q -p no:cacheprovider tests/triton tests/gpu $(ARGS)

lint: $(TESTABLE)
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
	@echo "==> installing weft and its dependencies (about 150 MB; about a minute, silent unless something fails)"
	@WEFT_NO_KERNELS=1 $(PIP) install --quiet -c constraints.txt -e .
	@touch $@

# Builds the C++ kernels into the source tree, and again only if something under csrc changed.
kernels: $(VENV)/.kernels

$(VENV)/.build-tools: $(VENV)/.runtime
	@$(PIP) install --quiet -c constraints.txt nanobind cmake ninja
	@touch $@

$(VENV)/.kernels: $(VENV)/.build-tools CMakeLists.txt $(wildcard csrc/*/*.*)
	@echo "==> building the kernels (about a minute)"
	@$(CMAKE) -S . -B build/kernels $(CONFIGURE) -DCMAKE_BUILD_TYPE=Release
	@$(CMAKE) --build build/kernels -- --quiet
	@touch $@

# Without MAKEFLAGS: make passes its job server to recursive calls of make only, and ninja would report an error about it.
CMAKE = PATH="$(abspath $(BIN)):$$PATH" MAKEFLAGS= cmake
CONFIGURE = -G Ninja --log-level=WARNING -DPython_EXECUTABLE="$(abspath $(BIN))/python" \
	-Dnanobind_DIR="$$($(BIN)/python -m nanobind --cmake_dir)"

# The kernel tests with a build that detects out-of-bounds accesses and undefined behaviour; then the pool tests with
# race detection. The package is copied next to that build, so that the normal build stays unchanged. g++ only: the
# sanitizer must be loaded before Python. Leaks are not checked, because Python keeps memory until it ends. An
# editable install sends every import of weft to the source tree, past PYTHONPATH: sitecustomize removes that import
# hook.
SANITIZED := build/sanitize
PRELOAD = $(foreach library,libasan.so libstdc++.so,$(shell $(or $(filter-out c++,$(CXX)),g++) -print-file-name=$(library)))

test-sanitize: $(TESTABLE)
	@echo "==> building the kernels with AddressSanitizer and UndefinedBehaviorSanitizer"
	@mkdir -p $(SANITIZED)/src
	@cp -R src/weft $(SANITIZED)/src/ && rm -f $(SANITIZED)/src/weft/_kernels*.so
	@echo 'import sys; sys.meta_path[:] = [f for f in sys.meta_path if "ScikitBuild" not in type(f).__name__]' \
		> $(SANITIZED)/src/sitecustomize.py
	@$(CMAKE) -S . -B $(SANITIZED) $(CONFIGURE) -DCMAKE_BUILD_TYPE=None -DWEFT_SANITIZE=ON -DWEFT_OUTPUT="$(abspath $(SANITIZED))/src/weft"
	@$(CMAKE) --build $(SANITIZED) -- --quiet all pool_test pool_test_watched
	@echo "==> testing the thread pool, without and with ThreadSanitizer"
	@$(SANITIZED)/pool_test
	@TSAN_OPTIONS=halt_on_error=1 $(SANITIZED)/pool_test_watched
	@echo "==> testing the kernels with AddressSanitizer and UndefinedBehaviorSanitizer"
	@LD_PRELOAD="$(PRELOAD)" ASAN_OPTIONS=detect_leaks=0 PYTHONPATH="$(abspath $(SANITIZED))/src" \
		WEFT_SANITIZED="$(abspath $(SANITIZED))" $(BIN)/python -m pytest -q --capture=sys tests/kernels

# torch is the reference of the parity tests. It is installed first and pinned, so that no other package pulls a newer
# one. A CUDA build brings its own Triton; a CPU build brings none. Then this Triton is installed, and its interpreter
# runs the kernel tests.
$(VENV)/.dev: $(PIP_DONE)
	@echo "==> installing torch, the reference of the parity tests (the largest download; some minutes)"
	@$(PIP) install --quiet -c constraints.txt torch
	@test "$$(uname)" != Linux || $(PIP) show --quiet triton 2>/dev/null || { \
		echo "==> installing Triton; its interpreter runs the CUDA kernel tests (250 MB)"; \
		$(PIP) install --quiet 'triton==3.6.0'; }
	@echo "==> installing the other test tools (about a minute)"
	@WEFT_NO_KERNELS=1 $(PIP) install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

# A separate environment: the clients pin versions of openai and other packages that the tests do not.
$(VENV)-clients/.installed: pyproject.toml constraints-clients.txt
	@$(PYTHON) -m venv $(VENV)-clients
	@echo "==> installing the clients (about 1.1 GB; some minutes, silent unless something fails)"
	@$(VENV)-clients/bin/python -m pip --disable-pip-version-check install --quiet -c constraints-clients.txt -e . \
		httpx pytest openai 'litellm[mcp]' langchain-openai llm instructor 'lm_eval[api]' cohere safetensors \
		llama-index-core llama-index-embeddings-openai-like llama-index-llms-openai-like
	@touch $@

# The site, with warnings as errors, and nothing in it that a browser would load from another host.
docs: $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir build/site
	@$(BIN)/python tools/check_site.py build/site
	@echo "the site is in build/site; to read it: $(BIN)/python -m http.server --directory build/site 8001"

# docs/reference from the code (pages, dashboard, alert rules), and docs/charts from the figures in tools/make_charts.py. Both are committed.
reference: $(READY)
	@$(BIN)/python tools/make_reference.py
	@$(BIN)/python tools/make_monitoring.py

charts: $(VENV)/.docs
	@$(BIN)/python tools/make_charts.py

$(VENV)/.docs: $(READY)
	@echo "==> installing mkdocs, its theme and matplotlib (about 60 MB)"
	@WEFT_NO_KERNELS=1 $(PIP) install --quiet -c constraints.txt -e '.[docs]'
	@touch $@

test-clients: $(VENV)-clients/.installed
	@OPENBLAS_NUM_THREADS=1 $(VENV)-clients/bin/python tests/clients/record.py clients

# The agents and SDKs themselves. npm must be there; node and the agents come as packages with what they run, for Linux
# on x86-64.
AGENTS := build/agents
AGENTS_PIP = -m pip --disable-pip-version-check install --quiet --requirement
$(AGENTS)/.installed: $(wildcard tests/agents/*.json tests/agents/*.txt)
	@command -v npm > /dev/null || { echo "make test-agents needs npm (any version; it brings its own node)"; exit 1; }
	@mkdir -p $(AGENTS) && cp tests/agents/package.json tests/agents/package-lock.json $(AGENTS)/
	@echo "==> installing the agents from npm (1.4 GB)"
	@cd $(AGENTS) && npm ci --ignore-scripts --no-audit --no-fund --loglevel=error
	@echo "==> installing the SDKs and aider (0.8 GB; some minutes, silent unless something fails)"
	@$(PYTHON) -m venv $(AGENTS)/python && $(AGENTS)/python/bin/python $(AGENTS_PIP) tests/agents/requirements.txt
	@$(PYTHON) -m venv $(AGENTS)/aider && $(AGENTS)/aider/bin/python $(AGENTS_PIP) tests/agents/requirements-aider.txt
	@touch $@

test-agents: $(VENV)-clients/.installed $(AGENTS)/.installed
	@OPENBLAS_NUM_THREADS=1 $(VENV)-clients/bin/python tests/clients/record.py agents

# The page in Debian's chromium. Playwright is beside the test tools in a folder of its own: nothing else needs its 170 MB.
BROWSER := build/browser
$(BROWSER)/.installed: tests/browser/requirements.txt | $(TESTABLE)
	@echo "==> installing Playwright and axe (50 MB)"
	@rm -rf $(BROWSER) && $(PIP) install --quiet --target $(BROWSER) --requirement tests/browser/requirements.txt
	@touch $@

test-browser: $(TESTABLE) $(BROWSER)/.installed
	@chromium=$$(tests/browser/find_chromium.sh) && export CHROMIUM="$$chromium" PYTHONPATH=$(BROWSER) && \
		$(BIN)/python $(if $(SHORT),-m pytest -q -m "not long" tests/browser,tests/clients/record.py browser) $(ARGS)

screenshots: $(TESTABLE) $(BROWSER)/.installed
	@chromium=$$(tests/browser/find_chromium.sh) && export CHROMIUM="$$chromium" PYTHONPATH=$(BROWSER) && \
		$(BIN)/python tests/browser/screenshots.py

clean:
	rm -rf $(VENV) $(VENV)-clients dist build src/weft/*.so .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src benchmarks tests -name __pycache__ -type d -prune -exec rm -rf {} +
