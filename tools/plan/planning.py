"""Plan for training on a cluster, with the lines of plan.py's table and a recommendation."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

from onecurve.data.shards import MANIFEST, parse_manifest
from onecurve.flags.recipe import parse_fold, share_out
from onecurve.models.script import count_training_images, load_script, recipe_of
from onecurve.system.paths import ROOT
from onecurve.system.processes import allowed_cores
from onecurve.telemetry.flops import DeviceSpecs, find_device, known_devices
from tools.plan import cost
from tools.plan.cost import Cluster, Execution, Trace

MAX_PARALLEL_TRACES = 4  # a trace needs about 1 GiB of memory
# All strategies in the order of the table, which starts with the simplest strategy
STRATEGIES = ("single", "ddp", "fsdp", "hybrid", "zero1", "zero2", "zero3", "offload")
# Names of accelerate configs that differ from `<strategy>_4gpu`
CONFIG_BY_STRATEGY = {"single": "single_gpu", "hybrid": "fsdp_2x4gpu", "offload": "zero3_offload_4gpu"}
EQUAL_SPEED_RATIO = 1.05  # ratio of two speeds below which the estimates can't distinguish them
SIZE_COLUMNS = ("strategy", "GiB", "images", "largest", "link MB", "net MB")
TABLE_HEAD = (*SIZE_COLUMNS, "step ms", "images/s", "eff.", "hours", "limited by")
TABLE_ROW = "{:<9}{:>7}{:>8}{:>9}{:>9}{:>8}{:>10}{:>10}{:>6}{:>9}  {}"


class Candidate(NamedTuple):
    """Traced strategy."""

    strategy: str
    trace: Trace
    image_count: int  # images per forward pass, or 0 if no batch fits into memory
    largest_image_count: int  # maximum number of images per forward pass that fit into memory


@dataclass(frozen=True)
class PlanLine:
    """Line of the plan for one strategy. All numbers describe one device unless stated otherwise."""

    strategy: str
    config_file: str
    memory: dict[str, int]  # bytes in each memory category
    images: int  # number of images per forward pass, or 0 if no batch fits into memory
    largest: int  # maximum number of images per forward pass that fit into memory
    limit: str  # name of the bottleneck, for example `compute`
    link_bytes: float = 0  # bytes that a device sends within the host per step
    network_bytes: float = 0  # bytes that a host sends to other hosts per step
    step_s: float | None = None  # duration of an optimizer step, or None without an estimate
    images_per_s: float | None = None  # total speed of all devices
    efficiency: float | None = None  # images/s per device, relative to a job on a single device
    hours: float | None = None  # time for the entire recipe, or None if the number of images is unknown

    def __str__(self) -> str:
        """Return the line as a row of the printed table."""
        total_gib = sum(self.memory.values()) / 2**30
        table_cells = [self.strategy, f"{total_gib:.2f}", self.images or "-", f"{self.largest:,}"]
        table_cells += [_format_cell(self.link_bytes / 1e6), _format_cell(self.network_bytes / 1e6)]
        table_cells += [_format_cell(self.step_s and self.step_s * 1e3, 1), _format_cell(self.images_per_s)]
        table_cells += [_format_cell(estimate, 2) for estimate in (self.efficiency, self.hours)]
        return TABLE_ROW.format(*table_cells, self.limit)

    def rejection_reason(self, recommended_line: "PlanLine") -> str:
        """Return the reason why `recommended_line` is recommended instead of this line's strategy."""
        if not self.images:
            return f"at most {self.largest} images per forward pass fit into memory"
        if not self.images_per_s or not recommended_line.images_per_s:
            slowdown_text = "slower by an amount that this plan does not estimate"
            return f"the optimizer runs on the CPU, which is {slowdown_text}"
        return f"{recommended_line.images_per_s / self.images_per_s:.2f} times as long"


def _format_cell(cell_number: float | None, decimals: int = 0) -> str:
    return "-" if cell_number is None else f"{cell_number:,.{decimals}f}"


def cluster_of(host_count: int, gpus_per_host: int, device_name: str, network_gb_s: float | None) -> Cluster:
    """Return a cluster of the named devices.

    Args:
        host_count: Number of hosts.
        gpus_per_host: Number of devices per host.
        device_name: Device name.
        network_gb_s: Network bandwidth of each host in GB/s, or None for the bandwidth in devices.yaml.
    """
    device = named_device(device_name)
    return Cluster(host_count, gpus_per_host, device, network_gb_s or device.network_gb_s)


