# Fresh machine: `make demo` sets up and trains; `make test` sets up and tests. Needs Python 3.11, pip, make, git.
PYTHON ?= python3.11
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1

.PHONY: demo test check bench clean

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: .venv/ready
	$(BIN)/shoal train digits --layout dp2

test: .venv/ready
	$(BIN)/pytest

check: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest tests/pure/test_floors.py

bench: .venv/ready
	for script in benchmarks/*.py; do $(BIN)/python $$script || exit 1; done

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
