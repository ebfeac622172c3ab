# The one entry point for people and CI. Paths are relative, so a checkout may lie in a path with a
# space. Choose the interpreter with: make install PYTHON=python3.12

PYTHON ?= python3
PYTEST_ARGS ?=
# Processes that share the tests, with one thread each; 0 runs them in one process with torch's threads.
WORKERS ?= 2
PYTEST := .venv/bin/python -m pytest -n $(WORKERS) --dist worksteal
PY := .venv/bin/python
BENCH := PYTHONPATH=benchmarks .venv/bin/python
INSTALLED := .venv/.installed
TOOLS := ruff mypy clang-format pytest-xdist
PACKAGES := ./rkgb ./rotor ./rockmate
CHECKED := rkgb rotor rockmate ci benchmarks examples test_support
CORE := $(wildcard rotor/csrc/*.hpp rotor/csrc/*.cpp)
SOURCES := $(wildcard */pyproject.toml) $(CORE) rotor/setup.py constraints.txt Makefile

.DEFAULT_GOAL := help
.PHONY: help install build format lint typecheck test test-all test-nightly test-changed fuzz test-rkgb test-rotor test-rockmate imports \
	versions check isolated readme outputs docs demo planning step bench bench-smoke bench-offload bench-split bench-paper \
	bench-public bench-solvers gpu gpu-wheels gpu-paper other-torch test-torch test-cuda-rules figures core-wheels dist clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' Makefile

$(PY):
	$(PYTHON) -m venv .venv

# torch comes first and alone, so that the packages find it installed and never choose another build.
$(INSTALLED): $(SOURCES) | $(PY)
	$(PY) -m pip install -c constraints.txt torch
	$(PY) -m pip install -c constraints.txt $(TOOLS) -e './rkgb[test]' -e './rotor[test]' -e './rockmate[gurobi,highs,plot,test]'
	$(PY) ci/mend_torchvision.py
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
typecheck: $(INSTALLED) ## types of the three packages and of test_support (mypy --strict)
	$(PY) -m mypy
test: $(INSTALLED) ## every test but the slow ones
	$(PYTEST) -m "not slow and not nightly" $(PYTEST_ARGS)
test-all: $(INSTALLED) ## what CI runs: slow tests too, but one cell of each large matrix
	$(PYTEST) -m "not nightly" $(PYTEST_ARGS)
test-nightly: $(INSTALLED) ## every test
	$(PYTEST) $(PYTEST_ARGS)
# What differs from a commit: make test-changed SINCE=HEAD~3
SINCE ?= main
test-changed: $(INSTALLED) ## the tests of what differs from main, slow ones left out
	@tests=$$($(PY) ci/changed_tests.py --since $(SINCE)) && \
	if [ -z "$$tests" ]; then echo "no test of what changed"; \
	else $(PYTEST) -m "not slow and not nightly" $$tests $(PYTEST_ARGS); fi
# Another torch in front of everything else that .venv has: make test-torch TORCH=2.15.0. Most builds on
# PyPI are for CUDA: some gigabytes, which run on any CPU.
TORCH ?= 2.11.0
OTHER_VENV := .venv-torch-$(TORCH)
TORCH_TESTS := rkgb/tests/bytes rkgb/tests/bits/test_recorded_bits.py rkgb/tests/graphs/test_compare.py \
	rkgb/tests/refusals/test_private_names.py \
	$(addprefix rkgb/tests/compiled/test_,compiled.py compiled_sizes.py formulas.py) \
	$(addprefix rockmate/tests/,compiled/test_compiled_pieces.py bits/test_kernels_as_in_the_forward.py \
	files/test_fingerprint.py bits/test_any_valid_plan.py bits/models/test_models_as_they_come.py) rotor/tests/device/test_device.py
