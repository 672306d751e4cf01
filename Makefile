# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
# The release that CI runs. Any torch >= 2.11 works: make TORCH='torch==2.11.0' demo
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin

.PHONY: setup demo docs test test-all lint style prose types suite dist clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	@echo "installing $(TORCH), then multiattn[dev] (a few minutes the first time)"
	$(BIN)/pip install --disable-pip-version-check $(TORCH)
	$(BIN)/pip install --disable-pip-version-check --editable '.[dev]'
	touch $@

demo: setup
	$(BIN)/python -m bench demo --jobs $(JOBS) --out out

# The tables and pictures first; then the site, in which a dead link is an error.
docs: setup
	$(BIN)/python -m bench docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build
	@echo "written: out/docs/index.html; to search in it: $(BIN)/python -m http.server --directory out/docs"

lint: style types

style: setup prose
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The pages and the docstrings, read as a strict editor would; their word lists are in pyproject.toml and tests/prose.py.
prose: setup
	$(BIN)/typos *.md docs multiattn
	$(BIN)/python tests/prose.py

types: setup
	$(BIN)/mypy
	$(BIN)/mypy tests/typed_calls.py

suite: setup
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -q

# mypy has work for one core alone: it runs beside the tests, which find out if a page is not current, too.
test: style
	$(MAKE) --jobs 2 types suite
	$(BIN)/python -m bench record --check --sample --jobs $(JOBS)

# Everything that make test runs, and what takes too long for every change: each point of the ladders, each rule
# compiled for each arch, the slowest gradients.
test-all: test
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -q -m nightly
	$(BIN)/python -m bench record --check --jobs $(JOBS)

# What a package index would get, built in an environment of its own and checked.
dist: setup
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*

clean:
	rm -rf $(VENV) out build dist *.egg-info
