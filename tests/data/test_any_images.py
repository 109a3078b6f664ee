"""Tests that --data accepts common folder layouts and image formats, and reports the files it skips."""

import errno
import io
import os
import shutil
import socket
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pillow_heif
import pytest
from accelerate import Accelerator
from PIL import Image, ImageOps

from onecurve.data import cache
from onecurve.data.cache import PreparedData, prepare_cache, prepare_data
from onecurve.data.class_folders import IgnoredFiles, folders_beside_splits, list_splits
from onecurve.data.decode import EXTENSIONS_BY_FORMAT, IMAGE_EXTENSIONS, decode_image
from onecurve.data.images import data_summary, label_warnings, load, open_images
from onecurve.data.splits import FileSplit
from onecurve.data.tables import parquet_files
from onecurve.flags.recipe import ImageRecipe
from onecurve.system.files import read_json
from tests.conftest import CNN, full, lines, metrics, python, run, torchrun
from tests.data.test_decode import header_alone
from tests.support.data_sets import (
    class_folders,
    data_set,
    encode,
    opened,
    parquet_folder,
    picture,
    png,
    put,
    write_parquet,
)
from tools.inference.pictures import find_pictures
from tools.prepare.preparation import find_dataset

# PIL warns when it reads palette images with transparency.
pytestmark = pytest.mark.filterwarnings("ignore:Palette images with Transparency:UserWarning")


def prepare_with(data: Path, cache: Path, **flags) -> PreparedData:
    return prepare_cache(ImageRecipe(data=str(data), cache_dir=str(cache), **flags), lambda: None)


# --- Folder layouts


@pytest.mark.parametrize(
    "names", ["train valid", "train validation", "Train Test", "TRAIN Valid", "Training Testing"]
)
def test_the_names_of_splits(names, tmp_path):
    train, val = names.split()
    root = put(tmp_path / "pets", *(f"{split}/{c}/1.png" for split in (train, val) for c in ("cat", "dog")))
    images = opened(root, tmp_path / "cache")
    assert (images.classes, images.val_name) == (("cat", "dog"), "test" if "Test" in val else "val")
    assert (images.train.labels.tolist(), images.val.labels.tolist()) == ([0, 1], [0, 1])
    expected = [decode_image((root / val / c / "1.png").read_bytes()) for c in ("cat", "dog")]
    assert (images.val.images == np.stack(expected)).all()


def test_the_first_evaluation_split_is_used_and_the_others_are_reported(tmp_path):
    splits = ("train", "test", "valid", "val")
    root = put(tmp_path / "pets", *(f"{split}/{c}/1.png" for split in splits for c in ("cat", "dog")))
    prepared = prepare_with(root, tmp_path / "cache")
    assert prepared.ignored_files_note == "valid/ (val/ is used instead)"
    images = open_images(Path(prepared.folder))
    assert (images.val.images[0] == decode_image((root / "val/cat/1.png").read_bytes())).all()
    assert (images.test.images[0] == decode_image((root / "test/cat/1.png").read_bytes())).all()
    shutil.rmtree(root / "test/cat")
    assert open_images(Path(prepare_with(root, tmp_path / "cache").folder)).test.labels.tolist() == [1]


@pytest.mark.parametrize("name", ["train", "Valid", "val", "test"])
def test_a_class_may_have_the_name_of_a_split(name, tmp_path):
    """Check a class folder that contains images and is named like a split, next to other class folders."""
    names = sorted((name, "bus", "car"))
    root = put(tmp_path / "vehicles", *(f"{c}/{k}.png" for c in names for k in range(4)))
    images = open_images(Path(prepare_with(root, tmp_path / "cache", holdout=0.25).folder))
    assert images.classes == tuple(names)
    assert len(images.train) + len(images.val) == 12


