"""Tests of flags, config files and batch-size arithmetic."""

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from onecurve.flags.fields import FlagFacts, declared_values, flag_facts_of
from onecurve.flags.recipe import ImageRecipe, Recipe, flag, parse, recipe_part, setting, share_out
from onecurve.models.script import load_script, recipe_class
from onecurve.run.identity import recipe_differences
from tests.conftest import ROOT
from train_cnn_a import CnnA


@dataclass(frozen=True, kw_only=True)
class Sample(Recipe):
    widths: tuple[int, ...] = flag((4, 8), "widths", minimum=1)
    area: tuple[float, float] = flag((0.08, 1.0), "a range", maximum=1)
    share: float = flag(0.5, "a share", minimum=0, maximum=1)
    pretrained: bool = flag(False, "yes or no")


@dataclass(frozen=True, kw_only=True)
class Tuned(CnnA):
    weights: str | None = flag(None, "a file", is_path=True)


TWICE = "are two names for the same setting. Specify only one of the two names"


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["--batch_size", "8"], "batch_size", 8),
        (["--batch-size", "8"], "batch_size", 8),
        (["--batch-size=8"], "batch_size", 8),
        (["--widths", "1,2,3"], "widths", (1, 2, 3)),
        (["--area", "0.3,0.3"], "area", (0.3, 0.3)),
        (["--lr", "1e-3"], "lr", 1e-3),
        (["--s3", "none"], "s3", None),
        (["--pretrained"], "pretrained", True),
        (["--no-pretrained"], "pretrained", False),
        (["--pretrained=True"], "pretrained", True),  # Format of flags in W&B and SageMaker sweeps
        (["--pretrained", "True", "--epochs", "2"], "pretrained", True),
        (["--pretrained", "true", "--pretrained=False"], "pretrained", False),
        (["--pretrained", "--epochs", "2"], "epochs", 2),
        # The deepspeed launcher adds --local_rank as the first argument.
        (["--local_rank=1", "--epochs", "2"], "epochs", 2),
        # The hyphen in the value is preserved
        (["--model-folder", "./weights-1"], "output_dir", "./weights-1/*"),
    ],
)
def test_flags(words, field, value):
    assert getattr(parse(Sample, words), field) == value


@pytest.mark.parametrize(
    ("env", "words", "expected"),
    [
        ({"CROSS_SIZE": "1"}, [], str(ROOT / "ds_configs/zero2.json")),
        ({"CROSS_SIZE": "1"}, ["--deepspeed_config=ds_configs/zero3.json"], "ds_configs/zero3.json"),
        ({"CROSS_SIZE": "1", "ACCELERATE_USE_DEEPSPEED": "true"}, [], None),
        ({}, [], None),
    ],
)
def test_the_command_deepspeed_trains_with_deepspeed(env, words, expected, monkeypatch):
    """Check that a job started by deepspeed uses DeepSpeed, although the config names another DeepSpeed file.

    The test sets CROSS_SIZE as DeepSpeed's launcher does.
    """
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert parse(Sample, words).deepspeed_config == expected


