"""Tests of verify.py on finished runs, and on copies of runs with one forged statement each."""

import hashlib
import json
import random
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import verify
from onecurve.flags.recipe import METRICS
from onecurve.run.evaluation import mean_of_classes
from tests.checkpoint.test_checkpoints import forge
from tests.conftest import RESNET, ROOT, VIT, Job, accelerate, full, lines, python, run
from tests.support.commands import call
from tests.support.data_sets import data_set, png
from tools.logbook.page import run_page
from tools.logbook.run_record import RunRecord
from tools.verify import replay, verification
from tools.verify.replay import contradictions

# The run has 4 epochs of 8 steps. Each epoch ends with an evaluation and a checkpoint that is kept.
STEPS = 32
FLAGS = ["--epochs", 4, "--batch_size", 8, "--per_device_batch_size", 4, "--holdout", 16, "--log_every", 2]
FLAGS += ["--checkpoint_every", 8, "--keep_every", 8, "--checkpoint_s", 0, "--workers", 0]
FLAGS += ["--trackers", "none", "--telemetry_s", 0, "--mixup", 0, "--cutmix", 0, "--warmup", 0]
FLAGS += ["--drop_path", 0]  # Drop path depends on per_device_batch_size and is therefore disabled


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return data_set(tmp_path_factory.mktemp("data") / "pictures", train=80, val=16)


def trained(data: Path, cache: list, folder: Path, precision: str, *flags, launcher=()) -> Path:
    words = [*(launcher or python()), *VIT, "--data", data, *FLAGS, "--mixed_precision", precision, *cache]
    run([*words, *flags, "--output_dir", folder])
    return folder


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory, cache) -> Path:
    """Train a run with --deterministic, an EMA, held-out images and a test split."""
    return trained(data, cache, tmp_path_factory.mktemp("finished") / "run", "no", "--deterministic")


@pytest.fixture(scope="module")
def half(data, tmp_path_factory, cache) -> Path:
    """Train a run with the same flags in bf16 without --deterministic."""
    return trained(data, cache, tmp_path_factory.mktemp("half") / "run", "bf16")


def verified(folder: Path, cache: list, *flags) -> tuple[int, str, dict]:
    """Run verify.py and return its exit status, its output and the verification stamp."""
    status, output = Job([*python(), "verify.py", folder, *flags, *cache]).wait()
    return status, output, last_stamp(folder)


def last_stamp(folder: Path) -> dict:
    file = folder / "verified.json"
    return json.loads(file.read_text())["stamps"][-1] if file.exists() else {}


@pytest.fixture(scope="module")
def replays(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("replays")


@pytest.fixture
def check(replays, cache, monkeypatch, capsys):
    """Return a function that runs verify.py in this process and launches identical replays only once."""

    def launch(words: list[str], env: dict[str, str]) -> tuple[int, str]:
        first = words.index("--config")
        flags = dict(zip(words[first::2], words[first + 1 :: 2], strict=True))
        depends = [words[1:first], Path(flags.pop("--config")).read_text()]
        if "--resume" in flags:
            depends.append((Path(flags.pop("--resume")) / "manifest.json").read_text())
        folder = Path(flags.pop("--output_dir"))
        same = replays / hashlib.sha256(str([depends, flags]).encode()).hexdigest()
        if not same.exists():
            status, output = Job(words, env={"PYTHONPATH": str(ROOT)} | env).wait()
            if status:
                return status, output
            folder.rename(same)
        shutil.copytree(same, folder)
        return 0, ""

    def checked(folder: Path, *flags) -> tuple[int, str, dict]:
        monkeypatch.setattr(sys, "argv", [str(word) for word in ("verify.py", folder, *flags, *cache)])
        status = verify.main()
        return status, capsys.readouterr().out, last_stamp(folder)

    monkeypatch.setattr(verification, "run_replay", launch)
    return checked


def only(start: int, steps: int = 8) -> list:
    """Return the flags that verify only `steps` steps, starting at step `start`."""
    starts = list(range(0, STEPS, steps))
    seed = next(s for s in range(100) if random.Random(s).sample(starts, 1) == [start])
    return ["--sample", 1, "--seed", seed, "--steps", steps]


def copy_of(folder: Path, tmp_path: Path) -> Path:
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "verified.json").unlink(missing_ok=True)
    return tmp_path / "copy"


