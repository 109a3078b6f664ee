"""Defines schemas of the files that runs, tools and find_batch_size.py write for other programs.

Code that writes one of these files uses the schema as the type of its contents, so that mypy checks the keys
and values. Code that reads one passes value_types(schema) to onecurve.system.files.split_by_type. Readers
ignore values of the wrong type and accept missing keys, because files from earlier versions lack some keys.
onecurve.flags.recipe.METRICS declares the metrics in result.json.
"""

import types
import typing
from typing import Any, NotRequired, TypedDict

from onecurve.flags.recipe import METRICS
from onecurve.system.files import ValueType
from onecurve.telemetry.summary import HostSummary

ANY_KEY = "*"  # Key with which a ValueType describes the values of all keys


class RecipeFile(TypedDict):
    """Content of recipe.json, which records the recipe, hosts, devices and code versions of a run."""

    script: str
    strategy: str
    sharding: dict[str, Any]
    mixed_precision: str
    half_precision: str
    gradient_reduction: str
    compile: str
    grad_checkpointing: bool
    step_graph: bool  # True if each training step runs as one CUDA graph
    threads: int  # Number of CPU threads that torch uses in each process
    recipe: dict[str, Any]  # All flags and settings of the run
    preprocessing: NotRequired[dict[str, Any]]
    defaults: dict[str, Any]  # Default values of the recipe
    source: str  # Identity of the data, which changes with the data's content
    unit: str  # Plural name of the samples, for example `images`
    val_chosen: str  # Method by which --max_val_images selects images
    resumed_from: str | None  # Value of --resume at the run's first start
    command: list[str]  # Command with which the user started the launcher or the script
    argv: list[str]  # sys.argv of the script
    version: str  # Version of onecurve
    git_commit: str | None
    versions: dict[str, str]  # Version of each package that affects the results
    hosts: list[str]  # Names of the hosts, in rank order
    devices: list[str]  # Device name of each rank
    wandb_id: NotRequired[str]
    wandb_url: NotRequired[str]


class StartLine(RecipeFile):
    """Line of starts.jsonl, without the recipe.json keys `argv` and `defaults`. See starts.py."""

    at: float  # Value of time.time() at the start
    step: int  # Number of steps completed before the start
    per_device_batch_size: int
    accumulation_steps: int  # Micro-batches per process and step
    steps_per_epoch: int
    cropped: bool | None  # True if the images stay encoded and are cropped
    has_optimizer: bool  # True if the optimizer state was restored
    changed: NotRequired[dict[str, Any]]  # Differences from the resumed checkpoint, {name: [before, now]}
    processes: NotRequired[int]  # Present only in a line about training with an earlier version
    wall_s: NotRequired[float]


class EndEntries(TypedDict, total=False):
    """Entries that are added to result.json at the end of a run."""

    parameters: int  # Number of the model's parameters
    total_steps: int  # Number of steps without an early end
    stopped_by: str | None  # Cause of an early end, such as `--max_steps 20`
    test_name: str  # Name of the held-out split on which the best weights were tested
    test_images: int
    test_accuracy: float
    flops_per_image: float  # Number of operations in a forward and backward pass for one image
    peak_flops: float | None  # Sum of all devices' peak FLOPs per second
    mfu_pct: float | None  # Model FLOPs utilisation in percent
    telemetry: list[HostSummary]
    energy_wh: float | None  # Energy used by all GPUs
    uploaded: bool  # True if S3 contains all files of the run. Present only with --s3
    # The following entries replace entries that result.json always contains.
    steps: int  # Number of completed steps
    val_name: str | None  # Name of the split that selected the best weights
    epoch_s: float | None  # Mean training time per epoch
    checkpoint: str | None  # Path of the newest checkpoint, relative to the run folder
    best_checkpoint: str | None  # Path of the best checkpoint, relative to the run folder
    error: str | None  # Error message of a failed run
    memory_gib: list[
        dict[str, float]
    ]  # Result of memory_gib() for each rank, or for rank 0 of an unfinished run
    wall_s: float  # Duration of all starts, without the time between starts
    spent_s: dict[str, float]  # Seconds in wall_s for each phase


class Result(EndEntries):
    """Content of result.json: progress, metrics and speed of a run. value_types() adds metric keys."""

    script: str
    status: str  # `finished`, `preempted` or `failed`
    strategy: str
    mixed_precision: str
    half_precision: str
    gradient_reduction: str
    compile: str
    grad_checkpointing: bool
    step_graph: bool
    deterministic: bool
    hosts: int  # Number of hosts
    processes: int  # Number of processes
    device: str  # Device name of rank 0
    data: str  # Value of --data
    batch_size: int  # Images per step in the whole job
    per_device_batch_size: int
    accumulation_steps: int  # Micro-batches per process and step
    epochs: int
    best_by: str  # Metric that selected the best weights
    best_accuracy: float | None
    best_loss: float | None
    best_step: int | None
    final_accuracy: float | None
    final_loss: float | None
    val_images: int | None  # Number of images in the last evaluation
    bad_images: int  # Number of skipped images
    train_s: float  # Seconds spent on training steps
    images_per_s: float | None  # Mean training speed of the whole job
    peak_memory_gib: float  # Highest peak in memory_gib
    seed: int


class MetricsLine(TypedDict):
    """Line of metrics.jsonl. Metrics and scalars from scripts add float entries such as `val/loss`."""

    step: int
    epoch: float
    wall_s: float
    interrupted_at: NotRequired[float]  # Value of time.time()
    resumed_at: NotRequired[float]  # Value of time.time()
    why: NotRequired[str]  # Reason for the interruption
    hosts: NotRequired[int]  # Number of hosts, present only after a change
    hosts_before: NotRequired[int]  # Number of hosts before the change
    processes: NotRequired[int]  # Number of processes, present only after a change
    processes_before: NotRequired[int]  # Number of processes before the change


