"""Tests that checkpoints survive kills, full disks and damage, and that runs resume from intact ones."""

import json
import os
import re
import shutil
import signal
import struct
import subprocess
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from onecurve.checkpoint import format as checkpoints
from onecurve.checkpoint.format import FORMAT_VERSION, MANIFEST_FILE, newest, steps_in, verify_checkpoint
from onecurve.system.files import sync
from onecurve.system.processes import is_alive
from tests.conftest import (
    STRATEGIES,
    Job,
    full,
    latest,
    lines,
    metrics,
    mutate,
    result,
    run,
    small_disk,
    tensors,
    torchrun,
    wait_until,
)
from tests.distributed.test_agreement import ranks_of
from tests.support.compare import assert_same_end, assert_same_tensors
from tests.support.faults import at_file_operation, called_first, mark, operations, without_folders

# Flags for 6 epochs of 4 steps, with a checkpoint after each epoch. The run removes old checkpoints from the
# third epoch onward.
HELLO = ["train_hello.py", "--data_size", "256", "--batch_size", "64", "--epochs", "6", "--log_every", "1"]
HELLO += ["--trackers", "none", "--mixed_precision", "no", "--checkpoint_s", "0"]
LAST = "step_00000024"


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Return an uninterrupted run's folder and its list of file operations on checkpoints."""
    tmp_path = tmp_path_factory.mktemp("straight")
    env = at_file_operation(tmp_path, "/run/checkpoints", "list")
    run([*HELLO, "--output_dir", tmp_path / "run"], env=env)
    return tmp_path / "run", operations(tmp_path)


# --- SIGKILL


FILES = ("model.safetensors", "optimizer.safetensors", "ema.safetensors", "state.json", "manifest.json")
QUICK = {"open manifest.json", "open .index.json.tmp"}
EACH = {*QUICK, *(f"open {name}" for name in FILES if "ema" not in name)}
EACH |= {"os.rename .step_", "shutil.rmtree .step_"}


@pytest.mark.parametrize("parts", [*({part} for part in sorted(QUICK)), full(EACH)], ids=len)
def test_killed_in_a_commit(parts, straight, tmp_path):
    """Kill the run before the first checkpoint operation of each type. Tests marked `full` use every
    operation.
    """
    starts = [i for i, line in enumerate(straight[1]) if re.search(r"os.remove \.step_\d+\.tmp", line)]
    assert len(starts) == 6
    commit = range(starts[3] + 1, starts[4] + 1)  # Indices of one late commit's file operations
    firsts = [next(n for n in commit if part in straight[1][n - 1]) for part in parts]
    for number in firsts if parts <= QUICK else commit:
        folder = tmp_path / str(number)
        words = [*HELLO, "--output_dir", folder / "run"]
        folder.mkdir()
        env = at_file_operation(folder, "/run/checkpoints", number)
        status, output = Job(words, env=env).wait()
        assert status == -signal.SIGKILL, output
        assert mark(folder).exists()
        output = run(words)
        assert "continuing at step" in output
        assert "has ended" in output
        assert_same_end(folder / "run", straight[0])
        assert not list((folder / "run" / "checkpoints").glob(".*"))


# Flags for epochs of 100 steps, which leave enough time to kill the run between two checkpoints
LONG = [*HELLO, "--data_size", "6400", "--epochs", "30", "--checkpoint_every", "50", "--log_every", "10"]
# Slows down the `stoppable` scripts, so that a run with LONG does not end before the test acts
SLOW = {"STEP_S": "0.05"}


def start_and_wait(words: list, folder: Path, checkpoints: int = 1, **options) -> Job:
    """Start a run, wait until it has written this number of new checkpoints, and return its job."""
    newest_before = max(steps_in(folder / "checkpoints"), default=0)
    job = Job([*words, "--output_dir", folder], **options)
    parent = folder / "checkpoints"
    wait_until(lambda: sum(step > newest_before for step in steps_in(parent)) >= checkpoints, job, 240)
    return job


