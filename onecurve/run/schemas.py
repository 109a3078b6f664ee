"""Defines schemas of the files that runs, tools and find_batch_size.py write for other programs.

Code that writes one of these files uses the schema as the type of its contents, so that mypy checks the keys
and values. Code that reads one passes value_types(schema) to onecurve.system.files.typed_values. Readers
ignore values of the wrong type and accept missing keys, because files from earlier versions lack some keys.
onecurve.flags.recipe.METRICS declares the metrics in result.json.
"""

import types
import typing
from typing import Any, NotRequired, TypedDict

from onecurve.flags.recipe import METRICS
from onecurve.system.files import ValueType
from onecurve.telemetry.summary import HostSummary


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
    step_graph: bool
    threads: int
    recipe: dict[str, Any]
    preprocessing: NotRequired[dict[str, Any]]
    defaults: dict[str, Any]
    source: str
    unit: str
    val_chosen: str
    resumed_from: str | None
    command: list[str]
    argv: list[str]
    version: str
    git_commit: str | None
    versions: dict[str, str]
    hosts: list[str]
    devices: list[str]
    wandb_id: NotRequired[str]
    wandb_url: NotRequired[str]


class StartLine(RecipeFile):
    """Line of starts.jsonl, without the recipe.json keys `argv` and `defaults`. See starts.py."""

    at: float
    step: int
    per_device_batch_size: int
    accumulation_steps: int
    steps_per_epoch: int
    cropped: bool | None
    has_optimizer: bool
    changed: NotRequired[dict[str, Any]]
    processes: NotRequired[int]  # Present only in a line about training with an earlier version
    wall_s: NotRequired[float]


class ResultEnd(TypedDict, total=False):
    """Entries that are added to result.json at the end of a run."""

    parameters: int
    total_steps: int
    stopped_by: str | None
    test_name: str
    test_images: int
    test_accuracy: float
    flops_per_image: float
    peak_flops: float | None
    mfu_pct: float | None
    telemetry: list[HostSummary]
    energy_wh: float | None
    uploaded: bool
    # The following entries replace entries that result.json always contains.
    steps: int
    val_name: str | None
    epoch_s: float | None
    checkpoint: str | None
    best_checkpoint: str | None
    error: str | None
    memory_gib: list[dict[str, float]]
    wall_s: float
    spent_s: dict[str, float]


class Result(ResultEnd):
    """Content of result.json: progress, metrics and speed of a run. value_types() adds metric keys."""

    script: str
    status: str
    strategy: str
    mixed_precision: str
    half_precision: str
    gradient_reduction: str
    compile: str
    grad_checkpointing: bool
    step_graph: bool
    deterministic: bool
    hosts: int
    processes: int
    device: str
    data: str
    batch_size: int
    per_device_batch_size: int
    accumulation_steps: int
    epochs: int
    best_by: str
    best_accuracy: float | None
    best_loss: float | None
    best_step: int | None
    final_accuracy: float | None
    final_loss: float | None
    val_images: int | None
    bad_images: int
    train_s: float
    images_per_s: float | None
    peak_memory_gib: float
    seed: int


class MetricsLine(TypedDict):
    """Line of metrics.jsonl. Metrics and scalars from scripts add float entries such as `val/loss`."""

    step: int
    epoch: float
    wall_s: float
    interrupted_at: NotRequired[float]
    resumed_at: NotRequired[float]
    why: NotRequired[str]
    hosts: NotRequired[int]
    hosts_before: NotRequired[int]
    processes: NotRequired[int]
    processes_before: NotRequired[int]


class Mark(TypedDict, total=False):
    """Entries that describe an event in a line of metrics.jsonl."""

    interrupted_at: float
    resumed_at: float
    why: str
    hosts: int
    hosts_before: int
    processes: int
    processes_before: int


class GpuSample(TypedDict, total=False):
    """Measurements of one GPU in a line of telemetry-<host>.jsonl."""

    index: int
    utilisation_pct: float | None
    memory_gib: float | None
    power_w: float | None
    temperature_c: float | None
    sm_clock_mhz: float | None
    throttle: list[str] | None
    energy_wh: float | None


class TelemetryLine(TypedDict, total=False):
    """Line of telemetry-<host>.jsonl. Header lines contain `host`, and sample lines contain `step`."""

    t: float
    host: str
    before_s: float  # Present only for the main process's host
    age_s: float  # Present only for the main process's host
    cpus: float
    step: int
    cpu_pct: float
    memory_gib: float
    gpus: list[GpuSample]


class Confusion(TypedDict, total=False):
    """Content of confusion.json. `split` and `val_images` are present only for the test split."""

    step: int
    classes: list[str]
    confusion: list[list[int]]
    mistakes: list[list[int]]
    split: str
    val_images: list[int]


class Report(TypedDict, total=False):
    """Content of report.json, which validate.py writes."""

    step: int
    classes: list[str]
    confusion: list[list[int]]
    mistakes: list[list[int]]
    split: str
    checkpoint: str
    device: str
    strategy: str
    loss: float
    top1: float
    top5: float
    expected_calibration_error: float
    images_per_s: float
    images: int
    per_class: dict[str, list[float]]
    classes_left_out: int


class Stamp(TypedDict, total=False):
    """Replay recorded in verified.json. `files` maps each file name to the file's SHA-256 hash."""

    date: str
    commit: str | None
    kind: str
    device: str
    config: str
    mixed_precision: str
    steps: int
    of_steps: int
    intervals: list[str]
    checkpoints: list[str]
    findings: list[str]
    not_verified: list[str]
    recipe_changes: list[str]
    differences: dict[str, float]
    files: dict[str, str]


class Verified(TypedDict):
    """Content of verified.json, which verify.py writes."""

    stamps: list[Stamp]


class TrialRow(TypedDict, total=False):
    """Trial in a result of find_batch_size.py."""

    outcome: str
    per_device_batch_size: int
    seconds: float
    memory_gib: float | None
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
    answer: int
    knee: int
    quantum: int
    limit_gib: float
    recipe: dict[str, Any]
    sharding: dict[str, Any]
    trials: list[TrialRow]


def value_types(schema: Any) -> dict[str, ValueType]:
    """Return the type of each value in a schema, as an argument for onecurve.system.files.typed_values.

    The types do not include None. For the schema Result, each metric in METRICS adds three keys.
    """
    metric_keys = [f"{stage}_{name}" for stage in ("test", "best", "final") for name in METRICS]
    metric_types = dict.fromkeys(metric_keys if schema is Result else (), float)
    return metric_types | {key: _value_type(hint) for key, hint in typing.get_type_hints(schema).items()}


def _value_type(type_hint: Any) -> ValueType:
    arguments = typing.get_args(type_hint)
    if typing.is_typeddict(type_hint):
        return value_types(type_hint)
    if isinstance(type_hint, types.UnionType):
        return _value_type(next(member for member in arguments if member is not types.NoneType))
    if typing.get_origin(type_hint) is list:
        return [_value_type(arguments[0])]
    if typing.get_origin(type_hint) is dict:
        return {"*": _value_type(arguments[1])}
    return type_hint
