# make demo        measure and edit SmolLM2-135M on bundled text, and write demo/report.html
# make test        the fast suite        make test-all    the slow tests too, on the real model
# make bench       every benchmark       make notebooks   run every notebook
# make lint        ruff, mypy and the order of imports
# make clean       remove what the others made
#
# Each one does its own set-up in .venv. Variables:
#   PYTHON    the interpreter that makes .venv (3.11 or newer; default python3)
#   PIP_ARGS  more arguments for pip, such as an index with CPU builds of torch (see CONTRIBUTING.md)
#   ARGS      more arguments for the command itself: make test ARGS="-k scale -x"

PYTHON ?= python3
PIP_ARGS ?=
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) --constraint constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all bench notebooks lint clean

help:
	@sed -e '/^$$/q' -e 's/^# \{0,1\}//' Makefile

# A stamp is written only when its step has ended well, so an interrupted one is done again.
$(VENV)/.created:
	@command -v "$(PYTHON)" >/dev/null || { \
	  echo "There is no '$(PYTHON)' here. Cure: install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3" >&2; exit 2; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "lens_geometry needs Python 3.11 or newer; '$(PYTHON)' is $$("$(PYTHON)" -V 2>&1). Cure: make PYTHON=python3.11" >&2; exit 2; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot make virtual environments. Cure: apt install python3-venv (Debian, Ubuntu), or name another: make PYTHON=/path/to/python3" >&2; exit 2; }
	rm -rf $(VENV)
	"$(PYTHON)" -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml constraints.txt
	$(PIP) --editable .
	@touch $@

$(VENV)/.installed-%: $(VENV)/.installed
	$(PIP) --editable ".[$*]"
	@touch $@

.PRECIOUS: $(VENV)/.installed-%

demo: $(VENV)/.installed
	$(BIN)/lens-geometry report --model smollm2-135m --out demo $(ARGS)
	@echo "The report is at $(CURDIR)/demo/report.html"

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n auto $(ARGS)

test-all: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n auto -m "not gpu or gpu" $(ARGS)

bench: $(VENV)/.installed
	@set -e; for file in benchmarks/*.py; do \
	  test -e "$$file" || { echo "there are no benchmarks" >&2; exit 2; }; \
	  echo "== $$file"; $(BIN)/python "$$file" $(ARGS); done

notebooks: $(VENV)/.installed-notebooks
	@set -e; for file in notebooks/*.ipynb; do \
	  test -e "$$file" || { echo "there are no notebooks" >&2; exit 2; }; \
	  echo "== $$file"; $(BIN)/jupyter execute --timeout=1800 "$$file" $(ARGS); done

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) .venv-tl4 demo build dist *.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find lens_geometry tests benchmarks scripts -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
