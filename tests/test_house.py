"""Tests of the repository's limits: line budgets, imports in one direction, and unique file names."""

import ast
import itertools
import re
import shutil
from collections import Counter, defaultdict
from dataclasses import fields
from pathlib import Path

import pytest

from onecurve.flags.recipe import ImageRecipe
from tests.conftest import BIN, ROOT, Job, full, python

# Maximum number of statements in each layer, set to 10% above the count at that time. A commit that needs
# more should state the reason. The layer "" contains the top-level commands except the train scripts,
# because anyone may add a train script.
BUDGETS = {"onecurve/": 14_400, "tools/": 6_200, "": 1_250, "tests/": 20_400, "benchmarks/": 2_200}
MAX_LINES = 600  # Maximum number of lines in a file outside of tests/ and benchmarks/
SHARED_FLAGS = 44  # Number of flags that all image scripts share


def sources() -> list[Path]:
    folders = [ROOT / name for name in ("onecurve", "tools", "tests", "benchmarks")]
    files = [*ROOT.glob("*.py"), *(path for folder in folders for path in folder.rglob("*.py"))]
    return [path.relative_to(ROOT) for path in files]


def lines_of(path: Path) -> list[str]:
    return (ROOT / path).read_text().splitlines()


def statements_of(path: Path) -> int:
    """Count the lines of code in a file, excluding blank lines, comments, docstrings and imports."""
    lines, skipped = lines_of(path), set[int]()
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            skipped.update(range(node.lineno, node.end_lineno + 1))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            skipped.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    code = [n for n, line in enumerate(lines, 1) if line.strip() and not line.lstrip().startswith("#")]
    return len(set(code) - skipped)


@pytest.mark.parametrize(("folder", "budget"), BUDGETS.items())
def test_the_budget(folder, budget):
    inside = [path for path in sources() if str(path).startswith(folder)]
    if not folder:
        inside = [path for path in inside if len(path.parts) == 1 and not path.match("train_*.py")]
    assert 0 < sum(map(statements_of, inside)) <= budget


def test_files_are_short():
    files = [path for path in sources() if path.parts[0] not in ("tests", "benchmarks")]
    assert [str(path) for path in files if len(lines_of(path)) > MAX_LINES] == []


def test_each_file_name_has_one_meaning():
    names = Counter(path.name for path in sources() if path.parts[0] in ("onecurve", "tools"))
    assert [name for name, count in names.items() if count > 1 and name != "__init__.py"] == []


def test_each_public_name_has_one_meaning():
    """Check that names of functions and classes are unique, except main and parse_flags in each command."""
    files_of = defaultdict(list)
    for path in sources():
        if path.parts[0] not in ("tests", "benchmarks") and not path.match("train_*.py"):
            for node in ast.parse((ROOT / path).read_text()).body:
                if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                    files_of[node.name].append(str(path))
    del files_of["main"], files_of["parse_flags"]
    assert {name: files for name, files in files_of.items() if len(files) > 1} == {}


def test_the_scripts_share_no_more_flags():
    assert len(fields(ImageRecipe)) <= SHARED_FLAGS


def lint(folder: Path) -> tuple[int, str]:
    return Job([BIN / "lint-imports", "--no-cache"], cwd=folder, env={"PYTHONPATH": str(folder)}).wait(60)


def test_imports_go_one_way():
    status, output = lint(ROOT)
    assert status == 0, output


@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("onecurve/system/files.py", "import onecurve.data.decode", "imports between packages go one way"),
        ("tools/logbook/markdown.py", "import tools.logbook.page", "no import circles"),
        ("onecurve/run/log.py", "if TYPE_CHECKING:\n    import onecurve.run.run", "no import circles"),
        ("onecurve/numerics/order.py", "import tools.logbook.run_record", "the core knows no tool"),
        ("tools/plan/cost.py", "import tools.doctor.facts", "no tool knows another"),
        ("onecurve/more/__init__.py", "", "imports between packages go one way"),
    ],
    ids=["upward", "circle", "circle of types", "a tool from the core", "another tool", "an unknown package"],
)
def test_a_forbidden_import_is_detected(tmp_path, file, line, contract):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name in ("onecurve", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / file).parent.mkdir(exist_ok=True)
    with open(tmp_path / file, "a") as source:
        source.write(f"\n{line}\n")
    status, output = lint(tmp_path)
    assert status != 0
    assert f"{contract} BROKEN" in output


# --- docs/architecture.md: which files to read first, and which parts can be removed

ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading."""
    text = ARCHITECTURE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]


def test_the_core_can_be_read_in_one_sitting():
    count = 0
    for file, names, _ in rows("The core in one sitting"):
        nodes = {}
        for node in ast.walk(ast.parse((ROOT / file.strip("`")).read_text())):
            for child in ast.iter_child_nodes(node):
                if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                    prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
                    nodes[prefix + child.name] = child.end_lineno - child.lineno + 1
        count += sum(nodes[name] for name in re.findall("`(.*?)`", names))
    assert 250 < count < 350


EXTRAS = {name: re.findall("`(.*?)`", f"{files} {tests}") for name, files, tests, *_ in rows("Extras")}


@pytest.mark.parametrize("script", ["train_cnn_a.py", *map(full, ("train_hello.py", "train_vit.py"))])
def test_scripts_start_without_the_extras(script, project_copy, tmp_path):
    for path in itertools.chain(*EXTRAS.values()):
        assert (ROOT / path).exists(), path
        shutil.rmtree(project_copy / path, ignore_errors=True)
        (project_copy / path).unlink(missing_ok=True)
    words = [script, "--max_steps", "1", "--trackers", "none", "--output_dir", tmp_path / "run"]
    data = [] if script == "train_hello.py" else ["--data", "digits", "--cache_dir", tmp_path / "cache"]
    small = ["--model", "test_vit", "--image_size", 32, "--patch_size", 8] if "vit" in script else []
    status, output = Job([*python(), *words, *data, *small], cwd=project_copy).wait(120)
    assert status == 0, output
