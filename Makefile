# make setup: .venv with everything; make train: a first run, on real images, without a GPU; make test: the tests
PYTHON ?= python3
VENV ?= .venv
INSTALLED = $(VENV)/installed

.PHONY: setup train test test-all

setup: $(INSTALLED)

$(INSTALLED): requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --requirement requirements.txt
	touch $@

train: setup
	$(VENV)/bin/accelerate launch --config_file accelerate_configs/cpu.yaml train_cnn_a.py --data digits

test: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/python -m pytest -m "not full"

# The products of strategies and scripts, and the long trainings: an hour on 2 cores.
test-all: setup
	$(VENV)/bin/python -m pytest
