"""Declares shared flags, parses recipes (one frozen dataclass per script), and divides batches."""

import argparse
import copy
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
    flag,
    flag_facts_of,
    flag_value_text,
    flags_where,
    read_config,
    setting,
    switched_off,
    typed_value,
)
from onecurve.system.env import is_under_deepspeed
from onecurve.system.paths import ROOT
from onecurve.system.text import plural

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

DataclassT = TypeVar("DataclassT", bound="DataclassInstance")
RecipeT = TypeVar("RecipeT", bound="Recipe")


class Metric(typing.NamedTuple):
    """Evaluation metric that --best_by can select.

    evaluation.py computes the metric, pages show it, and verify.py checks it.

    If by_class is True, `compute` maps the numbers of images, predictions and correct predictions in each
    class (int64 [classes]) to numerators and denominators. The metric is the mean of the quotients over the
    classes. If by_class is False, `compute` maps logits [v, classes] and labels [v] to one number per image,
    [v].
    """

    title: str  # Name of the metric on pages and in plots
    # Function that computes the metric, or None for a metric that evaluate() always returns
    compute: Callable[..., Any] | None = None
    is_share: bool = True  # True for a fraction from 0 to 1, where higher is better. False for a loss
    by_class: bool = False  # True if the metric is a mean over classes


METRICS = {
    "accuracy": Metric("accuracy"),
    "balanced_accuracy": Metric(
        "balanced accuracy", lambda image_counts, _, hit_counts: (hit_counts, image_counts), by_class=True
    ),
    "macro_f1": Metric(
        "macro F1",
        lambda image_counts, predicted_counts, hit_counts: (2 * hit_counts, image_counts + predicted_counts),
        by_class=True,
    ),
    "loss": Metric("loss", is_share=False),
}


def score(metrics: dict[str, float], best_by: str) -> float:
    """Return a score that is higher for better metrics.

    The score is based on the metric `best_by`, or on the loss if `metrics` does not contain `best_by`.
    """
    metric_name = best_by if best_by in metrics else "loss"
    sign = 1 if METRICS[metric_name].is_share else -1  # A lower loss is better
    return sign * metrics[metric_name]


@dataclass(frozen=True, kw_only=True)
class Job:
    """Flags that distributed.accelerator.start() needs to set up the computation."""

    unit: typing.ClassVar[str] = "images"  # Word for samples in messages
    # Flags that only some scripts declare, with the values that apply to all other scripts
    step_graph = typing.cast(bool | None, False)

    batch_size: int = flag(
        default=256,
        help="Number of images per optimizer step in the whole job.",
        minimum=1,
        per_script=True,
        decides_defaults=True,
        changes_memory=False,  # Memory use depends on per_device_batch_size instead
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
        default=300,
        help="Number of seconds after which the job ends if a process makes no progress.",
        minimum=1,
        maximum=7 * 24 * 3600,  # One week
    )


