"""Predict the classes of images with a trained model.

    python predict.py runs/train_cnn_a/single_128_10_1_1 holiday/ cat.jpg
    ls *.jpg | python predict.py runs/train_cnn_b/fsdp_128_15_1_4 - --top 5
    torchrun --standalone --nproc_per_node=2 predict.py s3://bucket/prefix '/data/**/*.webp'

MODEL is a run folder, a run's S3 prefix, a checkpoint folder, or a folder written by export.py. For a
run, the command loads the best checkpoint, or the latest checkpoint with --which latest. All files are
verified before they are used, and nothing is unpickled. IMAGE is a file, a folder or a pattern. The IMAGE `-`
reads file names from stdin. Put all images before the first flag. Each image is predicted exactly once, under
any launcher.

The output folder is --output_dir, by default predictions/<run>. The files predictions.csv and
predictions.jsonl contain each image's most likely classes and their probabilities. The file
sheet.png shows the first images. The command skips files that are not images and lists each skipped file with
the reason. --embeddings FILE.npy writes one row per image, with the fields `id` (the file name) and
`features` (the float32 inputs of the model's head).
"""

import dataclasses
import io
import json
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from onecurve.system.cli import say_loading

if __name__ == "__main__":
    say_loading()  # must run before the imports below, which take seconds

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from onecurve.checkpoint.weights import TrainedModel, load_everywhere, load_weights
from onecurve.data.conversions import ImageStats, conversion_warnings, image_stats
from onecurve.distributed.agreement import agree
from onecurve.distributed.precision import autocast_forward
from onecurve.distributed.process import run_process
from onecurve.distributed.watch import Preempted, watch
from onecurve.flags.recipe import parse, setting
from onecurve.system.files import write_bytes, write_csv, write_text
from onecurve.system.text import plural, printable
from tools.inference.inference import (
    InferenceSettings,
    open_script,
    preprocessing_of,
    record_head_inputs,
    without_local_rank,
)
from tools.inference.pictures import Pictures, Preprocessing, find_pictures, picture_batches

# Data sets whose images are not cropped if the checkpoint does not record cropping
WHOLE = ("digits", "cifar10", "synthetic")
SHEET, EDGE = 32, 128  # number of images on sheet.png, and the edge length of each image in pixels
PRINTED = 10

Row = dict[str, Any]  # dict with file, classes and probabilities (most likely class first), or file and error


@dataclass(frozen=True, kw_only=True)
class Prediction(InferenceSettings):
    """Command-line flags of predict.py."""

    usage: ClassVar[str] = "%(prog)s MODEL IMAGE... [flags]"
    help_group = ("prediction", "IMAGE is a file, a folder, a pattern, or `-` to read file names from stdin.")
    top: int = setting(5, "Number of classes to list for each image, most likely first.", minimum=1)
    crop: str = setting("auto", choices=("auto", "center", "whole"))
    workers: int = setting(
        2, "Number of processes per device that decode images. 0 decodes images between batches.", minimum=0
    )
    embeddings: str | None = setting(
        None,
        "File for the inputs of the model's head, in .npy format with one row per image. Default: no file.",
        metavar="FILE",
    )
    output_dir: str | None = setting(None, "Folder for the results. Default: `predictions/<model>`.")

    def __post_init__(self) -> None:
        if self.embeddings and not self.embeddings.endswith(".npy"):
            raise ValueError(
                f"--embeddings {self.embeddings} is not an .npy file. Pass a file name that ends with .npy."
            )