@pytest.fixture(scope="module")
def straight_on_two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("on_two") / "run"
    run([*torchrun(2), *LONG, "--max_steps", "300", "--output_dir", folder])
    return folder


@pytest.mark.parametrize("victim", ["rank", full("launcher")])
def test_a_rank_or_the_launcher_killed_in_a_step(victim, straight_on_two, stoppable, tmp_path):
    words, folder = [*torchrun(2), *LONG, "--max_steps", "300"], tmp_path / "run"
    job = start_and_wait(words, folder, cwd=stoppable, env=SLOW)
    ranks = ranks_of(job, "train_hello.py")
    if victim == "rank":
        ranks[1].send_signal(signal.SIGKILL)
        status, output = job.wait(60)
        assert status != 0
        assert "SIGKILL" in output or "-9" in output
        assert re.search(r"^error: rank 1 \(.*\) died without an error message", output, re.MULTILINE), output
        assert "Connection" not in output, "a reset connection follows from it"
        assert result(folder)["status"] == "failed"
    else:
        os.kill(job.process.pid, signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, ranks)), timeout_s=30)
        assert job.wait()[0] == -signal.SIGKILL
        assert result(folder)["status"] == "preempted"
    assert "continuing at step" in run([*words, "--output_dir", folder])
    assert_same_end(folder, straight_on_two)


@pytest.mark.full
def test_torchrun_restarts_and_the_run_continues(stoppable, tmp_path):
    words = [*torchrun(2, "--standalone", "--max_restarts=3"), *LONG, "--max_steps", "600"]
    job = start_and_wait(words, tmp_path / "run", checkpoints=2, cwd=stoppable, env=SLOW)
    victim = ranks_of(job, "train_hello.py")[1]
    victim.send_signal(signal.SIGKILL)
    status, output = job.wait()
    assert status == 0, output
    assert not is_alive(victim)
    assert output.count("continuing at step") == 1, output
    assert result(tmp_path / "run")["status"] == "finished"
    steps = [line["step"] for line in metrics(tmp_path / "run") if "train/loss" in line]
    assert steps == [*range(10, 601, 10)]


@pytest.mark.full
def test_gives_up_after_three_restarts_without_a_new_checkpoint(stoppable, tmp_path):
    """Kill the process in the same step after each restart, until the run gives up."""
    text = (stoppable / "train_hello.py").read_text()
    assert text.count("signal').raise_signal(15)") == 1
    (stoppable / "dies.py").write_text(text.replace("raise_signal(15)", "raise_signal(9)"))
    words = ["dies.py", *HELLO[1:], "--output_dir", tmp_path / "run"]
    run([*words, "--max_steps", "4"], cwd=stoppable)
    words = [*torchrun(1, "--standalone", "--max_restarts=5"), *words]
    status, output = Job(words, cwd=stoppable, env={"STOP_AT": "6"}).wait()
    assert status != 0
    assert output.count("continuing at step 4") == 1 + 3, output
    assert "restarted the job 3 times without a new checkpoint since step 4." in output
    assert verify_checkpoint(latest(tmp_path / "run")).step == 4


# --- Failures while the shards of a checkpoint are gathered

SENT = "                    self._transfer(dist.send, sent_message, MAIN_RANK)\n"
ONCE = f"""                    import os, signal, subprocess
                    if self.rank == 1 and os.path.isdir(os.environ["SAVED"]):
                        FAULT
{SENT}"""
# Code that stops the process and kills it after 9 s, because torchrun would wait 30 s for the process to end
STOP = """subprocess.Popen(["sh", "-c", f"sleep 9; kill -9 {os.getpid()}"], start_new_session=True)
                        os.kill(os.getpid(), signal.SIGSTOP)"""