@pytest.mark.parametrize("name", ["recipe.yaml", "recipe.json"])
def test_a_config_file_sets_defaults_and_flags_win(name, tmp_path):
    text = {
        "recipe.yaml": "epochs: 3\nlr: 1e-3\nwidths: [1, 2]\npretrained: true\nmax_steps: null\n"
        "compile: no\ncheckpoint_every: 500\n",
        "recipe.json": '{"epochs": 3, "lr": 1e-3, "widths": "1,2", "pretrained": "True", "compile": "no", '
        '"checkpoint_every": "500"}',
    }[name]
    (tmp_path / name).write_text(text)
    recipe = parse(Sample, ["--config", str(tmp_path / name), "--epochs", "5"])
    expected = {"epochs": 5, "lr": 1e-3, "widths": (1, 2), "pretrained": True, "compile": "no"}
    assert recipe == Sample(**expected, checkpoint_every=500)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--epochs", "1.5"], "--epochs 1.5: the value must be a whole number"),
        (["--epochs", "0"], "--epochs 0: the value must be at least 1"),
        (["--share", "2"], "--share 2.0: the value must be from 0 to 1"),
        (["--lr", "nan"], "--lr nan: the value must be at least 0"),
        (["--lr", "inf"], "--lr inf: the value must be a finite number"),
        (["--widths", "4,x"], "--widths 4,x: the value must be a list of numbers, for example 4,8,32"),
        (["--area", "0.5"], "--area 0.5: the value must be two numbers, for example 0.08,1"),
        (["--area", "0.1,0.5,1"], "--area 0.1,0.5,1: the value must be two numbers, for example 0.08,1"),
        (["--area", "0,1"], "--area 0.0,1.0: the value must be MIN,MAX with 0 < MIN <= MAX <= 1"),
        (["--area", "0.9,0.5"], "--area 0.9,0.5: the value must be MIN,MAX with 0 < MIN <= MAX <= 1"),
        (["--area", "0.5,1.5"], "--area 0.5,1.5: the value must be MIN,MAX with 0 < MIN <= MAX <= 1"),
        (["--area", "0.5,nan"], "--area 0.5,nan: the value must be MIN,MAX with 0 < MIN <= MAX <= 1"),
        (["--pretrained=maybe"], "--pretrained maybe: the value must be true or false"),
        (["--trackers", "none,wandb"], "--trackers none,wandb: `none` can't be combined"),
        (["--name", "a_{lrr}"], "--name a_{lrr}: {lrr} does not contain the name of a flag"),
        (["--name", "{data}/x"], "/x: the value must be a folder name"),
        (["--name", ""], "--name is empty. Check that the shell variable for this value is set."),
        (["--epochs", "3", "--model-folder="], "--model_folder is empty. Check that the shell variable"),
        (["--timeout_s", "1000000"], "--timeout_s 1000000: the value must be from 1 to 604800"),
        (["--lr", "1e300"], "--lr 1e+300: the value must be at most 1e+15"),
        (["--max_steps", "9" * 30], f"--max_steps {'9' * 30}: the value must be at most 1e+15"),
        (["--name", "\x1b[31mred"], "--name \\x1b[31mred: remove all characters that a terminal"),
        (["--data", "\u202eabc"], "--data \\u202eabc: remove all characters"),
        (["--mixup", "0"], "unknown flag --mixup. train_"),
        (["--image_size=8"], "--image_size. train_cnn_a.py, train_cnn_b.py, "),
        (["--epochs", "9" * 5000], f" {'9' * 200}... (4,800 more characters): the value must be a whole"),
        (["--compile", "x" * 5000], f"--compile {'x' * 200}... (4,800 more characters): the value must be"),
        (["--lr=1", "--epochs=2", "--learning-rate=2"], f"--lr and --learning_rate {TWICE}"),
        (["--model_folder", "a", "--output_dir", "b"], f"--model_folder and --output_dir {TWICE}"),
        (["--pretrained", "--no-pretrained"], f"--pretrained and --no_pretrained {TWICE}"),
        (["--trackers", "mlflow"], "--trackers mlflow: the value must be one of tensorboard, wandb"),
    ],
)
def test_wrong_flags(words, message, capsys):
    assert message in refusal(words, capsys)
    # CNN-A's recipe defines additional checks of --widths.
    assert "--widths 4,8 must list at least three widths" in refusal(["--widths", "4,8"], capsys, CnnA)
    two_folds = ["--holdout", "0.2", "--fold", "2/5"]
    assert f"--holdout and --fold {TWICE}" in refusal(two_folds, capsys, CnnA)
    assert "8 is too small for --no_padding" in refusal(["--no_padding", "--image_size=8"], capsys, CnnA)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "epoch: 3", "unknown key epoch, did you mean epochs?"),
        ("a.yaml", "--learning-rate: x", "--learning-rate x: the value must be a number"),
        ("a.yaml", "--batch-sise: 8", "unknown key --batch-sise, did you mean batch_size?"),
        ("a.yaml", "half_residual: true", "a.yaml: half_residual was removed because this flag slowed"),
        ("a.yaml", "epochs: [3", "a.yaml, line 1"),
        ("a.yaml", "- 3", "the file must contain `key: value` lines"),
        ("a.yaml", "epochs: true", "epochs True: the value must be a whole number"),
        ("a.yaml", "data: 3", "data 3: the value must be text"),
        ("a.yaml", "epochs:", "epochs None: the value must be a whole number"),
        ("a.json", '{"epochs": 3,\n', "a.json, line 2"),
        ("a.json", "[3]", "a.json does not contain a JSON object"),
        ("a.yaml", "a: &a [x, x]\nb: &b [*a, *a]", "a.yaml, line 2: YAML aliases (*name) are not supported"),
        ("a.yaml", "epochs: 3\nlr: 1\nepochs: 4", "a.yaml, line 3: the key epochs appears more than once"),
        ("a.json", r'{"name": "a\u0000b"}', r"name a\x00b: remove all characters that a terminal"),
        (
            "a.json",
            '{"epochs": 3, "epochs": 4}',
            "a.json can't be read as JSON: the key epochs appears more than once",
        ),
        (
            "a.yaml",
            "epochs: 1:30",
            "YAML reads 1:30 as the number 90. Write 90, or put quotes around the text",
        ),
        ("a.yaml", "lr: 1:30.5", "YAML reads 1:30.5 as the number 90.5."),
        ("a.yaml", "epochs: 010", "YAML reads 010 as the number 8."),
        ("a.yaml", "output_dir: ''", "a.yaml: output_dir is empty. Check that the shell variable"),
        ("a.yaml", f"epochs: {'x' * 5000}", "x... (4,800 more characters): the value must be a whole number"),
        ("a.yaml", f"{'x' * 900}: 1", f"unknown key {'x' * 200}... (700 more characters)"),
        ("a.yaml", "lr: 1\nlearning-rate: 1", f"a.yaml: lr and learning-rate {TWICE}"),
        ("a.json", '{"model_folder": "a", "output_dir": null}', f"model_folder and output_dir {TWICE}"),
        ("a.yaml", "epochs: 2001-99-99", "a.yaml: month must be in 1..12"),
    ],
)
def test_wrong_config_files(name, text, message, tmp_path, capsys):
    (tmp_path / name).write_text(text)
    assert message in refusal(["--config", str(tmp_path / name)], capsys)


