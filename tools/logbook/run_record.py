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
from typing import Any

from PIL import Image

from onecurve.flags.fields import declared_values, without_removed
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
    in_turn,
    kept_starts,
    starts_in_order,
)
from onecurve.system.files import ValueType, parse_json, read_own_file, sha256_of, typed_values
from onecurve.system.paths import public_path
from onecurve.system.text import plural

# Every run folder contains at least one of these files and folders.
RUN_FILES = ("recipe.json", "result.json", "metrics.jsonl", "checkpoints")
VERIFIED = "verified.json"  # file that verify.py writes
BIT_FOR_BIT, EVALUATED_AGAIN = "bit for bit", "evaluated again"  # two kinds of verification
MEANING = {  # what each kind of verification proves if there is no difference
    BIT_FOR_BIT: "The replayed steps were trained again. Every logged value and every weight is bitwise"
    " identical, so this recipe produces these results in these steps. All other steps and the items below"
    " are not verified.",
    EVALUATED_AGAIN: "The best weights and the last weights reach the reported accuracies in a new"
    " evaluation, except for the few images that a repeated evaluation changes. It is not verified that this"
    " training run produced the weights. The differences in the replayed steps are reported without a"
    " verdict.",
}
COMPARED_FILES = ("recipe.json", "result.json", "metrics.jsonl", STARTS_FILE)  # files that verify.py compares
MOST_BYTES = 2**31  # maximum size of a file. 14 days of telemetry from 8 GPUs are smaller
MOST_SAMPLES = 5_000  # telemetry samples per host on a page. 64 hosts write 8 GB of samples a day
FEWEST_SPEEDS = 8  # minimum number of throughput values for deciles
UNFINISHED = "killed or still running"  # status of a run without a result
STRATEGIES = {"single": "one process", "ddp": "DDP", "fsdp": "FSDP2"}
HALF_PRECISION = {
    "autocast": "by autocast (weights and residual stream in fp32)",
    "weights": "weights and all activations",
}
KINDS: dict[str, dict[str, ValueType]] = {
    "recipe.json": value_types(RecipeFile),
    STARTS_FILE: value_types(StartLine),
    "result.json": value_types(Result),
    "metrics.jsonl": {**value_types(MetricsLine), "*": float},
    "telemetry.jsonl": value_types(TelemetryLine),
    "confusion.json": value_types(Confusion),
    "report.json": value_types(Report),
    VERIFIED: value_types(Verified),
}
for name in ("recipe.json", STARTS_FILE):
    del KINDS[name]["argv"]  # pages show `command`, which contains the words that the user typed