FAULTS = {
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", "died without an error message"),
    "stopped": (STOP, "the job hangs: rank 1 .* is silent: a signal stopped the process"),
    "silent": (
        "time.sleep(60)",
        "error: the checkpoint of step 8 can't be gathered: rank 1 did not answer for 5 s. The checkpoint"
        " of step 4 is intact. Run the same command again to resume training",
    ),
}


@pytest.mark.parametrize(
    ("strategy", "fault"),
    [row if row == ("fsdp", "killed") else full(*row) for row in product(("fsdp", "zero2", "zero3"), FAULTS)],
)
def test_a_rank_fails_in_a_gather(strategy, fault, project_copy, tmp_path):
    """Check the error message and the resume after a rank fails in a gather.

    A silent thread simulates a broken connection, during which training continues.
    """
    code, message = FAULTS[fault]
    mutate(project_copy, "onecurve/checkpoint/gather.py", SENT, ONCE.replace("FAULT", code))
    words = [*STRATEGIES[strategy], *HELLO, "--timeout_s", "5", "--output_dir", tmp_path / "run"]
    words += ["--epochs", "100000"] if fault == "silent" else []
    env = {"SAVED": str(tmp_path / "run" / "checkpoints" / "step_00000004")}
    status, output = Job(words, cwd=project_copy, env=env).wait(60)
    assert status != 0
    assert re.search(message, output), output
    # With a stopped rank, the training step's collective also reports that it is waiting
    if fault != "stopped":
        assert output.count("error: ") == 1, output
        assert "[/" not in "".join(line for line in output.splitlines() if "error: " in line), output
    assert verify_checkpoint(latest(tmp_path / "run")).step == 4
    words += ["--max_steps", "8"]
    assert "continuing at step 4" in run(words)


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["fsdp", "zero2"])
def test_the_main_process_is_killed_in_a_commit(strategy, tmp_path):
    words = [*STRATEGIES[strategy], *HELLO, "--max_steps", "12", "--output_dir", tmp_path / "run"]
    env = at_file_operation(tmp_path, "/run/checkpoints", "os.rename .step_00000008.tmp")
    assert Job(words, env=env).wait(60)[0] != 0
    assert mark(tmp_path).exists()
    assert verify_checkpoint(latest(tmp_path / "run")).step == 4
    assert "continuing at step 4" in run(words)
    assert latest(tmp_path / "run").name == "step_00000012"


