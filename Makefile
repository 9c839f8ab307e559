# make train   set up, then train a small GPT on real text in parallel and show what it did
# make test    set up, then run the whole test suite
# make lint    what CI checks besides: formatting, types, import rules, shell, spelling
# make archive the environment as one file, for the nodes of a cluster (scripts/*.sbatch)
#
# A GPU's torch instead of the CPU's: make .venv TORCH="torch==2.13.0 --index-url <your index>"
# (docs/install.md). Anything after ARGS= goes to train.py: make train ARGS="trainer.steps=50"

PYTHON ?= python3
TORCH ?= torch==2.13.0
ARGS ?=
BIN := .venv/bin
SHELL_FILES := $(shell git ls-files '*.sh' '*.sbatch' .ci/run .ci/images 2>/dev/null)

.PHONY: help train test lint format clean archive
help:
	@sed -n 's/^# \{0,1\}//p' Makefile

train: .venv
	$(BIN)/python train.py $(ARGS)

test: dev
	$(BIN)/python -m pytest --numprocesses logical --maxprocesses 4 --dist loadfile

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

# torch first: with it installed, nothing that follows takes another build of it
.venv/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || \
		{ echo "Python 3.10 to 3.13 is needed: make PYTHON=python3.11 ..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || \
		{ echo "python3 cannot make virtual environments: install its venv package" \
		       "(Debian: apt-get install python3-venv)"; rm -rf .venv; exit 1; }
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

# what tests and linters need, and all that is optional. A GPU's torch brings a Triton of its own;
# beside a CPU's its kernels are tested in its interpreter
.venv/dev: .venv/ready
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/python -m pip install --quiet triton || \
		echo "no Triton for this machine: its kernels are not tested"
	@touch $@

# its own path does not matter: Python finds it from the program that is started
archive: .venv
	tar --create --file=venv.tar .venv

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