@dataclass(frozen=True, kw_only=True)
class Recipe(Job):
    """Flags shared by all scripts. The recipe of each script adds flags and overrides defaults."""

    # Flags that only some scripts declare, with the values that apply to all other scripts
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
        default="generated",
        help="Name or path of the training data.",
        per_script=True,
        is_path=True,
        in_names=1,
        metavar="NAME|PATH",
    )
    epochs: int = flag(
        default=10,
        help="Number of passes over the training images.",
        minimum=1,
        per_script=True,
        changes_memory=False,
        in_names=3,
    )
    lr: float = flag(
        default=1e-3,
        help="Peak learning rate.",
        minimum=0,
        per_script=True,
        changes_memory=False,
        in_names=5,
        metavar="RATE",
    )
    seed: int = flag(0, minimum=0, maximum=2**32 - 1, changes_memory=False, in_names=7)
    max_steps: int | None = setting(None, minimum=1)
    patience: int | None = setting(None, minimum=1)
    # --model_folder PATH is equivalent to --output_dir PATH/*
    output_dir: str | None = setting(
        default=None, also=("model_folder", "{}/*"), is_path=True, locates="results", per_host=True
    )
    name: str | None = setting(None, locates="results")
    resume: str = setting("auto", metavar="auto|never|PATH")
    allow_changed: tuple[str, ...] = setting(())
    checkpoint_every: int | str = setting("epoch", metavar="epoch|N")
    checkpoint_s: float = setting(60.0, minimum=0)
    keep_every: int | None = setting(None, minimum=1)
    s3: str | None = setting(None, locates="results", metavar="s3://BUCKET/PREFIX")
    log_every: int = setting(50, "Number of optimizer steps between log lines.", minimum=1, replayed=True)
    log_samples: bool = setting(False)
    trackers: tuple[str, ...] = setting(("tensorboard",), choices=("tensorboard", "wandb", "trackio", "none"))
    telemetry_s: float = setting(1.0, minimum=0)

    profile: int | None = setting(None, minimum=1, metavar="STEP")

    def __post_init__(self) -> None:
        """Raise ValueError for invalid values or combinations of flags. Replace the value `none` of --s3."""
        if self.deterministic and self.grad_compression != "no":
            raise ValueError(
                f"--grad_compression {self.grad_compression} rounds gradient sums, but --deterministic"
                " requires exact sums. Remove one of the two flags"
            )
        if "none" in self.trackers and len(self.trackers) > 1:
            raise ValueError(
                f"--trackers {flag_value_text(self.trackers)}: `none` can't be combined with a tracker."
                " Remove one of them"
            )
        if self.checkpoint_every != "epoch" and not re.fullmatch("[1-9][0-9]*", str(self.checkpoint_every)):
            raise ValueError(
                f"--checkpoint_every {self.checkpoint_every}: the value must be `epoch` or a number of steps"
            )
        folder_name = self.filled_name()
        if folder_name and (folder_name != Path(folder_name).name or folder_name.startswith(".")):
            raise ValueError(
                f"--name {folder_name}: the value must be a folder name. To specify a path, use --output_dir"
            )
        # `optimizer` is always valid, because it also permits a new optimizer state
        if unknown_flags := set(self.allow_changed) - {"optimizer", *recipe_part(self)}:
            unknown_flag = unknown_flags.pop()
            raise ValueError(f"--allow_changed {unknown_flag}: the value must be the name of a recipe flag")
        if self.s3 == "none":  # `none` overrides an address in a config file
            object.__setattr__(self, "s3", None)  # this dataclass is frozen
        # --resume accepts an address, but also words and local paths
        for flag_name, flag_address in (("s3", self.s3), ("resume", self.resume)):
            if not flag_address or (flag_name == "resume" and "://" not in flag_address):
                continue
            if not re.fullmatch("s3://[^/]+(/.*)?", flag_address):
                raise ValueError(
                    f"--{flag_name} {flag_address}: the address must have the form s3://bucket/prefix"
                )

    def filled_name(self) -> str | None:
        """Return --name with the flag names in braces replaced by the flags' values, or None without --name.

        Raise ValueError for unknown flag names.
        """

        def value_in_folder_name(flag_match: re.Match[str]) -> str:
            """Return the value of a flag in braces, with `_` in place of characters such as `/`."""
            flag_name = flag_match[1]
            if flag_name not in flag_names:
                raise ValueError(f"--name {self.name}: {flag_match[0]} does not contain the name of a flag")
            return re.sub(r"[^\w.-]+", "_", flag_value_text(getattr(self, flag_name)))

        flag_names = {recipe_field.name for recipe_field in dataclasses.fields(self)} - {"name"}
        return self.name and re.sub(r"\{(\w+)\}", value_in_folder_name, self.name)

    def resolved(self) -> typing.Self:
        """Return the recipe with defaults from the model's configuration.

        This class has no such defaults. A subclass that overrides this method may import timm.
        """
        return self

    def without_derived(self, recorded_recipe: dict[str, Any]) -> dict[str, Any]:
        """Return a recorded recipe with this recipe's derived values in place of the recorded ones.

        A derived value is computed from other flags. This class has no derived values.
        """
        return recorded_recipe