def test_the_last_of_several_values_wins(tmp_path):
    """Check repeated flags, including an earlier run's flags. A list in a file counts as a single value."""
    assert not parse(Sample, ["--no_pretrained", "--learning_rate=2"], ["--pretrained", "--lr=1"]).pretrained
    assert parse(CnnA, ["--widths", "4,8,32", "--widths", "8,8,8"]).widths == (8, 8, 8)
    (tmp_path / "a.yaml").write_text("widths: [4, 8, 32]\n")
    assert parse(CnnA, ["--config", str(tmp_path / "a.yaml")]).widths == (4, 8, 32)


def refusal(words, capsys, recipe=Sample) -> str:
    with pytest.raises(SystemExit) as stop:
        parse(recipe, words)
    assert stop.value.code == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1, printed
    return printed


def test_help_begins_with_the_scripts_own_flags(capsys):
    with pytest.raises(SystemExit):
        parse(CnnA, ["--help"])
    order = r"  --widths.*^images:.*^  --data .*^run:.*^  --seed.*^computation:.*^  --compile.*^flags:"
    assert re.search(order, capsys.readouterr().out, re.DOTALL | re.MULTILINE)


def test_one_process_per_host_prints(monkeypatch, capsys):
    slept = []
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr("onecurve.flags.fields.time.sleep", slept.append)
    with pytest.raises(SystemExit):
        parse(Sample, ["--epoch", "3"])
    # The error is delayed, because launchers kill all processes when one process exits.
    assert (capsys.readouterr().err, slept) == ("", [5])


