"""Declares shared flags, parses recipes (a frozen dataclass per script), and divides batches."""

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
    facts_of,
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
    """A metric that evaluation.py computes, --best_by can select, pages show and verify.py checks.

    Attributes:
        title: Name used on pages and in plots.
        value: Function that computes the metric; None for metrics that evaluate() always returns. If by_class
            is set, the function maps the counts of images, predictions and correct predictions of each class
            (int64 [classes]) to numerators and denominators. Their ratios are averaged over the classes.
            Otherwise, the function maps logits [v, classes] and labels [v] to one number per image, [v].
        is_share: True for a fraction from 0 to 1, where higher is better; False for a loss.
        by_class: True if the metric is a mean over classes.
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
    """Return a number that is higher for a better evaluation.

    by: Name of the metric. The loss is used if the evaluation lacks this metric.
    """
    name = by if by in metrics else "loss"
    return metrics[name] if METRICS[name].is_share else -metrics[name]


@dataclass(frozen=True, kw_only=True)
class Job:
    """Flags of the computation that distributed.accelerator.start() needs."""

    unit: typing.ClassVar[str] = "images"  # word for samples in messages
    # Flags of only some scripts, with their values in all other scripts
    step_graph = typing.cast(bool | None, False)

    batch_size: int = flag(
        256,
        "Images per optimizer step, over the whole job.",
        minimum=1,
        per_script=True,
        decides_defaults=True,
        changes_memory=False,  # the memory depends on per_device_batch_size instead
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
        300,
        "The job ends when a process makes no progress for this many seconds.",
        minimum=1,
        maximum=7 * 24 * 3600,
    )


@dataclass(frozen=True, kw_only=True)
class Recipe(Job):
    """Flags shared by all scripts. Each script's recipe adds flags and overrides defaults."""

    # Flags of only some scripts, with their values in all other scripts
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

    data: str = flag(
        "generated", "Training data.", per_script=True, is_path=True, in_names=1, metavar="NAME|PATH"
    )
    epochs: int = flag(
        10,
        "Passes over the training images.",
        minimum=1,
        per_script=True,
        changes_memory=False,
        in_names=3,
    )
    lr: float = flag(
        1e-3,
        "Peak learning rate.",
        minimum=0,
        per_script=True,
        changes_memory=False,
        in_names=5,
        metavar="RATE",
    )
    seed: int = flag(0, minimum=0, maximum=2**32 - 1, changes_memory=False, in_names=7)
    max_steps: int | None = setting(None, minimum=1)
    patience: int | None = setting(None, minimum=1)
    output_dir: str | None = setting(
        None, also=("model_folder", "{}/*"), is_path=True, locates="results", per_host=True
    )
    name: str | None = setting(None, locates="results")
    resume: str = setting("auto", metavar="auto|never|PATH")
    allow_changed: tuple[str, ...] = setting(())
    checkpoint_every: int | str = setting("epoch", metavar="epoch|N")
    checkpoint_s: float = setting(60.0, minimum=0)
    keep_every: int | None = setting(None, minimum=1)
    s3: str | None = setting(None, locates="results", metavar="s3://BUCKET/PREFIX")
    log_every: int = setting(50, "Optimizer steps between lines of the log.", minimum=1, replayed=True)
    log_samples: bool = setting(False)
    trackers: tuple[str, ...] = setting(("tensorboard",), choices=("tensorboard", "wandb", "trackio", "none"))
    telemetry_s: float = setting(1.0, minimum=0)

    profile: int | None = setting(None, minimum=1, metavar="STEP")

    def __post_init__(self) -> None:
        if self.deterministic and self.grad_compression != "no":
            raise ValueError(
                f"--grad_compression {self.grad_compression} rounds sums of gradients, which --deterministic"
                " does not allow. Remove one of the two flags"
            )
        if "none" in self.trackers and len(self.trackers) > 1:
            raise ValueError(f"--trackers {as_text(self.trackers)}: `none` can't be combined with trackers")
        if self.checkpoint_every != "epoch" and not re.fullmatch("[1-9][0-9]*", str(self.checkpoint_every)):
            raise ValueError(
                f"--checkpoint_every {self.checkpoint_every}: must be `epoch` or a number of steps"
            )
        name = self.filled_name()
        if name and (name != Path(name).name or name.startswith(".")):
            raise ValueError(f"--name {name}: must be the name of a folder. For a path, use --output_dir")
        if unknown := set(self.allow_changed) - {"optimizer", *recipe_part(self)}:
            raise ValueError(f"--allow_changed {unknown.pop()}: not a flag of the recipe")
        if self.s3 == "none":  # overrides a prefix from a config file
            object.__setattr__(self, "s3", None)
        for name, value in (("s3", self.s3), ("resume", self.resume)):
            if value and (name == "s3" or "://" in value) and not re.fullmatch("s3://[^/]+(/.*)?", value):
                raise ValueError(f"--{name} {value}: expected s3://bucket/prefix")

    def filled_name(self) -> str | None:
        """Return --name with flags in braces replaced by their values. ValueError if a flag is unknown."""

        def value(match: re.Match[str]) -> str:
            if match[1] not in names:
                raise ValueError(f"--name {self.name}: {match[0]} is not the name of a flag")
            return re.sub(r"[^\w.-]+", "_", as_text(getattr(self, match[1])))

        names = {field.name for field in dataclasses.fields(self)} - {"name"}
        return self.name and re.sub(r"\{(\w+)\}", value, self.name)

    def resolved(self) -> typing.Self:
        """Return the recipe with defaults filled in from the model's configuration. May import timm."""
        return self

    def without_derived(self, recorded: dict[str, Any]) -> dict[str, Any]:
        """Return a recorded recipe whose derived values are replaced by this recipe's values."""
        return recorded


