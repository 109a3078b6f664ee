"""Tests of the files in accelerate_configs/ and ds_configs/, and of the figures in their READMEs."""

import json
import re
from pathlib import Path

import pytest
import timm
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType
from accelerate.utils.deepspeed import HfDeepSpeedConfig

from tests.conftest import ROOT

YAMLS = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
JSONS = sorted((ROOT / "ds_configs").glob("*.json"))
GPU_COUNTS = {
    "cpu": 1, "single_gpu": 1, "ddp_2gpu": 2, "ddp_4gpu": 4, "ddp_2x2gpu": 4, "ddp_2x4gpu": 8,
    "fsdp_2gpu": 2, "fsdp_4gpu": 4, "fsdp_2x4gpu": 8, "zero1_4gpu": 4, "zero2_2gpu": 2, "zero2_4gpu": 4,
    "zero3_4gpu": 4, "zero3_2x4gpu": 8, "zero3_offload_4gpu": 4,
}  # fmt: skip
TYPES = {"ddp": DistributedType.MULTI_GPU, "fsdp": DistributedType.FSDP, "zero": DistributedType.DEEPSPEED}
HYBRID = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 4}


def test_the_set_of_configs_is_complete():
    assert {path.stem for path in YAMLS} == set(GPU_COUNTS)
    assert {path.stem for path in JSONS} == {"zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"}
    text = (ROOT / "accelerate_configs" / "README.md").read_text()
    assert [path.stem for path in YAMLS if f"[{path.stem}]({path.name})" not in text] == []


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.stem)
def test_a_config_file(path):
    """Check that Accelerate can read a config file.

    The file must contain no rank, address or fixed port, and must explain each key.
    """
    config, keys = load_config_from_file(str(path)), yaml.safe_load(path.read_text())
    strategy, hosts = path.stem.split("_")[0].rstrip("123"), 2 if "_2x" in path.stem else 1
    assert config.distributed_type == TYPES.get(strategy, DistributedType.NO)
    assert (config.num_processes, config.num_machines) == (GPU_COUNTS[path.stem], hosts)
    assert config.use_cpu == (strategy == "cpu")
    # Configs select bf16, which the script's flag overrides. Accelerate refuses this key if there is a
    # DeepSpeed file.
    assert config.mixed_precision == (None if strategy == "zero" else "bf16")
    assert not {"machine_rank", "main_process_ip", "rdzv_backend", "gpu_ids"} & set(keys)
    # Accelerate replaces port 0 with a free port if it starts several processes. Several hosts would choose
    # different ports.
    assert keys.get("main_process_port") == (0 if keys["num_processes"] > 1 and hosts == 1 else None)
    first, *lines = path.read_text().splitlines()
    assert first.startswith("# ")
    for line in lines:
        assert re.fullmatch(r" *\w+:( \S+)?  # \S.+", line), line
        assert len(line) <= 110, line
    assert config.parallelism_config == (HYBRID if path.stem == "fsdp_2x4gpu" else {})
    assert bool(config.fsdp_config) == (strategy == "fsdp")
    if strategy == "fsdp":  # FSDP wraps the classes that the model lists
        assert config.fsdp_config["fsdp_version"] == 2
        assert config.fsdp_config["fsdp_reshard_after_forward"] is True
        assert config.fsdp_config["fsdp_auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP"
        assert "fsdp_transformer_layer_cls_to_wrap" not in config.fsdp_config
        # The value True would fail for models with buffers.
        assert config.fsdp_config["fsdp_cpu_ram_efficient_loading"] is False
    assert bool(config.deepspeed_config) == (strategy == "zero")
    if strategy == "zero":  # The JSON file contains all settings
        file = ROOT / config.deepspeed_config.pop("deepspeed_config_file")
        assert file.is_file()
        assert file.stem == strategy_of(path.stem)
        standard = {"zero3_init_flag": False, "deepspeed_multinode_launcher": "standard"}
        assert config.deepspeed_config == standard


@pytest.mark.parametrize("path", JSONS, ids=lambda path: path.stem)
def test_deepspeed_json(path):
    """Check that Accelerate and DeepSpeed can read a JSON file, and that the README explains each of its
    keys.
    """
    from deepspeed.runtime.config import DeepSpeedConfig

    config = json.loads(path.read_text())
    assert HfDeepSpeedConfig(str(path)).config == config
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        assert config[key] == "auto"
    assert config["gradient_clipping"] == "auto"  # Without this key, DeepSpeed would clip at 1.0
    assert config["bf16"] == config["fp16"] == {"enabled": "auto"}  # auto_cast would cast even without fp16
    assert not {"optimizer", "scheduler"} & set(config)
    assert config["zero_allow_untested_optimizer"] is True
    zero = config["zero_optimization"]
    assert zero["stage"] == int(path.stem[4])
    assert "auto" not in zero.values()  # `auto` would require model.config.hidden_size
    offloads = path.stem.endswith("_offload")
    assert (zero.get("offload_optimizer", {}).get("device") == "cpu") == offloads
    assert (config.get("zero_force_ds_cpu_optimizer") is False) == offloads
    text = (ROOT / "ds_configs" / "README.md").read_text()
    for key in {*config, *zero} - {"zero_optimization", "stage"}:
        assert f"`{key}" in text, key
    config |= {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1}
    config |= {"gradient_clipping": 0.0, "bf16": {"enabled": True}, "fp16": {"enabled": False}}
    read = DeepSpeedConfig(config)
    assert read.zero_optimization_stage == int(path.stem[4])
    assert read.gradient_clipping == 0.0


def strategy_of(config: str) -> str:
    """Return the strategy in a config's name, for example zero3_offload for zero3_offload_4gpu."""
    return re.sub(r"_(\dx)?\dgpu$|_gpu$", "", config)


@pytest.fixture(scope="module")
def parameters() -> int:
    """Return the parameter count of ViT-B/32 with 10 classes, the model in the READMEs' tables."""
    with torch.device("meta"):
        model = timm.create_model("vit_base_patch32_224", num_classes=10)
    return sum(p.numel() for p in model.parameters())


def bytes_on_gpu(strategy: str, n: int) -> float:
    """Return a step's peak memory in bytes per parameter, with AdamW and bf16.

    The sum includes weights, gradients, fp32 copies and moments. The peak occurs at the start of the backward
    pass, when autocast's weight copies (2 bytes) exist, or in the optimizer's step.
    """
    return {
        "single": 4 + 8 + max(2, 4),
        "ddp": 4 + 8 + max(2, 4),
        "fsdp": (4 + 8) / n + max(2, 4 / n),
        "zero1": 4 + (4 + 8) / n + max(2, (4 + 4) / n),
        "zero2": 4 + (4 + 8) / n + max(2, (4 + 4) / n),
        "zero3": (4 + 8 + 4 + 4) / n,
        "zero2_offload": 4 + 2,
        "zero3_offload": 4 / n,
    }[strategy]


def bytes_sent(strategy: str, n: int) -> float:
    """Return the number of bytes per parameter that one GPU sends in a step.

    The calculation assumes ring collectives without gradient accumulation.
    """
    # Fraction of the data that each GPU sends in an all-gather or a reduce-scatter. An all-reduce sends this
    # fraction twice.
    part = (n - 1) / n
    gradients_all_reduced = {"single": 4, "ddp": 4, "zero1": 4, "zero2": 4}.get(strategy, 0)
    gradients_scattered = {"fsdp": 4, "zero3": 4, "zero3_offload": 4}.get(strategy, 0)
    weights_gathered = {"fsdp": 8, "zero1": 4, "zero2": 4, "zero3": 8, "zero3_offload": 8}.get(strategy, 0)
    return part * (2 * gradients_all_reduced + gradients_scattered + weights_gathered)


def table(readme: Path, heading: str) -> dict[str, list[str]]:
    """Return the rows of the ViT-B/32 table whose first column has this heading."""
    rows, inside = {}, False
    for line in readme.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == heading and "ViT-B/32, GiB" in cells:
            inside = True
        elif not line.startswith("|"):
            inside = False
        elif inside and not cells[0].startswith("---"):
            rows[re.sub(r"\[(.+)\]\(.+\)", r"\1", cells[0])] = cells[1:]
    return rows


def test_numbers_in_the_readme_of_accelerate_configs(parameters):
    readme = ROOT / "accelerate_configs" / "README.md"
    assert f"P = {parameters:,}" in readme.read_text()
    rows = table(readme, "Config")
    assert set(rows) == set(GPU_COUNTS) - {"cpu"}
    for config, (_, gib, _, mb) in rows.items():
        n, strategy, sent = GPU_COUNTS[config], strategy_of(config), 0.0
        if config == "fsdp_2x4gpu":  # Two hosts all-reduce each quarter of the gradients
            n, sent = 4, 2 * (1 / 2) * 4 / 4
        sent += bytes_sent(strategy, n)
        assert gib == f"{bytes_on_gpu(strategy, n) * parameters / 2**30:.2f}", config
        assert mb == f"{sent * parameters / 1e6:.0f}", config


def test_numbers_in_the_readme_of_ds_configs(parameters):
    rows = table(ROOT / "ds_configs" / "README.md", "File")
    assert set(rows) == {path.stem for path in JSONS}
    for file, (_, _, gpu, _, host, _) in rows.items():
        # For each parameter, host memory contains 8 bytes for gradients or copies, 4 for fp32 weights and 8
        # for moments.
        on_host = 20 if file.endswith("_offload") else 0
        assert gpu == f"{bytes_on_gpu(file, 4) * parameters / 2**30:.2f}", file
        assert host == f"{on_host * parameters / 2**30:.2f}", file
