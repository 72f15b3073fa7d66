# Every target sets up what it needs; nothing is installed by hand.
PYTHON ?= python3
BIN := .venv/bin
# Tests and the demo start many processes, which would compile every module again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-slow lint format docs bench clean

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt scripts/setup
	PYTHON="$(PYTHON)" scripts/setup
	touch $@

# Programs for tests, outside this folder; tests that miss one are skipped, and say so.
.venv/.programs: .venv/.ready scripts/postgres scripts/browser scripts/proxies
	scripts/postgres >/dev/null || true
	scripts/browser >/dev/null || true
	scripts/proxies >/dev/null || true
	touch $@

demo: setup
	$(BIN)/sfumato demo

# Three at a time keep two cores busy: tests of the service wait for processes.
test: .venv/.programs
	$(BIN)/python -m pytest -n 3 --dist worksteal

test-slow: .venv/.programs
	$(BIN)/python -m pytest -n 2 --dist worksteal -m slow

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: .venv/.programs .venv-peers/.ready
	$(BIN)/python -m benchmarks
	$(BIN)/python scripts/generate_docs

.venv-peers/.ready: scripts/peers
	PYTHON="$(PYTHON)" scripts/peers

clean:
	rm -rf .venv .venv-flower .venv-peers .venv-pfl .venv-release .venv-tff dist site out .mypy_cache .ruff_cache .pytest_cache .hypothesis
