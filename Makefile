# Two commands do everything on a fresh machine: `make sweep` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
export MOE_FRONTIER_HOME ?= $(CURDIR)/runs
TWO_AT_ONCE := --numprocesses 2 --dist loadfile  # a file's fixtures are made once
export MLFLOW_DISABLE_TELEMETRY ?= true
export RAY_USAGE_STATS_ENABLED ?= 0

.PHONY: setup sweep test test-all check bench ui cluster-local cluster-local-stop clean

setup: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	@echo "installing into .venv: about 7 GB, some minutes"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

sweep: setup  ## train the arms of the sweep `quickstart`, write its frontier
	$(BIN)/python jobs/pareto_sweep.py

test: setup
	$(BIN)/python -m pytest $(TWO_AT_ONCE)

test-all: setup  ## slow tests too, and those for a GPU where there is one
	$(BIN)/python -m pytest $(TWO_AT_ONCE) -m 'slow or not slow'

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

cluster-local: setup  ## a head and two more nodes on this machine, with a token; `cluster-local-stop` ends them
	cluster/local.sh start

cluster-local-stop:
	cluster/local.sh stop

bench: setup
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,bench]'
	$(BIN)/python bench/layers.py
	$(BIN)/python bench/data.py
	$(BIN)/python bench/stopping.py
	$(BIN)/python bench/control_plane.py

ui: setup  ## MLflow on http://127.0.0.1:5000
	$(BIN)/mlflow server --backend-store-uri sqlite:///$(MOE_FRONTIER_HOME)/mlflow.db --host 127.0.0.1 --port 5000

clean:  ## what can be made again; not ./runs
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
