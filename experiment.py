"""The write-ups' experiments, each as one command.

    python experiment.py vit --data /data/cifar10
    python experiment.py vit --size full --hostfile hostfile --s3 s3://bucket/vit
    python experiment.py speedup --dry_run

vit: a Vision Transformer with FSDP on 4 GPUs, and with DDP on 2 hosts of 4 each: the largest batch of each,
the training, all metrics of the best checkpoint, a page each, and the comparison. speedup: a CNN on 1, 2 and
4 processes at the same batch size, a page each, and the comparison.

--size full is for GPUs: not yet measured on one. --size rehearsal, the default, is small and stays on the
CPUs of this machine, where FSDP has 2 processes, and DDP 4 on one host.

Each command is shown before it runs. The first that fails ends the experiment; started again it goes on
there.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from common.system.cli import run_command
from common.system.files import read_json, write_json
from common.system.paths import python_command

VIT_BATCH_SIZE = {"full": 512, "rehearsal": 64}
VIT = {  # how it differs from the recipe of train_vit.py
    "full": "",
    "rehearsal": "--model vit_tiny_patch16_224 --image_size 32 --patch_size 4 --drop_path 0 --mixup 0"
    " --cutmix 0 --ema_decay 0.9 --lr 1e-3 --epochs 1 --max_steps 40 --max_val_images 500 --log_every 5",
}
VIT_WAYS = {  # name: file of accelerate_configs/, processes
    "full": {"fsdp": ("fsdp_4gpu", 4), "ddp": ("ddp_2x4gpu", 8)},
    "rehearsal": {"fsdp": ("fsdp_2gpu", 2), "ddp": ("ddp_4gpu", 4)},
}
LIMIT_GIB = 1.75  # of each process in a rehearsal, where a GPU would have its memory
CNN = {
    "full": "train_cnn_b.py",
    "rehearsal": "train_cnn_a.py --epochs 1 --max_val_images 2000 --log_every 10",
}
CNN_WAYS = ("single_gpu", "ddp_2gpu", "ddp_4gpu")


@dataclass(frozen=True)
class Step:
    name: str
    words: list[str]  # for Python
    product: Path | None = None  # the file that shows that it is done; without one it is always done again

    def is_done(self) -> bool:
        if self.product is None or not self.product.exists():
            return False
        found = read_json(self.product)
        return self.product.name != "result.json" or (
            found["status"] == "finished" and found.get("uploaded") is not False
        )


def main() -> int:
    flags = parse(sys.argv[1:])
    Experiment(flags).run()
    return 0


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], epilog=__doc__.partition("\n\n")[2], allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("experiment", choices=("vit", "speedup"))
    parser.add_argument("--size", choices=("rehearsal", "full"), default="rehearsal")
    parser.add_argument(
        "--data", default="cifar10", help="as the train scripts take it (default: %(default)s)"
    )
    parser.add_argument("--hostfile", default="hostfile", help="of the two hosts, for --size full")
    parser.add_argument("--s3", help="s3://bucket/prefix: the checkpoints of each run go below it")
    parser.add_argument("--folder", type=Path, help="of the runs (default: runs/experiment_<name>/<size>)")
    parser.add_argument("--logbook", help="the folder of the pages; unset: that of logbook.py")
    parser.add_argument("--dry_run", action="store_true", help="show the commands, and end")
    return parser.parse_args(words)


class Experiment:
    def __init__(self, flags: argparse.Namespace):
        self.flags, self.name = flags, f"experiment_{flags.experiment}"
        self.is_full, self.data = flags.size == "full", f"--data={flags.data}"
        self.folder = flags.folder or Path("runs") / self.name / flags.size

    def run(self) -> None:
        """ValueError when a step fails."""
        file = self.folder / "commands.json"  # of the steps that went well
        if not self.is_full:
            print("a rehearsal: small, and on the CPUs of this machine alone")
        done = read_json(file) if file.exists() else {}
        for step in {"vit": self.vit, "speedup": self.speedup}[self.flags.experiment]():
            command = ("" if self.is_full else "CUDA_VISIBLE_DEVICES= ") + python_command(*step.words)
            is_done = done.get(step.name) == step.words and step.is_done()
            print(f"\n# {step.name}{': done already' if is_done else ''}\n{command}", flush=True)
            if is_done or self.flags.dry_run:
                continue
            self.folder.mkdir(parents=True, exist_ok=True)
            env = os.environ | ({} if self.is_full else {"CUDA_VISIBLE_DEVICES": ""})
            if status := call([sys.executable, *step.words], env):
                raise ValueError(
                    f"{step.name} failed with exit status {status}: started again it goes on there"
                )
            write_json(file, done := done | {step.name: step.words})

    # --- The experiments

    def vit(self) -> Iterator[Step]:
        size, batch_size = self.flags.size, VIT_BATCH_SIZE[self.flags.size]
        recipe = ["train_vit.py", *VIT[size].split(), f"--batch_size={batch_size}", self.data]
        limit = [] if self.is_full else [f"--memory_limit_gib={LIMIT_GIB}"]
        runs, searches = [], []
        for name, (config, processes) in VIT_WAYS[size].items():
            run, search = self.folder / name, self.folder / f"{name}_batch.json"
            words = ["find_batch_size.py", *self.where(config), f"--output={search}", *limit, *recipe]
            yield Step(f"largest batch, {name}", words, search)
            share = largest_share(search, batch_size // processes)
            yield self.training(name, config, [*recipe, f"--per_device_batch_size={share}"])
            report = run / "validation" / "best"
            words = ["validate.py", str(run), f"--output_dir={report}"]
            yield Step(f"all metrics, {name}", words, report / "report.json")
            runs.append(run)
            searches.append(search)
        yield from self.pages(runs, searches)

    def speedup(self) -> Iterator[Step]:
        runs = []
        for config in CNN_WAYS:
            yield self.training(config, config, [*CNN[self.flags.size].split(), self.data])
            runs.append(self.folder / config)
        yield from self.pages(runs, [])

    # --- Their parts

    def where(self, config: str) -> list[str]:
        """Flags that launch.py, accelerate launch and find_batch_size.py have in common."""
        hosts = ["--hostfile", self.flags.hostfile] if "_2x" in config else []
        return ["--config_file", f"accelerate_configs/{config}.yaml", *hosts]

    def training(self, name: str, config: str, script: list[str]) -> Step:
        run = self.folder / name
        where = self.where(config)
        launcher = ["launch.py"] if "--hostfile" in where else ["-m", "accelerate.commands.launch"]
        s3 = [f"--s3={self.flags.s3.rstrip('/')}/{self.flags.size}/{name}"] if self.flags.s3 else []
        words = [*launcher, *where, *script, f"--output_dir={run}", *s3]
        return Step(f"training, {name}", words, run / "result.json")

    def pages(self, runs: list[Path], searches: list[Path]) -> Iterator[Step]:
        where = [f"--folder={self.flags.logbook}"] if self.flags.logbook else []
        folders = list(map(str, runs))
        yield Step("pages", ["logbook.py", "add", *folders, *where])
        found = ["--batch_search", *map(str, searches)] if searches else []
        name = f"--name={self.name}_{self.flags.size}"
        yield Step("comparison", ["logbook.py", "compare", *folders, *where, name, *found])


def call(words: list[str], env: dict[str, str]) -> int:
    """The exit status. SIGTERM reaches the command, as Ctrl-C does; what it saves then is waited for."""
    process = subprocess.Popen(words, env=env)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            return process.wait()


def largest_share(search: Path, share: int) -> int | str:
    """Of a process's images of a step, as many at a time as the search has found to fit; in a dry run, before
    the search, what will stand there.
    """
    if not search.exists():
        return f"<at most {share}, as {search.name} says>"
    answer = read_json(search)["answer"]
    return next(size for size in range(min(share, answer), 0, -1) if share % size == 0)


if __name__ == "__main__":
    sys.exit(run_command(main))
