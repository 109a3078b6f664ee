"""Compare strategies with one process on one or more GPUs, and check doctor.py, lost ranks and scaling."""

import hashlib
import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.gpu import rows
from benchmarks.gpu.rows import Result, Row, Setting, check, on_gpu, row, small_images
from benchmarks.gpu.shared_gpu import has_new_nccl

SCRIPTS = ("train_cnn_a", "train_cnn_b", "train_vit")
STRATEGIES = ("ddp", "fsdp", "zero1", "zero2", "zero3")
FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
}
# This variable replaces --deterministic, whose exact sums ZeRO does not support with several processes.
NO_TF32 = {"NVIDIA_TF32_OVERRIDE": "0"}
WITHIN = 1e-4  # loss tolerance after a few steps in fp32; on a CPU, losses differ by 1e-5
END_S = 60  # maximum seconds from --timeout_s to the end of a job with a suspended rank


def strategies() -> dict[str, Row]:
    """Return rows for one process with the GPU's default backend, and for two ranks on one GPU."""
    table: dict[str, Row] = {
        "single": lambda setting: Result(round(loss_of(setting, "single", 1), 6), "loss")
    }
    table |= {f"{name}, one process": on_gpu(beside_single, name, 1) for name in STRATEGIES}
    table |= {f"{name}, two ranks on one GPU": row(beside_single, name, 2) for name in STRATEGIES}
    table["zero: all strategies in turn, two ranks on one GPU"] = on_gpu(ring, 2)
    for number in (signal.SIGKILL, signal.SIGSTOP):
        for graph in ("--step_graph", "--no_step_graph"):
            name = f"ddp, {number.name} to one of two ranks on one GPU, {graph}"
            table[name] = on_gpu(lost, "ddp", number, 2, graph)
    return table


def same_bits() -> dict[str, Row]:
    """Return the rows of all scripts.

    A dry run includes only CNN-A, because tests cover all scripts on CPUs.
    """
    table: dict[str, Row] = {}
    for script in SCRIPTS:
        make = row if script == "train_cnn_a" else on_gpu
        table[f"{script}, weights on 1, 2 and 4 ranks on one GPU"] = make(one_hash, script)
    return table


# Strategy, number of ranks, and True if each step runs as a CUDA graph
CASES = [("single", 1, False), ("ddp", 2, False), ("ddp", 2, True), ("ddp", 4, True), ("fsdp", 2, True)]


def one_hash(setting: Setting, script: str) -> Result:
    """Compare the SHA-256 of weights trained for 12 micro-batches per step, more than a graph's warm-up."""
    first = SCRIPTS.index(script)  # parallel rows start with different launches
    hashes = {case: hashes_of(setting, *case)[script] for case in [*CASES[first:], *CASES[:first]]}
    distinct = len(set(hashes.values()))
    names = [
        f"{name} on {count}{', graph' * is_graph} {hashes[name, count, is_graph]}"
        for name, count, is_graph in CASES
    ]
    return check(distinct == 1, distinct, "hashes", 1, "; ".join(names))


@rows.once
def hashes_of(setting: Setting, name: str, count: int, is_graph: bool) -> dict[str, str]:
    """Train all scripts in one launch, and return the first digits of each script's weight hash."""
    launcher, flags, env = launch(name, count)
    module = ["-m", "benchmarks.gpu.trainings"]
    if count > 1 and not setting.dry_run:
        module = [*shared(setting), "benchmarks/gpu/trainings.py"]  # shared_gpu starts files, not modules
    each, case = setting.size(32, 4), f"{name}_{count}{'_graph' * is_graph}"
    is_graph &= setting.dry_run or has_new_nccl()
    common = ["--deterministic", "--max_val_images", 64, "--max_steps", setting.size(16, 2), *flags]
    common += ["--batch_size", 12 * each, "--per_device_batch_size", each]
    common += ["--step_graph" if is_graph else "--no_step_graph"]
    folders, commands = {}, []
    for script in SCRIPTS[:1] if setting.dry_run else SCRIPTS:
        folders[script], words = setting.folder / f"{script}_{case}", small_images(setting, script)
        commands.append([*words, *rows.run_flags(setting, folders[script], words), *common])
    rows.train_all(setting, case, commands, [*launcher, *module], env)
    digits = {}
    for script, folder in folders.items():
        result = json.loads((folder / "result.json").read_text())
        if result["step_graph"] != is_graph:
            raise RuntimeError(f"{script}, {case}: step_graph is {result['step_graph']}")
        weights = (folder / result["checkpoint"] / "model.safetensors").read_bytes()
        digits[script] = hashlib.sha256(weights).hexdigest()[:12]
    return digits


