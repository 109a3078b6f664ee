"""Evaluate a trained model on every image of a split exactly once, under any launcher.

    python validate.py runs/train_cnn_a/single_128_10_1_1
    python validate.py runs/train_cnn_b/fsdp_128_15_1_4/checkpoints/step_00005865 --split train
    accelerate launch --config_file accelerate_configs/ddp_4gpu.yaml validate.py s3://bucket/prefix
    python validate.py vit.safetensors --script train_vit.py --model vit_tiny_patch16_224 --data cifar10

MODEL is a run folder, a run's S3 prefix, a checkpoint folder, a folder written by export.py, or a
.safetensors file. For a run, the command loads the best checkpoint, or the latest checkpoint with --which
latest. All files are verified before they are used, and nothing is unpickled. The checkpoint's manifest
specifies the train script. Train script flags, for example --data or --image_size, are also accepted and
override the recipe. If the data differs from the training data, classes are matched by name (docs/models.md).
If the checkpoint contains averaged weights (EMA), the command evaluates them, as training does.

Each process loads the whole model on its device and evaluates a share of the images. Inference needs no
sharding, so the launcher's strategy does not change the results. Only the main process reads the checkpoint
and writes files, so no shared folder is needed. The main process prints the metrics and writes report.json,
predictions.csv, confusion.png and worst.png. The image worst.png shows the model's most confident mistakes.
"""

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import ClassVar

from onecurve.system.cli import say_loading

if __name__ == "__main__":
    say_loading()  # must run before the imports below, which take seconds

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from onecurve.checkpoint.weights import TrainedModel, load_everywhere, load_weights
from onecurve.data.images import Images, load
from onecurve.data.names import without_names
from onecurve.data.splits import Split
from onecurve.distributed.agreement import agree
from onecurve.distributed.precision import autocast_forward
from onecurve.distributed.process import run_process
from onecurve.distributed.strategy import device_name, precision, strategy
from onecurve.distributed.watch import Preempted, watch
from onecurve.flags.recipe import Batch, ImageRecipe, parse, recipe_part, setting
from onecurve.models.class_names import ClassMatch, match_classes
from onecurve.models.preprocessing import DataConfig
from onecurve.run.evaluation import evaluated_count, evaluated_ids, predict_batches
from onecurve.system.cli import underscores
from onecurve.system.files import refuse_link, sha256_of
from tools.inference import report as reports
from tools.inference.inference import (
    InferenceSettings,
    evaluated_split,
    open_script,
    pixels_of,
    preprocessing_of,
    without_local_rank,
)
from tools.inference.report import TOP_CLASSES, Rows


@dataclass(frozen=True, kw_only=True)
class Validation(InferenceSettings):
    """Command-line flags of validate.py. All other flags belong to the script that trained the model."""

    usage: ClassVar[str] = "%(prog)s MODEL [flags] [flags of the train script]"
    help_group = ("evaluation", "Images and classes to evaluate. Train script flags are also accepted.")
    checkpoint: str | None = setting(
        None, "The model, as an alternative to the argument MODEL.", metavar="PATH"
    )
    split: str | None = setting(None, choices=("val", "test", "train"))
    data: str | None = setting(
        None,
        "Data to evaluate on, in any form that the train script accepts. For different data, the run's"
        " `--holdout` is ignored. Default: the run's data.",
        metavar="NAME|PATH",
    )
    only_its_classes: bool = setting(False, "Predict only classes that have images in the split.")
    output_dir: str | None = setting(
        None, "Folder for the results. Default: a folder in `<run>/validation/` or in `validation/<model>/`."
    )

    def __post_init__(self) -> None:
        if not self.checkpoint:
            raise ValueError(
                "MODEL is missing. Pass MODEL as the first argument: validate.py runs/train_cnn_a/NAME"
            )


