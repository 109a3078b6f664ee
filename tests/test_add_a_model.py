"""docs/add_a_model.md as written: its changes to train_vit.py, then its commands."""

import re
import shlex
import shutil
import subprocess

import pytest

from tests.conftest import BIN, ROOT, metrics, mutate, result, run

TEXT = (ROOT / "docs" / "add_a_model.md").read_text()
COMMANDS = "".join(re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)).splitlines()
CHANGES = re.findall(r"```diff\n(.*?)```", TEXT, re.DOTALL)
(RECIPE,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
SCRIPT = "train_convnext.py"


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of the project, with its tests and documents, and with the document's changes."""
    folder = tmp_path_factory.mktemp("add_a_model") / "project"
    left_out = shutil.ignore_patterns(".git", ".venv", "runs", "weights", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, folder, ignore=left_out)
    (copying,) = (command for command in COMMANDS if command.startswith("sed "))
    subprocess.run(copying, shell=True, cwd=folder, check=True)
    for change in CHANGES:
        old, new = (
            "".join(line[1:] + "\n" for line in change.splitlines() if line[0] == sign) for sign in "-+"
        )
        mutate(folder, SCRIPT, old, new)
    (folder / "recipes" / "convnext_digits.yaml").write_text(RECIPE)
    return folder


def test_the_changes_leave_a_script_in_style(project):
    for words in (["check"], ["format", "--check"]):
        run([BIN / "ruff", *words, "--config", ROOT / "pyproject.toml", SCRIPT], cwd=project)


def test_it_trains_resumes_and_is_validated(project, cache):
    outputs = []
    launches = [words for words in map(shlex.split, COMMANDS) if words[0] == "accelerate"]
    for words in launches:
        outputs.append(run([*words, "--mixed_precision", "no", "--log_every", "1", *cache], cwd=project))
    ddp, fsdp, continued = outputs
    assert "continuing" not in ddp + fsdp
    assert "continuing at step 3" in continued
    losses = [
        [line["train/loss"] for line in metrics(project / "runs" / name) if "train/loss" in line][:3]
        for name in ("convnext_ddp", "convnext_fsdp")
    ]
    assert len(losses[0]) == 3
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    found = result(project / "runs" / "convnext_ddp")
    assert (found["script"], found["strategy"], found["steps"]) == ("train_convnext", "fsdp", 5)
    (validate,) = (words for words in map(shlex.split, COMMANDS) if "validate.py" in words)
    output = run([*validate, *cache], cwd=project)
    assert "top-1" in output.lower()


def test_documents_and_tests_find_it(project):
    """They discover the script; no list has to be edited."""
    for words in map(shlex.split, COMMANDS):
        if words[:2] == ["python", "-m"]:
            run(words, cwd=project)
    page = (project / "docs" / "flags.md").read_text()
    section = page.split("## train_convnext.py")[1].split("\n## ")[0]
    assert "| `--model` | convnext_tiny | any ConvNeXt of timm |" in section
    assert "--patch_size" not in section
    words = ["python", "-m", "pytest", "--collect-only", "-q", "tests/distributed/test_parity.py"]
    assert "[convnext-zero3]" in run(words, cwd=project)
