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
DEEPSPEED_JSON_KEYS = (
    *("mixed_precision", "zero_stage", "gradient_clipping", "gradient_accumulation_steps"),
    *("offload_optimizer_device", "offload_param_device", "zero3_save_16bit_model"),
)
SCRIPT_SECTIONS = ("optimizer", "scheduler")  # DeepSpeed JSON sections whose content the script determines


@cache
def supported_settings() -> dict[str, dict[str, Any]]:
    """Return supported.yaml's content."""
    import yaml

    return yaml.safe_load(Path(__file__).with_name("supported.yaml").read_text())


def check_launch_config(
    env: Mapping[str, str],
    process_count: int,
    *,
    deepspeed_config_file: str | None = None,
    precision: str | None = None,
) -> dict[str, Any] | None:
    """Check the launcher's answers, and read the DeepSpeed JSON file.

    Args:
        env: Environment variables that contain the launcher's answers.
        process_count: Number of processes in the job.
        deepspeed_config_file: Value of --deepspeed_config.
        precision: Value of --mixed_precision, which overrides the launcher's answer.

    Returns:
        The DeepSpeed JSON file's content, or None without such a file.

    Raises:
        ValueError: If an answer is not supported. The message names the first unsupported answer.
    """
    env = {"FSDP_VERSION": "1", **env}  # Accelerate's default
    for switch_variable, supported_answers in supported_settings()["answers"].items():
        for answer_key, (answer_variable, *answer_limits) in supported_answers.items():
            # `answer_limits` is empty, or a pattern of supported answers and advice for other answers
            config_answer = env.get(answer_variable)
            is_group_enabled = switch_variable == "always" or is_on(switch_variable, env)
            is_answer_overridden = answer_key == "mixed_precision" and precision
            if config_answer is None or not is_group_enabled or not answer_limits or is_answer_overridden:
                continue
            answer_pattern, answer_advice = answer_limits
            if not re.fullmatch(answer_pattern, config_answer, re.IGNORECASE):
                # Some keys already include the unsupported answer
                refuse(answer_key if ": " in answer_key else f"{answer_key}: {config_answer}", answer_advice)
    _check_single_job(env)
    if is_on("ACCELERATE_USE_PARALLELISM_CONFIG", env):
        _check_parallelism_sizes(env, process_count)
    config_uses_deepspeed = is_on("ACCELERATE_USE_DEEPSPEED", env)
    if (deepspeed_config_file or config_uses_deepspeed) and importlib.util.find_spec("deepspeed") is None:
        raise ValueError(
            "ZeRO needs DeepSpeed, which is not installed."
            " Install DeepSpeed, or choose one of the fsdp_*.yaml files in accelerate_configs/."
        )
    if deepspeed_config_file:
        _check_launcher(env, deepspeed_config_file)
        return _read_deepspeed_config("--deepspeed_config", deepspeed_config_file, precision)
    if config_uses_deepspeed:
        json_path = env.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
        _check_deepspeed_answers(env, json_path)
        if json_path != "none":
            return _read_deepspeed_config("deepspeed_config_file", json_path, precision)
    return None


def refuse(answer: str, advice: str) -> NoReturn:
    """Raise ValueError for an unsupported answer in the accelerate config."""
    raise ValueError(f"the accelerate config contains {answer}, which is not supported: {advice}")


def _check_single_job(env: Mapping[str, str]) -> None:
    """Raise ValueError if the processes would form separate jobs, or if only one process would start.

    The function refuses MPI, `multi-CPU` (which starts a single process without MPI), and WORLD_SIZE without
    LOCAL_RANK. Without LOCAL_RANK, Accelerate treats each process as a separate job.
    """
    if int(env.get("LOCAL_RANK", "-1")) >= 0:
        return
    single_process_env = {"WORLD_SIZE": "1", "RANK": "0"}
    if any(env.get(variable, own_value) != own_value for variable, own_value in single_process_env.items()):
        set_variables = [variable for variable in single_process_env if variable in env]
        assignments = " and ".join(f"{variable}={env[variable]}" for variable in set_variables)
        raise ValueError(
            f"the environment contains {assignments} but not LOCAL_RANK,"
            " so this process would train alone on part of each batch."
            " Start the script with torchrun, or unset these environment variables."
        )
    advice = "choose multi-GPU, which also supports a rehearsal with several CPU processes"
    if any(int(env.get(size_variable) or 1) > 1 for size_variable in MPI_SIZE_VARIABLES):
        refuse("mpirun_config: yes", advice)
    if is_on("ACCELERATE_USE_CPU", env) and "MASTER_PORT" in env:
        refuse("distributed_type: MULTI_CPU", f"MULTI_CPU would start only one process. Instead, {advice}")


