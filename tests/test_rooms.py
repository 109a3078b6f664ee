"""Imports between the rooms of common/ go one way, as pyproject.toml says, and in no circle."""

import shutil

import pytest

from tests.conftest import BIN, ROOT, Job


def lint(folder) -> tuple[int, str]:
    return Job([BIN / "lint-imports", "--no-cache"], cwd=folder, env={"PYTHONPATH": str(folder)}).wait(60)


def test_imports_between_rooms_go_one_way():
    status, output = lint(ROOT)
    assert status == 0, output


@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("common/system/files.py", "import common.data.decode", "imports between rooms go one way"),
        ("common/report/markdown.py", "import common.report.page", "no import circles"),
        ("common/attic/__init__.py", "", "imports between rooms go one way"),
    ],
    ids=["upward", "circle", "a room that nobody knows"],
)
def test_another_import_is_found(tmp_path, file, line, contract):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "common", tmp_path / "common", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / file).parent.mkdir(exist_ok=True)
    with open(tmp_path / file, "a") as source:
        source.write(f"\n{line}\n")
    status, output = lint(tmp_path)
    assert status != 0
    assert f"{contract} BROKEN" in output
