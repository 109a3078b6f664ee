"""Checks, before a job starts, that every answer in the launcher's config is supported.

Accelerate's launcher passes the answers of `accelerate config` to each process in environment variables.
supported.yaml lists each answer's supported values and a DeepSpeed JSON file's supported keys.
"""

import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from onecurve.system.env import is_on
from onecurve.system.files import parse_json
from onecurve.system.paths import ROOT
from onecurve.system.text import did_you_mean

# Environment variables in which MPI launchers store the number of processes
MPI_SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
# Keys that belong in the DeepSpeed JSON file instead of the accelerate config, if the config refers to one
JSON_KEYS = (
    *("mixed_precision", "zero_stage", "gradient_clipping", "gradient_accumulation_steps"),
    *("offload_optimizer_device", "offload_param_device", "zero3_save_16bit_model"),
)
SCRIPT_KEYS = ("optimizer", "scheduler")  # DeepSpeed JSON sections whose content the script determines


@cache
def supported_settings() -> dict[str, dict[str, Any]]:
    """Return supported.yaml's content."""
    import yaml

    return yaml.safe_load(Path(__file__).with_name("supported.yaml").read_text())


def check_launch_config(
    env: Mapping[str, str],
    processes: int,
    *,
    deepspeed_config: str | None = None,
    precision: str | None = None,
) -> dict[str, Any] | None:
    """Check the launcher's answers, and read the DeepSpeed JSON file.

    Args:
        env: Environment variables that contain the launcher's answers.
        processes: Number of processes in the job.
        deepspeed_config: Value of --deepspeed_config.
        precision: Value of --mixed_precision, which overrides the launcher's answer.

    Returns:
        The DeepSpeed JSON file's content, or None without such a file.

    Raises:
        ValueError: If an answer is not supported. The message names the first unsupported answer.
    """
    env = {"FSDP_VERSION": "1", **env}  # Accelerate's default
    for switch, answers in supported_settings()["answers"].items():
        for key, (variable, *limits) in answers.items():
            value = env.get(variable)
            is_active = switch == "always" or is_on(switch, env)
            if value is None or not is_active or not limits or (key == "mixed_precision" and precision):
                continue
            pattern, advice = limits
            if not re.fullmatch(pattern, value, re.IGNORECASE):
                refuse(key if ": " in key else f"{key}: {value}", advice)
    _check_processes(env)
    if is_on("ACCELERATE_USE_PARALLELISM_CONFIG", env):
        _check_parallelism_sizes(env, processes)
    config_uses_deepspeed = is_on("ACCELERATE_USE_DEEPSPEED", env)
    if (deepspeed_config or config_uses_deepspeed) and importlib.util.find_spec("deepspeed") is None:
        raise ValueError(
            "ZeRO needs DeepSpeed, which is not installed. Install DeepSpeed, or choose one of the"
            " fsdp_*.yaml files in accelerate_configs/."
        )
    if deepspeed_config:
        _check_launcher(env, deepspeed_config)
        return _read_deepspeed_config("--deepspeed_config", deepspeed_config, precision)
    if config_uses_deepspeed:
        file = env.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
        _check_deepspeed_answers(env, file)
        return None if file == "none" else _read_deepspeed_config("deepspeed_config_file", file, precision)
    return None


def refuse(answer: str, advice: str) -> NoReturn:
    """Raise ValueError for an unsupported answer in the accelerate config."""
    raise ValueError(f"the accelerate config contains {answer}, which is not supported: {advice}")


def _check_processes(env: Mapping[str, str]) -> None:
    """Raise ValueError if the processes would form separate jobs, or if only one process would start.

    The function refuses MPI, `multi-CPU` (which starts a single process without MPI), and WORLD_SIZE without
    LOCAL_RANK. Without LOCAL_RANK, Accelerate treats each process as a separate job.
    """
    if int(env.get("LOCAL_RANK", "-1")) >= 0:
        return
    single_process = {"WORLD_SIZE": "1", "RANK": "0"}
    if any(env.get(name, value) != value for name, value in single_process.items()):
        assignments = " and ".join(f"{name}={env[name]}" for name in single_process if name in env)
        raise ValueError(
            f"the environment contains {assignments} but not LOCAL_RANK, so this process would train alone on"
            " part of each batch. Start the script with torchrun, or unset these environment variables."
        )
    advice = "choose multi-GPU, which also supports a rehearsal with several CPU processes"
    if any(int(env.get(name) or 1) > 1 for name in MPI_SIZE_VARIABLES):
        refuse("mpirun_config: yes", advice)
    if is_on("ACCELERATE_USE_CPU", env) and "MASTER_PORT" in env:
        refuse("distributed_type: MULTI_CPU", f"MULTI_CPU would start only one process. Instead, {advice}")