class RunRecord:
    """Contents of a run folder. Values with an unexpected type are left out.

    Attributes:
        problems: Messages about missing or broken files.
        settings: Contents of recipe.json.
        recipe: Values of the recipe's flags.
        metrics: Lines of metrics.jsonl.
        evaluations: Lines of metrics.jsonl that contain `val/loss`.
        telemetry: Lines of telemetry-<host>.jsonl by host.
        facts: Values in result.json. Missing values are `derived` from the other files.
        starts: Starts recorded in starts.jsonl, which earlier versions did not write.
        kept: Starts that trained steps of the final result.
        stamps: Outcomes of verify.py.
        reports: Reports of validate.py by name.

    Raises:
        ValueError: If the folder is not a run folder.
    """

    unknown: Set[str] = frozenset()  # result.json values that belong to a later start, after as_of()

    def __init__(self, folder: Path):
        if not any((folder / part).exists() for part in RUN_FILES):
            names = ", ".join(RUN_FILES)
            raise ValueError(f"{folder} is not a run folder. The folder contains none of these: {names}")
        self.folder = folder
        self.problems: list[str] = []
        self.settings = self._read_json("recipe.json")
        self.recipe = without_removed(self.settings.get("recipe", {}))
        self.metrics = self._read_lines("metrics.jsonl", {"step", "epoch", "wall_s"})
        self.evaluations = [line for line in self.metrics if "val/loss" in line]
        self.telemetry = {
            file.stem.removeprefix("telemetry-"): self._read_lines(file.name, {"t"}, "telemetry.jsonl")
            for file in sorted(folder.glob("telemetry-*.jsonl"))
        }
        if not self.telemetry and self.recipe.get("telemetry_s") != 0:
            self.problems.append("telemetry-<host>.jsonl is missing")
        result = self._read_json("result.json")
        start_lines = self._read_lines(STARTS_FILE, set()) if (folder / STARTS_FILE).exists() else []
        best_began = [line.get("step", 0) for line in start_lines if resets_best_result(line)]
        self.derived = self._derive_facts(max(best_began, default=0))
        self.facts = self.derived | result
        self.starts = starts_in_order([*map(add_derived_values, start_lines)], self.facts.get("steps", 0))
        self.kept = kept_starts(self.starts)
        shows_classes = self.facts["status"] == "finished" and "best_accuracy" in self.facts
        has_confusion = shows_classes or (folder / "confusion.json").exists()
        self.confusion = self._read_matrix("confusion.json") if has_confusion else {}
        stamps = self._read_json(VERIFIED) if (folder / VERIFIED).exists() else {}
        self.stamps: list[dict[str, Any]] = stamps.get("stamps", [])
        self.reports = {
            path.name: self._read_matrix(f"validation/{path.name}/report.json")
            for path in sorted(folder.glob("validation/*"))
            if path.is_dir()
        }

    @property
    def is_rehearsal(self) -> bool:
        devices = self.settings.get("devices") or [self.facts.get("device", "")]
        return any(device.startswith("CPU") for device in devices)

    @property
    def changes(self) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl that record hosts joining or leaving the job."""
        needed = {"hosts", "hosts_before", "processes", "processes_before"}
        return [line for line in self.metrics if needed <= set(line)]

    @property
    def interruptions(self) -> list[tuple[int, str, float | None]]:
        """Step, reason, and seconds until the next step, for each interruption by a signal."""
        stops: list[tuple[int, str, float | None]] = []
        for line in self.metrics:
            if "interrupted_at" in line:
                began = line["interrupted_at"]
                stops.append((line["step"], line.get("why", ""), None))
            elif "resumed_at" in line and stops and stops[-1][2] is None:
                stops[-1] = (*stops[-1][:2], line["resumed_at"] - began)
        return stops

    @property
    def fold(self) -> tuple[int, int] | None:
        """Fold index and number of folds, for example (2, 5) for `--fold 2/5`."""
        holdout = self.recipe.get("holdout")
        return parse_fold(holdout) if isinstance(holdout, str) else None

    @property
    def unit(self) -> str:
        """Plural name of a sample: `images`, unless recipe.json contains a different unit."""
        return self.settings.get("unit", "images")

    @property
    def identity(self) -> dict[str, str | None]:
        """Run folder and hash of the first line in metrics.jsonl.

        The time in this line makes the hash unique.
        """
        first = json.dumps(self.metrics[0], sort_keys=True) if self.metrics else None
        return {
            "run": public_path(self.folder.resolve()),
            "first_line": first and hashlib.sha256(first.encode()).hexdigest()[:16],
        }

    def host_summaries(self) -> Sequence[Mapping[str, Any]]:
        """Return a summary of each host's telemetry, in the format of result.json."""
        if "telemetry" in self.facts:
            return self.facts["telemetry"]
        from onecurve.telemetry.summary import summarize

        summaries = []
        for host in (host for host, lines in self.telemetry.items() if lines):
            # self.problems already lists these errors.
            with contextlib.suppress(OSError, ValueError, RecursionError):
                summaries.append(summarize(self.folder / f"telemetry-{host}.jsonl"))
        return summaries

    def _derive_facts(self, best_began: int) -> dict[str, Any]:
        """Derive result.json's values from the other files.

        Args:
            best_began: First step whose evaluation may be the best evaluation.
        """
        settings, recipe = self.settings, typed_values(self.recipe, KINDS["result.json"])[0]
        devices, hosts = settings.get("devices", []), settings.get("hosts", [])
        best_by = recipe.get("best_by", "accuracy")
        comparable = [line for line in self.evaluations if line["step"] >= best_began]
        best = max(comparable, key=lambda line: evaluation_score(line, best_by), default={})
        final = self.evaluations[-1] if self.evaluations else {}
        lines = chain(self.metrics, *self.telemetry.values())
        manifests = sorted(self.folder.glob("checkpoints/step_*/manifest.json"))
        values = {
            "status": "unknown" if (self.folder / "result.json").exists() else UNFINISHED,
            "processes": len(devices) or None,
            "hosts": len(hosts) or None,
            "device": devices[0] if devices else None,
            "steps": max((line["step"] for line in lines if "step" in line), default=None),
            "best_step": best.get("step"),
            **{f"best_{name}": best.get(f"val/{name}") for name in METRICS if name != "loss"},
            "best_loss": None if f"val/{best_by}" in best and best_by != "loss" else best.get("val/loss"),
            **{f"final_{name}": final.get(f"val/{name}") for name in METRICS},
            "checkpoint": f"checkpoints/{manifests[-1].parent.name}" if manifests else None,
        }
        names = ["script", "strategy", "compile", "grad_checkpointing", "step_graph"]
        names += ["mixed_precision", "half_precision", "gradient_reduction"]
        return {
            **{name: settings[name] for name in names if name in settings},
            **{name: recipe[name] for name in ("data", "batch_size", "epochs", "seed") if name in recipe},
            **{name: value for name, value in values.items() if value is not None},
        }

    @property
    def last(self) -> dict[str, Any]:
        """Settings of the last start that trained steps in the final result, in starts.jsonl's format."""
        if self.kept and self.kept[-1] is not self.starts[-1]:
            return self.facts | self.kept[-1].settings
        hosts = self.settings.get("hosts") or self.facts.get("hosts", 1)
        return self.settings | self.facts | {"hosts": hosts}

    def over_starts(self, value: Callable[[dict[str, Any]], Any]) -> Any:
        """Return the last start's setting, or text such as `a, then b` if the starts differ."""
        settings = [value(start.settings) for start in self.kept]
        values = ["unknown" if setting is None else str(setting) for setting in settings]
        return in_turn(values) if len(set(values)) > 1 else value(self.last)

    def as_of(self, start: RunStart) -> "RunRecord":
        """Return a copy of the run in which all starts have the given start's settings."""
        run, settings = copy.copy(self), start.settings
        if start is self.starts[-1]:
            run.settings = settings | self.settings
            return run
        run.settings = settings
        # Manifests from earlier versions lack some flags.
        run.recipe = ({} if start.is_recorded else self.recipe) | settings.get("recipe", {})
        run.facts = self.facts | {name: settings[name] for name in KINDS["result.json"] if name in settings}
        run.facts["hosts"] = host_count(settings)
        if {"epochs", "steps_per_epoch"} <= settings.keys():
            run.facts["total_steps"] = settings["epochs"] * settings["steps_per_epoch"]
        if any(resets_best_result(later.settings) for later in self.kept if later.first >= start.last):
            run.unknown = {"val_name", "val_images", "test_name", "test_images"}
        return run

    @property
    def is_one_job(self) -> bool:
        """True unless the strategy, the devices or the hosts changed during the run."""
        return not self.changes and len({where(start.settings) for start in self.kept}) <= 1

    @property
    def recipe_changes(self) -> list[str]:
        """Recipe changes by the kept starts, for example `step 100: lr was 0.01, now 0.001`."""
        return [f"step {start.first:,}: {text}" for start in self.kept if (text := recipe_change(start))]

    # --- In words

    @property
    def where(self) -> str:
        """Strategies and devices, for example `DDP on 2 x NVIDIA T4, then one process on 1 x NVIDIA T4`."""
        return self.over_starts(where)

    @property
    def job(self) -> str:
        """Strategies and processes without commas, for example `ddp x 2 then single x 1`."""
        return str(self.over_starts(job)).replace(", then", " then")

    @property
    def model(self) -> str:
        """Value of --model, or the script's name if the script has no such flag."""
        return str(self.recipe.get("model") or self.facts.get("script", "unknown script"))

    @property
    def data(self) -> str:
        return Path(self.facts.get("data", "unknown data")).name

    def evaluated_images(self, which: str = "val") -> str:
        """Describe the images that were evaluated during training ("val") or after training ("test")."""
        name, part = self.facts.get(f"{which}_name"), self.recipe.get("max_val_images")
        whole = f"{name} split" if name else "held-out images"
        return f"{part:,} images of the {whole}" if isinstance(part, int) else whole

    @property
    def claim(self) -> str:
        """The run's result as one line of plain text."""
        facts = self.facts
        headline_keys = ("test_accuracy", "final_accuracy", "test_loss", "final_loss")
        outcome = f"no evaluation of {self.data}"
        if key := next((key for key in headline_keys if key in facts), None):
            which, _, measure = key.partition("_")
            images = self.evaluated_images("test" if which == "test" else "val")
            outcome = f"reaches {measure} {facts[key]:.4f} on the {images} of {self.data}"
            outcome += f" with the best weights on the {self.evaluated_images()}" if which == "test" else ""
        last = max((line["epoch"] for line in self.metrics), default=0)
        epochs = f"{last:.3g} of {plural(facts.get('epochs', '?'), 'epoch')}"
        time = f", {facts['wall_s']:,.0f} s" if "wall_s" in facts else ""
        return f"{self.model} {outcome} in {epochs}{time}, {self.where}"

    @property
    def memory_gib(self) -> float | None:
        """Maximum peak memory over all processes, in GiB."""
        return max((process.get("peak") or 0 for process in self.facts.get("memory_gib", [])), default=None)

    @property
    def speed_spread(self) -> float | None:
        """Difference between the 90th and the 10th percentile of images/s, relative to the median.

        Each log line contributes one throughput value, except the first line, which includes the warm-up. The
        spread is None if the log contains too few lines.
        """
        speeds = [line.get("train/images_per_s", 0) for line in self.metrics]
        speeds = [speed for speed in speeds if 0 < speed < math.inf][1:]
        if len(speeds) < FEWEST_SPEEDS:
            return None
        deciles = statistics.quantiles(speeds, n=10, method="inclusive")
        return (deciles[-1] - deciles[0]) / deciles[4]

    @property
    def utilisation_pct(self) -> tuple[float | None, str]:
        """Mean GPU utilisation and `GPU`, or mean CPU utilisation and `CPU` if there are no GPUs."""
        hosts = self.host_summaries()
        for name, weight, device in (("utilisation_pct", "gpus", "GPU"), ("cpu_pct", "samples", "CPU")):
            measured = [host for host in hosts if host.get(name) is not None]
            weights = [host.get(weight) or 1 for host in measured]
            if measured:
                weighted = [host[name] * weight for host, weight in zip(measured, weights, strict=True)]
                return sum(weighted) / sum(weights), device
        return None, "device"

    # --- Reading

    def _file_content(self, name: str) -> bytes | None:
        try:
            return read_own_file(self.folder, name, MOST_BYTES)
        except FileNotFoundError:
            self.problems.append(f"{name} is missing")
        except OSError as error:
            self.problems.append(f"{name} can't be read: {error.strerror}")
        return None

    def _read_json(self, name: str) -> dict[str, Any]:
        content = self._file_content(name)
        if content is None:
            return {}
        try:
            values, wrong_keys = typed_values(parse_json(content, self.folder / name), KINDS[Path(name).name])
        except ValueError as error:
            self.problems.append(str(error).removeprefix(f"{self.folder}/"))
            return {}
        if wrong_keys:
            self.problems.append(f"{name} contains values of unexpected types: {', '.join(wrong_keys)}")
        return values

    def _read_lines(self, name: str, needed: set[str], kind: str | None = None) -> list[dict[str, Any]]:
        """Read the complete lines of a JSON Lines file. Skip lines that a kill or a full disk truncated.

        Args:
            name: File name.
            needed: Keys that every line must contain.
            kind: Key in KINDS. Default: `name`.
        """
        kind = kind or name
        content = self._file_content(name)
        if content is None:
            return []
        raw_lines = content.decode(errors="replace").splitlines()
        raw_lines = _sample_lines(raw_lines) if kind == "telemetry.jsonl" else raw_lines
        lines, broken_lines = [], 0
        for raw_line in raw_lines:
            try:
                values, wrong_keys = typed_values(parse_json(raw_line, name), KINDS[kind])
            except ValueError:
                values, wrong_keys = {}, [raw_line]
            if needed <= values.keys():
                lines.append(values)
            broken_lines += bool(wrong_keys) or not needed <= values.keys()
        if broken_lines:
            self.problems.append(f"{name} contains unreadable lines ({broken_lines} of {len(raw_lines)})")
        elif not raw_lines:
            self.problems.append(f"{name} is empty")
        return lines

    def _read_matrix(self, name: str) -> dict[str, Any]:
        """Read a file with a square confusion matrix or, for many classes, the most frequent mistakes."""
        content = self._read_json(name)
        class_count = len(content.get("classes", []))

        def is_valid(mistake: list[Any]) -> bool:
            return len(mistake) == 3 and all(label in range(class_count) for label in mistake[:2])

        mistakes = content.get("mistakes")
        if mistakes is not None and all(map(is_valid, mistakes)):
            return {key: value for key, value in content.items() if key != "confusion"}
        content.pop("mistakes", None)
        rows = content.get("confusion", [])
        sizes = {len(rows), len(content.get("classes", [])), *map(len, rows)}
        if content and (len(sizes) > 1 or not rows):
            self.problems.append(f"{name} contains no square confusion matrix")
            content = {key: value for key, value in content.items() if key != "confusion"}
        return content


