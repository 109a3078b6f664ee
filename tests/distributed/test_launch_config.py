"""Tests that answers to `accelerate config` and keys of DeepSpeed JSON files are either applied or refused.

A refusal is a one-line error. The tests create a process's environment from the config file with Accelerate's
launcher code, without starting a launch.
"""

import json
import os
import re
from pathlib import Path

import pytest
import torch
import yaml
from accelerate import PartialState
from accelerate.commands import launch
from accelerate.utils import launch as launch_env
from torch import nn

from onecurve.distributed import launch_config
from onecurve.distributed.accelerator import start
from onecurve.distributed.devices import check_devices
from onecurve.flags.recipe import Recipe
from tests.conftest import CNN, RESNET, ROOT, accelerate, deepspeed, free_port, result, rows_of, run, torchrun
from tools.launch.hosts import Host
from tools.launch.job import LaunchPlan

QUESTIONNAIRE = {  # Contents of the file that `accelerate config` writes if all answers are the defaults
    "compute_environment": "LOCAL_MACHINE", "debug": False, "distributed_type": "MULTI_GPU",
    "downcast_bf16": "no", "enable_cpu_affinity": False, "gpu_ids": "all", "machine_rank": 0,
    "main_training_function": "main", "mixed_precision": "no", "num_machines": 1, "num_processes": 2,
    "rdzv_backend": "static", "same_network": True, "tpu_env": [], "tpu_use_cluster": False,
    "tpu_use_sudo": False, "use_cpu": False,
}  # fmt: skip
FSDP = {
    "version": 2, "reshard_after_forward": True, "offload_params": False, "activation_checkpointing": False,
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "state_dict_type": "FULL_STATE_DICT",
    "cpu_ram_efficient_loading": True,
}  # fmt: skip
FSDP_1 = {
    "version": 1, "reshard_after_forward": "FULL_SHARD", "use_orig_params": True,
    "backward_prefetch": "BACKWARD_PRE", "forward_prefetch": False, "sync_module_states": True,
}  # fmt: skip
ZERO = {
    "zero_stage": 2, "offload_optimizer_device": "none", "offload_param_device": "none",
    "gradient_accumulation_steps": 1, "zero3_init_flag": False,
}  # fmt: skip
DYNAMO = {"dynamo_backend": "INDUCTOR", "dynamo_mode": "default", "dynamo_use_regional_compilation": True}
OFFLOADED = {"offload_optimizer_device": "cpu", "offload_param_device": "cpu"}


def fsdp(**changes) -> dict:
    config = {f"fsdp_{key}": value for key, value in (FSDP | changes).items()}
    return {"distributed_type": "FSDP", "fsdp_config": config}


def sizes(replicate=1, shard=2, tp=1, cp=1, **rest) -> dict:
    settings = {"dp_replicate_size": replicate, "dp_shard_size": shard, "tp_size": tp, "cp_size": cp, **rest}
    return fsdp() | {"parallelism_config": {f"parallelism_config_{key}": n for key, n in settings.items()}}


def zero(**changes) -> dict:
    return {"distributed_type": "DEEPSPEED", "deepspeed_config": ZERO | changes}


def by_json(file: str, **answers) -> dict:
    settings = {"deepspeed_config_file": file, "zero3_init_flag": False}
    return {"distributed_type": "DEEPSPEED", "deepspeed_config": settings, **answers}


