"""Checks the answers of `accelerate config`: each is used, or refused in one line before anything starts.

Accelerate's launcher passes them to each process in environment variables. supported.yaml lists them, with
the supported values, and the supported keys of a DeepSpeed JSON file.
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

# Variables in which MPI sets the number of processes
MPI_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
# Keys of an accelerate config that belong into the DeepSpeed JSON, if it names one
IN_JSON = (
    *("mixed_precision", "zero_stage", "gradient_clipping", "gradient_accumulation_steps"),
    *("offload_optimizer_device", "offload_param_device", "zero3_save_16bit_model"),
)
SCRIPTS_OWN = ("optimizer", "scheduler")  # in a DeepSpeed JSON


@cache
def supported() -> dict[str, dict[str, Any]]:
    """The tables of supported.yaml."""
    import yaml

    return yaml.safe_load(Path(__file__).with_name("supported.yaml").read_text())


def check_launch_config(
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
    for switch, answers in supported()["answers"].items():
        for key, (variable, *limits) in answers.items():
            value = env.get(variable)
            is_asked = switch == "always" or is_on(switch, env)
            if value is None or not is_asked or not limits or (key == "mixed_precision" and precision):
                continue
            pattern, advice = limits
            if not re.fullmatch(pattern, value, re.IGNORECASE):
                refuse(key if ": " in key else f"{key}: {value}", advice)
    _check_processes(env)
    if is_on("ACCELERATE_USE_PARALLELISM_CONFIG", env):
        _check_sizes(env, processes)
    by_config = is_on("ACCELERATE_USE_DEEPSPEED", env)
    if (deepspeed_config or by_config) and importlib.util.find_spec("deepspeed") is None:
        raise ValueError(
            "ZeRO needs DeepSpeed, which is not installed: take one of fsdp_*.yaml, or install it"
        )
    if deepspeed_config:
        _check_launcher(env, deepspeed_config)
        return _read_deepspeed("--deepspeed_config", deepspeed_config, precision)
    if by_config:
        file = env.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
        _check_deepspeed_answers(env, file)
        return None if file == "none" else _read_deepspeed("deepspeed_config_file", file, precision)
    return None


def refuse(answer: str, advice: str) -> NoReturn:
    raise ValueError(f"the accelerate config has {answer}, which is not supported: {advice}")


def _check_processes(env: Mapping[str, str]) -> None:
    """Refuses MPI, `multi-CPU`, which without MPI starts one process only, and WORLD_SIZE without LOCAL_RANK.

    Without LOCAL_RANK Accelerate makes each process a job of its own.
    """
    if int(env.get("LOCAL_RANK", "-1")) >= 0:
        return
    alone = {"WORLD_SIZE": "1", "RANK": "0"}
    if any(env.get(name, value) != value for name, value in alone.items()):
        are_set = " and ".join(f"{name}={env[name]}" for name in alone if name in env)
        raise ValueError(
            f"the environment has {are_set} without LOCAL_RANK, so this process would train alone, on a part"
            " of each batch: start it with torchrun, or unset them"
        )
    advice = "choose multi-GPU, which is also how several processes rehearse on a CPU"
    if any(int(env.get(name) or 1) > 1 for name in MPI_SIZES):
        refuse("mpirun_config: yes", advice)
    if is_on("ACCELERATE_USE_CPU", env) and "MASTER_PORT" in env:
        refuse("distributed_type: MULTI_CPU", f"it starts one process only; {advice}")


def _check_sizes(env: Mapping[str, str], processes: int) -> None:
    replicas, shards = (
        int(env.get(f"PARALLELISM_CONFIG_DP_{name}_SIZE", "1")) for name in ("REPLICATE", "SHARD")
    )
    if shards == 1 or replicas * shards != processes:
        refuse(
            f"parallelism_config_dp_replicate_size: {replicas} and dp_shard_size: {shards}",
            f"their product must be the {processes} processes, and dp_shard_size more than 1",
        )


def _check_launcher(env: Mapping[str, str], deepspeed_config: str) -> None:
    if "LOCAL_RANK" not in env:
        raise ValueError(
            f"--deepspeed_config {deepspeed_config} needs a launcher:"
            f" deepspeed --num_gpus 2 {sys.argv[0]} ..."
        )
    if is_on("ACCELERATE_USE_FSDP", env) or is_on("ACCELERATE_USE_DEEPSPEED", env):
        raise ValueError(
            "--deepspeed_config stands beside an accelerate config that names a strategy: give one of them"
        )


def _check_deepspeed_answers(env: Mapping[str, str], file: str) -> None:
    if file == "none":
        stage = env.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
        if stage != "3" and env.get("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "none") != "none":
            refuse("offload_param_device: cpu", f"it needs zero_stage: 3, here it is {stage}")
        return
    fields = env.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(",")
    if both := [name for name in IN_JSON if name in fields]:
        refuse(f"{both[0]} beside deepspeed_config_file: {file}", f"choose it in {file}")


def _read_deepspeed(name: str, file: str, precision: str | None = None) -> dict[str, Any]:
    """The content of a DeepSpeed JSON file. ValueError names the first unsupported key.

    name: the flag or key that names the file. precision: --mixed_precision.
    """
    try:
        config = parse_json(Path(file).read_bytes(), f"{name} {file}")
    except OSError as error:
        raise ValueError(f"{name} {file}: {error.strerror}") from None
    zero = config.get("zero_optimization")
    if not isinstance(zero, dict):
        raise ValueError(f"{file} has no zero_optimization: take one of ds_configs/")
    for key in ("bf16", "fp16", "offload_optimizer", "offload_param"):
        if not isinstance(section := (zero if "offload" in key else config).get(key, {}), dict):
            written = '{"device": "cpu"}' if "offload" in key else '{"enabled": true}'
            raise ValueError(f"{file} has {key} {json.dumps(section)}: write {written}, or leave it out")
    problems = [*_unsupported(config, ""), *_unsupported(zero, "zero_optimization")]
    if (stage := zero.get("stage")) not in (1, 2, 3):
        problems.append(f"zero_optimization.stage {stage} (choose 1, 2 or 3)")
    for part in ("offload_optimizer", "offload_param"):
        section = zero.get(part, {})
        problems += _unsupported(section, part)
        device = section.get("device", "none")
        if device not in ("none", "cpu"):
            problems.append(f"{part}.device {device} (choose cpu)")
        if part == "offload_param" and device != "none" and stage != 3:
            problems.append(f"offload_param (it needs stage 3, here it is {stage})")
    if problems:
        offload = "_offload" if stage != 1 and (zero.get("offload_optimizer") or {}).get("device") else ""
        same = f"ds_configs/zero{stage}{offload}.json" if stage in (1, 2, 3) else "a ddp_* config"
        raise ValueError(
            f"{file} has what is not supported: {', '.join(problems)}; without that it is {same}"
        )
    _check_precisions(config, file, precision)
    return config


def _unsupported(section: dict[str, Any], name: str) -> Iterator[str]:
    """The unsupported keys of a section, each with advice."""
    known = " ".join(supported()["deepspeed"][name]).split()
    for key, value in section.items():
        is_off = value in (None, False) or (isinstance(value, dict) and value.get("enabled") is False)
        if key in known or is_off or (not name and key in SCRIPTS_OWN and _is_auto(value)):
            continue
        advice = did_you_mean(key, known) or supported()["deepspeed_advice"].get(key, "leave it out")
        yield f"{name}.{key} ({advice})" if name else f"{key} ({advice})"


def _is_auto(section: Any) -> bool:
    """True if an optimizer or scheduler of a DeepSpeed JSON leaves all numbers to the script."""
    section = section if isinstance(section, dict) else {}
    values = (section.get("params") or {}).values()
    is_another = section.get("type", "AdamW") not in ("Adam", "AdamW", "WarmupLR", "WarmupDecayLR")
    return bool(values) and not is_another and all(v == "auto" or isinstance(v, bool) for v in values)


def settle_auto(config: dict[str, Any]) -> list[str]:
    """Replaces what a DeepSpeed JSON leaves open, beside the recipe's numbers. Returns remarks."""
    remarks = []
    if ours := [key for key in SCRIPTS_OWN if config.pop(key, None)]:
        remarks.append(f"DeepSpeed's {' and '.join(ours)}, all \"auto\": the script's own")
    zero = config.get("zero_optimization", {})
    if auto := [key for key, value in zero.items() if value == "auto"]:
        file = f"ds_configs/zero{zero['stage']}.json"
        shipped = json.loads((ROOT / file).read_text())["zero_optimization"]
        for key in auto:
            del zero[key]  # for DeepSpeed's default
        zero |= {key: shipped[key] for key in auto if key in shipped}
        numbers = ", ".join(f"{key} {zero.get(key, 'by default')}" for key in auto)
        remarks.append(f'"auto" asks a language model for its size: {numbers}, as in {file}')
    return remarks


