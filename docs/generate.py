"""Generate docs/flags.md and the tables of three other pages.

    python -m docs.generate

| page | source |
|---|---|
| docs/flags.md | recipes in all train_*.py |
| table in docs/trouble.md | tools/doctor/findings.yaml |
| list in docs/architecture.md | first paragraph of each file's docstring |
| tables in docs/coming_from.md | onecurve/flags/elsewhere.yaml |
"""

import ast
import dataclasses
import re
from pathlib import Path

from onecurve.flags.fields import flags_of_other_projects, help_of, shown_default
from onecurve.flags.recipe import ImageRecipe, Recipe
from onecurve.models.script import load_script, recipe_class
from onecurve.system.paths import ROOT
from tools.doctor.checks import FINDINGS

FLAGS, TROUBLE, ARCHITECTURE, COMING_FROM = (
    ROOT / "docs" / f"{name}.md" for name in ("flags", "trouble", "architecture", "coming_from")
)
# Folders whose files docs/architecture.md lists
ROOMS = ("onecurve", "tools", "cluster", "experiments", "benchmarks")
BEGIN, END = "<!-- generated -->", "<!-- end -->"


def train_scripts() -> list[Path]:
    """Return the paths of all train scripts."""
    return sorted(ROOT.glob("train_*.py"))


def flag_table(recipe_class: type[Recipe], without: type[Recipe] | None = None) -> str:
    """Return a Markdown table of a recipe's flags, except flags that have the same default in `without`."""
    shared_fields = dataclasses.fields(without) if without else ()
    shared = {f.name: (f.default, f.metadata["per_script"]) for f in shared_fields}
    rows = ["| flag | default | description |", "|---|---|---|"]
    for field in dataclasses.fields(recipe_class):
        if shared.get(field.name) == (field.default, field.metadata["per_script"]):
            continue
        default = "set by each script" if field.metadata["per_script"] else shown_default(field)
        names = ", ".join(f"`{name}`" for name in field.metadata["choices"])
        allowed = f" Choices: {names}." if names else ""
        rows.append(f"| `--{field.name}` | {default} | {help_of(field)}{allowed} |")
        if name := field.metadata["also"][0]:
            rows.append(f"| `--{name}` |  | {help_of(field, name)} |")
    return "\n".join(rows)


def flags_page() -> str:
    """Return the text of docs/flags.md."""
    parts = [
        "<!-- `python -m docs.generate` writes this page from the recipes. -->",
        "# Flags",
        "`--config FILE` reads flags from a YAML or JSON file. Flags on the command line override the file.\n"
        "Hyphens and underscores in flag names are equivalent, as in `--batch-size` and `--batch_size`.\n"
        "`--learning_rate` is the same flag as `--lr`, and `--no_nesterov` disables `--nesterov`. A command\n"
        "or file that sets one flag under two names is an error. If a command repeats a flag, the last\n"
        "value is used. An empty default means that the flag is unset.",
        "## All scripts",
        flag_table(Recipe),
        "## Image scripts",
        flag_table(ImageRecipe, without=Recipe),
    ]
    for path in train_scripts():
        script = load_script(path)
        recipe = recipe_class(script)
        base = ImageRecipe if issubclass(recipe, ImageRecipe) else Recipe
        description = (script.__doc__ or "").partition("\n\n")[0]
        parts += [f"## {path.name}: flags and defaults", description, flag_table(recipe, without=base)]
    return "\n\n".join(parts) + "\n"


def trouble_page() -> str:
    """Return the text of docs/trouble.md with an updated table."""
    rows = ["| code | meaning | remedy |", "|---|---|---|"]
    for code, row in FINDINGS.items():
        # In a Markdown table, an unescaped bar would end the cell
        cells = [row[part].replace("|", r"\|") for part in ("meaning", "remedy")]
        rows.append(f"| `{code}` | {' | '.join(cells)} |")
    return _replaced(TROUBLE, rows)


def architecture_page() -> str:
    """Return the text of docs/architecture.md with an updated list of files."""
    rows = []
    for path in sorted(file for room in ROOMS for file in (ROOT / room).rglob("*.py")):
        if docstring := ast.get_docstring(ast.parse(path.read_text())):
            summary = " ".join(docstring.partition("\n\n")[0].split())
            rows.append(f"- `{path.relative_to(ROOT)}`: {summary}")
    return _replaced(ARCHITECTURE, rows)


def coming_from_page() -> str:
    """Return the text of docs/coming_from.md with updated tables."""
    lines = list[str]()
    for project in flags_of_other_projects():
        lines += ["", f"## {project['title']}", "", project["intro"], ""]
        lines += [f"| {project['name']} | here |", "|---|---|"]
        for row in project["rows"]:
            names, here = ([f"`{name}`" for name in row.get(key, ())] for key in ("names", "here"))
            sentences = " ".join(row[key] for key in ("note", "page") if key in row)
            answer = ". ".join(filter(None, [" or ".join(here), sentences]))
            lines.append(f"| {', '.join(names)} | {answer} |")
    return _replaced(COMING_FROM, [*lines, ""])


def _replaced(file: Path, lines: list[str]) -> str:
    """Return the text of a page in which `lines` replace the text between the two markers."""
    part = "\n".join([BEGIN, *lines, END])
    page, count = re.subn(
        re.escape(BEGIN) + ".*?" + re.escape(END), lambda _: part, file.read_text(), flags=re.DOTALL
    )
    assert count == 1, f"{file} must contain exactly one pair of the markers {BEGIN} and {END}"
    return page


if __name__ == "__main__":
    FLAGS.write_text(flags_page())
    TROUBLE.write_text(trouble_page())
    ARCHITECTURE.write_text(architecture_page())
    COMING_FROM.write_text(coming_from_page())
