"""The README says what the code does. `python -m tests.test_readme` writes its tables of flags anew."""

import re

from common.recipe import ImageRecipe, Recipe, flag_table, parse
from tests.conftest import ROOT
from train_cnn_a import CnnA
from train_cnn_b import CnnB
from train_hello import Hello
from train_vit import Vit

README = ROOT / "README.md"
TABLES = {
    "all scripts": flag_table(Recipe),
    "train_hello.py": flag_table(Hello, without=Recipe),
    "the scripts for images": flag_table(ImageRecipe, without=Recipe),
    "train_cnn_a.py": flag_table(CnnA, without=ImageRecipe),
    "train_cnn_b.py": flag_table(CnnB, without=ImageRecipe),
    "train_vit.py": flag_table(Vit, without=ImageRecipe),
}


def with_tables(text: str) -> str:
    for name, table in TABLES.items():
        begin, end = f"<!-- flags of {name} -->", "<!-- end -->"
        pattern = re.escape(begin) + r".*?" + re.escape(end)
        assert len(re.findall(pattern, text, re.DOTALL)) == 1, name
        text = re.sub(pattern, lambda _, new=f"{begin}\n{table}\n{end}": new, text, flags=re.DOTALL)
    return text


def test_the_tables_of_flags_are_those_of_the_recipes():
    text = README.read_text()
    assert text == with_tables(text), "run: python -m tests.test_readme"


def test_every_recipe_is_one_of_its_script():
    scripts = {"cnn_a": CnnA, "cnn_b": CnnB, "vit": Vit}
    files = sorted((ROOT / "recipes").glob("*.yaml"))
    assert len(files) >= 7
    for file in files:
        script = next(name for name in scripts if file.name.startswith(f"{name}_"))
        assert f"train_{script}.py" in file.read_text(), file.name
        assert parse(scripts[script], ["--config", str(file)]) != scripts[script](), file.name


def test_every_file_that_the_readme_names_is_there():
    for name in re.findall(r"\]\((?!http)([^)#]+)", README.read_text()):
        assert (ROOT / name).exists(), name
    for name in re.findall(
        r"\b(?:accelerate_configs|ds_configs|recipes)/\w+\.(?:yaml|json)", README.read_text()
    ):
        assert (ROOT / name).exists(), name


if __name__ == "__main__":
    README.write_text(with_tables(README.read_text()))
