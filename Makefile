# Two commands on a fresh machine: `make demo` and `make test`. Each creates .venv when it is missing.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-fast lint format clean

$(BIN)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@

demo: $(BIN)/.installed
	$(BIN)/replayssm-eval kl

# Two workers; a file stays on one, so that its fixtures are made once.
test: $(BIN)/.installed
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-fast: $(BIN)/.installed
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not interpreter"

lint: $(BIN)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(BIN)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv runs build *.egg-info
