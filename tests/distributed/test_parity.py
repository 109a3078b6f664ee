"""Tests that every strategy with 2 processes matches a one-process run, and that broken code is detected.

With a batch size of 96, 1,437 digits and --holdout 11, an epoch has 14 steps. A run of 16 steps therefore
includes the end of an epoch and data of the second epoch.
"""

import functools
import json
from itertools import product
from pathlib import Path

import pytest
import yaml

from tests.conftest import (
    CNN,
    HALF_THE_CORES,
    RESNET,
    ROOT,
    STRATEGIES,
    VIT_WITH_ALL,
    accelerate,
    deepspeed,
    full,
    mutate,
    needs,
    python,
    run,
)
from tests.support.compare import assert_same_training

STEPS = 16  # Number of steps in a run, two more than in an epoch
FLAGS = ["--batch_size", "96", "--per_device_batch_size", "48", "--epochs", "2", "--max_steps", str(STEPS)]
FLAGS += ["--log_every", "1", "--log_samples", "--mixed_precision", "no", "--trackers", "none"]
SCRIPTS = {
    "hello": ["train_hello.py", "--data_size", "1437", *FLAGS],
    "cnn_a": [*CNN, "--data", "digits", *FLAGS],  # CNN-A's recipe does not clip gradients
    # The flags select SGD, momentum and BatchNorm.
    "cnn_b": [*RESNET, "--data", "digits", *FLAGS, "--label_smoothing", "0.1"],
    "vit": [*VIT_WITH_ALL, *FLAGS],
}
# Other scripts train with the test recipe that docs/add_a_model.md describes.
for path in sorted(ROOT.glob("train_*.py")):
    name = path.stem.removeprefix("train_")
    SCRIPTS.setdefault(name, [path.name, "--config", f"recipes/{name}_digits.yaml", *FLAGS])
TWO_PROCESSES = {name: (launcher, []) for name, launcher in STRATEGIES.items() if name != "single"}
TWO_PROCESSES["deepspeed"] = (deepspeed("--num_gpus", "2"), ["--deepspeed_config", "ds_configs/zero2.json"])
# Pairs of a script and a strategy that `make test` compares in this file. `make test` also compares DDP with
# CNN-A in test_exact_sum.py, and CNN-B in scripts/test_any_model.py. `make test-all` runs all pairs.
RING = {("hello", "zero3"), ("vit", "zero2")}


def rows(quick, all_rows) -> list:
    """Return the rows of a parameter table. Only `make test-all` runs rows that are not in `quick`."""
    return [row if row in quick else full(*row) for row in all_rows]


def command(script: str, cache: list) -> list:
    return SCRIPTS[script] if script == "hello" else [*SCRIPTS[script], *cache]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, cache):
    """Return a function that returns the folder of a script's one-process run.

    The run uses 2 accumulation steps unless the flags specify a different number.
    """

    @functools.cache
    def folder_of(script: str, *flags: str) -> Path:
        folder = tmp_path_factory.mktemp(script) / "run"
        words = [*python(), *command(script, cache), *flags, "--output_dir", folder]
        run(words, env=HALF_THE_CORES)
        return folder

    return folder_of


@pytest.mark.parametrize(("script", "strategy"), rows(RING, product(SCRIPTS, TWO_PROCESSES)))
def test_two_processes_match_one_with_two_accumulations(script, strategy, one_process, tmp_path, cache):
    launcher, flags = TWO_PROCESSES[strategy]
    run([*launcher, *command(script, cache), *flags, "--output_dir", tmp_path / "run"])
    assert_same_training(tmp_path / "run", one_process(script))


@pytest.mark.full
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_precision_given_to_the_launcher_is_used(strategy, one_process, project_copy, tmp_path, cache):
    """Check all strategies, including a DeepSpeed file, with which accelerate passes "no" by default.

    The code is changed so that the CPU reports native bf16 support.
    """
    query = "return has_bf16_instructions()"
    mutate(project_copy, "onecurve/distributed/precision.py", query, "return True")
    words, position = command("cnn_a", cache), SCRIPTS["cnn_a"].index("--mixed_precision")
    launcher = accelerate("single_gpu") if strategy == "single" else STRATEGIES[strategy]
    words = [*launcher, "--mixed_precision", "no", *words[:position], *words[position + 2 :]]
    output = run([*words, "--output_dir", tmp_path / "run"], cwd=project_copy)
    assert "mixed precision no" in output, output
    assert_same_training(tmp_path / "run", one_process("cnn_a"))


CHECKPOINTED, COMPILED, SMALLER = "grad_checkpointing", "compile", "per_device_batch_size"
SETTINGS = [
    *(("vit", strategy, CHECKPOINTED) for strategy in ("single", *TWO_PROCESSES)),
    *(("cnn_b", strategy, CHECKPOINTED) for strategy in ("single", "fsdp")),
    *((script, "single", COMPILED) for script in ("cnn_a", "vit")),
    *(("cnn_a", "ddp", f"{COMPILED}, {SMALLER}"), ("vit", "zero1", COMPILED)),
    *(("vit", strategy, f"{COMPILED}, {CHECKPOINTED}") for strategy in ("ddp", "fsdp", "zero2")),
    *(("vit", strategy, SMALLER) for strategy in TWO_PROCESSES),
]
QUICK = {("vit", "fsdp", CHECKPOINTED)}
RECORDED = {CHECKPOINTED: True, COMPILED: "default"}