def named_device(device_name: str) -> DeviceSpecs:
    """Return the device with a name from torch, or the first device whose name contains all words of a name.

    Raises:
        ValueError: If no device matches.
    """
    if exact_device := find_device(device_name):
        return exact_device
    requested_words = _words_in(device_name)
    matching_devices = [device for device in known_devices() if requested_words <= _words_in(device.name)]
    if not matching_devices:
        known_names = ", ".join(device.name for device in known_devices())
        raise ValueError(f"--gpu {device_name} is not in the table of devices. Choose one of {known_names}.")
    if other_device_names := ", ".join(device.name for device in matching_devices[1:]):
        device_choice = f"Using {matching_devices[0].name} instead of {other_device_names}"
        print(f"--gpu {device_name} matches several devices. {device_choice}.")
    return matching_devices[0]


def _words_in(device_name: str) -> set[str]:
    return set(re.findall(r"\w+", device_name.lower()))


def _count_training_images(data_location: str, holdout: float | str | None) -> int | None:
    """Return the number of training images without held-out images, or None if the number is unknown.

    Args:
        data_location: Value of --data, for example a folder with a manifest or class folders.
        holdout: Value of --holdout: a share, a number of images, or a fold such as `1/5`.
    """
    manifest_file = Path(data_location) / MANIFEST
    if manifest_file.is_file():
        training_shards = parse_manifest(manifest_file.read_bytes(), data_location).splits["train"].shards
        image_count = sum(shard.images for shard in training_shards)
    elif not (image_count := count_training_images(data_location) or 0):
        return None
    if isinstance(holdout, str):
        _fold_index, fold_count = parse_fold(holdout)
        share_or_count = 1 / fold_count  # each fold holds out the same share
    else:
        share_or_count = holdout or 0
    held_out_images = round(share_or_count * image_count if share_or_count < 1 else share_or_count)
    return image_count - held_out_images


