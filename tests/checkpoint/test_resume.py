"""Tests that a resumed run matches the uninterrupted run bitwise, or within 1e-5 across strategies."""

import functools
import json

import pytest

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
)
from tests.distributed.test_agreement import two_hosts
from tests.support import compare
from tests.support.compare import (
    assert_same_end,
    assert_same_state,
    assert_same_tensors,
    assert_same_training,
)

# Number of steps in a run. An epoch has 14 steps, and every fourth step writes a log line, so that most stops
# fall between two log lines.
STEPS = 32
FLAGS = ["--data", "digits", "--batch_size", "96", "--per_device_batch_size", "48", "--epochs", "3"]
FLAGS += ["--max_steps", STEPS, "--log_every", "4", "--log_samples", "--mixed_precision", "no"]
FLAGS += ["--trackers", "none"]
SCRIPTS = {
    "cnn_a": CNN,
    # CNN-B contains BatchNorm and trains with SGD and momentum
    "cnn_b": [*RESNET, "--label_smoothing", "0.1"],
    # The ViT trains with two AdamW groups, drop path, mixup, gradient clipping and EMA
    "vit": [*VIT, "--dropout", "0.1"],
}
LAUNCHERS = STRATEGIES | {
    "offload": accelerate("zero3_offload_4gpu", "--num_processes", "2"),
    "fsdp3": accelerate("fsdp_4gpu", "--num_processes", "3"),
    "zero3-3": accelerate("zero3_4gpu", "--num_processes", "3"),
    "ddp3": accelerate("ddp_4gpu", "--num_processes", "3"),
    "ddp4": accelerate("ddp_4gpu"),
    # Simulates the hybrid sharding of two hosts on one host: two replicas of the model, each in two shards
    "hybrid": accelerate(
        "fsdp_2x4gpu",
        *("--num_machines", "1", "--main_process_port", "0", "--num_processes", "4"),
        *("--parallelism_config_dp_shard_size", "2"),
    ),
}
# Steps at which runs stop: the first step, a step inside an epoch, an epoch's last step, and the next epoch's
# first step
STOPS = (1, 9, 14, 15)


class Training:
    """Script that a test starts several times."""

    def __init__(self, script: str, folder, cache, project, *flags):
        self.words = [*SCRIPTS[script], *FLAGS, *flags, *cache, "--output_dir", folder]
        self.folder, self.project = folder, project

    def start(self, launcher: str, stop_at: int | None = None, *flags) -> str:
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
    """Return a function that returns the folder of a script's uninterrupted run."""

    @functools.cache
    def folder_of(script: str, launcher: str, *flags):
        folder = tmp_path_factory.mktemp(script) / "run"
        Training(script, folder, cache, stoppable, *flags).start(launcher)
        return folder

    return folder_of


@pytest.mark.parametrize(
    ("script", "launcher", "flags"),
    [
        ("cnn_a", "single", ()),  # test_a_ring_of_strategies resumes the ViT
        full("vit", "ddp", ("--per_device_batch_size", "24")),
        full("vit", "single", ("--per_device_batch_size", "96")),
        *(full("vit", on, ("--mixed_precision", "bf16")) for on in ("zero2", "fsdp", "zero3")),
        *(full("vit", on, ()) for on in ("single", "ddp", "fsdp", "zero1", "zero2", "zero3", "offload")),
        *(full("cnn_b", on, ()) for on in ("single", "ddp", "fsdp", "zero3")),
    ],
)
def test_stopped_four_times_is_bit_equal(script, launcher, flags, uninterrupted, tmp_path, cache, stoppable):
    training = Training(script, tmp_path / "run", cache, stoppable, *flags)
    for stop in STOPS:
        training.start(launcher, stop)
    output = training.start(launcher)
    assert f"continuing at step {STOPS[-1]}" in output
    walls = [line["wall_s"] for line in metrics(tmp_path / "run")]
    assert walls == sorted(walls), "wall time does not continue where it stopped"
    reference = uninterrupted(script, launcher, *flags)
    assert lines(tmp_path / "run" / "samples.jsonl") == lines(reference / "samples.jsonl")
    assert_same_state(tmp_path / "run", reference)
    assert_same_end(tmp_path / "run", reference)