@pytest.mark.needs("root")
def test_a_run_continues_if_an_old_checkpoint_cannot_be_removed(tmp_path):
    """Mount a file system inside a checkpoint folder, so that the folder can't be emptied.

    Over NFS, a process that reads the checkpoint causes the same problem.
    """
    words = [*HELLO, "--checkpoint_every", "2", "--output_dir", tmp_path / "run", "--max_steps"]
    run([*words, "6"])
    index = json.loads((tmp_path / "run" / "checkpoints" / "index.json").read_text())
    steps = {path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*")}
    old = min(steps - {index["best"]})
    (busy := tmp_path / "run" / "checkpoints" / old / "read").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", busy], check=True)
    try:
        output = run([*words, "12"])
    finally:
        (moved,) = (tmp_path / "run" / "checkpoints").glob(f"*{old}*/read")
        subprocess.run(["umount", "--lazy", moved], check=True)
    assert f"{old} can't be removed: " in output
    assert result(tmp_path / "run")["status"] == "finished"


# --- A full disk


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk", "4m") as folder:
        yield folder


@pytest.mark.parametrize(
    ("launcher", "operation"),
    [
        (STRATEGIES["fsdp"], "open optimizer.safetensors"),
        full(STRATEGIES["zero2"], "open optimizer.safetensors"),
        full(torchrun(2), "open optimizer.safetensors"),
        full(torchrun(2), "open .index.json.tmp"),
    ],
)
def test_a_full_disk(launcher, operation, disk, tmp_path):
    """Check that a run reports only the first problem with a full disk.

    The next save starts before all ranks know about the first problem.
    """
    words = [*HELLO, "--checkpoint_every", "1", "--output_dir", disk / "run"]
    run([*words, "--max_steps", "4"])
    first = tensors(disk / "run" / "checkpoints" / "step_00000004")
    env = at_file_operation(tmp_path, "/run/checkpoints/.", operation, fill=disk)
    status, output = Job([*launcher, *words], env=env).wait()
    assert status != 0
    assert mark(tmp_path).exists()
    assert output.count("error: ") == 1, output
    assert "the checkpoint of step 5 can't be written to" in output, output
    assert "No space left on device" in output
    assert "Traceback" not in output.split("torch/distributed")[0], output
    kept = tensors(disk / "run" / "checkpoints" / "step_00000004")
    assert all(torch.equal(first[name], kept[name]) for name in first)
    (disk / "filler").unlink()
    assert "continuing at step" in run(words)
    assert latest(disk / "run").name == LAST
    verify_checkpoint(latest(disk / "run"))


@pytest.mark.full
def test_a_full_disk_in_the_log(disk, tmp_path):
    words = [*torchrun(2), *HELLO, "--epochs", "100000", "--checkpoint_every", "40"]
    words += ["--trackers", "tensorboard"]
    job = start_and_wait(words, disk / "run", checkpoints=2)
    with open(disk / "filler", "ab", buffering=0) as file:
        for size in (2**16, 2**12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    status, output = job.wait(60)
    assert status != 0
    assert output.count("error: ") == 1, output
    assert "No space left on device" in output
    checkpoint = newest(disk / "run" / "checkpoints")
    (disk / "filler").unlink()
    stop = ["--max_steps", checkpoint.step + 8]
    assert f"continuing at step {checkpoint.step}" in run([*words, *stop, "--output_dir", disk / "run"])
    steps = [line["step"] for line in lines(disk / "run" / "metrics.jsonl") if "train/loss" in line]
    assert steps == [*range(1, checkpoint.step + 9)]


# --- Damaged checkpoints


def damage(path: Path, form: str) -> None:
    content = path.read_bytes()
    if form in ("deleted", "a folder", "a pipe", "a link"):
        path.rename(path.parent.parent / "elsewhere")
        replace = {"a folder": Path.mkdir, "a pipe": os.mkfifo, "deleted": lambda _: None}
        replace.get(form, lambda path: path.symlink_to(path.parent.parent / "elsewhere"))(path)
    elif form == "one bit flipped":
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    else:
        path.write_bytes(content[: {"truncated": len(content) - 1, "emptied": 0}[form]])


DAMAGE_FORMS = ("truncated", "emptied", "one bit flipped", "deleted", "a folder", "a pipe", "a link")


@pytest.mark.parametrize("form", DAMAGE_FORMS)
@pytest.mark.parametrize("file", FILES)
def test_damage_is_detected_and_the_previous_checkpoint_is_used(file, form, straight, tmp_path, capsys):
    shutil.copytree(straight[0] / "checkpoints", tmp_path / "checkpoints")
    last = tmp_path / "checkpoints" / LAST
    # Add the EMA file that other recipes write.
    shutil.copy(last / "model.safetensors", last / "ema.safetensors")
    files = json.loads((last / MANIFEST_FILE).read_text())["files"]
    forge(last, files=files | {"ema.safetensors": files["model.safetensors"]})
    assert newest(tmp_path / "checkpoints").step == 24
    damage(last / file, form)
    assert newest(tmp_path / "checkpoints").step == 20
    messages = capsys.readouterr().err.splitlines()
    assert len(messages) == 1
    assert messages[0].startswith("warning: the checkpoint of step 24 is damaged: ")
    assert file in messages[0]
    # The damaged checkpoint was renamed and is never used again
    assert (tmp_path / "checkpoints" / f"damaged_{LAST}").is_dir()
    assert newest(tmp_path / "checkpoints").step == 20
    assert not capsys.readouterr().err


def test_all_ranks_resume_from_the_previous_checkpoint(straight, tmp_path):
    shutil.copytree(straight[0], tmp_path / "run")
    damage(latest(tmp_path / "run") / "optimizer.safetensors", "one bit flipped")
    (tmp_path / "run" / "result.json").unlink()
    output = run([*torchrun(2), *HELLO, "--output_dir", tmp_path / "run"])
    assert output.count("checkpoint of step 24 is damaged") == 1
    assert output.count("continuing at step 20") == 1
    assert_same_tensors(tmp_path / "run", straight[0], tolerance=1e-5)


def test_a_run_stops_if_all_checkpoints_are_damaged(straight, tmp_path):
    parent = shutil.copytree(straight[0] / "checkpoints", tmp_path / "checkpoints")
    for folder in parent.glob("step_*"):
        damage(folder / "state.json", "truncated")
    before = sorted(os.listdir(parent))
    with pytest.raises(ValueError, match=r"^none of the . checkpoints in .* passes verification"):
        newest(parent)
    assert sorted(os.listdir(parent)) == before


# --- Hostile checkpoints


def forge(folder: Path, **changes) -> None:
    """Write a manifest that contains these changes and passes verification."""
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    del manifest["digest"]
    for name in manifest["files"]:
        path = folder / name
        manifest["files"][name] = {"size": path.stat().st_size, "sha256": checkpoints.sha256_of(path)}
    manifest |= changes
    (folder / MANIFEST_FILE).write_text(
        json.dumps(manifest | {"digest": checkpoints._manifest_digest(manifest)})
    )


class Trap:
    """Object that runs a command when unpickled."""

    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self):
        return os.system, (f"touch {self.canary}",)


@pytest.fixture
def hostile(straight, tmp_path):
    folder = tmp_path / LAST
    shutil.copytree(latest(straight[0]), folder)
    return folder


def refusal(hostile: Path, tmp_path: Path) -> str:
    """Resume from the hostile checkpoint, check that the run fails with one error, and return its output."""
    status, output = Job([*HELLO, "--resume", hostile, "--output_dir", tmp_path / "run"]).wait()
    assert status == 1
    assert output.count("error: ") == 1, output
    return output


@pytest.mark.parametrize(
    "file", ["model.safetensors", full("optimizer.safetensors"), "state.json", full("manifest.json")]
)
def test_pickle_in_any_file_is_not_run(file, hostile, tmp_path):
    canary = tmp_path / "canary"
    torch.save({"step": Trap(canary)}, hostile / file)
    if file != "manifest.json":
        forge(hostile)
    output = refusal(hostile, tmp_path)
    assert file in output
    assert "Traceback" not in output
    assert not canary.exists()
    (hostile / file).rename(tmp_path / "trap.pt")
    # The trap works, because an unsafe load runs the command
    torch.load(tmp_path / "trap.pt", weights_only=False)
    assert canary.exists()


INVALID = [{"files": []}, {"files": {"model.safetensors": 1}}, {"files": None}, {"step": "24"}]
INVALID += [{"files": {"state.json": {"size": -1, "sha256": ""}}}]
FOREIGN_FILES = ("/etc/passwd", "../outside.safetensors", "a/b", "custom_checkpoint_0.pkl")
FORGED = [(changes, "is not a valid checkpoint manifest") for changes in INVALID]
FORGED += [({"step": 25}, "belongs to the checkpoint of step 25")]
FORGED += [
    ({"files": {name: {"size": 1, "sha256": "0"}}}, "does not list the files of a checkpoint")
    for name in FOREIGN_FILES
]
FORGED += [
    ({"format_version": version}, f"uses checkpoint format version {version}, but")
    for version in (FORMAT_VERSION + 1, 0, "1", None, True)
]


@pytest.mark.parametrize(("changes", "message"), FORGED)
def test_a_forged_manifest_is_refused(changes, message, hostile):
    forge(hostile, **changes)
    with pytest.raises(ValueError, match=message):
        verify_checkpoint(hostile)


def test_tensors_of_another_shape_are_refused_before_anything_is_loaded(hostile, tmp_path):
    save_file({"head.weight": torch.zeros(3)}, hostile / "model.safetensors")
    forge(hostile)
    assert "does not match this model" in refusal(hostile, tmp_path)
    assert not list((tmp_path / "run").glob("checkpoints/*"))


@pytest.mark.parametrize("size", [2**62, 2**31])
def test_a_giant_header_is_refused(size, hostile):
    (hostile / "model.safetensors").write_bytes(struct.pack("<Q", size) + b"{" + b" " * 1000)
    forge(hostile)
    with pytest.raises(ValueError, match="is not a valid safetensors file"):
        checkpoints.TensorFile(verify_checkpoint(hostile).folder / "model.safetensors")


# --- Retention of checkpoints


def test_links_are_not_followed_when_checkpoints_are_removed(straight, tmp_path, capsys):
    """Replace an old checkpoint with a link to a copy elsewhere. Removing the checkpoint must not remove the
    copy.
    """
    parent, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    shutil.copytree(straight[0] / "checkpoints", parent)
    shutil.copytree(straight[0] / "checkpoints", elsewhere)
    kept = sorted(elsewhere.rglob("*"))
    for name in (".step_00000004.old", ".step_00000008.tmp", "step_00000004"):
        (parent / name).symlink_to(elsewhere)
    checkpoints.remove_temporary_folders(parent)
    checkpoints.remove_checkpoint(parent / "step_00000004")
    link = f"{parent}/step_00000004"
    message = f"Removing only the symbolic link {link}. The linked folder {elsewhere} is kept."
    assert message in capsys.readouterr().out
    assert sorted(os.listdir(parent)) == sorted(os.listdir(straight[0] / "checkpoints"))
    (parent / f".{LAST}.tmp").symlink_to(elsewhere)
    (parent / f"damaged_{LAST}").symlink_to(elsewhere)
    damage(parent / LAST / "state.json", "emptied")
    assert newest(parent).step == 20
    checkpoints.write_checkpoint(parent, 24, {}, {}, {})
    assert (parent / LAST / MANIFEST_FILE).exists()
    assert sorted(elsewhere.rglob("*")) == kept


@given(st.sets(st.integers(1, 40)), st.data())
def test_the_best_the_last_two_and_every_nth_checkpoint_are_kept(saves, data):
    """Check which checkpoints are kept after each save, for any choice of best checkpoints.

    Each selection starts from the checkpoints that the previous call of `steps_to_keep` returned.
    """
    kept, best, saved = set(), None, sorted(saves)
    interval = data.draw(st.none() | st.integers(1, 9))
    for position, step in enumerate(saved):
        kept.add(step)
        best = data.draw(st.sampled_from([step, best])) if best else step
        kept = checkpoints.steps_to_keep(data.draw(st.permutations(sorted(kept))), best, interval)
        multiples = {s for s in saved[:position] if interval and s % interval == 0}
        assert kept == {*saved[max(0, position - 1) : position + 1], best} | multiples


def test_a_run_keeps_these_checkpoints(straight):
    kept = sorted(path.name for path in (straight[0] / "checkpoints").glob("step_*"))
    best = json.loads((straight[0] / "checkpoints" / "index.json").read_text())["best"]
    assert kept == sorted({best, "step_00000020", LAST})
    assert result(straight[0])["best_checkpoint"] == f"checkpoints/{best}"


def test_a_file_system_that_cannot_sync_folders(tmp_path, capfd):
    """Check that a run reports only once that its file system can't sync folders. An example is /proc."""
    sync(Path("/proc"))
    assert "this file system can't sync a folder (Invalid argument)" in capfd.readouterr().err
    words = [*LONG, "--max_steps", "100", "--output_dir", tmp_path / "run"]
    output = run(words, env=called_first(tmp_path, without_folders))
    assert output.count("this file system can't sync a folder (Operation not supported)") == 1, output
    assert latest(tmp_path / "run").name == "step_00000100"