def _check_parallelism_sizes(env: Mapping[str, str], process_count: int) -> None:
    """Raise ValueError if hybrid sharding's replicas and shards do not match the number of processes."""
    replica_count = int(env.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "1"))
    shard_count = int(env.get("PARALLELISM_CONFIG_DP_SHARD_SIZE", "1"))
    if shard_count == 1 or replica_count * shard_count != process_count:
        refuse(
            f"parallelism_config_dp_replicate_size: {replica_count} and dp_shard_size: {shard_count}",
            f"the product of the two sizes must be {process_count} (the number of processes),"
            " and dp_shard_size must be larger than 1",
        )


def _check_launcher(env: Mapping[str, str], deepspeed_config_file: str) -> None:
    """Raise ValueError if --deepspeed_config is used without a launcher, or with a config's strategy."""
    if "LOCAL_RANK" not in env:
        raise ValueError(
            f"--deepspeed_config {deepspeed_config_file} requires a launcher."
            f" Run `deepspeed --num_gpus 2 {sys.argv[0]} ...`."
        )
    if is_on("ACCELERATE_USE_FSDP", env) or is_on("ACCELERATE_USE_DEEPSPEED", env):
        raise ValueError(
            "--deepspeed_config conflicts with an accelerate config that selects a strategy."
            " Use only --deepspeed_config or only the accelerate config."
        )


