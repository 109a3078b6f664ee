# make setup: .venv with everything; make train: a first run, on real images, without a GPU; make test: the tests
PYTHON ?= python3
VENV ?= .venv
INSTALLED = $(VENV)/installed
INSTALLED_DEV = $(VENV)/installed_dev
# Exact versions and hashes. `make setup CONSTRAINTS=` installs the newest that requirements.txt allows.
CONSTRAINTS ?= constraints.txt
# `make setup TORCH=2.11`, `make test TORCH=2.11`: another torch of the range, in an environment of its own.
TORCH ?=
ifneq ($(TORCH),)
VENV = .venv-torch$(TORCH)
CONSTRAINTS =
endif

# Pythons of torch's packages and of the tests. Beside another one, as of a newer Ubuntu, uv takes one of these.
FITS = import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
PYTHONS = >=3.11,<3.14

# uv installs, in a fraction of pip's time. INSTALLER=pip does without it, for example where only pip knows a mirror.
INSTALLER ?= uv
# CPU=1: torch without CUDA, whose hashes are not those of PyPI's torch.
CPU ?=
CPU_INDEX = https://download.pytorch.org/whl/cpu
REACH_CPU_INDEX = $(PYTHON) -c 'import urllib.request as u; u.urlopen("$(CPU_INDEX)/torch/", timeout=20)' 2>/dev/null || \
    { echo "error: CPU=1 needs $(CPU_INDEX), which does not answer: leave out CPU=1" >&2; exit 1; }
ifeq ($(INSTALLER),uv)
UV = uv==0.13.9
FIRST = $(UV)
MAKE_VENV = echo "$$($(PYTHON) --version) is not $(PYTHONS): uv takes one that is"; $(PYTHON) -m venv $(VENV)-uv && \
    $(VENV)-uv/bin/python -m pip install --quiet $(UV) && \
    $(VENV)-uv/bin/uv venv --quiet --clear --seed --python '$(PYTHONS)' $(VENV) && rm -r $(VENV)-uv
INSTALL = $(VENV)/bin/uv pip install --python $(VENV)/bin/python $(if $(CPU),--torch-backend cpu --no-verify-hashes)
else
# pip 23 and 24 take no hashes from a file of constraints.
FIRST = --upgrade "pip>=26.3"
MAKE_VENV = { echo "error: INSTALLER=pip needs PYTHON to be one of $(PYTHONS)" >&2; exit 1; }
INSTALL = $(VENV)/bin/python -m pip install $(if $(CPU),$(error CPU=1 needs INSTALLER=uv))
endif

.PHONY: setup train same_bits tensorboard logbook experiment_vit experiment_speedup docs constraints check packages \
    test test-all

setup: $(INSTALLED)

$(INSTALLED): requirements.txt $(CONSTRAINTS)
	$(if $(CPU),@$(REACH_CPU_INDEX))
	@if $(PYTHON) -c '$(FITS)'; then $(PYTHON) -m venv $(VENV); \
	else $(MAKE_VENV); fi
	$(VENV)/bin/python -m pip install --quiet $(FIRST)
	$(INSTALL) --requirement requirements.txt $(CONSTRAINTS:%=--constraint %) $(TORCH:%="torch==%.*")
	touch $@

$(INSTALLED_DEV): requirements-dev.txt $(INSTALLED)
	$(INSTALL) --requirement requirements-dev.txt $(CONSTRAINTS:%=--constraint %)
	touch $@

# `accelerate launch` without the imports of accelerate's other commands, timm and transformers among them. Of one thread
# the script makes all cores; without a number accelerate warns.
train: setup
	$(VENV)/bin/accelerate-launch --config_file accelerate_configs/cpu.yaml --num_cpu_threads_per_process 1 train_cnn_a.py --data digits

# CNN-A on 1, 2 and 4 processes, 16 micro-batches a step: the weights are the same, bit for bit.
same_bits: setup
	for n in 1 2 4; do $(VENV)/bin/torchrun --standalone --nproc_per_node=$$n train_cnn_a.py --data digits \
	    --epochs 2 --per_device_batch_size 8 --deterministic --output_dir runs/same_bits/$$n || exit; done
	sha256sum runs/same_bits/*/checkpoints/*/model.safetensors

# All runs, for this machine alone: from elsewhere by ssh -L 6006:localhost:6006
tensorboard: setup
	$(VENV)/bin/tensorboard --logdir runs --host 127.0.0.1

# Pages of all runs, or of those that RUNS names, in runs/logbook/.
RUNS ?= $(patsubst %/recipe.json,%,$(wildcard $(foreach run,* */* */*/*,runs/$(run)/recipe.json)))
logbook: setup
	$(VENV)/bin/python logbook.py $(if $(RUNS),add $(RUNS),index)

# experiments/ says what they do, and by which variables: SIZE=full is for GPUs, DATA a local copy, ...
# Make starts `env` without a shell between, so that SIGTERM reaches the experiment.
experiment_vit experiment_speedup: experiment_%: setup
	env PYTHON=$(VENV)/bin/python experiments/$*.sh

# Pages that are made from the code: docs/flags.md, and the table in docs/trouble.md
docs: setup
	$(VENV)/bin/python -m docs.generate

# Exact versions for all Pythons of the range. Those of the file stay where requirements allow them; UPGRADE=1: the newest.
constraints: setup
	$(VENV)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
	    $(if $(UPGRADE),--upgrade) --custom-compile-command "make constraints" --output-file constraints.txt \
	    requirements.txt requirements-dev.txt

# Style, imports between packages, types. The types are those of the newest torch's annotations.
check: $(INSTALLED_DEV)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	PYTHONPATH=. $(VENV)/bin/lint-imports --no-cache
	$(VENV)/bin/mypy

# Debian's packages that tests need and this machine lacks. Without them those tests are skipped.
packages:
	missing=$$($(PYTHON) -m tests.support.packages) || exit; [ -z "$$missing" ] || \
	    $(if $(filter-out 0,$(shell id -u)),sudo) sh -c "apt-get update -q && DEBIAN_FRONTEND=noninteractive \
	    apt-get install -qy --no-install-recommends $$missing"

# Three processes on two cores, as some tests wait.
test: $(INSTALLED_DEV) $(if $(TORCH),,check)
	$(VENV)/bin/python -m pytest -n 3 --no-loadscope-reorder -m "not full"

# The products of strategies and scripts, and the long trainings: hours on 2 cores.
test-all: $(INSTALLED_DEV)
	$(VENV)/bin/python -m pytest -n 2 --no-loadscope-reorder