def test_class_folders_next_to_a_split_are_reported(tmp_path):
    root = put(tmp_path / "a", *(f"{c}/{k}.png" for c in ("bus", "car", "train/i", "train/t") for k in "123"))
    prepared = prepare_with(root, tmp_path / "cache", holdout=0.5)
    assert prepared.ignored_files_note == "bus/, car/ (train/ is a split)"
    # Layout of the dogs-vs-cats data set
    with pytest.raises(ValueError, match=r"train contains no class folders\. .*treated as a split"):
        list_splits(put(tmp_path / "c", "train/cat.1.png", "test1/1.png"), IgnoredFiles())


def test_deeper_folders_belong_to_the_class_above(tmp_path):
    paths = ("a/2.png", "a/2023/x/9.png", "a/2023/1.png", "b/deep/er/1.png")
    root = put(tmp_path / "pets", *(f"{split}/{path}" for split in ("train", "val") for path in paths))
    images = opened(root, tmp_path / "cache")
    assert images.classes == ("a", "b")
    order = ["a/2.png", "a/2023/1.png", "a/2023/x/9.png", "b/deep/er/1.png"]
    expected = np.stack([decode_image((root / "train" / path).read_bytes()) for path in order])
    assert (images.train.images == expected).all()
    assert images.train.labels.tolist() == [0, 0, 0, 1]


def test_extensions_are_matched_in_any_case(tmp_path):
    """Check that all listed extensions are accepted and that images are in the order of their file names."""
    pillow_heif.register_heif_opener()
    root = class_folders(tmp_path / "pets", train=2, val=2)
    formats = [
        (format, extension) for format, extensions in EXTENSIONS_BY_FORMAT.items() for extension in extensions
    ]
    for split, (format, extension) in product(("train", "val"), formats):
        for name in (f"1{extension}", f"2{extension.upper()}"):
            (root / split / "a" / name).write_bytes(encode(picture(), format))
    images = opened(root, tmp_path / "cache")
    assert len(images.train) == 2 * len(IMAGE_EXTENSIONS) + 2 == 36
    names = sorted(path.name for path in (root / "train" / "a").iterdir())
    for k, name in enumerate(names):
        assert (images.train.images[k] == decode_image((root / "train" / "a" / name).read_bytes())).all(), (
            name
        )


def test_other_files_are_counted_and_do_not_block(tmp_path):
    root = put(
        tmp_path / "pets",
        *("train/a/1.png", "train/a/deep/2.png", "train/loose.png", "train/a/.hidden/3.png", "train/b/1.png"),
        *("val/a/1.png", "val/b/1.png", "test/unknown/1.png", "test/2.png"),
        *("__MACOSX/train/a/1.png", "train/__MACOSX/a/1.png", "train/a/@eaDir/1.png"),
    )
    for name in ("a/n.txt", "a/m.TXT", "a/x.psd", "a/README", "index.html"):
        (root / "train" / name).write_text("no image")
    os.mkfifo(root / "train" / "a" / "pipe.png")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(root / "train" / "a" / "socket.jpg"))
    (root / "train" / "a" / "gone.png").symlink_to("nowhere.png")
    outside = put(tmp_path / "outside", "more/7.png")
    (root / "train" / "a" / "out").symlink_to(outside)
    (root / "train" / "a" / "twin.png").symlink_to(outside / "more" / "7.png")
    prepared = prepare_with(root, tmp_path / "cache")
    images = open_images(Path(prepared.folder))
    # Class a contains 1.png, deep/2.png, out/more/7.png and twin.png, and class b contains 1.png.
    assert len(images.train) == 5
    assert sorted(prepared.ignored_files_note.split(", ")) == [
        *("1 .html", "1 .psd", "1 dangling links", "1 without an extension", "2 .txt"),
        *("2 special files", "3 outside class folders"),
    ]


def test_pictures_that_are_left_out_are_reported(tmp_path, capsys):
    root = put(tmp_path / "holiday", "1.png")
    (root / "2.psd").write_text("no image")
    assert find_pictures([str(root)]) == [str(root / "1.png")]
    assert capsys.readouterr().err == "ignored files: 1 .psd\n"
    (root / "1.png").unlink()
    with pytest.raises(ValueError, match=r"contains no images, but 1 \.psd\. Pass a folder with images"):
        find_pictures([str(root)])