def edit(file: Path, change) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def edit_about(folder: Path, change) -> None:
    """Apply the same change to recipe.json and starts.jsonl."""
    edit(folder / "recipe.json", change)
    starts = lines(folder / "starts.jsonl")
    for start in starts:
        change(start)
    (folder / "starts.jsonl").write_text("".join(json.dumps(start) + "\n" for start in starts))


def edit_log(folder: Path, change) -> None:
    """Change each line of the log, and remove the lines for which `change` returns None."""
    log = [changed for line in lines(folder / "metrics.jsonl") if (changed := change(line)) is not None]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))


def sign(folder: Path, step: int, **changes) -> None:
    """Rewrite a checkpoint's manifest with the given changes and the files' current hashes."""
    forge(folder / "checkpoints" / f"step_{step:08d}", **changes)


# --- Forgeries, each of which changes a copy of a run


def in_result(**changes):
    return lambda folder: edit(folder / "result.json", lambda facts: facts.update(changes))


def in_lines(name: str, step: int | None = None, change=None, **changes):
    """Return a forgery that changes all log lines that contain a value with this name.

    Args:
        name: Name of the value.
        step: Step of the only log line to change. By default, every line with the value is changed.
        change: Function that maps the old value to the new value.
        changes: Other values to set in the log line.
    """

    def changed(line: dict) -> dict:
        if name not in line or step not in (None, line["step"]):
            return line
        return line | changes | ({name: change(line[name])} if change else {})

    return lambda folder: edit_log(folder, changed)


def in_tensors(step: int, file: str, change, only: str = ""):
    """Return a forgery that changes the tensors whose names end with `only`."""

    def edited(folder: Path) -> None:
        path = folder / "checkpoints" / f"step_{step:08d}" / f"{file}.safetensors"
        tensors = {name: change(t) if name.endswith(only) else t for name, t in load_file(path).items()}
        save_file({name: t.contiguous() for name, t in tensors.items()}, path)
        sign(folder, step)

    return edited


def in_recipe(**changes):
    """Return a forgery that changes recipe.json and all manifests."""

    def change(folder: Path) -> None:
        edit(folder / "recipe.json", lambda record: record["recipe"].update(changes))
        for step in (8, 16, 24, 32):
            manifest = json.loads((folder / f"checkpoints/step_{step:08d}/manifest.json").read_text())
            sign(folder, step, recipe=manifest["recipe"] | changes)

    return change


def both(*forgeries):
    return lambda folder: [forge(folder) for forge in forgeries]


def lines_without_rate(folder: Path) -> None:
    def change(line):
        if "train/loss" not in line or line["step"] % 4:
            return line
        return {k: v for k, v in line.items() if k != "train/lr"} | {"train/loss": line["train/loss"] * 0.1}

    edit_log(folder, change)


def log_cut(folder: Path) -> None:
    edit_log(folder, lambda line: line if line["step"] <= 16 else None)


def run_cut(folder: Path) -> None:
    """Shorten the run as if training had ended at step 16 of 32."""
    log_cut(folder)
    last = lines(folder / "metrics.jsonl")[-1]
    for step in (24, 32):
        shutil.rmtree(folder / "checkpoints" / f"step_{step:08d}")
    facts = {"steps": 16, "best_step": 16, "final_accuracy": last["val/accuracy"]}
    in_result(**facts, best_accuracy=last["val/accuracy"], final_loss=last["val/loss"])(folder)


def repeated_line(folder: Path) -> None:
    log = folder / "metrics.jsonl"
    best = max(lines(log), key=lambda line: line.get("val/accuracy", 0))
    log.write_text(log.read_text() + json.dumps(best) + "\n")


