"""Tests of notebooks/first_run.ipynb without a GPU, of %run, and of the command for Hugging Face jobs."""

import json
import re
import shlex
import sys

import pytest

from onecurve.distributed.process import _owns_process
from tests.conftest import BIN, CNN, ROOT, link_environment, python, result, rows_of, run

DISPLAY = """  # what Jupyter's own module does with a picture
class Image:
    def __init__(self, filename):
        assert open(filename, "rb").read(4) == b"\\x89PNG"
        print("a picture:", filename)
display = id
"""
SESSION = """  # what IPython's %run does, with a stdout that is no file
import io, runpy, signal, sys

class Stdout(io.StringIO):
    pass

def run(*words):
    sys.argv, sys.stdout = list(words), Stdout()
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as exit:
        print(sys.stdout.getvalue(), f"status {exit.code}", file=sys.__stdout__)

sys.path.insert(0, "")
before = signal.getsignal(signal.SIGTERM)
script, *flags = sys.argv[1:]
run(script, *flags)
run(script, *flags, "--name", "second")
run(script, "--data", "nowhere")
assert signal.getsignal(signal.SIGTERM) is before
"""
COMMIT = "git init -q && git add . && git -c user.name=me -c user.email=me@example.com commit -q -m all"


@pytest.mark.full
def test_each_cell_runs(project_copy, tmp_path):
    """Run the notebook cell by cell in an installed environment, in case there is no network.

    MPLBACKEND is set, as in a kernel.
    """
    session = tmp_path / "session"
    (session / "IPython").mkdir(parents=True)
    (session / "IPython" / "display.py").write_text(DISPLAY)
    run(["sh", "-c", COMMIT], cwd=project_copy)
    cells = json.loads((ROOT / "notebooks" / "first_run.ipynb").read_text())["cells"]
    codes = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    env = {"MPLBACKEND": "module://matplotlib_inline.backend_inline", "GIT_CONFIG_COUNT": "1"}
    env |= {"GIT_CONFIG_KEY_0": f"url.{project_copy}.insteadOf"}
    env |= dict(zip(["GIT_CONFIG_VALUE_0"], re.findall(r"https://\S+\.git", codes[0]), strict=True))
    for code in codes:
        is_bash = code.startswith("%%bash\n")
        words = ["bash", "-c", code.removeprefix("%%bash\n")] if is_bash else [sys.executable, "-c", code]
        output = run(words, cwd=session, env=env)
        if not (session / "train" / ".venv").exists():
            link_environment(session / "train")
    assert re.findall(r"^(\w+): accuracy 0\.9\d+, (\d) x CPU", output, re.M) == [("one", "1"), ("two", "2")]
    assert output.count("a picture: train/runs/") >= 4


def test_a_session_outlives_the_scripts_that_it_runs(tmp_path, cache):
    (tmp_path / "session.py").write_text(SESSION)
    flags = ["--data", "digits", *cache, "--max_steps", "2", "--model_folder", tmp_path]
    output = run([*python(), tmp_path / "session.py", *CNN, *flags])
    assert re.findall(r"status \d", output) == ["status 0", "status 0", "status 1"], output
    first, second = sorted(tmp_path.glob("train_cnn_a/*"))
    assert result(first)["final_loss"] == result(second)["final_loss"]


@pytest.mark.parametrize(("command", "is_own"), rows_of("whose process"))
def test_a_process_belongs_to_the_script_that_python_started(command, is_own, monkeypatch):
    words = command.split()
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    monkeypatch.setattr(sys, "orig_argv", words)
    monkeypatch.setattr(sys, "argv", ["train.py", "--seed", "1"])
    assert _owns_process() == is_own


def test_the_line_for_jobs_is_understood():
    (line,) = re.findall(r"^hf (jobs run) (.*)$", (ROOT / "docs" / "notebook.md").read_text(), re.MULTILINE)
    output = run([BIN / "hf", *line[0].split(), "--dry-run", *shlex.split(line[1])])
    assert re.search("flavor +t4-small", output)
    assert "make setup && .venv/bin/python train_cnn_a.py --data digits --output_dir /runs/first" in output