@dataclass(frozen=True, kw_only=True)
class ImageRecipe(Recipe):
    """Flags shared by all image scripts."""

    data: str = flag("cifar10")
    image_column: str | None = flag(None)
    label_column: str | None = flag(None)
    # --fold K/N is equivalent to --holdout K/N
    holdout: float | str | None = flag(
        default=None, minimum=0, also=("fold", "{}"), measures_best=True, in_names=6, metavar="N|SHARE"
    )
    image_size: int = flag(32, minimum=1, per_script=True)
    max_val_images: int | None = flag(
        default=None, minimum=1, measures_best=True, training_only=True, changes_memory=False
    )
    best_by: str = flag("accuracy", choices=tuple(METRICS), measures_best=True)
    streams: int | None = flag(None, minimum=1, changes_memory=False)
    shuffle_window: int = flag(4096, minimum=1)
    on_bad_image: str = flag("fail", choices=("fail", "skip"))
    cache_dir: str | None = setting(None, is_path=True, locates="cache", per_host=True)
    cache_gib: float = setting(112.0, minimum=0, per_host=True)
    workers: int = setting(2, minimum=0, per_host=True, replayed=True)

    def __post_init__(self) -> None:
        """Check the flags, and derive the default of --streams from --batch_size."""
        super().__post_init__()
        if isinstance(self.holdout, str):
            parse_fold(self.holdout)
        elif self.holdout is not None and (self.holdout <= 0 or (self.holdout > 1 and self.holdout % 1)):
            raise ValueError(
                f"--holdout {self.holdout:g}: the value must be a share below 1 or a whole number of images"
            )
        if self.streams is None:
            object.__setattr__(self, "streams", default_streams(self.batch_size))  # the dataclass is frozen

    def without_derived(self, recorded_recipe: dict[str, Any]) -> dict[str, Any]:
        """Return a recorded recipe with this recipe's --streams, if both recipes use the default.

        The default depends on --batch_size. Therefore, a different batch size does not report a change of
        --streams as well.
        """
        recorded_batch_size, recorded_streams = recorded_recipe["batch_size"], recorded_recipe["streams"]
        were_streams_derived = (
            isinstance(recorded_batch_size, int)  # the recorded recipe is not validated
            and recorded_streams == default_streams(recorded_batch_size)
        )
        if were_streams_derived and self.streams == default_streams(self.batch_size):
            return recorded_recipe | {"streams": self.streams}
        return recorded_recipe


def parse_fold(fold_text: str) -> tuple[int, int]:
    """Parse a fold such as "2/5", which is returned as (2, 5). Raise ValueError if the text is not a fold."""
    if fold_match := re.fullmatch("([0-9]{1,6})/([0-9]{1,6})", fold_text):
        fold_number, fold_count = map(int, fold_match.groups())
        if 0 < fold_number <= fold_count > 1:
            return fold_number, fold_count
    raise ValueError(f"--fold {fold_text}: the value must have a form such as 2/5, the second of five parts")


# Prefix of a timm model's name on the Hugging Face Hub, such as `hf-hub:timm/` or `timm/`
TIMM_HUB_PREFIX = re.compile("^(hf[-_]hub:)?timm/")


def is_hub_name(model_name: str) -> bool:
    """Return True if the name is the Hugging Face Hub name of a timm model."""
    return TIMM_HUB_PREFIX.match(model_name) is not None


def timm_name(model_name: str) -> str:
    """Remove the Hub prefix from a timm model's name, and return other timm names unchanged.

    Raise ValueError if the model does not belong to timm.
    """
    model_name = TIMM_HUB_PREFIX.sub("", model_name)
    address_scheme, _, address = model_name.rpartition(":")
    if address_scheme == "local-dir":
        raise ValueError(f"--model {model_name} is a folder. Specify the folder with --weights {address}")
    if address_scheme or "/" in model_name:
        raise ValueError(
            f"--model {model_name} is not a timm model. Download the model with"
            f" `hf download {address} --local-dir DIR`. Then specify --weights DIR,"
            " and set --model to the architecture in DIR/config.json"
        )
    return model_name