def loss_in_a_state(folder: Path) -> None:
    """Change the step of the last log line that a checkpoint's state records."""
    edit(folder / "checkpoints/step_00000008/state.json", lambda state: state.update(logged_step=7))
    sign(folder, 8)


def false_bf16(folder: Path) -> None:
    for name in ("recipe.json", "result.json"):
        edit(folder / name, lambda record: record.update(mixed_precision="bf16", half_precision="autocast"))


def other_classes(folder: Path) -> None:
    for step in (8, 16, 24, 32):
        sign(folder, step, classes=["cat", "dog"])


def changed_rate(folder: Path) -> None:
    edit(folder / "recipe.json", lambda record: record["recipe"].update(lr=0.004))


def damaged_checkpoint(folder: Path) -> None:
    file = folder / "checkpoints" / "step_00000008" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")


def other_machine(folder: Path) -> None:
    """Change devices, times, speeds, the commit, and a flag that the script does not define."""
    edit_log(folder, lambda line: line | {"wall_s": line["wall_s"] / 9})
    in_lines("train/loss", **{"train/images_per_s": 1e6})(folder)
    edit_about(folder, lambda record: record.update(devices=["CPU of 1 TFLOP/s"], git_commit="beef"))
    edit_about(folder, lambda record: record["recipe"].update(teacher="resnet152"))
    in_result(train_s=1.0, images_per_s=1e6)(folder)


def smaller_loss(by: float):
    return in_lines("train/loss", 4, lambda loss: loss - by)


def in_starts(*changes: dict):
    """Append a start for each dictionary of changes, which may contain recipe flags and other values."""

    def change(folder: Path) -> None:
        first = lines(folder / "starts.jsonl")[0]
        starts = [
            first | start_changes | {"recipe": first["recipe"] | start_changes.get("recipe", {})}
            for start_changes in changes
        ]
        (folder / "starts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in starts))

    return change


def added_evaluations(folder: Path, accuracy_share: float = 1.0) -> None:
    """Add evaluations at steps 3 and 5 of the first epoch, with a fraction of the best accuracy."""
    log = lines(folder / "metrics.jsonl")
    best = max(log, key=lambda line: line.get("val/accuracy", 0))
    values = {key: value for key, value in best.items() if key.startswith("val/")}
    values["val/accuracy"] *= accuracy_share
    early = [{"step": step, "epoch": step / 8, "wall_s": 0.1} | values for step in (3, 5)]
    log = sorted([*log, *early], key=lambda line: line["step"])
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))


early_ends = in_starts({"recipe": {"max_steps": 3}}, {"recipe": {"max_steps": 5}}, {})
accuracy_in_result = in_result(test_accuracy=0.9999)
accuracies_in_result = in_result(best_accuracy=0.9999, final_accuracy=0.9999)
accuracy_everywhere = both(in_lines("val/loss", **{"val/accuracy": 0.9999}), accuracies_in_result)
checkpoints_removed = both(lambda folder: shutil.rmtree(folder / "checkpoints"), accuracy_everywhere)
random_ema, other_seed = in_tensors(32, "ema", torch.randn_like), in_recipe(seed=7)
forged_test_accuracy = both(in_lines("test/loss", **{"test/accuracy": 0.9999}), accuracy_in_result)
random_second = in_tensors(16, "model", torch.randn_like)
tensor_of_nan = in_tensors(8, "model", lambda t: t * torch.nan, "head.weight")
zero_moments = in_tensors(8, "optimizer", torch.zeros_like, "head.weight/exp_avg")
off_by_a_tenth = in_tensors(16, "model", lambda t: t + 0.099, "head.weight")

