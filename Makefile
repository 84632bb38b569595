# make demo    state collapse, its mitigations and passkeys, on four of the six embedded checkpoints
# make test    ruff, pyright and the default test suite
# make slow    the long tests and studies
# make docs    build the documentation site in site/; warnings are errors
# make wheel   build dist/*.tar.gz, and from it dist/*.whl
#
# Each target first creates a virtual environment in .venv. TORCH_INDEX is the package index of the
# CPU wheel of torch; if it cannot be reached, pip uses its default index.

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# Without bytecode: Python compiles the modules that are imported.
PIP = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
# Tests start many processes: each would compile torch again where no bytecode may be written.
TESTS = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
TORCH = $(shell sed -n 's/^torch==/torch==/p' constraints.txt)
TRANSFORMERS = $(shell sed -n '/^transformers==/p' constraints.txt)

.PHONY: demo test lint suite slow docs wheel clean

demo: $(VENV)/.run
	$(VENV)/bin/python scripts/demo.py

test: lint suite

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

suite: $(VENV)/.dev $(VENV)/.transformers
	$(TESTS) LONGRNN_TRANSFORMERS_SOURCE=$(abspath $(VENV)/transformers) \
	  $(VENV)/bin/python -m pytest -n 2 --dist worksteal

slow: $(VENV)/.dev
	$(TESTS) $(VENV)/bin/python -m pytest -m slow

docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet --strict

wheel: $(VENV)/.dev
	$(VENV)/bin/python -m build

$(VENV)/.torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --no-deps --retries 0 --timeout 15 --index-url $(TORCH_INDEX) $(TORCH) \
	  || (echo "cannot reach the CPU package index of torch: installing torch from the default index" \
	      && $(PIP) $(TORCH))
	touch $@

$(VENV)/.run: $(VENV)/.torch pyproject.toml
	$(PIP) -e .
	touch $@

# The packages that longrnn[dev] lacks: longrnn itself is installed, and not compiled again.
$(VENV)/.dev: $(VENV)/.run
	$(PIP) 'longrnn[dev]'
	touch $@

# transformers' own tests of every model, which its wheel lacks. Without them, those tests are skipped.
$(VENV)/.transformers: $(VENV)/.torch
	rm -rf $(VENV)/transformers && mkdir $(VENV)/transformers
	-$(VENV)/bin/python -m pip download --quiet --disable-pip-version-check --retries 0 --timeout 15 \
	  --no-deps --no-binary transformers --dest $(VENV)/transformers $(TRANSFORMERS) \
	  && tar xzf $(VENV)/transformers/*.tar.gz -C $(VENV)/transformers --strip-components 1
	touch $@

clean:
	rm -rf $(VENV) build dist demo site *.egg-info