def main() -> None:
    flags, location, names = parse_flags(sys.argv[1:])
    accelerator, _ = flags.start()
    look = partial(find_pictures, names)  # only one process reads stdin
    with flags.opened_model(accelerator, location, look) as (trained, files, _):
        step = "" if trained.step is None else f", step {trained.step:,}"
        split = "holdout" if (trained.recipe or {}).get("holdout") else "val"
        accuracy = "" if trained.accuracy is None else f", {split} accuracy {trained.accuracy:.4f}"
        accelerator.print(f"model {trained.name}{step}{accuracy}")
        model, preparation = build(accelerator, flags, trained)
        began = time.perf_counter()
        classes = trained.classes or list(map(str, range(trained.published)))
        rows = predict_images(accelerator, model, Pictures(files, preparation), classes, flags)
        seconds = time.perf_counter() - began

        def report() -> None:
            folder = Path(flags.output_dir or f"predictions/{trained.run_name}")
            features = [row.pop("features") for row in rows if "features" in row]
            looks = write_predictions(folder, rows, trained)
            for line in conversion_warnings(looks, preparation.is_cropped):
                print(f"warning: {line}", file=sys.stderr)
            print_predictions(rows, folder, seconds)
            if flags.embeddings:
                write_embeddings(Path(flags.embeddings), rows, features)

        flags.finish(accelerator, report)


def parse_flags(words: list[str]) -> tuple[Prediction, str, list[str]]:
    """Return the flags, the model's location, and the command-line words that specify images."""
    words = without_local_rank(words)
    first = next((k for k, word in enumerate(words) if word.startswith("-") and word != "-"), len(words))
    flags = parse(Prediction, words[first:])
    if first < 2:
        raise ValueError("MODEL and IMAGE are required. Example: predict.py RUN a.jpg")
    return flags, words[0], words[1:first]


def build(
    accelerator: Accelerator, flags: Prediction, trained: TrainedModel
) -> tuple[nn.Module, Preprocessing]:
    """Load the model on each device.

    Return the model and its input preprocessing. All processes must call this function.
    """
    if trained.recipe is None:
        raise ValueError(f"{trained.name} is a single file without a recipe. Pass --model NAME")
    script, recipe, _ = open_script(trained, flags.script, [])
    agree(accelerator, {"flags": dataclasses.asdict(flags), "model": trained.name})
    model = script.build_model(recipe, trained.published or len(trained.classes or ()))
    weights = partial(load_weights, trained=trained, script=script, recipe=recipe)
    load_everywhere(accelerator, model, weights, flags.timeout_s)
    model.eval()
    mean, std, crop = preprocessing_of(trained, script, recipe, model)
    was_cropped = recipe.data not in WHOLE if trained.cropped is None else trained.cropped
    is_cropped = was_cropped if flags.crop == "auto" else flags.crop == "center"
    return model, Preprocessing(recipe.image_size, mean, std, is_cropped, crop)


@torch.inference_mode()
def predict_images(
    accelerator: Accelerator, model: nn.Module, pictures: Pictures, classes: list[str], flags: Prediction
) -> list[Row]:
    """Predict all images.

    Return one row per image, in order, on every process. All processes must call this function.
    """
    local: dict[int, Row] = {}
    autocast_forward(accelerator, model)
    features = record_head_inputs(model) if flags.embeddings else []
    ids = range(accelerator.process_index, len(pictures), accelerator.num_processes)
    for batch in picture_batches(pictures, ids, flags.per_device_batch_size, flags.workers):
        if watch.wanted():
            raise Preempted
        local |= {i: {"file": pictures.files[i], "error": reason} for i, reason in batch.broken}
        if not len(batch.ids):
            continue
        inputs = batch.inputs.to(accelerator.device).contiguous(memory_format=torch.channels_last)
        logits = model(inputs)
        if not logits.isfinite().all():
            raise ValueError(
                "the model's output is not finite. The model diverged, or --mixed_precision overflows."
            )
        best = logits.softmax(1).topk(min(flags.top, len(classes)))
        for i, values, labels in zip(batch.ids.tolist(), *map(Tensor.tolist, best), strict=True):
            names = [classes[label] for label in labels]
            local[i] = {"file": pictures.files[i], "classes": names, "probabilities": values}
        for i, vector in zip(batch.ids.tolist(), features.pop() if features else (), strict=False):
            local[i]["features"] = vector
    gathered = [pair for share in gather_object([local]) for pair in share.items()]
    rows = dict(gathered)
    assert len(gathered) == len(rows) == len(pictures), "an image was not predicted, or was predicted twice"
    return [rows[i] for i in range(len(pictures))]


