"""Tests that --data accepts Parquet files, save_to_disk folders, the Hugging Face cache and CSV lists."""

import json
import shutil
import tracemalloc
import unicodedata
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from onecurve.data.cache import prepare_data
from onecurve.data.decode import decode_image
from onecurve.data.images import Images, open_images
from onecurve.data.tables import Columns, Table, read_labels, write_tables
from tests.conftest import rows_of
from tests.data.test_any_images import prepare_with
from tests.support.data_sets import PNG, hub_rows, opened, picture, pixels, png, put, write_parquet
from tools.doctor.facts import _data_digest

HUB_COMMIT = "0123456789abcdef0123456789abcdef01234567"


def structs(count: int, first: int = 0) -> pa.Array:
    return pa.array([{"bytes": png(first + k), "path": f"{k}.png"} for k in range(count)])


def metadata(**features) -> dict:
    return {"huggingface": json.dumps({"info": {"features": features}})}


NAMES = {"_type": "ClassLabel", "names": ["cat", "dog"]}
IMAGE, WORDS = {"_type": "Image"}, {"_type": "Value", "dtype": "string"}
# Table columns and features, mapped to the expected columns or to the flags that select columns
COLUMNS = {
    "labels": (["image", "labels"], {"image": IMAGE, "labels": NAMES}, {}),
    "other names": (["picture", "species"], {"picture": IMAGE, "species": NAMES}, {}),
    "class names before a usual name": (
        ["photo", "kind", "target"],
        {"photo": IMAGE, "kind": NAMES, "target": {"_type": "Value", "dtype": "int64"}},
        {"label_column": "kind"},
    ),
    "without features": (["pixels", "y"], {}, {}),
    "a usual name without features": (["pixels", "id", "category"], {}, {"label_column": "category"}),
    "both by flags": (["a", "b", "c", "d"], {}, {"image_column": "b", "label_column": "d"}),
}


@pytest.mark.parametrize("case", COLUMNS)
def test_columns_are_recognised_by_features_names_and_types(case, tmp_path):
    names, features, expected = COLUMNS[case]
    image, label = expected.get("image_column", names[0]), expected.get("label_column", names[1])
    flags = expected if case == "both by flags" else {}
    for split in ("train", "valid"):
        columns = {name: pa.array([7, 8, 9]) for name in names}
        columns |= {names[0]: structs(3, 50), image: structs(3), label: pa.array([1, 0, 1])}
        table = pa.table(columns).replace_schema_metadata(metadata(**features) if features else None)
        pq.write_table(table, tmp_path / f"{split}-0.parquet")
    images = opened(tmp_path, tmp_path / "cache", **flags)
    assert images.classes == (("cat", "dog") if features else ("0", "1"))
    assert (images.train.labels.tolist(), images.val_name) == ([1, 0, 1], "val")
    assert (images.train.images == pixels(*range(3))).all()


def test_ambiguous_columns_are_refused_and_can_be_chosen_by_flags(tmp_path):
    for split in ("train", "test"):
        table = pa.table({"a": structs(2), "b": structs(2, 9), "x": pa.array([0, 1]), "y": pa.array([1, 0])})
        pq.write_table(table, tmp_path / f"{split}.parquet")
    cache = tmp_path / "cache"
    with pytest.raises(
        ValueError, match=r"several label columns \(x, y\)\. Choose a column with --label_column"
    ):
        opened(tmp_path, cache)
    with pytest.raises(
        ValueError, match=r"several image columns \(a, b\)\. Choose a column with --image_column"
    ):
        opened(tmp_path, cache, label_column="x")
    with pytest.raises(ValueError, match=r"--label_column z: .* contains only the columns a, b, x, y"):
        opened(tmp_path, cache, label_column="z")
    first, second = (opened(tmp_path, cache, image_column=i, label_column=k) for i, k in ("ax", "by"))
    assert (first.train.labels.tolist(), second.train.labels.tolist()) == ([0, 1], [1, 0])
    assert (second.train.images[0] == np.asarray(picture(9))).all()
    assert first.source != second.source
    with pytest.raises(ValueError, match=r"because --data digits is neither a table nor a list"):
        opened("digits", cache, label_column="x")
    pq.write_table(table.rename_columns([*"abx", "label"]), tmp_path / "train.parquet")
    # Column x is not used as the label column.
    pq.write_table(table.drop_columns("y"), tmp_path / "test.parquet")
    with pytest.raises(
        ValueError, match=r"--label_column label: .*/test\.parquet contains only the columns a, b, x"
    ):
        opened(tmp_path, cache, image_column="a")