def _check_deepspeed_answers(env: Mapping[str, str], json_path: str) -> None:
    """Raise ValueError for DeepSpeed answers that contradict each other or repeat keys of the JSON file."""
    if json_path == "none":  # the accelerate config refers to no JSON file
        zero_stage = env.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
        if zero_stage != "3" and env.get("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "none") != "none":
            refuse(
                "offload_param_device: cpu",
                f"offloading requires zero_stage: 3, but zero_stage is {zero_stage}",
            )
        return
    answered_keys = env.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(",")
    if repeated_keys := [json_key for json_key in DEEPSPEED_JSON_KEYS if json_key in answered_keys]:
        refuse(f"{repeated_keys[0]} next to deepspeed_config_file: {json_path}", f"set it in {json_path}")


def _read_deepspeed_config(setting_name: str, json_path: str, precision: str | None = None) -> dict[str, Any]:
    """Return a DeepSpeed JSON file's content.

    Args:
        setting_name: Flag or config key that refers to the file.
        json_path: Path to the DeepSpeed JSON file.
        precision: Value of --mixed_precision.

    Raises:
        ValueError: If the file is invalid or contains unsupported keys. The error message lists these keys.
    """
    try:
        deepspeed_config = parse_json(Path(json_path).read_bytes(), f"{setting_name} {json_path}")
    except OSError as error:
        raise ValueError(f"{setting_name} {json_path}: {error.strerror}") from None
    zero_section = deepspeed_config.get("zero_optimization")
    if not isinstance(zero_section, dict):
        raise ValueError(f"{json_path} has no section zero_optimization. Choose a file in ds_configs/.")
    for section_key in ("bf16", "fp16", "offload_optimizer", "offload_param"):
        is_offload_section = "offload" in section_key
        section = (zero_section if is_offload_section else deepspeed_config).get(section_key, {})
        if not isinstance(section, dict):
            example_section = '{"device": "cpu"}' if is_offload_section else '{"enabled": true}'
            raise ValueError(
                f"{json_path} sets {section_key} to {json.dumps(section)}, which is not supported."
                f" Set {section_key} to {example_section}, or remove {section_key}."
            )
    unsupported_entries = list(_unsupported_keys(deepspeed_config, ""))
    unsupported_entries += _unsupported_keys(zero_section, "zero_optimization")
    zero_stage = zero_section.get("stage")
    if zero_stage not in (1, 2, 3):
        unsupported_entries.append(f"zero_optimization.stage {zero_stage} (choose 1, 2 or 3)")
    for offload_key in ("offload_optimizer", "offload_param"):
        offload_section = zero_section.get(offload_key, {})
        unsupported_entries += _unsupported_keys(offload_section, offload_key)
        offload_device = offload_section.get("device", "none")
        if offload_device not in ("none", "cpu"):
            unsupported_entries.append(f"{offload_key}.device {offload_device} (choose cpu)")
        if offload_key == "offload_param" and offload_device != "none" and zero_stage != 3:
            unsupported_entries.append(f"offload_param (requires stage 3, but the stage is {zero_stage})")
    if unsupported_entries:
        offload_device = zero_section.get("offload_optimizer", {}).get("device", "none")
        # ds_configs/ has no file with offload for stage 1.
        offloads_optimizer = zero_stage != 1 and offload_device != "none"
        equivalent_file = "a ddp_* config"
        if zero_stage in (1, 2, 3):
            equivalent_file = f"ds_configs/zero{zero_stage}{'_offload' if offloads_optimizer else ''}.json"
        raise ValueError(
            f"{json_path} contains unsupported keys: {', '.join(unsupported_entries)}."
            f" Without these keys, the file is equivalent to {equivalent_file}."
        )
    _check_precisions(deepspeed_config, json_path, precision)
    return deepspeed_config


def _unsupported_keys(json_section: dict[str, Any], section_name: str) -> Iterator[str]:
    """Yield each unsupported key in a section of the DeepSpeed JSON, followed by advice.

    `section_name` is "" for the top level of the JSON.
    """
    # Each item in supported.yaml contains several keys, separated by spaces
    known_keys = " ".join(supported_settings()["deepspeed"][section_name]).split()
    advice_by_key = supported_settings()["deepspeed_advice"]
    for json_key, setting in json_section.items():
        is_disabled_section = isinstance(setting, dict) and setting.get("enabled") is False
        is_setting_disabled = setting in (None, False) or is_disabled_section
        is_script_section = not section_name and json_key in SCRIPT_SECTIONS
        if json_key in known_keys or is_setting_disabled or (is_script_section and _is_all_auto(setting)):
            continue
        key_advice = did_you_mean(json_key, known_keys) or advice_by_key.get(json_key, "remove it")
        yield f"{section_name}.{json_key} ({key_advice})" if section_name else f"{json_key} ({key_advice})"


def _is_all_auto(script_section: Any) -> bool:
    """Return True if an optimizer or scheduler section leaves all settings to the script ("auto")."""
    script_section = script_section if isinstance(script_section, dict) else {}
    section_parameters = (script_section.get("params") or {}).values()
    has_other_type = script_section.get("type", "AdamW") not in ("Adam", "AdamW", "WarmupLR", "WarmupDecayLR")
    if not section_parameters or has_other_type:
        return False
    # Booleans such as `torch_adam` select an implementation, not a hyperparameter
    return all(setting == "auto" or isinstance(setting, bool) for setting in section_parameters)


def replace_auto_values(deepspeed_config: dict[str, Any]) -> list[str]:
    """Replace the remaining "auto" values in a DeepSpeed config in place, and return remarks for the user.

    This function also removes the optimizer and scheduler sections, because the script creates both objects.
    """
    remarks = []
    removed_sections = [section for section in SCRIPT_SECTIONS if deepspeed_config.pop(section, None)]
    if removed_sections:
        section_names = " and ".join(removed_sections)
        remarks.append(
            f"using the script's {section_names},"
            f' because the DeepSpeed config sets {section_names} to "auto"'
        )
    zero_section = deepspeed_config.get("zero_optimization", {})
    auto_keys = [key for key, setting in zero_section.items() if setting == "auto"]
    if auto_keys:
        shipped_file = f"ds_configs/zero{zero_section['stage']}.json"
        shipped_section = json.loads((ROOT / shipped_file).read_text())["zero_optimization"]
        for key in auto_keys:
            del zero_section[key]  # use DeepSpeed's default
        zero_section |= {key: shipped_section[key] for key in auto_keys if key in shipped_section}
        setting_descriptions = ", ".join(f"{key} {zero_section.get(key, 'by default')}" for key in auto_keys)
        remarks.append(
            f"using {setting_descriptions}, as in {shipped_file},"
            ' because DeepSpeed can compute "auto" only from the hidden size of a language model'
        )
    return remarks


def _check_precisions(deepspeed_config: dict[str, Any], json_path: str, precision: str | None) -> None:
    """Raise ValueError if the DeepSpeed JSON's precisions contradict each other or --mixed_precision."""
    enabled_by_precision = _enabled_by_precision(deepspeed_config)
    bf16_section = deepspeed_config.get("bf16") or {}
    engine_keys = [key for key in bf16_section if key not in ("enabled", "check_grad_overflow")]
    if engine_keys and not enabled_by_precision.get("bf16"):
        raise ValueError(
            f"{json_path} sets bf16.{engine_keys[0]}, which applies only to DeepSpeed's own bf16 mode."
            " Remove this key, or set bf16.enabled to true."
        )
    if all(enabled_by_precision.get(precision_name) for precision_name in ("bf16", "fp16")):
        raise ValueError(f"{json_path} enables both bf16 and fp16. Enable only one precision.")
    for precision_name, is_enabled in enabled_by_precision.items():
        if precision and is_enabled != (precision_name == precision):
            raise ValueError(
                f"{json_path} sets {precision_name}.enabled to {json.dumps(is_enabled)},"
                f" but --mixed_precision is {precision}."
                f' Set {precision_name}.enabled to "auto".'
            )


def enabled_precision(deepspeed_config: dict[str, Any] | None) -> str | None:
    """Return the precision from the DeepSpeed JSON: bf16, fp16, or `no` if the JSON disables bf16.

    If the result is None, the flag and the device determine the precision.
    """
    enabled_by_precision = _enabled_by_precision(deepspeed_config or {})
    return next(
        (precision_name for precision_name, is_enabled in enabled_by_precision.items() if is_enabled),
        "no" if "bf16" in enabled_by_precision else None,
    )


def _enabled_by_precision(deepspeed_config: dict[str, Any]) -> dict[str, bool]:
    """Return the values of `enabled` in the bf16 and fp16 sections, except missing and "auto" values."""
    sections = {precision_name: deepspeed_config.get(precision_name) for precision_name in ("bf16", "fp16")}
    return {
        precision_name: section["enabled"]
        for precision_name, section in sections.items()
        if isinstance(section, dict) and isinstance(section.get("enabled"), bool)
    }


def disable_ineffective_answers(is_rehearsal: bool) -> list[str]:
    """Disable ineffective answers in this process's environment. Return a remark about each answer."""
    reason_by_key = {"fsdp_cpu_ram_efficient_loading": "this key affects only models that Transformers loads"}
    if is_rehearsal:
        reason_by_key["fsdp_offload_params"] = "the parameters are already on the CPU in a rehearsal"
    if os.environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP") == "":  # the empty default selects the model's blocks
        del os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"]
    answer_remarks = []
    for answer_key, ignore_reason in reason_by_key.items():
        if is_on(answer_key.upper()):
            os.environ[answer_key.upper()] = "false"
            answer_remarks.append(f"{answer_key} is ignored because {ignore_reason}")
    return answer_remarks


def check_wrapped_classes(model: Any) -> None:
    """Raise ValueError if the config tells FSDP2 to wrap a class that the model does not contain."""
    wrapped_class_names = os.environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "")
    if not wrapped_class_names or not is_on("ACCELERATE_USE_FSDP"):
        return
    model_class_names = {type(module).__name__ for module in model.modules()}
    for class_name in wrapped_class_names.split(","):
        if class_name not in model_class_names:
            refuse(
                f"fsdp_transformer_layer_cls_to_wrap: {class_name}",
                "the model contains no layer of this class. Remove the key",
            )
