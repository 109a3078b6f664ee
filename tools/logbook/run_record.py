"""Read a run folder, even if some files are missing or broken."""

import contextlib
import copy
import hashlib
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from onecurve.flags.fields import declared_values, without_removed_flags
from onecurve.flags.recipe import METRICS, parse_fold, score
from onecurve.run.schemas import (
    Confusion,
    MetricsLine,
    RecipeFile,
    Report,
    Result,
    StartLine,
    TelemetryLine,
    Verified,
    value_types,
)
from onecurve.run.starts import (
    CROPPED_IMAGES,
    DATA_CONTENT,
    STARTS_FILE,
    RunStart,
    join_with_then,
    kept_starts,
    starts_in_order,
)
from onecurve.system.files import ValueType, parse_json, read_file_inside, sha256_of, split_by_type
from onecurve.system.paths import public_path
from onecurve.system.text import plural

SettingReader = Callable[[dict[str, Any]], Any]  # function that returns a value from a line of starts.jsonl

# Every run folder contains at least one of these files and folders.
RUN_FILES = ("recipe.json", "result.json", "metrics.jsonl", "checkpoints")
VERIFIED_FILE = "verified.json"  # file that verify.py writes
BIT_FOR_BIT, EVALUATED_AGAIN = "bit for bit", "evaluated again"  # two kinds of verification
VERIFICATION_MEANING = {  # what each kind of verification proves if there is no difference
    BIT_FOR_BIT: "The replayed steps were trained again. Every logged value and every weight is bitwise"
    " identical, so this recipe produces these results in these steps. All other steps and the items below"
    " are not verified.",
    EVALUATED_AGAIN: "The best weights and the last weights reach the reported accuracies in a new"
    " evaluation, except for the few images that a repeated evaluation changes. It is not verified that this"
    " training run produced the weights. The differences in the replayed steps are reported without a"
    " verdict.",
}
COMPARED_FILES = ("recipe.json", "result.json", "metrics.jsonl", STARTS_FILE)  # files that verify.py compares
MAX_FILE_BYTES = 2**31  # maximum size of a file. 14 days of telemetry from 8 GPUs are smaller
MAX_SAMPLES_PER_HOST = 5_000  # telemetry samples per host on a page. 64 hosts write 8 GB of samples a day
MIN_LOGGED_SPEEDS = 8  # minimum number of throughput values for deciles
STATUS_WITHOUT_RESULT = "killed or still running"  # status of a run without a result
STRATEGY_TITLES = {"single": "one process", "ddp": "DDP", "fsdp": "FSDP2"}
HALF_PRECISION_TEXTS = {
    "autocast": "by autocast (weights and residual stream in fp32)",
    "weights": "weights and all activations",
}
VALUE_TYPES_BY_FILE: dict[str, dict[str, ValueType]] = {
    "recipe.json": value_types(RecipeFile),
    STARTS_FILE: value_types(StartLine),
    "result.json": value_types(Result),
    "metrics.jsonl": {**value_types(MetricsLine), "*": float},
    "telemetry.jsonl": value_types(TelemetryLine),
    "confusion.json": value_types(Confusion),
    "report.json": value_types(Report),
    VERIFIED_FILE: value_types(Verified),
}
for file_with_command in ("recipe.json", STARTS_FILE):
    # Pages show `command`, which contains the words that the user typed.
    del VALUE_TYPES_BY_FILE[file_with_command]["argv"]


class Interruption(NamedTuple):
    """Interruption of a run by a signal."""

    step: int  # last step before the interruption
    reason: str
    lost_s: float | None  # seconds until the next step, or None if the run did not resume


