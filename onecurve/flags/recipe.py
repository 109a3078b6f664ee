"""Recipes: a frozen dataclass per script, its flags, its YAML or JSON file; the arithmetic of a batch."""

import argparse
import dataclasses
import inspect
import math
import re
import sys
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from onecurve.flags.fields import (
    Parser,
    add_flag,
    as_text,
    flag,
    flags_where,
    read_config,
    setting,
    switched_off,
    typed,
)
from onecurve.system.env import is_under_deepspeed
from onecurve.system.paths import ROOT
from onecurve.system.text import plural

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

R = TypeVar("R", bound="DataclassInstance")
RecipeT = TypeVar("RecipeT", bound="Recipe")


class Metric(typing.NamedTuple):
    """A metric of an evaluation: computed by evaluation.py, chosen by --best_by, shown on pages, verified.

    value: by_class the parts and the wholes, whose ratios are averaged, from int64 [classes] of images, of
    predictions and of right ones; else a number for each image, [v], from logits [v, classes] and labels [v].
    None: evaluate() always has it. is_share: from 0 to 1, the higher the better; else as a loss.
    """

    title: str
    value: Callable[..., Any] | None = None
    is_share: bool = True
    by_class: bool = False


METRICS = {
    "accuracy": Metric("accuracy"),
    "balanced_accuracy": Metric("balanced accuracy", lambda n, _, right: (right, n), by_class=True),
    "macro_f1": Metric("macro F1", lambda n, predicted, right: (2 * right, n + predicted), by_class=True),
    "loss": Metric("loss", is_share=False),
}


def score(metrics: dict[str, float], by: str) -> float:
    """Return a number that is higher for a better evaluation. by: a metric; without classes, the loss."""
    name = by if by in metrics else "loss"
    return metrics[name] if METRICS[name].is_share else -metrics[name]


@dataclass(frozen=True, kw_only=True)
class Job:
    """Settings of the computation, which distributed.accelerator.start needs."""

    unit: typing.ClassVar[str] = "images"  # the word for samples in messages
    # Flags of some scripts, with their values in the other scripts
    step_graph = typing.cast(bool | None, False)

    batch_size: int = flag(
        256,
        "images per optimizer step over the whole job",
        minimum=1,
        per_script=True,
        decides_defaults=True,
        changes_memory=False,  # the images of a forward do
        in_names=4,
    )
    per_device_batch_size: int | None = setting(None, minimum=1)
    mixed_precision: str | None = setting(None, choices=("no", "bf16", "fp16"))
    grad_compression: str = flag("no", choices=("no", "bf16"))
    compile: str | None = setting(None, choices=("no", "default", "reduce-overhead", "max-autotune"))
    grad_checkpointing: bool = setting(False)
    deterministic: bool = setting(False, replayed=True)
    deepspeed_config: str | None = setting(None, is_path=True, per_host=True)
    timeout_s: int = setting(
        300, "seconds after which a silent process ends the job", minimum=1, maximum=7 * 24 * 3600
    )


