"""Tests of the commands that experiments run, where experiments stop, and where they resume."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.conftest import Job, read_until
from tests.logbook.pages import check, rows

SAVES = """#!/bin/bash
trap 'sleep 1; echo saved; exit 75' TERM INT
echo trains
sleep 60 >/dev/null 2>&1 &
wait
"""

SEARCHES = """#!/bin/bash
case $1 in
-c) exec {python} "$@" ;;
find_batch_size.py) for word; do [[ $word != --output=* ]] || echo '{{"answer": 28}}' >"${{word#*=}}"; done ;;
*) exit 3 ;;
esac
"""

# Program that starts a train script directly instead of with `-m accelerate.commands.launch --config_file
# FILE`
WITHOUT_LAUNCHER = f"""#!/bin/bash
[ "$2" != accelerate.commands.launch ] || shift 4
exec {sys.executable} "$@"
"""


def experiment(name: str, folder: Path, *flags: object, **variables: object) -> Job:
    env = {"FOLDER": folder, "PYTHON": sys.executable} | variables
    return Job([f"experiments/{name}.sh", *flags], env={key: str(value) for key, value in env.items()})


def write_program(folder: Path, text: str, name: str = "python") -> Path:
    """Write a program that experiments start instead of the real program."""
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)
    return folder / name


def test_an_experiment_shows_its_commands(tmp_path):
    status, output = experiment("vit", tmp_path, SIZE="full", S3_PREFIX="s3://b/p", DRY_RUN=1).wait()
    assert status == 0, output
    steps = [line.removeprefix("# ") for line in output.splitlines() if line.startswith("# ")]
    parts = ("largest batch", "training", "all metrics")
    expected_steps = [f"{part}, {strategy}" for strategy in ("fsdp", "ddp") for part in parts]
    assert steps == [*expected_steps, "pages", "comparison"]
    assert "launch.py --config_file accelerate_configs/ddp_2x4gpu.yaml --hostfile hostfile " in output
    assert "train_vit.py --config recipes/vit_b32_cifar10_finetune.yaml " in output
    assert f"--output_dir={tmp_path}/ddp --s3=s3://b/p/full/ddp" in output
    _, output_of_folds = experiment("vit", tmp_path, DRY_RUN=1, FOLDS=2).wait()
    assert "all metrics" not in output_of_folds  # The dry run left no run that could be evaluated
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("command", "reason"), [("", 3), ("kill -TERM $PPID", 143)])
def test_an_experiment_names_the_step_that_failed(command, reason, tmp_path):
    """Stop an experiment, even if its first step's process does not exist yet."""
    python = write_program(tmp_path, "#!/bin/bash\nsleep 1\nexit 3\n")
    write_program(tmp_path, f'#!/bin/bash\n{command}\nexec /bin/mkdir "$@"\n', "mkdir")
    path = f"{tmp_path}:{os.environ['PATH']}"
    status, output = experiment("speedup", tmp_path / "runs", PYTHON=python, PATH=path).wait(60)
    assert (status, "ddp_2gpu" in output) == (1, False)
    message = f"single_gpu failed with exit status {reason}. The same command resumes with this step\n"
    assert output.endswith(f"error: training, {message}")


@pytest.mark.parametrize(("send", "number"), [(os.kill, signal.SIGTERM), (os.killpg, signal.SIGINT)])
def test_an_experiment_passes_a_signal_on_and_waits(send, number, tmp_path):
    """Send SIGTERM to the experiment alone, or SIGINT to its process group, as Ctrl-C does."""
    job = experiment("speedup", tmp_path / "runs", PYTHON=write_program(tmp_path, SAVES))
    read_until("trains\n", job)
    send(job.process.pid, number)
    status, output = job.wait(60)
    assert status == 1
    assert output.startswith("saved\nerror: training, single_gpu failed with exit status 75")


@pytest.mark.parametrize(("batch", "sizes"), [("64", (64, 16)), ("largest", (56, 28))])
def test_the_share_of_a_process_is_the_largest_divisor_that_fits(batch, sizes, tmp_path):
    """Replace Python with a program that reports a largest batch size of 28.

    For a per-process batch of 32, the training run must use micro-batches of 16.
    """
    python = write_program(tmp_path, SEARCHES.format(python=sys.executable))
    for line in ("# largest batch, fsdp\n", "# largest batch, fsdp: already done\n"):
        status, output = experiment("vit", tmp_path / "runs", PYTHON=python, BATCH=batch).wait()
        assert status == 1
        assert line in output
        assert "--batch_size={} --per_device_batch_size={} ".format(*sizes) in output


@pytest.mark.full
def test_the_product_of_another_command_is_replaced(tmp_path):
    product = tmp_path / "runs" / "single_gpu" / "result.json"
    product.parent.mkdir(parents=True)
    product.write_text('{"status": "finished"}')
    (tmp_path / "runs" / "steps").mkdir()
    (tmp_path / "runs" / "steps" / "training__single_gpu").write_text("of other data\n")
    for _ in range(2):
        status, output = experiment("speedup", tmp_path / "runs", DATA=tmp_path / "nowhere").wait()
        assert (status, "already done" in output) == (1, False), output
        assert product.exists(), "a result is not lost"