FIRST = only(0)
# Steps to verify for forgeries that are visible only in the last steps or in the second checkpoint
LONGER = {"log cut": only(16, 16), "random EMA": only(16, 16), "random second checkpoint": only(0, 16)}
LONGER["repeated line"] = ["--steps", 16]
FORGERIES = {
    "accuracy everywhere": (accuracy_everywhere, "val/accuracy of step 8 is 0.9999, but 0."),
    "lines without rate": (
        lines_without_rate,
        "train/lr of step 4 appears 0 times in the log, but 1 time in",
    ),
    "log cut": (log_cut, "train/loss of step 18 appears 0 times in the log, but 1 time in the replay"),
    "random EMA": (random_ema, "in step_00000032/ema.safetensors differs by"),
    "random second checkpoint": (random_second, "in step_00000016/model.safetensors differs by"),
    "tensor of NaN": (tensor_of_nan, "head.weight in step_00000008/model.safetensors is not finite"),
    "false bf16": (false_bf16, "in step_00000008/model.safetensors differs by"),
    "false bf16 and loss": (both(false_bf16, smaller_loss(0.03)), "train/loss of step 4 is "),
    # An EMA decay above 0.5 would take effect at a later step.
    "other EMA decay": (in_recipe(ema_decay=0.3), "in step_00000008/ema.safetensors differs by"),
    "test accuracy": (forged_test_accuracy, " is 0.9999, but 0."),
    "accuracy in result": (accuracy_in_result, "test_accuracy is 0.9999 in result.json, but 0."),
    "other title": (in_result(epochs=400, batch_size=4096), "epochs is 400, but 4 in the replay"),
    "parameters": (in_result(parameters=7), "parameters is 7, but "),
    "total steps": (in_result(total_steps=320), "total_steps is 320, but 32 in the replay"),
    "run cut": (run_cut, "steps is 16 in result.json, but 32 according to the recipe and the log"),
    "epochs in a line": (in_lines("test/loss", epoch=90.0), "the log contains a wrong epoch for step 32: 90"),
    "added evaluations": (
        added_evaluations,
        "the log contains an evaluation at step 3, but neither an epoch nor",
    ),
    "other start": (
        in_starts({"recipe": {"lr": 0.1}}),
        "recipe in recipe.json differs from the last start",
    ),
    "repeated line": (repeated_line, " appears 2 times in the log, but 1 time in the replay"),
    "infinite loss": (
        in_lines("train/loss", 6, lambda _: torch.nan),
        "metrics.jsonl contains unreadable lines (1 of",
    ),
    "moments of zero": (zero_moments, "exp_avg in step_00000008/optimizer.safetensors differs by"),
    "loss in a state": (loss_in_a_state, "state.json/logged_step of step 8 is 7, but 8 in the replay"),
    "other classes": (other_classes, "the classes in step_00000008 are cat, dog, but a, b in the replay"),
    "forged loss": (smaller_loss(0.01), "train/loss of step 4 is "),
    "changed rate": (changed_rate, "the checkpoint of step 8 was trained with lr 0.0005, not 0.004"),
    "other seed": (other_seed, "train/loss of step 2 is "),
    "damaged checkpoint": (damaged_checkpoint, "model.safetensors does not match the SHA-256"),
}


def test_evaluations_that_no_replay_repeats_are_not_verified(finished, check, tmp_path):
    """Add starts that ended at steps 3 and 5 because of --max_steps and left no checkpoints."""
    folder = copy_of(finished, tmp_path)
    added_evaluations(folder, accuracy_share=0.5)
    early_ends(folder)
    status, output, stamp = check(folder, *FIRST)
    assert status == 0, output
    statement = "evaluations within an epoch, at steps without a checkpoint (3, 5)"
    assert any(statement == line for line in stamp["not_verified"]), output


def test_an_early_end_is_no_contradiction(finished, tmp_path):
    folder = copy_of(finished, tmp_path)
    run_cut(folder)
    assert any(line.startswith("steps is 16") for line in contradictions(RunRecord(folder), [8, 16]))
    in_result(stopped_by="--patience 1")(folder)
    assert not [line for line in contradictions(RunRecord(folder), [8, 16]) if line.startswith("steps is")]


# Forgeries that launch separate replays
SLOW = {"random second checkpoint", "repeated line", "false bf16", "other EMA decay", "other seed"}
SLOW |= {"false bf16 and loss"}