@dataclass(frozen=True, kw_only=True)
class Recipe(Job):
    """The flags that every script has. A script's own recipe adds to them and sets their defaults."""

    # Flags of some scripts, with their values in the other scripts
    best_by = "accuracy"
    clip_norm = 0.0
    ema_decay = 0.0
    freeze = False
    holdout = typing.cast(float | str | None, None)
    model = typing.cast(str | None, None)
    optimizer = "adamw"
    randaug_layers = 0
    train_sizes = typing.cast(tuple[int, ...], ())
    weights = typing.cast(str | None, None)

    data: str = flag("generated", "training data", per_script=True, is_path=True, in_names=1)
    epochs: int = flag(
        10,
        "passes over the training images",
        minimum=1,
        per_script=True,
        changes_memory=False,
        in_names=3,
    )
    lr: float = flag(1e-3, "peak learning rate", minimum=0, per_script=True, changes_memory=False, in_names=5)
    seed: int = flag(0, minimum=0, maximum=2**32 - 1, changes_memory=False, in_names=7)
    max_steps: int | None = setting(None, minimum=1)
    patience: int | None = setting(None, minimum=1)
    output_dir: str | None = setting(
        None, also=("model_folder", "{}/*"), is_path=True, locates="results", per_host=True
    )
    name: str | None = setting(None, locates="results")
    resume: str = setting("auto")
    allow_changed: tuple[str, ...] = setting(())
    checkpoint_every: int | str = setting("epoch")
    checkpoint_s: float = setting(60.0, minimum=0)
    keep_every: int | None = setting(None, minimum=1)
    s3: str | None = setting(None, locates="results")
    log_every: int = setting(50, "optimizer steps between lines of the log", minimum=1, replayed=True)
    log_samples: bool = setting(False)
    trackers: tuple[str, ...] = setting(("tensorboard",), choices=("tensorboard", "wandb", "trackio", "none"))
    telemetry_s: float = setting(1.0, minimum=0)

    profile: int | None = setting(None, minimum=1)

    def __post_init__(self) -> None:
        if self.deterministic and self.grad_compression != "no":
            raise ValueError(
                f"--grad_compression {self.grad_compression} rounds sums of gradients, and --deterministic"
                " excludes that: give one of them"
            )
        if "none" in self.trackers and len(self.trackers) > 1:
            raise ValueError(f"--trackers {as_text(self.trackers)}: `none` stands alone")
        if self.checkpoint_every != "epoch" and not re.fullmatch("[1-9][0-9]*", str(self.checkpoint_every)):
            raise ValueError(f"--checkpoint_every {self.checkpoint_every}: `epoch` or a number of steps")
        name = self.filled_name()
        if name and (name != Path(name).name or name.startswith(".")):
            raise ValueError(f"--name {name}: a folder's name, without a path; --output_dir has paths")
        if unknown := set(self.allow_changed) - {"optimizer", *recipe_part(self)}:
            raise ValueError(f"--allow_changed {unknown.pop()}: no part of the recipe")
        if self.s3 == "none":  # where a config file names a prefix
            object.__setattr__(self, "s3", None)
        for name, value in (("s3", self.s3), ("resume", self.resume)):
            if value and (name == "s3" or "://" in value) and not re.fullmatch("s3://[^/]+(/.*)?", value):
                raise ValueError(f"--{name} {value}: expected s3://bucket/prefix")

    def filled_name(self) -> str | None:
        """Return --name with each flag in braces replaced by its value. ValueError for an unknown flag."""

        def value(match: re.Match[str]) -> str:
            if match[1] not in names:
                raise ValueError(
                    f"--name {self.name}: there is no flag {match[1]} whose value {match[0]} could be"
                )
            return re.sub(r"[^\w.-]+", "_", as_text(getattr(self, match[1])))

        names = {field.name for field in dataclasses.fields(self)} - {"name"}
        return self.name and re.sub(r"\{(\w+)\}", value, self.name)

    def resolved(self) -> typing.Self:
        """Return the recipe with the values that a model's own configuration decides. May import timm."""
        return self

    def without_derived(self, recorded: dict[str, Any]) -> dict[str, Any]:
        """A recorded recipe, with this recipe's values for fields that were derived."""
        return recorded


@dataclass(frozen=True, kw_only=True)
class ImageRecipe(Recipe):
    """The flags that every image script has."""

    data: str = flag("cifar10")
    image_column: str | None = flag(None)
    label_column: str | None = flag(None)
    holdout: float | str | None = flag(None, minimum=0, also=("fold", "{}"), measures_best=True, in_names=6)
    image_size: int = flag(32, minimum=1, per_script=True)
    max_val_images: int | None = flag(
        None, minimum=1, measures_best=True, training_only=True, changes_memory=False
    )
    best_by: str = flag("accuracy", choices=tuple(METRICS), measures_best=True)
    streams: int | None = flag(None, minimum=1, changes_memory=False)
    shuffle_window: int = flag(4096, minimum=1)
    on_bad_image: str = flag("fail", choices=("fail", "skip"))
    cache_dir: str | None = setting(None, is_path=True, locates="cache", per_host=True)
    cache_gib: float = setting(112.0, minimum=0, per_host=True)
    workers: int = setting(2, minimum=0, per_host=True, replayed=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.holdout, str):
            parse_fold(self.holdout)
        elif self.holdout is not None and (self.holdout <= 0 or (self.holdout > 1 and self.holdout % 1)):
            raise ValueError(
                f"--holdout {self.holdout:g}: must be a share below 1, or a whole number of images"
            )
        if self.streams is None:
            object.__setattr__(self, "streams", default_streams(self.batch_size))

    def without_derived(self, recorded: dict[str, Any]) -> dict[str, Any]:
        size = recorded["batch_size"]
        were_derived = isinstance(size, int) and recorded["streams"] == default_streams(size)
        are_derived = self.streams == default_streams(self.batch_size)
        return recorded | ({"streams": self.streams} if were_derived and are_derived else {})


