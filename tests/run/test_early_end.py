"""Tests that runs that end early write the checkpoints held in memory and report why they ended."""

import pytest

from onecurve.checkpoint.format import steps_in
from tests.conftest import HALF_THE_CORES, STRATEGIES, Job, copy_project, full, metrics, mutate, result, run
from tools.logbook import markdown as md
from tools.logbook.page import run_page
from tools.logbook.run_record import RunRecord

EPOCH, EPOCHS = 13, 6  # Steps per epoch, and number of epochs. 143 of the digits are held out.
# Accuracy after each epoch of the run. The best checkpoint stays in memory during the two worse evaluations.
ACCURACIES = (0.0, 0.1, 0.5, 0.4, 0.3, 0.9, 0.2)
BEST, END, TOTAL = 2 * EPOCH, 4 * EPOCH, EPOCHS * EPOCH
FLAGS = ["train_cnn_a.py", "--widths", "4,8,32", "--data", "digits", "--holdout", "0.1", "--epochs", EPOCHS]
FLAGS += ["--batch_size", "96", "--per_device_batch_size", "48", "--mixed_precision", "no"]
FLAGS += ["--trackers", "none", "--log_every", "4"]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Copy the project with a script whose evaluations report known accuracies.

    Before each checkpoint, the script executes the code in AT_STEP.
    """
    folder = copy_project(tmp_path_factory.mktemp("early_end") / "project")
    old, call = "run.log_evaluation(step, measure(images.val))\n", "            run.checkpoint(step)\n"
    with_known_accuracy = f"measure(images.val) | {{'accuracy': {ACCURACIES}[step // steps.per_epoch]}})\n"
    mutate(folder, FLAGS[0], old, f"run.log_evaluation(step, {with_known_accuracy}")
    env = "__import__('os').environ"
    before = f"            exec({env}.get('AT_STEP', ''))\n"
    after = [
        f"            if str(step) == {env}.get('{word.upper()}_AT'):\n                {word}\n"
        for word in ("break", "return")
    ]
    mutate(folder, FLAGS[0], call, before + call + "".join(after))
    return folder


@pytest.fixture(scope="module")
def whole(project, tmp_path_factory, cache):
    """Return the folder of a run that trains all steps."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run([*FLAGS, *cache, "--output_dir", folder], cwd=project, env=HALF_THE_CORES)
    return folder


def assert_ended(folder, whole, end: int, by: str, output: str) -> None:
    """Check that the run followed the schedule of all steps, and that outputs show the best weights and the
    reason.
    """
    facts, sentence = result(folder), f"ended at step {end} of {TOTAL} because of {by}"
    expected = {"status": "finished", "steps": end, "total_steps": TOTAL, "stopped_by": by, "best_step": BEST}
    assert expected.items() <= facts.items()
    assert {BEST, end} <= set(steps_in(folder / "checkpoints"))
    assert (folder / facts["best_checkpoint"] / "manifest.json").exists()
    assert "test_accuracy" in facts, "of the best weights"
    assert output.count(f"{sentence}\n") == 1, "a line of the log"
    assert f"ended early by {by} " in output, "the table"
    assert md.text(sentence) in run_page(RunRecord(folder), "run", [])
    losses, whole_losses = ({x["step"]: x for x in metrics(f) if "train/loss" in x} for f in (folder, whole))
    assert len(losses.keys() & whole_losses.keys()) > end // 8
    for step in losses.keys() & whole_losses.keys():
        assert losses[step]["train/lr"] == whole_losses[step]["train/lr"]
        # Rounding errors differ between strategies and grow during training
        bound = 1e-5 if step <= 20 else 1e-3
        assert losses[step]["train/loss"] == pytest.approx(whole_losses[step]["train/loss"], abs=bound)


