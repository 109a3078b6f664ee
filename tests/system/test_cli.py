"""Tests of commands' exit statuses and messages, including under file size limits and in launch.py jobs."""

import shlex
import subprocess
import sys

import pytest

from onecurve.system.cli import config_file, run_command
from tests.conftest import ROOT, Job, python, run

LAUNCH = ["launch.py", "--mode", "single-node", "--log_dir"]
TRAIN = [str(ROOT / "train_cnn_a.py"), "--data", "digits", "--batch_size", "16", "--max_steps", "2"]


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (None, 0, ""),
        (ValueError("two\nlines \x1b[31m"), 1, "error: two\nlines \\x1b[31m\n"),
        (FileNotFoundError(2, "No such file", "a\udcff"), 1, "error: a\\xff: No such file\n"),
        (OSError("unknown"), 1, "error: unknown\n"),
        (
            ValueError(f"--model {'x' * 5000}: no"),
            1,
            f"error: --model {'x' * 200}... (4,801 more characters) no\n",
        ),
        (BrokenPipeError("of a socket"), 1, "error: of a socket\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_a_command_ends_with_a_line_and_a_status(error, status, text, capsys):
    def main() -> int:
        if error:
            raise error
        return 0

    assert run_command(main) == status
    assert capsys.readouterr().err == text


# A short output is written when the process ends, and a long output is written earlier.
@pytest.mark.parametrize("lines", [10, 100_000])
def test_a_reader_that_has_enough_is_no_error(lines):
    code = "import sys; from onecurve.system.cli import run_command\n"
    code += f"sys.exit(run_command(lambda: print('x\\n' * {lines}) or 0))"
    shell = [*("bash", "-c", 'set -o pipefail; "$@" | true'), "bash", sys.executable, "-c", code]
    process = subprocess.run(shell, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (process.returncode, process.stderr) == (0, "")


@pytest.mark.full
@pytest.mark.parametrize(
    ("blocks", "message"), [(200, "File too large"), (4, "limits file sizes to 4,096 bytes")]
)
def test_files_that_may_not_grow(blocks, message, tmp_path):
    """Limit file sizes with ulimit -f (in KiB), once with an existing cache and once without a cache."""
    words = [*python(), *TRAIN, "--cache_dir", tmp_path / "cache", "--output_dir"]
    if blocks == 200:
        run([*words, tmp_path / "first"])
    line = shlex.join(map(str, [*words, tmp_path / "run"]))
    status, output = Job(["bash", "-c", f"ulimit -f {blocks}; {line}"]).wait()
    assert status == 1
    (line,) = [line for line in output.splitlines() if "error" in line]
    assert line.startswith("error: ")
    assert message in line
    assert "Traceback" not in output


def test_the_output_of_a_job_is_not_its_status(tmp_path):
    """Check the exit status of a job whose script fails after printing `preempted: `."""
    script = tmp_path / "script.py"
    script.write_text("print('preempted: x', flush=True)\nraise SystemExit('error: 3 is bad')\n")
    status, output = Job([*LAUNCH, tmp_path, script]).wait()
    assert status == 1, output
    assert "error: localhost: 3 is bad" in output


@pytest.mark.parametrize(
    ("folder", "name", "expected"),
    [
        (ROOT, "ddp_2gpu.yaml", "accelerate_configs/ddp_2gpu.yaml"),
        (ROOT, "accelerate_configs/ddp_2gpu.yaml", "accelerate_configs/ddp_2gpu.yaml"),
        (ROOT / "accelerate_configs", "ddp_2gpu.yaml", f"{ROOT}/accelerate_configs/ddp_2gpu.yaml"),
        (ROOT / "docs", "ddp_2gpu.yaml", f"{ROOT}/accelerate_configs/ddp_2gpu.yaml"),
        (ROOT, "nowhere.yaml", "nowhere.yaml"),
    ],
)
def test_a_config_file_is_found_by_its_bare_name(folder, name, expected, monkeypatch):
    monkeypatch.chdir(folder)
    assert str(config_file(name)) == expected
