# `make demo` and `make test` work from a fresh clone: the first run sets up .venv, a few minutes.
# Variables: PYTHON (3.11 or newer), ARGS (passed on to pytest, the demo or the benchmarks),
# N (calls of `make misuse`; 10000), TORCH (version for `make try-wheel`), HYPOTHESIS_PROFILE (ci, dev or thorough, see tests/conftest.py).
# On Linux the default torch wheel brings CUDA's libraries; pip's own settings (PIP_INDEX_URL,
# PIP_FIND_LINKS) choose another, such as PyTorch's CPU-only build.

PYTHON ?= python3
export HYPOTHESIS_PROFILE ?= ci
# Every worker of pytest and each process that a test starts would compile the same files again.
unexport PYTHONDONTWRITEBYTECODE
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet

# The libraries that the DSL has beside those of $(VENV), with another assembler, in a folder of their own.
OTHER := cu13
OTHER_FOLDER := $(VENV)/$(OTHER)
OTHER_STAMP := $(OTHER_FOLDER)/.stamp
MUTMUT_STAMP := $(VENV)/.mutmut-stamp

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test test-assemblers test-gpu mutants emulate-all fuzz misuse flex-tests lint format \
    docs bench wheel try-wheel hub clean distclean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

setup: $(STAMP)  ## make .venv with everything in it; the targets below do so by themselves

# torch comes first, at its pinned version: with none there, the package's open range would be
# answered with the newest build.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit( \
	    "attnkit needs Python 3.11 or newer, this is " + sys.version.split()[0] + \
	    ": try make PYTHON=python3.12")'
	@echo "setup: $(VENV), 1 of 3: virtual environment"
	@$(PYTHON) -m venv $(VENV)
	@echo "setup: $(VENV), 2 of 3: torch"
	@$(PIP) install --constraint constraints.txt torch
	@echo "setup: $(VENV), 3 of 3: attnkit and its tools"
	@$(PIP) install --constraint constraints.txt --editable '.[demo,docs,lint,plot,test]'
	@touch $@

demo: $(STAMP)  ## train a small model on packed documents
	$(BIN)/python examples/packed_documents.py $(ARGS)

test: $(STAMP)  ## the tests that need no GPU, repeatable
	$(BIN)/python -m pytest -m "not gpu and not exhaustive" --numprocesses=2 --dist=worksteal $(ARGS)

# Tests of machine code are in tests/templates, which is collected in a third of the time of all tests.
test-assemblers: $(OTHER_STAMP)  ## the kernels that `test` leaves out; a sample of machine code by CUDA 13
	$(BIN)/python -m pytest -m "exhaustive and not gpu" --numprocesses=2 --dist=worksteal $(ARGS)
	PYTHONPATH=$(OTHER_FOLDER) $(BIN)/python -m pytest -m "assembled and not gpu" \
	    --dsl-libraries=$(OTHER) --numprocesses=2 --dist=worksteal tests/templates $(ARGS)

$(OTHER_STAMP): $(STAMP)
	@echo "setup: $(OTHER_FOLDER), the DSL's libraries for CUDA 13"
	@rm -rf $(OTHER_FOLDER)
	@$(PIP) install --no-deps --target $(OTHER_FOLDER) $(addsuffix \
	    ==$(shell sed -n 's/^nvidia-cutlass-dsl==//p' constraints.txt), \
	    $(addprefix nvidia-cutlass-dsl-libs-,base core $(OTHER)))
	@touch $@

test-gpu: $(STAMP)  ## the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu $(ARGS)

mutants: $(MUTMUT_STAMP)  ## edits of the code, each of which a test must notice; hours
	$(BIN)/python -m tests.mutants.run named
	$(BIN)/python -m tests.mutants.run core --sample 400 --least 95 $(ARGS)
	$(BIN)/python -m tests.mutants.run kernels --sample 20 --least 90 $(ARGS)

$(MUTMUT_STAMP): $(STAMP)
	@$(PIP) install --constraint constraints.txt --editable '.[mutants]'
	@touch $@

emulate-all: $(STAMP)  ## every mask and mod through the Blackwell kernels, on the CPU; an hour
	$(BIN)/python benchmarks/emulate.py --save benchmarks/results/emulated.jsonl $(ARGS)

# MINUTES and SEED of the search; ARGS="--emulated 0" leaves the emulator out.
fuzz: $(STAMP)  ## search for wrong results of random variants; MINUTES=2 SEED=0
	$(BIN)/python benchmarks/fuzz.py --minutes $(or $(MINUTES),2) --seed $(or $(SEED),0) $(ARGS)

misuse: $(STAMP)  ## call every public name wrongly, N times: only errors of attnkit may come
	PYTHONPATH=. $(BIN)/python tests/fuzz/misuse.py $(N)

# TORCH_TESTS is a copy of PyTorch's test/inductor/test_flex_attention.py; ARGS="--only NAME" picks tests.
flex-tests: $(STAMP)  ## PyTorch's own tests of FlexAttention through attnkit.flex; TORCH_TESTS=path
	$(BIN)/python -m tests.flex.torch_suite $(TORCH_TESTS) $(ARGS)

lint: $(STAMP)  ## style, types and import direction
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/python -c "from importlinter.cli import lint_imports_command as lint; lint()" --no-logo

format: $(STAMP)  ## write what `make lint` wants to see
	$(BIN)/python -m ruff check --fix-only --quiet .
	$(BIN)/python -m ruff format .

docs: $(STAMP)  ## build the documentation into site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet $(ARGS)

bench: $(STAMP)  ## the benchmarks
	$(BIN)/python benchmarks/run.py $(ARGS)

wheel: $(STAMP)  ## build the wheel into dist/
	rm -rf dist
	$(BIN)/python -m hatchling build --target wheel --directory dist

# The environment has what the wheel asks for, at the versions of constraints.txt, and nothing else.
try-wheel: wheel  ## install the wheel into a fresh environment and try it; TORCH=2.13.0
	rm -rf build/try-wheel
	$(PYTHON) -m venv build/try-wheel
	grep -v '^torch==' constraints.txt > build/try-wheel/constraints.txt
	echo "torch==$(or $(TORCH),$(shell sed -n 's/^torch==//p' constraints.txt))" \
	    >> build/try-wheel/constraints.txt
	build/try-wheel/bin/python -m pip --disable-pip-version-check --quiet install \
	    --constraint build/try-wheel/constraints.txt "$$(ls dist/*.whl)[check]"
	cd build/try-wheel && bin/python -I $(CURDIR)/tests/package/smoke.py

hub: wheel  ## write the folder of a Hugging Face kernel into build/hub
	$(BIN)/python hub/write.py dist/*.whl build/hub

clean:  ## remove build outputs and caches
	rm -rf build dist out site .hypothesis .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## and .venv
	rm -rf $(VENV)