def test_the_recipe_does_not_contain_machine_settings():
    names = ("output_dir", "per_device_batch_size", "max_steps", "mixed_precision", "timeout_s", "log_every")
    assert not set(names) & recipe_part(CnnA()).keys()
    assert {"data", "epochs", "batch_size", "lr", "seed", "widths"} <= recipe_part(CnnA()).keys()


@pytest.mark.parametrize("script", sorted(path.stem for path in ROOT.glob("train_*.py")))
def test_the_facts_of_each_flag_are_consistent(script):
    """Check that a new flag's undeclared facts have safe defaults and that no facts conflict."""
    recipe = recipe_class(load_script(ROOT / f"{script}.py"))
    facts, fields = flag_facts_of(recipe), {field.name: field for field in dataclasses.fields(recipe)}
    assert facts.keys() == fields.keys()
    for name, stated in facts.items():
        for fact in dataclasses.fields(FlagFacts):
            assert type(getattr(stated, fact.name)) is type(fact.default), (name, fact.name)
        trained, text = stated.part_of_recipe, str(fields[name].type)
        assert not (trained and (stated.per_host or stated.locates or stated.replayed)), name
        assert trained or not (stated.measures_best or stated.training_only or stated.drawn_on_device), name
        assert trained or not (stated.initial_weights or stated.decides_defaults or stated.in_names), name
        assert stated.locates in ("", "results", "cache"), name
        assert "str" in text or not (stated.is_path or stated.locates), name
        assert stated.training_only or not stated.initial_weights, name
        assert not stated.training_only or text == "<class 'bool'>" or "None" in text, name
    positions = [stated.in_names for stated in facts.values() if stated.in_names]
    assert len({*positions}) == len(positions)


@pytest.mark.parametrize("script", sorted(path.stem for path in ROOT.glob("train_*.py")))
@pytest.mark.parametrize("fact", [fact.name for fact in dataclasses.fields(FlagFacts) if not fact.default])
def test_facts_read_from_a_scripts_text_equal_its_recipes(script, fact):
    """Compare the script's text, which the log book reads instead of importing scripts, with its recipe."""
    facts = flag_facts_of(recipe_class(load_script(ROOT / f"{script}.py")))
    answers = {name: value for name, flag_facts in facts.items() if (value := getattr(flag_facts, fact))}
    assert answers == {name: value for name, value in declared_values(fact).items() if name in facts}


def test_a_redeclared_flag_keeps_its_facts():
    @dataclass(frozen=True, kw_only=True)
    class Redeclared(Tuned):
        batch_size: int = flag(32, "images")
        cache_dir: str | None = setting(None, "a folder")
        weights: str | None = flag(None, "a file", is_path=False)

    facts = flag_facts_of(Redeclared)
    assert facts["batch_size"] == FlagFacts(decides_defaults=True, changes_memory=False, in_names=4)
    assert facts["cache_dir"] == FlagFacts(part_of_recipe=False, is_path=True, locates="cache", per_host=True)
    assert facts["weights"] == FlagFacts()
    with pytest.raises(TypeError, match="is_paht"):
        flag(None, "a file", is_paht=True)


def test_the_printed_recipe_is_an_equal_config_file(tmp_path, capsys):
    words = ["--widths", "1,2", "--lr", "1e-5", "--pretrained", "--epochs", "3"]
    words += ["--trackers", "tensorboard,wandb"]
    with pytest.raises(SystemExit) as stop:
        parse(Sample, [*words, "--print_config"])
    assert stop.value.code == 0
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    assert parse(Sample, ["--config", str(tmp_path / "printed.yaml")]) == parse(Sample, words)


@pytest.mark.parametrize(
    ("name", "filled"),
    [("mine", "mine"), ("lr{lr}_s{seed}", "lr0.003_s1"), ("{data}-{widths}", "a_b-4_8"), ("{}{lr", "{}{lr")],
)
def test_a_name_may_contain_the_values_of_flags(name, filled):
    assert Sample(name=name, lr=3e-3, seed=1, data="a/b").filled_name() == filled