ENDS = {  # Flags, environment, last step and displayed reason of each early end
    "patience": (["--patience", "2"], {}, END, "--patience 2"),
    "stop": ([], {"AT_STEP": f"if step == {END}: run.stop()"}, END, "the script"),
    "stop inside an epoch": ([], {"AT_STEP": f"if step == {END + 4}: run.stop()"}, END + 5, "the script"),
    "break": ([], {"BREAK_AT": str(END)}, END, "the script"),
    "break inside an epoch": ([], {"BREAK_AT": str(END + 5)}, END + 5, "the script"),
    "max_steps": (["--max_steps", END + 5], {}, END + 5, f"--max_steps {END + 5}"),
}
FULL = ("stop", "stop inside an epoch", "break")


@pytest.mark.parametrize("end", [full(end) if end in FULL else end for end in ENDS if end != "patience"])
def test_every_early_end_writes_pending_checkpoints_and_its_reason(end, project, whole, tmp_path, cache):
    flags, env, step, by = ENDS[end]
    words = [*FLAGS, *flags, *cache, "--output_dir", tmp_path / "run"]
    assert_ended(tmp_path / "run", whole, step, by, run(words, cwd=project, env=HALF_THE_CORES | env))


@pytest.mark.parametrize("strategy", ["fsdp", *map(full, ("ddp", "zero1", "zero2", "zero3"))])
@pytest.mark.parametrize("end", ["patience", full("stop inside an epoch"), full("break inside an epoch")])
def test_under_every_strategy_and_after_a_resume(strategy, end, project, whole, tmp_path, cache):
    """Interrupt the run after one evaluation without improvement, then resume until the early end."""
    flags, env, step, by = ENDS[end]
    words = [*STRATEGIES[strategy], *FLAGS, *flags, *cache, "--output_dir", tmp_path / "run"]
    kill = f"if step == {3 * EPOCH + 2} and rank == 0: __import__('signal').raise_signal(15)"
    status, output = Job(words, cwd=project, env={"AT_STEP": kill}).wait()
    assert (status, result(tmp_path / "run")["status"]) == (1, "preempted"), output
    output = run(words, cwd=project, env=env)
    assert "continuing at step" in output
    assert_ended(tmp_path / "run", whole, step, by, output)


def test_a_run_that_ended_stays_ended(project, whole, tmp_path, cache):
    """Restart a run that ended early and whose result.json was deleted.

    The command must end at the same step, or continue if --patience is larger.
    """
    folder = tmp_path / "run"
    words = [*FLAGS, *cache, "--output_dir", folder, "--patience"]
    output = run([*words, "2"], cwd=project, env=HALF_THE_CORES)
    assert_ended(folder, whole, END, "--patience 2", output)
    status, output = Job([*words, "2"], cwd=project).wait()
    assert (status, "which is finished" in output) == (1, True), output
    (folder / "result.json").unlink()
    assert_ended(folder, whole, END, "--patience 2", run([*words, "2"], cwd=project))
    (folder / "result.json").unlink()
    run([*words, "3"], cwd=project)
    facts = result(folder)
    assert (facts["steps"], facts["best_step"], facts["stopped_by"]) == (TOTAL, 5 * EPOCH, None)


FAILURES = {  # Launcher and environment of each failure
    "an error": (STRATEGIES["single"], {"AT_STEP": f"if step == {END}: raise RuntimeError('no more')"}),
    "without run.finish": (STRATEGIES["single"], {"RETURN_AT": str(END)}),
    "before an evaluation": (STRATEGIES["single"], {"BREAK_AT": str(EPOCH - 4)}),
    "of another rank": (STRATEGIES["ddp"], {"AT_STEP": f"assert step < {END} or rank == 0, 'no more'"}),
}


@pytest.mark.parametrize("failure", [full(name) if name == "of another rank" else name for name in FAILURES])
def test_a_failure_writes_pending_checkpoints(failure, project, tmp_path, cache):
    launcher, env = FAILURES[failure]
    words = [*launcher, *FLAGS, *cache, "--output_dir", tmp_path / "run"]
    status, output = Job(words, cwd=project, env=env).wait()
    assert (status, result(tmp_path / "run")["status"]) == (1, "failed"), output
    expected_step = EPOCH - 4 if failure == "before an evaluation" else BEST
    assert expected_step in steps_in(tmp_path / "run" / "checkpoints"), output
