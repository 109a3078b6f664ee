"""The strategies that plan.py compares: their config files, and a trace of each."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch

from common.system.paths import ROOT
from tools.plan.result import Measured, Trace

CONFIGS = {  # strategy: its config file
    "single": "single_gpu",
    "ddp": "ddp_4gpu",
    "fsdp": "fsdp_4gpu",
    "hybrid": "fsdp_2x4gpu",
    "zero1": "zero1_4gpu",
    "zero2": "zero2_4gpu",
    "zero3": "zero3_4gpu",
    "offload": "zero3_offload_4gpu",
}


def config_file(strategy: str) -> str:
    return f"accelerate_configs/{CONFIGS[strategy]}.yaml"


def possible(hosts: int, gpus: int, grad_compression: str) -> list[str]:
    """The strategies for a cluster of hosts x gpus devices."""
    if hosts * gpus == 1:
        return ["single", "offload"]
    if grad_compression != "no":  # the others refuse it
        return ["single", "ddp"]
    return [name for name in CONFIGS if name != "hybrid" or (hosts > 1 and gpus > 1)]


def processes_of(strategy: str, hosts: int, gpus: int) -> int:
    return 1 if strategy == "single" else hosts * gpus


def shards(strategy: str, hosts: int, gpus: int) -> int:
    """The ranks that share the optimizer's state."""
    if strategy in ("single", "ddp"):
        return 1
    return gpus if strategy == "hybrid" else hosts * gpus


def traced(
    strategy: str, hosts: int, gpus: int, sizes: Sequence[int], memory_bytes: float, script: Sequence[str]
) -> Trace:
    """Traces a micro-batch of each size in a process of its own. ValueError with its last words.

    memory_bytes: of a device. script: the script and its flags; a later flag wins.
    """
    words = [config_file(strategy), str(processes_of(strategy, hosts, gpus))]
    words += [str(1 if strategy == "single" else hosts)]
    words += [",".join(map(str, sizes)), str(memory_bytes), *script]
    env = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return Trace.from_json(_last_line("trace", words, env, f"{strategy} can't be traced"))


def measured(strategy: str, size: int, script: Sequence[str]) -> Measured:
    """Times the strategy's engine on micro-batches of `size` images, in one process on the device at hand."""
    words = [config_file(strategy), str(size), *script]
    env = {} if torch.cuda.is_available() else {"CUDA_VISIBLE_DEVICES": ""}
    return Measured(**json.loads(_last_line("measure", words, env, f"--measure: {strategy}")))


def _last_line(module: str, words: Sequence[str], env: dict[str, str], what: str) -> str:
    """What a module of this folder prints last. ValueError with its last words where it fails."""
    command = [sys.executable, "-m", f"tools.plan.{module}", *words]
    env = os.environ | {"PYTHONPATH": str(ROOT)} | env
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise ValueError(f"{what}: {said[-1].removeprefix('error: ') if said else 'the process was killed'}")
    return done.stdout.splitlines()[-1]


def compressed(trace: Trace, grad_compression: str) -> Trace:
    """The trace with half of the bytes where DDP exchanges gradients in 16 bits."""
    if grad_compression == "no" or trace.strategy != "ddp":
        return trace
    return replace(trace, collectives=[(kind, moved // 2, n) for kind, moved, n in trace.collectives])
