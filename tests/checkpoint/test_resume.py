"""A resumed run equals the uninterrupted one: bit by bit, within 1e-5 under another strategy."""

import json

import pytest
import torch

from tests.conftest import (
    CNN,
    HALF_THE_CORES,
    RESNET,
    STRATEGIES,
    VIT,
    Job,
    accelerate,
    full,
    latest,
    lines,
    metrics,
    python,
    result,
    run,
    tensors,
)
from tests.distributed.test_agreement import two_hosts
from tests.support import warm

# 14 steps an epoch; a line of the log every 4 steps, so that most stops lie between two lines.
STEPS = 32
FLAGS = ["--data", "digits", "--batch_size", "96", "--per_device_batch_size", "48", "--epochs", "3"]
FLAGS += ["--max_steps", STEPS, "--log_every", "4", "--log_samples", "--mixed_precision", "no"]
FLAGS += ["--trackers", "none"]
SCRIPTS = {
    "cnn_a": CNN,
    "cnn_b": [*RESNET, "--label_smoothing", "0.1"],  # SGD with momentum, BatchNorm
    "vit": [*VIT, "--dropout", "0.1"],  # AdamW in two groups, drop path, mixup, clipping, EMA
}
LAUNCHERS = STRATEGIES | {
    "offload": accelerate("zero3_offload_4gpu", "--num_processes", "2"),
    "fsdp3": accelerate("fsdp_4gpu", "--num_processes", "3"),
    "zero3-3": accelerate("zero3_4gpu", "--num_processes", "3"),
    "ddp3": accelerate("ddp_4gpu", "--num_processes", "3"),
    "ddp4": accelerate("ddp_4gpu"),
    # Two hosts' hybrid sharding on one: two copies of the model, each in two parts.
    "hybrid": accelerate(
        "fsdp_2x4gpu",
        *("--num_machines", "1", "--main_process_port", "0", "--num_processes", "4"),
        *("--parallelism_config_dp_shard_size", "2"),
    ),
}
STOPS = (1, 9, 14, 15)  # at step 1, inside an epoch, at its last step, at the next one's first


class Training:
    """One script's run in several starts."""

    def __init__(self, script: str, folder, cache, project, *flags):
        self.words = [*SCRIPTS[script], *FLAGS, *flags, *cache, "--output_dir", folder]
        self.folder, self.project = folder, project

    def go(self, launcher: str, stop_at: int | None = None, *flags) -> str:
        env = {"STOP_AT": str(stop_at)} if stop_at else {}
        env |= HALF_THE_CORES if launcher == "single" else {}
        job = Job([*LAUNCHERS[launcher], *self.words, *flags], cwd=self.project, env=env)
        status, output = job.wait()
        if stop_at is None:
            assert status == 0, output
            assert result(self.folder)["status"] == "finished"
        else:
            assert status == (75 if launcher == "single" else 1), output
            assert result(self.folder)["status"] == "preempted", output
            assert latest(self.folder).name == f"step_{stop_at:08d}", output
        return output


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, cache, stoppable):
    """The folder of a script's uninterrupted run."""
    folders = {}

    def folder_of(script: str, launcher: str, *flags):
        key = (script, launcher, *flags)
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp(script) / "run"
            Training(script, folders[key], cache, stoppable, *flags).go(launcher)
        return folders[key]

    return folder_of


