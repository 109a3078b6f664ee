"""Reads a run's folder, even when files in it are missing or broken."""

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

from PIL import Image

from common.system.files import Kind, fitting, parse_json, read_own, sha256_of
from common.system.paths import public_path

ABOUT: dict[str, Kind] = {
    **dict.fromkeys(
        ("script", "strategy", "resumed_from", "git_commit", "wandb_id", "wandb_url", "version"), str
    ),
    **dict.fromkeys(("source", "unit", "val_chosen"), str),
    **dict.fromkeys(("compile", "mixed_precision", "half_precision", "gradient_reduction"), str),
    "grad_checkpointing": bool,
    **dict.fromkeys(("recipe", "defaults", "sharding", "versions"), dict),
    **{name: list[str] for name in ("command", "hosts", "devices")},
}
RESULT: dict[str, Kind] = {
    **dict.fromkeys(("script", "status", "strategy", "mixed_precision", "device", "data"), str),
    **dict.fromkeys(("val_name", "test_name", "half_precision", "gradient_reduction"), str),
    **dict.fromkeys(("compile", "checkpoint", "best_checkpoint", "error", "stopped_by"), str),
    **dict.fromkeys(("hosts", "processes", "batch_size", "per_device_batch_size", "accumulation_steps"), int),
    **dict.fromkeys(
        ("epochs", "steps", "total_steps", "best_step", "val_images", "test_images", "seed"), int
    ),
    **dict.fromkeys(("best_accuracy", "best_loss", "final_accuracy", "final_loss"), float),
    **dict.fromkeys(("test_accuracy", "test_loss"), float),
    **dict.fromkeys(("train_s", "wall_s", "images_per_s", "energy_wh"), float),
    **dict.fromkeys(("flops_per_image", "peak_flops", "mfu_pct"), float),
    "spent_s": {"*": float},
    "memory_gib": [{"*": float}],
    "telemetry": [{"host": str, "throttle": list[str], "*": float}],
    **dict.fromkeys(("grad_checkpointing", "deterministic", "uploaded"), bool),
}
METRICS_LINE: dict[str, Kind] = {
    **dict.fromkeys(("step", "hosts", "hosts_before", "processes", "processes_before"), int),
    "why": str,
    "*": float,
}
TELEMETRY_LINE: dict[str, Kind] = {
    **dict.fromkeys(("t", "cpu_pct", "memory_gib", "cpus"), float),
    "host": str,  # in a header only, as are the next two, of the main process's alone
    **dict.fromkeys(("before_s", "age_s"), float),
    "step": int,  # in a sample only
    "gpus": [{"index": int, "throttle": list[str], "*": float}],
}
CONFUSION: dict[str, Kind] = {
    **{"step": int, "classes": list[str], "confusion": list[list[int]]},
    "split": str,  # in confusion.json: of the best weights on the test split alone
}
REPORT = CONFUSION | {
    **dict.fromkeys(("checkpoint", "device", "strategy"), str),
    **dict.fromkeys(("loss", "top1", "top5", "expected_calibration_error", "images_per_s"), float),
    "images": int,
    "per_class": {"*": list[float]},
}
PARTS = ("recipe.json", "result.json", "metrics.jsonl", "checkpoints")  # a run's folder has one of them
VERIFIED = "verified.json"  # by verify.py
STAMP: dict[str, Kind] = {
    **dict.fromkeys(("date", "commit", "device", "config", "mixed_precision"), str),
    **dict.fromkeys(("steps", "of_steps"), int),
    **dict.fromkeys(("intervals", "checkpoints", "findings", "not_verified"), list[str]),
    **dict.fromkeys(("loss_difference", "bound"), float),
    "is_exact": bool,
    "files": {"*": str},  # name -> SHA-256
}
MOST_BYTES = 2**31  # larger files are not read: 14 days of telemetry of a host with 8 GPUs
UNFINISHED = "killed or still running"  # the status of a run without a result