# Headings and descriptions of the flag groups in --help, by the name of the class that declares the flags. A
# class that is not listed may define `help_group` instead.
HELP_GROUPS = {
    "ImageRecipe": ("images", "Selection and reading of training and evaluation images."),
    "Recipe": ("run", "Length, name, folder, checkpoints, log and trackers of the run."),
    "Job": ("computation", "Batch size, precision, memory and determinism."),
}
# Description of the flag group for all other classes, which the train scripts define
SCRIPT_GROUP_HELP = (
    "Flags for the model, optimizer and augmentation, and shared flags with script-specific defaults."
)


def parse(
    recipe_class: type[DataclassT], argv: list[str] | None = None, recorded_words: Sequence[str] = ()
) -> DataclassT:
    """Parse a recipe from the command line. Flags override the values in `--config FILE`.

    An invalid flag or key ends the job with status 2. One process per host prints an error line that names
    the flag or key. `--print_config` prints the recipe and ends the job with status 0.

    Args:
        recipe_class: Dataclass of the script's recipe.
        argv: Words of the command line. If argv is None, sys.argv is used.
        recorded_words: Command-line words of an earlier run. Flags in argv override these words.
    """
    recipe_fields = dataclasses.fields(recipe_class)
    parser = _make_parser(recipe_class, recipe_fields)
    recorded_arguments = parser.parse_args(recorded_words)
    text_by_flag = vars(parser.parse_args(argv, recorded_arguments))  # argv overrides the recorded words
    config_path = text_by_flag["config"]
    try:
        value_by_flag = read_config(Path(config_path), recipe_fields) if config_path else {}
        for field in recipe_fields:
            if (flag_text := text_by_flag[field.name]) is not None:
                value_by_flag[field.name] = typed_value(field, flag_text, f"--{field.name}")
        if is_under_deepspeed() and not value_by_flag.get("deepspeed_config"):
            value_by_flag["deepspeed_config"] = _default_deepspeed_config()
        recipe = recipe_class(**value_by_flag)
    except ValueError as recipe_error:
        parser.error(str(recipe_error))
    if text_by_flag["print_config"]:
        parser.print_once_per_host(as_yaml(recipe))
        sys.exit(0)
    return recipe