class RunRecord:
    """Contents of a run folder. Values with an unexpected type are left out.

    Attributes:
        problems: Messages about missing or broken files.
        recipe_file: Contents of recipe.json.
        recipe: Values of the recipe's flags.
        metrics: Lines of metrics.jsonl.
        evaluations: Lines of metrics.jsonl that contain `val/loss`.
        telemetry: Lines of telemetry-<host>.jsonl by host.
        derived_values: Values that the other files imply for result.json.
        result_values: Values in result.json. `derived_values` replace missing values.
        starts: Starts recorded in starts.jsonl, which earlier versions did not write.
        kept_starts: Starts that trained steps of the final result.
        confusion: Contents of confusion.json.
        verifications: Outcomes of verify.py.
        validation_reports: Reports of validate.py by name.

    Raises:
        ValueError: If the folder is not a run folder.
    """

    # Keys of result.json whose values belong to a later start, after with_settings_of()
    keys_of_later_start: Set[str] = frozenset()

    def __init__(self, folder: Path):
        if not any((folder / run_file).exists() for run_file in RUN_FILES):
            run_files = ", ".join(RUN_FILES)
            raise ValueError(f"{folder} is not a run folder. The folder contains none of these: {run_files}")
        self.folder = folder
        self.problems: list[str] = []
        self.recipe_file = self._read_json("recipe.json")
        self.recipe = without_removed_flags(self.recipe_file.get("recipe", {}))
        self.metrics = self._read_lines("metrics.jsonl", {"step", "epoch", "wall_s"})
        self.evaluations = [metrics_line for metrics_line in self.metrics if "val/loss" in metrics_line]
        self.telemetry = {
            file.stem.removeprefix("telemetry-"): self._read_lines(file.name, {"t"}, "telemetry.jsonl")
            for file in sorted(folder.glob("telemetry-*.jsonl"))
        }
        if not self.telemetry and self.recipe.get("telemetry_s") != 0:
            self.problems.append("telemetry-<host>.jsonl is missing")
        recorded_values = self._read_json("result.json")
        start_lines = self._read_lines(STARTS_FILE, set()) if (folder / STARTS_FILE).exists() else []
        resetting_starts = filter(resets_best_result, start_lines)
        best_reset_step = max((start_line.get("step", 0) for start_line in resetting_starts), default=0)
        self.derived_values = self._derive_result_values(best_reset_step)
        self.result_values = result_values = self.derived_values | recorded_values
        self.starts = starts_in_order([*map(add_derived_values, start_lines)], result_values.get("steps", 0))
        self.kept_starts = kept_starts(self.starts)
        has_evaluated_classes = result_values["status"] == "finished" and "best_accuracy" in result_values
        # A missing confusion.json is a problem only after the evaluation of a finished classifier.
        expects_confusion = has_evaluated_classes or (folder / "confusion.json").exists()
        self.confusion = self._read_confusion("confusion.json") if expects_confusion else {}
        verified_json = self._read_json(VERIFIED_FILE) if (folder / VERIFIED_FILE).exists() else {}
        self.verifications: list[dict[str, Any]] = verified_json.get("stamps", [])
        self.validation_reports = {
            report_folder.name: self._read_confusion(f"validation/{report_folder.name}/report.json")
            for report_folder in sorted(folder.glob("validation/*"))
            if report_folder.is_dir()
        }

    @property
    def is_rehearsal(self) -> bool:
        """True if the run used CPUs."""
        devices = self.recipe_file.get("devices") or [self.result_values.get("device", "")]
        return any(device.startswith("CPU") for device in devices)

    @property
    def host_changes(self) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl that record hosts joining or leaving the job."""
        keys_of_change = {"hosts", "hosts_before", "processes", "processes_before"}
        return [metrics_line for metrics_line in self.metrics if keys_of_change <= set(metrics_line)]

    @property
    def interruptions(self) -> list["Interruption"]:
        """Interruptions of the run by signals. The log line of the next start completes an interruption."""
        interruptions: list[Interruption] = []
        for metrics_line in self.metrics:
            if "interrupted_at" in metrics_line:
                interrupted_at = metrics_line["interrupted_at"]
                interruptions.append(Interruption(metrics_line["step"], metrics_line.get("why", ""), None))
            elif "resumed_at" in metrics_line and interruptions and interruptions[-1].lost_s is None:
                lost_s = metrics_line["resumed_at"] - interrupted_at
                interruptions[-1] = interruptions[-1]._replace(lost_s=lost_s)
        return interruptions

    @property
    def fold(self) -> tuple[int, int] | None:
        """Fold index and number of folds, for example (2, 5) for `--fold 2/5`."""
        holdout = self.recipe.get("holdout")
        return parse_fold(holdout) if isinstance(holdout, str) else None

    @property
    def fold_count(self) -> int:
        """Number of folds, or 0 for a run without cross-validation."""
        _, fold_count = self.fold or (0, 0)
        return fold_count

    @property
    def unit(self) -> str:
        """Plural name of a sample: `images`, unless recipe.json contains a different unit."""
        return self.recipe_file.get("unit", "images")

    @property
    def identity(self) -> dict[str, str | None]:
        """Values that identify the run on a page: run folder, and hash of the first line in metrics.jsonl.

        The time in this line makes the hash unique.
        """
        first_line = json.dumps(self.metrics[0], sort_keys=True) if self.metrics else None
        return {
            "run": public_path(self.folder.resolve()),
            "first_line": first_line and hashlib.sha256(first_line.encode()).hexdigest()[:16],
        }

    def host_summaries(self) -> Sequence[Mapping[str, Any]]:
        """Return a summary of each host's telemetry, in the format of result.json."""
        if "telemetry" in self.result_values:
            return self.result_values["telemetry"]
        from onecurve.telemetry.summary import summarize

        telemetry_summaries = []
        hosts_with_samples = [host_name for host_name, host_lines in self.telemetry.items() if host_lines]
        for host_name in hosts_with_samples:
            # self.problems already lists these errors.
            with contextlib.suppress(OSError, ValueError, RecursionError):
                telemetry_summaries.append(summarize(self.folder / f"telemetry-{host_name}.jsonl"))
        return telemetry_summaries

    def _derive_result_values(self, best_reset_step: int) -> dict[str, Any]:
        """Derive result.json's values from the other files.

        Args:
            best_reset_step: First step whose evaluation may be the best evaluation.
        """
        recipe, _ = split_by_type(self.recipe, VALUE_TYPES_BY_FILE["result.json"])
        devices = self.recipe_file.get("devices", [])
        hosts = self.recipe_file.get("hosts", [])
        best_by = recipe.get("best_by", "accuracy")
        comparable_lines = [line for line in self.evaluations if line["step"] >= best_reset_step]
        best_line = max(comparable_lines, key=lambda line: evaluation_score(line, best_by), default={})
        final_line = self.evaluations[-1] if self.evaluations else {}
        all_lines = chain(self.metrics, *self.telemetry.values())
        manifests = sorted(self.folder.glob("checkpoints/step_*/manifest.json"))
        # result.json contains best_loss only if the loss selects the best evaluation.
        is_selected_by_other_metric = f"val/{best_by}" in best_line and best_by != "loss"
        derived_values = {
            "status": "unknown" if (self.folder / "result.json").exists() else STATUS_WITHOUT_RESULT,
            "processes": len(devices) or None,
            "hosts": len(hosts) or None,
            "device": devices[0] if devices else None,
            "steps": max((line["step"] for line in all_lines if "step" in line), default=None),
            "best_step": best_line.get("step"),
            **{f"best_{metric}": best_line.get(f"val/{metric}") for metric in METRICS if metric != "loss"},
            "best_loss": None if is_selected_by_other_metric else best_line.get("val/loss"),
            **{f"final_{metric}": final_line.get(f"val/{metric}") for metric in METRICS},
            "checkpoint": f"checkpoints/{manifests[-1].parent.name}" if manifests else None,
        }
        setting_names = ["script", "strategy", "compile", "grad_checkpointing", "step_graph"]
        setting_names += ["mixed_precision", "half_precision", "gradient_reduction"]
        flag_names = ("data", "batch_size", "epochs", "seed")
        return {
            **{
                setting_name: self.recipe_file[setting_name]
                for setting_name in setting_names
                if setting_name in self.recipe_file
            },
            **{flag_name: recipe[flag_name] for flag_name in flag_names if flag_name in recipe},
            **{name: value for name, value in derived_values.items() if value is not None},
        }

    @property
    def last_start_settings(self) -> dict[str, Any]:
        """Settings of the last start that trained steps in the final result, in starts.jsonl's format."""
        if self.kept_starts and self.kept_starts[-1] is not self.starts[-1]:
            return self.result_values | self.kept_starts[-1].settings  # recipe.json describes a later start
        hosts = self.recipe_file.get("hosts") or self.result_values.get("hosts", 1)
        return self.recipe_file | self.result_values | {"hosts": hosts}

    def setting_over_starts(self, read_setting: SettingReader) -> Any:
        """Return the last start's setting, or text such as `a, then b` if the starts differ."""
        settings_of_starts = [read_setting(start.settings) for start in self.kept_starts]
        texts = ["unknown" if setting is None else str(setting) for setting in settings_of_starts]
        return join_with_then(texts) if len(set(texts)) > 1 else read_setting(self.last_start_settings)

    def with_settings_of(self, start: RunStart) -> "RunRecord":
        """Return a copy of the run in which all starts have the given start's settings."""
        run_copy, start_settings = copy.copy(self), start.settings
        if start is self.starts[-1]:  # recipe.json and result.json already describe this start
            run_copy.recipe_file = start_settings | self.recipe_file
            return run_copy
        run_copy.recipe_file = start_settings
        # Manifests from earlier versions lack some flags.
        run_copy.recipe = ({} if start.is_recorded else self.recipe) | start_settings.get("recipe", {})
        result_keys = VALUE_TYPES_BY_FILE["result.json"]
        start_values = {key: value for key, value in start_settings.items() if key in result_keys}
        run_copy.result_values = self.result_values | start_values
        run_copy.result_values["hosts"] = host_count(start_settings)
        if {"epochs", "steps_per_epoch"} <= start_settings.keys():
            total_steps = start_settings["epochs"] * start_settings["steps_per_epoch"]
            run_copy.result_values["total_steps"] = total_steps
        later_starts = [other for other in self.kept_starts if other.begin_step >= start.last_kept_step]
        if any(resets_best_result(later_start.settings) for later_start in later_starts):
            # result.json describes the images that the later start evaluated.
            run_copy.keys_of_later_start = {"val_name", "val_images", "test_name", "test_images"}
        return run_copy

    @property
    def has_constant_hardware(self) -> bool:
        """True unless the strategy, the devices or the hosts changed during the run."""
        hardware_texts = {strategy_and_devices(start.settings) for start in self.kept_starts}
        return not self.host_changes and len(hardware_texts) <= 1

    @property
    def recipe_changes(self) -> list[str]:
        """Recipe changes by the kept starts, for example `step 100: lr was 0.01, now 0.001`."""
        steps_and_changes = [(start.begin_step, recipe_change(start)) for start in self.kept_starts]
        return [f"step {first_step:,}: {change}" for first_step, change in steps_and_changes if change]

    # --- In words

    @property
    def strategies_and_devices(self) -> str:
        """Strategies and devices, for example `DDP on 2 x NVIDIA T4, then one process on 1 x NVIDIA T4`."""
        return self.setting_over_starts(strategy_and_devices)

    @property
    def strategies_and_processes(self) -> str:
        """Strategies and processes without commas, for example `ddp x 2 then single x 1`."""
        return str(self.setting_over_starts(strategy_and_processes)).replace(", then", " then")

    @property
    def model(self) -> str:
        """Value of --model, or the script's name if the script has no such flag."""
        return str(self.recipe.get("model") or self.result_values.get("script", "unknown script"))

    @property
    def data_name(self) -> str:
        """Last component of --data."""
        return Path(self.result_values.get("data", "unknown data")).name

    def describe_evaluated_images(self, split: str = "val") -> str:
        """Describe the images that were evaluated during training ("val") or after training ("test")."""
        split_name = self.result_values.get(f"{split}_name")
        max_images = self.recipe.get("max_val_images")
        all_images = f"{split_name} split" if split_name else "held-out images"
        return f"{max_images:,} images of the {all_images}" if isinstance(max_images, int) else all_images

    @property
    def result_sentence(self) -> str:
        """The run's result as one line of plain text."""
        results = self.result_values
        headline_keys = ("test_accuracy", "final_accuracy", "test_loss", "final_loss")
        outcome = f"no evaluation of {self.data_name}"
        if headline_key := next((key for key in headline_keys if key in results), None):
            stage, _, metric = headline_key.partition("_")  # for example "test" and "accuracy"
            images_text = self.describe_evaluated_images("test" if stage == "test" else "val")
            outcome = f"reaches {metric} {results[headline_key]:.4f} on the {images_text} of {self.data_name}"
            if stage == "test":
                outcome += f" with the best weights on the {self.describe_evaluated_images()}"
        last_epoch = max((metrics_line["epoch"] for metrics_line in self.metrics), default=0)
        epochs_text = f"{last_epoch:.3g} of {plural(results.get('epochs', '?'), 'epoch')}"
        duration_text = f", {results['wall_s']:,.0f} s" if "wall_s" in results else ""
        return f"{self.model} {outcome} in {epochs_text}{duration_text}, {self.strategies_and_devices}"

    @property
    def peak_memory_gib(self) -> float | None:
        """Maximum peak memory over all processes, in GiB."""
        memory_by_rank = self.result_values.get("memory_gib", [])
        return max((process_memory.get("peak") or 0 for process_memory in memory_by_rank), default=None)

    @property
    def throughput_spread(self) -> float | None:
        """Difference between the 90th and the 10th percentile of images/s, relative to the median.

        Each log line contributes one throughput value, except the first line, which includes the warm-up. The
        spread is None if the log contains too few lines.
        """
        logged_speeds = [metrics_line.get("train/images_per_s", 0) for metrics_line in self.metrics]
        speeds_after_warm_up = [speed for speed in logged_speeds if 0 < speed < math.inf][1:]
        if len(speeds_after_warm_up) < MIN_LOGGED_SPEEDS:
            return None
        deciles = statistics.quantiles(speeds_after_warm_up, n=10, method="inclusive")
        percentile_10, median, percentile_90 = deciles[0], deciles[4], deciles[-1]
        return (percentile_90 - percentile_10) / median

    @property
    def mean_utilisation_pct(self) -> tuple[float | None, str]:
        """Mean GPU utilisation and `GPU`, or mean CPU utilisation and `CPU` if there are no GPUs.

        The mean over hosts is weighted by GPUs, or by telemetry samples for CPUs.
        """
        summaries = self.host_summaries()
        keys_by_device_type = {"GPU": ("utilisation_pct", "gpus"), "CPU": ("cpu_pct", "samples")}
        for device_type, (utilisation_key, weight_key) in keys_by_device_type.items():
            measured_hosts = [summary for summary in summaries if summary.get(utilisation_key) is not None]
            weights = [summary.get(weight_key) or 1 for summary in measured_hosts]
            if measured_hosts:
                means_pct = [summary[utilisation_key] for summary in measured_hosts]
                weighted_pct = [mean * weight for mean, weight in zip(means_pct, weights, strict=True)]
                return sum(weighted_pct) / sum(weights), device_type
        return None, "device"

    # --- Reading

    def _read_file(self, file_name: str) -> bytes | None:
        """Return a file's content. For an unreadable file, add a message to self.problems and return None."""
        try:
            return read_file_inside(self.folder, file_name, MAX_FILE_BYTES)
        except FileNotFoundError:
            self.problems.append(f"{file_name} is missing")
        except OSError as error:
            self.problems.append(f"{file_name} can't be read: {error.strerror}")
        return None

    def _read_json(self, file_name: str) -> dict[str, Any]:
        """Return a JSON file's values of the expected types. Add messages about errors to self.problems."""
        file_content = self._read_file(file_name)
        if file_content is None:
            return {}
        try:
            json_content = parse_json(file_content, self.folder / file_name)
            valid_values, wrong_keys = split_by_type(json_content, VALUE_TYPES_BY_FILE[Path(file_name).name])
        except ValueError as error:
            self.problems.append(str(error).removeprefix(f"{self.folder}/"))
            return {}
        if wrong_keys:
            self.problems.append(f"{file_name} contains values of unexpected types: {', '.join(wrong_keys)}")
        return valid_values

    def _read_lines(
        self, file_name: str, needed_keys: set[str], schema_file: str | None = None
    ) -> list[dict[str, Any]]:
        """Read the complete lines of a JSON Lines file. Skip lines that a kill or a full disk truncated.

        Messages about broken lines are added to self.problems. Telemetry is sampled.

        Args:
            file_name: File name.
            needed_keys: Keys that every line must contain.
            schema_file: Key in VALUE_TYPES_BY_FILE. Default: `file_name`.
        """
        schema_file = schema_file or file_name
        file_content = self._read_file(file_name)
        if file_content is None:
            return []
        raw_lines = file_content.decode(errors="replace").splitlines()
        raw_lines = _sample_lines(raw_lines) if schema_file == "telemetry.jsonl" else raw_lines
        valid_lines, broken_count = [], 0
        for raw_line in raw_lines:
            try:
                json_line = parse_json(raw_line, file_name)
                line_values, wrong_keys = split_by_type(json_line, VALUE_TYPES_BY_FILE[schema_file])
            except ValueError:
                line_values, wrong_keys = {}, [raw_line]
            has_needed_keys = needed_keys <= line_values.keys()
            if has_needed_keys:
                valid_lines.append(line_values)
            broken_count += bool(wrong_keys) or not has_needed_keys
        if broken_count:
            self.problems.append(
                f"{file_name} contains unreadable lines ({broken_count} of {len(raw_lines)})"
            )
        elif not raw_lines:
            self.problems.append(f"{file_name} is empty")
        return valid_lines

    def _read_confusion(self, file_name: str) -> dict[str, Any]:
        """Read a file with a square confusion matrix or, for many classes, the most frequent mistakes.

        Return the file's values without an invalid matrix or invalid mistakes.
        """
        confusion_content = self._read_json(file_name)
        class_count = len(confusion_content.get("classes", []))

        def is_valid_mistake(mistake: list[Any]) -> bool:  # [true label, predicted label, image count]
            return len(mistake) == 3 and all(label in range(class_count) for label in mistake[:2])

        without_matrix = {key: value for key, value in confusion_content.items() if key != "confusion"}
        mistakes = confusion_content.get("mistakes")
        if mistakes is not None and all(map(is_valid_mistake, mistakes)):
            return without_matrix
        confusion_content.pop("mistakes", None)
        without_matrix.pop("mistakes", None)
        matrix_rows = confusion_content.get("confusion", [])
        matrix_sizes = {len(matrix_rows), class_count, *map(len, matrix_rows)}  # one size if valid
        if confusion_content and (len(matrix_sizes) > 1 or not matrix_rows):
            self.problems.append(f"{file_name} contains no square confusion matrix")
            return without_matrix
        return confusion_content


