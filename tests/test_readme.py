"""The README says what the code does. `python -m tests.test_readme` writes its tables of flags anew."""

import re
import shlex

from common.recipe import Recipe, flag_table
from tests.conftest import ROOT
from train_cnn_a import CnnA
from train_vit import Vit

README = ROOT / "README.md"
TABLES = {
    "all scripts": flag_table(Recipe),
    "train_cnn_a.py": flag_table(CnnA, without=Recipe),
    "train_vit.py": flag_table(Vit, without=Recipe),
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


def test_every_file_that_the_readme_names_is_there():
    for name in re.findall(r"\]\((?!http)([^)#]+)", README.read_text()):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"\b(?:accelerate_configs|ds_configs)/\w+\.(?:yaml|json)", README.read_text()):
        assert (ROOT / name).exists(), name


def test_every_command_of_the_readme_has_known_flags():
    """Each is run by a test of its kind (test_launchers, test_real_data) or needs GPUs; none may go stale."""
    blocks = re.findall(r"```\n(.*?)```", README.read_text(), re.DOTALL)
    checked = 0
    for command in "".join(blocks).replace("\\\n", " ").splitlines():
        words = shlex.split(command, comments=True)
        script = next((word for word in words if word in ("train_cnn_a.py", "train_vit.py")), None)
        if script is None:
            continue
        recipe = CnnA if script == "train_cnn_a.py" else Vit
        known = {f"--{name}" for name in recipe.__dataclass_fields__} | {"--config"}
        flags = {word for word in words[words.index(script) :] if word.startswith("--")}
        assert flags <= known, command
        checked += 1
    assert checked > 8


if __name__ == "__main__":
    README.write_text(with_tables(README.read_text()))
