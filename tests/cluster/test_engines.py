"""Tests that cluster/skypilot.yaml, trainjob.yaml and Dockerfile contain working commands and no secrets."""

import json
import os
import re
import shutil
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import parse_args

from onecurve.flags.recipe import Recipe, parse
from onecurve.models.script import load_script, recipe_class
from tests.conftest import BIN, ROOT, needs

SKYPILOT, TRAINJOB = ROOT / "cluster" / "skypilot.yaml", ROOT / "cluster" / "trainjob.yaml"
SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
# Variables that SkyPilot sets on the second of two nodes with four GPUs each
SKYPILOT_NODE = {
    "SKYPILOT_NODE_IPS": "10.0.0.11\n10.0.0.12",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_GPUS_PER_NODE": "4",
}
SECRET = re.compile(r"KEY|SECRET|TOKEN|PASSWORD")
# Pattern for AWS key IDs and for values that follow a secret's name
VALUES = re.compile(r"\b(AKIA|ASIA)[A-Z0-9]{12,}|(?i:secret|token|password)\w*[=:] *[\"']?[A-Za-z0-9/+]{16,}")


def load(file: Path) -> dict:
    """Load the file and check that it contains no secret.

    A variable whose name suggests a secret must be null or refer to a Kubernetes secret.
    """

    def check(part) -> None:
        if isinstance(part, dict):
            if SECRET.search(str(part.get("name", ""))):
                assert part.keys() == {"name", "valueFrom"}
                assert part["valueFrom"].keys() == {"secretKeyRef"}
            assert not [key for key, value in part.items() if SECRET.search(key) and value is not None]
        for inner in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
            check(inner)

    assert not VALUES.search(file.read_text())
    check(loaded := yaml.safe_load(file.read_text()))
    return loaded


def parse_torchrun(words: list[str]) -> tuple[dict, Recipe]:
    """Parse the words as torchrun and the script would. Unknown flags make the test fail."""
    flags = parse_args(words)
    script = ROOT / flags.training_script
    assert script.exists()
    return vars(flags), parse(recipe_class(load_script(script)), flags.training_script_args)


@pytest.fixture
def no_launcher(monkeypatch):
    """Remove the environment variables that set torchrun's defaults."""
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)
    return monkeypatch


def test_skypilots_run_block_starts_torchrun(tmp_path, no_launcher):
    """Run the task's run block with a stub for torchrun that records its flags and SHARED_STORE."""
    task = load(SKYPILOT)
    stub = tmp_path / ".venv" / "bin" / "torchrun"
    stub.parent.mkdir(parents=True)
    stub.write_text(f'#!/bin/sh\nprintf "%s\\0" "${SHARED_STORE}" "$@" > words\n')
    stub.chmod(0o755)
    env = os.environ | SKYPILOT_NODE | task["envs"] | {"FLAGS": "--lr 0.001 --seed 3"}
    subprocess.run(["bash", "-c", task["run"]], cwd=tmp_path, env=env, check=True)
    shared_store, *words = (tmp_path / "words").read_text().split("\0")[:-1]
    flags, recipe = parse_torchrun(words)
    assert shared_store == "1"
    assert (flags["nnodes"], flags["nproc_per_node"]) == ("2", "4")
    assert (flags["rdzv_endpoint"], flags["local_addr"]) == ("10.0.0.11:29500", "10.0.0.12")
    assert (flags["rdzv_backend"], flags["rdzv_conf"]) == ("c10d", "is_host=0")
    assert flags["max_restarts"] == 1000
    assert (recipe.output_dir, recipe.s3) == ("weights/vit-1", "s3://my-bucket/train/vit-1")
    assert (recipe.lr, recipe.seed) == (0.001, 3)


