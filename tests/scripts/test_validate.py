"""Tests that validate.py's metrics under all launchers match the run's metrics and scikit-learn's."""

import contextlib
import json
import shutil
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from sklearn import metrics as sklearn_metrics

from onecurve.checkpoint.format import DamagedCheckpoint, parse_step_index
from onecurve.checkpoint.weights import find_model
from onecurve.flags.recipe import parse
from onecurve.models.script import as_flags, load_script, project_script, recipe_class
from onecurve.run.evaluation import MAX_CONFUSION_CLASSES, frequent_mistakes
from onecurve.system.s3 import ObjectStore
from tests.checkpoint.test_checkpoints import forge
from tests.conftest import (
    CNN,
    ROOT,
    STRATEGIES,
    VIT,
    Job,
    deepspeed,
    full,
    latest,
    metrics,
    mutate,
    python,
    result,
    run,
    torchrun,
)
from tests.support.data_sets import png
from tests.support.s3 import BUCKET, s3, use_s3  # noqa: F401 (a fixture)
from tools.inference.report import METRIC_MODULES, REPORT_FILES, load_metrics
from validate import parse_flags

FP32 = ["--mixed_precision", "no"]


@pytest.fixture(scope="module")
def validated(trained, tmp_path_factory, cache) -> tuple[str, Path, list]:
    """Validate the run with one process, and return the output, home folder and network connections."""
    home = tmp_path_factory.mktemp("home")
    with listener() as (address, callers):
        web = {f"{scheme}_PROXY": address for scheme in ("HTTP", "HTTPS", "ALL")}
        env = web | {"HF_ENDPOINT": address, "NO_PROXY": "", "HOME": str(home)}
        output = run(words(trained, *cache), env=env)
    return output, home, callers


@pytest.fixture
def report(trained, validated) -> dict:
    """Return validate.py's report with one process."""
    return read(trained / "validation" / f"val_{result(trained)['best_step']}")


@pytest.fixture
def copy(trained, tmp_path) -> Path:
    """Copy the trained run, so that a test can damage the copy."""
    return shutil.copytree(trained, tmp_path / "copy", ignore=shutil.ignore_patterns("validation"))


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    return dict(zip(METRIC_MODULES, load_metrics(tmp_path_factory.mktemp("modules")), strict=True))


