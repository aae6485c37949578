# The commands of the project. Each one sets up what it needs: the only requirements are make and Python 3.11.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
JOBS ?= 2
# XLA's thread pool, OpenBLAS's, those of scikit-learn's trees and the test workers would fight for the same cores. The
# tests of a file share compiled functions, and so a worker.
PYTEST := NPROC=1 OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses=$(JOBS) --dist=loadfile

.PHONY: setup demo test test-slow test-pythons check-wheel docs lint format bench-peers clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

demo: setup
	$(BIN)/jaxcal demo --force

# The examples of the docstrings run in 32 bits, as in a reader's session.
test: setup
	JAX_ENABLE_X64=1 $(PYTEST) -m "not slow" tests
	JAX_ENABLE_X64=0 $(PYTEST) -m "not slow and not any_precision and not contract_in_32_bits"

# With the emitters that users have, and their optimizations in the processes of tests: conftest.py sets what is not set.
test-slow: export XLA_FLAGS =
test-slow: export JAX_DISABLE_MOST_OPTIMIZATIONS = 0
test-slow: setup
	JAX_ENABLE_X64=1 $(PYTEST) -m slow
	JAX_ENABLE_X64=0 $(PYTEST) -m "not slow and contract_in_32_bits" tests

# On every Python that is supported and there, each with an environment of its own.
test-pythons:
	@for version in 3.11 3.12 3.13 3.14; do \
		if python$$version --version 2> /dev/null; then \
			$(MAKE) test PYTHON=python$$version VENV=.venv-$$version || exit 1; \
		else \
			echo "Python $$version is not there: skipped"; \
		fi; \
	done

# The published wheel is well formed. In an empty environment it runs the demo and the first example of the README.
check-wheel:
	rm -rf dist && $(PYTHON) -m venv dist/env
	dist/env/bin/python -m pip install --quiet build twine
	dist/env/bin/python -m build --quiet --outdir dist
	dist/env/bin/twine check --strict dist/*.whl dist/*.tar.gz
	dist/env/bin/python -m pip install --quiet "$$(echo dist/*.whl)[cli]"
	cd dist && env/bin/jaxcal demo
	awk '/^```python$$/ {on = 1; next} on && /^```$$/ {exit} on' README.md > dist/example.py
	cd dist && env/bin/python example.py

# The site, in build/site: open its index.html. A link that leads nowhere is an error.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The environment of the peers that benchmarks/speed measures jaxcal against.
bench-peers: .venv-peers/.ready

.venv-peers/.ready: benchmarks/speed/requirements-peers.txt
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --upgrade pip
	.venv-peers/bin/python -m pip install --quiet --requirement $<
	touch $@

clean:
	rm -rf .venv .venv-3.* .venv-peers build dist .pytest_cache .ruff_cache .hypothesis .jax_cache jaxcal-demo
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