def parse_fold(text: str) -> tuple[int, int]:
    """(2, 5) for "2/5". ValueError for what is no fold."""
    number, folds = map(int, text.split("/")) if re.fullmatch("[0-9]{1,6}/[0-9]{1,6}", text) else (0, 0)
    if not 0 < number <= folds > 1:
        raise ValueError(f"--fold {text}: must be as 2/5, the second of five parts; --holdout takes numbers")
    return number, folds


HUB_NAME = re.compile("^(hf[-_]hub:)?timm/")


def is_hub_name(name: str) -> bool:
    """True for a model of timm that is named as on the hub."""
    return HUB_NAME.match(name) is not None


def timm_name(name: str) -> str:
    """Return timm's name of a model that is named as on the hub. ValueError for other addresses."""
    name = HUB_NAME.sub("", name)
    scheme, _, address = name.rpartition(":")
    if scheme == "local-dir":
        raise ValueError(f"--model {name} is a folder. Give it as --weights {address}")
    if scheme or "/" in name:
        raise ValueError(
            f"--model {name} is not one of timm's own. Fetch it with `hf download {address} --local-dir DIR`,"
            " then give --weights DIR, and as --model the architecture that its config.json names"
        )
    return name


GROUPS = {"ImageRecipe": "images", "Recipe": "run", "Job": "computation"}  # headings of --help


def parse(recipe_class: type[R], argv: list[str] | None = None, recorded: Sequence[str] = ()) -> R:
    """The recipe from the command line; `--config FILE` sets defaults, and flags win.

    recorded: the flags of an earlier run, which argv may change.

    A mistake ends the job with status 2 and one line, printed once per host, that names the flag or key.
    `--print_config` prints the recipe and ends the job with status 0.
    """
    fields = dataclasses.fields(recipe_class)
    usage = getattr(recipe_class, "usage", "%(prog)s [flags]")
    parser = Parser(prog=Path(sys.argv[0]).name, usage=usage, allow_abbrev=False, add_help=False)
    kinds = [kind for kind in recipe_class.__mro__ if dataclasses.is_dataclass(kind)]  # the own one first
    groups: list[Any] = [parser.add_argument_group(GROUPS.get(kind.__name__, parser.prog)) for kind in kinds]
    for field in fields:
        home = next(k for k, kind in enumerate(kinds) if field.name in inspect.get_annotations(kind))
        add_flag(groups[home], field, recipe_class.unit if issubclass(recipe_class, Job) else "images")
    add = parser.add_argument_group("flags").add_argument
    add("--config", metavar="FILE", help="YAML or JSON with any flags as keys")
    add("--print_config", action="store_true", help="print the recipe as YAML for --config, and exit")
    add("-h", "--help", action="help", help="show this, and exit")
    add("--local_rank", type=int, help=argparse.SUPPRESS)  # given by the deepspeed launcher
    given = vars(parser.parse_args(argv, parser.parse_args(recorded)))
    try:
        values = read_config(Path(given["config"]), fields) if given["config"] else {}
        for field in fields:
            if (value := given[field.name]) is not None:
                values[field.name] = typed(field, value, f"--{field.name}")
        if is_under_deepspeed():
            values["deepspeed_config"] = values.get("deepspeed_config") or _default_deepspeed_config()
        recipe = recipe_class(**values)
    except ValueError as error:
        parser.error(str(error))
    if given["print_config"]:
        parser.print_once(as_yaml(recipe))
        sys.exit(0)
    return recipe


def _default_deepspeed_config() -> str | None:
    file = ROOT / "ds_configs" / "zero2.json"
    return str(file) if file.exists() else None


_parsed: dict[type, Any] = {}


def from_flags(recipe_class: type[R]) -> R:
    """This process's recipe. Its flags are parsed once, as --config may name a pipe."""
    if recipe_class not in _parsed:
        _parsed[recipe_class] = parse(recipe_class)
    return _parsed[recipe_class]