def _check_parallelism_sizes(env: Mapping[str, str], processes: int) -> None:
    replicas, shards = (
        int(env.get(f"PARALLELISM_CONFIG_DP_{name}_SIZE", "1")) for name in ("REPLICATE", "SHARD")
    )
    if shards == 1 or replicas * shards != processes:
        refuse(
            f"parallelism_config_dp_replicate_size: {replicas} and dp_shard_size: {shards}",
            f"the product of the two sizes must be {processes} (the number of processes), and dp_shard_size"
            " must be larger than 1",
        )


def _check_launcher(env: Mapping[str, str], deepspeed_config: str) -> None:
    if "LOCAL_RANK" not in env:
        raise ValueError(
            f"--deepspeed_config {deepspeed_config} requires a launcher. Run"
            f" `deepspeed --num_gpus 2 {sys.argv[0]} ...`."
        )
    if is_on("ACCELERATE_USE_FSDP", env) or is_on("ACCELERATE_USE_DEEPSPEED", env):
        raise ValueError(
            "--deepspeed_config conflicts with an accelerate config that selects a strategy. Use only"
            " --deepspeed_config or only the accelerate config."
        )


def _check_deepspeed_answers(env: Mapping[str, str], file: str) -> None:
    if file == "none":
        stage = env.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
        if stage != "3" and env.get("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "none") != "none":
            refuse(
                "offload_param_device: cpu", f"offloading requires zero_stage: 3, but zero_stage is {stage}"
            )
        return
    fields = env.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(",")
    if duplicates := [name for name in JSON_KEYS if name in fields]:
        refuse(f"{duplicates[0]} next to deepspeed_config_file: {file}", f"set it in {file}")


def _read_deepspeed_config(name: str, file: str, precision: str | None = None) -> dict[str, Any]:
    """Return a DeepSpeed JSON file's content.

    Args:
        name: Flag or config key that refers to the file.
        file: Path to the DeepSpeed JSON file.
        precision: Value of --mixed_precision.

    Raises:
        ValueError: If the file is invalid or contains unsupported keys. The error message lists these keys.
    """
    try:
        config = parse_json(Path(file).read_bytes(), f"{name} {file}")
    except OSError as error:
        raise ValueError(f"{name} {file}: {error.strerror}") from None
    zero = config.get("zero_optimization")
    if not isinstance(zero, dict):
        raise ValueError(f"{file} has no section zero_optimization. Choose a file in ds_configs/.")
    for key in ("bf16", "fp16", "offload_optimizer", "offload_param"):
        if not isinstance(section := (zero if "offload" in key else config).get(key, {}), dict):
            example = '{"device": "cpu"}' if "offload" in key else '{"enabled": true}'
            raise ValueError(
                f"{file} sets {key} to {json.dumps(section)}, which is not supported. Set {key} to {example},"
                f" or remove {key}."
            )
    problems = [*_unsupported_keys(config, ""), *_unsupported_keys(zero, "zero_optimization")]
    if (stage := zero.get("stage")) not in (1, 2, 3):
        problems.append(f"zero_optimization.stage {stage} (choose 1, 2 or 3)")
    for offload_section in ("offload_optimizer", "offload_param"):
        section = zero.get(offload_section, {})
        problems += _unsupported_keys(section, offload_section)
        device = section.get("device", "none")
        if device not in ("none", "cpu"):
            problems.append(f"{offload_section}.device {device} (choose cpu)")
        if offload_section == "offload_param" and device != "none" and stage != 3:
            problems.append(f"offload_param (requires stage 3, but the stage is {stage})")
    if problems:
        offload = "_offload" if stage != 1 and (zero.get("offload_optimizer") or {}).get("device") else ""
        equivalent = f"ds_configs/zero{stage}{offload}.json" if stage in (1, 2, 3) else "a ddp_* config"
        raise ValueError(
            f"{file} contains unsupported keys: {', '.join(problems)}. Without these keys, the file is"
            f" equivalent to {equivalent}."
        )
    _check_precisions(config, file, precision)
    return config


def _unsupported_keys(section: dict[str, Any], name: str) -> Iterator[str]:
    """Yield each unsupported key in a section, followed by advice."""
    known = " ".join(supported_settings()["deepspeed"][name]).split()
    for key, value in section.items():
        is_off = value in (None, False) or (isinstance(value, dict) and value.get("enabled") is False)
        if key in known or is_off or (not name and key in SCRIPT_KEYS and _is_all_auto(value)):
            continue
        advice = did_you_mean(key, known) or supported_settings()["deepspeed_advice"].get(key, "remove it")
        yield f"{name}.{key} ({advice})" if name else f"{key} ({advice})"


def _is_all_auto(section: Any) -> bool:
    """Return True if an optimizer or scheduler section leaves all settings to the script ("auto")."""
    section = section if isinstance(section, dict) else {}
    values = (section.get("params") or {}).values()
    is_other_type = section.get("type", "AdamW") not in ("Adam", "AdamW", "WarmupLR", "WarmupDecayLR")
    if not values or is_other_type:
        return False
    return all(value == "auto" or isinstance(value, bool) for value in values)


def settle_auto(config: dict[str, Any]) -> list[str]:
    """Replace the remaining "auto" values in a DeepSpeed config in place, and return remarks for the user."""
    remarks = []
    if removed := [key for key in SCRIPT_KEYS if config.pop(key, None)]:
        sections = " and ".join(removed)
        remarks.append(
            f'using the script\'s {sections}, because the DeepSpeed config sets {sections} to "auto"'
        )
    zero_section = config.get("zero_optimization", {})
    if auto_keys := [key for key, value in zero_section.items() if value == "auto"]:
        shipped_file = f"ds_configs/zero{zero_section['stage']}.json"
        shipped_section = json.loads((ROOT / shipped_file).read_text())["zero_optimization"]
        for key in auto_keys:
            del zero_section[key]  # use DeepSpeed's default
        zero_section |= {key: shipped_section[key] for key in auto_keys if key in shipped_section}
        descriptions = ", ".join(f"{key} {zero_section.get(key, 'by default')}" for key in auto_keys)
        remarks.append(
            f'using {descriptions}, as in {shipped_file}, because DeepSpeed can compute "auto" only from the'
            " hidden size of a language model"
        )
    return remarks


def _check_precisions(config: dict[str, Any], file: str, precision: str | None) -> None:
    enabled_by_precision, bf16 = _enabled_by_precision(config), config.get("bf16") or {}
    engine_settings = [key for key in bf16 if key not in ("enabled", "check_grad_overflow")]
    if engine_settings and not enabled_by_precision.get("bf16"):
        raise ValueError(
            f"{file} sets bf16.{engine_settings[0]}, which applies only to DeepSpeed's own bf16 mode. Remove"
            " this key, or set bf16.enabled to true."
        )
    if all(enabled_by_precision.get(dtype) for dtype in ("bf16", "fp16")):
        raise ValueError(f"{file} enables both bf16 and fp16. Enable only one precision.")
    for dtype, is_enabled in enabled_by_precision.items():
        if precision and is_enabled != (dtype == precision):
            raise ValueError(
                f"{file} sets {dtype}.enabled to {json.dumps(is_enabled)}, but --mixed_precision is"
                f' {precision}. Set {dtype}.enabled to "auto".'
            )


def enabled_precision(config: dict[str, Any] | None) -> str | None:
    """Return the precision from the DeepSpeed JSON: bf16, fp16, or `no` if the JSON disables bf16.

    If the result is None, the flag and the device determine the precision.
    """
    enabled_by_precision = _enabled_by_precision(config or {})
    return next(
        (dtype for dtype, is_enabled in enabled_by_precision.items() if is_enabled),
        "no" if "bf16" in enabled_by_precision else None,
    )


def _enabled_by_precision(config: dict[str, Any]) -> dict[str, bool]:
    """Return the values of `enabled` in the bf16 and fp16 sections, except missing and "auto" values."""
    sections = {dtype: config.get(dtype) for dtype in ("bf16", "fp16")}
    return {
        dtype: section["enabled"]
        for dtype, section in sections.items()
        if isinstance(section, dict) and isinstance(section.get("enabled"), bool)
    }


def disable_meaningless(rehearsal: bool) -> list[str]:
    """Disable answers that have no effect in this job. Return a remark about each disabled answer."""
    meaningless = {"fsdp_cpu_ram_efficient_loading": "this key affects only models that Transformers loads"}
    if rehearsal:
        meaningless["fsdp_offload_params"] = "the parameters are already on the CPU in a rehearsal"
    if os.environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP") == "":  # the empty default selects the model's blocks
        del os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"]
    remarks = []
    for key, reason in meaningless.items():
        if is_on(key.upper()):
            os.environ[key.upper()] = "false"
            remarks.append(f"{key} is ignored because {reason}")
    return remarks


def check_wrapped_classes(model: Any) -> None:
    """Raise ValueError if the config tells FSDP2 to wrap a class that the model does not contain."""
    wrapped_names = os.environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "")
    if not wrapped_names or not is_on("ACCELERATE_USE_FSDP"):
        return
    class_names = {type(module).__name__ for module in model.modules()}
    for name in wrapped_names.split(","):
        if name not in class_names:
            refuse(
                f"fsdp_transformer_layer_cls_to_wrap: {name}",
                "the model contains no layer of this class. Remove the key",
            )
