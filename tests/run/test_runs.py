"""Tests of a run's outputs: the folder's name, result.json, a plot, and the tables at the end."""

import json
import shutil
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from PIL import Image

from onecurve.run.end_tables import print_result
from onecurve.run.lease import FolderRecord, Lease, is_owned
from onecurve.run.plots import plot_curves
from tests.conftest import Job, full, python, read_until, result, run, torchrun


@pytest.mark.parametrize(("launcher", "processes"), [(python(), 1), full(torchrun(3), 3)])
def test_hello_learns_its_curve_and_draws_it(launcher, processes, tmp_path):
    words = ["train_hello.py", "--batch_size", 16 * processes, "--hidden_size", 48, "--data_size", 2000]
    output = run([*launcher, *words, "--output_dir", tmp_path / "run"])
    facts = result(tmp_path / "run")
    assert (facts["processes"], facts["parameters"], facts["best_accuracy"]) == (processes, 2_497, None)
    # The noise alone causes a loss of 0.01. Without learning, the loss would be 1.
    assert facts["final_loss"] < 0.05
    assert f"batch {16 * processes} = 16 points x {processes} process" in output
    assert "image" not in output, "it learns from points"
    for name in ("curves", "fit"):
        with Image.open(tmp_path / "run" / "plots" / f"{name}.png") as image:
            assert len(image.convert("RGB").getcolors(1 << 20)) > 50


