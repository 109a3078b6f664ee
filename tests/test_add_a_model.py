"""Tests of the two examples in docs/add_a_model.md: first their changes to scripts, then their commands."""

import re
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.conftest import BIN, ROOT, Job, full, metrics, mutate, python, result, run

TEXT = (ROOT / "docs" / "add_a_model.md").read_text()
EXAMPLES = dict(zip(("convnext", "mine"), TEXT.split("## Your own module"), strict=True))
(RECIPE,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)


def commands(example: str) -> list[str]:
    return "".join(re.findall(r"```sh\n(.*?)```", EXAMPLES[example], re.DOTALL)).splitlines()


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Copy the project with its tests and documents, and apply the changes in docs/add_a_model.md."""
    folder = tmp_path_factory.mktemp("add_a_model") / "project"
    left_out = shutil.ignore_patterns(".git", ".venv", "runs", "weights", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, folder, ignore=left_out)
    for example, text in EXAMPLES.items():
        (copying,) = (command for command in commands(example) if command.startswith("sed "))
        subprocess.run(copying, shell=True, cwd=folder, check=True)
        for change in re.findall(r"```diff\n(.*?)```", text, re.DOTALL):
            old, new = ("".join(x[1:] + "\n" for x in change.splitlines() if x[0] == sign) for sign in "-+")
            mutate(folder, f"train_{example}.py", old, new)
    (folder / "recipes" / "convnext_digits.yaml").write_text(RECIPE)
    return folder


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_changes_leave_a_script_in_style(example, project):
    for words in (["check"], ["format", "--check"]):
        run([BIN / "ruff", *words, "--config", ROOT / "pyproject.toml", f"train_{example}.py"], cwd=project)


@pytest.mark.parametrize("example", ["mine", full("convnext")])
def test_the_example_trains_resumes_and_is_validated(example, project, cache):
    outputs = []
    launches = [words for words in map(shlex.split, commands(example)) if words[0] == "accelerate"]
    for words in launches:
        outputs.append(run([*words, "--mixed_precision", "no", "--log_every", "1", *cache], cwd=project))
    ddp, fsdp, continued = outputs
    assert "continuing" not in ddp + fsdp
    assert "continuing at step 3" in continued
    losses = [
        [line["train/loss"] for line in metrics(project / "runs" / name) if "train/loss" in line][:3]
        for name in (f"{example}_ddp", f"{example}_fsdp")
    ]
    assert len(losses[0]) == 3
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    facts = result(project / "runs" / f"{example}_ddp")
    assert (facts["script"], facts["strategy"], facts["steps"]) == (f"train_{example}", "fsdp", 5)
    (validate,) = (words for words in map(shlex.split, commands(example)) if "validate.py" in words)
    output = run([*validate, *cache], cwd=project)
    assert "top-1" in output.lower()


def test_documents_and_tests_discover_the_script(project):
    """Check that documents and tests discover a new script without a list that someone must edit."""
    for words in map(shlex.split, commands("convnext")):
        if words[:2] == ["python", "-m"]:
            run(words, cwd=project)
    page = (project / "docs" / "flags.md").read_text()
    section = page.split("## train_convnext.py")[1].split("\n## ")[0]
    assert "| `--model` | convnext_tiny | Name of a ConvNeXt in timm. |" in section
    assert "--patch_size" not in section
    words = ["python", "-m", "pytest", "--collect-only", "-q", "tests/distributed/test_parity.py"]
    assert "[convnext-zero3]" in run(words, cwd=project, env={"PYTEST_ADDOPTS": ""})


HOUSE = [
    f"tests/{name}.py"
    for name in ["test_house", "test_waits", "flags/test_recipe", "test_messages", "test_readme"]
]
NEW_FLAG = '    new_flag: float = flag(0.5, "a share", minimum=0)\n'
NEW_METRIC = '    "surest": Metric("surest", lambda logits, _: logits.softmax(1).amax(1)),\n'


@pytest.mark.full
@pytest.mark.real_processes  # This test starts pytest, whose tests fork processes
def test_a_flag_a_metric_and_scripts_pass_the_tests_of_the_house(project):
    """Follow the steps in CONTRIBUTING.md for a new flag, a new metric and new scripts."""
    for before, new in (("    image_column: str", NEW_FLAG), ('    "loss": Metric("loss"', NEW_METRIC)):
        mutate(project, "onecurve/flags/recipe.py", before, new + before)
    run([*python(), "-m", "docs.generate"], cwd=project)
    words = ["-m", "pytest", "-q", "-m", "not full", *HOUSE]
    status, output = Job([sys.executable, *words], cwd=project).wait(300)
    assert (status, "failed" in output) == (0, False), output
    assert "new_flag" in (project / "docs" / "flags.md").read_text()