def _check_precisions(config: dict[str, Any], file: str, precision: str | None) -> None:
    enabled, bf16 = _precisions(config), config.get("bf16") or {}
    own = [key for key in bf16 if key not in ("enabled", "check_grad_overflow")]
    if own and not enabled.get("bf16"):
        raise ValueError(
            f"{file} has bf16.{own[0]}, which is a setting of DeepSpeed's own bf16: leave it out, or write"
            " enabled true"
        )
    if all(enabled.get(kind) for kind in ("bf16", "fp16")):
        raise ValueError(f"{file} enables both bf16 and fp16: choose one")
    for kind, is_enabled in enabled.items():
        if precision and is_enabled != (kind == precision):
            raise ValueError(
                f"{file} has {kind}.enabled {json.dumps(is_enabled)} beside --mixed_precision {precision}:"
                ' write "auto"'
            )


def enabled_precision(config: dict[str, Any] | None) -> str | None:
    """The precision that the DeepSpeed JSON sets: bf16, fp16, or `no` if it disables bf16.

    None leaves the choice to the flag and the device.
    """
    enabled = _precisions(config or {})
    return next((kind for kind, is_on in enabled.items() if is_on), "no" if "bf16" in enabled else None)


def _precisions(config: dict[str, Any]) -> dict[str, bool]:
    """The `enabled` values of bf16 and fp16, without missing ones and "auto"."""
    sections = {kind: config.get(kind) for kind in ("bf16", "fp16")}
    return {
        kind: section["enabled"]
        for kind, section in sections.items()
        if isinstance(section, dict) and isinstance(section.get("enabled"), bool)
    }


def disable_meaningless(rehearsal: bool) -> list[str]:
    """Disables answers that have no meaning here. Returns a remark about each."""
    meaningless = {"fsdp_cpu_ram_efficient_loading": "it is for models that Transformers loads"}
    if rehearsal:
        meaningless["fsdp_offload_params"] = "in a rehearsal they are on the CPU anyway"
    if os.environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP") == "":  # empty by default: use the model's own blocks
        del os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"]
    remarks = []
    for key, why in meaningless.items():
        if is_on(key.upper()):
            os.environ[key.upper()] = "false"
            remarks.append(f"{key} is off: {why}")
    return remarks


def check_wrapped_classes(model: Any) -> None:
    """ValueError when the config names a class for FSDP to wrap that the model does not have."""
    names = os.environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "")
    if not names or not is_on("ACCELERATE_USE_FSDP"):
        return
    classes = {type(module).__name__ for module in model.modules()}
    for name in names.split(","):
        if name not in classes:
            refuse(f"fsdp_transformer_layer_cls_to_wrap: {name}", "the model has no such class, leave it out")