@pytest.mark.parametrize(
    ("script", "launcher", "flags"),
    [
        ("vit", "single", ()),
        full("vit", "ddp", ("--per_device_batch_size", "24")),
        full("vit", "single", ("--per_device_batch_size", "96")),
        *(full("vit", on, ("--mixed_precision", "bf16")) for on in ("zero2", "fsdp", "zero3")),
        *(full("vit", on, ()) for on in ("ddp", "fsdp", "zero1", "zero2", "zero3", "offload")),
        *(full("cnn_b", on, ()) for on in ("single", "ddp", "fsdp", "zero1", "zero2", "zero3", "offload")),
        full("cnn_a", "single", ()),
    ],
)
def test_a_run_that_was_stopped_four_times_is_bit_equal(
    script, launcher, flags, uninterrupted, tmp_path, cache, stoppable
):
    training = Training(script, tmp_path / "run", cache, stoppable, *flags)
    for stop in STOPS:
        training.go(launcher, stop)
    output = training.go(launcher, None, "--deterministic")  # on a CPU bits are equal with it, and without
    assert f"continuing at step {STOPS[-1]}" in output
    assert output.count("from here on the run is deterministic, but it cannot be reproduced bit for bit") == 1
    walls = [line["wall_s"] for line in metrics(tmp_path / "run")]
    assert walls == sorted(walls), "time goes on where it stopped"
    reference = uninterrupted(script, launcher, *flags)
    assert without_times(metrics(tmp_path / "run")) == without_times(metrics(reference))
    assert lines(tmp_path / "run" / "samples.jsonl") == lines(reference / "samples.jsonl")
    assert_same_state(tmp_path / "run", reference)
    assert_same_tensors(tmp_path / "run", reference, tolerance=0)


@pytest.mark.full
@pytest.mark.needs("g++")
@pytest.mark.parametrize("launcher", ["single", "fsdp"])
def test_compiled_and_eager_continue_one_another(launcher, uninterrupted, tmp_path, cache, stoppable):
    compiled = ("--compile", "default", "--grad_checkpointing")
    training = Training("vit", tmp_path / "run", cache, stoppable)
    training.go(launcher, STOPS[0], *compiled)
    training.go(launcher, STOPS[1])
    training.go(launcher, None, *compiled)
    assert_same_tensors(tmp_path / "run", uninterrupted("vit", launcher), tolerance=1e-5)
    run([*python(), "validate.py", tmp_path / "run", *cache, "--output_dir", tmp_path / "report"])


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "launcher"), [("cnn_a", "ddp3"), ("vit", "ddp3"), ("vit", "fsdp3"), ("vit", "zero3-3")]
)
def test_on_three_processes_it_is_equal_within_1e_6(
    script, launcher, uninterrupted, tmp_path, cache, stoppable
):
    """Few of the model's sizes divide by three: shards are uneven, and ZeRO pads the last ones.

    DDP lays its buckets out anew after the first step, so a resumed run adds three ranks in another order.
    The bias of attention's keys has no gradient but what rounding leaves, which AdamW makes as large as any.
    """
    flags = ("--per_device_batch_size", "32")
    training = Training(script, tmp_path / "run", cache, stoppable, *flags)
    for stop in STOPS:
        training.go(launcher, stop)
    training.go(launcher)
    reference = uninterrupted(script, launcher, *flags)
    assert_same_tensors(tmp_path / "run", reference, tolerance=1e-6, without="attn.qkv.bias")


@pytest.mark.full
def test_another_per_device_batch_size_keeps_the_mean_of_the_loss(tmp_path, cache, stoppable):
    """CNN-A has no BatchNorm: its losses stay within 1e-5, also in the log line at the stop."""
    for name, stops in (("straight", ()), ("stopped", (9,))):
        training = Training("cnn_a", tmp_path / name, cache, stoppable)
        for stop in stops:
            training.go("single", stop)
        smaller = ("--per_device_batch_size", "24") if stops else ()
        training.go("single", None, *smaller)
    ours, theirs = (metrics(tmp_path / name) for name in ("stopped", "straight"))
    for our, their in zip(ours, theirs, strict=True):
        for name in {"train/loss", "val/loss", "test/loss"} & their.keys():
            assert our[name] == pytest.approx(their[name], abs=1e-5), (name, our["step"])


RING = ("single", "ddp", "fsdp", "zero1", "zero2", "zero3", "single")