def _make_parser(recipe_class: type, recipe_fields: tuple[dataclasses.Field, ...]) -> Parser:
    """Return a parser in which each class that declares flags has its own flag group."""
    script_docstring = sys.modules[recipe_class.__module__].__doc__ or ""
    description, examples = _summary_and_examples(script_docstring)
    parser = Parser(
        prog=Path(sys.argv[0]).name,
        usage=getattr(recipe_class, "usage", "%(prog)s [flags]"),
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    # From the script's class to its base classes, so that the last class to declare a flag is listed first
    group_by_class: dict[type, Any] = {}
    for flag_class in filter(dataclasses.is_dataclass, recipe_class.__mro__):
        script_group = (parser.prog, SCRIPT_GROUP_HELP)
        default_group = HELP_GROUPS.get(flag_class.__name__, script_group)
        group_title, group_help = vars(flag_class).get("help_group") or default_group
        group_by_class[flag_class] = parser.add_argument_group(group_title, group_help)
    sample_unit = recipe_class.unit if issubclass(recipe_class, Job) else "images"
    facts_by_flag = flag_facts_of(recipe_class)
    for field in recipe_fields:
        declaring_class = next(cls for cls in group_by_class if field.name in inspect.get_annotations(cls))
        add_flag(group_by_class[declaring_class], field, sample_unit, facts_by_flag[field.name].metavar)
    config_group = parser.add_argument_group("flags", "Configuration file and help.")
    config_group.add_argument(
        "--config",
        metavar="FILE",
        help="YAML or JSON file with flag names as keys. Flags on the command line override the file.",
    )
    config_group.add_argument(
        "--print_config", action="store_true", help="Print all flag values as YAML for --config, then exit."
    )
    config_group.add_argument("-h", "--help", action="help", help="Show this help message and exit.")
    # The deepspeed launcher adds --local_rank.
    config_group.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    return parser


def _summary_and_examples(docstring: str) -> tuple[str, str]:
    """Return the first paragraph and the examples of a script's docstring, formatted for --help.

    The examples are the docstring's indented lines.
    """
    first_paragraph, _, _ = docstring.partition("\n\n")
    examples = [doc_line.strip() for doc_line in docstring.splitlines() if doc_line.startswith("    ")]
    if not examples:
        return first_paragraph, ""
    return first_paragraph, "\n".join(["examples:", *(f"  {example}" for example in examples)])


def _default_deepspeed_config() -> str | None:
    """Return the path of the config that applies without --deepspeed_config, or None if it does not exist."""
    zero2_config = ROOT / "ds_configs" / "zero2.json"
    return str(zero2_config) if zero2_config.exists() else None


_recipe_by_class: dict[type, Any] = {}  # {recipe class: this process's recipe}


def from_flags(recipe_class: type[DataclassT]) -> DataclassT:
    """Parse this process's command line into a recipe. Later calls return the same recipe.

    The command line is parsed only once, because --config may be a pipe.
    """
    if recipe_class not in _recipe_by_class:
        _recipe_by_class[recipe_class] = parse(recipe_class)
    return _recipe_by_class[recipe_class]


def recipe_part(recipe: Job) -> dict[str, Any]:
    """Return the recipe fields that affect the trained model."""
    recipe_flags = flags_where(type(recipe), "part_of_recipe")
    return {flag_name: getattr(recipe, flag_name) for flag_name in recipe_flags}


def agreed_part(job: Job) -> dict[str, Any]:
    """Return the recipe fields that must have the same value on all ranks."""
    per_host_flags = flags_where(type(job), "per_host")
    return {flag_name: value for flag_name, value in vars(job).items() if flag_name not in per_host_flags}


def without_training_flags(recipe: RecipeT) -> RecipeT:
    """Return a recipe that trains the same model from random weights and without frozen layers."""
    training_flags = flags_where(type(recipe), "training_only")
    disabled_fields = [field for field in dataclasses.fields(recipe) if field.name in training_flags]
    return dataclasses.replace(recipe, **{field.name: switched_off(field) for field in disabled_fields})


def without_initial_weights(recipe: RecipeT) -> RecipeT:
    """Return a recipe that trains the same layers from random weights."""
    random_recipe = copy.copy(recipe)  # dataclasses.replace() would refuse --freeze without weights
    initial_weight_flags = flags_where(type(recipe), "initial_weights")
    for recipe_field in dataclasses.fields(recipe):
        if recipe_field.name in initial_weight_flags:
            object.__setattr__(random_recipe, recipe_field.name, switched_off(recipe_field))
    return random_recipe


def as_yaml(recipe: "DataclassInstance") -> str:
    """Return the recipe as the content of a YAML file for --config."""
    import yaml

    value_by_flag = dataclasses.asdict(recipe)
    return yaml.safe_dump(value_by_flag, sort_keys=False, default_flow_style=None, allow_unicode=True)


@dataclass(frozen=True)
class Batch:
    """Division of an optimizer step's images among processes and forward passes."""

    total: int  # Images per optimizer step in the whole job
    per_device: int  # Images per forward pass on one device
    processes: int  # Processes in the whole job
    accumulations: int  # Forward passes per optimizer step on one device
    unit: str = "images"  # Word for samples in messages

    def __str__(self) -> str:
        """Describe the batch, for example as `batch 64 = 16 images x 2 processes x 2 accumulations`."""
        samples_text = plural(self.per_device, self.unit.removesuffix("s"))
        processes_text = plural(self.processes, "process")
        accumulations_text = plural(self.accumulations, "accumulation")
        return f"batch {self.total} = {samples_text} x {processes_text} x {accumulations_text}"

    def micro_batches(self, rank: int) -> range:
        """Return the indices of this rank's micro-batches within a step."""
        return range(rank * self.accumulations, (rank + 1) * self.accumulations)

    def smaller_per_device(self) -> int | None:
        """Return the largest valid per_device that is at most half of the current value, or None."""
        images_per_process = self.total // self.processes
        smaller_sizes = range(self.per_device // 2, 0, -1)  # in descending order
        return next((size for size in smaller_sizes if images_per_process % size == 0), None)


def share_out(batch_size: int, per_device: int | None, processes: int, unit: str = "images") -> Batch:
    """Divide a batch among processes and accumulation steps.

    If `per_device` is None, each process computes its images in one forward pass. Raise ValueError if the
    batch is not divisible.
    """
    if per_device is None:
        if batch_size % processes:
            raise ValueError(
                f"--batch_size {batch_size} is not divisible by the number of processes ({processes})."
                f" Choose {_nearest_multiples(batch_size, processes)}"
            )
        per_device = batch_size // processes
    images_per_pass = per_device * processes  # images in one forward pass on all processes
    if batch_size % images_per_pass:
        raise ValueError(
            f"--batch_size {batch_size} is not a multiple of --per_device_batch_size {per_device}"
            f" x {processes} processes = {images_per_pass}."
            f" Choose {_suggest_per_device_sizes(batch_size / processes, per_device)}"
            f"--batch_size {_nearest_multiples(batch_size, images_per_pass)}"
        )
    return Batch(batch_size, per_device, processes, batch_size // images_per_pass, unit)


def usable_processes(batch_size: int, per_device: int | None, max_processes: int, step: int = 1) -> list[int]:
    """Return the multiples of `step` up to `max_processes` among which the batch can be divided.

    If `per_device` is None, each process may compute any number of images per forward pass.
    """
    process_counts = range(step, max_processes + 1, step)
    return [count for count in process_counts if batch_size % (count * (per_device or 1)) == 0]


MAX_DEFAULT_STREAMS = 64  # maximum default number of streams in which shards are read in parallel
COUNTED_PROCESSES = range(1, 17)  # process counts that default_streams() considers


def default_streams(batch_size: int) -> int:
    """Return the default number of streams, which is 64 or a smaller divisor of the batch size.

    If 64 does not divide the batch size, the function returns the divisor that permits the most process
    counts. The number of streams depends only on the batch size, so the image order is the same regardless of
    the number of processes.
    """
    if batch_size % MAX_DEFAULT_STREAMS == 0:
        return MAX_DEFAULT_STREAMS

    def flexibility(stream_count: int) -> tuple[int, int]:
        """Return how many process counts are valid. Among equal counts, prefer more streams."""
        return sum(stream_count % process_count == 0 for process_count in COUNTED_PROCESSES), stream_count

    valid_streams = [streams for streams in range(1, MAX_DEFAULT_STREAMS) if batch_size % streams == 0]
    return max(valid_streams, key=flexibility)


def _suggest_per_device_sizes(images_per_process: float, per_device: int) -> str:
    """Return a phrase that suggests the nearest valid values of --per_device_batch_size and ends with "or ".

    The function returns "" if no other value is valid, for example if images_per_process is a fraction.
    """
    possible_sizes = range(1, math.floor(images_per_process) + 1)
    valid_sizes = [size for size in possible_sizes if images_per_process % size == 0]
    smaller_sizes = [size for size in valid_sizes if size < per_device]
    larger_sizes = [size for size in valid_sizes if size > per_device]
    nearest_sizes = [*smaller_sizes[-1:], *larger_sizes[:1]]
    if not nearest_sizes:
        return ""  # no other size is valid
    size_choice = " or ".join(map(str, nearest_sizes))
    return f"--per_device_batch_size {size_choice}, which does not change the recipe, or "


def _nearest_multiples(batch_size: int, divisor: int) -> str:
    """Return a phrase that lists the nearest multiples of `divisor` below and above a batch size."""
    multiple_below = batch_size // divisor * divisor
    return f"{multiple_below} or {multiple_below + divisor}" if multiple_below else f"{divisor}"
