# The one entry point for people and CI. Paths are relative, so a checkout may lie in a path with a
# space. Choose the interpreter with: make install PYTHON=python3.12

PYTHON ?= python3
PYTEST_ARGS ?=
# Processes that share the tests, with one thread each; 0 runs them in one process with torch's threads.
WORKERS ?= 2
PYTEST := .venv/bin/python -m pytest -n $(WORKERS) --dist worksteal
PY := .venv/bin/python
INSTALLED := .venv/.installed
TOOLS := ruff mypy clang-format pytest-xdist
PACKAGES := ./rkgb ./rotor ./rockmate
CHECKED := rkgb rotor rockmate ci benchmarks
CORE := $(wildcard rotor/csrc/*.hpp rotor/csrc/*.cpp)
SOURCES := $(wildcard */pyproject.toml) $(CORE) rotor/setup.py constraints.txt Makefile

.DEFAULT_GOAL := help
.PHONY: help install build format lint typecheck test test-rkgb test-rotor test-rockmate imports \
	versions check isolated readme demo planning step bench bench-smoke bench-paper \
	bench-solvers figures dist clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' Makefile

$(PY):
	$(PYTHON) -m venv .venv

# torch comes first and alone, so that the packages find it installed and never choose another build.
$(INSTALLED): $(SOURCES) | $(PY)
	$(PY) -m pip install -q -c constraints.txt torch
	$(PY) -m pip install -q -c constraints.txt $(TOOLS) -e './rkgb[test]' -e './rotor[test]' -e './rockmate[gurobi,highs,plot,test]'
	@touch $(INSTALLED)

install: $(INSTALLED) ## create .venv with the three packages (editable) and the tools
build: $(INSTALLED) ## rebuild the C++ core in place
	$(PY) -m pip install -q --no-deps -e ./rotor
format: $(INSTALLED) ## rewrite the sources in the project's format
	$(PY) -m ruff check --fix-only -q $(CHECKED)
	$(PY) -m ruff format $(CHECKED)
	.venv/bin/clang-format -i $(CORE)
lint: $(INSTALLED) ## style and common mistakes (ruff, clang-format)
	$(PY) -m ruff check $(CHECKED)
	$(PY) -m ruff format --check $(CHECKED)
	.venv/bin/clang-format --dry-run -Werror $(CORE)
typecheck: $(INSTALLED) ## types of the three packages (mypy --strict)
	$(PY) -m mypy
test: $(INSTALLED) ## every test
	$(PYTEST) $(PYTEST_ARGS)
test-rkgb: $(INSTALLED) ## tests of rkgb
	$(PYTEST) rkgb/tests $(PYTEST_ARGS)
test-rotor: $(INSTALLED) ## tests of rotor
	$(PYTEST) rotor/tests $(PYTEST_ARGS)
test-rockmate: $(INSTALLED) ## tests of rockmate
	$(PYTEST) rockmate/tests $(PYTEST_ARGS)
imports: $(INSTALLED) ## which package may import which, and what an import must not load
	$(PY) ci/check_imports.py
versions: $(INSTALLED) ## one version everywhere, exact pins between the packages
	$(PY) ci/check_versions.py
check: lint typecheck imports versions test ## all of the above: what CI runs
isolated: $(INSTALLED) ## each package alone, from its wheel, with only what it declares
	for package in $(PACKAGES); do ci/isolated_install.sh "$$package" || exit 1; done
readme: $(INSTALLED) ## run the Python code of the READMEs
	$(PY) ci/run_readme.py README.md rkgb/README.md rotor/README.md rockmate/README.md
demo: $(INSTALLED) ## train a GPT-2 and a ResNet plain and at half their memory, and compare
	$(PY) benchmarks/demo.py
planning: $(INSTALLED) ## time the phases of planning
	$(PY) benchmarks/planning.py
# A second checkout to measure in turn: make step AGAINST=../older
AGAINST ?=
step: $(INSTALLED) ## time steps, captures and planned extra time beside plain PyTorch
	$(PY) benchmarks/step.py $(if $(AGAINST),--against "$(AGAINST)") $(STEP_ARGS)
EXPERIMENTS := Performance Peers Solvingtime Options
bench-smoke: $(INSTALLED) ## every experiment, tiny, about a minute; fails on an unexpected failure
	rm -rf benchmarks/results/latest/smoke
	@failed=0; for e in $(EXPERIMENTS); do $(PY) benchmarks/$${e}_exp.py --smoke || failed=1; done; \
	$(PY) benchmarks/solvers.py --smoke || failed=1; \
	$(PY) benchmarks/visualize.py --results benchmarks/results/latest/smoke || failed=1; exit $$failed
bench: $(INSTALLED) ## every experiment at CPU sizes, under 40 minutes; continues where it was
	@failed=0; for e in $(EXPERIMENTS); do $(PY) benchmarks/$${e}_exp.py || failed=1; done; exit $$failed
bench-paper: $(INSTALLED) ## every experiment at the papers' sizes, on CUDA, for hours; continues
	@failed=0; for e in $(EXPERIMENTS); do $(PY) benchmarks/$${e}_exp.py --paper || failed=1; done; exit $$failed
bench-solvers: $(INSTALLED) ## every solver on the recorded instances, some minutes
	$(PY) benchmarks/solvers.py
figures: $(INSTALLED) ## draw what was measured, and put the tables into the READMEs
	$(PY) benchmarks/visualize.py
	$(PY) benchmarks/report.py
dist: $(INSTALLED) ## wheels of the three packages in dist/
	rm -rf dist */build
	$(PY) -m pip wheel -q --no-deps -w dist $(PACKAGES)
clean: ## remove .venv and everything built
	rm -rf .venv dist */build */src/*.egg-info */src/*/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
