"""Imports go one way, from tools/ to common/ and between the rooms of common/, and in no circle."""

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
        ("tools/logbook/markdown.py", "import tools.logbook.page", "no import circles"),
        ("common/run/log.py", "import tools.logbook.record", "the core knows no tool"),
        ("tools/plan/cost.py", "import tools.doctor.facts", "no tool knows another"),
        ("common/attic/__init__.py", "", "imports between rooms go one way"),
    ],
    ids=["upward", "circle", "a tool from the core", "another tool", "a room that nobody knows"],
)
def test_another_import_is_found(tmp_path, file, line, contract):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name in ("common", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / file).parent.mkdir(exist_ok=True)
    with open(tmp_path / file, "a") as source:
        source.write(f"\n{line}\n")
    status, output = lint(tmp_path)
    assert status != 0
    assert f"{contract} BROKEN" in output