@pytest.mark.parametrize("forgery", [full(name) if name in SLOW else name for name in FORGERIES])
def test_a_forgery_is_detected(forgery, finished, check, tmp_path):
    forge, message = FORGERIES[forgery]
    folder = copy_of(finished, tmp_path)
    forge(folder)
    status, output, stamp = check(folder, *LONGER.get(forgery, FIRST))
    assert (status, message in output) == (1, True), output
    assert f"**{len(stamp['findings'])} difference" in run_page(RunRecord(folder), "x", [])


def test_a_deterministic_run_of_two_processes_is_equal_bit_for_bit(data, cache, check, tmp_path):
    flags = ["--deterministic", "--dropout", "0.1", "--epochs", 1]
    trained(data, cache, tmp_path / "run", "no", *flags, launcher=accelerate("ddp_2gpu"))
    status, output, stamp = check(tmp_path / "run", *FIRST)
    assert (status, stamp["kind"], max(stamp["differences"].values())) == (0, "bit for bit", 0), output
    assert "steps 0-8 of 8: bitwise identical. The log, data, recipe and weights match the page" in output
    assert "so this recipe produces these results" in run_page(RunRecord(tmp_path / "run"), "x", [])
    smaller_loss(1e-9)(tmp_path / "run")
    status, output, _ = check(tmp_path / "run", *FIRST)
    assert (status, ", a difference of 1.0e-09" in output) == (1, True), output


# Forgeries of a run without --deterministic: the change, the exit status and the message. The status is 0 if
# verify.py reports the difference without a verdict. `make test` runs the first three forgeries.
EVALUATED = {
    "nothing": (lambda _: None, 0, "100.0%) and 4 of 4 checkpoints replayed, evaluated again: no difference"),
    "learning rate": (in_lines("train/lr", 4, lambda _: 1.0), 1, "train/lr of step 4 is 1, but 0."),
    "a loss": (smaller_loss(0.5), 0, "steps 0-16 of 32: largest differences: loss 5."),
    "raised test accuracy": (forged_test_accuracy, 1, "test/accuracy of step "),
    "checkpoints removed": (checkpoints_removed, 1, "at step 32, which the"),
    "last weights replaced": (in_tensors(32, "ema", torch.neg, "head.weight"), 1, "val/loss of step 32 is "),
    "classes": (other_classes, 1, "the classes in step_00000008 are cat, dog, but a, b in the replay"),
    "weights on the way": (off_by_a_tenth, 0, "weights 9."),
}


@pytest.mark.parametrize("forgery", [*list(EVALUATED)[:3], *map(full, list(EVALUATED)[3:])])
def test_forgeries_of_a_run_that_is_evaluated_again(forgery, half, check, tmp_path):
    forge, expected, message = EVALUATED[forgery]
    folder = copy_of(half, tmp_path)
    forge(folder)
    status, output, stamp = check(folder, "--steps", 16)
    assert (status, message in output, stamp.get("kind")) == (expected, True, "evaluated again"), output
    text = run_page(RunRecord(folder), "x", [])
    assert ("It is not verified that this training run produced the weights" in text) == (expected == 0)
    assert "not verified: " in text
    assert "bitwise equality (the run was trained without --deterministic)" in text


def test_the_metric_of_best_by_is_bounded(data, cache, check, tmp_path):
    """Verify a run without --deterministic, whose 8 images per class bound the metric's change to 0.25."""
    flags = ["--epochs", 1, "--best_by", "macro_f1", "--ema_decay", 0]
    folder = trained(data, cache, tmp_path / "run", "no", *flags)
    assert check(folder, "--steps", 8)[0] == 0
    forged = in_result(best_macro_f1=0.999, final_macro_f1=0.999)
    both(in_lines("val/loss", **{"val/macro_f1": 0.999}), forged)(folder)
    status, output, _ = check(folder, "--steps", 8)
    assert (status, "val/macro_f1 of step 8 is 0.999, but 0." in output) == (1, True), output
    assert "A repeated evaluation changes the metric by at most 0.2500" in output