HONOURED = {
    "every default": {},
    "one process": {"distributed_type": "NO", "num_processes": 1},
    "the CPU": {"distributed_type": "NO", "num_processes": 1, "use_cpu": True},
    "debug, NUMA": {"debug": True, "enable_cpu_affinity": True},
    "bf16": {"mixed_precision": "bf16"},
    "fp16": {"mixed_precision": "fp16"},
    "dynamo": {"dynamo_config": DYNAMO},
    "FSDP": fsdp(),
    "FSDP, kept gathered": fsdp(reshard_after_forward=False),
    "FSDP, no wrap": fsdp(auto_wrap_policy="NO_WRAP"),
    "FSDP, by size": fsdp(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=1000),
    "FSDP, offload": fsdp(offload_params=True),
    "FSDP, activation checkpointing": fsdp(activation_checkpointing=True),
    "FSDP, sharded files": fsdp(state_dict_type="SHARDED_STATE_DICT"),
    "hybrid": sizes(replicate=2, shard=2) | {"num_processes": 4},
    "ZeRO-1": zero(zero_stage=1),
    "ZeRO-2": zero(gradient_clipping=1.0),
    "ZeRO-2, offload": zero(offload_optimizer_device="cpu"),
    "ZeRO-3": zero(zero_stage=3, zero3_save_16bit_model=True),
    "ZeRO-3, offload": zero(zero_stage=3, **OFFLOADED),
}
REFUSED = [  # Answers, and a pattern that matches the key, its value and the advice in the error message
    (fsdp(**FSDP_1), "fsdp_version: 1, .*choose fsdp_version: 2"),
    (fsdp(sharding_strategy="SHARD_GRAD_OP"), "strategy: SHARD_GRAD_OP, .*choose fsdp_reshard_after_forward"),
    (fsdp(reshard_after_forward="FULL_SHARD"), "reshard_after_forward: full_shard, .*choose true or false"),
    (fsdp(backward_prefetch="NO_PREFETCH"), "fsdp_backward_prefetch: .*BACKWARD_PRE"),
    (fsdp(forward_prefetch=True), "fsdp_forward_prefetch: true, .*choose false"),
    (fsdp(use_orig_params=False), "fsdp_use_orig_params: false, .*choose true"),
    (fsdp(state_dict_type="LOCAL_STATE_DICT"), "LOCAL_STATE_DICT, .*SHARDED_STATE_DICT"),
    (fsdp(activation_checkpointing_offload=True), "activation_checkpointing_offload: true, .*choose false"),
    (fsdp(ignored_modules="head"), "fsdp_ignored_modules: head, .*remove this answer"),
    (sizes(shard=1, tp=2), "parallelism_config_tp_size: 2, .*larger dp_shard_size"),
    (sizes(shard=1, cp=2), "parallelism_config_cp_size: 2, .*larger dp_shard_size"),
    (sizes(shard=1, sp_size=2), "parallelism_config_sp_size: 2, .*larger dp_shard_size"),
    (sizes(replicate=2), "dp_replicate_size: 2 and dp_shard_size: 2, .*must be 2"),
    (sizes(replicate=0), "dp_replicate_size: 0, .*choose 1 or more"),
    (sizes(shard=1), "dp_replicate_size: 1 and dp_shard_size: 1, .*larger than 1"),
    ({"distributed_type": "MEGATRON_LM", "megatron_lm_config": {}}, "type: MEGATRON_LM, .*FSDP or DeepSpeed"),
    ({"distributed_type": "MULTI_CPU", "use_cpu": True}, "distributed_type: MULTI_CPU, .*choose multi-GPU"),
    (zero(zero_stage=0), "zero_stage: 0, .*choose 1, 2 or 3"),
    (zero(offload_optimizer_device="nvme"), "offload_optimizer_device: nvme, .*choose cpu"),
    (zero(zero_stage=3, offload_param_device="nvme"), "offload_param_device: nvme, .*choose cpu"),
    (zero(offload_param_device="cpu"), "offload_param_device: cpu, .*zero_stage: 3"),
    (zero(zero_stage=3, zero3_init_flag=True), "zero3_init_flag: true, .*choose false"),
    (zero(deepspeed_moe_layer_cls_names="MoE"), "deepspeed_moe_layer_cls_names: MoE, .*remove this answer"),
    (by_json("nowhere.json"), r"deepspeed_config_file nowhere\.json: No such file"),
    (
        by_json("ds_configs/zero2.json", mixed_precision="bf16"),
        r"mixed_precision next to deepspeed_config_file: .*set it in ds_configs/zero2\.json",
    ),
]
ON = {"enabled": True}
AUTO = {"lr": "auto", "weight_decay": "auto", "torch_adam": True}
ON_CPU = {"device": "cpu"}
JSONS = [  # Additions to ds_configs/zero2.json. Keys with a dot belong to zero_optimization.
    ({"optimizer": {"type": "AdamW"}}, "optimizer .the script creates"),
    ({"scheduler": {"type": "WarmupLR"}}, "scheduler .the script sets the learning rate"),
    ({"compile": {"deepcompile": True}}, "compile .choose --compile"),
    ({"activation_checkpointing": {"profile": True}}, "checkpointing .choose --grad_checkpointing"),
    ({"pipeline": {"stages": 2}}, "pipeline .remove it"),
    ({"torch_autocast": ON}, "torch_autocast .choose --mixed_precision bf16"),
    ({"bf16": {"enabled": "auto", "bf16_optimizer_states": True}}, r"bf16\.bf16_o.*Remove"),
    ({"gradient_cliping": 1.0}, r"gradient_cliping .did you mean gradient_clipping\?"),
    ({"bf16": True}, r'sets bf16 to true, .*\. Set bf16 to {"enabled": true}, or remove bf16'),
    ({".offload_optimizer": "cpu"}, r'sets offload_optimizer to "cpu", .*to {"device": "cpu"}, or remove'),
    ({".offload_optimizer": None}, r"sets offload_optimizer to null, .*\. Set"),
    ({".zenflow": {"topk_ratio": 0.1}}, r"zero_optimization\.zenflow .remove it"),
    ({".offload_optimizer": {"super_offload": True}}, r"offload_optimizer\.super_offload .remove it"),
    ({".offload_optimizer": {"device": "nvme"}}, r"offload_optimizer\.device nvme .choose cpu"),
    ({".offload_param": {"device": "cpu"}}, "offload_param .requires stage 3"),
    ({".zero_quantized_weights": True}, r"zero_optimization\.zero_quantized_weights .remove"),
    ({".stage": 0}, r"zero_optimization\.stage 0 .choose 1, 2 or 3"),
    ({"optimizer": {"type": "OneBitAdam", "params": AUTO}}, "optimizer .the script creates"),
    ({"optimizer": {"type": "AdamW", "params": AUTO | {"lr": 1e-3}}}, "optimizer .the script creates"),
    (  # A single message must report all problems
        {"optimizer": {"type": "Adam"}, "scheduler": {"type": "WarmupLR"}, ".stage": 0, "pipeline": 1},
        "optimizer .*, scheduler .*, pipeline .*, zero_optimization.stage 0 .* equivalent to a ddp_",
    ),
    (
        {".cpu_offload": True, ".offload_optimizer": ON_CPU},
        r"cpu_offload .*equivalent to ds_configs/zero2_offload\.json",
    ),
    (
        {".cpu_offload": True, ".offload_optimizer": {"device": "none"}},
        r"cpu_offload .*equivalent to ds_configs/zero2\.json",
    ),
    ({"bf16": ON, "fp16": ON}, "bf16 and fp16. Enable only one"),
    ({"compile": {"enabled": False}, ".zenflow": None, "tensorboard": {"enabled": False}}, ""),
    ({".offload_optimizer": ON_CPU | {"nvme_path": "/nvme"}}, ""),
]
HIDDEN_SIZE = {  # Settings that Accelerate would compute from the model's hidden size
    "reduce_bucket_size": 20000000,
    "stage3_prefetch_bucket_size": 20000000,
    "stage3_param_persistence_threshold": 10000,
}


