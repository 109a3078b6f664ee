"""Tests that run every command in the README and on related pages for a few steps, on this machine alone."""

import json
import os
import re
import shlex
import shutil
import sys

import pexpect
import pytest
import timm
from safetensors.torch import save_file

from onecurve.system.s3 import ObjectStore
from tests.conftest import BIN, ROOT, Job, free_port, full, lines, mutate, result, run
from tests.support.s3 import BUCKET, aws_env, s3  # noqa: F401 (a fixture)

# Flags appended to a command so that it takes seconds and does not access the Hub. If a flag appears twice,
# the last value applies.
DIGITS = ["--data", "digits", "--max_steps", "2", "--batch_size", "16", "--max_val_images", "32"]
SMALL = {
    "train_hello.py": ["--max_steps", "20"],
    "train_cnn_a.py": DIGITS,
    "train_cnn_b.py": [*DIGITS, "--width", "8"],
    "train_vit.py": [*DIGITS, "--model", "test_vit", "--image_size", "32", "--patch_size", "8"],
}
# Pages whose commands are tested. docs/imagenet.md and docs/cluster.md are excluded because their commands
# need archives and machines that the tests lack.
DOCUMENTS = ("README.md", *(f"docs/{name}.md" for name in ("launching", "resuming", "results", "trouble")))
# Flag of the commands that can start three different scripts
ONE_TWO_AND_TWO_HOSTS = "--model_folder ./weights"
# Unique commands in the documents' code blocks and in the table of results
TEXT = "\n".join((ROOT / name).read_text() for name in DOCUMENTS)
IN_BLOCKS = list(dict.fromkeys("".join(re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)).splitlines()))
RESULTS = TEXT.split("## Results")[1].split("## ")[0]
IN_TABLES = re.findall(r"^\|.*?\| `([^`]+)` \|", RESULTS, re.MULTILINE)
# Regular expression for each category of commands. The first match determines a command's category. Comments
# name the test file that runs the category, unless this file does.
CATEGORIES = {
    "make": r"make (train|same_bits|test|test-all)\b",  # `make test` and `make test-all` include this test
    "experiment": r"make (experiment_vit|experiment_speedup|tensorboard)\b|experiments/\w+\.sh --seeds",
    "benchmark": r"python -m benchmarks\.(train_speed |checkpoint_saves$)",
    "peers": r"python -m benchmarks\.peers ",  # Run by tests/test_gpu_suite.py
    "tests": r"python -m pytest tests/[\w/]+\.py$",
    "preparation": r"python prep_imagenet\.py ",  # Run by test_prep_imagenet.py
    "doctor": r"python doctor\.py ",  # Run by test_doctor.py
    "tensorboard": r"tensorboard --logdir runs$",
    "fetching": r"(scp|rsync) ",  # Not run, because these commands copy files from a host
    "accelerate config": r"accelerate config$|accelerate launch train_cnn_a\.py$",
    "a script of others": r"python launch\.py .* /shared/complete_cv_example\.py ",  # Run by test_launch.py
    "named hosts": r"python launch\.py --mode ",  # Run by test_launch.py
    "one GPU each": r".*(_rank R|per_node=1 --master|--master_addr IP )",  # Run by test_launch.py
    "drill": r"python cluster/virtual_cluster\.py drill ",  # Run by tests/cluster/test_drill.py
    "practice": r"python cluster/virtual_cluster\.py ",
    "photographs": r"python .*photographs",
    "afterwards": r".*\b(validate|verify|find_batch_size|logbook|export|predict)\.py ",
    "stopped runs": r".*train_\w+\.py.*(weights/vit|s3://)",
    "launch": r".*train_\w+\.py",
}


def category(command: str) -> str | None:
    return next((name for name, pattern in CATEGORIES.items() if re.match(pattern, command)), None)


def in_category(name: str) -> list[str]:
    return [command for command in IN_BLOCKS if category(command) == name]


LAUNCHES = in_category("launch")


def split_environment(command: str) -> tuple[dict[str, str], list[str]]:
    """Split a command into the environment variables at its start and its words."""
    words = shlex.split(command)
    count = next(i for i, word in enumerate(words) if not re.match(r"[A-Z_]+=", word))
    return dict(word.split("=", 1) for word in words[:count]), words[count:]


def launch_type(command: str) -> tuple:
    """Return the launcher and the options that select the hosts. Other tests cover the remaining options."""
    words = ("launch.py", "hostfile", "--nnodes=2", "--nnodes=1:4")
    return split_environment(command)[1][0], *(word in command for word in words)


