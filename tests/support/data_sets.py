"""Small data sets in every layout that --data accepts."""

import hashlib
import io
import json
import tarfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from onecurve.data.cache import prepare_data
from onecurve.data.images import Images, open_images


def encode(image: Image.Image, format: str = "JPEG", **options) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def picture(seed: int = 0, width: int = 32, height: int = 32) -> Image.Image:
    small = np.random.RandomState(seed).randint(0, 256, (4, 4, 3), np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BILINEAR)


def png(seed: int = 0, *size: int) -> bytes:
    return encode(picture(seed, *size), "PNG")


PNG = png()


def pixels(*seeds: int) -> np.ndarray:
    """Return one picture for each seed, as a uint8 array of shape [n, 32, 32, 3]."""
    return np.stack([np.asarray(picture(seed)) for seed in seeds])


def opened(data: object, cache: Path, **flags) -> Images:
    return open_images(prepare_data(str(data), cache, **flags))


def write(root: Path, files: dict[str, bytes]) -> Path:
    """Write each file's content to its path below `root`, and return `root`."""
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
    return root


def put(root: Path, *paths: str) -> Path:
    """Write a different picture to each path below `root`, and return `root`."""
    return write(root, {path: png(k) for k, path in enumerate(paths)})


def data_set(
    root: Path, kind="folders", names="ab", labels: Sequence[int] = (), size=(32, 32), **splits: int | list
) -> Path:
    """Write a data set as class folders, a list, Parquet files or the output of save_to_disk.

    Args:
        root: Folder to write.
        kind: Format of the data set: `folders`, `list`, `parquet` or `saved`.
        names: Class names.
        labels: Label of each image in each split. By default, the classes alternate.
        size: Width and height of the pictures in pixels.
        splits: Images in each split, or the number of images. If a split is a number, image k of the n-th
            split is picture(1000 * n + k). The name `whole` selects data without splits.

    Returns:
        Value for the --data flag.
    """
    rows, files, tables = ["file,label,split"], {}, {}
    for number, (split, images) in enumerate(splits.items()):
        if isinstance(images, int):
            images = [png(1000 * number + k, *size) for k in range(images)]
        classes = list(labels[: len(images)]) or [k % len(names or "ab") for k in range(len(images))]
        folder = "" if split == "whole" else f"{split}/"
        for k, (data, c) in enumerate(zip(images, classes, strict=True)):
            if kind == "folders":
                extension = Image.open(io.BytesIO(data)).format.lower()
                files[f"{folder}{names[c]}/{k}.{extension}"] = data
            elif kind == "list":
                files[f"{folder}{k}.image"] = data
                rows.append(f"{folder}{k}.image,{names[c]},{folder and split}")
        if kind == "parquet":
            path = root / f"{split if folder else 'train'}-00000-of-00001.parquet"
            write_parquet(path, images, classes, names and list(names))
        elif kind == "saved":
            tables[split] = hub_rows(images, classes, names)
    if kind == "list":
        rows = rows if "whole" not in splits else [row.rpartition(",")[0] for row in rows]
        files["list.csv"] = "\n".join(rows).encode()
    elif kind == "saved":
        import datasets

        (tables["whole"] if "whole" in tables else datasets.DatasetDict(tables)).save_to_disk(root)
    return write(root, files) / ("list.csv" if kind == "list" else "")


class_folders = partial(data_set, train=8, val=8)
parquet_folder = partial(data_set, kind="parquet", train=40, test=20)


def write_parquet(path: Path, images: list, labels: list, names: list | None = None) -> Path:
    features = {"img": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
    table = pa.table({"img": [{"bytes": b, "path": None} for b in images], "label": labels})
    if names is not None:
        metadata = {"huggingface": json.dumps({"info": {"features": features}})}
        table = table.replace_schema_metadata(metadata)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)
    return path


def hub_rows(images: list[bytes], labels: list[int], names: Sequence[str] = ("cat", "dog")):
    """Return the images and labels as a Dataset of the `datasets` library."""
    import datasets

    features = {"photo": datasets.Image(), "kind": datasets.ClassLabel(names=list(names))}
    photos = [{"bytes": data, "path": None} for data in images]
    return datasets.Dataset.from_dict({"photo": photos, "kind": labels}, datasets.Features(features))


# --- Archives and shards, written with tarfile instead of prep_imagenet.py

CLASSES = [{"wnid": f"n{c:08d}", "name": name} for c, name in enumerate(("crane", "hen", "crane", "ox"))]


def tar(members: dict[str, bytes], format: int = tarfile.GNU_FORMAT, folders: bool = False) -> bytes:
    """Return a tar archive of regular files with reproducible bytes. `folders` adds entries for folders."""
    buffer, parents = io.BytesIO(), {str(parent) for name in members for parent in Path(name).parents} - {"."}
    with tarfile.open(fileobj=buffer, mode="w", format=format) as archive:
        for name in sorted(parents) if folders else ():
            member = tarfile.TarInfo(name)
            member.type = tarfile.DIRTYPE
            archive.addfile(member)
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(content), 1_339_596_400
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def jpeg(seed: int) -> bytes:
    """Return a JPEG image of about 1 kB, 40 to 55 pixels wide and 36 pixels high."""
    return encode(picture(seed, 40 + seed % 16, 36))


def write_shards(
    folder: Path, train: tuple[int, ...] = (31, 30, 29, 31, 30, 32), val: tuple[int, ...] = (13, 12)
) -> Path:
    """Write a prepared folder of shards with this many images per split. The i-th image has label i % 4."""
    folder.mkdir(parents=True)
    splits, first = {}, 0
    for split, counts in (("train", train), ("val", val)):
        rows, shards = [], []
        for number, count in enumerate(counts):
            path, members, ids = folder / f"{split}-{number:05d}.tar", {}, range(len(rows), len(rows) + count)
            for i in ids:
                members |= {f"{split}_{i}.jpg": jpeg(first + i), f"{split}_{i}.cls": b"%d" % (i % 4)}
            path.write_bytes(tar(members, tarfile.USTAR_FORMAT))
            with tarfile.open(path) as archive:
                members_of_images = [member for member in archive if member.name.endswith(".jpg")]
            rows += [
                [number, m.offset_data, m.size, i % 4] for m, i in zip(members_of_images, ids, strict=True)
            ]
            sizes = {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
            shards.append({"file": path.name, "images": count} | sizes)
        np.save(folder / f"{split}_index.npy", np.array(rows, np.int64))
        splits[split] = {"images": len(rows), "shards": shards}
        first += len(rows)
    manifest = {"format": 1, "kind": "shards", "name": "tiny", "seed": 0, "resize": None, "classes": CLASSES}
    write_manifest(folder, manifest | {"splits": splits, "reencoded": []})
    return folder


def write_manifest(folder: Path, manifest: dict) -> None:
    for split, content in manifest["splits"].items():
        index = (folder / f"{split}_index.npy").read_bytes()
        content["index_sha256"] = hashlib.sha256(index).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))