@pytest.mark.full
@pytest.mark.needs("g++")
@pytest.mark.parametrize("launcher", ["single", "fsdp"])
def test_compiled_and_eager_training_resume_each_other(launcher, uninterrupted, tmp_path, cache, stoppable):
    compiled = ("--compile", "default", "--grad_checkpointing")
    training = Training("vit", tmp_path / "run", cache, stoppable)
    training.start(launcher, STOPS[0], *compiled)
    training.start(launcher, STOPS[1])
    training.start(launcher, None, *compiled)
    assert_same_tensors(tmp_path / "run", uninterrupted("vit", launcher), tolerance=1e-4)
    run([*python(), "validate.py", tmp_path / "run", *cache, "--output_dir", tmp_path / "report"])


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "launcher"), [("cnn_a", "ddp3"), ("vit", "ddp3"), ("vit", "fsdp3"), ("vit", "zero3-3")]
)
def test_three_processes_agree_within_1e_6(script, launcher, uninterrupted, tmp_path, cache, stoppable):
    """Train with three processes. Few sizes are divisible by 3, so shards are uneven and ZeRO pads them.

    DDP rebuilds its buckets after the first step, so a resumed run adds the three ranks' gradients in a
    different order. The gradient of attention's key bias consists only of rounding errors, which AdamW scales
    up like any other gradient.
    """
    flags = ("--per_device_batch_size", "32")
    training = Training(script, tmp_path / "run", cache, stoppable, *flags)
    for stop in (*STOPS, None):
        training.start(launcher, stop)
    reference = uninterrupted(script, launcher, *flags)
    assert_same_tensors(tmp_path / "run", reference, tolerance=1e-6, without="attn.qkv.bias")


@pytest.mark.full
def test_another_per_device_batch_size_keeps_the_mean_loss(uninterrupted, tmp_path, cache, stoppable):
    """Check that CNN-A, which has no BatchNorm, keeps all losses within 1e-5, even in the log line at the
    stop.
    """
    training = Training("cnn_a", tmp_path / "run", cache, stoppable)
    training.start("single", 9)
    training.start("single", None, "--per_device_batch_size", "24")
    compare.assert_same_losses(metrics(tmp_path / "run"), metrics(uninterrupted("cnn_a", "single")))


RING = ("single", "ddp", "fsdp", "zero1", "zero2", "zero3", "single")


@pytest.mark.parametrize("script", ["vit", full("cnn_b")])
def test_a_ring_of_strategies(script, uninterrupted, tmp_path, cache, stoppable):
    training = Training(script, tmp_path / "run", cache, stoppable)
    for leg, launcher in enumerate(RING):
        training.start(launcher, 3 + 4 * leg if leg < 6 else None)
    assert_same_training(tmp_path / "run", uninterrupted(script, "single"))


EACH = [(a, b) for a in STRATEGIES for b in STRATEGIES]
# Strategies before and after a run's stop. Each run divides four micro-batches among one, two or four
# processes. The ring of strategies trains ResNet-18 with two micro-batches, because a sum of two terms does
# not depend on their order. Different rounding in a sum can move an activation across ReLU's threshold.
MORE = [("ddp", "ddp4"), ("zero3", "ddp4"), ("offload", "single"), ("single", "hybrid"), ("hybrid", "zero3")]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, cache, stoppable):
    """Return a function that returns the folder of a run stopped in the first epoch."""

    @functools.cache
    def folder_of(launcher: str, *flags):
        folder = tmp_path_factory.mktemp("stopped") / "run"
        Training("vit", folder, cache, stoppable, *flags).start(launcher, 9)
        return folder

    return folder_of


@pytest.mark.full
@pytest.mark.parametrize(("source", "target"), [*EACH, *MORE])
def test_each_strategy_resumes_each_other(source, target, uninterrupted, stopped, tmp_path, cache, stoppable):
    flags = ("--per_device_batch_size", "24")
    training = Training("vit", tmp_path / "run", cache, stoppable, *flags)
    training.start(target, None, "--resume", stopped(source, *flags))
    assert_same_training(tmp_path / "run", uninterrupted("vit", "single", *flags), begin=9)