FIRST_OF_TYPE = {launch_type(command): command for command in reversed(LAUNCHES)}
# test_preemption.py, test_elastic.py and the practice test in this file start these commands.
for covered in ("deepspeed --num_gpus 2", "torchrun --nnodes=1:4", "python launch.py --hostfile hostfile"):
    del FIRST_OF_TYPE[launch_type(covered)]


OTHER_SCRIPTS = [
    full(command.replace("train_cnn_a.py", script))
    for command in LAUNCHES
    for script in sorted(path.name for path in ROOT.glob("train_*.py"))
    if script not in ("train_cnn_a.py", "train_hello.py")
    and command.endswith(f"a.py {ONE_TWO_AND_TWO_HOSTS}")
]


@pytest.mark.full
def test_the_section_on_stopped_runs(project_copy, cache, s3):  # noqa: F811
    """Run the commands in order, each with a few more steps than the previous command."""
    in_s3 = aws_env(s3)
    outputs = []
    for number, command in enumerate(in_category("stopped runs"), 1):
        line = command.replace("my-bucket", BUCKET)
        small = [*SMALL["train_vit.py"], *cache, "--max_steps", str(2 * number)]
        jobs = []
        for _ in range(2 if "--nnodes=2" in line else 1):
            env, words = split_environment(line.replace("=IP", "=127.0.0.1").replace("29500", "29577"))
            jobs.append(Job([*words, *small], cwd=project_copy, env=in_s3 | env))
        outputs.append("")
        for job in jobs:
            status, output = job.wait()
            assert status == 0, output
            outputs[-1] += output
    for number in (1, 2, 4):
        assert f"continuing at step {2 * number}" in outputs[number], outputs[number]
    store = ObjectStore(f"s3://{BUCKET}/vit-2")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in in_s3.items():
            patch.setenv(name, value)
        assert "checkpoints/step_00000010/manifest.json" in store.list()


def test_from_photographs_to_a_model_of_timm(project_copy, photographs, tmp_path, cache):
    """Run the README's photograph commands with a small model's weights instead of weights from the Hub."""
    for k, file in enumerate(sorted(photographs.glob("*.JPEG"))):
        path = project_copy / "photographs" / f"class_{k % 4}" / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(file)
    weights = tmp_path / "small.safetensors"
    save_file(timm.create_model("test_vit", img_size=32, patch_size=8, num_classes=9).state_dict(), weights)
    small = ["--model", "test_vit", "--image_size", "32", "--patch_size", "8", "--weights", weights]
    small += ["--max_steps", "2", "--workers", "0", *cache]
    *trainings, export = in_category("photographs")
    assert len(trainings) == 2
    for train in trainings:
        assert "80 training images, 20 " in run([*shlex.split(train), *small], cwd=project_copy)
    run([*shlex.split(export), *cache], cwd=project_copy)
    model = timm.create_model(f"local-dir:{project_copy}/models/photographs", pretrained=True)
    assert list(model.pretrained_cfg["label_names"]) == [f"class_{k}" for k in range(4)]


def test_the_practice_on_virtual_hosts(cluster_tools, project_copy, cache):
    outputs = []
    for command in in_category("practice"):
        words = shlex.split(command)
        small = [*SMALL["train_cnn_a.py"], *cache] if "train_cnn_a.py" in words else []
        outputs.append(run([*words, *small], cwd=project_copy))
    up, trained, _ = outputs
    assert "node1, node2 are running" in up
    assert "node1 | ddp, batch 16 = 4 images x 4 processes" in trained
    assert not cluster_tools.STATE.exists()


RESULT_COMMANDS = [full(c) for c in IN_TABLES if category(c) == "launch" and c not in LAUNCHES]
PAGE_COMMANDS = [c if c in FIRST_OF_TYPE.values() else full(c) for c in LAUNCHES]