$(OTHER_VENV)/.installed: Makefile | $(INSTALLED)
	rm -rf $(OTHER_VENV)
	$(PYTHON) -m venv $(OTHER_VENV)
	$(OTHER_VENV)/bin/python -m pip install -q --no-compile --no-cache-dir torch==$(TORCH)
	$(OTHER_VENV)/bin/python ci/site_behind.py .venv
	@touch $@
other-torch: $(OTHER_VENV)/.installed ## a second environment with another torch: TORCH=2.15.0; the oldest by default
# The tests of bits and bytes once more, with the CPU counting as CUDA does.
CUDA_RULES_TESTS := rkgb/tests/bytes/test_memory.py \
	$(addprefix rkgb/tests/bits/test_,recorded_bits.py overwrite.py program.py) \
	$(addprefix rockmate/tests/,bits/test_training_bits.py bits/test_any_valid_plan.py \
	gradients/test_arriving_gradients.py gradients/test_shared_uses.py writes/test_what_a_forward_leaves.py) \
	$(addprefix rotor/tests/module/test_,checkpointable.py checkpointable_backward.py)
test-cuda-rules: $(INSTALLED) ## bits and bytes once more, as if the CPU were a CUDA device
	$(PYTEST) -q --cuda-rules -m "not slow and not nightly" $(CUDA_RULES_TESTS) $(PYTEST_ARGS)
test-torch: other-torch ## bits, bytes and capture with another torch: TORCH=2.15.0; the oldest by default
	$(OTHER_VENV)/bin/python -m pytest -q -n $(WORKERS) --dist worksteal -m "not slow and not nightly" $(TORCH_TESTS) $(PYTEST_ARGS)
# Random networks and loops, plain and planned: what differs is shrunk and printed as a script.
MINUTES ?= 3
SEED ?= 0
fuzz: $(INSTALLED) ## look for differences from plain PyTorch: make fuzz MINUTES=10 SEED=1000
	PYTHONPATH=test_support $(PY) -m fuzz --minutes $(MINUTES) --seed $(SEED) $(FUZZ_ARGS)
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
check: lint typecheck imports versions test-all ## all of the above: what CI runs
isolated: $(INSTALLED) ## each package alone, from its wheel, with only what it declares
	for package in $(PACKAGES); do \
	ci/isolated_install.sh "$$package" -m "not slow and not nightly" $(PYTEST_ARGS) || exit 1; done
