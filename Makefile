# Fresh machine: `make demo` sets up and trains; `make test` sets up and tests. Needs Python 3.11, pip, make, git.
PYTHON ?= python3.11
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1
# Tests wait for processes of theirs now and then: one worker more than cores.
WORKERS ?= $(shell expr $$(nproc 2>/dev/null || echo 2) + 1)

.PHONY: demo test browser hosts drill proof check bench clean

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: .venv/ready
	$(BIN)/shoal train digits --layout dp2
	$(BIN)/shoal bench digits --layouts lone,dp2 --rounds 3

test: .venv/ready browser hosts
	$(BIN)/pytest --numprocesses $(WORKERS)

# The pages of `shoal report` are looked at in a browser; without one that test is skipped, with the reason.
browser:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || \
	{ [ "$$(id -u)" = 0 ] && timeout 300 apt-get update -qq && timeout 300 apt-get install -y -qq chromium; } \
	>/dev/null 2>&1 || echo "no chromium here (apt-get install chromium): pages are not looked at in a browser" >&2

# Real sshd, Slurm and mpirun, between network namespaces of this machine; what is missing is skipped, with the reason.
HOSTS := openssh-client openssh-server openmpi-bin slurm-wlm munge iproute2 nftables
hosts:
	@PATH="$$PATH:/usr/sbin:/sbin"; \
	for tool in ssh sshd mpirun slurmctld munged ip nft; do command -v $$tool || exit 1; done >/dev/null || \
	{ [ "$$(id -u)" = 0 ] && timeout 300 apt-get update -qq && \
	DEBIAN_FRONTEND=noninteractive timeout 300 apt-get install -y -qq --no-install-recommends $(HOSTS); } >/dev/null 2>&1 || \
	echo "not all of $(HOSTS) are here: tests that need them are skipped" >&2

# What takes longer on several hosts; and every fault, often: docs/faults.md is written anew.
drill: .venv/ready hosts
	SHOAL_DRILL=1 $(BIN)/pytest --timeout 600 tests/hosts
	SHOAL_DRILL=1 $(BIN)/pytest --timeout 600 -m drill tests/gloo tests/fake tests/pure
	$(BIN)/python benchmarks/drill.py

# Every schedule in every product of pp, dp, fsdp and tp, and every cell of the generality matrix.
proof: .venv/ready
	SHOAL_PROOF=1 $(BIN)/pytest --timeout 900 tests/gloo/test_pipeline.py -k every_schedule
	SHOAL_DRILL=1 $(BIN)/pytest --timeout 600 tests/gloo/test_pipeline_resume.py
	$(BIN)/python benchmarks/generality.py

check: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest tests/pure/test_floors.py

bench: .venv/ready
	for script in benchmarks/*.py; do $(BIN)/python $$script || exit 1; done

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
