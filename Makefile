# `make run`: one example from nothing. `make test`: linters and all tests.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
PROMPT = The most important invention of the nineteenth century was

.PHONY: run test lint clean

run: $(VENV)/run.stamp
	$(BIN)/python generate.py --kv_cache_quantization --prompt "$(PROMPT)" --max_new_tokens 100

# Waiting threads sleep: a test in each process has as many threads as there are cores.
test: lint
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n logical --maxprocesses 4 --dist worksteal

lint: $(VENV)/test.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

$(VENV)/run.stamp: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "error: $(PYTHON) is older than Python 3.11; make PYTHON=python3.11 run" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

$(VENV)/test.stamp: requirements-test.txt $(VENV)/run.stamp
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-test.txt
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