def test_parquet_in_folders_of_splits(tmp_path):
    for folder, count in (("Train", 4), ("test", 2), ("validation", 3)):
        images = [png(k) for k in range(count)]
        for part in range(2):
            file = tmp_path / "pets" / "default" / folder / f"000{part}.parquet"
            write_parquet(file, images, [part] * count, ["cat", "dog"])
            file.with_name(f"._{file.name}").write_bytes(b"as a Mac's tar has it")
    prepared = prepare_with(tmp_path / "pets", tmp_path / "cache")
    images = open_images(Path(prepared.folder))
    assert (images.train.labels.tolist(), len(images.val), len(images.test)) == ([0] * 4 + [1] * 4, 6, 4)


def test_parquet_among_class_folders_is_ignored(tmp_path):
    put(tmp_path, *(f"{split}/{c}/1.png" for split in ("train", "val") for c in "ab"))
    for file in ("about.parquet", "train/rows.parquet"):
        write_parquet(tmp_path / file, [PNG], [0], ["cat"])
    prepared = prepare_with(tmp_path, tmp_path / "cache")
    classes = open_images(Path(prepared.folder)).classes
    assert (classes, prepared.ignored_files_note) == (("a", "b"), "1 .parquet")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ("ab", r"contains parquet files \(a.parquet, b.parquet\) but no train-\*.parquet\. Rename"),
        (["a/train/0"], r"contains no evaluation split .*\. Add an evaluation split, or hold out"),
        ("a", r"contains no evaluation split .*\. Add an evaluation split, or hold out"),
    ],
)
def test_parquet_without_splits_is_refused(files, message, tmp_path):
    for file in files:
        write_parquet(tmp_path / f"{file}.parquet", [PNG], [0], ["cat"])
    with pytest.raises(ValueError, match=message):
        opened(tmp_path, tmp_path / "cache")


@pytest.mark.parametrize("hidden", [-1, None])
def test_a_test_split_with_hidden_labels_is_left_out(hidden, tmp_path):
    """Check that unnamed integer labels are classes, and that only the train split must contain all."""
    for split, labels in {"train": [8, 3, 5], "val": [5, 3], "test": [hidden] * 2}.items():
        images = [png(len(labels) + (label or 0)) for label in labels]
        write_parquet(tmp_path / f"{split}.parquet", images, labels)
    images = opened(tmp_path, tmp_path / "cache")
    assert (images.classes, images.test, images.val.labels.tolist()) == (("3", "5", "8"), None, [1, 0])
    assert images.flaws == ("the test split is left out, because all of its labels are -1 or null",)


@pytest.fixture(scope="module")
def hub_data():
    """Return a DatasetDict with shuffled rows, so that row indices differ from the order of the table."""
    import datasets

    def rows(count: int, first: int) -> "datasets.Dataset":
        images = [png(first + k) for k in range(count)]
        return hub_rows(images, [k % 2 for k in range(count)])

    return datasets.DatasetDict(train=rows(6, 0).select([5, 0, 3, 1]), test=rows(2, 100), valid=rows(3, 200))


def assert_are_hub_data(images: Images) -> None:
    assert (images.classes, images.val_name) == (("cat", "dog"), "val")
    assert (images.train.labels.tolist(), images.val.labels.tolist()) == ([1, 0, 1, 1], [0, 1, 0])
    assert (images.train.images == pixels(5, 0, 3, 1)).all()
    assert (images.val.images == pixels(200, 201, 202)).all()


