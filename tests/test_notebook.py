"""notebooks/first_run.ipynb, cell by cell, without a GPU, and the line for Hugging Face jobs."""

import json
import re
import shlex
import sys

import pytest

from tests.conftest import BIN, ROOT, link_environment, run

DISPLAY = """  # what Jupyter's own module does with a picture
class Image:
    def __init__(self, filename):
        assert open(filename, "rb").read(4) == b"\\x89PNG"
        print("a picture:", filename)
display = id
"""
COMMIT = "git init -q && git add . && git -c user.name=me -c user.email=me@example.com commit -q -m all"


@pytest.mark.full
def test_each_cell_runs(project_copy, tmp_path):
    """`make setup` finds an installed environment, as there may be no network. MPLBACKEND is a kernel's."""
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


def test_the_line_for_jobs_is_understood():
    (line,) = re.findall(r"^hf (jobs run) (.*)$", (ROOT / "docs" / "notebook.md").read_text(), re.MULTILINE)
    output = run([BIN / "hf", *line[0].split(), "--dry-run", *shlex.split(line[1])])
    assert re.search("flavor +t4-small", output)
    assert "make setup && .venv/bin/python train_cnn_a.py --data digits --output_dir /runs/first" in output