@pytest.fixture
def env(monkeypatch):
    """Remove environment variables left over from another test or launcher."""
    names = re.compile("ACCELERATE_|FSDP_|PARALLELISM_|MEGATRON_|MASTER_|LOCAL_|WORLD_SIZE|RANK|OMPI_|PMI_")
    for name in filter(names.match, dict(launch.os.environ)):
        monkeypatch.delenv(name)
    return monkeypatch


def launched(config: dict, folder: Path) -> dict[str, str]:
    """Return the environment that Accelerate's launcher creates for rank 0 from this config."""
    file = folder / "config.yaml"
    config = QUESTIONNAIRE | {"main_process_port": free_port()} | config
    if "deepspeed_config_file" in config.get("deepspeed_config", {}) and config["mixed_precision"] == "no":
        del config["mixed_precision"]
    file.write_text(yaml.safe_dump(config))
    words = ["--config_file", str(file), "train_cnn_a.py"]
    args = launch.launch_command_parser().parse_args(words)
    args, defaults, from_config = launch._validate_launch_command(args)
    rank = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": str(config["num_processes"])}
    if args.use_deepspeed:
        fields = [*defaults.deepspeed_config, *(["mixed_precision"] if from_config else [])]
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        return launch_env.prepare_deepspeed_cmd_env(args)[1] | rank
    if args.use_fsdp or args.use_megatron_lm or args.multi_gpu:
        return launch_env.prepare_multi_gpu_env(args) | rank
    return launch_env.prepare_simple_launcher_cmd_env(args)[1]