# --- Files


def write_predictions(folder: Path, rows: list[Row], trained: TrainedModel) -> list[ImageStats]:
    """Write predictions.csv, predictions.jsonl and sheet.png, each atomically.

    Returns:
        The properties of the images on the sheet, from which conversion warnings are derived.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({**row, "file": printable(row["file"])}, allow_nan=False) for row in rows]
    write_text(folder / "predictions.jsonl", "\n".join(lines) + "\n")
    top = max((len(row.get("classes", ())) for row in rows), default=0)
    columns = [f"{name}_{k}" for k in range(1, top + 1) for name in ("class", "probability")]
    table = [["file", *columns, "error"]]
    for row in rows:
        pairs = zip(row.get("classes", ()), row.get("probabilities", ()), strict=True)
        cells = [cell for name, value in pairs for cell in (name, f"{value:.6f}")]
        table.append([row["file"], *(cells or [""] * 2 * top), row.get("error", "")])
    write_csv(folder / "predictions.csv", table)
    (folder / "sheet.png").unlink(missing_ok=True)  # remove an earlier call's sheet
    good = [row for row in rows if "classes" in row][:SHEET]
    return draw_sheet(folder / "sheet.png", good, trained) if good else []


def write_embeddings(file: Path, rows: list[Row], features: list[list[float]]) -> None:
    """Write the features of all predicted images to a .npy file, atomically."""
    vectors = np.array(features, np.float32)  # [images, features]
    files = np.array([printable(row["file"]) for row in rows if "classes" in row], str)
    table = np.empty(len(files), [("id", files.dtype), ("features", np.float32, vectors.shape[1:])])
    table["id"], table["features"], content = files, vectors, io.BytesIO()
    np.save(content, table)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(file, content.getvalue())


def draw_sheet(file: Path, rows: list[Row], trained: TrainedModel) -> list[ImageStats]:
    """Draw a contact sheet that shows each image with its most likely class."""
    from PIL import Image, ImageOps

    from onecurve.data.decode import decode_image
    from onecurve.run import plots

    looks, squares = list[ImageStats](), list[np.ndarray]()
    for row in rows:
        pixels = decode_image(data := Path(row["file"]).read_bytes())
        looks.append(image_stats(data, pixels))
        squares.append(np.asarray(ImageOps.pad(Image.fromarray(pixels), (EDGE, EDGE), color="white")))
    shown = [(Path(printable(row["file"])).name, row["classes"][0], row["probabilities"][0]) for row in rows]
    captions = [f"{plots.file_caption(name)}\n{label}\n{share:.3f}" for name, label, share in shown]
    plots.draw_image_sheet(file, np.stack(squares), captions, f"{trained.script}: {len(rows)} predictions")
    return looks


def print_predictions(rows: list[Row], folder: Path, seconds: float) -> None:
    """Print the first predictions, the unreadable files and the throughput."""
    good, bad = ([row for row in rows if key in row] for key in ("classes", "error"))
    for row in good[:PRINTED]:
        print(f"{printable(row['file'])}: {row['classes'][0]} ({row['probabilities'][0]:.3f})")
    if len(good) > PRINTED:
        print(f"... and {len(good) - PRINTED:,} more")
    for row in bad:
        print(f"{printable(row['file'])} was skipped: {printable(row['error'])}", file=sys.stderr)
    counts = f"{plural(len(good), 'image')} predicted, {len(bad):,} skipped"
    print(f"{counts}, {len(rows) / seconds:,.0f} images/s. Results: {folder}")


# --- Entry

if __name__ == "__main__":
    run_process(main)
