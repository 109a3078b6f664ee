"""Evaluates a trained model with all metrics on each image of a split exactly once, under any launcher.

    python validate.py runs/train_cnn_a/single_128_10_1_1
    python validate.py runs/train_vit/fsdp_512_100_1_4/checkpoints/step_00009700 --split train
    accelerate launch --config_file accelerate_configs/ddp_4gpu.yaml validate.py s3://bucket/prefix
    python validate.py vit.safetensors --script train_vit.py --model vit_tiny_patch16_224 --data cifar10

The first word is the model: a run's folder or S3 prefix (its best checkpoint, or --which latest), a
checkpoint's folder, a folder of export.py, or a .safetensors file. It is verified before use, and nothing in
it is unpickled. Its manifest names the script that trained it; flags of that script change the recipe, as
--data or --image_size. If the run has averaged weights they are used, as the run evaluated them.

Each process evaluates its share of the images with the whole model on its device: without training these
models need no sharding, and the launcher's strategy changes no number. Only the main process reads the
checkpoint and writes, so no shared folder is needed. It prints the metrics and writes report.json,
predictions.csv, confusion.png, and worst.png with the model's most confident mistakes.
"""

import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from common.checkpoint.weights import TrainedModel, load_everywhere, open_script
from common.data.images import Images, load
from common.data.splits import Split
from common.distributed.agreement import agree
from common.distributed.preemption import Preempted, wanted
from common.distributed.process import run_process
from common.distributed.strategy import device_name, precision, strategy
from common.evaluation import counted, evaluated_ids, predictions
from common.flags import underscores
from common.recipe import Batch, ImageRecipe, parse, recipe_part, setting
from common.script import normalisation
from common.system.files import sha256_of, write_csv, write_text
from common.system.paths import ROOT
from tools.inference.inference import Inference, autocast, own_words, pixels_of

METRICS = ROOT / "common" / "metrics"
TOP, BINS, WORST = 5, 15, 24
PRINTED_CLASSES = 20  # the most for which all classes, and if it fits the confusion matrix, are printed
WORST_CLASSES = 10  # printed if there are more classes
NAME = 24  # printed characters of a class's name
PER_CLASS = ("precision", "recall", "f1", "specificity", "support")
FILES = ("worst.png", "confusion.png", "predictions.csv", "report.json")
COLUMNS = ("id", "label", "predicted", "probability")  # of an image, in predictions.csv and the report

Rows = dict[str, np.ndarray]  # n images: id, label, predicted, loss, probability [n] each, top [n, k]


@dataclass(frozen=True, kw_only=True)
class Validation(Inference):
    """The flags of validate.py; all others are those of the script that trained the model."""

    checkpoint: str | None = setting(None, "the model, if it is not the first word")
    split: str | None = setting(None, choices=("val", "test", "train"))
    data: str | None = setting(None, "other data than the training's, whole unless --holdout is given, too")

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
        check_classes(accelerator, trained, images, recipe.data)
        split_name, split = chosen_split(images, flags.split)
        model = script.build_model(recipe, len(images.classes))
        load_everywhere(accelerator, model, Path(trained.weights), flags.timeout_s)
        mean_std = normalisation(script, model)
        rows, images_per_s = predict(accelerator, model, split, recipe, batch, mean_std)

        def report() -> None:
            found = {
                "checkpoint": trained.name,
                "data": recipe.data,
                "split": split_name,
                **measure(rows, len(images.classes), scratch),
                "images_per_s": images_per_s,
                "classes": images.classes,
                "strategy": strategy(accelerator),
                "processes": batch.processes,
                "device": device_name(accelerator),
                "mixed_precision": precision(accelerator),
            }
            leaf = split_name if trained.step is None else f"{split_name}_{trained.step}"
            folder = Path(flags.output_dir or f"{trained.reports}/{leaf}")
            shown = {"val": images.val_name, "test": images.test_name}.get(split_name, split_name)
            title = f"{script.__name__} on {Path(recipe.data).name}, {shown} split"
            worst = np.asarray([image["id"] for image in found["worst"]], dtype=np.int64)
            rows["id"] = split.part.stored(rows["id"])
            write(folder, found, rows, pixels_of(split, worst, recipe).numpy(), title)
            show(found, title)
            print(*(folder / name for name in FILES), sep="\n")

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
            f"{trained.name} is a lone file, which does not say what trained it: give the script, its flags"
            " and the data, as --script train_vit.py --model NAME --data cifar10"
        )
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


def check_classes(accelerator: Accelerator, trained: TrainedModel, images: Images, data: str) -> None:
    """ValueError when the data has another number of classes than the model."""
    theirs, ours = trained.classes, list(images.classes)
    if theirs is None or theirs == ours:
        return
    if len(theirs) != len(ours):
        raise ValueError(
            f"{data} has {len(ours)} classes, and {trained.name} was trained for {len(theirs)}: give as"
            " --data what it was trained with"
        )
    accelerator.print(f"the classes of {data} have other names than those that the model was trained for")


# --- Predictions


def predict(
    accelerator: Accelerator, model: nn.Module, split: Split, recipe: ImageRecipe, batch: Batch, mean_std: Any
) -> tuple[Rows, float]:
    """A row per image, sorted by id, the same on all processes; and images/s, including decoding.

    Collective. It gathers no logits, but 80 bytes per image, whatever the number of classes.
    """
    (mean, std), parts = mean_std, list[dict[str, Tensor]]()
    began = time.perf_counter()
    with autocast(accelerator):
        for part in predictions(accelerator, model, split, recipe, batch, mean, std, teller(accelerator)):
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
    wrong = ~np.isfinite(rows["loss"])
    if wrong.any():
        count = f"{wrong.sum():,} of {len(ids):,} images"
        raise ValueError(f"the loss of {count} is not finite: the model diverged")


