"""Checks the answers of `accelerate config`: each is used, or refused in one line before anything starts.

Accelerate's launcher passes them to each process in environment variables. The keys of a DeepSpeed JSON file
are checked in the same way.
"""

import difflib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from common.system.files import parse_json


class Answer(NamedTuple):
    """A key of the accelerate config, and its supported values."""

    key: str
    variable: str  # in which Accelerate's launcher passes the value
    honoured: str = ".*"  # pattern of the supported values; case does not matter
    instead: str = ""  # advice for other values


ANSWERS = {  # by the variable that enables a group of answers; the first group always counts
    "": (
        Answer("mixed_precision", "ACCELERATE_MIXED_PRECISION", "no|bf16|fp16", "choose bf16, fp16 or no"),
        Answer(
            "compute_environment: AMAZON_SAGEMAKER",
            "ACCELERATE_USE_SAGEMAKER",
            "false",
            "choose this machine",
        ),
        Answer(
            "distributed_type: MEGATRON_LM",
            "ACCELERATE_USE_MEGATRON_LM",
            "false",
            "choose multi-GPU with FSDP or DeepSpeed, which shard the model too",
        ),
        Answer("use_cpu", "ACCELERATE_USE_CPU"),
        Answer("debug", "ACCELERATE_DEBUG_MODE"),
        Answer("gpu_ids", "CUDA_VISIBLE_DEVICES"),
        Answer("enable_cpu_affinity", "ACCELERATE_CPU_AFFINITY"),
        Answer("main_process_ip", "MASTER_ADDR"),
        Answer("main_process_port", "MASTER_PORT"),
        Answer("dynamo_backend", "ACCELERATE_DYNAMO_BACKEND"),
        Answer("dynamo_mode", "ACCELERATE_DYNAMO_MODE"),
        Answer("dynamo_use_fullgraph", "ACCELERATE_DYNAMO_USE_FULLGRAPH"),
        Answer("dynamo_use_dynamic", "ACCELERATE_DYNAMO_USE_DYNAMIC"),
        Answer("dynamo_use_regional_compilation", "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"),
    ),
    "ACCELERATE_USE_FSDP": (
        Answer("fsdp_version", "FSDP_VERSION", "2", "choose fsdp_version: 2"),
        Answer(
            "fsdp_sharding_strategy",
            "FSDP_SHARDING_STRATEGY",
            "1|FULL_SHARD",
            "it is of FSDP 1, choose fsdp_reshard_after_forward: true or false",
        ),
        Answer(
            "fsdp_reshard_after_forward", "FSDP_RESHARD_AFTER_FORWARD", "true|false", "choose true or false"
        ),
        Answer("fsdp_offload_params", "FSDP_OFFLOAD_PARAMS", "true|false", "choose true or false"),
        Answer(
            "fsdp_auto_wrap_policy",
            "FSDP_AUTO_WRAP_POLICY",
            "TRANSFORMER_BASED_WRAP|SIZE_BASED_WRAP|NO_WRAP",
            "choose TRANSFORMER_BASED_WRAP",
        ),
        Answer("fsdp_transformer_layer_cls_to_wrap", "FSDP_TRANSFORMER_CLS_TO_WRAP"),  # check_wrapped_classes
        Answer("fsdp_min_num_params", "FSDP_MIN_NUM_PARAMS", "[0-9]+", "choose a whole number"),
        # FSDP 2 always prefetches before each backward
        Answer(
            "fsdp_backward_prefetch", "FSDP_BACKWARD_PREFETCH", "1|BACKWARD_PRE|None", "choose BACKWARD_PRE"
        ),
        Answer("fsdp_forward_prefetch", "FSDP_FORWARD_PREFETCH", "false", "it is of FSDP 1, choose false"),
        Answer("fsdp_use_orig_params", "FSDP_USE_ORIG_PARAMS", "true", "FSDP 2 always does, choose true"),
        # for Accelerate's own checkpoints, which these scripts do not write
        Answer(
            "fsdp_state_dict_type",
            "FSDP_STATE_DICT_TYPE",
            "FULL_STATE_DICT|SHARDED_STATE_DICT",
            "choose SHARDED_STATE_DICT",
        ),
        Answer("fsdp_sync_module_states", "FSDP_SYNC_MODULE_STATES"),  # all ranks get rank 0's weights anyway
        Answer("fsdp_cpu_ram_efficient_loading", "FSDP_CPU_RAM_EFFICIENT_LOADING"),  # settle_answers
        Answer("fsdp_activation_checkpointing", "FSDP_ACTIVATION_CHECKPOINTING"),
        Answer(
            "fsdp_activation_checkpointing_offload",
            "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD",
            "false",
            "choose false, with fsdp_activation_checkpointing: true",
        ),
        Answer(
            "fsdp_ignored_modules", "FSDP_IGNORED_MODULES", "", "leave it out, every parameter is sharded"
        ),
    ),
    "ACCELERATE_USE_PARALLELISM_CONFIG": (
        Answer(
            "parallelism_config_dp_replicate_size",
            "PARALLELISM_CONFIG_DP_REPLICATE_SIZE",
            "[1-9][0-9]*",
            "choose 1 or more",
        ),
        Answer(
            "parallelism_config_dp_shard_size",
            "PARALLELISM_CONFIG_DP_SHARD_SIZE",
            "[1-9][0-9]*",
            "choose 1 or more",
        ),
        Answer(
            "parallelism_config_tp_size",
            "PARALLELISM_CONFIG_TP_SIZE",
            "1",
            "image models are sharded, not split by layers: choose 1, and a larger dp_shard_size",
        ),
        Answer(
            "parallelism_config_cp_size",
            "PARALLELISM_CONFIG_CP_SIZE",
            "1",
            "it divides long texts: choose 1, and a larger dp_shard_size",
        ),
        Answer(
            "parallelism_config_sp_size",
            "PARALLELISM_CONFIG_SP_SIZE",
            "1",
            "it divides long texts: choose 1, and a larger dp_shard_size",
        ),
        Answer("parallelism_config_cp_backend", "PARALLELISM_CONFIG_CP_BACKEND"),
        Answer("parallelism_config_sp_backend", "PARALLELISM_CONFIG_SP_BACKEND"),
    ),
    "ACCELERATE_USE_DEEPSPEED": (
        Answer(
            "zero_stage", "ACCELERATE_DEEPSPEED_ZERO_STAGE", "[123]", "choose 1, 2 or 3, or a ddp_* config"
        ),
        Answer(
            "offload_optimizer_device",
            "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
            "none|cpu",
            "choose cpu",
        ),
        Answer("offload_param_device", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "none|cpu", "choose cpu"),
        Answer(
            "zero3_init_flag",
            "ACCELERATE_DEEPSPEED_ZERO3_INIT",
            "false",
            "it is for models that Transformers loads, choose false",
        ),
        # for Accelerate's own checkpoints
        Answer("zero3_save_16bit_model", "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL"),
        Answer(
            "deepspeed_moe_layer_cls_names",
            "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
            "",
            "leave it out, no model here has such layers",
        ),
        # the recipe's numbers are used; accelerator.py reports a difference
        Answer("gradient_accumulation_steps", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"),
        Answer("gradient_clipping", "ACCELERATE_GRADIENT_CLIPPING"),
        Answer("deepspeed_config_file", "ACCELERATE_DEEPSPEED_CONFIG_FILE"),  # check_deepspeed
        Answer("deepspeed_config", "ACCELERATE_CONFIG_DS_FIELDS"),  # the names of the keys above
    ),
}
# Variables in which MPI sets the number of processes
MPI_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")

# Supported keys of a DeepSpeed JSON file.
DEEPSPEED_KEYS = {
    "": """train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping bf16
        fp16 zero_optimization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer steps_per_print
        wall_clock_breakdown memory_breakdown dump_state log_level communication_data_type data_types""",
    "zero_optimization": """stage overlap_comm contiguous_gradients reduce_scatter reduce_bucket_size
        allgather_partitions allgather_bucket_size use_multi_rank_bucket_allreduce sub_group_size
        offload_optimizer offload_param ignore_unused_parameters stage3_prefetch_bucket_size
        stage3_param_persistence_threshold stage3_model_persistence_threshold stage3_max_live_parameters
        stage3_max_reuse_distance stage3_gather_16bit_weights_on_model_save""",
    "offload_optimizer": "device pin_memory buffer_count fast_init",
    "offload_param": "device pin_memory buffer_count buffer_size max_in_cpu",
}
DEEPSPEED_INSTEAD = {
    "optimizer": "the script has its own",
    "scheduler": "the script has its own",
    "compile": "choose --compile",
    "activation_checkpointing": "choose --grad_checkpointing",
    "torch_autocast": "choose --mixed_precision bf16, which is autocast",
    "tensorboard": "choose --trackers tensorboard",
    "wandb": "choose --trackers wandb",
}


def check_answers(
    env: Mapping[str, str],
    processes: int,
    *,
    deepspeed_config: str | None = None,
    precision: str | None = None,
) -> dict[str, Any] | None:
    """Checks the launcher's answers in env, with --deepspeed_config and --mixed_precision (which wins).

    Returns the DeepSpeed JSON, if there is one. ValueError names the first unsupported answer.
    """
    env = {"FSDP_VERSION": "1", **env}  # Accelerate's default
    for switch, answers in ANSWERS.items():
        if switch and not _is_on(env, switch):
            continue
        for answer in answers:
            value = env.get(answer.variable)
            if value is None or (answer.key == "mixed_precision" and precision):
                continue
            if not re.fullmatch(answer.honoured, value, re.IGNORECASE):
                _refuse(answer.key, value, answer.instead)
    _check_processes(env)
    if _is_on(env, "ACCELERATE_USE_PARALLELISM_CONFIG"):
        _check_sizes(env, processes)
    zero = deepspeed_config or _is_on(env, "ACCELERATE_USE_DEEPSPEED")
    if zero and importlib.util.find_spec("deepspeed") is None:
        raise ValueError(
            "ZeRO needs DeepSpeed, which is not installed: take one of fsdp_*.yaml, or install it"
        )
    if deepspeed_config:
        _check_launcher(env, deepspeed_config)
        config = _read_deepspeed("--deepspeed_config", deepspeed_config)
    elif _is_on(env, "ACCELERATE_USE_DEEPSPEED"):
        deepspeed_config = env.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
        _check_deepspeed_answers(env, deepspeed_config)
        if deepspeed_config == "none":
            return None
        config = _read_deepspeed("deepspeed_config_file", deepspeed_config)
    else:
        return None
    _check_deepspeed(config, deepspeed_config, precision)
    return config


def _is_on(env: Mapping[str, str], variable: str) -> bool:
    return env.get(variable, "").lower() == "true"


def _refuse(key: str, value: str, instead: str) -> None:
    shown = key if ": " in key else f"{key}: {value}"
    raise ValueError(f"the accelerate config has {shown}, which is not supported: {instead}")


def _check_processes(env: Mapping[str, str]) -> None:
    """Refuses MPI, and `multi-CPU`, which without MPI starts one process only."""
    if "LOCAL_RANK" in env:
        return
    instead = "choose multi-GPU, which is also how several processes rehearse on a CPU"
    if any(int(env.get(name) or 1) > 1 for name in MPI_SIZES):
        _refuse("mpirun_config", "yes", instead)
    if _is_on(env, "ACCELERATE_USE_CPU") and "MASTER_PORT" in env:
        _refuse("distributed_type: MULTI_CPU", "", f"it starts one process only; {instead}")


def _check_sizes(env: Mapping[str, str], processes: int) -> None:
    replicas, shards = (
        int(env.get(f"PARALLELISM_CONFIG_DP_{name}_SIZE", "1")) for name in ("REPLICATE", "SHARD")
    )
    if shards == 1 or replicas * shards != processes:
        _refuse(
            f"parallelism_config_dp_replicate_size: {replicas} and dp_shard_size: {shards}",
            "",
            f"their product must be the {processes} processes, and dp_shard_size more than 1",
        )


def _check_launcher(env: Mapping[str, str], deepspeed_config: str) -> None:
    if "LOCAL_RANK" not in env:
        raise ValueError(
            f"--deepspeed_config {deepspeed_config} needs a launcher:"
            f" deepspeed --num_gpus 2 {sys.argv[0]} ..."
        )
    if _is_on(env, "ACCELERATE_USE_FSDP") or _is_on(env, "ACCELERATE_USE_DEEPSPEED"):
        raise ValueError(
            "--deepspeed_config stands beside an accelerate config that names a strategy: give one of them"
        )


def _check_deepspeed_answers(env: Mapping[str, str], file: str) -> None:
    if file == "none":
        stage = env.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
        if stage != "3" and env.get("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "none") != "none":
            _refuse("offload_param_device", "cpu", f"it needs zero_stage: 3, here it is {stage}")
        return
    fields = env.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(",")
    beside: tuple[str, ...] = (
        "mixed_precision",
        "zero_stage",
        "gradient_clipping",
        "gradient_accumulation_steps",
    )
    beside += ("offload_optimizer_device", "offload_param_device", "zero3_save_16bit_model")
    if both := [name for name in beside if name in fields]:
        _refuse(f"{both[0]} beside deepspeed_config_file: {file}", "", f"choose it in {file}")


def _read_deepspeed(name: str, file: str) -> dict[str, Any]:
    """The content of a DeepSpeed JSON file. name: the flag or key that names it. ValueError if unreadable."""
    try:
        return parse_json(Path(file).read_bytes(), f"{name} {file}")
    except OSError as error:
        raise ValueError(f"{name} {file}: {error.strerror}") from None


def _check_deepspeed(config: dict[str, Any], file: str, precision: str | None) -> None:
    """Checks a DeepSpeed JSON. ValueError names the first unsupported key. precision: --mixed_precision."""
    zero = config.get("zero_optimization")
    if not isinstance(zero, dict):
        raise ValueError(f"{file} has no zero_optimization: take one of ds_configs/")
    _check_keys(config, "", file)
    _check_keys(zero, "zero_optimization", file)
    if zero.get("stage") not in (1, 2, 3):
        raise ValueError(f"{file} has zero_optimization.stage {zero.get('stage')}: choose 1, 2 or 3")
    if auto := [key for key, value in zero.items() if value == "auto"]:
        raise ValueError(
            f'{file} has zero_optimization.{auto[0]} "auto", which asks a language model for its size:'
            " write a number, as in ds_configs/"
        )
    for name in ("offload_optimizer", "offload_param"):
        part = zero.get(name) or {}
        _check_keys(part, name, file)
        if part.get("device", "none") not in ("none", "cpu"):
            raise ValueError(f"{file} has {name}.device {part['device']}, which is not supported: choose cpu")
        if name == "offload_param" and part.get("device", "none") != "none" and zero["stage"] != 3:
            raise ValueError(f"{file} has offload_param, which needs stage 3, here it is {zero['stage']}")
    said, bf16 = _precisions(config), config.get("bf16") or {}
    if own := [key for key in bf16 if key not in ("enabled", "check_grad_overflow") and not said.get("bf16")]:
        raise ValueError(
            f"{file} has bf16.{own[0]}, which is a setting of DeepSpeed's own bf16: leave it out, or write"
            " enabled true"
        )
    if all(said.get(kind) for kind in ("bf16", "fp16")):
        raise ValueError(f"{file} enables both bf16 and fp16: choose one")
    for kind, enabled in said.items():
        if precision and enabled != (kind == precision):
            raise ValueError(
                f"{file} has {kind}.enabled {json.dumps(enabled)} beside --mixed_precision {precision}:"
                ' write "auto"'
            )


def enabled_precision(config: dict[str, Any] | None) -> str | None:
    """The precision that the DeepSpeed JSON sets: bf16, fp16, or `no` if it disables bf16.

    None leaves the choice to the flag and the device.
    """
    said = _precisions(config or {})
    return next((kind for kind, enabled in said.items() if enabled), "no" if "bf16" in said else None)


def _precisions(config: dict[str, Any]) -> dict[str, bool]:
    """The `enabled` values of bf16 and fp16, without missing ones and "auto"."""
    sections = {kind: config.get(kind) for kind in ("bf16", "fp16")}
    return {
        kind: section["enabled"]
        for kind, section in sections.items()
        if isinstance(section, dict) and isinstance(section.get("enabled"), bool)
    }


def _check_keys(section: dict[str, Any], name: str, file: str) -> None:
    known = DEEPSPEED_KEYS[name].split()
    for key, value in section.items():
        off = value in (None, False) or (isinstance(value, dict) and value.get("enabled") is False)
        if key in known or off:
            continue
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
        instead = f"did you mean {near[0]}?" if near else DEEPSPEED_INSTEAD.get(key, "leave it out")
        raise ValueError(f"{file} has {f'{name}.' if name else ''}{key}, which is not supported: {instead}")


def check_device_kind() -> None:
    """ValueError on a host with TPUs, XPUs or NPUs, on which Accelerate would train."""
    import torch
    from accelerate.utils import is_torch_xla_available

    device = torch.accelerator.current_accelerator(check_available=True)
    kind = "XLA" if is_torch_xla_available() else device.type.upper() if device else "CPU"
    if kind not in ("CPU", "CUDA", "MPS"):
        _refuse(f"distributed_type: {kind}", "", "choose multi-GPU, or no distributed training")


def settle_answers(rehearsal: bool) -> list[str]:
    """Disables answers that have no meaning here. Returns a remark about each."""
    meaningless = [("fsdp_cpu_ram_efficient_loading", "it is for models that Transformers loads")]
    if rehearsal:
        meaningless.append(("fsdp_offload_params", "in a rehearsal they are on the CPU anyway"))
    if os.environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP") == "":  # empty by default: use the model's own blocks
        del os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"]
    remarks = []
    for key, why in meaningless:
        if _is_on(os.environ, key.upper()):
            os.environ[key.upper()] = "false"
            remarks.append(f"{key} is off: {why}")
    return remarks


def check_wrapped_classes(model: Any) -> None:
    """ValueError when the config names a class for FSDP to wrap that the model does not have."""
    wanted = os.environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "")
    if not wanted or not _is_on(os.environ, "ACCELERATE_USE_FSDP"):
        return
    classes = {type(module).__name__ for module in model.modules()}
    for name in wanted.split(","):
        if name not in classes:
            _refuse("fsdp_transformer_layer_cls_to_wrap", name, "the model has no such class, leave it out")