@pytest.mark.parametrize("form", ["itself", "above", "through another"])
def test_circular_links_are_refused(form, tmp_path):
    root, outside = put(tmp_path / "pets", "train/a/deep/1.png"), tmp_path / "outside"
    outside.mkdir()
    link, target = {
        "itself": (root / "train/a/link", root / "train/a"),
        "above": (root / "train/a/deep/link", root),
        "through another": (outside / "link", root / "train/a"),
    }[form]
    (root / "train/a/out").symlink_to(outside)  # This symbolic link is not circular
    link.symlink_to(target)
    with pytest.raises(ValueError, match="link is a link to one of its parent folders"):
        list_splits(root, IgnoredFiles())


@pytest.mark.parametrize("layout", ["folder", "deeper", "folders", "list", "parquet", "saved"])
def test_data_with_one_class_can_be_evaluated_but_not_trained(layout, tmp_path):
    root = tmp_path / "pets"
    if layout in ("folder", "deeper"):
        put(root, *(f"ox/{'2026/' * (layout == 'deeper')}{k}.png" for k in range(4)))
    else:
        root = data_set(root, layout, names=["ox"], labels=[0] * 4, train=4, val=4)
    recipe = ImageRecipe(data=str(root), cache_dir=str(tmp_path / "cache"), holdout=None)
    accelerator = Accelerator(cpu=True)
    images = load(accelerator, recipe, is_evaluation_only=True)
    assert (images.classes, len(images.val)) == (("ox",), 4)
    with pytest.raises(
        ValueError,
        match=r"contains only one class|needs at least two class folders|If the class folders are in",
    ):
        load(accelerator, recipe)


def test_classes_with_equal_names_are_refused(tmp_path):
    root = put(tmp_path / "cafes", "caf\u00e9/1.png", "cafe\u0301/2.png", "bar/3.png")
    message = "cafes contains several classes named cafe\u0301. Merge or rename these"
    with pytest.raises(ValueError, match=message):
        prepare_with(root, tmp_path / "cache", holdout=0.5)


# --- Decoded pixels


def photo() -> Image.Image:
    return picture(3, 40, 30)


def pil(data: bytes) -> np.ndarray:
    return np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))


def with_alpha(mode: str) -> Image.Image:
    image = photo().convert("RGB")
    alpha = Image.fromarray(np.linspace(0, 255, 40 * 30).reshape(30, 40).astype(np.uint8))
    image.putalpha(alpha)
    return image.convert(mode)


def palette(**options) -> bytes:
    return encode(photo().quantize(16), "PNG", **options)


def animation(**options) -> bytes:
    frames = [picture(seed, 40, 30).quantize(16) for seed in (1, 2, 3)]
    return encode(frames[0], "GIF", save_all=True, append_images=frames[1:], **options)


AS_PIL = {
    "RGB PNG": encode(photo(), "PNG"),
    "BMP": encode(photo(), "BMP"),
    "progressive JPEG": encode(photo(), quality=95, progressive=True),
    "palette PNG": palette(),
    "CMYK JPEG": encode(photo().convert("CMYK")),
    "grey JPEG": encode(photo().convert("L")),
    "1-bit PNG": encode(photo().convert("1"), "PNG"),
    "animated GIF": animation(),
    "moving WebP": encode(photo(), "WEBP", save_all=True, append_images=[picture(9, 40, 30)], lossless=True),
    "TIFF of two pages": encode(photo(), "TIFF", save_all=True, append_images=[picture(9, 40, 30)]),
    "opaque RGBA": encode(photo().convert("RGBA"), "PNG"),
}


@pytest.mark.parametrize("image_format", AS_PIL)
def test_pixels_equal_pils(image_format):
    data = AS_PIL[image_format]
    # torchcodec decodes JPEGs and may round differently from PIL
    tolerance = 2 if "JPEG" in image_format else 0
    assert np.abs(decode_image(data).astype(int) - pil(data)).max() <= tolerance


