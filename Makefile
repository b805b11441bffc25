# make demo   install into .venv and replay the shipped cases on the CPU
# make test   everything that a machine without a GPU can test
# make check  lint and types
# make mutants  how many planted faults generated cases find, and after how many cases
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NATIVE := $(shell find native -type f)

.PHONY: demo test check mutants clean

demo: $(VENV)/.installed
	$(BIN)/isolate doctor
	$(BIN)/isolate run --expected cases/two-slots.json cases/reports/*.json cases/found/*.json

test: $(VENV)/.installed
	$(BIN)/pytest -q -n 2 -m "not gpu"

check: $(VENV)/.installed
	$(BIN)/ruff check isolate tests tools benchmarks
	$(BIN)/ruff format --check isolate tests tools benchmarks
	$(BIN)/mypy

mutants: $(VENV)/.installed
	PYTHONPATH=. $(BIN)/python -m tests.mutants.score

# Installed anew when a native source or a dependency changes; Python sources are used in place.
$(VENV)/.installed: pyproject.toml $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build