class Planning:
    """Plan for a train script with its flags on a cluster.

    Raises:
        ValueError: If the script or a flag is wrong.
    """

    def __init__(self, script_command: Sequence[str], cluster: Cluster):
        """Load the script, parse its flags, and choose the precision and the strategies. Trace nothing yet.

        Args:
            script_command: The script's path, followed by the script's flags.
            cluster: Cluster on which the script would train.
        """
        self.script_command, self.cluster = list(script_command), cluster
        script_path, *self.script_flags = script_command
        if not Path(script_path).is_file():
            raise ValueError(f"the script {script_path} does not exist")
        loaded_script = load_script(Path(script_path))
        self.recipe = recipe_of(loaded_script, self.script_flags)
        # execution() inspects the function's signature. No method calls the function.
        self.build_optimizer = getattr(loaded_script, "build_optimizer", lambda: None)
        if self.recipe.freeze:
            freeze_remark = "--freeze is ignored. The plan assumes that all layers are trained"
            print(f"{freeze_remark}, which requires more memory, traffic and time.")
        self.training_image_count = _count_training_images(self.recipe.data, self.recipe.holdout)
        # Raise ValueError for a batch size that train scripts refuse.
        share_out(self.recipe.batch_size, self.recipe.per_device_batch_size, cluster.process_count)
        supported_dtypes = (dtype for dtype in ("bf16", "fp16") if dtype in cluster.device.peaks)
        self.precision = self.recipe.mixed_precision or next(supported_dtypes, "no")
        grad_compression = self.recipe.grad_compression
        self.strategies = possible_strategies(cluster.host_count, cluster.gpus_per_host, grad_compression)
        self.first_speed_per_device = 0.0  # images/s per device under the first strategy
        self.min_launches = 0  # number of kernels under the first strategy, the minimum for all engines

    @property
    def summary(self) -> str:
        """Text with the devices, their memory, the batch size and the precision."""
        cluster, device = self.cluster, self.cluster.device
        memory_gib = device.memory_gb * 1e9 / 2**30
        devices_text = f"{cluster.host_count} x {cluster.gpus_per_host} {device.name}"
        recipe_text = f"batch {self.recipe.batch_size}, mixed precision {self.precision}"
        return f"{devices_text}, {memory_gib:.0f} GiB each, {recipe_text}"

    @property
    def link_speeds(self) -> str:
        """Speeds of the links that carry the traffic in columns `link MB` and `net MB`."""
        cluster = self.cluster
        link_gb_s = cluster.device.link_gb_s / 2  # data sheets state the sum for both directions
        link_text = f"{cluster.device.link} {link_gb_s:g} GB/s"
        return f"link: {link_text} per device; network: {cluster.network_gb_s:g} GB/s per host"

    @property
    def json_header(self) -> dict[str, Any]:
        """Facts about the script, the recipe and the cluster, for the plan's JSON file."""
        return {
            "about": self.summary,
            "script": Path(self.script_command[0]).stem,
            "flags": self.script_flags,
            "batch_size": self.recipe.batch_size,
            "epochs": self.recipe.epochs,
            "mixed_precision": self.precision,
            "hosts": self.cluster.host_count,
            "gpus": self.cluster.gpus_per_host,
            "gpu": self.cluster.device.name,
            "link": self.cluster.device.link,
            "network_gb_s": self.cluster.network_gb_s,
        }

    def candidates(self, report_progress: Callable[[str], None]) -> Iterator[Candidate]:
        """Trace all strategies in parallel subprocesses, and yield the candidates in the strategies' order.

        Each trace calls report_progress() with a description first, from a worker thread.
        """
        with ThreadPoolExecutor(min(MAX_PARALLEL_TRACES, allowed_cores())) as pool:
            trace_and_report = partial(self.trace_strategy, report_progress=report_progress)
            yield from pool.map(trace_and_report, self.strategies)

    def trace_strategy(
        self, strategy: str, report_progress: Callable[[str], None] = lambda _description: None
    ) -> Candidate:
        """Trace a strategy with the recipe's batch, or with smaller micro-batches that fit into memory.

        A micro-batch consists of the same number of images on each device. This number must divide the
        device's share of the batch.
        """
        report_progress(f"tracing {strategy}")
        process_count, batch_size = self._process_count(strategy), self.recipe.batch_size
        image_count = self.recipe.per_device_batch_size or batch_size // process_count
        strategy_trace = self._trace(strategy, image_count)
        memory_bytes = self.cluster.device.memory_gb * 1e9
        largest_image_count = cost.estimate_largest_size(strategy_trace.peak_bytes, memory_bytes)
        if largest_image_count < image_count:
            fitting_counts = range(1, largest_image_count + 1)
            divisors = [count for count in fitting_counts if batch_size % (count * process_count) == 0]
            image_count = max(divisors, default=0)
            strategy_trace = self._trace(strategy, image_count) if image_count else strategy_trace
        strategy_trace = compress_traffic(strategy_trace, self.recipe.grad_compression)
        return Candidate(strategy, strategy_trace, image_count, largest_image_count)

    def _trace(self, strategy: str, image_count: int) -> Trace:
        """Run tools/plan/trace.py in a subprocess without GPUs, and return the trace that it prints.

        The subprocess traces `image_count` images per forward pass, and twice as many.

        Raises:
            ValueError: If the subprocess fails. The message contains its last error line.
        """
        host_count = 1 if strategy == "single" else self.cluster.host_count
        image_counts = f"{image_count},{2 * image_count}"
        trace_arguments = [config_of_strategy(strategy), self._process_count(strategy), host_count]
        trace_arguments += [image_counts, self.cluster.device.name]
        trace_arguments += [*self.script_command, f"--mixed_precision={self.precision}"]
        trace_env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        trace_command = [sys.executable, "-m", "tools.plan.trace", *map(str, trace_arguments)]
        traced_run = subprocess.run(trace_command, env=trace_env, capture_output=True, text=True, check=False)
        if traced_run.returncode:
            error_lines = [error_line for error_line in traced_run.stderr.splitlines() if error_line.strip()]
            last_error_line = error_lines[-1] if error_lines else "the tracing process was killed"
            trace_problem = last_error_line.removeprefix("error: ")
            raise ValueError(f"the strategy {strategy} can't be traced: {trace_problem}")
        *_, trace_json = traced_run.stdout.splitlines()  # libraries may print other lines first
        return Trace.from_json(trace_json)

    def _process_count(self, strategy: str) -> int:
        return 1 if strategy == "single" else self.cluster.process_count

    def plan_line(self, strategy: str, trace: Trace, image_count: int, largest_image_count: int) -> PlanLine:
        """Return the plan's line for a strategy.

        Call this method for all strategies in the table's order. The first strategy with a batch that fits
        into memory sets `min_launches` for all strategies. The first strategy with an estimated speed sets
        the speed per device to which all efficiencies are relative.

        Args:
            strategy: Strategy name.
            trace: Trace of a step under the strategy.
            image_count: Number of images per forward pass, or 0 if no batch fits into memory.
            largest_image_count: Maximum number of images per forward pass that fit into memory.
        """
        process_count = self._process_count(strategy)
        memory_bytes = memory_by_part(strategy, trace)
        config_file = config_of_strategy(strategy)
        plan_line = PlanLine(
            strategy, config_file, memory_bytes, image_count, largest_image_count, limit="does not fit"
        )
        if not image_count:
            return plan_line
        self.min_launches = self.min_launches or len(trace.operations)
        cluster = self.cluster if process_count > 1 else replace(self.cluster, host_count=1, gpus_per_host=1)
        accumulations = self.recipe.batch_size // (image_count * process_count)
        link_bytes, network_bytes = cost.sent_bytes(trace, cluster, accumulations)
        plan_line = replace(plan_line, link_bytes=link_bytes, network_bytes=network_bytes)
        if strategy == "offload":  # the trace does not show how long the CPU's optimizer takes
            return replace(plan_line, limit="the CPU's optimizer")
        execution = self.execution(strategy)
        step_s, bottleneck = cost.step_time(trace, cluster, execution, self.min_launches, accumulations)
        images_per_s = self.recipe.batch_size / step_s
        self.first_speed_per_device = self.first_speed_per_device or images_per_s / process_count
        return replace(
            plan_line,
            limit=self.cluster.device.link if bottleneck == cost.LINK else bottleneck,
            step_s=step_s,
            images_per_s=images_per_s,
            efficiency=images_per_s / process_count / self.first_speed_per_device,
            hours=self._step_count() * step_s / 3600 if self.training_image_count else None,
        )

    def _step_count(self) -> int:
        """Return the number of optimizer steps in the entire recipe, or 0 if the data's size is unknown."""
        step_count = (self.training_image_count or 0) // self.recipe.batch_size * self.recipe.epochs
        return min(step_count, self.recipe.max_steps or step_count)

    def execution(self, strategy: str) -> Execution:
        """Return the measured constants for steps under a strategy.

        The conditions repeat those in step_graph.py that depend on flags only. step_graph.py decides during
        training whether a step runs as a CUDA graph.
        """
        recipe = self.recipe
        uses_cuda_graph = strategy in ("single", "ddp", "fsdp") and recipe.step_graph is not False
        uses_cuda_graph &= self.precision != "fp16" and recipe.compile in (None, "no", "default")
        uses_cuda_graph &= not recipe.grad_checkpointing and recipe.grad_compression == "no"
        # A CUDA graph needs a fused optimizer. build_optimizer() supports fused SGD if it accepts `fused`.
        fuses_sgd = "fused" in signature(self.build_optimizer).parameters and strategy != "fsdp"
        fused_optimizers = ("adamw", "sgd") if fuses_sgd else ("adamw",)
        uses_cuda_graph &= recipe.optimizer in fused_optimizers
        return Execution.of(recipe.compile, uses_cuda_graph)

    def recommendation(self, plan_lines: Sequence[PlanLine]) -> str:
        """Return a text with the recommended strategy, its command, and reasons against other strategies.

        On several devices, `single` is only the baseline and is never recommended.
        """
        has_one_process = self.cluster.process_count == 1
        candidate_lines = [line for line in plan_lines if line.strategy != "single" or has_one_process]
        if not (fitting_lines := [line for line in candidate_lines if line.images]):
            return "No strategy fits into the memory. Use more GPUs, --grad_checkpointing or a smaller model."
        min_images_per_s = max(line.images_per_s or 0 for line in fitting_lines) / EQUAL_SPEED_RATIO
        # STRATEGIES starts with the simplest strategy, so the first line that is fast enough is the simplest.
        best_line = next(line for line in fitting_lines if (line.images_per_s or 0) >= min_images_per_s)
        choice_reason = f"the simplest strategy within {(EQUAL_SPEED_RATIO - 1) * 100:.0f} % of the fastest"
        if best_line.limit == cost.LAUNCHES:  # the estimate ignores differences in launch overhead
            best_line = next(line for line in fitting_lines if line.limit == cost.LAUNCHES)
            choice_reason = "the simplest strategy that is limited by launch overhead"
        rejected_lines = [line for line in candidate_lines if line is not best_line]
        rejections = [f"  not {line.strategy}: {line.rejection_reason(best_line)}" for line in rejected_lines]
        recommendation_heading = f"\nRecommended: {best_line.strategy} ({choice_reason}):"
        training_command = self._training_command(best_line)
        return "\n".join([recommendation_heading, f"    {shlex.join(training_command)}", *rejections])

    def _training_command(self, plan_line: PlanLine) -> list[str]:
        """Return the words of the command that starts the training as planned."""
        has_several_hosts = self.cluster.host_count > 1
        launch_py_command = ["python", "launch.py", "--hostfile", "hostfile"]
        training_command = launch_py_command if has_several_hosts else ["accelerate", "launch"]
        training_command += ["--config_file", plan_line.config_file]
        if not has_several_hosts:
            training_command += ["--num_processes", str(self.cluster.gpus_per_host)]
        training_command += [*self.script_command, "--per_device_batch_size", str(plan_line.images)]
        if self.precision != "bf16" and not self.recipe.mixed_precision:  # the configs select bf16
            training_command += ["--mixed_precision", self.precision]
        return training_command


