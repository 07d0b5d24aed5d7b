# The whole vocabulary: `make up`, `make test`, `make lint`, `make bench`. ARGS are passed on: make up ARGS="--port 0".

VENV := .venv
BIN := $(VENV)/bin
# The first interpreter that is new enough; PYTHON=... chooses another.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
ARGS ?=
# Tests that compute share two processes. The others start servers, kill them and watch the clock: they mostly wait, and
# run beside them in two more processes, which the machine prefers (`nice`) because their answers are timed.
COMPUTING_TESTS := tests/architecture tests/gateway/api/schemas tests/kernels tests/shared \
	$(addprefix tests/ops/,bench demo_model deploy quantize simulation sizing) \
	$(addprefix tests/gpu_worker/,core engine execution layers matrix models quantization speculative start structured_output text)
PYTEST := $(BIN)/python -m pytest
# In order: what the tests of a folder share, such as a running system, is stopped behind them.
TWO_PROCESSES := -n 2 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help up test cpu-kernels computing-tests waiting-tests chaos clients lint docs lock mutants bench bench-engine bench-served bench-spec

help:
	@echo "make up      start the whole system on this machine (ARGS=\"--port 0 --model DIR\"; see headrace up --help)"
	@echo "make test    run the default tests (ARGS=\"-k scheduler\" for some, ARGS=\"-m slow\" for the long ones, ARGS=--cov for"
	@echo "             coverage; with ARGS all in one process)"
	@echo "make lint    ruff, mypy and the import contracts"
	@echo "make docs    the documentation as a site in build/docs (ARGS=serve shows it while you write)"
	@echo "make lock    write the versions and hashes that images and units install, from PyPI, to ops/deploy/locked"
	@echo "make clients run the client libraries against the whole system; installs them beside (ARGS=\"-k openai\")"
	@echo "make chaos   kill, freeze and cut off parts of the system under load, and count what broke (ARGS=\"--quick\")"
	@echo "make mutants  change the code in one place at a time and see whether a test fails (ARGS=\"--help\")"
	@echo "make bench   drive the real system and print what it does (ARGS=\"--help\")"
	@echo "make bench-spec  speculative decoding beside plain decoding, on this machine's CPU (ARGS=\"--help\")"
	@echo "make bench-engine  our engine beside llama.cpp, vLLM and transformers on this machine's CPU (ARGS=\"--help\")"
	@echo "make bench-served  the whole system beside llama.cpp's and vLLM's servers, over HTTP, on this machine's CPU"

up: $(VENV)/.embedded
	@exec $(BIN)/headrace up $(ARGS)

# The tests start hundreds of processes: none of them should have to compile this code again.
test computing-tests waiting-tests: export PYTHONDONTWRITEBYTECODE =

ifeq ($(strip $(ARGS)),)
test: cpu-kernels
	@$(MAKE) --no-print-directory -k -j 2 computing-tests waiting-tests

computing-tests:
	@nice $(PYTEST) $(TWO_PROCESSES) $(COMPUTING_TESTS)

# What they print is shown in one piece at their end.
waiting-tests:
	@$(PYTEST) $(TWO_PROCESSES) $(COMPUTING_TESTS:%=--ignore=%) >$(VENV)/waiting-tests.log 2>&1; status=$$?; \
	echo; cat $(VENV)/waiting-tests.log; exit $$status
else
test: $(VENV)/.test
	@$(PYTEST) $(ARGS)
endif

cpu-kernels: $(VENV)/.test
	@echo "compiling the CPU kernels, once"
	@$(BIN)/python -c "from kernels.cpu_library import compile_cpu_library; compile_cpu_library(lambda *_: None)"

clients: $(VENV)/.test
	@exec $(PYTEST) -m clients tests/clients $(ARGS)

chaos: $(VENV)/.test
	@exec $(BIN)/python -m ops.chaos $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs $(or $(ARGS),build --quiet) --config-file ops/mkdocs.yml
	@$(if $(ARGS),,echo "build/docs is made; make docs ARGS=serve shows it with its search")

lock: $(VENV)/.dev
	@exec $(BIN)/python -m ops.deploy.lock

mutants: $(VENV)/.dev
	@exec $(BIN)/python -m ops.mutation $(ARGS)

bench: $(VENV)/.test
	@exec $(BIN)/python -m ops.bench.gateway $(ARGS)

bench-engine: $(VENV)/.test
	@exec $(BIN)/python -m ops.bench.engine_compare $(ARGS)

bench-served: $(VENV)/.test
	@exec $(BIN)/python -m ops.bench.served $(ARGS)

bench-spec: $(VENV)/.test
	@exec $(BIN)/python -m ops.bench.spec $(ARGS)

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Headrace needs Python 3.11 or newer; name one with PYTHON=/path/to/python" >&2; exit 1; }
	@echo "Making $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)

# One stamp for each set of extras, and for those that it contains: pip runs again only when pyproject.toml has changed.
IN_docs := embedded
IN_test := embedded
IN_dev := test embedded
$(VENV)/.embedded $(VENV)/.test $(VENV)/.dev $(VENV)/.docs: $(VENV)/.%: pyproject.toml | $(BIN)/python
	@echo "Installing headrace[$*] into $(VENV): some minutes the first time, most of them for PyTorch; log: $(VENV)/pip.log"
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet --progress-bar off --log $(VENV)/pip.log -e '.[$*]'
	@touch $@ $(addprefix $(VENV)/.,$(IN_$*))