def check(env: dict[str, str], **flags) -> dict | None:
    return launch_config.check_launch_config(env, int(env.get("WORLD_SIZE", "1")), **flags)


def assert_refused(message: str, env: dict[str, str], **flags) -> None:
    """Check that a start with this environment raises a one-line error that matches `message`."""
    with pytest.raises(ValueError, match=rf"\A[^\n]*{message}[^\n]*\Z"):
        check(env, **flags)


@pytest.mark.parametrize("config", HONOURED.values(), ids=HONOURED)
def test_honoured(config, env, tmp_path):
    check(launched(config, tmp_path))


@pytest.mark.parametrize(("config", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refused(config, message, env, tmp_path):
    assert_refused(message, launched(config, tmp_path))


@pytest.mark.parametrize(("variables", "message"), rows_of("launcher's variables"))
def test_refused_from_the_environment(variables, message):
    assert_refused(message, variables)
    check({"ACCELERATE_MIXED_PRECISION": "fp8"}, precision="bf16")  # The flag overrides the variable


@pytest.mark.parametrize(("changes", "message"), JSONS, ids=[message or "off" for _, message in JSONS])
@pytest.mark.parametrize("source", ["flag", "config"])
def test_deepspeed_json(changes, message, source, env, tmp_path):
    config = json.loads((ROOT / "ds_configs" / "zero2.json").read_text())
    for name, value in changes.items():
        (config["zero_optimization"] if name.startswith(".") else config)[name.lstrip(".")] = value
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config))
    variables = {"LOCAL_RANK": "0"} if source == "flag" else launched(by_json(str(file)), tmp_path)
    flags = {"deepspeed_config_file": str(file)} if source == "flag" else {}
    if message:
        assert_refused(f"^{re.escape(str(file))} .*{message}", variables, **flags)
    else:
        assert check(variables, **flags) == config


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[]", "does not contain a JSON object"),
        (b"{}", "has no section zero_optimization. Choose a file in ds_configs/"),
        (b'{"zero_optimization" 2}', "line 1, is not valid JSON: Expecting ':' delimiter"),
    ],
)
def test_an_invalid_deepspeed_json(content, message, tmp_path):
    file = tmp_path / "ds.json"
    file.write_bytes(content)
    assert_refused(message, {"LOCAL_RANK": "0"}, deepspeed_config_file=str(file))


@pytest.mark.parametrize("file", sorted((ROOT / "ds_configs").glob("*.json")), ids=lambda file: file.stem)
def test_the_projects_jsons_are_honoured(file):
    config = check({"LOCAL_RANK": "0"}, deepspeed_config_file=str(file), precision="fp16")
    assert launch_config.enabled_precision(config) is None