def shared(setting: Setting) -> list[str]:
    """Return the flags that start a script whose ranks share one GPU. In a dry run, the list is empty."""
    return [] if setting.dry_run else ["-m", "benchmarks.gpu.shared_gpu"]


def scaling() -> dict[str, Row]:
    table: dict[str, Row] = {"doctor.py": doctor, "train_cnn_b, scaling": row(scales, "train_cnn_b")}
    return table | {"train_vit, scaling": on_gpu(scales, "train_vit")}


def several() -> dict[str, Row]:
    table: dict[str, Row] = {
        f"{name} compared with one GPU": on_gpu(beside_single, name) for name in STRATEGIES
    }
    table["zero: all strategies in turn"] = ring
    for name in STRATEGIES:
        table[f"{name}, a killed rank"] = (row if name == "ddp" else on_gpu)(lost, name, signal.SIGKILL)
        table[f"{name}, a stopped rank"] = (row if name == "ddp" else on_gpu)(lost, name, signal.SIGSTOP)
    return table


def launch(name: str, processes: int, *module: str) -> tuple[list[str], list[str], dict[str, str]]:
    """Return a strategy's launcher, flags and environment.

    `module` contains the flags that start the script.
    """
    if name == "single":
        return [], [], NO_TF32
    flags = ["--deepspeed_config", f"ds_configs/{name}.json"] if name.startswith("zero") else []
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", *module]
    return torchrun, flags, NO_TF32 | (FSDP if name == "fsdp" else {})


def all_gpus(setting: Setting) -> int:
    if setting.gpus < 2 and not setting.dry_run:
        raise rows.Skip("this row needs two GPUs")
    return 2 if setting.dry_run else setting.gpus


def beside_single(setting: Setting, name: str, processes: int | None = None) -> Result:
    """Compare a strategy's loss with the single-process loss.

    Args:
        setting: The section's settings.
        name: Strategy name.
        processes: Number of processes that share one GPU. None starts one process per GPU.
    """
    module = shared(setting) if processes == 2 else []
    loss = loss_of(setting, name, processes or all_gpus(setting), *module)
    return near(abs(loss - loss_of(setting, "single", 1)))


def near(difference: float) -> Result:
    return check(difference < WITHIN, float(f"{difference:.2g}"), "loss difference", f"below {WITHIN}")


def fp32(setting: Setting) -> list[Any]:
    """Return the flags that train CNN-A in fp32.

    BatchNorm in other models would amplify rounding errors 100 times in a few steps.
    """
    words = [*small_images(setting, "train_cnn_a"), "--batch_size", 64, "--mixed_precision", "no"]
    return [*words, "--max_val_images", 256]


@rows.once
def loss_of(setting: Setting, name: str, processes: int, *module: str) -> float:
    """Train for a few steps and return the validation loss."""
    launcher, flags, env = launch(name, processes, *module)
    steps = ["--per_device_batch_size", 32, "--max_steps", setting.size(10, 2), *flags]
    words = [*launcher, *fp32(setting)]
    with rows.trained(setting, f"{name}_{processes}", words, *steps, env=env) as (_, result):
        return result["final_loss"]


def doctor(setting: Setting) -> Result:
    hostfile = setting.folder / "hostfile"
    hostfile.write_text(f"localhost slots={all_gpus(setting)}\n")
    words = ["doctor.py", "--hostfile", hostfile, "--output_dir", setting.folder / "runs"]
    done = rows.command(setting, words)
    lines = [line for line in done.output.splitlines() if "all-reduce (" in line or "FAILS" in line]
    return check(done.status == 0, promised="exit status 0", note="; ".join(lines)[:300])