@pytest.mark.parametrize(
    ("flags", "variables"), [((), {"SEEDS": 3}), (("--seeds", 3), {}), (("--seeds=3",), {"SEEDS": 7})]
)
def test_an_experiment_with_several_seeds_shows_its_commands(flags, variables, tmp_path):
    status, output = experiment("speedup", tmp_path, *flags, DRY_RUN=1, **variables).wait()
    assert status == 0, output
    trainings = re.findall(r"# training, (\S+)\n(.*)", output)
    names = [f"{c}{s}" for c in ("single_gpu", "ddp_2gpu", "ddp_4gpu") for s in ("", "_seed1", "_seed2")]
    assert [name for name, _ in trainings] == names
    assert ["--seed=2" in command for _, command in trainings] == [False, False, True] * 3
    assert re.search(r"logbook.py compare .*single_gpu \S*single_gpu_seed1 \S*single_gpu_seed2 ", output)


def test_folds_replace_the_held_out_tenth(tmp_path):
    status, output = experiment("vit", tmp_path, "--folds", 2, DRY_RUN=1).wait()
    assert status == 0, output
    trainings = re.findall(r"# training, .*\n(.*)", output)
    assert ["--fold=" in command for command in trainings] == [True] * 4
    assert not any("--holdout" in command for command in trainings)


NUMBER = "is not a number of runs. Pass a positive number, for example 5"
FLAGS = "The flags are --seeds N and --folds N. experiments/steps.sh lists the variables"


@pytest.mark.parametrize(
    ("flags", "variables", "message"),
    [
        ((), {"SIZE": "half"}, "SIZE=half is neither rehearsal nor full"),
        ((), {"SEEDS": "some"}, f"SEEDS=some {NUMBER}"),
        ((), {"BATCH": "some"}, "BATCH=some is neither a number of images nor largest"),
        (("--seeds", "0"), {}, f"--seeds 0 {NUMBER}"),
        (("--seeds=some",), {"SEEDS": 3}, f"--seeds some {NUMBER}"),
        (("--seeds",), {}, f"--seeds nothing {NUMBER}"),
        (("--folds", "x"), {}, f"--folds x {NUMBER}"),
        (("--seed", "3"), {}, f"unknown flag --seed. {FLAGS}"),
        (("train_cnn_a.py",), {}, f"unknown flag train_cnn_a.py. {FLAGS}"),
    ],
)
@pytest.mark.parametrize("name", ["vit", "speedup"])
def test_wrong_flags_and_variables_are_refused(name, flags, variables, message, tmp_path):
    status, output = experiment(name, tmp_path / "runs", *flags, **variables).wait()
    assert (status, output) == (2, f"error: {message}\n")
    assert not (tmp_path / "runs").exists()


@pytest.mark.full
def test_an_experiment_resumes_at_its_next_seed(tmp_path):
    """Let two seeds finish and the third fail. The next start must resume with the third seed."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "single_gpu_seed2").write_text("in the way")
    start = {"DATA": "digits", "SEEDS": 3, "LOGBOOK": tmp_path / "book"}
    status, output = experiment("speedup", tmp_path / "runs", **start).wait(600)
    assert (status, "error: training, single_gpu_seed2 failed" in output) == (1, True), output
    (tmp_path / "runs" / "single_gpu_seed2").unlink()
    status, output = experiment("speedup", tmp_path / "runs", **start).wait(900)
    assert status == 0, output
    assert output.count("already done") == 2
    check(page := tmp_path / "book/compare/experiment_speedup_rehearsal.md")
    text = page.read_text()
    assert rows(text)["single x 1"][:2] == ["3", "0, 1, 2"]
    assert "ddp x 2 and single x 1 are not distinguishable" in text or "ddp x 2 is " in text


@pytest.mark.full
def test_folds_in_turn_and_their_predictions(tmp_path):
    """Start the experiment twice.

    The second start must train nothing, and each training image must be predicted once.
    """
    words = ["--folds", 2, "train_cnn_a.py", "--data", "digits", "--max_steps", 4, "--trackers", "none"]
    start = {"LOGBOOK": tmp_path / "book", "PYTHON": write_program(tmp_path, WITHOUT_LAUNCHER)}
    for done_count, variables in ((0, start), (4, start | {"DRY_RUN": 1})):
        status, output = experiment("folds", tmp_path / "runs", *words, **variables).wait(600)
        assert (status, output.count("already done")) == (0, done_count), output
    lines = (tmp_path / "runs" / "predictions.csv").read_text().splitlines()
    assert lines[0] == "run,id,file,label,predicted,probability"
    assert sorted(int(line.split(",")[1]) for line in lines[1:]) == list(range(1437))
    right = sum(line.split(",")[3] == line.split(",")[4] for line in lines[1:])
    page = rows((tmp_path / "book/compare/experiment_folds_full.md").read_text())
    assert page["single x 1"][-1] == f"{right / 1437:.4f}"