@pytest.mark.parametrize("script", ["vit", full("cnn_b")])
def test_a_ring_of_strategies(script, uninterrupted, tmp_path, cache, stoppable):
    training = Training(script, tmp_path / "run", cache, stoppable)
    for leg, launcher in enumerate(RING[:-1]):
        training.go(launcher, 3 + 4 * leg)
    training.go(RING[-1])
    assert_same_training(tmp_path / "run", uninterrupted(script, "single"))


EACH = [(a, b) for a in STRATEGIES for b in STRATEGIES]
# Four micro-batches, on one, two and four processes. Of ResNet-18 two: the sum of two is the same in any
# order, and one that is rounded otherwise now and then carries an activation over ReLU's edge.
MORE = [("ddp", "ddp4"), ("zero3", "ddp4"), ("offload", "single"), ("single", "hybrid"), ("hybrid", "zero3")]
PAIRS = [("vit", "24", *pair) for pair in [*EACH, *MORE]]
PAIRS += [("cnn_b", "48", *pair) for pair in EACH]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, cache, stoppable):
    """The folder of a run that was stopped inside the first epoch."""
    folders = {}

    def folder_of(script: str, launcher: str, *flags):
        if (script, launcher) not in folders:
            folders[script, launcher] = tmp_path_factory.mktemp("stopped") / "run"
            Training(script, folders[script, launcher], cache, stoppable, *flags).go(launcher, 9)
        return folders[script, launcher]

    return folder_of


@pytest.mark.full
@pytest.mark.parametrize(("script", "per_device", "source", "target"), PAIRS)
def test_each_strategy_continues_each_other(
    script, per_device, source, target, uninterrupted, stopped, tmp_path, cache, stoppable
):
    flags = ("--per_device_batch_size", per_device)
    training = Training(script, tmp_path / "run", cache, stoppable, *flags)
    training.go(target, None, "--resume", stopped(script, source, *flags))
    reference = uninterrupted(script, "single", *flags)
    after = [line for line in metrics(reference) if line["step"] > 9]
    samples = [line for line in lines(reference / "samples.jsonl") if line["step"] > 9]
    assert_same_training(tmp_path / "run", reference, after, samples)


def test_fp16_goes_on_with_its_loss_scale(tmp_path, cache, stoppable):
    """The first steps overflow: a resume with the initial scale would skip other steps."""
    flags = ("--mixed_precision", "fp16", "--max_steps", "12")
    for name, stops in (("straight", ()), ("stopped", (5,))):
        training = Training("cnn_a", tmp_path / name, cache, stoppable, *flags)
        for stop in stops:
            training.go("single", stop)
        training.go("single")
    assert without_times(metrics(tmp_path / "stopped")) == without_times(metrics(tmp_path / "straight"))
    assert_same_state(tmp_path / "stopped", tmp_path / "straight")
    assert_same_tensors(tmp_path / "stopped", tmp_path / "straight", tolerance=0)
    assert json.loads((latest(tmp_path / "stopped") / "state.json").read_text())["loss_scale"]


def without_times(log: list[dict]) -> list[dict]:
    """The lines without what differs from run to run."""
    times = ("train/images_per_s", "train/mfu_pct", "wall_s")
    return [{name: value for name, value in line.items() if name not in times} for line in log]


def assert_same_state(folder, reference):
    ours, theirs = (json.loads((latest(f) / "state.json").read_text()) for f in (folder, reference))
    for state in (ours, theirs):
        assert state.pop("train_s") > 0
        assert state.pop("wall_s") == pytest.approx(sum(state.pop("spent_s").values()), abs=0.2)
    assert ours == theirs


def assert_same_tensors(folder, reference, tolerance, without=None):
    ours, theirs = tensors(latest(folder)), tensors(latest(reference))
    assert latest(folder).name == latest(reference).name
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        if without and without in name:
            continue
        if tolerance == 0:
            assert torch.equal(tensor, theirs[name]), name
        else:
            assert (tensor - theirs[name]).abs().max() <= tolerance, name