OPEN = {  # Settings in Accelerate's templates
    "optimizer": {"type": "AdamW", "params": AUTO},
    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
    "zero_optimization": {
        **{"stage": 3, "overlap_comm": True, **dict.fromkeys(HIDDEN_SIZE, "auto")},
        "stage3_gather_16bit_weights_on_model_save": "auto",
    },
}


def test_auto_settings_of_a_json_are_replaced(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(OPEN))
    config = check({"LOCAL_RANK": "0"}, deepspeed_config_file=str(file))
    remarks = launch_config.replace_auto_values(config)
    assert config == {"zero_optimization": {"stage": 3, "overlap_comm": True, **HIDDEN_SIZE}}
    assert remarks[0].startswith("using the script's optimizer and scheduler, because the DeepSpeed config")
    assert "reduce_bucket_size 20000000, " in remarks[1]
    assert "model_save by default, as in ds_configs/zero3.json, because" in remarks[1]
    assert launch_config.replace_auto_values(config) == []


@pytest.mark.full
@pytest.mark.parametrize("launcher", [torchrun(2), deepspeed("--num_gpus=2")], ids=["torchrun", "deepspeed"])
def test_a_json_with_auto_settings_trains(launcher, tmp_path, cache):
    (tmp_path / "ds.json").write_text(json.dumps(OPEN))
    words = [*launcher, *CNN, "--data", "digits", "--max_steps", "2", "--trackers", "none", *cache]
    output = run([*words, "--deepspeed_config", tmp_path / "ds.json", "--output_dir", tmp_path / "run"])
    assert result(tmp_path / "run")["strategy"] == "zero3"
    assert output.count("using the script's optimizer and scheduler, because") == 1


def test_the_precision_of_a_json(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}))
    config = check({"LOCAL_RANK": "0"}, deepspeed_config_file=str(file))
    assert launch_config.enabled_precision(config) == "bf16"
    assert launch_config.enabled_precision(config | {"bf16": {"enabled": False}}) == "no"
    off_but_fp16 = {"bf16": {"enabled": False}, "fp16": {"enabled": True}}
    assert launch_config.enabled_precision(config | off_but_fp16) == "fp16"
    assert launch_config.enabled_precision({"fp16": {"enabled": False}}) is None
    with pytest.raises(ValueError, match=r"bf16.enabled to true, but --mixed_precision is no. Set bf16"):
        check({"LOCAL_RANK": "0"}, deepspeed_config_file=str(file), precision="no")


def test_the_table_contains_every_variable_of_the_launcher():
    """Check that all variables of accelerate's launcher are known, so that new variables are detected."""
    source = Path(launch_env.__file__).read_text()
    simple = set(re.findall(r'current_env\["([A-Z0-9_]+)"\]', source))
    sizes = re.findall(r'prefix \+ "((?:DP|TP|CP|SP)_[A-Z_]+SIZE)"', source)
    sized = {f"PARALLELISM_CONFIG_{name}" for name in sizes}
    table = launch_config.supported_settings()["answers"]
    known = {variable for group in table.values() for variable, *_ in group.values()} | set(table)
    not_answers = {"PYTHONPATH", "KMP_AFFINITY", "KMP_BLOCKTIME", "OMP_NUM_THREADS"}
    not_answers |= {"XLA_USE_BF16", "XLA_DOWNCAST_BF16"}  # A different check refuses jobs on TPUs
    other_devices = {name for name in simple if "VISIBLE" in name or name == "ZE_AFFINITY_MASK"}
    assert simple | sized <= known | not_answers | other_devices
    assert {"FSDP_VERSION", "ACCELERATE_DEEPSPEED_ZERO_STAGE"} <= simple