def config_of_strategy(strategy: str) -> str:
    """Return the path of the strategy's accelerate config, relative to the repository."""
    return f"accelerate_configs/{CONFIG_BY_STRATEGY.get(strategy, f'{strategy}_4gpu')}.yaml"


def possible_strategies(host_count: int, gpus_per_host: int, grad_compression: str) -> list[str]:
    """Return the names of all strategies that a cluster can use."""
    if host_count * gpus_per_host == 1:
        return ["single", "offload"]
    if grad_compression != "no":  # all other strategies refuse --grad_compression
        return ["single", "ddp"]
    return [name for name in STRATEGIES if name != "hybrid" or (host_count > 1 and gpus_per_host > 1)]


def compress_traffic(trace: Trace, grad_compression: str) -> Trace:
    """Return the trace with half of the collectives' bytes if --grad_compression applies to the strategy.

    With this flag, DDP exchanges gradients in 16 instead of 32 bits.
    """
    if grad_compression == "no" or trace.strategy != "ddp":
        return trace
    halved_collectives = [
        (name, moved_bytes // 2, rank_count) for name, moved_bytes, rank_count in trace.collectives
    ]
    return replace(trace, collectives=halved_collectives)


def memory_by_part(strategy: str, trace: Trace) -> dict[str, int]:
    """Return the bytes in each category of a device's memory at the step's peak.

    Each category is capped so that all categories together equal the peak. The CUDA context is added.
    MemTracker does not recognise DDP's gradients, because these gradients are views of buckets. This function
    includes the buckets in the gradients.
    """
    peak_bytes = next(iter(trace.peak_bytes.values()))  # peak at the planned number of images
    optimizer_bytes = min(trace.optimizer_bytes, peak_bytes["Total"] - trace.parameter_bytes)
    other_bytes = peak_bytes["Total"] - trace.parameter_bytes - optimizer_bytes
    activation_bytes = min(peak_bytes.get("Activation", 0), other_bytes)
    buffer_bytes = min(peak_bytes.get("Buffer", 0), other_bytes - activation_bytes)
    other_bytes -= activation_bytes + buffer_bytes
    gradient_bytes = min(peak_bytes.get("Gradient", 0) or trace.gradient_bytes, other_bytes)
    return {
        "parameters": trace.parameter_bytes,
        "optimizer": 0 if strategy == "offload" else optimizer_bytes,  # offload uses the host's memory
        "activations": activation_bytes,
        "buffers": buffer_bytes,
        "gradients": gradient_bytes,
        "buckets_temporaries": other_bytes - gradient_bytes,
        "context": cost.CONTEXT_BYTES,
    }