def test_batch_arithmetic():
    assert str(share_out(256, 32, 4)) == "batch 256 = 32 images x 4 processes x 2 accumulations"
    assert str(share_out(256, None, 1)) == "batch 256 = 256 images x 1 process x 1 accumulation"
    assert dataclasses.astuple(share_out(96, 16, 3)) == (96, 16, 3, 2, "images")
    assert str(share_out(64, 1, 1, "points")) == "batch 64 = 1 point x 1 process x 64 accumulations"
    with pytest.raises(ValueError, match=r"--batch_size 2 is not divisible by .*\(4\)\. Choose 4"):
        share_out(2, None, 4)
    batches = [share_out(batch, size, 2) for batch, size in ((96, 48), (90, 45), (96, 1))]
    smaller = [batch.smaller_per_device() for batch in batches]
    assert smaller == [24, 15, None]


@pytest.mark.parametrize(
    ("batch_size", "streams"), [(64, 64), (1024, 64), (1, 1), (24, 24), (96, 48), (100, 20), (127, 1)]
)
def test_unset_streams_follow_from_the_batch_size(batch_size, streams):
    """Check that the number of streams does not depend on the number of processes.

    Otherwise, the image order would depend on the number of processes.
    """
    assert ImageRecipe(batch_size=batch_size).streams == streams
    assert recipe_part(parse(CnnA, ["--batch_size", str(batch_size)]))["streams"] == streams
    assert ImageRecipe(batch_size=batch_size, streams=4).streams == 4


def test_derived_streams_differ_only_with_the_batch_size():
    def differing(changes: dict, *words: str) -> str:
        recorded = json.loads(json.dumps(recipe_part(CnnA()))) | changes
        return "; ".join(recipe_differences(recorded, parse(CnnA, list(words))))

    assert differing({}) == ""
    assert differing({}, "--batch_size", "96", "--allow_changed", "batch_size") == ""
    assert differing({}, "--batch_size", "96") == "--batch_size was 128, now 96"
    assert differing({}, "--streams", "32") == "--streams was 64, now 32"
    assert differing({"streams": 32}) == "--streams was 32, now 64"


def test_a_removed_flag_has_no_effect_in_old_recipes(tmp_path):
    (tmp_path / "old.yaml").write_text("half_residual: false\nepochs: 3\n")
    recipe = parse(CnnA, ["--config", str(tmp_path / "old.yaml")])
    assert recipe.epochs == 3
    assert recipe_differences({"epochs": 3, "half_residual": False}, recipe) == []
    assert recipe_differences({"epochs": 3, "half_residual": True}, recipe) == [
        "--half_residual was True, but this flag no longer exists"
    ]


def test_a_recipe_older_than_a_flag_has_the_default():
    older = json.loads(json.dumps(recipe_part(CnnA())))
    assert older.pop("crop_scale") == [0.08, 1.0]
    assert recipe_differences(older, CnnA()) == []
    wider = parse(CnnA, ["--crop_scale", "0.25,1"])
    assert recipe_differences(older, wider) == ["--crop_scale was [0.08, 1.0], now [0.25, 1.0]"]


@pytest.mark.parametrize(
    ("recorded", "now", "is_same"),
    [
        ("D/pets", "D/pets/", True),  # Tab completion adds the slash
        ("D/pets", "./D//pets", True),
        ("D/pets", f"{Path.cwd()}/D/pets", True),
        ("~/pets", f"{Path.home()}/pets", True),
        ("D/pets", "D/cats", False),
        ("s3://bucket/pets", "s3://bucket//pets", False),  # In S3, the second path is a different key
    ],
)
@pytest.mark.parametrize("name", ["data", "weights"])
def test_one_path_in_two_spellings(name, recorded, now, is_same):
    assert (recipe_differences({name: recorded}, parse(Tuned, [f"--{name}", now])) == []) == is_same