@pytest.mark.parametrize("command", [*PAGE_COMMANDS, *OTHER_SCRIPTS, *RESULT_COMMANDS])
def test_launch(command, project_copy, request, cache):
    asks_hosts = "--hostfile" in command and "--no_ssh_check" not in command
    env = request.getfixturevalue("ssh") if asks_hosts else {}
    script = re.search(r"train_\w+\.py", command).group()
    small = SMALL[script] if script == "train_hello.py" else [*SMALL.get(script, DIGITS), *cache]
    port = free_port()
    jobs = []
    for rank in range(2 if "--nnodes=2" in command else 1):
        line = command.replace("=R ", f"={rank} ").replace("=IP", "=127.0.0.1").replace("29500", str(port))
        variables, words = split_environment(line)
        variables |= {"PET_RDZV_CONF": "last_call_timeout=1"} if "--nnodes=1:4" in command else {}
        words += small
        if words[0] == "deepspeed":
            words[1:1] = ["--master_port", str(port)]
        jobs.append(Job(words, cwd=project_copy, env=env | variables))
    for job in jobs:
        status, output = job.wait()
        assert status == 0, output
    if "--print_config" in command:
        assert "stem: imagenet" in output
        return
    (folder,) = (path.parent for path in project_copy.glob("*/*/*/result.json"))
    facts = result(folder)
    hosts, processes = len(jobs), expected_processes(command)
    sharded = re.search("(?:configs/|config_file )(fsdp|zero[123])", command)
    default_strategy = "zero2" if command.startswith("deepspeed") else "ddp" if processes > 1 else "single"
    strategy = sharded[1] if sharded else default_strategy
    assert (facts["script"], facts["status"]) == (script.removesuffix(".py"), "finished")
    assert (facts["strategy"], facts["hosts"], facts["processes"]) == (strategy, hosts, processes)
    assert folder.parent.parent.name == ("weights" if ONE_TWO_AND_TWO_HOSTS in command else "runs")
    max_hosts = 4 if "--nnodes=1:4" in command else hosts
    expected_name = f"{strategy}_{facts['batch_size']}_{facts['epochs']}_{max_hosts}_{processes // hosts}"
    assert folder.name == ("test_vit_" if script == "train_vit.py" else "") + expected_name
    assert lines(folder / "metrics.jsonl")


def expected_processes(command: str) -> int:
    per_host = re.search(r"nproc_per_node=(\d)|num_gpus (\d)|_(\d)gpu", command)
    on_host = int(next(filter(None, per_host.groups()))) if per_host else 2 if "hostfile" in command else 1
    return 2 * on_host if "--nnodes=2" in command else on_host


def test_no_command_is_left_out():
    """Check that every command belongs to a category, so that a command without a test is detected."""
    assert not [command for command in [*IN_BLOCKS, *IN_TABLES] if category(command) is None]
    for command in IN_TABLES:
        if command.startswith("python -m pytest"):
            assert (ROOT / command.split()[-1]).exists(), command
    assert len(LAUNCHES) > 15