@dataclass(frozen=True, kw_only=True)
class ImageRecipe(Recipe):
    """Flags shared by all image scripts."""

    data: str = flag("cifar10")
    image_column: str | None = flag(None)
    label_column: str | None = flag(None)
    holdout: float | str | None = flag(
        None, minimum=0, also=("fold", "{}"), measures_best=True, in_names=6, metavar="N|SHARE"
    )
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
                f"--holdout {self.holdout:g}: must be a share below 1 or a whole number of images"
            )
        if self.streams is None:
            object.__setattr__(self, "streams", default_streams(self.batch_size))

    def without_derived(self, recorded: dict[str, Any]) -> dict[str, Any]:
        size = recorded["batch_size"]
        were_derived = isinstance(size, int) and recorded["streams"] == default_streams(size)
        are_derived = self.streams == default_streams(self.batch_size)
        return recorded | ({"streams": self.streams} if were_derived and are_derived else {})


def parse_fold(text: str) -> tuple[int, int]:
    """Parse a fold, for example "2/5" as (2, 5). Raises ValueError for any other text."""
    number, folds = map(int, text.split("/")) if re.fullmatch("[0-9]{1,6}/[0-9]{1,6}", text) else (0, 0)
    if not 0 < number <= folds > 1:
        raise ValueError(f"--fold {text}: must have the form 2/5, the second of five parts")
    return number, folds


HUB_NAME = re.compile("^(hf[-_]hub:)?timm/")


def is_hub_name(name: str) -> bool:
    """Return True if the name is a hub name of a timm model."""
    return HUB_NAME.match(name) is not None


def timm_name(name: str) -> str:
    """Convert a model's hub name to its timm name. Raises ValueError for other hub addresses."""
    name = HUB_NAME.sub("", name)
    scheme, _, address = name.rpartition(":")
    if scheme == "local-dir":
        raise ValueError(f"--model {name} is a folder. Give it as --weights {address}")
    if scheme or "/" in name:
        raise ValueError(
            f"--model {name} is not a model of timm. Download it with"
            f" `hf download {address} --local-dir DIR`. Then give --weights DIR, and --model with the"
            " architecture in its config.json"
        )
    return name