def main() -> None:
    flags, words = parse_flags(sys.argv[1:])
    accelerator, batch = flags.start()
    with flags.opened_model(accelerator, flags.checkpoint or "") as (trained, _, scratch):
        trained = for_its_data(accelerator, flags, trained, words)
        script, recipe = script_and_recipe(accelerator, flags, trained, words)
        images = load(accelerator, recipe, is_evaluation_only=True)
        match = match_classes(trained.names or trained.classes, images.classes)
        match.refuse_unknown(recipe.data, trained.name)
        split_name, split = chosen_split(images, flags.split)
        split.labels = match.labels[split.labels]
        left_out = unused_classes(split, match) if flags.only_its_classes else []
        for line in class_notes(flags, match, recipe.data, trained.name, left_out):
            accelerator.print(line)
        split = evaluated_split(split, trained)
        model = script.build_model(recipe, len(match.model))
        weights = partial(load_weights, trained=trained, script=script, recipe=recipe)
        load_everywhere(accelerator, model, weights, flags.timeout_s)
        preprocessing = preprocessing_of(trained, script, recipe, model)
        if trained.note:
            accelerator.print(trained.note)
        name_of = split.names() if accelerator.is_main_process else without_names
        rows, images_per_s = predict(accelerator, model, split, recipe, batch, preprocessing, left_out)

        def report() -> None:
            # The positions and the stored ids are both in ascending order.
            positions, rows["id"] = rows["id"], split.part.stored(rows["id"])
            summary = {
                "checkpoint": trained.name,
                "data": recipe.data,
                "split": split_name,
                "preprocessing": {"image_size": recipe.image_size, **preprocessing.to_json()},
                "cropped": split.cropped,
                **reports.measure(rows, name_of, len(match.model), scratch),
                "images_per_s": images_per_s,
                "classes": match.model,
                "classes_left_out": len(left_out),
                "strategy": strategy(accelerator),
                "processes": batch.processes,
                "device": device_name(accelerator),
                "mixed_precision": precision(accelerator),
            }
            leaf = split_name if trained.step is None else f"{split_name}_{trained.step}"
            leaf += "_only_its_classes" * flags.only_its_classes
            folder = Path(flags.output_dir or f"{trained.reports}/{leaf}")
            if not flags.output_dir:
                refuse_link(folder.parent)
                refuse_link(folder)
            shown = {"val": images.val_name, "test": images.test_name}.get(split_name, split_name)
            title = f"{script.__name__} on {Path(recipe.data).name}, {shown} split"
            worst = positions[np.searchsorted(rows["id"], [image["id"] for image in summary["worst"]])]
            reports.print_report(summary, title)
            pictures = pixels_of(split, worst, recipe, preprocessing.crop).numpy()
            reports.write_report(folder, summary, rows, name_of, pictures, title)
            print(*(folder / name for name in reports.REPORT_FILES), sep="\n")

        flags.finish(accelerator, report)


# --- Flags


def parse_flags(words: list[str]) -> tuple[Validation, list[str]]:
    """Return validate.py's flags and the command-line words for the train script.

    A flag that validate.py and the train script both accept, for example --data, is passed to both.
    """
    words = without_local_rank(words)
    if {"-h", "--help"} & set(words):
        words = ["--help"]
    elif words and not words[0].startswith("-"):
        words[0] = f"--checkpoint={words[0]}"
    own_flags, script_flags = (
        {field.name for field in dataclasses.fields(flags)} for flags in (Validation, ImageRecipe)
    )
    own, for_script = list[str](), list[str]()
    is_own, is_for_script = False, True
    for word in words:
        if word.startswith("--"):  # the following words are the flag's values
            name = underscores(word)[2:].partition("=")[0]
            is_own = name in own_flags or name == "help"
            is_for_script = name not in own_flags or name in script_flags
        own += [word] * is_own
        for_script += [word] * is_for_script
    return parse(Validation, own), for_script


def for_its_data(
    accelerator: Accelerator, flags: Validation, trained: TrainedModel, words: list[str]
) -> TrainedModel:
    """Adapt the model's recipe to --data.

    For data that differs from the training data, ignore the run's --holdout and write the reports outside the
    run folder.
    """
    recipe, has_holdout = trained.recipe, any(word.startswith(("--holdout", "--fold")) for word in words)
    if not flags.data or recipe is None or flags.data == recipe.get("data") or has_holdout:
        return trained
    if recipe.get("holdout"):
        advice = f"Pass --holdout if {flags.data} is a copy of {recipe.get('data')}."
        accelerator.print(f"The training run's --holdout {recipe['holdout']} is ignored. {advice}")
    reports = f"validation/{trained.run_name}/{Path(flags.data).name}"
    return dataclasses.replace(trained, recipe=recipe | {"holdout": None}, reports=reports)


def script_and_recipe(
    accelerator: Accelerator, flags: Validation, trained: TrainedModel, words: list[str]
) -> tuple[ModuleType, ImageRecipe]:
    """Return the script that trained the model, and the recipe with the user's flags applied.

    All processes must call this function.
    """
    if trained.recipe is None and (flags.script is None or flags.data is None):
        raise ValueError(
            f"{trained.name} is a single file without a recipe. Pass the model's timm name and the data:"
            " --model NAME --data FOLDER. Add --script for a model from a different train script."
        )
    if trained.published and flags.data is None:
        raise ValueError(f"{trained.name} does not specify its data. Pass --data FOLDER")
    if flags.model and flags.script:
        words = [*words, f"--model={flags.model}"]
    script, recipe, path = open_script(trained, flags.script, words)
    settings = {"flags": dataclasses.asdict(flags), "recipe": recipe_part(recipe), "script": sha256_of(path)}
    agree(accelerator, settings)
    return script, recipe