@pytest.mark.parametrize("name", replay.MAX_CLASS_METRIC_CHANGES)
def test_the_bound_of_a_metric_by_class_holds(name):
    """Check a metric's bound by changing random predictions for a few images.

    The largest observed change must be at least a fifth of the bound.
    """
    draw, closest = np.random.default_rng(0), 0.0
    for _ in range(300):
        sizes, images = draw.integers(1, 9, draw.integers(2, 6)), int(draw.integers(1, 4))
        labels = np.repeat(np.arange(len(sizes)), sizes)
        predicted = np.where(
            draw.random(len(labels)) < 0.7, labels, draw.integers(0, len(sizes), len(labels))
        )
        changed_predictions = predicted.copy()
        changed = draw.choice(len(labels), min(images, len(labels)), replace=False)
        changed_predictions[changed] = draw.integers(0, len(sizes), len(changed))
        values = []
        for guess in (predicted, changed_predictions):
            right = np.bincount(labels[guess == labels], minlength=len(sizes))
            counts = np.stack([sizes, np.bincount(guess, minlength=len(sizes)), right])
            values.append(mean_of_classes(METRICS[name], counts))
        bound = replay.max_mean_change(name, sizes.tolist(), images)
        assert abs(values[0] - values[1]) <= bound + 1e-12
        closest = max(closest, abs(values[0] - values[1]) / bound)
    assert closest > 0.2


@pytest.mark.full
def test_a_raised_headline_in_half_precision(cache, tmp_path):
    """Raise the accuracy by 24 of 360 images, which is within the spread of half-precision replays."""
    folder = tmp_path / "run"
    flags = ["--mixed_precision", "bf16", "--epochs", 1, "--lr", 3e-4]
    flags += ["--batch_size", 64, "--trackers", "none"]
    run([*python(), "train_cnn_a.py", "--data", "digits", *flags, *cache, "--output_dir", folder])
    status, output, stamp = verified(folder, cache)
    assert (status, stamp["kind"]) == (0, "evaluated again"), output
    # Change one weight by the size of a rounding error.
    in_tensors(22, "model", lambda bias: bias + 1e-7 * (torch.arange(10) == 0), "head.bias")(folder)
    in_lines("val/accuracy", change=lambda accuracy: accuracy + 24 / 360)(folder)
    names = ("best_accuracy", "final_accuracy")
    edit(folder / "result.json", lambda facts: facts.update({name: facts[name] + 24 / 360 for name in names}))
    status, output, _ = verified(folder, cache)
    message = "The difference is 24 images of 360, but a repeated evaluation changes at most 1"
    assert (status, message in output) == (1, True), output


def test_unverified_facts_are_listed(finished, check, tmp_path):
    folder = copy_of(finished, tmp_path)
    other_machine(folder)
    status, output, _ = check(folder, *FIRST)
    assert status == 0, output
    text = run_page(RunRecord(folder), "x", [])
    for statement in (
        "not verified: 24 steps; devices, hosts, strategy, model FLOPs, times, throughput and memory; ",
        "weights in the checkpoints at steps 16, 24, 32; flags that train_vit.py does not define: teacher",
    ):
        assert statement in output
        assert statement.replace("_", "\\_") in text or statement in text


def test_an_error_is_a_finding_of_its_interval(finished, check, tmp_path):
    folder = copy_of(finished, tmp_path)
    sign(folder, 16, format_version=2)
    status, output, stamp = check(folder, "--steps", 8)
    assert status == 1, output
    assert "steps 16-24 of 32: the checkpoint of step 16: " in output
    assert "format version 2, but this version of onecurve supports only versions 1 to 1" in output
    evaluations = [f"the evaluation at step {step}" for step in (8, 32)]
    assert stamp["intervals"] == ["steps 0-8", "steps 24-32", *evaluations]