def ring(setting: Setting, processes: int | None = None) -> Result:
    """Resume a run under each strategy in turn, and check that its loss is close to a DDP run's loss.

    All `processes` share one GPU. None starts one process per GPU.
    """
    count, each = processes or all_gpus(setting), setting.size(5, 1)
    module = shared(setting) if processes else []
    strategies = STRATEGIES if processes is None else ("ddp", "fsdp", "zero3")  # each start takes 12 s
    turns = [("ring", name, (i + 1) * each) for i, name in enumerate(strategies)]
    losses = []
    for folder, name, step in [*turns, ("straight", "ddp", len(strategies) * each)]:
        launcher, flags, env = launch(name, count, *module)
        words = [*launcher, *fp32(setting)]
        losses += [rows.train(setting, folder, words, "--max_steps", step, *flags, env=env)[1]["final_loss"]]
    return near(abs(losses[-1] - losses[-2]))


def lost(
    setting: Setting, name: str, number: signal.Signals, processes: int | None = None, *graph: str
) -> Result:
    """Check that a job ends after one of its ranks is killed or suspended during training.

    Args:
        setting: The section's settings.
        name: Strategy name.
        number: Signal to send to the rank.
        processes: Number of processes that share one GPU. None starts one process per GPU.
        graph: Flag that enables or disables step graphs.
    """
    if "--step_graph" in graph and not has_new_nccl():
        raise rows.Skip("this row needs NCCL 2.30")
    launcher, flags, env = launch(
        name, processes or all_gpus(setting), *(shared(setting) if processes else ())
    )
    case = "_".join([name, number.name, *graph]).replace("--", "")
    folder, timeout_s = setting.folder / case, setting.size(20, 5)
    words = [*launcher, *small_images(setting, "train_cnn_b"), "--epochs", 1000, *flags, *graph]
    words += [*rows.run_flags(setting, folder, words), "--timeout_s", timeout_s, "--log_every", 1]
    log = setting.folder / f"{folder.name}.log"
    with log.open("w") as output, rows.started(words, output, env) as job:
        wait_for(folder / "metrics.jsonl", job, setting, 30 if graph else 1)
        began = time.monotonic()
        ranks(job)[-1].send_signal(number)
        status = job.wait(max(1, min(timeout_s + 2 * END_S, setting.left_s)))
        seconds = time.monotonic() - began
    ends = bool(status) and seconds <= timeout_s + END_S
    return check(ends, round(seconds, 1), "s until the job ended", f"at most {timeout_s + END_S}")


def wait_for(file: Path, job: psutil.Popen, setting: Setting, lines: int) -> None:
    """Wait until the log contains `lines` lines, one per step.

    A graph is replayed only after several warm-up steps.
    """
    while not file.exists() or file.read_text().count("\n") < lines:
        if job.poll() is not None or setting.left_s < 0:
            raise RuntimeError("the training run did not start")
        time.sleep(0.2)


def ranks(job: psutil.Popen) -> list[psutil.Process]:
    children = job.children(recursive=True)
    trainers = [p for p in children if "train_cnn_b.py" in " ".join(p.cmdline()) and "RANK" in p.environ()]
    return sorted(trainers, key=lambda p: int(p.environ()["RANK"]))


def scales(setting: Setting, script: str) -> Result:
    """Measure weak scaling, which is images/s per GPU relative to one GPU with the same images per GPU."""
    speeds: dict[int, float] = {}
    for number in (1, count := all_gpus(setting)):
        words: list[Any] = [*launch("ddp", number)[0], *small_images(setting, script)]
        per_gpu = int(re.findall(r"--batch_size (\d+)", " ".join(map(str, words)) + " --batch_size 128")[0])
        steps = ["--max_steps", setting.size(100, 3), "--batch_size", per_gpu * number]
        steps += ["--max_val_images", 64]
        with rows.trained(setting, f"{script}_{number}", words, *steps) as (_, result):
            speeds[number] = result["images_per_s"]
    share = round(speeds[count] / count / speeds[1], 3)
    note = f"{speeds[count]:,.0f} images/s on {count}"
    return Result(share, "of perfect scaling", 0.9, note=note)
