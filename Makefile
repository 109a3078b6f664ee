# make setup: .venv with everything; make train: a first run, on real images, without a GPU; make test: the tests
PYTHON ?= python3
VENV ?= .venv
INSTALLED = $(VENV)/installed

.PHONY: setup train tensorboard logbook experiment_vit experiment_speedup test test-all

setup: $(INSTALLED)

$(INSTALLED): requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --requirement requirements.txt
	touch $@

train: setup
	$(VENV)/bin/accelerate launch --config_file accelerate_configs/cpu.yaml train_cnn_a.py --data digits

# All runs, for this machine alone: from elsewhere by ssh -L 6006:localhost:6006
tensorboard: setup
	$(VENV)/bin/tensorboard --logdir runs --host 127.0.0.1

# Pages of all runs, or of those that RUNS names, in runs/logbook/.
RUNS ?= $(patsubst %/recipe.json,%,$(wildcard runs/*/*/recipe.json runs/*/*/*/recipe.json))
logbook: setup
	$(VENV)/bin/python logbook.py $(if $(RUNS),add $(RUNS),index)

# experiments/ says what they do, and by which variables: SIZE=full is for GPUs, DATA a local copy, ...
export SIZE DATA HOSTFILE S3_PREFIX FOLDER LOGBOOK DRY_RUN
experiment_vit experiment_speedup: experiment_%: setup
	PYTHON=$(VENV)/bin/python experiments/$*.sh

test: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/python -m pytest -n 2 --no-loadscope-reorder -m "not full"

# The products of strategies and scripts, and the long trainings: an hour on 2 cores.
test-all: setup
	$(VENV)/bin/python -m pytest -n 2 --no-loadscope-reorder
