"""Tests that a mistake prints one error line under every launcher, and that launchers add few lines."""

import re

import pytest

from tests.conftest import CNN, Job, accelerate, deepspeed, full, mutate, python, torchrun

LAUNCH = [*python(), "launch.py", "--mode", "single-node"]
LAUNCHERS = {  # Command of each launcher, and the maximum number of lines that the launcher adds
    "python": (python(), 0),
    # accelerate prints a traceback and the command that returned 1
    "accelerate, one process": (accelerate("cpu"), 16),
    "torchrun, one process": (torchrun(1), 34),
    "torchrun": (torchrun(2), 50),
    "accelerate": (accelerate("ddp_2gpu"), 50),
    # The c10d library prints a stack trace if the launcher kills a rank while the rank connects.
    "deepspeed": (deepspeed("--num_gpus", "2"), 34),
    "launch.py": ([*LAUNCH], 6),
    "launch.py, two": ([*LAUNCH, "--gpus", "2", "--log_dir", "LOGS"], 6),
}
MISTAKES = {  # Flags, message, and number of other lines that the script prints, for each mistake
    "unknown flag": (["--epoch", "1"], "error: unknown flag --epoch: did you mean --epochs?", 0),
    "no such data": (["--data", "nowhere"], "error: --data nowhere does not exist", 2),
    "exception": (["--data", "digits"], "ZeroDivisionError: division by zero", 16),
}
QUICK = [("python", "unknown flag"), ("launch.py", "no such data"), ("torchrun", "exception")]
PRODUCT = [(launcher, mistake) for launcher in LAUNCHERS for mistake in MISTAKES]


@pytest.mark.parametrize(("launcher", "mistake"), [row if row in QUICK else full(*row) for row in PRODUCT])
def test_one_line(launcher, mistake, project_copy, tmp_path, cache):
    words, added = LAUNCHERS[launcher]
    flags, message, other_lines = MISTAKES[mistake]
    if mistake == "exception":
        mutate(project_copy, "train_cnn_a.py", "            run.checkpoint(step)\n", "            1 / 0\n")
    words = [tmp_path / "logs" if word == "LOGS" else word for word in words]
    words += [*CNN, "--batch_size", "16", *flags, *cache, "--output_dir", tmp_path / "run"]
    status, output = Job(words, cwd=project_copy).wait()
    assert status != 0
    warnings = (
        r"torch/distributed/run\.py|OMP_NUM_THREADS"  # Launchers print these lines even without a mistake
    )
    lines = [line for line in output.splitlines() if not re.search(warnings, line)]
    pattern = rf"(localhost \| )?(train_cnn_a.py: )?{re.escape(message)}"
    message_lines = [line for line in lines if re.match(pattern, line)]
    assert len(message_lines) == 1, output
    assert len(lines) <= 1 + other_lines + added, output
    if mistake != "exception":
        assert "Traceback" not in "\n".join(lines[: lines.index(message_lines[0])]), output
    # torchrun and accelerate print which rank failed and why.
    if launcher in ("torchrun, one process", "torchrun", "accelerate"):
        assert f"traceback : {message.removeprefix('error: ')}" in output
    if launcher.startswith("launch.py"):
        # launch.py names the failed rank if the job has several ranks
        rank = r"(rank \d \(host \S+\) failed: )?"
        assert re.match(f"error: localhost: {rank}{re.escape(message.removeprefix('error: '))}", lines[-1])
