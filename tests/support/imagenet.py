"""Miniature ILSVRC2012 with crops of real photographs, and helpers that run prep_imagenet.py on it."""

import gzip
import hashlib
import io
import resource
import signal
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

import prep_imagenet
from tests.conftest import Job, real_data
from tests.support.commands import call
from tests.support.data_sets import encode, tar
from tests.support.faults import called_first
from tools.prepare import devkit, journal, originals
from tools.prepare.writer import ShardWriter

TRAIN, VAL = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
ROTATE_90 = 6  # EXIF orientation of images that must be rotated clockwise by 90 degrees to be upright


@dataclass(frozen=True)
class Ilsvrc:
    """Contents of a miniature ILSVRC2012's archives.

    Labels are positions in the sorted list `wnids`, and file names identify images.
    """

    folder: Path  # Folder with the three archives
    train_tar: Path
    val_tar: Path
    devkit: Path
    wnids: list[str]
    names: list[str]  # Column "words" of meta.mat, in label order
    # ILSVRC2012_ID of each class in label order, a permutation of the numbers from 1 to the number of classes
    ids: list[int]
    train: dict[str, bytes]  # File contents by name, in the archive's order
    # File contents by name, in the archive's order, which differs from the order of the names
    val: dict[str, bytes]
    train_labels: dict[str, int]
    val_labels: dict[str, int]
    cmyk: str  # Name of an unusual training image, a JPEG with four color channels
    png: str  # Name of an unusual training image, a PNG file whose name ends with .JPEG

    def md5(self, file: Path) -> str:
        """Return the MD5 sum of one of the three archives as a hexadecimal string."""
        return hashlib.md5(file.read_bytes()).hexdigest()


def prep(*words: object, status: int = 0) -> str:
    """Run prep_imagenet.py in this process, check its exit status, and return its output."""
    exit_status, output = call(prep_imagenet.main, *words)
    assert exit_status == status, output
    assert "Traceback" not in output
    return output


def fails(*words: object, status: int = 1) -> str:
    """Run prep_imagenet.py, check that it fails, and return its output."""
    return prep(*words, status=status)


@dataclass(frozen=True)
class Fault:
    """Changes in a forked process: a batch size of 2 images, and a signal that the process sends itself."""

    # Point at which the process sends itself the signal: a number of images in a split, the name of a split
    # (at its end, before the journal records it), or "manifest"
    place: str | int = ""
    signal: int = signal.SIGKILL
    md5: tuple[tuple[str, str], ...] = ()  # MD5 sums that replace the published MD5 sums
    limits: tuple[tuple[int, tuple[int, int]], ...] = ()  # Arguments of setrlimit(2)

    def __call__(self) -> None:
        originals.BATCH_IMAGES = 2
        devkit.MD5_BY_PART.update(self.md5)
        for number, values in self.limits:
            resource.setrlimit(number, values)
        write, finish_split, finish = ShardWriter.write, ShardWriter.finish, journal.Journal.write_manifest

        def write_and_strike(writer: ShardWriter, images: list) -> None:
            write(writer, images)
            self.strike(writer.image_count)

        def strike_and_finish_split(writer: ShardWriter) -> dict:
            self.strike(writer.split)
            return finish_split(writer)

        def strike_and_finish(self_: journal.Journal, manifest: dict) -> None:
            self.strike("manifest")
            finish(self_, manifest)

        setattr(ShardWriter, "write", write_and_strike)  # noqa: B010  (mypy refuses an assignment)
        setattr(ShardWriter, "finish", strike_and_finish_split)  # noqa: B010
        setattr(journal.Journal, "write_manifest", strike_and_finish)  # noqa: B010

    def strike(self, place: str | int) -> None:
        if str(self.place) == str(place):
            signal.raise_signal(self.signal)


def forked(folder: Path, *words: object, **fault) -> Job:
    """Start prep_imagenet.py in another process, with the fields of Fault as keyword arguments."""
    return Job(["prep_imagenet.py", *words], env=called_first(folder, Fault(**fault)))