OVER_WHITE = {
    "RGBA": encode(with_alpha("RGBA"), "PNG"),
    "LA": encode(with_alpha("LA"), "PNG"),
    "WebP": encode(with_alpha("RGBA"), "WEBP", lossless=True),
    "palette with a clear colour": palette(transparency=3),
    "palette with alpha": palette(transparency=bytes(range(0, 256, 16))),
    "clear colour": encode(photo(), "PNG", transparency=photo().getpixel((7, 7))),
    "GIF": animation(transparency=3),
}


@pytest.mark.parametrize("image_format", OVER_WHITE)
def test_transparent_pixels_are_white(image_format):
    data = OVER_WHITE[image_format]
    rgba = np.asarray(Image.open(io.BytesIO(data)).convert("RGBA")).astype(float)
    alpha = rgba[..., 3:] / 255
    expected = rgba[..., :3] * alpha + 255 * (1 - alpha)
    assert np.abs(decode_image(data) - expected).max() <= 1  # The decoded pixels differ only by rounding
    assert np.abs(pil(data) - expected).max() > 50  # PIL alone shows the hidden colors of transparent pixels


@pytest.mark.parametrize("format", ["PNG", "TIFF", "PPM"])
def test_sixteen_bits_are_scaled_by_257(format):
    grey = np.asarray(photo().convert("L"))
    data = encode(Image.fromarray(grey.astype(np.uint16) * 257), format)
    assert Image.open(io.BytesIO(data)).mode.startswith("I")
    assert (decode_image(data) == grey[:, :, None]).all()


# --- Reports about the data


def test_the_summary_line():
    train, val = np.array([0] * 3 + [1] * 4), np.array([1, 0])
    line = data_summary("pe\x1bts", {"training": train, "holdout": val[:1], "test": val}, 2, "")
    assert line == "data pe\\x1bts: 7 training images, 1 holdout images, 2 test images, 2 classes"
    assert data_summary("x", {"": val}, 1, "2 .txt") == "data x: 2 images, 1 class; left out: 2 .txt"


def test_imbalance_and_missing_classes_are_reported():
    classes = ("cat", "dog", "ox")
    train, val = np.repeat([0, 1, 2], [2, 20, 5]), np.array([0, 1])
    assert label_warnings(train, {"val": val}, classes) == [
        "the classes are imbalanced: the training split contains 2 images of cat, but 20 images of dog. Check"
        " the recall of each class. To weight classes equally, use --class_weights balanced and --best_by"
        " macro_f1",
        "the val split contains no images of ox",
    ]
    assert label_warnings(np.repeat([0, 1], [2, 19]), {"val": val}, classes[:2]) == []


def write_form(root: Path, form: str, classes: dict[str, str]) -> None:
    """Write a data set. `classes` maps each split to a string in which each letter is an image's class."""
    root.mkdir()
    rows = ["file,label,split"]
    for split, letters in classes.items():
        names = [f"{split}/{c}/{k}.png" for k, c in enumerate(letters)]
        if form in ("folders", "list"):
            put(root, *(name if form == "folders" else name.replace("/", "_") for name in names))
        else:
            known = sorted(set(letters), reverse=split == "val") if form == "names" else None
            labels = [known.index(c) if known else c for c in letters]
            images = [png(k) for k in range(len(letters))]
            write_parquet(root / f"{split}-0.parquet", images, labels, known)
        rows += [f"{name.replace('/', '_')},{c},{split}" for name, c in zip(names, letters, strict=True)]
    if form == "list":
        (root / "labels.csv").write_text("\n".join(rows))


