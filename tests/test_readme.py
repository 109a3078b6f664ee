"""Tests that documents match the code: generated pages, links and recipes."""

import dataclasses
import re

import pytest

from docs import generate
from docs.generate import FLAGS, train_scripts
from onecurve.flags.fields import flags_of_other_projects
from onecurve.flags.recipe import parse
from onecurve.models.script import load_script, recipe_class
from tests.conftest import ROOT
from validate import Validation

DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / folder / "README.md" for folder in ("accelerate_configs", "ds_configs", "benchmarks")),
]


def test_generated_pages_are_up_to_date():
    assert FLAGS.read_text() == generate.flags_page(), "run: python -m docs.generate"
    assert generate.TROUBLE.read_text() == generate.trouble_page(), "run: python -m docs.generate"
    assert generate.ARCHITECTURE.read_text() == generate.architecture_page(), "run: python -m docs.generate"
    assert generate.COMING_FROM.read_text() == generate.coming_from_page(), "run: python -m docs.generate"


def test_every_recipe_belongs_to_its_script():
    scripts = {path.stem.removeprefix("train_"): path for path in train_scripts()}
    files = sorted((ROOT / "recipes").glob("*.yaml"))
    assert len(files) >= 7
    for file in files:
        name = max((name for name in scripts if file.name.startswith(f"{name}_")), key=len)
        assert scripts[name].name in file.read_text(), file.name
        recipe = recipe_class(load_script(scripts[name]))
        assert parse(recipe, ["--config", str(file)]) != recipe(), file.name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_and_file_of_a_document_exists(document):
    text = document.read_text()
    for name, _, anchor in (link.partition("#") for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text)):
        target = document.parent / name if name else document
        assert target.exists(), name
        assert not anchor or anchor in anchors(target.read_text()), f"{name}#{anchor}"
    for name in re.findall(r"\b(?:accelerate_configs|ds_configs|recipes)/\w+\.(?:yaml|json)", text):
        assert (ROOT / name).exists() or document.name == "add_a_model.md", name


def test_each_flag_for_newcomers_exists():
    rows = [row for project in flags_of_other_projects() for row in project["rows"]]
    assert all(row.get("here") or row["note"] for row in rows)
    flags = {name for row in rows for name in re.findall(r"(?<!\S)`?--(\w+)", _answer(row))}
    assert len(flags) > 30
    documented_flags = set(re.findall(r"^\| `--(\w+)`", FLAGS.read_text(), re.MULTILINE))
    launcher_flags = {"config_file", "nnodes", "node_rank", "nproc_per_node", "master_addr", "master_port"}
    assert flags <= documented_flags | launcher_flags | {
        field.name for field in dataclasses.fields(Validation)
    }


def _answer(row: dict) -> str:
    return " ".join([*row.get("here", ()), row.get("note", "")])


def test_the_architecture_page_names_every_package_and_only_existing_files():
    text = (ROOT / "docs" / "architecture.md").read_text()
    for name in re.findall(r"`((?:\w+/)*\w+\.py)`", text):
        assert (ROOT / name).exists() or (ROOT / "onecurve" / name).exists(), name
    for path in (*(ROOT / "onecurve").iterdir(), *(ROOT / "tools").iterdir()):
        name = f"`{path.name}/`" if path.is_dir() else f"`{path.name}`"
        # A folder without Python files remains if its package has moved.
        is_left_over = path.is_dir() and not list(path.rglob("*.py"))
        assert name in text or path.name == "__init__.py" or is_left_over, name


def anchors(text: str) -> set[str]:
    """Return the anchors that a Markdown viewer assigns to the headings."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
