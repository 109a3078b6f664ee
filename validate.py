"""Evaluates a trained model with all metrics on each image of a split exactly once, under any launcher.

    python validate.py runs/train_cnn_a/single_128_10_1_1
    python validate.py runs/train_cnn_b/fsdp_128_15_1_4/checkpoints/step_00005865 --split train
    accelerate launch --config_file accelerate_configs/ddp_4gpu.yaml validate.py s3://bucket/prefix
    python validate.py vit.safetensors --script train_vit.py --model vit_tiny_patch16_224 --data cifar10

The first word is the model: a run's folder or S3 prefix (its best checkpoint, or --which latest), a
checkpoint's folder, a folder of export.py, or a .safetensors file. It is verified before use, and nothing in
it is unpickled. Its manifest names the script that trained it; flags of that script change the recipe, as
--data or --image_size. Classes of other data are matched by name (docs/models.md). If the run has averaged
weights they are used, as the run evaluated them.

Each process evaluates its share of the images with the whole model on its device: without training these
models need no sharding, and the launcher's strategy changes no number. Only the main process reads the
checkpoint and writes, so no shared folder is needed. It prints the metrics and writes report.json,
predictions.csv, confusion.png, and worst.png with the model's most confident mistakes.
"""

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

from onecurve.system.cli import say_loading

if __name__ == "__main__":
    say_loading()  # before the imports below, which take seconds

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from onecurve.checkpoint.weights import TrainedModel, load_everywhere, load_weights, open_script
from onecurve.data.class_names import ClassMatch, match_classes
from onecurve.data.images import Images, load
from onecurve.data.names import nameless
from onecurve.data.splits import Split
from onecurve.distributed.agreement import agree
from onecurve.distributed.precision import autocast_forward
from onecurve.distributed.process import run_process
from onecurve.distributed.strategy import device_name, precision, strategy
from onecurve.distributed.watch import Preempted, watch
from onecurve.flags.recipe import Batch, ImageRecipe, parse, recipe_part, setting
from onecurve.models.preprocessing import DataConfig
from onecurve.run.evaluation import counted, evaluated_ids, predictions
from onecurve.system.cli import underscores
from onecurve.system.files import refuse_link, sha256_of
from tools.inference import report as reports
from tools.inference.inference import Inference, evaluated_split, own_words, pixels_of, preprocessing_of
from tools.inference.report import TOP, Rows


@dataclass(frozen=True, kw_only=True)
class Validation(Inference):
    """The flags of validate.py; all others are those of the script that trained the model."""

    checkpoint: str | None = setting(None, "the model, if it is not the first word")
    split: str | None = setting(None, choices=("val", "test", "train"))
    data: str | None = setting(None, "other data than the training's, whole unless --holdout is given, too")
    only_its_classes: bool = setting(False, "predict only classes that the split has images of")

    def __post_init__(self) -> None:
        if not self.checkpoint:
            raise ValueError("the first word says what to validate: validate.py runs/train_cnn_a/NAME")