def test_fp16_resumes_with_its_loss_scale(uninterrupted, tmp_path, cache, stoppable):
    """Check that a run resumes with its loss scale, by letting the first steps overflow.

    A run that resumed with the initial loss scale would skip other steps.
    """
    flags = ("--mixed_precision", "fp16", "--max_steps", "12")
    training = Training("cnn_a", tmp_path / "run", cache, stoppable, *flags)
    training.start("single", 5)
    training.start("single")
    reference = uninterrupted("cnn_a", "single", *flags)
    assert_same_state(tmp_path / "run", reference)
    assert_same_end(tmp_path / "run", reference)
    assert json.loads((latest(reference) / "state.json").read_text())["loss_scale"]


@pytest.mark.full
def test_hosts_without_a_shared_folder(tmp_path, cache, stoppable):
    """Start two launches with separate folders, as on two hosts without a shared folder.

    Only rank 0 creates its folder and sends the checkpoint to rank 1.
    """
    words = [*CNN, *FLAGS]
    for env, statuses in (({"STOP_AT": "9"}, {1}), ({}, {0})):
        jobs = two_hosts(tmp_path, cache, words, projects=(stoppable, stoppable), envs=(env, env))
        assert {status for status, _ in jobs} == statuses, jobs
    assert "continuing at step 9" in jobs[0][1]
    assert [line["step"] for line in metrics(tmp_path / "run0") if "val/loss" in line] == [14, 28, 32]
    assert not (tmp_path / "run1").exists()


def test_a_run_started_from_anothers_checkpoint(tmp_path, cache, stoppable):
    """Check that a new run's folder contains the best checkpoint, even after a stop at the first step."""
    Training("cnn_a", tmp_path / "first", cache, stoppable).start("single", 14)
    new = Training("cnn_a", tmp_path / "new", cache, stoppable, "--resume", tmp_path / "first")
    for stop in (14, 15):
        assert "continuing at step 14" in new.start("single", stop)
        final = result(tmp_path / "new")
        assert final["best_step"] == 14
        assert (tmp_path / "new" / final["best_checkpoint"] / "manifest.json").exists()
    assert "continuing at step 15" in new.start("single")
    assert metrics(tmp_path / "new")[0]["step"] == 14
    assert latest(tmp_path / "first").name == "step_00000014"


def test_another_metric_resets_the_best_result(tmp_path, cache):
    words = [*CNN, *FLAGS, *cache, "--output_dir", tmp_path / "run", "--max_steps"]
    run([*words, "14"])
    output = run([*words, "15", "--best_by", "macro_f1", "--allow_changed", "best_by"])
    assert "the best result is reset" in output
    final = result(tmp_path / "run")
    assert final["best_macro_f1"] > 0
    assert [line["step"] for line in metrics(tmp_path / "run") if "val/macro_f1" in line] == [14, 15]


def test_a_changed_recipe_is_refused_unless_a_flag_allows_it(tmp_path, cache):
    words, folder = [*CNN, *FLAGS, *cache], tmp_path / "run"
    words += ["--max_steps", "9", "--output_dir", folder]
    run(words)
    words[words.index("9")] = "12"
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    status, output = Job([*words, "--lr", "0.001"]).wait()
    assert status == 1
    assert "already contains a run with a different recipe (--lr was 0.003, now 0.001;" in output
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert "--allow_changed" in output
    elsewhere = [*words, "--resume", folder, "--output_dir", tmp_path / "other"]
    status, output = Job([*elsewhere, "--seed", "1"]).wait()
    assert status == 1
    assert "belongs to a different recipe (--seed was 0, now 1)" in output
    for changed in (["--batch_size", "48"], ["--lr", "0.001"]):
        allowed = [*changed, "--allow_changed", changed[0].lstrip("-"), "--max_steps", "10"]
        assert "continuing at step 9" in run([*elsewhere[:-1], tmp_path / changed[1], *allowed])
