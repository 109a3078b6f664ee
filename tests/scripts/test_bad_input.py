"""Bad input: one clear error, an exit status other than 0, no hang, no half-made run folder."""

import pytest
from PIL import Image

from tests.conftest import CNN, RESNET, VIT, Job, accelerate, deepspeed, full, python, result, run, torchrun
from tests.support.images import class_folders

SMALL = ["--data", "digits", "--batch_size", "8", "--max_steps", "1", "--trackers", "none"]
CASES = {  # name: (launcher, script and flags, message)
    "unknown flag": (python(), [*CNN, "--epoch", "1"], "unknown flag --epoch: did you mean --epochs?"),
    "missing data": (torchrun(2), [*CNN, "--data", "nowhere"], "--data nowhere: does not exist"),
    "batch that does not divide": (
        torchrun(2),
        [*CNN, *SMALL, "--batch_size", "7"],
        "--batch_size 7 does not divide among 2 processes: choose 6 or 8",
    ),
    "batch larger than the data": (
        python(),
        [*CNN, *SMALL, "--batch_size", "2000"],
        "--batch_size 2000 is more than the 1437 training images",
    ),
    "DeepSpeed config that does not parse": (
        deepspeed("--num_gpus", "2"),
        [*CNN, *SMALL, "--deepspeed_config", "BROKEN"],
        "broken.json, line 2",
    ),
    "DeepSpeed config without launcher": (
        python(),
        [*CNN, *SMALL, "--deepspeed_config", "ds_configs/zero2.json"],
        "needs a launcher",
    ),
    "two strategies": (
        accelerate("fsdp_2gpu"),
        [*CNN, *SMALL, "--deepspeed_config", "ds_configs/zero2.json"],
        "give one of them",
    ),
    "unknown model": (
        python(),
        [*VIT, *SMALL, "--model", "vit_nothing"],
        "--model vit_nothing is not in timm",
    ),
    "no transformer": (python(), [*VIT, *SMALL, "--model", "resnet18"], "is no Vision Transformer"),
    "weights that are none": (python(), [*VIT, *SMALL, "--weights", "BROKEN"], "--weights "),
    "CIFAR-10 without a hub": (
        python(),
        [*CNN, "--data", "cifar10"],
        "Without network use local files: --data FOLDER",
    ),
    "pretrained without a hub": (
        python(),
        [*VIT, *SMALL, "--model", "vit_tiny_patch16_224", "--pretrained"],
        "--pretrained: the hub can't be reached",
    ),
}


# In `make test` two rows under torchrun and those of other launchers show that one of several ranks prints.
# tests/test_messages.py has the mistakes of IN_PROCESS without a launch.
IN_PROCESS = ("batch larger than the data", "unknown model", "no transformer", "weights that are none")
IN_PROCESS += ("pretrained without a hub",)
ROWS = [
    full(name, launcher) if name in IN_PROCESS else (name, launcher) for name, (launcher, *_) in CASES.items()
]
ROWS += [
    full(name, torchrun(2))
    for name, (launcher, *_) in CASES.items()
    if launcher == python() and name != "DeepSpeed config without launcher"
]


@pytest.mark.parametrize(
    ("name", "launcher"), ROWS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_one_clear_error(name, launcher, tmp_path, cache):
    _, words, message = CASES[name]
    broken = tmp_path / "broken.json"
    broken.write_text('{\n  "train_batch_size" 8\n}')
    words = [broken if word == "BROKEN" else word for word in words]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    status, output = Job([*launcher, *words, *cache, "--output_dir", tmp_path / "run"], env=offline).wait()
    assert status != 0
    assert output.count("error: ") == 1, output
    assert message in output
    assert "Traceback" not in output.split(message)[0], output  # the launcher prints its own, afterwards
    assert not (tmp_path / "run").exists()


def test_more_processes_than_images(tmp_path, cache):
    data = class_folders(tmp_path / "images", train=2, val=2)
    words = [*torchrun(3), *CNN, "--data", data, "--batch_size", "3", *cache]
    status, output = Job([*words, "--output_dir", tmp_path / "run"]).wait()
    assert status != 0
    assert "--batch_size 3 is more than the 2 training images" in output
    assert not (tmp_path / "run").exists()


def test_out_of_memory_says_which_size_to_try(tmp_path, cache):
    """A batch needs 1.5 TiB in each process; the address space is limited to 256 GiB."""
    flags = ["--data", "digits", "--image_size", "16384", "--batch_size", "1024", "--trackers", "none"]
    words = ["prlimit", f"--as={2**38}", *torchrun(2), *RESNET, *flags, *cache]
    status, output = Job([*words, "--output_dir", tmp_path / "run"]).wait(90)
    assert status != 0
    assert output.count("error: out of memory on CPU") == 1, output
    assert "with --per_device_batch_size 512: try --per_device_batch_size 256, the same" in output
    assert "--batch_size 1024 with 2 accumulations" in output
    assert result(tmp_path / "run")["status"] == "failed"


@pytest.mark.parametrize("workers", ["0", pytest.param("2", marks=pytest.mark.full)])
def test_a_photograph_cut_short_in_the_middle_of_training(workers, tmp_path, cache):
    """Workers decode images of differing sizes: the error comes late, and names the file."""
    data = class_folders(tmp_path / "images", train=12, val=4, kind="jpg")
    odd = sorted((data / "train" / "0").iterdir())
    Image.effect_noise((90, 70), 64).convert("RGB").save(odd[0])
    odd[1].write_bytes(odd[0].read_bytes()[:1500])
    flags = ["--data", data, "--batch_size", "2", "--epochs", "2", "--workers", workers, "--trackers", "none"]
    words = [*torchrun(2), *CNN, *flags, *cache, "--output_dir", tmp_path / "run"]
    status, output = Job(words).wait(90)
    assert status != 0
    assert odd[1].name in output
    assert not list((tmp_path / "run").glob("checkpoints/*"))


def test_a_folder_that_holds_a_run_is_not_touched(tmp_path, cache):
    words = [*python(), *CNN, *SMALL, *cache, "--output_dir", tmp_path / "run"]
    run(words)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    status, output = Job([*words, "--epochs", "3"]).wait(60)
    assert status == 1
    assert "holds a run already (its epochs is 10, here 3;" in output
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    "launcher",
    [torchrun(2), [*accelerate("zero2_2gpu"), "PRECISION"]],
    ids=["ddp", "zero2 in fp16, beyond its smallest loss scale"],
)
def test_a_loss_that_is_not_finite_stops_all_and_saves_nothing(launcher, tmp_path, cache):
    fp16 = launcher[-1] == "PRECISION"
    launcher = launcher[:-1] if fp16 else launcher
    words = [*launcher, *CNN, *SMALL, "--max_steps", "60", "--lr", "1e30", *cache]
    words += ["--log_every", "30", "--mixed_precision", "fp16" if fp16 else "no"]
    status, output = Job([*words, "--output_dir", tmp_path / "run"]).wait(90)
    assert status != 0
    assert output.count("error: the loss is nan at step") == 1, output
    assert "with learning rate" in output
    assert result(tmp_path / "run")["status"] == "failed"
    assert not list((tmp_path / "run").glob("checkpoints/*"))
