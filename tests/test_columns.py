"""Test that each column of a sample's random draws has only one use, as listed in augment.py's COLUMNS."""

import ast
import itertools
import re

from onecurve.numerics.augment import COLUMNS, DRAWS
from tests.conftest import ROOT


def test_no_two_uses_share_a_column():
    for (name, columns), (other_name, other_columns) in itertools.combinations(COLUMNS.items(), 2):
        assert not set(range(DRAWS)[columns]) & set(range(DRAWS)[other_columns]), f"{name} and {other_name}"
    assert max(columns.stop for columns in COLUMNS.values()) == DRAWS


def test_users_of_random_numbers_use_the_table_of_columns():
    names = set()
    for path in (*(ROOT / "onecurve").rglob("*.py"), *ROOT.glob("train_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "uniforms":
                names.add(path.name)
                assert re.search(r"\b(DRAWS|(SHIFT|FLIP|CROP)\.stop)\b", ast.unparse(node.args[3])), path
    assert names == {"workers.py", "splits.py", "train_vit.py"}
