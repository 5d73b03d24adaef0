# Two commands do everything on a fresh machine: `make sweep` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
PORT ?= 5000
export MOE_FRONTIER_HOME ?= $(CURDIR)/runs
INSTALL := $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --constraint constraints.txt --editable
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --no-loadscope-reorder
export MLFLOW_DISABLE_TELEMETRY ?= true
export RAY_USAGE_STATS_ENABLED ?= 0
unexport PYTHONDONTWRITEBYTECODE  # each process of the tests would compile all of them anew

.PHONY: setup sweep test test-smoke test-all test-machines check bench docs ui cluster-local cluster-local-stop clean

setup: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	@echo "installing into .venv: about 7 GB, some minutes"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt uv
	$(INSTALL) '.[dev]' || $(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'  # a mirror in pip.conf
	touch $@

sweep: setup  ## train the arms of the sweep `quickstart`, write its frontier
	$(BIN)/python jobs/pareto_sweep.py

test: setup  ## the logic, on real parts; docs/trust.md describes the three lanes
	$(PYTEST)

test-smoke: setup  ## one of each kind that takes long: kills, a lost node, a submitted job; wants Chromium
	MOE_FRONTIER_ALL_PARTS=1 $(PYTEST) -m 'smoke and not slow'

test-all: setup  ## everything but the next, and GPU tests where there is one; wants Chromium and Postgres
	MOE_FRONTIER_ALL_PARTS=1 $(PYTEST) -m 'not machines'

test-machines: setup  ## faults of whole machines, which are namespaces; writes docs/faults.md; wants root
	$(BIN)/python -m pytest -m machines --capture no tests/test_faults.py

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

cluster-local: setup  ## a head and two more nodes on this machine, with a token; `cluster-local-stop` ends them
	cluster/local.sh start

cluster-local-stop:
	cluster/local.sh stop

bench: setup
	$(INSTALL) '.[dev,bench]'
	$(BIN)/python bench/layers.py
	$(BIN)/python bench/data.py
	$(BIN)/python bench/stopping.py
	$(BIN)/python bench/control_plane.py

docs: setup  ## these pages as a site, with a reference that is made from the code: site/index.html
	$(INSTALL) '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html; with search: $(BIN)/python -m http.server --directory site --bind 127.0.0.1 8000"

ui: setup  ## MLflow on http://127.0.0.1:5000, or on another PORT; prints the links to runs and models
	@$(BIN)/python jobs/report.py --serve --port $(PORT)

clean:  ## what can be made again; not ./runs
	rm -rf .venv build site *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
