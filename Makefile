# make demo   train the embedded tiny FLUX with G²RPO, on this machine's CPU or GPU
# make test   run the tests
# Both install what they need into .venv first. Another interpreter: make demo PYTHON=python3.12
PYTHON ?= python3
VENV ?= .venv

.PHONY: demo test
demo: $(VENV)/installed
	$(VENV)/bin/python g2rpo.py --preset tiny --out runs/demo --resume auto

test: $(VENV)/installed
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile

$(VENV)/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=…")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --editable '.[dev]'
	-$(VENV)/bin/python -m pip install --quiet --no-deps hpsv2 clint args  # only compared with
	touch $@