def _sample_lines(raw_lines: list[str]) -> list[str]:
    """Select about MOST_SAMPLES telemetry samples, including each process's first and last sample."""
    first_lines = [number for number, raw_line in enumerate(raw_lines) if raw_line.startswith('{"host"')]
    sampled_numbers = {*first_lines, *(number - 1 for number in (*first_lines, len(raw_lines)))}
    sampled_numbers |= {*range(0, len(raw_lines), 1 + len(raw_lines) // MOST_SAMPLES)}
    return [raw_lines[number] for number in sorted(sampled_numbers - {-1})]


def device_summary(settings: dict[str, Any]) -> str:
    """Return the devices as text, such as `2 x NVIDIA T4` or `1 x A, 1 x B`."""
    if not (names := settings.get("devices")):
        return f"{settings.get('processes', '?')} x {settings.get('device', 'unknown device')}"
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def host_count(settings: dict[str, Any]) -> int:
    hosts = settings.get("hosts", 1)
    return hosts if isinstance(hosts, int) else len(hosts)


def where(settings: dict[str, Any]) -> str:
    """Return the strategy and the devices as text, such as `DDP on 2 x NVIDIA T4`."""
    strategy, hosts = settings.get("strategy", "unknown strategy"), host_count(settings)
    name = STRATEGIES.get(strategy, strategy.replace("zero", "ZeRO-"))
    return f"{name} on {device_summary(settings)}" + (f", {hosts} hosts" if hosts > 1 else "")


def job(settings: dict[str, Any]) -> str:
    """Return the strategy and the number of processes as text, such as `ddp x 2`."""
    return f"{settings.get('strategy', 'unknown')} x {settings.get('processes', '?')}"


def mixed_precision(settings: dict[str, Any]) -> str:
    """Describe the precision, for example `bf16, by autocast (weights and residual stream in fp32)`."""
    precision, half = settings.get("mixed_precision", "-"), settings.get("half_precision", "")
    return f"{precision}, {HALF_PRECISION[half]}" if half in HALF_PRECISION else precision


def recipe_change(start: RunStart, shown: Callable[[str], str] = public_path) -> str:
    """Return how a start changed the checkpoint's recipe, for example `lr was 0.01, now 0.001`.

    Args:
        start: Start of a run.
        shown: Function that converts a value (possibly a private path) to public text.
    """
    pairs = start.settings.get("changed", {}).items()
    return "; ".join(
        f"{name} was {shown(flag_text(pair[0]))}, now {shown(flag_text(pair[1]))}"
        for name, pair in pairs
        if isinstance(pair, list) and len(pair) == 2
    )


def resets_best_result(start: dict[str, Any]) -> bool:
    """Return True if a start changed the metric or the evaluated images.

    `start` is a line of starts.jsonl.
    """
    return not {DATA_CONTENT, CROPPED_IMAGES, *declared_values("measures_best")}.isdisjoint(
        start.get("changed", {})
    )


def add_derived_values(start_line: dict[str, Any]) -> dict[str, Any]:
    """Return a line of starts.jsonl with additional values that result.json derives from the line."""
    names = ("data", "batch_size", "epochs", "seed", "deterministic")
    recipe = typed_values(start_line.get("recipe", {}), KINDS["result.json"])[0]
    derived = {name: recipe[name] for name in names if name in recipe}
    if devices := start_line.get("devices"):
        derived |= {"processes": len(devices), "device": devices[0]}
    return derived | start_line


def evaluation_score(line: dict[str, Any], by: str) -> float:
    """Return the evaluation score in a line of metrics.jsonl."""
    return score({name: line[f"val/{name}"] for name in METRICS if f"val/{name}" in line}, by)


def flag_text(value: Any) -> str:
    """Return the value in the form that users write after a flag."""
    if isinstance(value, list):
        return ",".join(map(str, value)) or "none"
    return "unset" if value is None else str(value)


def fill_missing(values: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Add missing names with the value None."""
    return dict.fromkeys(names) | values


def read_picture(file: Path) -> Image.Image:
    """Read a PNG as an RGB image. Raise ValueError for any other file."""
    try:
        with Image.open(file, formats=["PNG"]) as image:
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"can't be read as an image ({type(error).__name__})") from None


def hash_compared_files(folder: Path) -> dict[str, str]:
    """Map each file that verify.py compares to its SHA-256, or to "" for a missing or too large file."""

    def hashed(file: Path) -> str:
        return sha256_of(file) if file.is_file() and file.stat().st_size <= MOST_BYTES else ""

    files = [folder / name for name in COMPARED_FILES]
    files += sorted(folder.glob("checkpoints/step_*/manifest.json"))
    return {str(file.relative_to(folder)): hashed(file) for file in files}
