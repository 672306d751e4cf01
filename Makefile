# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
# The release that CI runs. Any torch >= 2.11 works: make TORCH='torch==2.11.0' demo
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin

.PHONY: setup demo test test-all lint clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	@echo "installing $(TORCH), then multiattn[dev] (a few minutes the first time)"
	$(BIN)/pip install --disable-pip-version-check $(TORCH)
	$(BIN)/pip install --disable-pip-version-check --editable '.[dev]'
	touch $@

demo: setup
	$(BIN)/python -m bench demo --jobs $(JOBS) --out out

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -q
	$(BIN)/python -m bench docs --check
	$(BIN)/python -m bench record --check --sample --jobs $(JOBS)

# Everything that make test runs, and what takes too long for every change: each point of the ladders, each rule
# compiled for each arch, the slowest gradients.
test-all: test
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -q -m nightly
	$(BIN)/python -m bench record --check --jobs $(JOBS)

clean:
	rm -rf $(VENV) out build *.egg-info
