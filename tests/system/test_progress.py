"""Tests of progress on real terminals and as plain lines, and of the time that counts as training."""

import os
import re
from types import SimpleNamespace

import pexpect
import pytest

from onecurve.system import progress
from tests.conftest import CNN, ROOT, full, metrics, python, result, run

ESCAPES = r"\x1b\[[0-9;?]*[a-zA-Z]"
NEW_FRAME = r"\r\x1b\[2K"


def test_the_bar_on_a_terminal_of_80_and_of_120_columns(tmp_path, cache, stoppable):
    """Widen the terminal's window during the run.

    The live status line must contain a bar, the time left, and the step exactly once.
    """
    words = [*CNN, "--data", "digits", "--epochs", "4", "--log_every", "10", "--trackers", "none"]
    words = [str(word) for word in (*words, *cache, "--output_dir", tmp_path / "run")]
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    env |= {"TERM": "xterm", "CUDA_VISIBLE_DEVICES": "", "STEP_S": "0.1"}
    child = pexpect.spawn(python()[0], words, cwd=stoppable, env=env, encoding="utf-8", dimensions=(40, 80))
    child.expect("val accuracy", timeout=120)
    child.expect("val accuracy", timeout=120)
    narrow = frames(child.before)
    child.setwinsize(40, 120)
    child.expect(pexpect.EOF, timeout=120)
    child.close()
    assert child.exitstatus == 0, child.before
    later = frames(child.before)  # The first frame after the change may still have the old width
    assert narrow
    assert max(map(len, narrow)) <= 80 < max(map(len, later)) <= 120
    for frame in narrow + later:
        assert re.match(r"[\u2501\u2578\u257a]+ +step \d+/44 .*\d:\d\d left", frame), frame
    last = r"step 44/44  0:00 left  [\d,]+ images/s  loss \S+  val accuracy \S+  (MFU \S+ %  )?lr \S+$"
    assert re.search(last, later[-1]), later[-1]
    assert re.sub(ESCAPES, "", child.before).splitlines()[-1].endswith(f" add {tmp_path / 'run'}")


def frames(text: str) -> list[str]:
    """Return each redraw of the live status line since training started."""
    drawn = [re.sub(ESCAPES, "", part).split("\r")[0].split("\n")[0] for part in re.split(NEW_FRAME, text)]
    return [line.rstrip() for line in drawn if "\u2501" in line and " left" in line]


def test_without_a_terminal_a_line_appears_every_30_seconds(monkeypatch, capsys):
    now_s = 0.0
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now_s))
    run = progress.TrainingProgress(300, 0, 375_300, "images")
    for now_s in (1.0, 31.0, 32.0):
        run.advance(1 + int(now_s > 1))
    run.tell("evaluated 10 of 20 images")
    now_s = 62.0
    run.tell("evaluated 20 of 20 images")
    run.show(1_251, 1.0, {"train/loss": 6.9, "train/lr": 1e-3, "train/images_per_s": 12345.6})
    run.stop()
    assert capsys.readouterr().out.splitlines() == [
        "step 2/375,300",
        "evaluated 20 of 20 images",
        "epoch 1/300  step 1,251/375,300  loss 6.9000  lr 1.00e-03  12,346 images/s  5:04:14 left",
    ]


SLOW_START = """
import sys, time
from types import SimpleNamespace
import onecurve.run.session
import {script} as script

now_s = 0.0
onecurve.run.session.time = SimpleNamespace(perf_counter=lambda: now_s, monotonic=time.monotonic)
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
    """Simulate a clock that advances by 1 s at each step, and by 1,000 s when the decoders start."""
    flags += " --data digits --batch_size 100 --max_steps 12 --log_every 4 --trackers none --output_dir"
    (tmp_path / "slow_start.py").write_text(SLOW_START.format(script=script))
    words = [tmp_path / "slow_start.py", *flags.split(), tmp_path / "run", *cache]
    run(words, env={"PYTHONPATH": str(ROOT)})
    speeds = [line["train/images_per_s"] for line in metrics(tmp_path / "run") if "train/loss" in line]
    # The first measured interval starts at the first batch
    assert speeds == [pytest.approx(400 / 3), 100.0, 100.0]
    assert result(tmp_path / "run")["train_s"] == 11.0