def test_a_stamp_is_void_after_a_change(finished, check, tmp_path):
    """Check that a stamp becomes invalid when any compared file changes.

    Removing a checkpoint changes no statement on the page and keeps the stamp valid.
    """
    folder = copy_of(finished, tmp_path)
    assert check(folder, *FIRST)[0] == 0
    shutil.rmtree(folder / "checkpoints" / "step_00000024")
    assert "| **void** |" not in run_page(RunRecord(folder), "x", [])
    names = ["recipe.json", "starts.jsonl", "result.json", "metrics.jsonl"]
    for name in (*names, "checkpoints/step_00000016/manifest.json"):
        before = (folder / name).read_text()
        (folder / name).write_text(before + " ")
        text = run_page(RunRecord(folder), "x", [])
        assert "| **void** |" in text, name
        assert f"{name} changed since" in text.replace("\\_", "_"), name
        (folder / name).write_text(before)


# --- Runs without a forgery


def test_a_true_run(finished, check, tmp_path):
    folder = copy_of(finished, tmp_path)
    status, output, stamp = check(folder, "--steps", 16)
    assert status == 0, output
    assert "32 of 32 steps (100.0%) and 4 of 4 checkpoints replayed, bit for bit: no difference" in output
    assert stamp["intervals"][:2] == ["steps 0-16", "steps 16-32"]
    text = run_page(RunRecord(folder), "x", [])
    assert "### Verification by verify.py" in text
    assert "| one process on cpu | bit for bit | 32 of 32 | steps 0-16, " in text


@pytest.mark.full
@pytest.mark.parametrize("config", ["ddp_2gpu", "fsdp_2gpu", "zero2_2gpu", "zero3_4gpu"])
def test_a_true_run_is_verified_by_several_processes(config, finished, data, cache, tmp_path):
    """Verify a multi-process run with replays from one checkpoint to the next.

    Runs under ZeRO train without --deterministic, which ZeRO does not support.
    """
    if "zero" in config:
        folder, method = trained(data, cache, tmp_path / "run", "no"), "evaluated again"
    else:
        folder, method = copy_of(finished, tmp_path), "bit for bit"
    flags = ["--config_file", f"accelerate_configs/{config}.yaml"]
    flags += ["--per_device_batch_size", 2] if "4gpu" in config else []
    status, output, stamp = verified(folder, cache, *only(16), *flags)
    assert status == 0, output
    assert f"8 of 32 steps (25.0%) and 1 of 4 checkpoints replayed, {method}: no difference" in output
    assert stamp["differences"]["loss"] <= 1e-5
    assert f"| {config} on cpu | {method} | 8 of 32 | steps 16-24, " in run_page(RunRecord(folder), "x", [])


@pytest.mark.full
def test_a_run_with_batch_norm_is_verified_by_two_processes(cache, tmp_path):
    """Verify the last steps, whose learning rate is small.

    At this learning rate, rounding errors change BatchNorm's statistics more than a training step does.
    """
    folder, every = tmp_path / "run", ["--checkpoint_every", 10, "--keep_every", 10, "--checkpoint_s", 0]
    words = [*accelerate("ddp_2gpu"), *RESNET, "--data", "digits", "--epochs", 2, "--batch_size", 64, *every]
    words += ["--mixed_precision", "no", "--log_every", 5, "--trackers", "none"]
    run([*words, "--output_dir", folder, *cache])
    status, output, _ = verified(folder, cache, "--steps", 10)
    assert (status, "44 of 44 steps" in output) == (0, True), output


def test_a_run_with_many_checkpoints(data, cache, check, tmp_path):
    """Check that a replay keeps only the checkpoints that verify.py compares."""
    flags = ["--epochs", 1, "--checkpoint_every", 2, "--keep_every", 2]
    folder = trained(data, cache, tmp_path / "run", "no", *flags)
    status, output, _ = check(folder, "--steps", 8)
    assert status == 0, output
    assert "8 of 8 steps (100.0%) and 4 of 4 checkpoints replayed, evaluated again: no difference" in output