def assert_same_training(folder, reference, expected=None, samples=None):
    """Losses within 1e-5, learning rates and samples equal, tensors within 1e-4."""
    expected = metrics(reference) if expected is None else expected
    ours = metrics(folder)
    assert [line["step"] for line in ours] == [line["step"] for line in expected]
    samples = lines(reference / "samples.jsonl") if samples is None else samples
    assert lines(folder / "samples.jsonl") == samples
    for our, their in zip(ours, expected, strict=True):
        assert our.get("train/lr") == their.get("train/lr")
        for name in {"train/loss", "val/loss", "test/loss"} & their.keys():
            assert our[name] == pytest.approx(their[name], abs=1e-5), (name, our["step"])
    assert_same_tensors(folder, reference, tolerance=1e-4)


@pytest.mark.full
def test_hosts_without_a_shared_folder(tmp_path, cache, stoppable):
    """Two launches with a folder each, as on two hosts: only rank 0's is made; it sends the checkpoint."""
    words = [*CNN, *FLAGS]
    for env, statuses in (({"STOP_AT": "9"}, {1}), ({}, {0})):
        jobs = two_hosts(tmp_path, cache, words, projects=(stoppable, stoppable), env=env)
        assert {status for status, _ in jobs} == statuses, jobs
    assert "continuing at step 9" in jobs[0][1]
    assert [line["step"] for line in metrics(tmp_path / "run0") if "val/loss" in line] == [14, 28, 32]
    assert not (tmp_path / "run1").exists()


def test_a_run_that_begins_at_anothers_checkpoint(tmp_path, cache, stoppable):
    """Its best checkpoint is its own, also after a stop right at its beginning."""
    first = Training("cnn_a", tmp_path / "first", cache, stoppable)
    first.go("single", 14)
    words = [
        *SCRIPTS["cnn_a"],
        *FLAGS,
        *cache,
        "--resume",
        tmp_path / "first",
        "--output_dir",
        tmp_path / "new",
    ]
    for stop in ("14", "15"):
        status, output = Job([*python(), *words], cwd=stoppable, env={"STOP_AT": stop}).wait()
        assert status == 75, output
        assert "continuing at step 14" in output
        found = result(tmp_path / "new")
        assert found["best_step"] == 14
        assert (tmp_path / "new" / found["best_checkpoint"] / "manifest.json").exists()
    assert "continuing at step 15" in run([*python(), *words], cwd=stoppable)
    assert metrics(tmp_path / "new")[0]["step"] == 14
    assert latest(tmp_path / "first").name == "step_00000014"


def test_another_recipe_is_refused_unless_a_flag_names_it(tmp_path, cache):
    words, folder, log = [*CNN, *FLAGS, *cache], tmp_path / "run", tmp_path / "log"
    words += ["--max_steps", "9", "--output_dir", folder]
    warm.run(words, log)
    words[words.index("9")] = "12"
    status, output = warm.WarmJob([*words, "--lr", "0.001"], log).wait()
    assert status == 1
    assert "its lr is 0.003, here 0.001" in output
    assert "--allow_changed" in output
    elsewhere = [*words, "--resume", folder, "--output_dir", tmp_path / "other"]
    status, output = warm.WarmJob([*elsewhere, "--seed", "1"], log).wait()
    assert status == 1
    assert "is of another recipe (its seed is 0, here 1)" in output
    for batch_size, place in (
        (48, "after 432 of epoch 1 now: 432 images are trained twice"),
        (192, "after 384 of epoch 2 now: the images between are not trained"),
    ):
        changed = ["--batch_size", batch_size, "--allow_changed", "batch_size", "--max_steps", "10"]
        output = warm.run([*elsewhere[:-1], tmp_path / str(batch_size), *changed], log)
        was = f"--batch_size {batch_size} (it was 96): step 9 came after 864 images of epoch 1"
        assert f"{was}, and comes {place}" in output
    output = warm.run([*words, "--lr", "0.001", "--allow_changed", "lr"], log)
    assert "continuing at step 9" in output
    assert "came after" not in output