WRITE_UPS = (ROOT / "docs/launching.md").read_text().partition("## Five write-ups\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("row", re.findall(r"^\| [^|]+ \| (`.*`) \|$", WRITE_UPS, re.MULTILINE))
def test_a_write_up_uses_commands_of_the_documents(row):
    """Check that the documents' code blocks contain each command in the table of write-ups.

    CATEGORIES names the tests that run the commands.
    """
    assert set(row.strip("`").split("`<br>`")) <= set(IN_BLOCKS)
    assert (WRITE_UPS.count("| `"), len(in_category("one GPU each"))) == (5, 3)


@pytest.mark.full
def test_benchmark_of_saves(tmp_path):
    words = ["python", "-m", "benchmarks.checkpoint_saves", "--rounds", "2", "--folder", tmp_path / "saves"]
    words += ["--model", "vit_tiny_patch16_224"]
    output = run([*words, "--json", tmp_path / "out.json"])
    assert "ratio to save_state" in output
    assert len(json.loads((tmp_path / "out.json").read_text())["rounds"]) == 2
    assert "first step after step_000000" in run([*words, "--resume"])


@pytest.mark.full
@pytest.mark.parametrize("command", [c for c in IN_TABLES if category(c) == "benchmark"])
def test_benchmark(command, tmp_path, cache):
    small = [*DIGITS[:2], *DIGITS[4:], *(["--width", "8"] if "train_cnn_b" in command else []), *cache]
    short_flags = ["--rounds", "1", "--steps", "2", "--json", tmp_path / "out.json"]
    words = shlex.split(command)
    run([*words[:3], *short_flags, *[w for w in words[3:] if w not in ("--steps", "49")], *small])
    report = json.loads((tmp_path / "out.json").read_text())
    assert set(report["rounds"][0]) == {"tutorial", "ours", "ready"}
    assert report["ratios"]["ours"] > 0


def test_tensorboard_starts(tmp_path):
    (tmp_path / "runs").mkdir()
    job = Job([*shlex.split("tensorboard --logdir runs"), "--port", free_port()], cwd=tmp_path)
    try:
        line = next(line for line in job.process.stdout if "Press CTRL+C" in line)
        assert "http://" in line
    finally:
        job.kill()
        job.process.communicate()


@pytest.mark.needs("make setup")
@pytest.mark.parametrize(("flags", "accuracy"), [(" --max_steps 22", 0.6), full("", 0.97)])
def test_make_train(flags, accuracy, project_copy, cache):
    """Check that `make train` installs nothing twice and imports no unused package.

    The README's other commands then read the run that `make train` wrote.
    """
    venv, end = BIN.parent, " train_cnn_a.py --data digits\n"
    mutate(project_copy, "Makefile", end, f"{end[:-1]}{flags}\n")
    make = ["sh", "-c", f"make train VENV={venv} 2> stderr"]
    output = run(make, cwd=project_copy, env={"PYTHONPROFILEIMPORTTIME": "1"})
    assert "pip install" not in output
    stderr = (project_copy / "stderr").read_text()
    assert "were not passed" not in stderr  # Part of accelerate's warning about default settings
    packages = set(re.findall(r"^import time:.*\| +(\S+)$", stderr, re.MULTILINE))
    assert {"torch", "accelerate"} < packages
    assert not packages & {"deepspeed", "transformers", "wandb", "evaluate", "timm", "datasets", "onnx"}
    (folder,) = (project_copy / "runs" / "train_cnn_a").iterdir()
    assert result(folder)["best_accuracy"] >= accuracy
    shutil.copytree(folder / "plots", project_copy / "holiday")
    for command in in_category("afterwards"):
        if str(folder.relative_to(project_copy)) in command and "compare" not in command:
            in_cache = cache if re.search("validate|verify|export", command) else []
            run([*shlex.split(command), *in_cache], cwd=project_copy)
    assert (project_copy / "runs" / "logbook" / "train_cnn_a" / "single" / "128_10_1_1.md").exists()
    assert {path.name.split("_")[0] for path in (folder / "validation").iterdir()} == {"val", "train"}


@pytest.mark.full
def test_make_same_bits(project_copy):
    output = run(["make", "same_bits", f"VENV={BIN.parent}"], cwd=project_copy)
    hashes = re.findall(r"^(\w{64})  runs/same_bits/[124]/\S+_00000022/model", output, re.MULTILINE)
    assert len(hashes) == 3, output
    assert len(set(hashes)) == 1, output


ANSWERS = {  # Answers to accelerate's questions that differ from the defaults, for each strategy
    "ddp": {},
    "fsdp": {
        r"torch dynamo\?.*?\]:": "yes\r",
        r"use FullyShardedDataParallel\?.*?\]:": "yes\r",
        r"FSDP activation checkpointing\?.*?\]:": "yes\r",
    },
    # Selects the next menu entry
    "zero3": {r"use DeepSpeed\?.*?\]:": "yes\r", "ZeRO optimization stage": "\x1b[B\r"},
}


@pytest.mark.parametrize("strategy", ["ddp", full("fsdp"), full("zero3")])
def test_the_plain_command_uses_the_users_accelerate_config(strategy, project_copy, tmp_path, cache):
    """Answer the questions of `accelerate config` at a terminal, then launch a script without --config_file.

    `make test` passes the path of accelerate's default config file with --config_file, because such a command
    can be forked.
    """
    home = {"HF_HOME": str(tmp_path / "hf"), "CUDA_VISIBLE_DEVICES": "", "TERM": "dumb"}
    answer_accelerate_config(home, ANSWERS[strategy])
    config = (tmp_path / "hf" / "accelerate" / "default_config.yaml").read_text()
    assert "num_processes: 2" in config
    if strategy == "fsdp":
        assert "dynamo_backend: INDUCTOR" in config
        assert "fsdp_activation_checkpointing: true" in config
    script = "train_vit.py" if strategy == "fsdp" else "train_cnn_a.py"
    words = ["launch", script, *SMALL[script], *cache, "--output_dir", tmp_path / "run"]
    # With --config_file, the command can be forked. A different HF_HOME requires a new process.
    if strategy == "ddp":
        words[1:1] = ["--config_file", tmp_path / "hf" / "accelerate" / "default_config.yaml"]
        home = {}
    run(["accelerate", *words], cwd=project_copy, env=home)
    facts = result(tmp_path / "run")
    assert (facts["status"], facts["strategy"], facts["processes"]) == ("finished", strategy, 2)


def answer_accelerate_config(env: dict[str, str], answers: dict[str, str]) -> None:
    """Answer the questions of `accelerate config`. Select multi-GPU, two processes and the given answers."""
    env = {**os.environ, **env}
    child = pexpect.spawn(str(BIN / "accelerate"), ["config"], env=env, encoding="utf-8", timeout=240)
    child.logfile_read = sys.stdout
    answers = {
        # Multi-GPU is the fourth entry below the selected entry
        "Which type of machine": "\x1b[B" * 4 + "\r",
        r"How many GPU.*\]: ?": "2\r",
        **answers,
        # Menus in which the default entry is accepted
        "In which compute environment|mixed precision|dynamo backend|Where to offload": "\r",
        "FSDP version|wrap policy|state dict": "\r",
        r"\]: ?": "\r",  # Other questions display their default answer
        pexpect.EOF: None,
    }
    while (answer := list(answers.values())[child.expect(list(answers))]) is not None:
        child.send(answer)
    child.close()
    assert child.exitstatus == 0