@pytest.mark.parametrize("form", ["folders", "list", "names", "labels"])
def test_an_evaluated_split_may_lack_a_class_but_not_add_one(form, tmp_path):
    write_form(tmp_path / "pets", form, {"train": "abc", "val": "ca", "test": "bb"})
    images = opened(tmp_path / "pets", tmp_path / "cache")
    labels = {name: split.labels.tolist() for name, split in images.evaluated.items()}
    assert images.classes == ("a", "b", "c")
    assert (sorted(images.train.labels), labels["test"]) == ([0, 1, 2], [1, 1])
    assert labels["val"] == ([0, 2] if form == "folders" else [2, 0])
    assert "the val split contains no images of b" in label_warnings(
        images.train.labels, labels, images.classes
    )
    for split in ("val", "test"):
        root = tmp_path / f"new in {split}"
        write_form(root, form, {"train": "ab", "val": "ab", "test": "ab"} | {split: "ax"})
        with pytest.raises(
            ValueError, match=rf"{split} (split )?contains classes that are not in train: x\. Rename or"
        ):
            opened(root, tmp_path / "cache")


def test_an_empty_class_folder_is_ignored_and_reported(tmp_path):
    root = put(tmp_path / "pets", *(f"{split}/{c}/1.png" for split in ("train", "val") for c in "ab"))
    for name in ("train/c", "val/a_new_one"):
        (root / name).mkdir()
    (root / "train/c/notes.txt").touch()
    prepared = prepare_with(root, tmp_path / "cache")
    assert prepared.ignored_files_note == "1 .txt, train/c/, val/a_new_one/ without images"
    assert open_images(Path(prepared.folder)).classes == ("a", "b")
    put(root, "val/c/1.png")
    with pytest.raises(ValueError, match="val contains classes that are not in train: c"):
        prepare_with(root, tmp_path / "cache")


@pytest.mark.parametrize("form", ["paths", "tables"])
def test_images_in_both_splits_are_reported(form, tmp_path, monkeypatch):
    if form == "paths":
        root = class_folders(tmp_path / "pets")
        shutil.copy(root / "train/a/2.png", root / "val/b/1.png")
        names = f"{root}/val/b/1.png", f"{root}/train/a/2.png"
        both_labels = f"{names[1]} (a) and {names[0]} (b)"
    else:
        root = parquet_folder(tmp_path / "pets", train=5, test=[png(seed) for seed in (70, 3, 71)])
        file = root / "test-00000-of-00001.parquet"
        names = f"row 1 of {file}", f"row 3 of {root}/train-00000-of-00001.parquet"
        both_labels = None
    images = opened(root, tmp_path / "cache")
    val_split, both = f"the {len(images.val)} {images.val_name} images", f"{names[0]} and {names[1]}"
    assert images.flaws == (
        f"1 of {val_split} are also training images, for example {both}. The measured accuracy"
        " will be too high. Remove these images from one of the two splits",
        *contradictions(2, both_labels),
    )
    monkeypatch.setattr(cache, "MAX_SEARCH_BYTES", 100)
    assert opened(root, tmp_path / "other").flaws == ()


def contradictions(count: int, both: str | None) -> list[str]:
    text = f"{count} images have contradictory labels, because identical files belong to different classes,"
    return [f"{text} for example {both}. Correct the labels or remove these images"] if both else []


@pytest.mark.parametrize("form", ["folders", "several sizes", "links", "holdout"])
def test_contradictory_labels_are_reported(form, tmp_path):
    """Check that identical images in two classes are reported, within one split or across splits.

    Two identical images in the same class must not be reported.
    """
    root = class_folders(tmp_path / "pets", train=20)
    shutil.copy(root / "train/a/0.png", root / "train/a/copy.png")
    for name in ("one.png", "two.png"):
        if form == "links":
            (root / "train/b" / name).symlink_to(root / "train/a/2.png")
        else:
            shutil.copy(root / "train/a/2.png", root / "train/b" / name)
    if form == "several sizes":
        picture(1, 50, 60).save(root / "train/a/large.png")
    flags = {"holdout": 0.4} if form == "holdout" else {}
    [flaw] = [
        flaw for flaw in opened(root, tmp_path / "cache", **flags).flaws if "contradictory labels," in flaw
    ]
    if form == "holdout":
        assert flaw.startswith("3 images have contradictory labels")
        assert f"{root}/train/a/2.png (a)" in flaw
    else:
        assert [flaw] == contradictions(3, f"{root}/train/a/2.png (a) and {root}/train/b/one.png (b)")


