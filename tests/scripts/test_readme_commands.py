"""Tests that run every command in the README's code blocks unchanged.

The data sets are small but have the locations and formats that the README names: a copy of CIFAR-10 from the
Hub, image folders, an imitation of ILSVRC2012, and weights in the Hub cache. Models that take hours on a CPU
train for one epoch. `make test` ends commands with several training runs after the first minute.
test_launchers.py shortens the commands on other pages with flags.
"""

import os
import re
import shlex
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
import timm
from safetensors.torch import save_file

from tests.conftest import (
    ROOT,
    Job,
    copy_project,
    free_port,
    link_environment,
    needs,
    read_until,
)
from tests.support.data_sets import data_set
from tests.support.faults import called_first
from tests.support.imagenet import make_ilsvrc
from tools.prepare import devkit

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(?:sh)?\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
# Command lines in the code blocks. In a block with prompts, lines without a prompt are output.
LINES = [line for block in BLOCKS for line in block.splitlines() if block[0] != "$" or line[0] == "$"]
WORDS = [shlex.split(line.removeprefix("$ "), comments=True) for line in LINES]
# Commands to test, except `make test`, which runs this test
COMMANDS = [shlex.join(words) for words in WORDS if words and words != ["make", "test"]]
FOR_GPUS = {  # Flags that shorten the training of models that take hours on a CPU
    "fsdp_4gpu.yaml train_vit.py": ["--epochs", "1", "--batch_size", "64"],
    "vit_b16_finetune_small.yaml": ["--epochs", "1"],
    "vit_s16_imagenet.yaml": ["--epochs", "1", "--batch_size", "32"],
}
EARLY = {  # Text that each command with several training runs prints in its first minute
    "make same_bits": "epoch 1/2",
    "make experiment_speedup DATA=/data/cifar10": "epoch 1/1",
    "make experiment_vit DATA=/data/cifar10": "       8  ran ",
}
BEFORE = {  # Earlier command that creates the path or recipe that a later command uses
    "runs/train_cnn_a/single_128_10_1_1": "make train",
    "runs/train_vit/photographs": "vit_b16_finetune_small",
    "/data/imagenet256 ": "prep_imagenet.py",
}


@dataclass(frozen=True)
class Published:
    """Callable that makes a forked process treat an imitation of ILSVRC2012 as the published data set."""

    md5: dict[str, str]
    classes: int
    val_per_class: int

    def __call__(self) -> None:
        devkit.MD5_BY_PART.update(self.md5)
        devkit.CLASS_COUNT, devkit.VAL_IMAGES_PER_CLASS = self.classes, self.val_per_class


class Project:
    """Copy of the project with the data sets that the README names."""

    def __init__(self, folder: Path):
        self.folder, self.root = folder, copy_project(folder / "project")
        link_environment(self.root)
        shutil.copytree(ROOT / "experiments", self.root / "experiments")
        small = data_set(self.root / "uoft-cs/cifar10", "parquet", "abcdefghij", train=256, test=64)
        shutil.copytree(small, self.root / "OWNER/NAME")
        real = Path(os.environ.get("TEST_DATA_DIR", "/nowhere"), "cifar10")
        (folder / "data").mkdir()
        (folder / "data/cifar10").symlink_to(real if real.exists() else small)
        data_set(self.root / "photographs", names="abcd", size=(250, 200), train=60, val=8)
        data_set(self.root / "holiday", names="a", whole=3)
        self.done: set[str] = set()

    def run(self, command: str) -> None:
        """Run a command to its end, after the commands that create its input files."""
        if command in self.done:
            return
        for needed in [first for part, first in BEFORE.items() if part in f"{command} "]:
            producers = [other for other in COMMANDS if needed in other and other != command]
            for producer in producers[:1]:
                self.run(producer)
        flags = next((flags for part, flags in FOR_GPUS.items() if part in command), [])
        status, output = self.start(command, flags).wait(3000)
        assert status == 0, output
        self.done.add(command)

    def start(self, command: str, flags: list[str]) -> Job:
        words = shlex.split(re.sub(r"(?<![\w/])/(?=data/|downloads)", f"{self.folder}/", command))
        env: dict[str, str] = {}
        if words[0] == "deepspeed":
            words[1:1] = ["--master_port", str(free_port())]
        if "prep_imagenet.py" in words:
            needs("TEST_DATA_DIR")
            archives = make_ilsvrc(self.folder / "downloads")
            files = {"train": archives.train_tar, "val": archives.val_tar, "devkit": archives.devkit}
            md5 = {part: archives.md5(file) for part, file in files.items()}
            env |= called_first(self.folder, Published(md5, len(archives.wnids), 3))
        if "photographs" in words and "--data" in words:
            models = re.findall(r"--model (\w+)", command) or ["vit_base_patch16_224"]
            env |= self.put_into_the_hubs_cache(models[0])
        return Job([*words, *flags], cwd=self.root, env=env)

    def put_into_the_hubs_cache(self, name: str) -> dict[str, str]:
        """Store random weights in the Hub cache, in the layout of a download.

        Return the environment variables that make timm load the weights.
        """
        hub_name = timm.get_pretrained_cfg(name).hf_hub_id.replace("/", "--")
        repository = self.folder / "hub/hub" / f"models--{hub_name}"
        for part in ("refs", "snapshots/1"):
            (repository / part).mkdir(parents=True, exist_ok=True)
        (repository / "refs/main").write_text("1")
        save_file(timm.create_model(name).state_dict(), repository / "snapshots/1/model.safetensors")
        return {"HF_HOME": str(self.folder / "hub"), "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Project:
    return Project(tmp_path_factory.mktemp("readme"))


@pytest.mark.full
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_runs_to_its_end(command, project):
    project.run(command)


@pytest.mark.parametrize("command", EARLY)
def test_the_first_minute_of_a_command(command, project):
    """Stop all processes of a command within its first minute. Running the command again would resume."""
    assert command in COMMANDS
    job = project.start(command, [])
    read_until(EARLY[command], job)
    job.process.send_signal(signal.SIGTERM)
    assert job.wait(60)[0] != 0


def test_the_commands_that_are_shortened_are_in_the_readme():
    for part in FOR_GPUS:
        assert [part in command for command in COMMANDS].count(True) == 1
    assert len(COMMANDS) > 20