def _sample_lines(raw_lines: list[str]) -> list[str]:
    """Select about MAX_SAMPLES_PER_HOST telemetry samples, including each process's first and last sample."""
    # Each process's first line is a header, which begins with the key `host`.
    first_indices = [
        line_index for line_index, raw_line in enumerate(raw_lines) if raw_line.startswith('{"host"')
    ]
    last_indices = {next_index - 1 for next_index in (*first_indices, len(raw_lines))}
    regular_indices = range(0, len(raw_lines), 1 + len(raw_lines) // MAX_SAMPLES_PER_HOST)
    sampled_indices = {*first_indices, *last_indices, *regular_indices} - {-1}  # no line precedes line 0
    return [raw_lines[line_index] for line_index in sorted(sampled_indices)]


def devices_text(settings: dict[str, Any]) -> str:
    """Return the devices as text, such as `2 x NVIDIA T4` or `1 x A, 1 x B`."""
    if not (devices := settings.get("devices")):
        return f"{settings.get('processes', '?')} x {settings.get('device', 'unknown device')}"
    return ", ".join(f"{devices.count(device)} x {device}" for device in dict.fromkeys(devices))


def host_count(settings: dict[str, Any]) -> int:
    """Return the number of hosts from a list of names (starts.jsonl) or a number (result.json)."""
    hosts = settings.get("hosts", 1)
    return hosts if isinstance(hosts, int) else len(hosts)


def strategy_and_devices(settings: dict[str, Any]) -> str:
    """Return the strategy and the devices as text, such as `DDP on 2 x NVIDIA T4`."""
    strategy, hosts = settings.get("strategy", "unknown strategy"), host_count(settings)
    strategy_title = STRATEGY_TITLES.get(strategy, strategy.replace("zero", "ZeRO-"))
    return f"{strategy_title} on {devices_text(settings)}" + (f", {hosts} hosts" if hosts > 1 else "")


def strategy_and_processes(settings: dict[str, Any]) -> str:
    """Return the strategy and the number of processes as text, such as `ddp x 2`."""
    return f"{settings.get('strategy', 'unknown')} x {settings.get('processes', '?')}"


def mixed_precision_text(settings: dict[str, Any]) -> str:
    """Describe the precision, for example `bf16, by autocast (weights and residual stream in fp32)`."""
    precision = settings.get("mixed_precision", "-")
    half_precision_text = HALF_PRECISION_TEXTS.get(settings.get("half_precision", ""))
    return f"{precision}, {half_precision_text}" if half_precision_text else precision


def recipe_change(start: RunStart, to_public_text: Callable[[str], str] = public_path) -> str:
    """Return how a start changed the checkpoint's recipe, for example `lr was 0.01, now 0.001`.

    Args:
        start: Start of a run.
        to_public_text: Function that converts a value (possibly a private path) to public text.
    """
    change_texts = []
    for flag, old_and_new in start.settings.get("changed", {}).items():
        if isinstance(old_and_new, list) and len(old_and_new) == 2:
            old_text, new_text = (to_public_text(flag_text(flag_value)) for flag_value in old_and_new)
            change_texts.append(f"{flag} was {old_text}, now {new_text}")
    return "; ".join(change_texts)


def resets_best_result(start_line: dict[str, Any]) -> bool:
    """Return True if a start changed the metric or the evaluated images.

    `start_line` is a line of starts.jsonl.
    """
    relevant_settings = {DATA_CONTENT, CROPPED_IMAGES, *declared_values("measures_best")}
    return not relevant_settings.isdisjoint(start_line.get("changed", {}))


def add_derived_values(start_line: dict[str, Any]) -> dict[str, Any]:
    """Return a line of starts.jsonl, extended by the values that result.json contains for this start."""
    flag_names = ("data", "batch_size", "epochs", "seed", "deterministic")
    recipe, _ = split_by_type(start_line.get("recipe", {}), VALUE_TYPES_BY_FILE["result.json"])
    derived_values = {flag_name: recipe[flag_name] for flag_name in flag_names if flag_name in recipe}
    if devices := start_line.get("devices"):
        derived_values |= {"processes": len(devices), "device": devices[0]}
    return derived_values | start_line


def evaluation_score(metrics_line: dict[str, Any], best_by: str) -> float:
    """Return the score, according to the metric `best_by`, of an evaluation in a line of metrics.jsonl."""
    value_by_metric = {
        metric: metrics_line[f"val/{metric}"] for metric in METRICS if f"val/{metric}" in metrics_line
    }
    return score(value_by_metric, best_by)


def flag_text(flag_value: Any) -> str:
    """Return a flag's value as users write it, or `unset` for None."""
    if isinstance(flag_value, list):
        return ",".join(map(str, flag_value)) or "none"
    return "unset" if flag_value is None else str(flag_value)


def fill_missing(values_by_key: dict[str, Any], all_keys: Iterable[str]) -> dict[str, Any]:
    """Return a copy of a dict in which missing keys have the value None."""
    return dict.fromkeys(all_keys) | values_by_key


def read_png_as_rgb(png_file: Path) -> Image.Image:
    """Read a PNG as an RGB image. Raise ValueError for any other file."""
    try:
        with Image.open(png_file, formats=["PNG"]) as image:
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"can't be read as an image ({type(error).__name__})") from None


def hash_compared_files(folder: Path) -> dict[str, str]:
    """Map each file that verify.py compares to its SHA-256, or to "" for a missing or too large file."""

    def hash_small_file(run_file: Path) -> str:
        is_small = run_file.is_file() and run_file.stat().st_size <= MAX_FILE_BYTES
        return sha256_of(run_file) if is_small else ""

    compared_files = [folder / file_name for file_name in COMPARED_FILES]
    compared_files += sorted(folder.glob("checkpoints/step_*/manifest.json"))
    return {str(run_file.relative_to(folder)): hash_small_file(run_file) for run_file in compared_files}