def test_broken_images_of_several_sizes_are_reported_at_the_start(tmp_path, monkeypatch):
    """Check that all broken images in all splits are reported together.

    Broken files are empty, are not images, are truncated, or have the header of a decompression bomb. With
    --on_bad_image skip, broken images are errors only in evaluated splits. Half a JPEG is decoded with a
    warning.
    """
    root = class_folders(tmp_path / "pets", size=(40, 30))
    picture(1, 50, 60).save(root / "train" / "a" / "large.png")
    jpeg = encode(picture(2, 300, 300))
    train = {f"train/a/empty{k:02}.jpg": b"" for k in range(9)} | {"train/b/text.png": b"no image"}
    val = {"val/a/cut.jpg": jpeg[: len(jpeg) // 2], "val/b/bomb.jpg": header_alone(20_000, {})}
    for path, data in {**train, **val, "val/b/half.jpg": jpeg[: len(jpeg) // 2] + b"\xff\xd9"}.items():
        (root / path).write_bytes(data)

    def refusal(**flags) -> list[str]:
        with pytest.raises(ValueError, match=r"can't be decoded\. Replace or remove these") as error:
            prepare_data(str(root), tmp_path / "cache", **flags)
        return str(error.value).splitlines()

    first, *named, last = refusal()
    assert first.startswith("12 of ")
    assert named[0] == f"  {root}/train/a/empty00.jpg: the file is empty"
    assert (len(named), last[:33]) == (10, "  and 2 more images, listed in /t")
    broken = read_json(Path(last.removeprefix("  and 2 more images, listed in ")))
    assert [line.partition(": ")[0] for line in broken["evaluated"]] == [f"{root}/{path}" for path in val]
    assert len(refusal(on_bad_image="skip")) == 3
    for path in val:
        (root / path).unlink()
    assert refusal()[0].endswith(", or add --on_bad_image skip to train without them")
    images = open_images(prepare_data(str(root), tmp_path / "cache", on_bad_image="skip"))
    assert isinstance(images.train, FileSplit)
    half = f"1 of {len(images.train) + len(images.val)} images have missing parts, for example {root}/val/b"
    assert images.flaws[0].startswith(half)
    for path in train:
        (root / path).unlink()
    opened(root, tmp_path / "cache")
    monkeypatch.setattr(cache, "MAX_SEARCH_BYTES", 100)
    (root / "val/a/empty.jpg").write_bytes(b"")
    assert opened(root, tmp_path / "cache").flaws == ()


def test_held_out_images_of_several_sizes_must_be_decodable(tmp_path):
    root = class_folders(tmp_path / "pets", train=20)
    shutil.rmtree(root / "val")
    picture(1, 50, 60).save(root / "train" / "a" / "large.png")
    for path in (root / "train" / "b").iterdir():
        path.write_bytes(b"")
    for flags, count in (({}, 10), ({"on_bad_image": "skip"}, 2)):
        with pytest.raises(ValueError, match=f"{count} of 21 images can't be decoded"):
            prepare_with(root, tmp_path / "cache", holdout=0.2, **flags)


def test_a_file_that_cannot_be_read_is_reported(tmp_path, monkeypatch):
    root = class_folders(tmp_path / "pets")

    def unreadable(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(cache, "sha256_of", unreadable)
    message = r"Permission denied: '.*/pets/train/a/0\.png'\. Make sure that the data is readable"
    with pytest.raises(ValueError, match=message):
        opened(root, tmp_path / "cache")


PLAIN = ["--mixed_precision", "no", "--workers", 0, "--log_every", 1, "--log_samples", "--trackers", "none"]
PLAIN += ["--telemetry_s", 0]


@pytest.mark.parametrize("form", ["folders", full("list"), full("parquet"), full("saved")])
def test_training_on_all_formats_on_one_and_two_processes(form, tmp_path):
    """Compare samples and losses with one and two processes. Only one rank may print the data's summary."""
    images = [*AS_PIL.values(), *OVER_WHITE.values(), encode(picture(5, 64, 50), "TIFF")]
    data = data_set(tmp_path / "pets", form, train=images, valid=images)
    os.makedirs(tmp_path / "pets/train/a", exist_ok=True)
    (tmp_path / "pets/train/a/notes.txt").touch()
    words = [*CNN, "--data", data, "--epochs", 2, "--batch_size", 8, "--per_device_batch_size", 4]
    words += [*PLAIN, "--cache_dir", tmp_path / "cache"]
    outputs = [
        run([*start, *words, "--output_dir", tmp_path / name])
        for name, start in (("one", python()), ("two", torchrun(2)))
    ]
    counts = f"data {data}: 19 training images, 19 val images, 2 classes"
    counts += "; left out: 1 .txt" if form == "folders" else ""
    duplicates = "warning: 19 of the 19 val images are also training images"
    assert [(output.count(f"{counts}\n"), output.count(duplicates)) for output in outputs] == [(1, 1), (1, 1)]
    one, two = (metrics(tmp_path / name) for name in ("one", "two"))
    assert len(one) == len(two) > 4
    for line_of_one, line_of_two in zip(one, two, strict=True):
        assert line_of_one.get("train/loss") == pytest.approx(line_of_two.get("train/loss"), abs=1e-5)
        assert line_of_one.get("val/loss") == pytest.approx(line_of_two.get("val/loss"), abs=1e-5)
    ids = [[line["samples"] for line in lines(tmp_path / name / "samples.jsonl")] for name in ("one", "two")]
    assert ids[0] == ids[1]
    assert max(map(max, ids[0])) == 18


def test_folders_named_like_splits_are_not_classes(tmp_path):
    """Check a Kaggle layout with labels in a CSV list."""
    root = put(tmp_path / "leaves", "train_images/1.png", "train_images/2.png", "test_images/3.png")
    (root / "train.csv").write_text("image_id,label\n1.png,0\n2.png,1\n")
    with pytest.raises(ValueError, match=rf"refer to splits, not classes.*pass --data {root}/train.csv"):
        list_splits(root, IgnoredFiles())
    (root / "train.csv").unlink()
    with pytest.raises(
        ValueError,
        match=r"test_images, train_images refer to splits, not classes\. Rename the split folders to",
    ):
        list_splits(root, IgnoredFiles())
    land = put(tmp_path / "land", "seg_train/seg_train/sea/1.png", "seg_test/seg_test/sea/2.png")
    with pytest.raises(ValueError, match="the folder names seg_test, seg_train refer to splits"):
        list_splits(land, IgnoredFiles())
    toys = put(tmp_path / "toys", "trains/1.png", "trams/2.png", "test tubes/3.png")
    assert list_splits(toys, IgnoredFiles())[1]["train"].keys() == {"trains", "trams", "test tubes"}


def test_lost_and_found_is_not_part_of_the_data(tmp_path):
    """Check that the folder lost+found, which only root can read, is ignored."""
    root = put(tmp_path / "disk", "train/a/1.png", "val/a/2.png", "lost+found/train/3.png")
    (root / "lost+found" / "train-0.parquet").touch()
    assert parquet_files(root) is None
    assert folders_beside_splits(root) == []


def test_shards_use_the_split_that_training_evaluates(tmp_path):
    root = put(tmp_path / "flowers", "Train/a/1.png", "validation/a/2.png", "test/a/3.png")
    parts = dict.fromkeys(("train", "val", "devkit", "val_labels"))
    flags = SimpleNamespace(source="folder", data=str(root), **parts)
    assert find_dataset(flags).locations == {"train": f"{root}/Train", "val": f"{root}/validation"}
