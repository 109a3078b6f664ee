"""docs/data.md's table of layouts: each row is made as it is written there, and opened."""

import io
import re
import tarfile
from pathlib import Path

import pytest

import prep_imagenet
from common.data.cache import prepare
from common.data.images import open_images
from common.recipe import ImageRecipe, parse
from tests.conftest import ROOT
from tests.data.test_images import encode, hub_rows, picture, write_parquet
from tests.support.commands import call

DOCUMENT = (ROOT / "docs" / "data.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in DOCUMENT.partition("| layout |")[2].partition("\n\n")[0].splitlines()[2:]
]
EACH = 8  # images of a split, half of them cats
LABELS = [k % 2 for k in range(EACH)]


def png(number: int) -> bytes:
    return encode(picture(number), "PNG")


def make(root: Path, layout: str) -> None:
    """Makes what the code spans of a row name."""
    if "save_to_disk" in layout:
        import datasets

        splits = {"train": 0, "validation": 100, "test": 200}
        rows = {s: hub_rows([png(first + k) for k in range(EACH)], LABELS) for s, first in splits.items()}
        return datasets.DatasetDict(rows).save_to_disk(root)
    first = 0
    for span in re.findall("`([^`]+)`", layout):
        first += 100
        path = root / span.replace("*", "0")
        if span.endswith(".csv"):
            table = path
        elif "," in span:
            table.parent.mkdir(exist_ok=True)
            write_list(table, span, first + 100)
        elif span.endswith(".parquet"):
            write_parquet(path, [png(first + k) for k in range(EACH)], LABELS)
        elif span.endswith(".tar"):
            write_tar(path, first)
        elif span.endswith(".png"):
            for k in range(EACH if "<class>" in span else 3 * EACH):
                name = span.replace("<class>", ("cat", "dog")[k % 2]).replace("*", str(first + k))
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_bytes(png(first + k))


def write_list(path: Path, header: str, first: int) -> None:
    """Of the images of the code span after it. first: their first number."""
    rows = [header]
    for k in range(3 * EACH if "split" in header else EACH):
        split = ("train", "val", "test")[k // EACH]
        name = f"{first + k}.png"
        values = {"id": first + k, "file": name, "file_name": f"images/{name}", "split": split}
        rows.append(",".join(str(values.get(name, ("cat", "dog")[k % 2])) for name in header.split(",")))
    path.write_text("\n".join(rows))


def write_tar(path: Path, first: int) -> None:
    with tarfile.open(path, "w") as tar:
        for k, label in enumerate(LABELS):
            for ending, content in (("png", png(first + k)), ("cls", str(label).encode())):
                member = tarfile.TarInfo(f"{k:04d}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize(("layout", "flags", "chooses", "once"), ROWS, ids=[row[0] for row in ROWS])
def test_a_layout_of_the_document(layout, flags, chooses, once, tmp_path):
    root = tmp_path / "pets"
    root.mkdir()
    make(root, layout)
    words = re.findall("`(--[^`]+)`", flags)
    if "prep_imagenet.py" in flags:
        index = ["--data", root, "--out", tmp_path / "pets_index"]
        assert call(prep_imagenet.main, *words.pop(0).split(), *index)[0] == 0
    data = tmp_path / "pets_index" if (tmp_path / "pets_index").exists() else root
    words = " ".join(words).replace("FOLDER", str(root)).replace("'", "").split()
    recipe = parse(ImageRecipe, ["--data", str(data), "--cache_dir", str(tmp_path / "cache"), *words])
    images = open_images(Path(prepare(recipe, lambda: None).folder), recipe)
    assert (images.val_name, images.test_name) == (chooses.strip("`"), once.strip("`"))
    held_out = EACH // 4 if chooses == "`holdout`" else 0
    assert (len(images.train), len(images.val)) == (EACH - held_out, held_out or EACH)
    assert len(images.test or ()) == (EACH if once else 0)
    assert len(images.classes) == 2
