"""Generates parts of the documents: flags, the doctor's findings, the list of files, other projects' flags.

    python -m docs.generate

docs/flags.md comes from the recipes of all train_*.py, the table of docs/trouble.md from
tools/doctor/findings.yaml, the list of docs/architecture.md from the first paragraph of each file, the tables
of docs/coming_from.md from onecurve/flags/elsewhere.yaml.
"""

import ast
import dataclasses
import re
from pathlib import Path

from onecurve.flags.fields import as_text, elsewhere, help_of
from onecurve.flags.recipe import ImageRecipe, Recipe
from onecurve.models.script import load_script, recipe_class
from onecurve.system.paths import ROOT
from tools.doctor.checks import FINDINGS

FLAGS, TROUBLE, ARCHITECTURE, COMING_FROM = (
    ROOT / "docs" / f"{name}.md" for name in ("flags", "trouble", "architecture", "coming_from")
)
ROOMS = ("onecurve", "tools", "cluster", "experiments", "benchmarks")  # of the list of files
BEGIN, END = "<!-- generated -->", "<!-- end -->"


def train_scripts() -> list[Path]:
    return sorted(ROOT.glob("train_*.py"))


def flag_table(recipe_class: type[Recipe], without: type[Recipe] | None = None) -> str:
    """The flags as a Markdown table, without those that `without` has with the same default."""
    others = dataclasses.fields(without) if without else ()
    known = {f.name: (f.default, f.metadata["per_script"]) for f in others}
    rows = ["| flag | default | what it is |", "|---|---|---|"]
    for field in dataclasses.fields(recipe_class):
        if known.get(field.name) == (field.default, field.metadata["per_script"]):
            continue
        default = "" if field.default is None else as_text(field.default)
        default = "each script's own" if field.metadata["per_script"] else default
        allowed = f" ({', '.join(field.metadata['choices'])})" if field.metadata["choices"] else ""
        rows.append(f"| `--{field.name}` | {default} | {help_of(field)}{allowed} |")
        if name := field.metadata["also"][0]:
            rows.append(f"| `--{name}` |  | {help_of(field, name)} |")
    return "\n".join(rows)


def flags_page() -> str:
    parts = [
        "<!-- `python -m docs.generate` writes this page from the recipes. -->",
        "# Flags",
        "`--config FILE` sets any of them from a YAML or JSON file; flags on the command line win."
        " `--batch-size` and\n`--batch_size` are the same, `--learning_rate` is `--lr`, and `--no_nesterov`"
        " switches off `--nesterov`. Two\nnames of one setting in one command or file are an error;"
        " a repeated flag keeps its last value. An\nempty default means unset.",
        "## All scripts",
        flag_table(Recipe),
        "## Image scripts",
        flag_table(ImageRecipe, without=Recipe),
    ]
    for path in train_scripts():
        script = load_script(path)
        recipe = recipe_class(script)
        base = ImageRecipe if issubclass(recipe, ImageRecipe) else Recipe
        about = (script.__doc__ or "").partition("\n\n")[0]
        parts += [f"## {path.name}: its own flags and defaults", about, flag_table(recipe, without=base)]
    return "\n\n".join(parts) + "\n"


def trouble_page() -> str:
    """docs/trouble.md with a new table."""
    rows = ["| code | what it means | what helps |", "|---|---|---|"]
    for code, row in FINDINGS.items():
        cells = [row[part].replace("|", r"\|") for part in ("meaning", "remedy")]  # a bar would end the cell
        rows.append(f"| `{code}` | {' | '.join(cells)} |")
    return _replaced(TROUBLE, rows)


def architecture_page() -> str:
    """docs/architecture.md with a new list of files."""
    rows = []
    for path in sorted(file for room in ROOMS for file in (ROOT / room).rglob("*.py")):
        if about := ast.get_docstring(ast.parse(path.read_text())):
            first = " ".join(about.partition("\n\n")[0].split())
            rows.append(f"- `{path.relative_to(ROOT)}`: {first}")
    return _replaced(ARCHITECTURE, rows)


def coming_from_page() -> str:
    """Return docs/coming_from.md with new tables."""
    lines = list[str]()
    for project in elsewhere():
        lines += ["", f"## {project['title']}", "", project["intro"], ""]
        lines += [f"| {project['name']} | here |", "|---|---|"]
        for row in project["rows"]:
            names, here = ([f"`{name}`" for name in row.get(key, ())] for key in ("names", "here"))
            sentences = " ".join(row[key] for key in ("note", "page") if key in row)
            answer = ". ".join(filter(None, [" or ".join(here), sentences]))
            lines.append(f"| {', '.join(names)} | {answer} |")
    return _replaced(COMING_FROM, [*lines, ""])


def _replaced(file: Path, lines: list[str]) -> str:
    """The page with these lines between its marks."""
    part = "\n".join([BEGIN, *lines, END])
    page, count = re.subn(
        re.escape(BEGIN) + ".*?" + re.escape(END), lambda _: part, file.read_text(), flags=re.DOTALL
    )
    assert count == 1
    return page


if __name__ == "__main__":
    FLAGS.write_text(flags_page())
    TROUBLE.write_text(trouble_page())
    ARCHITECTURE.write_text(architecture_page())
    COMING_FROM.write_text(coming_from_page())
