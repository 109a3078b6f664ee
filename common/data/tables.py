"""Tables of images: parquet files, folders that `datasets` saved, and data sets of the Hugging Face hub."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from common.data.class_folders import folder_names, split_folders
from common.data.parquet import Table, write_tables
from common.data.source import VAL_NAMES, Columns, Source
from common.system.files import fits, parse_json
from common.system.text import printable, some_of
from common.system.threads import Heartbeat, run_with_heartbeat

HUB = re.compile(r"hub:(\w[\w.-]*/\w[\w.-]*)(?::([\w.-]+))?", re.ASCII)

Rows = TypeVar("Rows")


def find_parquet(root: Path, columns: Columns) -> Source | None:
    if (found := parquet_files(root)) is None:
        return None
    val_name, splits, left_out = _train_and_val(found)
    # the names within the data set, so that moving it changes nothing
    nested = not _is_named(splits["train"][0], "train")
    named = tuple(
        (f"{f.parent.name}/{f.name}" if nested else f.name, f) for files in splits.values() for f in files
    )
    return _source_of_tables(root.name, named, _tables(splits), val_name, left_out, columns)


def parquet_files(root: Path) -> dict[str, list[Path]] | None:
    """Lists train-*.parquet and val-*, validation-*, valid- or test-*.parquet, or train/*.parquet and so on.

    They lie in the folder, or one level below. None without any for training.
    """
    below = [f for f in (root, *sorted(root.iterdir())) if f.is_dir()]
    files_of = _named_files
    if not (folders := [f for f in below if files_of(f, "train")]):
        files_of = _files_in_folders
        folders = [f for f in below if files_of(f, "train")]
    if not folders:
        return None
    if len(folders) > 1 and folders[0] != root:
        names = [f.name for f in folders]
        raise ValueError(
            f"--data {root} holds more than one data set ({some_of(names)}): give the folder of one"
        )
    folder = folders[0]
    found = {name: files for name in VAL_NAMES if (files := files_of(folder, name))}
    return {"train": files_of(folder, "train")} | found


def _named_files(folder: Path, split: str) -> list[Path]:
    return sorted(f for f in folder.iterdir() if _is_named(f, split))


def _is_named(file: Path, split: str) -> bool:
    return re.fullmatch(rf"{split}([-.].*)?\.parquet", file.name) is not None


def _files_in_folders(folder: Path, split: str) -> list[Path]:
    """Parquet files of a folder that holds no folders: class folders may have such a file among them."""
    name = split_folders(folder).get(split)
    return sorted((folder / name).glob("*.parquet")) if name and not folder_names(folder / name) else []


def find_saved(root: Path, columns: Columns) -> Source | None:
    """Finds what `save_to_disk` of `datasets` wrote: for each split a folder with state.json."""
    if (root / "state.json").is_file() and (root / "dataset_info.json").is_file():
        found = {"train": root}
    elif (root / "dataset_dict.json").is_file():
        found = {split: root / name for split, name in split_folders(root).items()}
    else:
        return None
    folders = {split: folder for split, folder in found.items() if (folder / "state.json").is_file()}
    if "train" not in folders:
        raise ValueError(f"--data {root} has {_splits(folders)}")
    val_name, splits, left_out = _train_and_val(
        {split: _arrow_files(folder) for split, folder in folders.items()}
    )
    # the names within the data set, so that moving it changes nothing
    files = tuple((f"{split}/{f.name}", f) for split, found in splits.items() for f in found)
    return _source_of_tables(root.name, files, _tables(splits), val_name, left_out, columns)


def _train_and_val(found: Mapping[str, Rows]) -> tuple[str | None, dict[str, Rows], str]:
    """The name of the split to evaluate on, None without one; the rows of both; and what is left out."""
    val_name = next((name for name in VAL_NAMES if name in found), None)
    others = [f"{name}, as {val_name} is there" for name in found if name not in ("train", val_name)]
    rows = {"train": found["train"]} | ({"val": found[val_name]} if val_name else {})
    return val_name, rows, ", ".join(others)


def _arrow_files(folder: Path) -> list[Path]:
    """The files of one split, in the order of its rows."""
    path = folder / "state.json"
    about = parse_json(path.read_bytes(), str(path))
    if not fits(about, {"_data_files": [{"filename": str}]}) or not about.get("_data_files"):
        raise ValueError(f"{path} names no data files, as `datasets` writes them")
    return [folder / Path(file["filename"]).name for file in about["_data_files"]]


def find_on_hub(data: str, beat: Heartbeat, show_progress: bool, columns: Columns) -> Source:
    """Finds `cifar10`, or `hub:OWNER/NAME[:CONFIG]`; `datasets` downloads it once and keeps it."""
    if data == "cifar10":
        repository, config = "uoft-cs/cifar10", None
    elif match := HUB.fullmatch(data):
        repository, config = match.groups()
    else:
        raise ValueError(f"--data {data}: expected hub:OWNER/NAME or hub:OWNER/NAME:CONFIG")

    def load():
        import datasets

        if not show_progress:
            datasets.disable_progress_bars()
        return datasets.load_dataset(repository, config)

    try:
        loaded = run_with_heartbeat(load, beat)
    except Exception as error:  # no network, no room, a hub that says no: too many classes to list
        reason = " ".join((str(error) or type(error).__name__).split())
        more = " ..." if len(reason) > 300 else ""
        raise ValueError(
            f"--data {data}: {repository} could not be loaded from the hub ({printable(reason[:300])}{more})."
            " Without network use local files: --data FOLDER with the hub's train-*.parquet and"
            " test-*.parquet"
        ) from error
    if "train" not in loaded:
        raise ValueError(f"--data {data} has {_splits(loaded)}")
    val_name, splits, left_out = _train_and_val(loaded)
    files = tuple(
        (f"{split} {k}", Path(file["filename"]))
        for split, table in splits.items()
        for k, file in enumerate(table.cache_files)
    )
    name = data.removeprefix("hub:")
    tables = {s: [Table(f"{name}'s {s} split", rows.data.table)] for s, rows in splits.items()}
    return _source_of_tables(name, files, tables, val_name, left_out, columns)


def _splits(names: Iterable[str]) -> str:
    return f"no split train, only: {some_of(list(names)) or 'none'}"


def _tables(splits: dict[str, list[Path]]) -> dict[str, list[Table]]:
    return {split: [Table(str(file), file) for file in files] for split, files in splits.items()}


def _source_of_tables(
    name: str,
    files: tuple[tuple[str, Path], ...],
    tables: dict[str, list[Table]],
    val_name: str | None,
    left_out: str,
    columns: Columns,
) -> Source:
    def write(folder: Path, beat: Heartbeat) -> tuple[str, ...]:
        return write_tables(tables, columns, folder, beat)

    chosen = (f"columns {list(columns)}",) if any(columns) else ()
    shown = VAL_NAMES[val_name] if val_name else None
    return Source(name, files, write, shown, hashes=chosen, is_table=True, left_out=left_out)
