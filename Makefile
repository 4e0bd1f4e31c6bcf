# One environment, .venv, for everything; it is set up in layers, each once (see the stamp files below).
#
#   make demo       run examples/demo.py; results in demo-output/
#   make test       the tests, without the slow ones
#   make test-all   all tests: what CI runs, with `make lint`
#   make lint       ruff, mypy, pyright
#   make gpu        on a machine with a GPU: is it right there, and what does it cost; needs PYTHON with torch and pytest
#
# PYTHON=python3.12 chooses the interpreter, VENV=path another environment, PYTEST_ARGS="-k ring" goes to pytest, and
# VENV_FLAGS=--system-site-packages lets a new environment see the torch that is installed already.

PYTHON ?= python3
VENV ?= .venv
VENV_FLAGS ?=
PYTEST_ARGS ?=
GPU_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# One thread a process: on few cores, threads that wait for each other cost more than they bring.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist loadfile
REQUIREMENTS := pyproject.toml constraints.txt constraints-nodeps.txt

.PHONY: help demo test test-slow test-all lint ruff mypy pyright typing-links gpu clean
.DEFAULT_GOAL := help

help:
	@sed -n '/^#   make/s/^#   //p' Makefile

demo: $(VENV)/.stamp-demo
	@echo "== running examples/demo.py"
	$(BIN)/python examples/demo.py
	@echo "== results are in demo-output/"

test: $(VENV)/.stamp-test
	@echo "== tests, without the slow ones"
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

# pytest exits with 5 where nothing was selected, as under PYTEST_ARGS="-k ring": no failure here.
test-slow: $(VENV)/.stamp-test
	@echo "== slow tests"
	$(PYTEST) -m slow $(PYTEST_ARGS) || test $$? -eq 5

test-all: test test-slow

lint: ruff mypy pyright

ruff: $(VENV)/.stamp-lint
	@echo "== ruff"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

mypy: $(VENV)/.stamp-lint typing-links
	@echo "== mypy"
	$(BIN)/mypy

pyright: $(VENV)/.stamp-lint typing-links
	@echo "== pyright"
	$(BIN)/pyright --project . --pythonpath $(BIN)/python

# The type checkers see the package as it is installed: one folder spangraph with passes and kernels inside.
typing-links:
	@rm -rf build/typing
	@mkdir -p build/typing/spangraph
	@cd build/typing/spangraph && ln -s ../../../spangraph/*.py ../../../spangraph/*.md ../../../spangraph/py.typed ../../../passes ../../../kernels .

# With PYTHON itself, whose torch is built for the GPU: that of the environment is not.
gpu:
	$(PYTHON) benchmarks/gpu_suite.py $(GPU_ARGS)

clean:
	rm -rf $(VENV) build dist demo-output *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# Set-up, in layers: the environment, what the demo needs, what the tests need on top, what the linters need on top.
# pip's progress is left visible, and a layer is done again only when the requirements change.

$(VENV)/.stamp-venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "spangraph needs Python 3.11 or newer; '$(PYTHON)' is missing or older. Try: make PYTHON=python3.11 ..."; \
		exit 1; }
	@echo "== creating $(VENV)"
	@$(PYTHON) -m venv $(VENV_FLAGS) $(VENV) || { \
		echo "'$(PYTHON) -m venv' failed (on Debian and Ubuntu it comes with the package python3-venv)."; \
		exit 1; }
	@touch $@

$(VENV)/.stamp-demo: $(VENV)/.stamp-venv $(REQUIREMENTS)
	@echo "== installing spangraph and what the demo needs (torch is the large one)"
	$(PIP) install -c constraints.txt -e ".[demo]"
	@touch $@

$(VENV)/.stamp-test: $(VENV)/.stamp-venv $(REQUIREMENTS)
	@echo "== installing spangraph and what the tests need: torch, pytest, triton and the model packages (some minutes)"
	$(PIP) install -c constraints.txt -e ".[demo,models,test]"
	$(PIP) install --no-deps -r constraints-nodeps.txt
	@# Beside a CPU build of torch these shared objects do not load; the Python part of torchaudio does without them.
	rm -f $(VENV)/lib/python*/site-packages/torchaudio/lib/*.so
	@touch $(VENV)/.stamp-demo $@

$(VENV)/.stamp-lint: $(VENV)/.stamp-test
	@echo "== installing the linters"
	$(PIP) install -c constraints.txt -e ".[lint]"
	@touch $@
