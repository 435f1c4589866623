# Everything below runs in .venv, which is made on first use and rebuilt only when
# a pyproject.toml or constraints.txt change. Needs nothing but Python 3.10+ and make.

PYTHON ?= python3
ARGS   ?=
CASES  ?= 1000

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.stamp

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup demo bench test fuzz lint format docs clean

help: ## show this list
	@echo "usage: make TARGET [ARGS=\"...\"] [PYTHON=python3]"; echo
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 12

setup: $(STAMP) ## create .venv, install the package, its studies and development tools

$(STAMP): pyproject.toml studies/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "supportbasis needs Python 3.10 or newer; try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }; }
	@echo "installing supportbasis and its development tools into $(VENV) (a few minutes the first time)"
	@$(BIN)/python -m pip install -qq -c constraints.txt -e ".[dev]" -e "./studies[eval]"
	@touch $@

demo: $(STAMP) ## compare the methods on a small problem and write a report
	@$(BIN)/supportbasis demo $(ARGS)

bench: $(STAMP) ## time the methods against PyTorch's exact attention
	@$(BIN)/supportbasis bench $(ARGS)

test: $(STAMP) ## run the tests in two processes (ARGS="-k name" to choose, "-m 'not slow'" without statistics)
	@$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

fuzz: $(STAMP) ## random calls of every method, CASES=1000 (ARGS="--only bound --jobs 2 --resume")
	@$(BIN)/python tests/fuzz.py --cases $(CASES) $(ARGS)

lint: $(STAMP) ## ruff check, ruff format --check, mypy --strict, layers of imports
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache --no-logo

format: $(STAMP) ## apply ruff's formatting and safe fixes
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: $(STAMP) ## build docs/_build/html; warnings are errors
	@$(BIN)/sphinx-build -q -W --keep-going -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

clean: ## remove .venv, caches and everything built
	rm -rf $(VENV) build dist docs/_build supportbasis-out
	rm -rf .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find src tests docs studies -name __pycache__ -type d -prune -exec rm -rf {} +
