"""Tests that bad input causes one clear error and a nonzero exit status, without a hang or a partial run."""

import resource

import pytest
from PIL import Image

from tests.conftest import CNN, RESNET, VIT, Job, accelerate, full, mutate, python, result, run, torchrun
from tests.support.data_sets import data_set, encode, picture

SMALL = ["--data", "digits", "--batch_size", "8", "--max_steps", "1", "--trackers", "none"]
ON_DIGITS, ZERO2 = [*CNN, *SMALL], ["--deepspeed_config", "ds_configs/zero2.json"]
# Launcher, script, script flags and expected message of each case. test_mistakes.py and
# tests/test_messages.py contain further cases.
CASES = {
    "DeepSpeed config without launcher": (python(), [*ON_DIGITS, *ZERO2], "requires a launcher"),
    "two strategies": (accelerate("fsdp_2gpu"), [*ON_DIGITS, *ZERO2], "Use only --deepspeed_config"),
    "an interface that is not there": (torchrun(2), ON_DIGITS, "GLOO_SOCKET_IFNAME=eth99 matches no network"),
}


@pytest.mark.parametrize("name", [full(name) if name == "two strategies" else name for name in CASES])
def test_one_clear_error(name, tmp_path, cache):
    launcher, words, message = CASES[name]
    env = {"GLOO_SOCKET_IFNAME": "eth99"} if "interface" in name else {}
    status, output = Job([*launcher, *words, *cache, "--output_dir", tmp_path / "run"], env=env).wait()
    assert status != 0
    assert output.count("error: ") == 1, output
    assert message in output
    # The launcher prints its own traceback after the script's message.
    assert "Traceback" not in output.split(message)[0], output
    assert not (tmp_path / "run").exists()


def test_out_of_memory_says_which_size_to_try(tmp_path, cache):
    """Request a batch that needs 96 GiB per process while the address space is limited to 64 GiB."""
    flags = ["--data", "digits", "--image_size", "4096", "--batch_size", "1024", "--trackers", "none"]
    before = resource.getrlimit(resource.RLIMIT_AS)
    # The job's processes inherit the limit on the address space
    resource.setrlimit(resource.RLIMIT_AS, (2**36, before[1]))
    try:
        job = Job([*torchrun(2), *RESNET, *flags, *cache, "--output_dir", tmp_path / "run"])
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    status, output = job.wait(90)
    assert status != 0
    assert output.count("error: out of memory on CPU") == 1, output
    assert "with --per_device_batch_size 512. Try --per_device_batch_size 256, which keeps" in output
    assert "--batch_size 1024 with 2 accumulation steps" in output
    assert result(tmp_path / "run")["status"] == "failed"


def test_batch_norm_with_one_value_says_which_flags(tmp_path, cache):
    words = [*RESNET, *SMALL, "--image_size", "8", "--per_device_batch_size", "1", *cache]
    status, output = Job([*python(), *words, "--output_dir", tmp_path / "run"]).wait()
    assert status == 1
    message = "error: BatchNorm failed: Expected more than 1 value per channel when training, got input size "
    assert output.count(message) == 1, output
    assert ". Increase --per_device_batch_size or --image_size\n" in output


def test_mixup_of_one_image_is_reported(tmp_path, cache):
    words = [*torchrun(2), *VIT, *SMALL, "--max_val_images", "8", *cache, "--output_dir", tmp_path / "run"]
    message = "--mixup and --cutmix have no effect, because each micro-batch contains one image"
    assert run([*words, "--per_device_batch_size", "1", "--mixup", "0.5"]).count(message) == 1


@pytest.mark.full
@pytest.mark.parametrize(("is_searched", "workers"), [(True, "0"), (False, "0"), (False, "2")])
def test_a_photograph_cut_short_is_named(is_searched, workers, project_copy, tmp_path, cache):
    """Check that the message names the broken file if images are decoded at startup or during training."""
    if not is_searched:
        mutate(project_copy, "onecurve/data/cache.py", "MAX_SEARCH_BYTES = 4 * 2**30", "MAX_SEARCH_BYTES = 0")
    data = data_set(tmp_path / "images", train=[encode(picture(k)) for k in range(12)], val=4)
    large, broken, *_ = sorted((data / "train" / "a").iterdir())
    Image.effect_noise((90, 70), 64).convert("RGB").save(large)
    broken.write_bytes(large.read_bytes()[:1500])
    flags = ["--data", data, "--batch_size", "2", "--epochs", "2", "--workers", workers, "--trackers", "none"]
    words = [*torchrun(2), *CNN, *flags, *cache, "--output_dir", tmp_path / "run"]
    status, output = Job(words, cwd=project_copy).wait(90)
    assert status != 0
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, output
    if is_searched:
        assert "1 of 16 images can't be decoded" in errors[0]
        assert f"  {broken}: " in output
        assert not (tmp_path / "run").exists()
    else:
        assert broken.name in errors[0]
        assert broken.name in result(tmp_path / "run")["error"], "it was training"
        assert not list((tmp_path / "run").glob("checkpoints/*"))


@pytest.mark.parametrize(
    ("launcher", "precision"),
    [(torchrun(2), "no"), (accelerate("zero2_2gpu"), "fp16")],
    ids=["ddp", "zero2 in fp16, beyond its smallest loss scale"],
)
def test_a_loss_that_is_not_finite_stops_all_and_saves_nothing(launcher, precision, tmp_path, cache):
    words = [*launcher, *CNN, *SMALL, "--max_steps", "60", "--lr", "1e15", *cache]
    words += ["--log_every", "30", "--mixed_precision", precision]
    status, output = Job([*words, "--output_dir", tmp_path / "run"]).wait(90)
    assert status != 0
    assert output.count("error: the loss is nan at step") == 1, output
    assert "with a learning rate of" in output
    assert result(tmp_path / "run")["status"] == "failed"
    assert not list((tmp_path / "run").glob("checkpoints/*"))