def recipe_part(recipe: Job) -> dict[str, Any]:
    """The fields that define the training, without those about where or how to run."""
    return {name: getattr(recipe, name) for name in flags_where(type(recipe), "part_of_recipe")}


def agreed_part(job: Job) -> dict[str, Any]:
    """Return the fields whose values must be the same on all ranks."""
    exempt = flags_where(type(job), "per_host")
    return {name: value for name, value in vars(job).items() if name not in exempt}


def untrained(recipe: RecipeT) -> RecipeT:
    """Return the recipe of the same model with new weights, all of which are trained."""
    names = flags_where(type(recipe), "training_only")
    off = {field.name: switched_off(field) for field in dataclasses.fields(recipe) if field.name in names}
    return dataclasses.replace(recipe, **off)


def as_yaml(recipe: "DataclassInstance") -> str:
    import yaml

    values = dataclasses.asdict(recipe)
    lists = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    return yaml.safe_dump(lists, sort_keys=False, default_flow_style=None, allow_unicode=True)


@dataclass(frozen=True)
class Batch:
    """The arithmetic of a batch: the images of one optimizer step, divided among processes and forwards."""

    total: int  # images per optimizer step over the whole job
    per_device: int  # images per forward on one device
    processes: int
    accumulations: int  # forwards per optimizer step on one device
    unit: str = "images"

    def __str__(self) -> str:
        share = plural(self.per_device, self.unit.removesuffix("s"))
        processes = plural(self.processes, "process")
        return f"batch {self.total} = {share} x {processes} x {plural(self.accumulations, 'accumulation')}"

    def micro_batches(self, rank: int) -> range:
        """The numbers k of the micro-batches of a step that process `rank` computes."""
        return range(rank * self.accumulations, (rank + 1) * self.accumulations)

    def smaller(self) -> int | None:
        """The largest per_device_batch_size, at most half of this one, with which the batch still divides."""
        share = self.total // self.processes
        return next((b for b in range(self.per_device // 2, 0, -1) if share % b == 0), None)


def share_out(batch_size: int, per_device: int | None, processes: int, unit: str = "images") -> Batch:
    """Derives the gradient accumulation. ValueError with the numbers when the batch does not divide."""
    if per_device is None:
        if batch_size % processes:
            raise ValueError(
                f"--batch_size {batch_size} does not divide among {processes} processes:"
                f" choose {_multiples_beside(batch_size, processes)}"
            )
        per_device = batch_size // processes
    if batch_size % (per_device * processes):
        raise ValueError(
            f"--batch_size {batch_size} is no multiple of --per_device_batch_size {per_device}"
            f" x {processes} processes = {per_device * processes}:"
            f" choose {_divisors_beside(batch_size / processes, per_device)}--batch_size"
            f" {_multiples_beside(batch_size, per_device * processes)}"
        )
    return Batch(batch_size, per_device, processes, batch_size // (per_device * processes), unit)


def usable_processes(batch_size: int, per_device: int | None, most: int, step: int = 1) -> list[int]:
    """The numbers of processes up to `most`, in steps of `step`, among which the batch divides."""
    counts = range(step, most + 1, step)
    return [count for count in counts if batch_size % (count * (per_device or 1)) == 0]


def default_streams(batch_size: int) -> int:
    """64 where that divides the batch, else the divisor below 64 that suits most numbers of processes.

    It depends on the batch size alone, so that the order of images is the same on any number of processes.
    """
    divisors = [n for n in range(1, 65) if batch_size % n == 0]
    return 64 if 64 in divisors else max(divisors, key=lambda n: (sum(n % p == 0 for p in range(1, 17)), n))


def _divisors_beside(share: float, number: int) -> str:
    """The values of --per_device_batch_size next to a number with which the recipe stays."""
    divisors = [d for d in range(1, math.floor(share) + 1) if share % d == 0]
    near = [*[d for d in divisors if d < number][-1:], *[d for d in divisors if d > number][:1]]
    return (
        f"--per_device_batch_size {' or '.join(map(str, near))}, which keeps the recipe, or " if near else ""
    )


def _multiples_beside(number: int, unit: int) -> str:
    below = number // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"