class RunRecord:
    """The files of a run, without values of an unexpected type.

    problems: a line for each file that is missing or broken. facts: of result.json, or, where it lacks a
    value, derived from the other files. evaluations: the lines of metrics.jsonl with `val/loss`. ValueError
    when the folder is not a run's.
    """

    def __init__(self, folder: Path):
        if not any((folder / part).exists() for part in PARTS):
            raise ValueError(f"{folder} is no run's folder: it has none of {', '.join(PARTS)}")
        self.folder = folder
        self.problems: list[str] = []
        self.about = self._read("recipe.json", ABOUT)
        self.recipe = self.about.get("recipe", {})
        self.metrics = self._read_lines("metrics.jsonl", METRICS_LINE, {"step", "epoch", "wall_s"})
        self.evaluations = [line for line in self.metrics if "val/loss" in line]
        self.telemetry = {
            file.stem.removeprefix("telemetry-"): self._read_lines(file.name, TELEMETRY_LINE, {"t"})
            for file in sorted(folder.glob("telemetry-*.jsonl"))
        }
        if not self.telemetry and self.recipe.get("telemetry_s") != 0:
            self.problems.append("telemetry-<host>.jsonl is missing")
        result = self._read("result.json", RESULT)
        self.facts = self._derived() | result
        shows_classes = self.facts["status"] == "finished" and "best_accuracy" in self.facts
        has_confusion = shows_classes or (folder / "confusion.json").exists()
        self.confusion = self._matrix("confusion.json", CONFUSION) if has_confusion else {}
        stamps = self._read(VERIFIED, {"stamps": [STAMP]}) if (folder / VERIFIED).exists() else {}
        self.stamps: list[dict[str, Any]] = stamps.get("stamps", [])
        self.reports = {
            path.name: self._matrix(f"validation/{path.name}/report.json", REPORT)
            for path in sorted(folder.glob("validation/*"))
            if path.is_dir()
        }

    @property
    def is_rehearsal(self) -> bool:
        devices = self.about.get("devices") or [self.facts.get("device", "")]
        return any(device.startswith("CPU") for device in devices)

    @property
    def changes(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl on hosts that joined or left."""
        needed = {"hosts", "hosts_before", "processes", "processes_before"}
        return [line for line in self.metrics if needed <= set(line)]

    @property
    def interruptions(self) -> list[tuple[int, str, float | None]]:
        """The stops by a signal or a notice: step, reason, and seconds to the first step after each."""
        found: list[tuple[int, str, float | None]] = []
        for line in self.metrics:
            if "interrupted_at" in line:
                began = line["interrupted_at"]
                found.append((line["step"], line.get("why", ""), None))
            elif "resumed_at" in line and found and found[-1][2] is None:
                found[-1] = (*found[-1][:2], line["resumed_at"] - began)
        return found

    @property
    def unit(self) -> str:
        """The name of a sample: `images`, unless recipe.json has another."""
        return self.about.get("unit", "images")

    @property
    def identity(self) -> dict[str, str | None]:
        """The folder and a hash of the first line of metrics, which is unique by the time in it."""
        first = json.dumps(self.metrics[0], sort_keys=True) if self.metrics else None
        return {
            "run": public_path(self.folder.resolve()),
            "first_line": first and hashlib.sha256(first.encode()).hexdigest()[:16],
        }

    def host_summaries(self) -> list[dict[str, Any]]:
        """Summaries of the telemetry, as in the result.json of a finished run."""
        if "telemetry" in self.facts:
            return self.facts["telemetry"]
        from common.telemetry.summary import summarize

        found = []
        for host in (host for host, lines in self.telemetry.items() if lines):
            with contextlib.suppress(OSError, ValueError, RecursionError):  # it is among the problems
                found.append(summarize(self.folder / f"telemetry-{host}.jsonl"))
        return found

    def _derived(self) -> dict[str, Any]:
        """The values of result.json that can be derived from the other files."""
        about, recipe = self.about, fitting(self.recipe, RESULT)[0]
        devices, hosts = about.get("devices", []), about.get("hosts", [])
        best = max(self.evaluations, key=score, default={})
        final = self.evaluations[-1] if self.evaluations else {}
        lines = [self.metrics, *self.telemetry.values()]
        saved = sorted(self.folder.glob("checkpoints/step_*/manifest.json"))
        found = {
            "status": "not known" if (self.folder / "result.json").exists() else UNFINISHED,
            "processes": len(devices) or None,
            "hosts": len(hosts) or None,
            "device": devices[0] if devices else None,
            "steps": max((line["step"] for part in lines for line in part if "step" in line), default=None),
            "best_accuracy": best.get("val/accuracy"),
            "best_step": best.get("step"),
            "final_accuracy": final.get("val/accuracy"),
            "final_loss": final.get("val/loss"),
            "checkpoint": f"checkpoints/{saved[-1].parent.name}" if saved else None,
        }
        names = ["script", "strategy", "compile", "grad_checkpointing"]
        names += ["mixed_precision", "half_precision", "gradient_reduction"]
        return {
            **{name: about[name] for name in names if name in about},
            **{name: recipe[name] for name in ("data", "batch_size", "epochs", "seed") if name in recipe},
            **{name: value for name, value in found.items() if value is not None},
        }

    # --- Reading

    def _bytes(self, name: str) -> bytes | None:
        try:
            return read_own(self.folder, name, MOST_BYTES)
        except FileNotFoundError:
            self.problems.append(f"{name} is missing")
        except OSError as error:
            self.problems.append(f"{name} can't be read: {error.strerror}")
        return None

    def _read(self, name: str, kinds: dict[str, Any]) -> dict[str, Any]:
        content = self._bytes(name)
        if content is None:
            return {}
        try:
            kept, odd = fitting(parse_json(content, self.folder / name), kinds)
        except ValueError as error:
            self.problems.append(str(error).removeprefix(f"{self.folder}/"))
            return {}
        if odd:
            self.problems.append(f"{name} has unexpected types in {', '.join(odd)}")
        return kept

    def _read_lines(self, name: str, kinds: dict[str, Any], needed: set[str]) -> list[dict[str, Any]]:
        """The lines, without those that a kill or a full disk has cut."""
        content = self._bytes(name)
        if content is None:
            return []
        texts = content.decode(errors="replace").splitlines()
        lines, broken = [], 0
        for text in texts:
            try:
                kept, odd = fitting(parse_json(text, name), kinds)
            except ValueError:
                kept, odd = {}, [text]
            if needed <= kept.keys():
                lines.append(kept)
            broken += bool(odd) or not needed <= kept.keys()
        if broken:
            self.problems.append(f"{name} has {broken} of {len(texts)} lines that can't be read")
        elif not texts:
            self.problems.append(f"{name} is empty")
        return lines

    def _matrix(self, name: str, kinds: dict[str, Any]) -> dict[str, Any]:
        """A file with a confusion matrix, which must be square."""
        found = self._read(name, kinds)
        rows = found.get("confusion", [])
        sizes = {len(rows), len(found.get("classes", [])), *map(len, rows)}
        if found and (len(sizes) > 1 or not rows):
            self.problems.append(f"{name} has no square matrix of its classes")
            found = {key: value for key, value in found.items() if key != "confusion"}
        return found


def read_picture(file: Path) -> Image.Image:
    """The pixels of a PNG, in RGB. ValueError for any other file."""
    try:
        with Image.open(file, formats=["PNG"]) as image:
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"can't be read as a picture: {type(error).__name__}") from None


def stamped_files(folder: Path) -> dict[str, str]:
    """The SHA-256 of the files that verify.py compares; empty for one that is missing or too large."""

    def hashed(file: Path) -> str:
        return sha256_of(file) if file.is_file() and file.stat().st_size <= MOST_BYTES else ""

    files = [folder / name for name in ("recipe.json", "result.json", "metrics.jsonl")]
    files += sorted(folder.glob("checkpoints/step_*/manifest.json"))
    return {str(file.relative_to(folder)): hashed(file) for file in files}


def score(evaluation: dict[str, float]) -> float:
    """The order by which RunState chooses the best evaluation."""
    return evaluation.get("val/accuracy", -evaluation["val/loss"])