# Headings and descriptions of flag groups in --help, by the class that declares the flags. Another class may
# declare `help_group` instead.
GROUPS = {
    "ImageRecipe": ("images", "Training and evaluation images, and how they are read."),
    "Recipe": ("run", "Length, name and folder of the run, and its checkpoints, log and trackers."),
    "Job": ("computation", "Batch size, precision, memory and determinism."),
}
SCRIPT_GROUP = "Model, optimizer and augmentation, and this script's defaults of shared flags."


def parse(recipe_class: type[R], argv: list[str] | None = None, recorded: Sequence[str] = ()) -> R:
    """Parse a recipe from the command line. `--config FILE` sets defaults that flags override.

    A mistake ends the job with status 2. An error line, printed once per host, names the flag or key.
    `--print_config` prints the recipe and ends the job with status 0.

    Args:
        recipe_class: Dataclass of the script's recipe.
        argv: Words of the command line. The default, None, uses sys.argv.
        recorded: Flags of an earlier run, which argv overrides.
    """
    fields = dataclasses.fields(recipe_class)
    parser = _parser(recipe_class, fields)
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


def _parser(recipe_class: type, fields: tuple[dataclasses.Field, ...]) -> Parser:
    """Return a parser with one group of flags for each class that declares flags."""
    description, examples = _described(sys.modules[recipe_class.__module__].__doc__ or "")
    usage = getattr(recipe_class, "usage", "%(prog)s [flags]")
    parser = Parser(
        prog=Path(sys.argv[0]).name,
        usage=usage,
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    # The script's class comes first
    classes = [base for base in recipe_class.__mro__ if dataclasses.is_dataclass(base)]
    script_group = (parser.prog, SCRIPT_GROUP)
    titles = [vars(base).get("help_group") or GROUPS.get(base.__name__, script_group) for base in classes]
    groups: list[Any] = [parser.add_argument_group(*title) for title in titles]
    unit = recipe_class.unit if issubclass(recipe_class, Job) else "images"
    facts = facts_of(recipe_class)
    for field in fields:
        home = next(k for k, base in enumerate(classes) if field.name in inspect.get_annotations(base))
        add_flag(groups[home], field, unit, facts[field.name].metavar)
    add = parser.add_argument_group("flags", "Config files and help.").add_argument
    add(
        "--config",
        metavar="FILE",
        help="YAML or JSON file whose keys are flags. The command line overrides it.",
    )
    add("--print_config", action="store_true", help="Print all flags as YAML for --config, then exit.")
    add("-h", "--help", action="help", help="Show this help, then exit.")
    add("--local_rank", type=int, help=argparse.SUPPRESS)  # added by the deepspeed launcher
    return parser


def _described(doc: str) -> tuple[str, str]:
    """Return the first paragraph of a script's docstring, and the docstring's indented lines as examples."""
    lines = [line.strip() for line in doc.splitlines() if line.startswith("    ")]
    examples = "\n".join(["examples:", *(f"  {line}" for line in lines)]) if lines else ""
    return doc.partition("\n\n")[0], examples


def _default_deepspeed_config() -> str | None:
    file = ROOT / "ds_configs" / "zero2.json"
    return str(file) if file.exists() else None


_parsed: dict[type, Any] = {}


def from_flags(recipe_class: type[R]) -> R:
    """Return this process's recipe. Flags are parsed only once because --config may be a pipe."""
    if recipe_class not in _parsed:
        _parsed[recipe_class] = parse(recipe_class)
    return _parsed[recipe_class]


def recipe_part(recipe: Job) -> dict[str, Any]:
    """Return the fields that affect the trained model, without settings for where or how to run."""
    return {name: getattr(recipe, name) for name in flags_where(type(recipe), "part_of_recipe")}


def agreed_part(job: Job) -> dict[str, Any]:
    """Return the fields whose values must be equal on all ranks."""
    exempt = flags_where(type(job), "per_host")
    return {name: value for name, value in vars(job).items() if name not in exempt}


def untrained(recipe: RecipeT) -> RecipeT:
    """Return a recipe that trains the same model from random weights, without frozen layers."""
    names = flags_where(type(recipe), "training_only")
    off = {field.name: switched_off(field) for field in dataclasses.fields(recipe) if field.name in names}
    return dataclasses.replace(recipe, **off)


def as_yaml(recipe: "DataclassInstance") -> str:
    """Return the recipe as the content of a YAML file for --config."""
    import yaml

    values = dataclasses.asdict(recipe)
    lists = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    return yaml.safe_dump(lists, sort_keys=False, default_flow_style=None, allow_unicode=True)


@dataclass(frozen=True)
class Batch:
    """Division of an optimizer step's images among processes and forward passes."""

    total: int  # images per optimizer step in the whole job
    per_device: int  # images per forward pass on one device
    processes: int
    accumulations: int  # forward passes per optimizer step on one device
    unit: str = "images"

    def __str__(self) -> str:
        share = plural(self.per_device, self.unit.removesuffix("s"))
        processes = plural(self.processes, "process")
        return f"batch {self.total} = {share} x {processes} x {plural(self.accumulations, 'accumulation')}"

    def micro_batches(self, rank: int) -> range:
        """Return the indices, within a step, of the micro-batches that process `rank` computes."""
        return range(rank * self.accumulations, (rank + 1) * self.accumulations)

    def smaller(self) -> int | None:
        """Return the largest valid per_device_batch_size up to half of the current size, or None."""
        share = self.total // self.processes
        return next((b for b in range(self.per_device // 2, 0, -1) if share % b == 0), None)


def share_out(batch_size: int, per_device: int | None, processes: int, unit: str = "images") -> Batch:
    """Divide a batch among processes and accumulation steps. Raises ValueError if this is impossible."""
    if per_device is None:
        if batch_size % processes:
            raise ValueError(
                f"--batch_size {batch_size} does not divide among {processes} processes:"
                f" choose {_nearest_multiples(batch_size, processes)}"
            )
        per_device = batch_size // processes
    if batch_size % (per_device * processes):
        raise ValueError(
            f"--batch_size {batch_size} is not a multiple of --per_device_batch_size {per_device}"
            f" x {processes} processes = {per_device * processes}:"
            f" choose {_nearest_divisors(batch_size / processes, per_device)}--batch_size"
            f" {_nearest_multiples(batch_size, per_device * processes)}"
        )
    return Batch(batch_size, per_device, processes, batch_size // (per_device * processes), unit)


def usable_processes(batch_size: int, per_device: int | None, most: int, step: int = 1) -> list[int]:
    """Return all multiples of `step` up to `most` that are process counts among which the batch divides."""
    counts = range(step, most + 1, step)
    return [count for count in counts if batch_size % (count * (per_device or 1)) == 0]


def default_streams(batch_size: int) -> int:
    """Return the default number of streams: 64 if it divides the batch size, else a smaller divisor.

    The smaller divisor is the one that works with the most process counts. The result depends only on the
    batch size, so the order of images is the same on any number of processes.
    """
    divisors = [n for n in range(1, 65) if batch_size % n == 0]
    return 64 if 64 in divisors else max(divisors, key=lambda n: (sum(n % p == 0 for p in range(1, 17)), n))


def _nearest_divisors(share: float, number: int) -> str:
    """Return a phrase with the nearest valid values of --per_device_batch_size, or an empty string."""
    divisors = [d for d in range(1, math.floor(share) + 1) if share % d == 0]
    near = [*[d for d in divisors if d < number][-1:], *[d for d in divisors if d > number][:1]]
    return (
        f"--per_device_batch_size {' or '.join(map(str, near))}, which keeps the recipe, or " if near else ""
    )


def _nearest_multiples(number: int, unit: int) -> str:
    """Return a phrase with the multiples of `unit` just below and above a number."""
    below = number // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"
