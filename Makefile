# Two commands do everything: `make demo` and `make test`. Both make .venv first.
#
#   PYTHON=python3.12 make test        another interpreter (3.11 to 3.13)
#   TORCH_INDEX=URL   make test        take torch from another pip index, for example
#                                      https://download.pytorch.org/whl/cpu
PYTHON ?= python3
TORCH_INDEX ?=
JOBS ?= auto
# Tests run side by side; OpenMP threads of several processes on few cores wait for each other.
export OMP_NUM_THREADS ?= 1
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-full test-gpu lint types clean

demo: $(STAMP)
	$(BIN)/moequant demo

test: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) -m "not full"

test-full: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS)

# GPU_OPTIONS='--only sm90-*' and others: CONTRIBUTING.md.
test-gpu: $(STAMP)
	$(BIN)/python tests/gpu_checks/run.py $(GPU_OPTIONS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The mapped packages (cli, kernels, recipes) have their real names in the wheel only.
types: $(STAMP)
	rm -rf build && mkdir build
	$(BIN)/pip wheel -q --no-deps --no-build-isolation -w build/wheel . 2>build/wheel.log || { cat build/wheel.log; exit 1; }
	$(BIN)/python -m zipfile -e build/wheel/*.whl build/typed
	cd build/typed && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p moequant

# torch goes first and alone: anything else would pull its default build along.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade -c constraints.txt pip setuptools wheel
	$(BIN)/pip install -q -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(BIN)/pip install -q -c constraints.txt --no-build-isolation --group dev -e .
	# Beside the packages: a test compares with one file of it, and transformers would import it.
	$(BIN)/pip install -q -c constraints.txt --no-deps --target $(VENV)/sources torchao
	touch $@

clean:
	rm -rf $(VENV) build .mypy_cache .pytest_cache .ruff_cache
