"""Draw docs/one_curve.png, which compares the losses of seven training runs with a single-process run.

    python -m docs.one_curve --data FOLDER

All eight runs train for the same steps in fp32 with the same micro-batches. Five of the compared runs use
different strategies with 2 processes, one run uses 4 processes, and one run is elastic. The elastic run uses
torchrun with two agents, which represent hosts with two processes each. During the elastic run, the script
kills one agent with its processes and starts a new agent as a replacement.
"""

import contextlib
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from onecurve.system.cli import command_parser
from onecurve.system.files import read_json, read_lines
from onecurve.system.paths import ROOT

STEPS, KILLED_AT, JOINED_AT = 1200, 200, 400
ROUNDING = 2**-22  # distance between adjacent fp32 numbers from 2 to 4, the range of the first losses
TRAINING = ["train_vit.py", "--model", "test_vit", "--image_size", "32", "--patch_size", "8"]
TRAINING += ["--batch_size", "96", "--per_device_batch_size", "24", "--lr", "1e-3", "--epochs", "4"]
TRAINING += ["--max_steps", str(STEPS), "--mixed_precision", "no", "--log_every", "1", "--trackers", "none"]
TRAINING += ["--checkpoint_every", "50", "--checkpoint_s", "0", "--max_val_images", "500"]
ONE, ELASTIC = "1 process", "DDP, a host is killed and replaced"
CONFIGS = {"DDP": "ddp_2gpu", "FSDP2": "fsdp_2gpu", "ZeRO-1": "zero1_4gpu", "ZeRO-2": "zero2_2gpu"}
CONFIGS = {f"{name}, 2 processes": config for name, config in (CONFIGS | {"ZeRO-3": "zero3_4gpu"}).items()}
CONFIGS["DDP, 4 processes"] = "ddp_4gpu"


def accelerate(config: str) -> list[str]:
    count = "4" if config == "ddp_4gpu" else "2"
    words = ["-m", "accelerate.commands.launch", "--config_file", f"accelerate_configs/{config}.yaml"]
    return [*words, "--num_processes", count]


def losses(folder: Path) -> list[float]:
    """Return the logged losses in step order, with the last loss of each repeated step."""
    lines = read_lines(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
    by_step = {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}
    return [by_step[step] for step in sorted(by_step)]


def is_finished(folder: Path) -> bool:
    file = folder / "result.json"
    return file.exists() and read_json(file)["status"] == "finished"


@contextlib.contextmanager
def host(port: int, words: list[str], log: Path) -> Iterator[psutil.Popen]:
    """Run a torchrun agent. On exit, kill the agent and its processes, which run in separate sessions."""
    agent = ["-m", "torch.distributed.run", "--nnodes=1:2", "--nproc_per_node=2", "--max_restarts=1000"]
    agent += ["--rdzv_backend=c10d", f"--rdzv_endpoint=localhost:{port}", "--rdzv_id=1"]
    agent += ["--rdzv_conf=last_call_timeout=1,keep_alive_interval=1"]
    env = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with open(log, "ab") as output:
        command = [sys.executable, *agent, *words]
        process = psutil.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=output)
    try:
        yield process
    finally:
        if process.poll() is None:
            for member in [process, *process.children(recursive=True)]:
                member.kill()
        process.wait()


def wait_for_store(port: int) -> None:
    while True:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.2)


def wait_for(folder: Path, step: int, first: psutil.Popen) -> None:
    while len(losses(folder)) < step:
        if first.poll() is not None:
            raise SystemExit(f"The elastic run ended before step {step}. See the cause in {folder}.log.")
        time.sleep(0.5)


def train_elastic(folder: Path, words: list[str]) -> None:
    log = folder.with_suffix(".log")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with host(port, words, log) as first:
        wait_for_store(port)  # the rendezvous store must not run in the agent that is killed later
        with host(port, words, log):
            wait_for(folder, KILLED_AT, first)
        wait_for(folder, JOINED_AT, first)
        with host(port, words, log):
            wait_for(folder, STEPS, first)
            first.wait(120)


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--data", default="cifar10", metavar="DATA", help="data set (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "one_curve", help="parent of the runs")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "docs" / "one_curve.png", help="file of the plot"
    )
    flags = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    flags.folder.mkdir(parents=True, exist_ok=True)
    runs, gaps = {}, {}
    for number, name in enumerate([ONE, *CONFIGS, ELASTIC]):
        folder = flags.folder / str(number)
        words = [*TRAINING, "--data", flags.data, "--output_dir", str(folder)]
        print(f"{name}: {folder}", flush=True)
        if is_finished(folder):  # an earlier start of this command finished the run
            pass
        elif name == ELASTIC:
            train_elastic(folder, words)
        else:
            launcher = accelerate(CONFIGS[name]) if name in CONFIGS else []
            with open(folder.with_suffix(".log"), "wb") as log:
                command = [sys.executable, *launcher, *words]
                subprocess.run(command, check=True, cwd=ROOT, stdout=log, stderr=log)
        runs[name] = losses(folder)
        gaps[name] = max(abs(a - b) for a, b in zip(runs[name], runs[ONE], strict=True))
        print(f"    {len(runs[name])} steps, largest loss difference {gaps[name]:.2g}", flush=True)
    del gaps[ONE]
    draw(flags.output, {name: gap / ROUNDING for name, gap in gaps.items()})


def draw(path: Path, distances: dict[str, float]) -> None:
    """Draw each run's largest loss difference as a labelled bar, in fp32 rounding steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    bars = axes.barh(list(distances), list(distances.values()), height=0.6)
    axes.bar_label(bars, fmt="%.3g", padding=4)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.1 * max(distances.values()))
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel(
        "largest difference of a loss from the run on 1 process, in rounding steps of fp32\n"
        f"(a rounding step is {ROUNDING:.1e}; a loss of 2 equals {2 / ROUNDING:,.0f} rounding steps)"
    )
    axes.spines[["top", "right"]].set_visible(False)
    most = math.ceil(max(distances.values()))
    figure.suptitle(
        f"One loss curve: seven ways to train stay within {most} rounding steps of 1 process\n"
        f"(a small ViT on CIFAR-10, {STEPS:,} training steps, fp32)",
        fontsize=11,
    )
    figure.savefig(path)


if __name__ == "__main__":
    main()