def teller(accelerator: Accelerator) -> Callable[[str], None]:
    """A function tell(doing) that prints the progress every 30 s, and raises Preempted after a signal."""
    shown_s = time.monotonic()

    def tell(doing: str) -> None:
        nonlocal shown_s
        if wanted():
            raise Preempted
        if accelerator.is_main_process and time.monotonic() - shown_s > 30:
            shown_s = time.monotonic()
            print(doing, flush=True)

    return tell


# --- Metrics and report


def measure(rows: Rows, classes: int, scratch: Path) -> dict[str, Any]:
    """The numbers of the report, computed by the modules in common/metrics/."""
    classification, top_k, calibration = load_metrics(["classification", "top_k", "calibration"], scratch)
    pairs = {"predictions": rows["predicted"], "references": rows["label"]}
    by_class = classification.compute(**pairs, classes=classes)
    wrong = np.flatnonzero(rows["predicted"] != rows["label"])
    surest = wrong[np.argsort(-rows["probability"][wrong], kind="stable")][:WORST]
    return {
        "images": len(rows["id"]),
        "loss": float(rows["loss"].mean()),
        "top1": by_class["accuracy"],
        "top5": top_k.compute(predictions=rows["top"], references=rows["label"])["top_k"],
        **calibration.compute(**pairs, probabilities=rows["probability"], bins=BINS),
        "per_class": {name: by_class[name] for name in PER_CLASS},
        "confusion": by_class["confusion"],
        "worst": [{name: rows[name][i].item() for name in COLUMNS} for i in surest],
    }


def load_metrics(names: list[str], scratch: Path) -> list[Any]:
    """The modules in common/metrics/. `evaluate` imports copies, which it writes to `scratch`: its cache in
    the home folder may be read-only, or hold another process's unfinished copy."""
    import evaluate

    evaluate.config.HF_MODULES_CACHE = scratch
    return [evaluate.load(str(METRICS / name), cache_dir=str(scratch), keep_in_memory=True) for name in names]


def write(folder: Path, found: dict[str, Any], rows: Rows, worst: np.ndarray, title: str) -> None:
    """Writes all FILES, each atomically. worst: uint8 [n, H, W, 3]."""
    from common.run import plots

    classes = found["classes"]
    captions = [
        f"{classes[image['label']]}\nnot {classes[image['predicted']]}\n{image['probability']:.3f}"
        for image in found["worst"]
    ]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".half-", dir=folder) as part:
        worst_png, confusion_png, predictions_csv, report_json = (Path(part) / name for name in FILES)
        plots.image_sheet(worst_png, worst, captions, f"{title}: the surest mistakes")
        headline = f"{title}: top-1 {found['top1']:.4f}"
        plots.confusion_matrix(confusion_png, found["confusion"], classes, headline)
        numbers = zip(*(rows[name].tolist() for name in COLUMNS), strict=True)
        cells = ((i, classes[label], classes[guess], f"{p:.6f}") for i, label, guess, p in numbers)
        write_csv(predictions_csv, [COLUMNS, *cells])
        # A key per line: indented, a confusion matrix of 1,000 classes would have a million lines.
        lines = [f'"{key}": {json.dumps(value)}' for key, value in found.items()]
        write_text(report_json, "{\n" + ",\n".join(lines) + "\n}\n")
        for name in FILES:
            (Path(part) / name).replace(folder / name)


def show(found: dict[str, Any], title: str) -> None:
    """Prints the metrics, of many classes only the worst, and the confusion matrix if it fits."""
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    classes, per_class = [name[:NAME] for name in found["classes"]], found["per_class"]
    figures = [
        ("images", f"{found['images']:,}"),
        ("top-1 accuracy", f"{found['top1']:.4f}"),
        ("top-5 accuracy", f"{found['top5']:.4f}"),
        ("loss", f"{found['loss']:.4f}"),
        ("expected calibration error", f"{found['expected_calibration_error']:.4f}"),
        ("speed", f"{found['images_per_s']:,.0f} images/s"),
        ("processes", f"{found['processes']} x {found['device']}"),
    ]
    console.print(table(title, ["what", "value"], figures))
    few = len(classes) <= PRINTED_CLASSES
    by_f1 = sorted(range(len(classes)), key=lambda c: per_class["f1"][c])
    rows = [
        (classes[c], *(f"{per_class[name][c]:{',' if name == 'support' else '.4f'}}" for name in PER_CLASS))
        for c in (range(len(classes)) if few else by_f1[:WORST_CLASSES])
    ]
    heading = "of each class" if few else f"of the {WORST_CLASSES} classes with the lowest F1"
    console.print(table(heading, ["class", *PER_CLASS], rows))
    if not few:
        return
    counts = [(f"{c} {classes[c]}", *map(str, row)) for c, row in enumerate(found["confusion"])]
    matrix = table("confusion matrix, a row per true class", ["true", *map(str, range(len(classes)))], counts)
    needed = console.measure(matrix, options=console.options.update(max_width=10_000)).maximum
    if needed <= console.width:
        console.print(matrix)


def table(title: str, columns: list[str], rows: Iterable[tuple[str, ...]]) -> Any:
    """A rich table with numbers aligned to the right."""
    from rich import box
    from rich.table import Column, Table

    numbers = (Column(name, justify="right", no_wrap=True) for name in columns[1:])
    made = Table(columns[0], *numbers, title=title, box=box.SIMPLE, pad_edge=False)
    for row in rows:
        made.add_row(*row)
    return made


# --- Entry

if __name__ == "__main__":
    run_process(main)