@pytest.mark.parametrize(("name", "scale"), [("val/loss", "log"), ("val/accuracy", "linear")])
def test_a_loss_without_classes_is_plotted_on_a_log_scale(name, scale, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    lines = [{"step": k, "epoch": k, "train/loss": 10.0**-k, "val/loss": 0.1, name: 0.5} for k in range(3)]
    plot_curves(tmp_path, lines, "title")
    assert figures[0].axes[0].get_yscale() == scale


@pytest.mark.parametrize("launcher", [python(), full(torchrun(2))], ids=["python", "torchrun"])
def test_a_closed_output_stops_nothing(launcher, tmp_path):
    """Close the output's reader, as Ctrl-C does with `| tee`. The run must continue to its end."""
    words = ["train_hello.py", "--max_steps", "60", "--log_every", "1", "--trackers", "none"]
    job = Job([*launcher, *words, "--output_dir", tmp_path / "run"], warm=launcher == python())
    read_until("step 2/", job)
    job.process.stdout.close()
    assert job.process.wait(60) == 0
    facts = result(tmp_path / "run")
    assert (facts["status"], facts["steps"], facts["error"]) == ("finished", 60, None)


def test_an_unfinished_run_with_one_other_value_is_named(tmp_path):
    """Check the hint about an unfinished run, including a run whose name contains a flag's value."""
    words = ["train_hello.py", "--trackers", "none", "--model_folder", tmp_path, "--name", "mine_{epochs}"]
    words += ["--epochs", 9, "--max_steps"]
    run([*words, 3])
    output = run([*words, 6, "--lr", "0.03", "--seed", "1"])  # Two changed values mean a different experiment
    assert "contains an unfinished run" not in output
    output = run([*words, 6, "--seed", "1"])
    first = tmp_path / "train_hello" / "mine_9"
    message = f"{first} contains an unfinished run that differs in one flag (--seed was 0, now 1). To resume"
    message = f"{message} that run, specify the earlier value of the flag"
    assert message in output.splitlines()
    assert "contains an unfinished run" not in run([*words, 6])  # This command resumes the run


def test_a_run_that_began_on_another_number_of_processes_is_named(tmp_path):
    """Check the message about another unfinished run. After a restart by torchrun, the job resumes that run.

    torchrun may restart a job with fewer hosts.
    """
    words = ["train_hello.py", "--trackers", "none", "--model_folder", tmp_path, "--max_steps"]
    run([*words, 3])
    (first_folder,) = (tmp_path / "train_hello").iterdir()
    other = first_folder.rename(
        first_folder.with_name(first_folder.name.replace("single", "ddp").removesuffix("1") + "4")
    )
    lease = Lease(FolderRecord(other), lambda: None)
    for name, content in (("unknown", None), ("damaged", "{")):
        shutil.copytree(other, folder := other.with_name(name), ignore=shutil.ignore_patterns("owner.json"))
        (folder / "recipe.json").unlink() if content is None else (folder / "recipe.json").write_text(content)
    assert is_owned(other)  # The output would not mention a run with a live owner
    lease.release()
    assert not is_owned(other)
    message = f"{other} contains an unfinished run of this recipe that began with a different number"
    output = run([*words, 4])
    assert message in output
    assert f"add --name {other.name}\n" in output
    assert f"the run folder is {first_folder}\n" in output
    shutil.rmtree(first_folder)
    output = run([*words, 5], env={"TORCHELASTIC_MAX_RESTARTS": "3"})
    assert f"continuing at step 3 with the checkpoint {other}" in output
    assert not first_folder.exists()


RESULT = {"script": "train_vit", "strategy": "ddp", "processes": 2, "device": "CPU", "data": "digits"}
RESULT |= {"best_accuracy": 0.9, "best_step": 20, "final_accuracy": 0.8, "val_images": 360, "train_s": 1.0}
RESULT |= {"wall_s": 2.0, "images_per_s": 100.0, "peak_memory_gib": 1.0, "val_name": "val"}
RESULT |= {"parameters": 1_000, "epoch_s": 0.5, "steps": 30, "best_by": "accuracy"}


def test_a_table_says_which_weights_to_use_and_why(tmp_path, capsys):
    """Check the tables of a run whose best checkpoint is not its last, first on disk and then only in S3."""
    steps = {f"checkpoints/step_000000{step}": step for step in (20, 30)}
    for checkpoint in steps:
        for name in ("model", "ema"):
            (tmp_path / checkpoint).mkdir(parents=True, exist_ok=True)
            (tmp_path / checkpoint / f"{name}.safetensors").touch()
    checkpoints = dict(zip(("best_checkpoint", "checkpoint"), steps, strict=True))
    (tmp_path / "result.json").write_text(json.dumps(RESULT | checkpoints))
    (tmp_path / "recipe.json").write_text(json.dumps({"unit": "images"}))
    lines = [
        {"step": step, "epoch": step, "val/loss": 1.0, "val/accuracy": a, "val/raw_accuracy": a - 0.1}
        for step, a in ((10, 0.5), (20, 0.9), (30, 0.8))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    print_result(tmp_path, 2 / 3)
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "│ 95 % confidence interval of the best accuracy │ 0.8647 to 0.9269 │" in rows
    assert "│ chance level (share of the largest class) │ 0.6667 │" in rows
    use_this = "use this: averaged weights (EMA), best accuracy on the val split"
    assert weights(tmp_path, capsys) == [
        f"step_00000020/ema.safetensors 0.9000 {use_this}",
        "step_00000020/model.safetensors 0.8000 raw weights (without EMA) of the same step",
        "step_00000030/ema.safetensors 0.8000 averaged weights (EMA), the last step",
        "step_00000030/model.safetensors 0.7000 raw weights (without EMA) of the same step",
    ]
    text = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(text.replace("0.8}", "0.95}", 1))
    assert weights(tmp_path, capsys, tmp_path / "checkpoints/step_00000020/model.safetensors")[:2] == [
        f"step_00000020/ema.safetensors 0.9000 {use_this.removeprefix('use this: ')}",
        "step_00000020/model.safetensors 0.9500 use this: raw weights (without EMA) of the same step",
    ]
    (tmp_path / "metrics.jsonl").write_text(text)
    shutil.rmtree(tmp_path / "checkpoints" / "step_00000020")
    assert weights(tmp_path, capsys)[0].startswith("step_00000030/ema.safetensors 0.8000 use this: ")


def weights(folder: Path, capsys, best: Path | None = None) -> list[str]:
    """Return each row of the last table as one line, and check the commands below the table."""
    print_result(folder, None)
    output = capsys.readouterr().out
    below_title = output.partition("weight files")[2]
    assert all(len(line) <= 80 for line in below_title.split("\u2518")[0].splitlines())
    assert f"validate.py {best or folder}\n" in output
    assert f"export.py {best or folder} models/{folder.name}\n" in output
    assert f"validate.py {folder} --which latest\n" in output
    rows = []
    for line in below_title.splitlines():
        cells = [cell.strip() for cell in line.split("\u2502")[1:-1]]
        if cells and cells[0]:
            rows.append(" ".join(cells))
        elif cells:
            rows[-1] += f" {cells[2]}"
    return rows
