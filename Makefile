# make train      install, then train a small GPT on real text in parallel and report on it
# make test       install, then run all tests
# make test-exhaustive  run long tests of what the other tests cover in part
# make test-fast  run the tests without the slow ones, in under two minutes
# make test-properties  draw 5,000 new examples for each test of random examples
# make test-gpu-model  run training steps on simulated CUDA tensors; installs a CUDA build of torch (5 GB)
# make layer-kernels   count the kernels that a GPU starts per layer, without a GPU
# make gpu        check correctness and measure speed on the GPU of this machine, in half an hour
# make gpu-wheels collect what `make gpu` needs for a machine that has torch and no package index
# make lint       check formatting, types, import rules, shell scripts and spelling
# make docs       build the documentation into site/; a broken link is an error
# make wheel      build a wheel into dist/
# make archive    pack the environment into one file for the nodes of a cluster (scripts/*.sbatch)
#
# For a torch with GPU support: make .venv TORCH="torch==2.13.0 --index-url <your index>"
# (docs/install.md). Settings are handed to frontier-llm train: make train trainer.steps=50
# run.dir=runs/a; so is ARGS="...", for what the shell would interpret

PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_CUDA ?= torch==2.12.1
WHEELS_PYTHON ?= 3.12
ARGS ?=
BIN := .venv/bin
SHELL_FILES := $(shell git ls-files '*.sh' '*.sbatch' '*.pbs' .ci/run .ci/nightly .ci/tests .ci/gpu_model .ci/images .ci/wheel 2>/dev/null)
# Each process takes the next file, in the order of tests/conftest.py: the longest files first. Some
# tests mostly wait, so there is one process more than there are cores.
PROCESSES := $(shell $(PYTHON) -c 'import os; print(min(4, 1 + len(os.sched_getaffinity(0))))')
# Bytecode is written even where the environment turns that off: each of the many processes that
# tests start would compile the package again.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder

.PHONY: help train test test-fast test-exhaustive test-properties test-gpu-model layer-kernels gpu gpu-wheels lint format docs wheel archive clean
help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

# make takes words such as run.dir=runs/a as variables of its own: they are settings of the run
train: .venv
	$(BIN)/frontier-llm train $(ARGS) $(filter-out ARGS=% PYTHON=% TORCH=%,$(MAKEOVERRIDES))

test: dev
	$(PYTEST)

test-fast: dev
	$(PYTEST) -m "not slow"

test-exhaustive: dev
	$(PYTEST) --exhaustive -m exhaustive

test-properties: dev
	$(PYTEST) --exhaustive -m hypothesis --hypothesis-profile=thorough

# The stand-in for CUDA takes the place of the driver, so this also runs where there is a GPU.
FAKE_CUDA = LD_LIBRARY_PATH=build/fake_cuda LD_PRELOAD=$(CURDIR)/build/fake_cuda/fake_cuda.so .venv-cuda/bin/python

test-gpu-model: .venv-cuda
	.venv-cuda/bin/python -m tests.gpu_model.build_stub build/fake_cuda
	$(FAKE_CUDA) -m pytest tests/gpu_model --numprocesses logical --maxprocesses 4

layer-kernels: .venv-cuda
	.venv-cuda/bin/python -m tests.gpu_model.build_stub build/fake_cuda
	$(FAKE_CUDA) -m tests.gpu_model.layer_kernels

.venv-cuda: pyproject.toml
	$(PYTHON) -m venv .venv-cuda
	.venv-cuda/bin/python -m pip install --quiet $(TORCH_CUDA)
	.venv-cuda/bin/python -m pip install --quiet --editable . hypothesis pytest pytest-xdist
	touch .venv-cuda

gpu: $(if $(wildcard wheels),.venv-gpu,dev)
	$(if $(wildcard wheels),.venv-gpu/bin/python,$(BIN)/python) -m benchmarks.gpu $(ARGS)

# The versions are those of this environment, which fit each other.
gpu-wheels: dev
	mkdir -p build
	$(BIN)/python -m pip freeze --exclude-editable >build/constraints.txt
	$(BIN)/python -m pip wheel --quiet --wheel-dir wheels --no-deps antlr4-python3-runtime==4.9.3
	$(BIN)/python -m pip download --quiet --dest wheels --find-links wheels --only-binary=:all: \
		--python-version $(WHEELS_PYTHON) --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 \
		--platform manylinux2014_x86_64 --no-deps \
		--constraint build/constraints.txt --requirement benchmarks/gpu_requirements.txt
	du -sh wheels

.venv-gpu: wheels
	$(PYTHON) -m venv --system-site-packages .venv-gpu
	.venv-gpu/bin/python -m pip install --quiet --no-index --find-links wheels --no-deps wheels/*.whl
	touch .venv-gpu

lint: dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/shellcheck $(SHELL_FILES)
	$(BIN)/hadolint Dockerfile.rocm Dockerfile.cuda

format: dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: .venv dev
.venv: .venv/ready
dev: .venv/dev

# torch comes first, so that the next line does not install another build of it
.venv/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || \
		{ echo "Python 3.10 to 3.13 is needed: make PYTHON=python3.11 ..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || \
		{ echo "python3 cannot create virtual environments: install its venv package" \
		       "(Debian: apt-get install python3-venv)"; rm -rf .venv; exit 1; }
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

# The tools of tests, linters and documentation, and all optional dependencies. A torch with GPU
# support includes Triton; without a GPU its kernels are tested in its interpreter.
.venv/dev: .venv/ready
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/python -m pip install --quiet triton || \
		echo "no Triton for this machine: its kernels are not tested"
	@touch $@

docs: dev
	$(BIN)/mkdocs build --strict

wheel: .venv
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

# The environment also works at another path: Python locates it relative to the started program.
archive: .venv
	tar --create --file=venv.tar .venv

clean:
	rm -rf .venv .venv-cuda .venv-gpu wheels .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info build dist site