def test_a_folder_of_save_to_disk(hub_data, tmp_path):
    """Check that a save_to_disk folder may have any name, may be moved, and is read without `datasets`."""
    root = tmp_path / "we[1]rd::pets"
    hub_data.save_to_disk(tmp_path / "saved", num_shards={"train": 2, "test": 1, "valid": 1})
    (tmp_path / "saved").rename(root)
    prepared = prepare_with(root, tmp_path / "cache")
    assert_are_hub_data(open_images(Path(prepared.folder)))
    assert (prepared.ignored_files_note, len(open_images(Path(prepared.folder)).test)) == ("", 2)
    (tmp_path / "elsewhere").mkdir()
    moved = root.rename(tmp_path / "elsewhere" / root.name)
    assert str(prepare_data(str(moved), tmp_path / "cache")) == prepared.folder
    with pytest.raises(ValueError, match="pets/train contains no evaluation split"):
        opened(moved / "train", tmp_path / "cache")
    arrow = next((moved / "train").glob("*.arrow"))
    arrow.write_bytes(arrow.read_bytes()[:-300])
    with pytest.raises(ValueError, match=r"\.arrow cannot be read: .* may be incomplete"):
        opened(moved, tmp_path / "cache")
    (moved / "train" / "state.json").write_text('{"_data_files": [{"filename": 1}]}')
    with pytest.raises(ValueError, match=r"train/state\.json does not list data files"):
        opened(moved, tmp_path / "cache")


