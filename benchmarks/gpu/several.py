"""Several GPUs: the doctor, strategies beside one GPU, a run handed round, lost ranks, and scaling."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.gpu.rows import (
    FAIL,
    OK,
    STRATEGIES,
    Result,
    Row,
    Setting,
    Skip,
    command,
    kill_all,
    run_flags,
    small_images,
    strategy,
    train,
    trained,
)
from benchmarks.gpu.strategies import WITHIN, loss_of

END_S = 60  # beyond --timeout_s, until a job with a stopped rank must have ended


def rows() -> dict[str, Row]:
    scripts = ("train_cnn_b", "train_vit")
    return {"doctor.py": doctor, **{f"{script}, scaling": scaling(script) for script in scripts}}


def checks() -> dict[str, Row]:
    found: dict[str, Row] = {f"{name} beside one GPU": parity(name) for name in STRATEGIES}
    found["zero: a ring of strategies"] = ring
    for name in STRATEGIES:
        found[f"{name}, a killed rank"] = lost(name, signal.SIGKILL)
        found[f"{name}, a stopped rank"] = lost(name, signal.SIGSTOP)
    return found


def processes(setting: Setting) -> int:
    if setting.gpus < 2 and not setting.dry_run:
        raise Skip("needs two GPUs")
    return 2 if setting.dry_run else setting.gpus


def doctor(setting: Setting) -> Result:
    hostfile = setting.folder / "hostfile"
    hostfile.write_text(f"localhost slots={processes(setting)}\n")
    done = command(setting, ["doctor.py", "--hostfile", hostfile, "--output_dir", setting.folder / "runs"])
    said = [line for line in done.output.splitlines() if "all-reduce (" in line or "FAILS" in line]
    return Result(
        expected="exit status 0", verdict=OK if done.status == 0 else FAIL, note="; ".join(said)[:300]
    )


def parity(name: str) -> Row:
    def row(setting: Setting) -> Result:
        launcher, flags, env = strategy(name, processes(setting))
        single = loss_of(setting, "single", [], [], {})
        off = abs(loss_of(setting, name, launcher, flags, env) - single)
        verdict = OK if off < WITHIN else FAIL
        return Result(float(f"{off:.2g}"), "of the loss to single", f"below {WITHIN}", verdict)

    return row


def ring(setting: Setting) -> Result:
    """One run, continued by each strategy in turn, ends near one that DDP trained alone."""
    count, step, folder = processes(setting), 0, setting.folder / "ring"
    words = [*small_images(setting, "train_cnn_a"), "--batch_size", 64, "--mixed_precision", "no"]
    words += ["--max_val_images", 256, "--deterministic"]
    result: dict[str, Any] = {}
    for name in STRATEGIES:
        launcher, flags, env = strategy(name, count)
        step += setting.size(5, 1)
        _, result = train(setting, folder.name, [*launcher, *words], "--max_steps", step, *flags, env=env)
    launcher, _, env = strategy("ddp", count)
    with trained(setting, "straight", [*launcher, *words], "--max_steps", step, env=env) as (_, straight):
        off = abs(result["final_loss"] - straight["final_loss"])
    return Result(float(f"{off:.2g}"), "of the loss", f"below {WITHIN}", OK if off < WITHIN else FAIL)


def lost(name: str, number: signal.Signals) -> Row:
    """A rank is killed or stopped in the middle of the training; the job must end by itself."""

    def row(setting: Setting) -> Result:
        launcher, flags, env = strategy(name, processes(setting))
        folder, timeout_s = setting.folder / f"{name}_{number.name}", setting.size(20, 5)
        words = [sys.executable, *launcher, *small_images(setting, "train_cnn_b"), "--epochs", 1000, *flags]
        words += [*run_flags(setting, folder, words), "--timeout_s", timeout_s, "--log_every", 1]
        given = [f"{key}={value}" for key, value in env.items()]
        with (setting.folder / f"{folder.name}.log").open("w") as output:
            job = subprocess.Popen(
                ["env", *given, *map(str, words)],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
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
        verdict = OK if job.returncode and seconds <= timeout_s + END_S else FAIL
        return Result(round(seconds, 1), "s until the job ended", f"at most {timeout_s + END_S}", verdict)

    return row


def wait_for(file: Path, job: subprocess.Popen, setting: Setting) -> None:
    while not (file.exists() and file.stat().st_size):
        if job.poll() is not None or setting.left_s < 0:
            raise RuntimeError("the training did not begin")
        time.sleep(0.2)


def ranks(job: subprocess.Popen) -> list[psutil.Process]:
    found = [
        p for p in descendants(job) if "train_cnn_b.py" in " ".join(p.cmdline()) and "RANK" in p.environ()
    ]
    return sorted(found, key=lambda p: int(p.environ()["RANK"]))


def descendants(job: subprocess.Popen) -> list[psutil.Process]:
    try:
        return psutil.Process(job.pid).children(recursive=True)
    except psutil.Error:
        return []


def scaling(script: str) -> Row:
    """Images a second of all GPUs, divided by their number and by one GPU's; each has as many images."""

    def row(setting: Setting) -> Result:
        count = processes(setting)
        speeds = {}
        for number in (1, count):
            launcher = strategy("ddp", number)[0]
            words = [*launcher, *small_images(setting, script)]
            each = int(re.findall(r"--batch_size (\d+)", " ".join(map(str, words)) + " --batch_size 128")[0])
            steps = ["--max_steps", setting.size(100, 3), "--batch_size", each * number]
            steps += ["--max_val_images", 64]
            with trained(setting, f"{script}_{number}", words, *steps) as (_, result):
                speeds[number] = result["images_per_s"]
        share = speeds[count] / count / speeds[1]
        return Result(
            round(share, 3), "of perfect scaling", 0.9, note=f"{speeds[count]:,.0f} images/s on {count}"
        )

    return row
