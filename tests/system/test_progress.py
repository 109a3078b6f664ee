"""The progress of a training: on real terminals, as plain lines, and the time that counts as training."""

import io
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pexpect
import pytest
from rich.console import Console

from common.system import progress
from tests.conftest import CNN, ROOT, full, metrics, python, result

ESCAPES = r"\x1b\[[0-9;?]*[a-zA-Z]"
NEW_FRAME = r"\r\x1b\[2K"


def test_the_bar_on_a_terminal_of_80_and_of_120_columns(tmp_path, cache, stoppable):
    """The window grows during the run. The live line has a bar, the step once, speed and time left."""
    words = [*CNN, "--data", "digits", "--epochs", "6", "--log_every", "10", "--trackers", "none"]
    words = [str(word) for word in (*words, *cache, "--output_dir", tmp_path / "run")]
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    env |= {"TERM": "xterm", "CUDA_VISIBLE_DEVICES": "", "STEP_S": "0.05"}
    child = pexpect.spawn(python()[0], words, cwd=stoppable, env=env, encoding="utf-8", dimensions=(40, 80))
    child.expect("val accuracy", timeout=120)
    child.expect("val accuracy", timeout=120)
    narrow = frames(child.before)
    child.setwinsize(40, 120)
    child.expect(pexpect.EOF, timeout=120)
    child.close()
    assert child.exitstatus == 0, child.before
    later = frames(child.before)  # the first of them may still be of the old width
    assert narrow
    assert max(map(len, narrow)) <= 80 < max(map(len, later)) <= 120
    for frame in narrow + later:
        assert len(re.findall(r"\bstep \d+/66\b", frame)) == 1, frame
        assert re.search(r"[\d,]+ images/s  \d+:\d\d left$", frame), frame
        assert re.match("[\u2501\u2578\u257a]{8}", frame), f"no bar: {frame}"
        assert "\u2026" not in frame, f"cut: {frame}"
    last = (
        r"epoch 6/6  step 66/66  loss \S+  val accuracy \S+  lr \S+  (MFU \S+ %  )?[\d,]+ images/s  0:00 left"
    )
    assert re.search(rf"  {last}$", later[-1]), later[-1]
    assert re.sub(ESCAPES, "", child.before).splitlines()[-1].endswith(f" add {tmp_path / 'run'}")


def frames(text: str) -> list[str]:
    """Each drawing of the live line after the training began."""
    drawn = [re.sub(ESCAPES, "", part).split("\r")[0].split("\n")[0] for part in re.split(NEW_FRAME, text)]
    return [line.rstrip() for line in drawn if "\u2501" in line and " left" in line]


@pytest.mark.parametrize("width", [80, 120])
def test_slow_steps_leave_the_line_whole(width, monkeypatch):
    """Steps of 100 s and an evaluation, with the longest numbers that occur."""
    now_s, terminal = 0.0, io.StringIO()
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: now_s))
    bar = progress.BarProgress(300, 0, 375_300, 1024, "images")
    bar.stop()
    console = Console(file=terminal, force_terminal=True, width=width, color_system=None)

    def drawn() -> str:
        terminal.seek(terminal.truncate(0))
        console.print(bar.line)
        (line,) = terminal.getvalue().splitlines()
        return line.rstrip()

    assert "step 0/375,300" in drawn()
    for step in (1, 2):
        now_s += 100
        bar.advance(step)
    for _ in range(3):
        assert re.search(r"step 2/375,300  .*\b10 images/s  10424:56:40 left$", drawn()), drawn()
        now_s += 0
    bar.show(123_456, 98.7, {"train/loss": 6.9078, "train/lr": 1e-3, "train/images_per_s": 123456.7})
    bar.show(123_456, 98.7, {"val/loss": 6.9, "val/accuracy": 0.1234})
    assert re.search(r"step 123,456/375,300 .* 123,457 images/s  \d+:\d\d left$", drawn())
    bar.tell("evaluated 10,240 of 50,000 images")
    assert "evaluated 10,240 of 50,000 images" in drawn()
    assert drawn().count("step ") == 1
    assert "123,457 images/s" in drawn() or width == 80


SLOW_START = """
import sys, time
from types import SimpleNamespace
import common.run.checkpoints
import {script} as script

now_s = 0.0
common.run.checkpoints.time = SimpleNamespace(perf_counter=lambda: now_s, monotonic=time.monotonic)
training_batches = script.training_batches

def slow(*args):
    global now_s
    now_s += 1000.0  # the decoders start
    for batch in training_batches(*args):
        now_s += 1.0  # a step
        yield batch

script.training_batches = slow
sys.argv = ["{script}.py", *sys.argv[1:]]
script.main()
"""


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("train_cnn_a", "--widths 4,8,32"),
        full("train_cnn_b", "--width 8"),
        full("train_vit", "--model test_vit --image_size 32 --patch_size 8"),
    ],
)
def test_the_start_of_decoders_is_not_training_time(script, flags, tmp_path, cache):
    """A step moves the clock by 1 s, the start of the decoders by 1,000 s."""
    words = [
        *flags.split(),
        "--data",
        "digits",
        "--batch_size",
        "100",
        "--max_steps",
        "12",
        "--log_every",
        "4",
    ]
    words += ["--trackers", "none", *cache, "--output_dir", tmp_path / "run"]
    code = SLOW_START.format(script=script)
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", code, *map(str, words)], cwd=ROOT, env=env, check=True, timeout=240)
    speeds = [line["train/images_per_s"] for line in metrics(tmp_path / "run") if "train/loss" in line]
    assert speeds == [pytest.approx(400 / 3), 100.0, 100.0]  # the clock starts when the first batch is there
    assert result(tmp_path / "run")["train_s"] == 11.0
