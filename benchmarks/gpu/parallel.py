"""Strategies beside one process: on one GPU, and on several, with the doctor, lost ranks and scaling."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.gpu.rows import (
    Result,
    Row,
    Setting,
    Skip,
    check,
    command,
    kill_all,
    one_at_a_time,
    run_flags,
    small_images,
    train,
    trained,
)

STRATEGIES = ("ddp", "fsdp", "zero1", "zero2", "zero3")
FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
}
WITHIN = 1e-4  # of the loss after some steps in fp32; on a CPU it is 1e-5
END_S = 60  # beyond --timeout_s, until a job with a stopped rank must have ended


def strategies() -> dict[str, Row]:
    """One process with the GPU's own backend, and two ranks that share one GPU over gloo."""
    found: dict[str, Row] = {"single": reference}
    found |= {f"{name}, one process": beside_single(name, 1) for name in STRATEGIES}
    return found | {f"{name}, two ranks on one GPU, gloo": beside_single(name, 2) for name in STRATEGIES}


def scaling() -> dict[str, Row]:
    rows: dict[str, Row] = {"doctor.py": doctor}
    return rows | {f"{script}, scaling": scales(script) for script in ("train_cnn_b", "train_vit")}


def several() -> dict[str, Row]:
    found: dict[str, Row] = {f"{name} beside one GPU": beside_single(name, None) for name in STRATEGIES}
    found["zero: a ring of strategies"] = ring
    for name in STRATEGIES:
        found[f"{name}, a killed rank"] = lost(name, signal.SIGKILL)
        found[f"{name}, a stopped rank"] = lost(name, signal.SIGSTOP)
    return found


def launch(name: str, processes: int) -> tuple[list[str], list[str], dict[str, str]]:
    """Launcher, flags and environment of a strategy."""
    flags = ["--deepspeed_config", f"ds_configs/{name}.json"] if name.startswith("zero") else []
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    return torchrun, flags, FSDP if name == "fsdp" else {}


def all_gpus(setting: Setting) -> int:
    if setting.gpus < 2 and not setting.dry_run:
        raise Skip("needs two GPUs")
    return 2 if setting.dry_run else setting.gpus


def reference(setting: Setting) -> Result:
    return Result(round(loss_of(setting, "single", [], [], {}), 6), "loss")


def beside_single(name: str, processes: int | None) -> Row:
    """processes: that share one GPU; None: one for each GPU."""

    def row(setting: Setting) -> Result:
        if setting.dry_run and processes is None:
            raise Skip("a row of `strategies` in a dry run")
        launcher, flags, env = launch(name, processes or all_gpus(setting))
        single = loss_of(setting, "single", [], [], {})
        shared = ["-m", "benchmarks.gpu.shared_gpu"] if processes == 2 and not setting.dry_run else []
        off = abs(loss_of(setting, f"{name} {processes}", [*launcher, *shared], flags, env) - single)
        return near(off)

    return row


def near(off: float) -> Result:
    return check(off < WITHIN, float(f"{off:.2g}"), "of the loss", f"below {WITHIN}")


_losses: dict[Path, float] = {}


def loss_of(setting: Setting, name: str, launcher: list, flags: list, env: dict[str, str]) -> float:
    """The validation loss after some steps of CNN-A in fp32, without TF32; trained once in a section.

    BatchNorm would multiply rounding by a hundred within a few steps.
    """
    key = setting.folder / name
    words = [*launcher, *small_images(setting, "train_cnn_a"), "--batch_size", 64, "--mixed_precision", "no"]
    steps = ["--per_device_batch_size", 32, "--max_steps", setting.size(10, 2), "--max_val_images", 256]
    with one_at_a_time(key):
        if key not in _losses:
            flags = [*steps, "--deterministic", *flags]
            with trained(setting, name, words, *flags, env=env) as (_, result):
                _losses[key] = result["final_loss"]
        return _losses[key]


