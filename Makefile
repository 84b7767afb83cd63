# `make demo` and `make test` install what they need into .venv first.
# PYTHON=python3 make ... uses an existing environment as it is, and installs nothing.
ifdef PYTHON
  PY := $(PYTHON)
  READY :=
else
  PY := .venv/bin/python
  READY := .venv/ready
endif

.PHONY: help install demo test lint bench test-gpu reproduce
help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

install: $(READY)  ## packages into .venv (Python 3.11 or 3.12)

# The first Python of a fitting version that runs: a name on the path may be a shim of a version manager that does not.
.venv/ready: requirements.txt requirements-dev.txt
	@test -x .venv/bin/python || for python in python3.12 python3.11 python3; do \
	  if $$python -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; then \
	    $$python -m venv .venv; break; fi; done; \
	test -x .venv/bin/python || { echo "make: no Python 3.11 or 3.12 found; install one, or name an environment with PYTHON=..."; exit 1; }
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@

demo: $(READY)  ## record, replay and compare three backends in a few minutes, without a GPU as with one
	$(PY) scripts/demo.py

test: $(READY)  ## all tests; those that need a GPU say so and are skipped without one
	$(PY) -m pytest -q $$($(PY) -c 'import xdist' 2>/dev/null && printf %s '-n2 --dist=loadfile')

test-gpu: $(READY)  ## the tests that need a GPU
	$(PY) -m pytest -q tests/gpu

lint: $(READY)  ## style
	$(PY) -m ruff check .

DATASET ?= mini
reproduce: $(READY)  ## the small run whose scores run away, and other arms on its batches, on a GPU; DATASET=FOLDER
	$(PY) scripts/reproduce_mini.py --dataset $(DATASET)

bench: $(READY)  ## attention kernels beside torch's, on a GPU
	$(PY) scripts/bench_attention.py --out results/bench_attention.json
