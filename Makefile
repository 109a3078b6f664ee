# `make setup` installs everything into .venv.
# `make train` trains on real images, without a GPU.
# `make test` runs the tests.
PYTHON ?= python3
VENV ?= .venv
INSTALLED = $(VENV)/installed
INSTALLED_DEV = $(VENV)/installed_dev
# File with exact versions and hashes of all packages. `make setup CONSTRAINTS=` installs the newest versions that
# requirements.txt allows.
CONSTRAINTS ?= constraints.txt
# `make setup TORCH=2.11` and `make test TORCH=2.11` use a different supported version of torch, in a separate
# environment.
TORCH ?=
ifneq ($(TORCH),)
VENV = .venv-torch$(TORCH)
CONSTRAINTS =
endif

# Range of Python versions that torch's packages and the tests support. If the system's Python is outside this range, as
# on a newer Ubuntu, uv installs a supported version.
FITS = import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
PYTHONS = >=3.11,<3.14

# uv installs packages in a fraction of the time that pip needs. INSTALLER=pip works without uv, for example if only pip
# is configured for a mirror.
INSTALLER ?= uv
# CPU=1 installs torch without CUDA. Its hashes differ from the hashes of PyPI's torch.
CPU ?=
CPU_INDEX = https://download.pytorch.org/whl/cpu
REACH_CPU_INDEX = $(PYTHON) -c 'import urllib.request as u; u.urlopen("$(CPU_INDEX)/torch/", timeout=20)' 2>/dev/null || \
    { echo "error: CPU=1 needs $(CPU_INDEX), which does not answer. Leave out CPU=1" >&2; exit 1; }
ifeq ($(INSTALLER),uv)
UV = uv==0.13.9
FIRST = $(UV)
MAKE_VENV = echo "$$($(PYTHON) --version) is not in $(PYTHONS). uv installs a version that is"; $(PYTHON) -m venv $(VENV)-uv && \
    $(VENV)-uv/bin/python -m pip install --quiet $(UV) && \
    $(VENV)-uv/bin/uv venv --quiet --clear --seed --python '$(PYTHONS)' $(VENV) && rm -r $(VENV)-uv
INSTALL = $(VENV)/bin/uv pip install --python $(VENV)/bin/python $(if $(CPU),--torch-backend cpu --no-verify-hashes)
else
# pip 23 and 24 can't read hashes from a constraints file.
FIRST = --upgrade "pip>=26.3"
MAKE_VENV = { echo "error: INSTALLER=pip needs a Python in the range $(PYTHONS). Set PYTHON=" >&2; exit 1; }
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

# accelerate-launch skips the imports of accelerate's other commands, for example timm and transformers. accelerate warns
# if the number of threads is missing. The script replaces the value 1 with the number of cores.
train: setup
	$(VENV)/bin/accelerate-launch --config_file accelerate_configs/cpu.yaml --num_cpu_threads_per_process 1 train_cnn_a.py --data digits

# Trains CNN-A with 1, 2 and 4 processes and 16 micro-batches per step. The resulting weights are bitwise
# identical.
same_bits: setup
	for n in 1 2 4; do $(VENV)/bin/torchrun --standalone --nproc_per_node=$$n train_cnn_a.py --data digits \
	    --epochs 2 --per_device_batch_size 8 --deterministic --output_dir runs/same_bits/$$n || exit; done
	sha256sum runs/same_bits/*/checkpoints/*/model.safetensors

# Shows all runs to browsers on this machine. From a different machine, use ssh -L 6006:localhost:6006.
tensorboard: setup
	$(VENV)/bin/tensorboard --logdir runs --host 127.0.0.1

# Writes a page for each run, or only for the runs in RUNS, to runs/logbook/.
RUNS ?= $(patsubst %/recipe.json,%,$(wildcard $(foreach run,* */* */*/*,runs/$(run)/recipe.json)))
logbook: setup
	$(VENV)/bin/python logbook.py $(if $(RUNS),add $(RUNS),index)

# The scripts in experiments/ document the experiments and their variables, for example SIZE=full for GPUs and DATA for a local
# copy. Make starts `env` without a shell in between, so that SIGTERM reaches the experiment.
experiment_vit experiment_speedup: experiment_%: setup
	env PYTHON=$(VENV)/bin/python experiments/$*.sh

# Generates documentation from the code: docs/flags.md, and parts of docs/trouble.md and docs/architecture.md.
docs: setup
	$(VENV)/bin/python -m docs.generate

# Writes exact package versions for all supported Python versions. Versions in the existing file stay unchanged if the
# requirements allow them. UPGRADE=1 selects the newest versions.
constraints: setup
	$(VENV)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
	    $(if $(UPGRADE),--upgrade) --custom-compile-command "make constraints" --output-file constraints.txt \
	    requirements.txt requirements-dev.txt

# Checks style, imports between packages, and types. The type check needs the newest torch's annotations.
check: $(INSTALLED_DEV)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	PYTHONPATH=. $(VENV)/bin/lint-imports --no-cache
	$(VENV)/bin/mypy

# Installs the Debian packages that the tests need and this machine lacks. Tests that need a missing package are skipped.
packages:
	missing=$$($(PYTHON) -m tests.support.packages) || exit; [ -z "$$missing" ] || \
	    $(if $(filter-out 0,$(shell id -u)),sudo) sh -c "apt-get update -q && DEBIAN_FRONTEND=noninteractive \
	    apt-get install -qy --no-install-recommends $$missing"

# Runs the tests in three processes, even on two cores, because some tests mostly wait.
test: $(INSTALLED_DEV) $(if $(TORCH),,check)
	$(VENV)/bin/python -m pytest -n 3 --no-loadscope-reorder -m "not full"

# Also runs all combinations of strategies and scripts, and the long training runs. All tests take hours on 2 cores.
test-all: $(INSTALLED_DEV)
	$(VENV)/bin/python -m pytest -n 2 --no-loadscope-reorder