def doctor(setting: Setting) -> Result:
    hostfile = setting.folder / "hostfile"
    hostfile.write_text(f"localhost slots={all_gpus(setting)}\n")
    done = command(setting, ["doctor.py", "--hostfile", hostfile, "--output_dir", setting.folder / "runs"])
    found = [line for line in done.output.splitlines() if "all-reduce (" in line or "FAILS" in line]
    return check(done.status == 0, promised="exit status 0", note="; ".join(found)[:300])


def ring(setting: Setting) -> Result:
    """One run, continued by each strategy in turn, ends near one that DDP trained alone."""
    count, step, result = all_gpus(setting), 0, {}
    words = [*small_images(setting, "train_cnn_a"), "--batch_size", 64, "--mixed_precision", "no"]
    words += ["--max_val_images", 256, "--deterministic"]
    for name in STRATEGIES:
        launcher, flags, env = launch(name, count)
        step += setting.size(5, 1)
        _, result = train(setting, "ring", [*launcher, *words], "--max_steps", step, *flags, env=env)
    launcher, _, env = launch("ddp", count)
    with trained(setting, "straight", [*launcher, *words], "--max_steps", step, env=env) as (_, straight):
        return near(abs(result["final_loss"] - straight["final_loss"]))


def lost(name: str, number: signal.Signals) -> Row:
    """A rank is killed or stopped in the middle of the training; the job must end by itself."""

    def row(setting: Setting) -> Result:
        if setting.dry_run and (name, number) == ("fsdp", signal.SIGSTOP):
            raise Skip("a dry run has only DDP's")
        launcher, flags, env = launch(name, all_gpus(setting))
        folder, timeout_s = setting.folder / f"{name}_{number.name}", setting.size(20, 5)
        words = [sys.executable, *launcher, *small_images(setting, "train_cnn_b"), "--epochs", 1000, *flags]
        words += [*run_flags(setting, folder, words), "--timeout_s", timeout_s, "--log_every", 1]
        words = ["env", *(f"{key}={value}" for key, value in env.items()), *map(str, words)]
        with (setting.folder / f"{folder.name}.log").open("w") as output:
            job = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                wait_for(folder / "metrics.jsonl", job, setting)
                victim = ranks(job)[-1]
                began = time.monotonic()
                victim.send_signal(number)
                job.wait(max(1, min(timeout_s + 2 * END_S, setting.left_s)))
                seconds = time.monotonic() - began
            finally:
                if job.poll() is None:
                    kill_all(psutil.Process(job.pid))
        ends = bool(job.returncode) and seconds <= timeout_s + END_S
        return check(ends, round(seconds, 1), "s until the job ended", f"at most {timeout_s + END_S}")

    return row


def wait_for(file: Path, job: subprocess.Popen, setting: Setting) -> None:
    while not (file.exists() and file.stat().st_size):
        if job.poll() is not None or setting.left_s < 0:
            raise RuntimeError("the training did not begin")
        time.sleep(0.2)


def ranks(job: subprocess.Popen) -> list[psutil.Process]:
    below = psutil.Process(job.pid).children(recursive=True)
    found = [p for p in below if "train_cnn_b.py" in " ".join(p.cmdline()) and "RANK" in p.environ()]
    return sorted(found, key=lambda p: int(p.environ()["RANK"]))


def scales(script: str) -> Row:
    """Images a second of all GPUs, divided by their number and by one GPU's; each has as many images."""

    def row(setting: Setting) -> Result:
        if setting.dry_run and script != "train_cnn_b":
            raise Skip("a dry run has only train_cnn_b's")
        speeds: dict[int, float] = {}
        for number in (1, count := all_gpus(setting)):
            words: list[Any] = [*launch("ddp", number)[0], *small_images(setting, script)]
            each = int(re.findall(r"--batch_size (\d+)", " ".join(map(str, words)) + " --batch_size 128")[0])
            steps = ["--max_steps", setting.size(100, 3), "--batch_size", each * number]
            steps += ["--max_val_images", 64]
            with trained(setting, f"{script}_{number}", words, *steps) as (_, result):
                speeds[number] = result["images_per_s"]
        share = round(speeds[count] / count / speeds[1], 3)
        note = f"{speeds[count]:,.0f} images/s on {count}"
        return Result(share, "of perfect scaling", 0.9, note=note)

    return row