def test_a_changed_recipe_is_replayed_and_listed(data, cache, check, tmp_path):
    """Check a run whose learning rate changed at step 8 of 16.

    Both replays must be bitwise identical to the run, and the page must report the change.
    """
    folder, flags = tmp_path / "run", ["--deterministic", "--epochs", 2]
    trained(data, cache, folder, "no", *flags, "--max_steps", 8)
    trained(data, cache, folder, "no", *flags, "--lr", 0.001, "--allow_changed", "lr")
    status, output, stamp = check(folder, "--steps", 8)
    change = "step 8: lr was 0.0005, now 0.001"
    assert (status, f"the recipe changed at {change}" in output) == (0, True), output
    assert "16 of 16 steps (100.0%) and 2 of 2 checkpoints replayed, bit for bit: no difference" in output
    assert (stamp["kind"], stamp["recipe_changes"]) == ("bit for bit", [change])
    assert f"the recipe changed at {change}" in run_page(RunRecord(folder), "x", [])


def test_a_run_that_began_with_the_checkpoint_of_another_run(data, finished, cache, check, tmp_path):
    """Replay the steps before a run's first checkpoint from the run that was resumed, if it still exists."""
    other = copy_of(finished, tmp_path) / "checkpoints" / "step_00000016"
    flags = ["--lr", 0.001, "--allow_changed", "lr", "--resume", other]
    folder = trained(data, cache, tmp_path / "run", "no", *flags)
    shutil.rmtree(folder / "checkpoints" / "step_00000016")  # Longer runs prune this checkpoint
    for share in ("16 of 16 steps", "8 of 32 steps"):
        status, output, _ = check(folder, "--steps", 8)
        is_gone = "the evaluation at step 16, which the headline reports, could not be repeated" in output
        assert (status, share in output) == (is_gone, True), output
        assert f"the training before {other}, which the run resumed" in output
        shutil.rmtree(other, ignore_errors=True)


def test_a_custom_script_is_verified(finished, check, tmp_path):
    folder, script = copy_of(finished, tmp_path), tmp_path / "train_mine.py"
    shutil.copy(ROOT / "train_vit.py", script)
    edit_about(folder, lambda record: record.update(script="train_mine"))
    edit(folder / "result.json", lambda record: record.update(script="train_mine"))
    with pytest.raises(ValueError, match=r"'train_mine'.*pass its path with --script"):
        check(folder, *FIRST)
    status, output, _ = check(folder, *FIRST, "--script", script)
    assert status == 0, output


def test_a_swapped_image_is_detected(data, finished, cache, tmp_path):
    """Check that a replaced picture is detected, because a hash of all pictures' bytes is recorded."""
    file = data / "train" / "b" / "3.png"
    before = file.read_bytes()
    file.write_bytes(png(999))
    try:
        status, output, _ = verified(copy_of(finished, tmp_path), cache, *only(0), "--steps", 4)
    finally:
        file.write_bytes(before)
    assert (status, "source is pictures-" in output) == (1, True), output


def test_runs_that_can_not_be_verified_are_refused(finished, tmp_path):
    folder = copy_of(finished, tmp_path)
    edit(folder / "result.json", lambda facts: facts.update(status="preempted"))
    dropout = tmp_path / "dropout"
    shutil.copytree(finished, dropout)
    edit(dropout / "recipe.json", lambda record: record.update(devices=["NVIDIA H200"]))
    edit(dropout / "recipe.json", lambda record: record["recipe"].update(dropout=0.1))
    for words, message in (
        ([folder], f"{folder} is not finished (preempted). Repeat the training command to finish the run."),
        ([dropout], "--dropout used random numbers from NVIDIA H200, which this device does not produce"),
        ([tmp_path / "nowhere"], "is not a run folder"),
        ([finished, "--steps", "0"], "--steps 0: the value must be more than 0"),
    ):
        status, output = call(verify.main, *words)
        assert (status > 0, message in output) == (True, True), output
    assert not (folder / "verified.json").exists()
