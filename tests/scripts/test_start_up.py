"""Tests that limit which modules the commands import at startup.

Commands answer --help, a wrong flag and missing data without importing torch. Scripts load no module of
onecurve/ before it is needed.
"""

import itertools
import os
import re
import subprocess
import sys
import threading

import pytest

from onecurve.data import sources
from onecurve.data.sources import Source
from onecurve.flags.recipe import ImageRecipe, from_flags
from tests.conftest import ROOT, accelerate

COMMANDS = ("launch.py", "doctor.py", "find_batch_size.py", "logbook.py", "plan.py", "prep_imagenet.py")
SCRIPTS = tuple(path.name for path in sorted(ROOT.glob("train_*.py")))
HEAVY = {"torch", "accelerate", "deepspeed", "timm", "transformers"}
HEAVY |= {"datasets", "scipy", "boto3", "matplotlib", "triton"}
OF_FLAGS = {"checkpoint.mirror", "data.shards", "data.shard_cache", "system.s3"}
OF_FLAGS |= {"run.plots", "telemetry.sampling"}
# Maximum number of onecurve/ modules that each script imports
MODULES = {"train_hello": 43, "train_cnn_a": 62, "train_vit": 73}


def imported(*words: str) -> tuple[int, set[str], str]:
    """Run `python WORDS` and return the exit status, the modules that processes import, and the output."""
    env = os.environ | {"PYTHONPROFILEIMPORTTIME": "1"}
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    names = re.findall(r"^import time:.*\| +(\S+)$", done.stderr, re.MULTILINE)
    return done.returncode, set(names), done.stdout + done.stderr


@pytest.mark.parametrize("command", [*COMMANDS, *SCRIPTS])
def test_help_and_a_wrong_flag_are_answered_without_torch(command):
    status, packages, output = imported(command, "--help")
    assert status == 0
    assert "usage: " in output
    assert not packages & HEAVY
    status, packages, output = imported(command, "--no_such_flag", "train_hello.py")
    assert status == 2, output
    assert not packages & HEAVY


@pytest.mark.parametrize(
    ("files", "message"),
    [((), "does not exist"), (("train/cat/1.jpg", "train/dog/2.jpg"), "contains no evaluation split")],
)
def test_data_that_cant_be_used_are_named_without_torch(tmp_path, files, message):
    for file in (tmp_path / "images" / name for name in files):
        file.parent.mkdir(parents=True)
        file.touch()
    status, packages, output = imported("train_vit.py", "--data", str(tmp_path / "images"))
    assert status == 1
    assert re.search(f"^error: --data .*{message}", output, re.MULTILINE), output
    assert not packages & HEAVY


def test_weights_that_are_not_there_are_named_without_torch():
    status, packages, output = imported(
        "train_vit.py", "--data", "digits", "--weights", "nothing.safetensors"
    )
    assert status == 1
    assert "error: --weights nothing.safetensors does not exist" in output
    assert not packages & HEAVY


@pytest.mark.parametrize("script", ["train_cnn_a.py", "train_hello.py", "validate.py", "predict.py"])
def test_a_first_line_comes_before_torch(script):
    env, first = os.environ | {"PYTHONPROFILEIMPORTTIME": "1"}, "loading PyTorch\n"
    words = [sys.executable, script]
    with subprocess.Popen(words, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True) as job:
        imports = list(itertools.takewhile(lambda line: line != first, job.stderr))
        job.kill()
    assert imports
    assert not re.search(r"\| +torch$", "".join(imports), re.MULTILINE)


def test_files_are_listed_once_and_a_long_list_delays_no_import(tmp_path, monkeypatch):
    begun, may_end = [], threading.Event()

    def slow(data, columns):
        begun.append(data)
        may_end.wait(10)
        return Source("images", (), lambda *_: ())

    monkeypatch.setattr(sources, "_find_files", slow)
    monkeypatch.setattr(sources, "LISTING_WAIT_S", 0)
    recipe = ImageRecipe(data=str(tmp_path))
    assert sources.check_inputs(recipe) == 0
    may_end.set()
    monkeypatch.setattr(sources, "LISTING_WAIT_S", 10)
    assert sources.find_source(recipe, lambda: None).name == "images"
    assert sources.check_inputs(recipe) == 0
    assert sources.find_source(recipe, lambda: None).name == "images"
    assert len(begun) == 2


def test_flags_are_parsed_once(monkeypatch, tmp_path):
    """Check that flags are parsed once, because a pipe such as `--config <(...)` can be read only once."""
    (tmp_path / "recipe.yaml").write_text("epochs: 3\n")
    monkeypatch.setattr(sys, "argv", ["train_cnn_a.py", "--config", str(tmp_path / "recipe.yaml")])
    first = from_flags(recipe_type := type("Fresh", (ImageRecipe,), {}))
    (tmp_path / "recipe.yaml").write_text("")
    assert from_flags(recipe_type) is first
    assert first.epochs == 3


@pytest.mark.full
@pytest.mark.parametrize(
    ("config", "unused"), [("fsdp_2gpu", "deepspeed"), ("zero2_2gpu", "torch._inductor.compile_fx")]
)
def test_a_strategy_imports_nothing_that_it_does_not_use(config, unused, tmp_path):
    small = ["--max_steps", "2", "--output_dir", str(tmp_path / "run")]
    status, modules, output = imported(*accelerate(config)[1:], "train_hello.py", *small)
    assert status == 0, output
    assert "torch.distributed" in modules
    assert unused not in modules


EACH_IN_A_FORK = """
import os, sys
import torch, accelerate

for script in sys.argv[1:]:
    if os.fork() == 0:
        __import__(script)
        print(*sys.modules, flush=True)
        os._exit(0)
    os.wait()
"""


def test_a_script_loads_no_module_before_it_is_needed():
    command = [sys.executable, "-c", EACH_IN_A_FORK, *MODULES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    for max_modules, line in zip(MODULES.values(), done.stdout.splitlines(), strict=True):
        names = line.split()
        loaded = {name.removeprefix("onecurve.") for name in names if name.startswith("onecurve.")}
        assert "run.run" in loaded, done.stderr
        assert not loaded & OF_FLAGS
        assert not HEAVY.intersection(names) - {"torch", "accelerate", "boto3"}  # accelerate imports boto3
        assert len(loaded) <= max_modules, sorted(loaded)


def test_validate_imports_no_heavy_package_that_evaluate_does_not_need(tmp_path):
    code = "import sys; from pathlib import Path; from tools.inference.report import load_metrics\n"
    code += "load_metrics(Path(sys.argv[1])); print(*sys.modules)"
    words = [sys.executable, "-c", code, tmp_path]
    names = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120).stdout.split()
    assert "evaluate" in names
    assert not {"torch", "torchvision", "transformers"}.intersection(names)