def test_skypilots_blocks_use_a_make_target_and_variables_that_exist():
    task = load(SKYPILOT)
    subprocess.run(["bash", "-n"], input=task["setup"], text=True, check=True)
    target = re.search(r"^make (\w+)$", task["setup"], re.MULTILINE)
    assert re.search(rf"^{target[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for name in re.findall(r"\$\{?(\w+)", task["run"] + task["setup"]):
        defined_by_block = {"first", "mine"}
        assert name in SKYPILOT_NODE | task["envs"] or name in defined_by_block, name


@pytest.mark.parametrize(
    ("file", "text"),
    [
        (SKYPILOT, "envs: {AWS_SECRET_ACCESS_KEY: x}"),
        (TRAINJOB, "env: [{name: WANDB_API_KEY, value: x}]"),
        (TRAINJOB, "env: [{name: WANDB_API_KEY, valueFrom: {configMapKeyRef: {name: x}}}]"),
        (SKYPILOT, "x: AKIAIOSFODNN7EXAMPLE"),
        (SKYPILOT, "secret_access_key: wJalrXUtnFEMI/K7MDENG/bPxRfiCY"),
    ],
)
def test_a_secret_with_a_value_is_detected(file, text, tmp_path):
    (tmp_path / "file.yaml").write_text(f"{file.read_text()}\n{text}\n")
    with pytest.raises(AssertionError):
        load(tmp_path / "file.yaml")


def test_the_trainjobs_container_starts_torchrun(no_launcher):
    trainer = load(TRAINJOB)["spec"]["trainer"]
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == trainer["numProcPerNode"]
    command = [*trainer["command"], *trainer["args"]]
    env = {variable["name"]: variable.get("value") for variable in trainer["env"]}
    for name, value in {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "4", "PET_MASTER_PORT": "29500"}.items():
        no_launcher.setenv(name, value)
    flags, recipe = parse_torchrun(command[1:])
    assert command[0] == "torchrun"
    assert (flags["nnodes"], flags["nproc_per_node"]) == ("2", "4")
    assert recipe.s3 == "s3://my-bucket/train/vit-1"
    assert env[SHARED_STORE] == "1"
    assert not any(name.startswith("PET_") for name in env)  # Kubeflow's controller sets these variables
    assert "$(" not in " ".join(command)


def instructions() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions as (name, arguments) pairs, with continued lines joined."""
    lines = (ROOT / "cluster" / "Dockerfile").read_text().splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#")).replace("\\\n", " ")
    return [(line.split()[0], line.partition(" ")[2]) for line in text.splitlines() if line]


def arguments_of(instruction: str) -> list[str]:
    return [arguments for name, arguments in instructions() if name == instruction]


def healthcheck() -> list[str]:
    [arguments] = arguments_of("HEALTHCHECK")
    flags, _, command = arguments.partition(" CMD ")
    assert all(re.fullmatch(r"--(interval|timeout|start-period)=\d+s|--retries=\d", f) for f in flags.split())
    return json.loads(command)


def test_the_dockerfiles_commands_parse_and_its_scripts_exist():
    for command in arguments_of("RUN"):
        subprocess.run(["sh", "-n"], input=command, text=True, check=True)
    [command] = arguments_of("CMD")
    assert (ROOT / json.loads(command)[1]).exists()
    assert (ROOT / healthcheck()[1]).exists()


def test_the_images_python_is_supported():
    base, _ = arguments_of("ARG")
    version = re.fullmatch(r"BASE=python:(3\.\d+)\.\d+-slim-bookworm", base)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lowest, highest = re.findall(r"3\.(\d+)", project["requires-python"])
    assert int(lowest) <= int(version[1].removeprefix("3.")) < int(highest)


def ignored(path: str) -> bool:
    """Return True if .dockerignore excludes the path from the image.

    This function implements only the Docker rules that .dockerignore uses.
    """
    patterns = (ROOT / ".dockerignore").read_text().splitlines()
    parts = path.split("/")
    heads = ["/".join(parts[: n + 1]) for n in range(len(parts))]
    return any(
        fnmatch(head, pattern)
        or (pattern.startswith("**/") and fnmatch(head.rpartition("/")[2], pattern[3:]))
        for pattern in patterns
        if pattern and not pattern.startswith("#")
        for head in heads
    )


def test_the_image_gets_the_project_and_nothing_else():
    for arguments in arguments_of("COPY"):
        *sources, _ = arguments.split()
        assert all((ROOT / source).exists() and not ignored(source) for source in sources)
    excluded = ".git/config .venv/bin/python .venv-torch2.11/x .env .deepspeed_env runs/a/b"
    for name in [*excluded.split(), "onecurve/run/__pycache__/run.pyc"]:
        assert ignored(name), name
    needed = ("*.py", "onecurve/**/*.py", "tools/**/*.*", "*/*.yaml", "ds_configs/*", "cluster/health.py")
    for name in (str(file.relative_to(ROOT)) for pattern in needed for file in ROOT.glob(pattern)):
        assert not ignored(name) or name.startswith(("tests/", ".")) or "__pycache__" in name, name


# Script that runs a health check in separate namespaces, which hide other tests' processes. $1 is the
# folder, and the remaining arguments are the health check.
IN_A_CONTAINER = """
cd $1 && shift
check() { "$@"; echo "status $?"; }
check "$@"
python train_sleepy.py & training=$!
until [ -s run/metrics.jsonl ]; do sleep 0.05; done
check "$@"
touch -d '-40 minutes' run/metrics.jsonl
check "$@"
touch run/metrics.jsonl
kill -STOP $training
check "$@"
kill -KILL $training
wait $training
check "$@"
"""
SLEEPY = """
import os, time
os.makedirs("run")
log = open("run/metrics.jsonl", "a")
print('{"step": 1}', file=log, flush=True)
time.sleep(60)
"""


def test_the_health_checks_command(tmp_path):
    needs("root", "pgrep")
    (tmp_path / "cluster").mkdir()
    shutil.copy(ROOT / "cluster" / "health.py", tmp_path / "cluster")
    (tmp_path / "train_sleepy.py").write_text(SLEEPY)
    words = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c", IN_A_CONTAINER]
    words += ["container", str(tmp_path), *healthcheck()]
    env = os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    output = subprocess.run(words, capture_output=True, text=True, timeout=120, env=env).stdout
    statuses = re.findall(r"^status (\d+)$", output, re.MULTILINE)
    assert statuses == ["1", "0", "1", "1", "1"]
    reports = [line for line in output.splitlines() if not line.startswith("status")]
    assert reports[0] == reports[4] == "no train script is running"
    assert re.fullmatch(r"training processes: 1\. The newest log line is \d s old", reports[1])
    silent = r".*/run/metrics.jsonl received no new line for 24\d\d s, which exceeds --within_s 1800"
    assert re.fullmatch(silent, reports[2])
    assert re.fullmatch(r"training process \d+ is suspended", reports[3])