@contextlib.contextmanager
def listener() -> Iterator[tuple[str, list]]:
    """Run a server that closes every connection, and yield the server's URL and its clients' addresses."""
    callers = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def listen() -> None:
            with contextlib.suppress(OSError):
                while True:
                    caller, address = server.accept()
                    callers.append(address)
                    caller.close()

        threading.Thread(target=listen, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", callers
        server.shutdown(socket.SHUT_RDWR)


def read(folder: Path) -> dict:
    return json.loads((folder / "report.json").read_text())


def words(*rest) -> list:
    return [*python(), "validate.py", *rest, *FP32]


def fails(words: list, status: int = 1, **options) -> str:
    """Run a failing command, check its exit status and the absence of a traceback, and return its output."""
    exit_status, output = Job(words, **options).wait()
    assert exit_status == status, output
    assert "Traceback" not in output
    return output


def assert_same(report: dict, other_report: dict) -> None:
    """Compare the entries of two reports that do not depend on the number of processes."""
    for name in ("images", "top1", "top5", "per_class", "confusion", "classes", "split", "data"):
        assert report[name] == other_report[name], name
    assert report["loss"] == pytest.approx(other_report["loss"], abs=1e-6)
    error = "expected_calibration_error"
    assert report[error] == pytest.approx(other_report[error], abs=1e-6)
    for image, other_image in zip(report["worst"], other_report["worst"], strict=True):
        assert image["id"] == other_image["id"]
        assert image["probability"] == pytest.approx(other_image["probability"], abs=1e-6)


# --- Reported results


def test_the_numbers_of_the_run(trained, validated, report):
    output, home, callers = validated
    checkpoint = latest(trained)
    folder = trained / "validation" / f"val_{result(trained)['best_step']}"
    assert report["top1"] == result(trained)["best_accuracy"]
    assert report["loss"] == pytest.approx(metrics(trained)[-1]["val/loss"], abs=1e-6)
    assert (report["images"], report["split"], report["data"]) == (360, "val", "digits")
    assert report["checkpoint"] == str(checkpoint / "model.safetensors")
    assert report["per_class"]["support"] == [sum(row) for row in report["confusion"]]
    assert np.trace(report["confusion"]) / np.sum(report["confusion"]) == report["top1"] < report["top5"]
    assert output.splitlines()[-4:] == [str(folder / name) for name in REPORT_FILES]
    assert sorted(path.name for path in folder.iterdir()) == sorted(REPORT_FILES)
    cells = [line.split(",") for line in (folder / "predictions.csv").read_text().splitlines()[1:]]
    assert [int(row[0]) for row in cells] == list(range(360))
    assert sum(row[2] == row[3] for row in cells) / 360 == report["top1"]
    assert len(report["worst"]) == 24
    assert all(image["label"] != image["predicted"] for image in report["worst"])
    assert not callers, "it went to the network"
    assert not list(home.rglob("evaluate_modules")), "it left a copy of a module that could grow old"


@pytest.mark.full
def test_half_precision_enlarges_images_in_fp32(tmp_path, cache):
    half = ["--mixed_precision", "bf16"]
    run(
        [
            *python(),
            *VIT,
            *cache,
            "--data",
            "digits",
            "--epochs",
            "1",
            *half,
            "--output_dir",
            tmp_path / "run",
        ]
    )
    run([*python(), "validate.py", tmp_path / "run", *cache, *half])
    [file] = tmp_path.glob("run/validation/*/report.json")
    assert read(file.parent)["loss"] == pytest.approx(metrics(tmp_path / "run")[-1]["val/loss"], rel=1e-12)


LAUNCHERS = {"torchrun": torchrun(2), "torchrun of three": torchrun(3), **STRATEGIES}
LAUNCHERS["deepspeed"] = deepspeed("--num_gpus", "2")


@pytest.mark.parametrize("name", ["torchrun", *map(full, sorted(LAUNCHERS.keys() - {"torchrun", "single"}))])
def test_several_processes_give_the_same_report(name, trained, report, cache, tmp_path):
    flags = ["--deepspeed_config", "ds_configs/zero2.json"] if name == "deepspeed" else []
    run([*LAUNCHERS[name], "validate.py", trained, *FP32, *cache, *flags, "--output_dir", tmp_path])
    assert read(tmp_path)["processes"] > 1
    assert name not in STRATEGIES or read(tmp_path)["strategy"] == name
    assert_same(read(tmp_path), report)


def test_a_lone_file(trained, report, cache, tmp_path):
    file = shutil.copy(latest(trained) / "model.safetensors", tmp_path / "mine.safetensors")
    flags = ["--script", CNN[0], "--data", "digits", *cache, "--output_dir", tmp_path / "out"]
    run(words(file, *CNN[1:], *flags))
    assert_same(read(tmp_path / "out"), report)
    assert read(tmp_path / "out")["checkpoint"] == str(file)
    assert "is a single file" in fails(words(file, "--data", "digits"))
    output = fails(words(file, *flags))  # Without --widths, the file belongs to a different model
    assert "does not match this model: 7 tensors have different names or shapes" in output


def test_from_s3(trained, s3, cache, tmp_path, monkeypatch):  # noqa: F811
    use_s3(monkeypatch, s3)
    store = ObjectStore(f"s3://{BUCKET}/{tmp_path.name}/my_run")
    for file in sorted((trained / "checkpoints").rglob("*")):
        if file.is_file():
            store.upload(file, str(file.relative_to(trained)))
    run(words(store.url, "--split", "train", *cache, "--output_dir", tmp_path / "out"))
    report = read(tmp_path / "out")
    assert (report["images"], report["split"]) == (1437, "train")
    assert report["checkpoint"] == f"{store.url}/checkpoints/{latest(trained).name}/model.safetensors"
    assert find_model(store.url, "latest", tmp_path, beat).reports == "validation/my_run"
    store.write(f"checkpoints/{latest(trained).name}/model.safetensors", b"short")
    with pytest.raises(ValueError, match=r"model.safetensors has 5 bytes"):
        find_model(store.url, "best", tmp_path / "again", beat)
    with pytest.raises(ValueError, match="does not contain a run"):
        find_model(f"{store.url}/nothing", "best", tmp_path, beat)


@pytest.mark.parametrize("launcher", ["python", full("torchrun")])
def test_the_most_frequent_mistakes_of_many_classes_are_shown(launcher, tmp_path, cache):
    """Check the run folder, validate.py and the logbook page for 1,001 classes.

    A full confusion matrix would need memory that grows quadratically with the number of classes.
    """
    rows = ["file,label,split"]
    for k in range(1001 + 80):
        (tmp_path / f"{k}.png").write_bytes(png(k, 8, 8))
        rows.append(f"{k}.png,c{k % 7 if k > 1000 else k},{'val' if k > 1000 else 'train'}")
    (tmp_path / "labels.csv").write_text("\n".join(rows))
    flags = ["--data", tmp_path / "labels.csv", "--max_steps", 1, "--trackers", "none", *FP32, *cache]
    run_folder = tmp_path / "run"
    run([*(python() if launcher == "python" else torchrun(2)), *CNN, *flags, "--output_dir", run_folder])
    output = run(words(run_folder, *cache))
    assert "most frequently confused classes" in " ".join(output.split())
    shown = json.loads((run_folder / "confusion.json").read_text())
    (report,) = map(read, run_folder.glob("validation/*"))
    assert "confusion" not in shown.keys() | report.keys()
    assert report["mistakes"] == shown["mistakes"]
    (table,) = run_folder.glob("validation/*/predictions.csv")
    pairs = Counter(tuple(line.split(",")[2:4]) for line in table.read_text().splitlines()[1:])
    counts = sorted((count for (true, guess), count in pairs.items() if true != guess), reverse=True)
    assert [count for _, _, count in shown["mistakes"]] == counts[:20]
    names = shown["classes"]
    assert all(pairs[names[true], names[guess]] == count for true, guess, count in shown["mistakes"])
    pictures = {path.name for path in run_folder.glob("plots/*")}
    assert pictures == {"confusion.png", "curves.png", "predictions.png"}
    run([*python(), "logbook.py", "add", run_folder, "--folder", tmp_path / "pages"])
    pages = {path.name for path in tmp_path.glob("pages/*/*/*/*.png")}
    assert len([name for name in pages if name.startswith("confusion_")]) == 2, pages


# --- Metrics


@pytest.mark.parametrize("classes", [2, 10, 1000, 1001])
def test_classification_and_top_k_agree_with_scikit_learn(modules, classes):
    """Compare metrics with scikit-learn if some classes have no samples or are never predicted."""
    draws = np.random.default_rng(classes)
    labels = draws.integers(0, max(1, classes - 2), 3000)
    predicted = np.where(draws.random(3000) < 0.6, labels, draws.integers(0, classes, 3000))
    predicted[predicted == classes - 1] = 0
    labels[predicted == classes - 1] = 0
    scores = modules["classification"].compute(predictions=predicted, references=labels, class_count=classes)
    numbers = dict(labels=range(classes), zero_division=0)
    expected = sklearn_metrics.precision_recall_fscore_support(labels, predicted, **numbers)
    for name, values in zip(("precision", "recall", "f1", "support"), expected, strict=True):
        np.testing.assert_allclose(scores[name], values, atol=1e-12, err_msg=name)
    confusion = sklearn_metrics.confusion_matrix(labels, predicted, labels=range(classes))
    if classes <= MAX_CONFUSION_CLASSES:
        np.testing.assert_array_equal(scores["confusion"], confusion)
    else:
        assert "confusion" not in scores
    for true, guess, count in frequent_mistakes(labels, predicted, classes):
        assert true != guess
        assert confusion[true, guess] == count
    # The specificity of a class is the recall of the complementary class, which contains all other samples.
    negatives = sklearn_metrics.multilabel_confusion_matrix(labels, predicted, labels=range(classes))[:, 0]
    specificity = negatives[:, 0] / np.maximum(1, negatives.sum(1))
    np.testing.assert_allclose(scores["specificity"], specificity, atol=1e-12)
    assert scores["accuracy"] == pytest.approx(sklearn_metrics.accuracy_score(labels, predicted))
    assert scores["recall"][classes - 1] == scores["precision"][classes - 1] == 0
    class_scores, labels = draws.random((500, 10)), draws.integers(0, 10, 500)
    top = np.argsort(-class_scores, axis=1)[:, :5]
    top_5 = modules["top_k"].compute(predictions=top, references=labels)["top_k"]
    assert top_5 == pytest.approx(sklearn_metrics.top_k_accuracy_score(labels, class_scores, k=5))


def test_calibration_error_bin_by_bin(modules):
    """Compare the calibration error with the paper's sum over bins.

    Bins exclude their lower bound and include their upper bound.
    """
    draws = np.random.default_rng(0)
    probabilities = np.append(draws.random(2000), [1.0, 0.2, 1 / 15, 1e-9])
    labels = draws.integers(0, 3, len(probabilities))
    predicted = np.where(draws.random(len(labels)) < probabilities, labels, (labels + 1) % 3)
    expected = 0.0
    for low, high in zip(np.linspace(0, 1, 16)[:-1], np.linspace(0, 1, 16)[1:], strict=True):
        inside = (probabilities > low) & (probabilities <= high)
        gap = (predicted == labels)[inside].mean() - probabilities[inside].mean()
        expected += inside.mean() * abs(gap)
    pairs = {"predictions": predicted, "references": labels}
    computed = modules["calibration"].compute(**pairs, probabilities=probabilities, bin_count=15)
    assert computed["expected_calibration_error"] == pytest.approx(expected, abs=1e-12)
    sure = modules["calibration"].compute(predictions=[1, 1], references=[1, 0], probabilities=[1.0, 1.0])
    assert sure["expected_calibration_error"] == 0.5


def test_an_image_counted_twice_is_detected(trained, project_copy, cache, tmp_path):
    mutate(
        project_copy,
        "onecurve/numerics/order.py",
        "valid_count = int(np.count_nonzero(ids < end_id))",
        "valid_count = per_device",
    )
    status, output = Job(words(trained, *cache, "--output_dir", tmp_path / "out"), cwd=project_copy).wait()
    assert status == 1
    # Padding 360 images to 3 x 128 repeats the last image 24 times
    assert "image 359 was evaluated 25 times" in output
    assert not (tmp_path / "out").exists()


# --- Models and data that can't be validated


def beat() -> None:
    pass


def test_a_damaged_checkpoint_is_named(copy, cache):
    file = latest(copy) / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    output = fails(words(copy, *cache))
    assert f"error: {file} does not match the SHA-256 in the manifest" in output
    assert not (copy / "validation").exists()
    with pytest.raises(DamagedCheckpoint):
        find_model(str(file), "best", copy, beat)
    with pytest.raises(ValueError, match=r"none of the 1 checkpoints in .* passes verification"):
        find_model(str(copy), "latest", copy, beat)


def test_no_code_of_a_checkpoint_runs(copy, cache, tmp_path):
    evil = tmp_path / "train_evil.py"
    evil.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    for name in ("train_evil", str(evil.with_suffix("")), "../train_evil", "validate"):
        with pytest.raises(
            ValueError, match="which is not one of this project's scripts \\(train_cnn_a, train_cnn_b"
        ):
            project_script(name)
    forge(latest(copy), written_by={"script": str(evil.with_suffix(""))})
    assert "the model was trained by" in fails(words(copy, *cache))
    assert not (tmp_path / "ran").exists()


def test_a_manifest_is_checked_like_a_users_flags(copy, capsys):
    recipe_type = recipe_class(load_script(ROOT / "train_cnn_a.py"))
    recipe = json.loads((latest(copy) / "manifest.json").read_text())["recipe"]
    assert "--widths=4,8,32" in as_flags(recipe, recipe_type)
    for key in ("resume", "config", "unheard_of"):
        with pytest.raises(ValueError, match=f"the recipe contains '{key}'"):
            as_flags(recipe | {key: "x"}, recipe_type)
    vit = recipe_class(load_script(ROOT / "train_vit.py"))
    # Nothing is downloaded, because the checkpoint to validate already contains the weights.
    assert as_flags({"pretrained": True, "weights": "x", "patch_size": None}, vit) == []
    with pytest.raises(SystemExit):
        parse(recipe_type, [], as_flags(recipe | {"widths": [4, 8]}, recipe_type))
    assert "--widths 4,8 must list at least three" in capsys.readouterr().err


def test_paths_of_a_model(copy, tmp_path):
    step = result(copy)["best_step"]
    checkpoint = latest(copy)
    for path in (copy, checkpoint, checkpoint / "model.safetensors"):
        model = find_model(str(path), "best", tmp_path, beat)
        assert Path(model.weights) == checkpoint / "model.safetensors"
        assert (model.step, model.script, model.run_name) == (step, "train_cnn_a", copy.name)
        assert model.reports == str(copy / "validation")
    moved = shutil.copytree(checkpoint, tmp_path / checkpoint.name)
    assert find_model(str(moved), "best", tmp_path, beat).reports == f"validation/{moved.name}"
    with pytest.raises(ValueError, match=r"optimizer.safetensors does not contain a model"):
        find_model(str(checkpoint / "optimizer.safetensors"), "best", tmp_path, beat)
    with pytest.raises(ValueError, match="does not exist"):
        find_model(str(tmp_path / "nothing"), "best", tmp_path, beat)
    with pytest.raises(ValueError, match=r"contains neither checkpoints nor"):
        find_model(str(tmp_path), "best", tmp_path, beat)
    index = copy / "checkpoints" / "index.json"
    index.write_text('{"latest": "step_00000011"}')
    with pytest.raises(ValueError, match="Use --which latest"):
        find_model(str(copy), "best", tmp_path, beat)
    assert find_model(str(copy), "latest", tmp_path, beat).step == step


@pytest.mark.parametrize("content", ["{", '{"best": 3}', '{"best": null}'])
def test_a_broken_index_is_named(content, copy, tmp_path):
    index = copy / "checkpoints" / "index.json"
    index.write_bytes(content.encode("latin1"))
    with pytest.raises(ValueError, match=r"checkpoints/index.json is not a valid checkpoint index"):
        find_model(str(copy), "best", tmp_path, beat)
    assert parse_step_index(b'{"best": "../../x", "latest": "step_00000003"}', "here") == {"latest": 3}


def test_flags_of_validate_are_separated_from_the_scripts():
    words = ["--local_rank=0", "run", "--split", "train", "--patch-size", "8", "--data=x"]
    flags, script_flags = parse_flags(words)
    assert (flags.checkpoint, flags.split, flags.data) == ("run", "train", "x")
    assert script_flags == ["--patch-size", "8", "--data=x"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "MODEL is missing"),
        (["run", "--split", "tests"], "--split tests: the value must be one of val, test, train"),
        (["run", "--which", "oldest"], "--which oldest: the value must be one of best, latest"),
    ],
)
def test_wrong_flags_have_status_2(flags, message, capsys):
    with pytest.raises(SystemExit) as raised:
        parse_flags(flags)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_a_scripts_unknown_flag_has_status_2(trained):
    assert "unknown flag --width: did you mean --widths?" in fails(words(trained, "--width", "3"), status=2)