class RunEvent(TypedDict, total=False):
    """Entries that describe an event in a line of metrics.jsonl."""

    interrupted_at: float  # Value of time.time()
    resumed_at: float  # Value of time.time()
    why: str  # Reason for the interruption
    hosts: int  # Number of hosts
    hosts_before: int  # Number of hosts before the change
    processes: int  # Number of processes
    processes_before: int  # Number of processes before the change


class GpuSample(TypedDict, total=False):
    """Measurements of one GPU in a line of telemetry-<host>.jsonl."""

    index: int  # Index of the GPU among the job's GPUs on this host
    utilisation_pct: float | None
    memory_gib: float | None
    power_w: float | None
    temperature_c: float | None
    sm_clock_mhz: float | None
    throttle: list[str] | None  # Reasons for a reduced clock rate
    energy_wh: float | None  # Energy used since this start


class TelemetryLine(TypedDict, total=False):
    """Line of telemetry-<host>.jsonl. Header lines contain `host`, and sample lines contain `step`."""

    t: float  # Value of time.time() at the measurement
    host: str  # Host name, present only in header lines
    before_s: float  # wall_s of earlier processes, present only for the main process's host
    age_s: float  # Uptime of the process, present only for the main process's host
    cpus: float  # Number of logical CPUs, present only in header lines
    step: int  # Current training step
    cpu_pct: float
    memory_gib: float
    gpus: list[GpuSample]


class Confusion(TypedDict, total=False):
    """Content of confusion.json. `split` and `val_images` are present only for the test split."""

    step: int
    classes: list[str]
    confusion: list[list[int]]  # Number of images, with one row per true class
    mistakes: list[list[int]]  # [true class, predicted class, number of images]
    split: str
    val_images: list[int]


class Report(TypedDict, total=False):
    """Content of report.json, which validate.py writes."""

    step: int
    classes: list[str]
    confusion: list[list[int]]  # Number of images, with one row per true class
    mistakes: list[list[int]]  # [true class, predicted class, number of images]
    split: str
    checkpoint: str
    device: str
    strategy: str
    loss: float
    top1: float
    top5: float
    expected_calibration_error: float
    images_per_s: float
    images: int  # Number of evaluated images
    per_class: dict[str, list[float]]  # {metric: value for each class}
    classes_left_out: int  # Number of classes without images that were never predicted


class ReplayRecord(TypedDict, total=False):
    """Replay recorded in verified.json. `files` maps each file name to the file's SHA-256 hash."""

    date: str
    commit: str | None  # Git commit of the replay's code
    kind: str  # Type of the verification
    device: str  # Device type, `cuda` or `cpu`
    config: str  # Name of the Accelerate config, or `one process`
    mixed_precision: str
    steps: int  # Number of replayed steps
    of_steps: int  # Number of steps in the run
    intervals: list[str]  # Replayed intervals
    checkpoints: list[str]  # Names of the compared checkpoints
    findings: list[str]  # Differences between the replay and the run
    not_verified: list[str]  # Parts of the run that the replay left out
    recipe_changes: list[str]  # Changes of the recipe during the run
    differences: dict[str, float]  # Maximum absolute difference of each compared quantity
    files: dict[str, str]


class Verified(TypedDict):
    """Content of verified.json, which verify.py writes."""

    stamps: list[ReplayRecord]  # One record for each call of verify.py


class TrialRow(TypedDict, total=False):
    """Trial in a result of find_batch_size.py."""

    outcome: str
    per_device_batch_size: int
    seconds: float  # Duration of the trial
    memory_gib: float | None  # Highest peak in memory_gib
    images_per_s: float | None


class SearchResult(TypedDict, total=False):
    """Result that find_batch_size.py writes."""

    script: str
    strategy: str
    device: str
    mixed_precision: str
    half_precision: str
    compile: str
    grad_checkpointing: bool
    processes: int
    answer: int  # Largest batch size per process that fits into memory
    knee: int  # Smallest batch size whose speed is within 5 % of the best speed
    quantum: int  # Value of --quantum, which divides all tried batch sizes
    limit_gib: float  # Memory limit per process
    recipe: dict[str, Any]
    sharding: dict[str, Any]
    trials: list[TrialRow]


def value_types(schema: Any) -> dict[str, ValueType]:
    """Return the type of each value in a schema, as an argument for onecurve.system.files.split_by_type.

    The types do not include None. For the schema Result, each metric in METRICS adds three keys.
    """
    metric_keys = [f"{stage}_{metric_name}" for stage in ("test", "best", "final") for metric_name in METRICS]
    metric_types = dict.fromkeys(metric_keys if schema is Result else (), float)
    return metric_types | {field: _value_type(hint) for field, hint in typing.get_type_hints(schema).items()}


def _value_type(type_hint: Any) -> ValueType:
    """Convert a field's type hint to a ValueType. A union such as `int | None` becomes the type `int`."""
    type_arguments = typing.get_args(type_hint)
    if typing.is_typeddict(type_hint):
        return value_types(type_hint)
    if isinstance(type_hint, types.UnionType):
        return _value_type(next(member for member in type_arguments if member is not types.NoneType))
    if typing.get_origin(type_hint) is list:
        [item_hint] = type_arguments
        return [_value_type(item_hint)]
    if typing.get_origin(type_hint) is dict:
        _, value_hint = type_arguments
        return {ANY_KEY: _value_type(value_hint)}
    return type_hint
