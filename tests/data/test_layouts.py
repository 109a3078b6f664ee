"""Tests that create and open the data described by each row of the layout table in docs/data.md."""

import re
from pathlib import Path

import pytest

import prep_imagenet
from onecurve.data.cache import prepare_cache
from onecurve.data.images import open_images
from onecurve.flags.recipe import ImageRecipe, parse
from tests.conftest import ROOT
from tests.support.commands import call
from tests.support.data_sets import data_set, png, tar, write, write_parquet

DOCUMENT = (ROOT / "docs" / "data.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in DOCUMENT.partition("| layout |")[2].partition("\n\n")[0].splitlines()[2:]
]
EACH = 8  # Number of images per split, half of them in the class `cat`
LABELS = [k % 2 for k in range(EACH)]


def make(root: Path, layout: str) -> None:
    """Create the files that a table row names in its code spans."""
    if "save_to_disk" in layout:
        data_set(root, "saved", train=EACH, validation=EACH, test=EACH)
        return
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
            samples = [(f"{k}.png", png(first + k), f"{k}.cls", b"%d" % LABELS[k]) for k in range(EACH)]
            path.write_bytes(tar({name: data for s in samples for name, data in (s[:2], s[2:])}))
        elif span.endswith(".png"):
            for k in range(EACH if "<class>" in span else 3 * EACH):
                name = span.replace("<class>", ("cat", "dog")[k % 2]).replace("*", str(first + k))
                write(root, {name: png(first + k)})


def write_list(path: Path, header: str, first: int) -> None:
    """Write a list of the images in the next code span, numbered from `first`."""
    rows = [header]
    for k in range(3 * EACH if "split" in header else EACH):
        split = ("train", "val", "test")[k // EACH]
        name = f"{first + k}.png"
        values = {"id": first + k, "file": name, "file_name": f"images/{name}", "split": split}
        rows.append(",".join(str(values.get(name, ("cat", "dog")[k % 2])) for name in header.split(",")))
    path.write_text("\n".join(rows))


@pytest.mark.parametrize(("layout", "flags", "val_name", "test_name"), ROWS, ids=[row[0] for row in ROWS])
def test_a_layout_of_the_document(layout, flags, val_name, test_name, tmp_path):
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
    images = open_images(Path(prepare_cache(recipe, lambda: None).folder), recipe)
    assert (images.val_name, images.test_name) == (val_name.strip("`"), test_name.strip("`"))
    held_out = EACH // 4 if val_name == "`holdout`" else 0
    assert (len(images.train), len(images.val)) == (EACH - held_out, held_out or EACH)
    assert len(images.test or ()) == (EACH if test_name else 0)
    assert len(images.classes) == 2