@pytest.mark.parametrize(("script", "strategy", "settings"), rows(QUICK, SETTINGS))
def test_a_machine_setting_changes_no_numbers(script, strategy, settings, one_process, tmp_path, cache):
    """Check that a setting, passed in the launcher's config or as a flag, does not change the results.

    With smaller micro-batches, two processes with two accumulation steps match one process with four.
    """
    launcher, flags = (*TWO_PROCESSES.get(strategy, (python(), [])),)
    smaller = ["--per_device_batch_size", "24"] if SMALLER in settings else []
    if COMPILED in settings:
        needs("g++")
    if COMPILED in settings and strategy == "single":
        flags = ["--compile", "default"]
    elif COMPILED in settings:
        launcher = compiling(strategy, tmp_path)
    if settings == CHECKPOINTED and strategy == "fsdp":
        launcher = accelerate("fsdp_2gpu", "--fsdp_activation_checkpointing", "true")
    elif CHECKPOINTED in settings:
        flags = [*flags, "--grad_checkpointing"]
    words = [*launcher, *command(script, cache), *smaller, *flags, "--output_dir", tmp_path / "run"]
    run(words, env=HALF_THE_CORES if strategy == "single" else None)
    assert_same_training(tmp_path / "run", one_process(script, *smaller))
    for file in ("recipe.json", "result.json"):
        recorded = json.loads((tmp_path / "run" / file).read_text())
        for name in RECORDED.keys() & set(settings.split(", ")):
            assert recorded[name] == RECORDED[name], file


def compiling(strategy: str, tmp_path: Path) -> list:
    """Return a launcher command whose config file enables compilation."""
    name = {"zero1": "zero1_4gpu"}.get(strategy, f"{strategy}_2gpu")
    config = yaml.safe_load((ROOT / "accelerate_configs" / f"{name}.yaml").read_text())
    config.pop("dynamo_backend", None)
    config["num_processes"] = 2
    config["dynamo_config"] = {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": True}
    (tmp_path / "compiled.yaml").write_text(yaml.safe_dump(config))
    return [*accelerate(name)[:-1], tmp_path / "compiled.yaml"]


ACCELERATOR, VIT_SCRIPT, CNN_SCRIPT = "onecurve/distributed/accelerator.py", "train_vit.py", "train_cnn_a.py"
MUTANTS = {  # Script, strategy, file, code and replacement of each mutant
    # The value 1.0 is DeepSpeed's default.
    "clipping at 1.0": ("vit", "zero2", ACCELERATOR, 'clipping": clip_norm', 'clipping": 1.0'),
    "one rank's samples dropped": (
        *("cnn_a", "ddp", "onecurve/flags/recipe.py"),
        "return range(rank * self.accumulations, (rank + 1) * self.accumulations)",
        "return range(self.accumulations)",
    ),
    "the rate doubled": ("cnn_a", "ddp", CNN_SCRIPT, 'group["lr"] = lr', 'group["lr"] = 2 * lr'),
    "the schedule stepped once per process": (
        *("cnn_a", "ddp", CNN_SCRIPT),
        "lr = learning_rate(recipe, step, steps.total)",
        "lr = learning_rate(recipe, step * accelerator.num_processes, steps.total)",
    ),
    "the same dropout": ("vit", "ddp", VIT_SCRIPT, "recipe.seed, step, k)", "recipe.seed, step, 0)"),
    "BatchNorm apart": ("cnn_b", "ddp", "onecurve/run/evaluation.py", " broadcast(buffer)\n", " pass\n"),
}


@pytest.mark.parametrize("mutant", [m if "dropped" in m else full(m) for m in MUTANTS])
def test_parity_detects_a_mutant(mutant, one_process, project_copy, tmp_path, cache):
    script, strategy, file, old, new = MUTANTS[mutant]
    mutate(project_copy, file, old, new)
    launcher, flags = TWO_PROCESSES[strategy]
    words = [*launcher, *command(script, cache), *flags, "--output_dir", tmp_path / "run"]
    run(words, cwd=project_copy)
    with pytest.raises(AssertionError):
        assert_same_training(tmp_path / "run", one_process(script))


def test_the_default_recipes_are_compared():
    """Check that FLAGS do not disable the recipe features that make parity difficult."""
    text = (ROOT / "train_vit.py").read_text()
    for name in ("drop_path", "mixup", "cutmix", "ema_decay"):
        assert f"--{name}" not in SCRIPTS["vit"]
        assert f"    {name}: float = flag(0.0" not in text, name