def test_a_hub_data_set_is_read_from_the_cache_without_network(hub_data, tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    for config in ("small", "large"):  # Layout of the `datasets` cache
        cached = tmp_path / "hf" / "lab___pets" / config / "0.0.0" / HUB_COMMIT
        for split, rows in hub_data.items():
            file = tmp_path / f"{config}-{split}.parquet"
            rows.flatten_indices().to_parquet(file)
        files = {split: str(tmp_path / f"{config}-{split}.parquet") for split in hub_data}
        loaded = datasets.load_dataset("parquet", data_files=files, cache_dir=tmp_path / "made" / config)
        folder = Path(loaded["train"].cache_files[0]["filename"]).parent
        cached.parent.mkdir(parents=True)
        folder.rename(cached)
        for file in cached.glob("parquet-*.arrow"):
            file.rename(cached / file.name.replace("parquet-", "pets-", 1))
        info = json.loads((cached / "dataset_info.json").read_text())
        info |= {"config_name": config, "dataset_name": "pets"}
        (cached / "dataset_info.json").write_text(json.dumps(info))
    assert_are_hub_data(opened("hub:lab/pets:small", tmp_path / "cache"))
    with pytest.raises(ValueError, match=r"--data hub:lab/pets: lab/pets could not be loaded .*small"):
        opened("hub:lab/pets", tmp_path / "cache")
    for name, message in {
        "hub:lab/absent": r"lab/absent could not be loaded from the Hub \(.*Without network access, use",
        "hub:pets": "is invalid. Use hub:OWNER/NAME or hub:OWNER/NAME:CONFIG",
        "hub:../pets": "is invalid. Use hub:OWNER/NAME",
    }.items():
        with pytest.raises(ValueError, match=message) as error:
            opened(name, tmp_path / "cache")
        assert "\n" not in str(error.value)


def test_a_hub_data_set_that_contains_files(tmp_path, monkeypatch):
    """Open a Hub data set whose rows store paths instead of bytes. load_dataset prefers a local folder."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.chdir(tmp_path)
    paths = [f"lab/photos/{split}/{c}/{k}.png" for split in ("train", "test") for c in "ab" for k in range(2)]
    put(tmp_path, *paths)
    images = opened("hub:lab/photos", tmp_path / "cache")
    assert (images.classes, images.val_name) == (("a", "b"), "test")
    expected = [decode_image((tmp_path / path).read_bytes()) for path in paths[:4]]
    assert (images.train.images == np.stack(expected)).all()


def test_labels_need_little_memory(tmp_path):
    """Compare the memory use of two label column types. As Python objects, 30 million labels took 40 s and
    gigabytes of memory.
    """
    words, count = np.array(["cat", "dog", "ox"]), 2_000_000
    numbers = np.arange(count) % 3
    for form in (pa.array(words[numbers]), pa.array(words[numbers]).dictionary_encode()):
        pq.write_table(
            pa.table({"image": pa.nulls(count, pa.binary()), "label": form}), tmp_path / "t.parquet"
        )
        tracemalloc.start()
        table = Table("t", tmp_path / "t.parquet")
        classes, labels = read_labels({"train": [table]}, Columns(), lambda: None)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert (classes, labels["train"].row_counts) == (tuple(words), [("t", count)])
        assert (labels["train"].labels == numbers).all()
        assert peak < 50 * count


def test_a_row_without_bytes_is_reported(tmp_path):
    images = [{"bytes": PNG, "path": None}, {"bytes": None, "path": "/nowhere/1.png"}]
    rows = pa.table({"img": images, "label": [0, 0]})
    splits = {"train": [Table("the rows", rows)], "val": [Table("the rows", rows)]}
    with pytest.raises(ValueError, match="row 1 of the rows has no image bytes"):
        write_tables(splits, Columns(), tmp_path, lambda: None)


# --- CSV lists


def write_list(root: Path, text: str, name: str = "pets.csv") -> Path:
    put(root, *(f"img/{k}.png" for k in range(6)))
    (root / name).write_bytes(text.encode())
    return root / name


ROWS = [(f"img/{k}.png", "dog" if k % 2 else "cat", "test" if k > 3 else "train") for k in range(6)]
LISTS = {
    "as documented": "file,label,split\n" + "".join(",".join(row) + "\n" for row in ROWS),
    "as Excel writes it": "\ufefffile_name;Class;Split\r\n"
    + "".join(f'"{file}";{label};{split.title()}\r\n' for file, label, split in ROWS),
    "tabs, other columns": "id\tsplit\tpath\tcategory\n"
    + "".join(f"7\t{split}\t{file}\t{label}\n" for file, label, split in ROWS),
}


@pytest.mark.parametrize("form", LISTS)
def test_a_list_of_files(form, tmp_path):
    images = opened(write_list(tmp_path, LISTS[form]), tmp_path / "cache")
    assert (images.classes, images.val_name) == (("cat", "dog"), "test")
    assert (images.train.labels.tolist(), images.val.labels.tolist()) == ([0, 1, 0, 1], [0, 1])
    assert (images.val.images == pixels(4, 5)).all()


def test_the_labels_of_a_list_identify_the_data(tmp_path):
    path = write_list(tmp_path, LISTS["as documented"])
    one = opened(path, tmp_path / "cache")
    path.write_text(LISTS["as documented"].replace("0.png,cat", "0.png,dog"))
    two = opened(path, tmp_path / "cache")
    assert two.train.labels.tolist() == [1, 1, 0, 1]
    assert one.source != two.source


def test_chosen_columns_absolute_paths_and_a_second_held_out_split(tmp_path):
    rows = [f"{tmp_path}/img/{k}.png,x,{10 - k},train" for k in range(3)]
    rows += ["img/3.png,x,9,val", f"{tmp_path}/img/4.png,x,8,test"]
    path = write_list(tmp_path, "\n".join(["a,b,c,split", *rows]))
    prepared = prepare_with(path, tmp_path / "cache", image_column="a", label_column="c")
    images = open_images(Path(prepared.folder))
    assert (images.classes, prepared.ignored_files_note) == (("8", "9", "10"), "")
    splits = (images.train, images.val, images.test)
    assert [split.labels.tolist() for split in splits] == [[2, 1, 0], [1], [0]]


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_hub_metadata_in_the_folder_of_each_split(ending, tmp_path):
    """Check images in the metadata's folder or in a subfolder. Without a list, class folders are classes."""
    splits = ("Train", "validation", "test")
    put(tmp_path, *(f"{split}/img/{k}.png" for split in splits for k in range(4)))
    for split in ("Train", "validation"):
        rows = [{"file_name": f"img/{k}.png", "Label": k % 2 == 0, "age": 7} for k in range(4)]
        text = "\n".join(map(json.dumps, rows))
        if ending == "csv":
            lines = (f"{row['file_name']},{row['Label']}" for row in rows)
            text = "\n".join(["file_name,Label", *lines])
        (tmp_path / split / f"metadata.{ending}").write_text(text)
    (tmp_path / "test" / "metadata.csv").write_text("file_name\nimg/0.png\n")
    prepared = prepare_with(tmp_path, tmp_path / "cache")
    assert prepared.ignored_files_note == "test/ without labels"
    images = open_images(Path(prepared.folder))
    assert (images.classes, images.val_name) == (tuple(sorted(images.classes)), "val")
    assert images.train.labels.tolist() == images.val.labels.tolist() == [1, 0, 1, 0]
    assert (images.val.images == pixels(*range(4, 8))).all()
    put(tmp_path, *(f"{split}/{c}/1.png" for split in ("Train", "validation") for c in ("cat", "img")))
    assert opened(tmp_path, tmp_path / "cache").classes == ("cat", "img")


@pytest.mark.parametrize(
    ("listed", "stored"),
    [
        ("img\\é 1.png", "img/é 1.png"),
        (unicodedata.normalize("NFC", "img/é.png"), unicodedata.normalize("NFD", "img/é.png")),
        (unicodedata.normalize("NFD", "Ö/é.png"), unicodedata.normalize("NFC", "Ö/é.png")),
        (unicodedata.normalize("NFD", "Ö\\é.png"), unicodedata.normalize("NFC", "Ö/é.png")),
        ("img\\1.png", "img\\1.png"),
    ],
    ids=["backslash", "composed", "decomposed", "both", "a name with a backslash"],
)
def test_paths_of_a_list_from_another_system(listed, stored, tmp_path):
    put(tmp_path / "data", stored, "b.png")
    (tmp_path / "data" / "a.csv").write_text(f"file,label\n{listed},cat\nb.png,dog\n{listed},cat\nb.png,dog")
    prepared = prepare_with(tmp_path / "data" / "a.csv", tmp_path / "cache", holdout=0.5)
    images = open_images(Path(prepared.folder))
    assert (len(images.train), len(images.val), images.classes) == (2, 2, ("cat", "dog"))


BAD_LISTS = rows_of("wrong lists")


@pytest.mark.parametrize("case", BAD_LISTS)
def test_a_wrong_list_is_one_line(case, tmp_path):
    text, message = BAD_LISTS[case]
    path = write_list(tmp_path, text)
    with pytest.raises(ValueError, match=r".+") as error:
        opened(path, tmp_path / "cache")
    assert str(error.value).startswith(f"--data {path}")
    assert message.format(root=tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_are_not_text_are_refused(tmp_path):
    for content, message in {
        b"file,label\n\xff\xfe\n": "not encoded in UTF-8",
        b'file,label\n"' + b"a" * 200_000: "not a valid CSV",
        b"[1]\n": "line 1 is not a JSON object",
        b'\n{"file": "img/0.png", "label": "a"}\n{"file": "img/1.png"}': "line 3 contains no value for",
        b'{"file": "img/0.png", "label": null}\n{"label": 1}': "line 1 contains no value for column label",
        b'{"file": 1': "line 1 is not a JSON object",
    }.items():
        path = write_list(tmp_path, "", "pets.csv" if content.startswith(b"file") else "pets.jsonl")
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            opened(path, tmp_path / "cache")


def test_the_doctor_compares_lists_but_not_data_set_names(tmp_path):
    path = write_list(tmp_path, LISTS["as documented"])
    before = _data_digest(str(path))
    assert before["problem"] is None
    path.write_text(LISTS["tabs, other columns"])
    assert _data_digest(str(path))["digest"] != before["digest"]
    assert _data_digest("hub:lab/pets") == _data_digest("digits") == {"problem": None}
    assert _data_digest(str(tmp_path / "nothing"))["problem"]


def test_the_doctor_follows_links_like_a_training(tmp_path):
    """Check that hidden files are ignored and that circular links do not cause an endless search."""
    shutil.copytree(put(tmp_path / "disk", "cat/1.png"), tmp_path / "here")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/cat").symlink_to(tmp_path / "disk/cat")
    (tmp_path / "linked/.DS_Store").touch()
    (tmp_path / "linked/.again").symlink_to(tmp_path / "linked")
    linked, copied = (_data_digest(str(tmp_path / name)) for name in ("linked", "here"))
    assert linked == copied
    assert linked["digest"]
    (tmp_path / "disk/cat/above").symlink_to(tmp_path)
    assert _data_digest(str(tmp_path / "linked"))["problem"] is None