def test_start_refuses_before_anything_else(env):
    PartialState._reset_state()
    env.setenv("ACCELERATE_USE_MEGATRON_LM", "true")
    env.setenv("LOCAL_RANK", "0")
    with pytest.raises(ValueError, match="MEGATRON_LM"):
        start(Recipe())
    assert PartialState._shared_state == {}


def test_an_unsupported_device_is_refused(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("xpu"))
    with pytest.raises(ValueError, match="distributed_type: XPU, which is not supported: choose multi-GPU"):
        check_devices()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.version, "hip", "6.4")  # torch calls AMD GPUs "cuda"
    with pytest.raises(ValueError, match="distributed_type: ROCM, which is not supported"):
        check_devices()


def test_launch_pys_gpus_override_the_config(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(QUESTIONNAIRE | {"gpu_ids": "0,1"}))
    plan = LaunchPlan([Host("a", (2, 3))], ["--config_file", str(file)], ["x.py"], {}, None, 0, tmp_path)
    args = launch.launch_command_parser().parse_args(plan.launch_command(0, "")[3:])
    assert launch._validate_launch_command(args)[0].gpu_ids == "all"


def test_answers_without_a_meaning_are_changed_and_reported(env):
    env.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
    env.setenv("FSDP_OFFLOAD_PARAMS", "true")
    env.setenv("FSDP_TRANSFORMER_CLS_TO_WRAP", "")
    (remark,) = launch_config.disable_ineffective_answers(is_rehearsal=False)
    assert remark.startswith("fsdp_cpu_ram_efficient_loading is ignored because this key affects only models")
    (remark,) = launch_config.disable_ineffective_answers(is_rehearsal=True)
    assert remark.startswith("fsdp_offload_params is ignored because the parameters are already on the CPU")
    assert launch_config.disable_ineffective_answers(is_rehearsal=True) == []
    assert "FSDP_TRANSFORMER_CLS_TO_WRAP" not in os.environ  # An empty class name would match no class


def test_a_class_to_wrap_that_the_model_lacks(env):
    env.setenv("ACCELERATE_USE_FSDP", "true")
    env.setenv("FSDP_TRANSFORMER_CLS_TO_WRAP", "Linear,BertLayer")
    with pytest.raises(ValueError, match="fsdp_transformer_layer_cls_to_wrap: BertLayer"):
        launch_config.check_wrapped_classes(nn.Sequential(nn.Linear(1, 1)))
    env.setenv("FSDP_TRANSFORMER_CLS_TO_WRAP", "Linear")
    launch_config.check_wrapped_classes(nn.Sequential(nn.Linear(1, 1)))


TRAINED = {  # Answers with which training fails unless this project handles them
    "FSDP, offload, BatchNorm": (fsdp(fsdp_offload_params=True), [*RESNET, "--mixed_precision", "no"]),
    "ZeRO-3, offload": (HONOURED["ZeRO-3, offload"], CNN),
    "ZeRO-2, offload, SGD": (HONOURED["ZeRO-2, offload"], RESNET),
    "FSDP, by size, debug": (HONOURED["FSDP, by size"] | {"debug": True}, CNN),
    "hybrid": (HONOURED["hybrid"], CNN),
}


@pytest.mark.full
@pytest.mark.parametrize("name", TRAINED)
def test_trained(name, tmp_path, cache):
    """Launch a two-step training run with these answers."""
    config, script = TRAINED[name]
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(QUESTIONNAIRE | {"main_process_port": free_port()} | config))
    flags = ["--data", "digits", "--batch_size", "16", "--max_steps", "2", "--trackers", "none", *cache]
    words = [*accelerate("cpu")[:3], "--config_file", file, *script, *flags]
    output = run([*words, "--output_dir", tmp_path / "run"])
    assert result(tmp_path / "run")["status"] == "finished"
    if "fsdp_config" in config:
        assert "fsdp_cpu_ram_efficient_loading is ignored because this key affects only models" in output