def make_ilsvrc(folder: Path, classes: int = 10, train: int = 6, val: int = 3) -> Ilsvrc:
    """Write the three archives to `folder` with reproducible bytes.

    Args:
        folder: Folder to which the archives are written.
        classes: Number of classes, at most 100.
        train: Number of training images per class, at least 4. The first class begins with the unusual
            images.
        val: Number of validation images per class.
    """
    files = sorted((real_data() / "imagenet_sample").glob("*.JPEG"))[:classes]
    assert len(files) == classes
    random = np.random.default_rng(0)
    crops = [_crops(Image.open(file), train + val, random) for file in files]
    wnids = [file.stem.partition("_")[0] for file in files]
    words = [file.stem.partition("_")[2].replace("_", " ") for file in files]
    names = [f"{name}, true {name}" for name in words]
    ids = [int(i) + 1 for i in random.permutation(classes)]
    if ids == sorted(ids):
        ids.reverse()

    numbers = [sorted(map(str, random.choice(30_000, train, replace=False))) for _ in wnids]
    train_names = [[f"{wnids[i]}_{number}.JPEG" for number in numbers[i]] for i in range(classes)]
    odd = [
        lambda image: _jpeg(image.convert("CMYK")),
        lambda image: encode(image, "PNG"),
        _rotated,
        lambda image: _jpeg(image.convert("L")),
    ]
    train_images = {}
    for i in range(classes):
        for j, name in enumerate(train_names[i]):
            make = odd[j] if i == 0 and j < len(odd) else _jpeg
            train_images[name] = make(crops[i][j])
    train_labels = {name: i for i in range(classes) for name in train_names[i]}

    truth = random.permutation(np.repeat(np.arange(classes), val))  # Labels in image name order
    left = [crops[i][train:] for i in range(classes)]
    val_names = [f"ILSVRC2012_val_{i:08d}.JPEG" for i in range(1, len(truth) + 1)]
    val_images = {name: _jpeg(left[i].pop()) for name, i in zip(val_names, truth, strict=True)}
    val_images = {val_names[i]: val_images[val_names[i]] for i in random.permutation(len(truth))}

    folder.mkdir(parents=True, exist_ok=True)
    class_tars = {
        f"{wnid}.tar": tar({name: train_images[name] for name in names_of_class})
        for wnid, names_of_class in zip(wnids, train_names, strict=True)
    }
    (folder / TRAIN).write_bytes(tar(class_tars))
    (folder / VAL).write_bytes(tar(val_images))
    write_devkit(folder / DEVKIT, synsets_of(wnids, names, ids, train), [ids[i] for i in truth])
    return Ilsvrc(
        folder=folder,
        train_tar=folder / TRAIN,
        val_tar=folder / VAL,
        devkit=folder / DEVKIT,
        wnids=wnids,
        names=names,
        ids=ids,
        train=train_images,
        val=val_images,
        train_labels=train_labels,
        val_labels={name: int(i) for name, i in zip(val_names, truth, strict=True)},
        cmyk=train_names[0][0],
        png=train_names[0][1],
    )


def write_devkit(file: Path, synsets: np.ndarray | None, ids: list[int]) -> None:
    """Write a development kit that contains the labels of the validation images.

    The kit contains no meta.mat if `synsets` is None.
    """
    from scipy.io import savemat

    top = "ILSVRC2012_devkit_t12"
    members = {f"{top}/readme.txt": b"Development kit\n", f"{top}/evaluation/demo_eval.m": b"% nothing\n"}
    if synsets is not None:
        meta = io.BytesIO()
        savemat(meta, {"synsets": synsets}, do_compression=True)
        # The first 116 bytes of meta.mat are text that contains the current time.
        members[f"{top}/data/meta.mat"] = b"MATLAB 5.0 MAT-file".ljust(116) + meta.getvalue()[116:]
    truth = "".join(f"{i}\n" for i in ids)
    members[f"{top}/data/ILSVRC2012_validation_ground_truth.txt"] = truth.encode()
    with open(file, "wb") as plain, gzip.GzipFile(fileobj=plain, mode="wb", filename="", mtime=0) as packed:
        packed.write(tar(members, folders=True))


FIELDS = ["ILSVRC2012_ID", "WNID", "words", "gloss", "num_children", "children", "wordnet_height"]
FIELDS += ["num_train_images"]


def synsets_of(wnids: list[str], names: list[str], ids: list[int], images: int) -> np.ndarray:
    """Return meta.mat's array [synsets, 1]: the classes ordered by ID, followed by three parent synsets."""
    rows = sorted(
        (i, wnid, name, f"what is called {name}", 0, np.zeros(0), 0, images)
        for i, wnid, name in zip(ids, wnids, names, strict=True)
    )
    last = len(rows)
    rows += [
        (last + 1, "n00001740", "entity", "that which is", 2, np.array([last + 2, last + 3]), 2, 0),
        (last + 2, "n00015388", "animal, beast", "a living organism", 1, np.array([1]), 1, 0),
        (last + 3, "n01317541", "domestic animal", "a tame one", 1, np.array([last]), 1, 0),
    ]
    synsets = np.empty((len(rows), 1), dtype=[(field, object) for field in FIELDS])
    for i, row in enumerate(rows):
        synsets[i, 0] = row
    return synsets


def _crops(photograph: Image.Image, count: int, random: np.random.Generator) -> list[Image.Image]:
    """Return random RGB crops in landscape and portrait format, with edges of 100 to 260 pixels."""
    photograph = photograph.convert("RGB")
    crops = []
    for _ in range(count):
        width, height = (min(int(random.integers(100, 261)), side) for side in photograph.size)
        left = int(random.integers(photograph.width - width + 1))
        top = int(random.integers(photograph.height - height + 1))
        crops.append(photograph.crop((left, top, left + width, top + height)))
    return crops


def _jpeg(image: Image.Image, **options) -> bytes:
    return encode(image, quality=85, **options)


def _rotated(image: Image.Image) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = ROTATE_90  # EXIF tag that stores the orientation
    return _jpeg(image.transpose(Image.Transpose.ROTATE_90), exif=exif)