PAGES := README.md $(PACKAGES:%=%/README.md) $(wildcard docs/*.md docs/how-to/*.md)
readme: $(INSTALLED) ## run the code of the READMEs and of the documentation, and compare what it prints
	$(PY) ci/run_readme.py $(PAGES)
outputs: $(INSTALLED) ## put into READMEs and documentation what their code prints
	$(PY) ci/run_readme.py --write $(PAGES)
docs: $(INSTALLED) ## build the documentation into site/
	$(PY) -m pip install -q mkdocs-material 'mkdocstrings[python]'
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build -q
demo: $(INSTALLED) ## train a GPT-2 and a ResNet plain and in less memory, and compare
	$(PY) benchmarks/demo.py
planning: $(INSTALLED) ## time the phases of planning
	$(BENCH) -m planning.phases
# A second checkout to measure in turn: make step AGAINST=../older
AGAINST ?=
step: $(INSTALLED) ## time steps, captures and planned extra time beside plain PyTorch
	$(PY) benchmarks/step.py $(if $(AGAINST),--against "$(AGAINST)") $(STEP_ARGS)
EXPERIMENTS := Performance Peers Solvingtime Options
SMOKE := benchmarks/split.py $(EXPERIMENTS:%=benchmarks/%_exp.py) '-m planning.solvers' benchmarks/offload.py
bench-smoke: $(INSTALLED) ## every experiment, tiny, two at once, about a minute; fails on an unexpected failure
	rm -rf benchmarks/results/latest/smoke
	@failed=0; printf '%s\n' $(SMOKE) | PYTHONPATH=benchmarks OMP_NUM_THREADS=1 \
	xargs -P 2 -L 1 sh -c '$(PY) "$$@" --smoke || exit 1' sh || failed=1; \
	$(PY) benchmarks/visualize.py --results benchmarks/results/latest/smoke || failed=1; exit $$failed
bench: $(INSTALLED) ## every experiment at CPU sizes, under 40 minutes; continues where it was
	@failed=0; for e in $(EXPERIMENTS); do $(PY) benchmarks/$${e}_exp.py || failed=1; done; exit $$failed
# Files go to the folder for temporary files, or another one: make bench-offload FOLDER=/a/fast/disk
FOLDER ?=
bench-offload: $(INSTALLED) ## moves to the host and to files, planned and by hand, some minutes
	$(PY) benchmarks/offload.py $(if $(FOLDER),--folder "$(FOLDER)")
bench-split: $(INSTALLED) ## budgets below the largest operation, in pieces of rows and by hand, some 30 minutes
	$(PY) benchmarks/split.py
bench-paper: $(INSTALLED) ## every experiment at the papers' sizes, on CUDA, for hours; continues
	@failed=0; for e in $(EXPERIMENTS); do $(PY) benchmarks/$${e}_exp.py --paper || failed=1; done; exit $$failed
# On a machine that has torch already, and no network: its own Python, and wheels from a folder.
GPU_PYTHON ?= python3
WHEELS ?= wheels
CALL ?=
gpu: ## what holds on the GPU here: make gpu CALL=1, then CALL=2; each under nine minutes, nothing is installed
	$(GPU_PYTHON) benchmarks/gpu_probe.py $(if $(wildcard $(WHEELS)/*.whl),--wheels "$(WHEELS)") $(if $(CALL),--call $(CALL)) $(GPU_ARGS)
BROUGHT := ortools protobuf immutabledict absl-py graphviz expecttest hypothesis sortedcontainers \
	pandas python-dateutil six psutil tqdm
gpu-wheels: | $(PY) ## the wheels that a machine with torch and without a network needs, into wheels/
	$(PY) -m pip download -q --no-deps -c constraints.txt -d "$(WHEELS)" $(BROUGHT)
	$(PY) -m pip wheel -q --no-deps -w "$(WHEELS)" $(PACKAGES)
gpu-paper: $(INSTALLED) ## nine minutes of bench-paper on the GPU here; continues where it was
	$(PY) benchmarks/paper_piece.py $(GPU_ARGS)
bench-solvers: $(INSTALLED) ## every solver on the recorded instances, some minutes
	$(BENCH) -m planning.solvers
# Instances of Checkmate, Moccasin and DTR, cloned at this command, or from clones: make bench-public FROM=../clones
FROM ?=
bench-public: $(INSTALLED) ## plans of other people's instances, beside their figures, some 30 minutes
	$(PY) -m pip install -q checkpoint_schedules
	$(PY) benchmarks/public.py $(if $(FROM),--from "$(FROM)") $(PUBLIC_ARGS)
figures: $(INSTALLED) ## draw what was measured, and put the tables into the READMEs
	$(PY) benchmarks/visualize.py
	$(BENCH) -m reports.report
# The core for each Python that is at hand; for all of them and portable: cibuildwheel (RELEASING.md).
PYTHONS ?= python3.11 python3.12 python3.13
core-wheels: ## the core of rotor built and tried with each Python that is at hand
	ci/core_wheels.sh $(PYTHONS)
dist: $(INSTALLED) ## wheels and sdists of the three packages in dist/, checked by twine
	$(PY) -m pip install -q -c constraints.txt build twine
	rm -rf dist */build
	for package in $(PACKAGES); do $(PY) -m build -o dist "$$package" >/dev/null || exit 1; done
	$(PY) -m twine check --strict dist/*
clean: ## remove .venv and everything built
	rm -rf .venv .venv-torch-* dist site */build */src/*.egg-info */src/*/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