def chosen_split(images: Images, name: str | None) -> tuple[str, Split]:
    """Return the evaluated split's name and images. Raise ValueError for a missing test split."""
    splits = {"test": images.test, "val": images.val, "train": images.train}
    default = "test" if images.test else "train" if images.val is images.train else "val"
    split = splits[name := name or default]
    if split is None:
        raise ValueError(
            "--split test is not available, because the data has no second held-out split."
            f" Pass --split val to evaluate {images.val_name}."
        )
    return name, split


def unused_classes(split: Split, match: ClassMatch) -> list[int]:
    """Return the model's labels that do not occur in the split, in ascending order."""
    return sorted(set(range(len(match.model))) - set(split.labels.tolist()))


def class_notes(
    flags: Validation, match: ClassMatch, data: str, model: str, left_out: list[int]
) -> Iterator[str]:
    """Yield sentences that describe how the classes differ and which classes the accuracy covers."""
    if line := match.describe(data, model):
        yield line
    count = len(match.model)
    if flags.only_its_classes:
        yield f"The accuracy covers the {count - len(left_out):,} of {count:,} classes that have images."
    elif match.absent:
        yield f"The accuracy covers all {count:,} classes. Add --only_its_classes to exclude absent classes."


# --- Predictions


def predict(
    accelerator: Accelerator,
    model: nn.Module,
    split: Split,
    recipe: ImageRecipe,
    batch: Batch,
    preprocessing: DataConfig,
    left_out: list[int],
) -> tuple[Rows, float]:
    """Predict the classes of all images in a split. All processes must call this function.

    Args:
        left_out: Labels that are never predicted.

    Returns:
        A tuple of the rows and the throughput. There is one row per image, sorted by id. All processes return
        the same rows. The throughput in images/s includes decoding. Gathering the rows transfers 80 bytes per
        image regardless of the number of classes, because logits stay local.
    """
    (mean, std, crop), parts = preprocessing, list[dict[str, Tensor]]()
    began = time.perf_counter()
    autocast_forward(accelerator, model)  # images are prepared outside autocast, as in training
    for part in predict_batches(
        accelerator, model, split, recipe, batch, mean, std, teller(accelerator), crop
    ):
        if left_out:  # follows the ImageNet-R paper (arXiv 2006.16241)
            part.logits[:, left_out] = -torch.inf
        probability, predicted = part.logits.softmax(1).max(1)
        columns = {
            "id": torch.from_numpy(part.ids),
            "label": part.labels,
            "predicted": predicted,
            "top": part.logits.topk(min(TOP_CLASSES, part.logits.shape[1])).indices,
            "loss": F.cross_entropy(part.logits, part.labels, reduction="none").double(),
            "probability": probability.double(),
        }
        parts.append(columns)
    local = {name: torch.cat([part[name] for part in parts]).cpu().numpy() for name in parts[0]}
    shares = gather_object([local])
    images_per_s = evaluated_count(split, recipe) / (time.perf_counter() - began)
    rows = {name: np.concatenate([share[name] for share in shares]) for name in local}
    order = np.argsort(rows["id"], kind="stable")
    rows = {name: column[order] for name, column in rows.items()}
    check(rows, evaluated_ids(split, recipe))
    return rows, images_per_s


def check(rows: Rows, ids: np.ndarray) -> None:
    """Check that every image was evaluated exactly once. Raise ValueError if a loss is not finite."""
    assert np.isin(rows["id"], ids).all(), "evaluated an image that is not in the split"
    times = np.bincount(np.searchsorted(ids, rows["id"]), minlength=len(ids))
    is_wrong = times != 1
    assert not is_wrong.any(), f"image {ids[is_wrong][0]} was evaluated {times[is_wrong][0]} times"
    if count := (~np.isfinite(rows["loss"])).sum():
        raise ValueError(
            f"the loss is not finite for {count:,} of {len(ids):,} images, because the model diverged"
        )


def teller(accelerator: Accelerator) -> Callable[[str], None]:
    """Return a function that prints progress every 30 s and raises Preempted after a signal."""
    shown_s = time.monotonic()

    def tell(progress: str) -> None:
        nonlocal shown_s
        if watch.wanted():
            raise Preempted
        if accelerator.is_main_process and time.monotonic() - shown_s > 30:
            shown_s = time.monotonic()
            print(progress, flush=True)

    return tell


# --- Entry

if __name__ == "__main__":
    run_process(main)