def main() -> None:
    flags, words = parse_flags(sys.argv[1:])
    accelerator, batch = flags.start()
    with flags.trained(accelerator, flags.checkpoint or "") as (trained, _, scratch):
        trained = for_its_data(accelerator, flags, trained, words)
        script, recipe = script_and_recipe(accelerator, flags, trained, words)
        images = load(accelerator, recipe, is_evaluated=True)
        match = match_classes(trained.names or trained.classes, images.classes)
        match.refuse_unknown(recipe.data, trained.name)
        split_name, split = chosen_split(images, flags.split)
        split.labels = match.labels[split.labels]
        left_out = unused_classes(split, match) if flags.only_its_classes else []
        for line in about_classes(flags, match, recipe.data, trained.name, left_out):
            accelerator.print(line)
        split = evaluated_split(split, trained)
        model = script.build_model(recipe, len(match.model))
        weights = partial(load_weights, trained=trained, script=script, recipe=recipe)
        load_everywhere(accelerator, model, weights, flags.timeout_s)
        preprocessing = preprocessing_of(trained, script, recipe, model)
        if trained.note:
            accelerator.print(trained.note)
        name_of = split.names() if accelerator.is_main_process else nameless
        rows, images_per_s = predict(accelerator, model, split, recipe, batch, preprocessing, left_out)

        def report() -> None:
            positions, rows["id"] = rows["id"], split.part.stored(rows["id"])  # both ascend
            found = {
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
            worst = positions[np.searchsorted(rows["id"], [image["id"] for image in found["worst"]])]
            reports.print_report(found, title)
            pictures = pixels_of(split, worst, recipe, preprocessing.crop).numpy()
            reports.write_report(folder, found, rows, name_of, pictures, title)
            print(*(folder / name for name in reports.FILES), sep="\n")

        flags.finish(accelerator, report)


# --- Flags


def parse_flags(words: list[str]) -> tuple[Validation, list[str]]:
    """Our flags, and the words for the script's. A flag that both have, as --data, is in both."""
    words = own_words(words)
    if {"-h", "--help"} & set(words):
        words = ["--help"]
    elif words and not words[0].startswith("-"):
        words[0] = f"--checkpoint={words[0]}"
    ours, scripts = ({field.name for field in dataclasses.fields(kind)} for kind in (Validation, ImageRecipe))
    mine, others = list[str](), list[str]()
    is_mine, is_others = False, True
    for word in words:
        if word.startswith("--"):  # values follow their flag
            name = underscores(word)[2:].partition("=")[0]
            is_mine = name in ours or name == "help"
            is_others = name not in ours or name in scripts
        mine += [word] * is_mine
        others += [word] * is_others
    return parse(Validation, mine), others


def for_its_data(
    accelerator: Accelerator, flags: Validation, trained: TrainedModel, words: list[str]
) -> TrainedModel:
    """The model, for other data without the run's --holdout, and with reports outside of the run's folder."""
    recipe, given = trained.recipe, any(word.startswith(("--holdout", "--fold")) for word in words)
    if not flags.data or recipe is None or flags.data == recipe.get("data") or given:
        return trained
    if recipe.get("holdout"):
        advice = f"give it if these are {recipe.get('data')} in another place"
        accelerator.print(f"without the training's --holdout {recipe['holdout']}: {advice}")
    reports = f"validation/{trained.run_name}/{Path(flags.data).name}"
    return dataclasses.replace(trained, recipe=recipe | {"holdout": None}, reports=reports)


def script_and_recipe(
    accelerator: Accelerator, flags: Validation, trained: TrainedModel, words: list[str]
) -> tuple[ModuleType, ImageRecipe]:
    """The script that trained the model, and its recipe with the user's changes. Collective."""
    if trained.recipe is None and (flags.script is None or flags.data is None):
        raise ValueError(
            f"{trained.name} is a lone file, which does not say what it holds: give timm's name of the model"
            " and the data, as --model NAME --data FOLDER, and --script for a model of another script"
        )
    if trained.published and flags.data is None:
        raise ValueError(f"{trained.name} names no data: give them, as --data FOLDER")
    if flags.model and flags.script:
        words = [*words, f"--model={flags.model}"]
    script, recipe, path = open_script(trained, flags.script, words)
    ours = {"flags": dataclasses.asdict(flags), "recipe": recipe_part(recipe), "script": sha256_of(path)}
    agree(accelerator, ours)
    return script, recipe


def chosen_split(images: Images, wanted: str | None) -> tuple[str, Split]:
    """The split that --split names. ValueError for a test split that is not there."""
    splits = {"test": images.test, "val": images.val, "train": images.train}
    unset = "test" if images.test else "train" if images.val is images.train else "val"
    split = splits[name := wanted or unset]
    if split is None:
        raise ValueError(f"--split test: there is no second held-out split; --split val is {images.val_name}")
    return name, split


def unused_classes(split: Split, match: ClassMatch) -> list[int]:
    """Return the model's labels that no image of the split has, ascending."""
    return sorted(set(range(len(match.model))) - set(split.labels.tolist()))


def about_classes(
    flags: Validation, match: ClassMatch, data: str, model: str, left_out: list[int]
) -> Iterator[str]:
    """Yield sentences on how the classes differ, and over which of them the accuracy is."""
    if line := match.describe(data, model):
        yield line
    count = len(match.model)
    if flags.only_its_classes:
        yield f"The accuracy is over the {count - len(left_out):,} of {count:,} classes that have images."
    elif match.absent:
        yield f"The accuracy is over all {count:,} classes. --only_its_classes leaves out absent ones."


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
    """A row per image, sorted by id, the same on all processes; and images/s, including decoding.

    left_out: labels that are not predicted. Collective. It gathers no logits, but 80 bytes per image,
    whatever the number of classes.
    """
    (mean, std, crop), parts = preprocessing, list[dict[str, Tensor]]()
    began = time.perf_counter()
    autocast_forward(accelerator, model)  # and not what prepares the images, as in training
    for part in predictions(accelerator, model, split, recipe, batch, mean, std, teller(accelerator), crop):
        if left_out:  # as ImageNet-R's paper does (arXiv 2006.16241)
            part.logits[:, left_out] = -torch.inf
        probability, predicted = part.logits.softmax(1).max(1)
        columns = {
            "id": torch.from_numpy(part.ids),
            "label": part.labels,
            "predicted": predicted,
            "top": part.logits.topk(min(TOP, part.logits.shape[1])).indices,
            "loss": F.cross_entropy(part.logits, part.labels, reduction="none").double(),
            "probability": probability.double(),
        }
        parts.append(columns)
    mine = {name: torch.cat([part[name] for part in parts]).cpu().numpy() for name in parts[0]}
    everyones = gather_object([mine])
    images_per_s = counted(split, recipe) / (time.perf_counter() - began)
    rows = {name: np.concatenate([theirs[name] for theirs in everyones]) for name in mine}
    order = np.argsort(rows["id"], kind="stable")
    rows = {name: column[order] for name, column in rows.items()}
    check(rows, evaluated_ids(split, recipe))
    return rows, images_per_s


def check(rows: Rows, ids: np.ndarray) -> None:
    """Checks that every image was counted exactly once. ValueError where the model's output is not finite."""
    assert np.isin(rows["id"], ids).all(), "counted an image that is not evaluated"
    times = np.bincount(np.searchsorted(ids, rows["id"]), minlength=len(ids))
    wrong = times != 1
    assert not wrong.any(), f"image {ids[wrong][0]} was counted {times[wrong][0]} times"
    if bad := (~np.isfinite(rows["loss"])).sum():
        raise ValueError(f"the loss of {bad:,} of {len(ids):,} images is not finite: the model diverged")


def teller(accelerator: Accelerator) -> Callable[[str], None]:
    """A function tell(doing) that prints the progress every 30 s, and raises Preempted after a signal."""
    shown_s = time.monotonic()

    def tell(doing: str) -> None:
        nonlocal shown_s
        if watch.wanted():
            raise Preempted
        if accelerator.is_main_process and time.monotonic() - shown_s > 30:
            shown_s = time.monotonic()
            print(doing, flush=True)

    return tell


# --- Entry

if __name__ == "__main__":
    run_process(main)
