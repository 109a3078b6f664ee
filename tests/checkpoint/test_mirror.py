"""Tests of checkpoints in S3, with a real server and injected faults.

A fault proxy sits between the server and its client, which is either a Mirror with a stored run or a whole
training run. A training run takes less time than an upload and waits only for the upload of the newest
checkpoint. Tests can therefore predict the bucket's final content, but not its intermediate content.
"""

import itertools
import json
import os
import shutil
import signal
import time
from dataclasses import fields
from pathlib import Path

import psutil
import pytest

from onecurve.checkpoint.format import MANIFEST_FILE, step_name, steps_in, verify_checkpoint
from onecurve.checkpoint.mirror import Mirror, committed_steps, download_logs, fetch_newest
from onecurve.run.folder import RunFolder
from onecurve.run.lease import Lease, PrefixRecord
from onecurve.system.files import read_json
from onecurve.system.output import log
from onecurve.system.s3 import ObjectStore, StoreError
from tests.checkpoint.test_checkpoints import HELLO, LONG, damage, start_and_wait, straight  # noqa: F401
from tests.checkpoint.test_stored import STORED
from tests.conftest import Job, latest, lines, metrics, mutate, result, run, torchrun, wait_until
from tests.support.compare import assert_same_end, assert_same_tensors
from tests.support.s3 import BUCKET, SECRET, aws_env, s3, s3_proxy  # noqa: F401 (fixtures)
from train_cnn_a import CnnA


class Bucket:
    """A test's prefix in the bucket. Training runs use the proxy to access the prefix, but tests do not."""

    def __init__(self, name: str, server: str, proxy, monkeypatch):
        self.url, self.proxy = f"s3://{BUCKET}/{name}", proxy
        for key, value in aws_env(server).items():
            monkeypatch.setenv(key, value)
        self.env = aws_env(proxy.endpoint)
        self.store = ObjectStore(self.url)

    def steps(self) -> list[int]:
        """Return the steps of the committed checkpoints."""
        keys = self.store.list("checkpoints/")
        return sorted(int(key.split("/")[1][5:]) for key in keys if key.endswith(MANIFEST_FILE))

    def words(self, folder: Path, *flags) -> list:
        return [*HELLO, "--s3", self.url, "--output_dir", folder, *flags]

    def start(self, folder: Path, *flags) -> Job:
        return Job(self.words(folder, *flags), env=self.env)

    def run(self, folder: Path, *flags) -> str:
        return run(self.words(folder, *flags), env=self.env)


@pytest.fixture
def bucket(s3, s3_proxy, monkeypatch, request):  # noqa: F811
    name = f"{request.node.name.replace('[', '-').replace(']', '').replace(' ', '-')}-{time.time_ns()}"
    return Bucket(name, s3, s3_proxy, monkeypatch)


@pytest.fixture
def mirror(bucket, tmp_path, monkeypatch):
    """Return the Mirror, behind the proxy, of a stored run with checkpoints from steps 14, 16 and 20.

    The Mirror's `messages` attribute contains all printed messages.
    """
    shutil.copytree(STORED / "format_1", tmp_path / "run")
    for key, value in bucket.env.items():
        monkeypatch.setenv(key, value)
    mirror, messages = Mirror(ObjectStore(bucket.url), tmp_path / "run"), list[str]()
    for level in ("info", "warning"):
        monkeypatch.setattr(log, level, messages.append)
    mirror.messages = messages
    return mirror


def send(mirror: Mirror, step: int, best: int | None = 14) -> None:
    mirror.offer(step, best)
    assert mirror.wait(60)


def test_the_best_checkpoint_stays_on_disk_until_it_is_uploaded(bucket, mirror):
    """Check that the best checkpoint is kept during its upload, even if a later checkpoint is better."""
    needed = []
    bucket.proxy.on(
        "PUT", ".*/step_00000014/manifest.json", lambda: needed.append(mirror.steps_needed_on_disk())
    )
    send(mirror, 16, best=14)
    assert needed == [{14, 16}]


def fetched(mirror: Mirror, parent: Path, lost=lambda: None, newest: int = -1) -> int | None:
    """Return the step of the checkpoint that another machine would download, or None.

    `newest` is the step of that machine's newest checkpoint.
    """
    return fetch_newest(mirror.store, parent, newest, lambda: None, lost)


@pytest.fixture
def impatient(project_copy):
    """Copy the project and shorten its timeouts for unresponsive stores."""
    mutate(project_copy, "onecurve/system/s3.py", "READ_TIMEOUT_S = 15", "READ_TIMEOUT_S = 3")
    mutate(project_copy, "onecurve/system/files.py", "MAX_ATTEMPTS = 4", "MAX_ATTEMPTS = 2")
    return project_copy


def test_a_fresh_machine_resumes_from_the_bucket(bucket, straight, tmp_path):  # noqa: F811
    bucket.run(tmp_path / "first", "--max_steps", "14")
    assert bucket.steps()[-1] == 14
    assert set(bucket.steps()) <= set(steps_in(tmp_path / "first" / "checkpoints"))
    index = json.loads(bucket.store.read("checkpoints/index.json"))
    assert index == {"latest": "step_00000014", "best": index["best"]}
    assert json.loads(bucket.store.read("result.json"))["uploaded"] is True
    run([*HELLO, "--lr", "0.1", "--max_steps", "16", "--output_dir", tmp_path / "further"])
    for name in ("other", "further"):
        status, output = bucket.start(tmp_path / name, "--lr", "0.1").wait()
        assert status == 1
        assert "belongs to a different recipe (--lr was 0.01, now 0.1)" in output
    assert not (tmp_path / "other" / "checkpoints").exists(), "a checkpoint of another run was downloaded"
    assert bucket.steps()[-1] == 14
    output = bucket.run(tmp_path / "second")
    assert "downloading the checkpoint of step 14" in output
    assert "continuing at step 14" in output
    log = metrics(tmp_path / "second")  # These log lines were downloaded from the bucket
    assert [line["step"] for line in log if "train/loss" in line] == [*range(1, 25)]
    (telemetry,) = (tmp_path / "second").glob("telemetry-*.jsonl")
    assert sum("host" in line for line in lines(telemetry)) == 2, "the first machine's telemetry is lost"
    assert bucket.store.read(telemetry.name) == telemetry.read_bytes()
    starts = lines(tmp_path / "second" / "starts.jsonl")
    assert [start["step"] for start in starts] == [0, 14], "the first start comes from the bucket"
    assert bucket.store.read("starts.jsonl") == (tmp_path / "second" / "starts.jsonl").read_bytes()
    assert_same_tensors(tmp_path / "second", straight[0])
    best = int(result(tmp_path / "second")["best_checkpoint"][-8:])
    assert {best, 24} <= set(bucket.steps())
    assert len(bucket.steps()) <= 3
    status, output = bucket.start(tmp_path / "third").wait()
    assert status == 1
    assert "already contains a run, which is finished" in output


def test_an_older_log_is_replaced_by_another_machines_log(bucket, tmp_path):
    for name in ("metrics.jsonl", "telemetry-a.jsonl", "telemetry-b.jsonl", "telemetry-c/d.jsonl"):
        bucket.store.write(name, b"1\n2\n")
    (tmp_path / "metrics.jsonl").write_bytes(b"1\n")
    (tmp_path / "telemetry-a.jsonl").write_bytes(b"1\n2\n3\n")
    download_logs(bucket.store, tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {
        "metrics.jsonl": b"1\n2\n",
        "telemetry-a.jsonl": b"1\n2\n3\n",
        "telemetry-b.jsonl": b"1\n2\n",
    }


def kill(job: Job) -> bool:
    """Kill the job, which aborts its current request, and return True after the process has ended."""
    job.kill()
    job.process.wait()
    return True


def test_killed_between_data_and_manifest(bucket, straight, tmp_path):  # noqa: F811
    folder = tmp_path / "run"
    bucket.run(folder, "--max_steps", "8")
    bucket.proxy.on("PUT", ".*/step_000000(12|16|20|24)/manifest.json", lambda: kill(job))
    job = bucket.start(folder)
    assert job.wait()[0] == -signal.SIGKILL
    new = [key for key in bucket.store.list("checkpoints/step_") if key.split("/")[1] > "step_00000008"]
    assert len(new) == 3, "the data was not uploaded"
    assert bucket.steps()[-1] == 8, "a checkpoint without a manifest counts"
    assert verify_checkpoint(folder / "checkpoints" / new[0].split("/")[1])
    # Another machine can see only step 8, and the run's lock belongs to a dead process on this machine.
    output = bucket.run(tmp_path / "elsewhere", "--max_steps", "9")
    assert "continuing at step 8" in output
    assert "has ended" in output
    # The folder contains later checkpoints, which have now been uploaded.
    assert "continuing at step" in bucket.run(folder)
    assert bucket.steps()[-1] == 24
    assert_same_end(folder, straight[0])


def test_another_machine_finishes_a_run_that_was_stopped_in_its_last_upload(bucket, tmp_path):
    flags, file = ("--max_steps", "4"), tmp_path / "run" / "result.json"

    def terminate() -> bool:
        wait_until(file.exists)  # The run closes the log before it writes result.json
        job.process.send_signal(signal.SIGTERM)
        wait_until(lambda: result(tmp_path / "run")["status"] == "preempted")
        return False

    bucket.proxy.on("PUT", ".*/step_00000004/manifest.json", terminate)
    job = bucket.start(tmp_path / "run", *flags)
    status, output = job.wait()
    assert status == 75, output
    assert result(tmp_path / "run")["status"] == "preempted"
    bucket.run(tmp_path / "run", *flags)
    finished = bucket.store.read("result.json")
    bucket.store.write("result.json", finished.replace(b'"finished"', b'"preempted"'))
    assert "continuing at step 4" in bucket.run(tmp_path / "second", *flags)
    assert result(tmp_path / "second")["uploaded"] is True
    status, output = bucket.start(tmp_path / "third", *flags).wait()
    assert (status, "already contains a run, which is finished" in output) == (1, True)


@pytest.mark.full
def test_a_black_hole_does_not_stop_training(bucket, impatient, straight, tmp_path):  # noqa: F811
    """Start a black hole at the second upload, which must be repeated when the same command runs again."""
    folder = tmp_path / "run"
    bucket.run(folder, "--max_steps", "4")
    bucket.proxy.on("PUT", ".*/step_.*", lambda: bucket.proxy.black_hole(times=None))
    output = run(bucket.words(folder), env=bucket.env, cwd=impatient)
    assert bucket.proxy.faults["black_hole"] >= 2
    assert "could not be uploaded to s3://" in output
    assert "The checkpoint is safe on the local disk" in output
    assert_same_end(folder, straight[0])
    assert result(folder)["status"] == "finished"
    assert result(folder)["uploaded"] is False
    assert bucket.steps() == [4]
    bucket.proxy.clear()
    assert "continuing at step 24" in bucket.run(folder)
    assert bucket.steps()[-1] == 24
    assert result(folder)["uploaded"] is True


def test_credentials_that_expire_during_the_run(bucket, mirror):
    send(mirror, 14)
    bucket.proxy.on("PUT", ".*/step_.*", bucket.proxy.expire_credentials)
    send(mirror, 20)
    [message] = mirror.messages
    assert "the checkpoint of step 20 could not be uploaded to s3://" in message
    assert "the credentials have expired. Renew the credentials" in message
    assert SECRET not in message
    bucket.proxy.clear()
    assert bucket.steps() == [14]
    send(mirror, 20)
    assert not mirror.last_upload_failed
    assert bucket.steps() == [14, 20]


def test_the_store_is_probed_before_training(bucket, tmp_path):
    bucket.proxy.expire_credentials()
    status, output = bucket.start(tmp_path / "run").wait()
    assert (status, output.count("error: ")) == (1, 1), output
    assert "the credentials have expired" in output
    assert "Traceback" not in output
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_store_without_conditional_writes(bucket, mirror):
    bucket.proxy.refuse_conditional_writes()
    bucket.proxy.refuse_checksums()
    bucket.proxy.refuse_bulk_delete()
    for step in (14, 16, 20):
        send(mirror, step, best=None)
    [message] = mirror.messages
    assert "can overwrite each other" in message
    assert bucket.steps() == [16, 20]


def test_a_prefix_has_one_owner(bucket, tmp_path):
    long = ["--data_size", "6400", "--epochs", "3000", "--log_every", "50"]
    job = start_and_wait([*HELLO, *long, "--s3", bucket.url], tmp_path / "run", env=bucket.env)
    status, output = bucket.start(tmp_path / "other", *long).wait()
    assert status == 1
    assert f"{bucket.url} is in use by process {job.process.pid} on host" in output
    job.process.send_signal(signal.SIGTERM)
    status, output = job.wait()
    assert status == 75, output
    assert "owner.json" not in bucket.store.list()


# Request before which the upload pauses, and number of identical requests to skip, for each pause
PAUSES = {
    "before index.json": ("PUT", "step_00000016/manifest", 0),
    "before a removal": ("PUT", "/result.json", 0),
    "in a removal": ("GET", "list-type=2.*checkpoints%2Fstep_", 1),
}


@pytest.mark.parametrize("pause", PAUSES)
def test_a_paused_owner_does_not_remove_its_successors_files(pause, bucket, mirror, tmp_path):
    """Pause a run's owner while it uploads step 16 and a successor trains from step 14 to step 20."""
    owner = Lease(PrefixRecord(mirror.store), lambda: None)
    mirror.takeover_error = owner.check_owner
    send(mirror, 14)
    (tmp_path / "run" / "result.json").write_text("{}")
    successor = Mirror(bucket.store, tmp_path / "run")
    method, path, before = PAUSES[pause]
    requests = itertools.count()

    def succeed() -> None:
        if next(requests) == before:
            record = owner.record | {"id": "theirs", "host": "far"}
            bucket.store.write("owner.json", json.dumps(record).encode())
            send(successor, 20, best=20)

    bucket.proxy.on(method, path, succeed, times=None)
    send(mirror, 16)
    assert next(requests) > before
    assert 20 in bucket.steps()
    index = json.loads(bucket.store.read("checkpoints/index.json"))
    assert index == {"latest": "step_00000020", "best": "step_00000020"}
    assert len(mirror.messages) == 1, mirror.messages
    assert "was taken over by process" in mirror.messages[0]
    with pytest.raises(StoreError, match=r"was taken over by process \d+ on host far"):
        mirror.send_last_files({})
    owner.release()
    assert json.loads(bucket.store.read("owner.json"))["id"] == "theirs"


@pytest.mark.full
def test_a_suspended_run_leaves_its_successors_files(bucket, stoppable, tmp_path):
    """Write a successor's record, checkpoints and index.json while the first run's process is suspended."""
    words = [*LONG, "--epochs", "3000", "--keep_every", "100000", "--s3", bucket.url]
    env = bucket.env | {"STEP_S": "0.1"}  # The run writes a checkpoint every 5 s
    job = start_and_wait(words, tmp_path / "run", env=env, cwd=stoppable)
    # From here on, the run sends no request that the test checks.
    wait_until(lambda: "metrics.jsonl" in bucket.store.list())
    job.process.send_signal(signal.SIGSTOP)
    folder, steps = tmp_path / "run" / "checkpoints", [50_000, 60_000, 70_000]
    record = json.loads((tmp_path / "run" / "owner.json").read_text()) | {"id": "theirs", "host": "far"}
    index = {"latest": step_name(70_000), "best": step_name(50_000)}
    for step in steps:
        shutil.copytree(latest(tmp_path / "run"), folder / step_name(step))
        bucket.store.write(f"checkpoints/{step_name(step)}/{MANIFEST_FILE}", b"theirs")
    for name, content in (("owner.json", record), ("checkpoints/index.json", index)):
        (tmp_path / "run" / name).write_text(json.dumps(content))
        bucket.store.write(name, json.dumps(content).encode())
    job.process.send_signal(signal.SIGCONT)
    status, output = job.wait(120)
    assert status == 1, output
    assert "was taken over by process" in output
    assert "on host far" in output
    assert set(steps) <= set(steps_in(folder))
    assert set(steps) <= set(bucket.steps())
    assert json.loads((folder / "index.json").read_text()) == index
    assert json.loads(bucket.store.read("checkpoints/index.json")) == index


@pytest.mark.parametrize("form", ["truncated", "one bit flipped", "deleted"])
def test_damage_in_the_bucket_is_detected(form, bucket, mirror, tmp_path):
    send(mirror, 16)
    send(mirror, 20)
    name = "checkpoints/step_00000020/optimizer.safetensors"
    damage(tmp_path / "run" / name, form)
    bucket.store.delete([name])
    if form != "deleted":
        bucket.store.write(name, (tmp_path / "run" / name).read_bytes())
    for name, lost in (("theirs", None), ("taken over", lambda: "by another run")):
        mirror.messages.clear()
        assert fetched(mirror, tmp_path / name, lost) == 16
        assert bucket.steps() == [14, 16, 20], "a checkpoint of another owner was removed"
    assert fetched(mirror, tmp_path / "fresh") == 16
    assert sum("checkpoint of step 20 is damaged" in message for message in mirror.messages) == 2
    assert [path.name for path in (tmp_path / "fresh").iterdir()] == ["step_00000016"]
    assert bucket.steps() == [14, 16], "the damaged checkpoint still counts"
    mirror.messages.clear()
    assert fetched(mirror, tmp_path / "again") == 16
    assert "is damaged" not in "".join(mirror.messages)
    bucket.store.write("checkpoints/step_00000016/state.json", b"")
    assert fetched(mirror, tmp_path / "old", newest=14) is None
    assert bucket.steps() == [14], "a run that resumes at step 14 could not write step 16"


def test_the_target_of_a_link_is_not_uploaded(mirror, tmp_path):
    """Mirror a run folder with symbolic links. A run folder may come from an untrusted user."""
    (tmp_path / "id_rsa").write_text("SECRET")
    names = ["nvidia-smi-h.txt", "telemetry-h.jsonl", "confusion.json", "checkpoints/step_00000020/more"]
    for name in names:
        (mirror.folder / name).unlink(missing_ok=True)
        (mirror.folder / name).symlink_to(tmp_path / "id_rsa")
    os.mkfifo(mirror.folder / "nvidia-smi-pipe.txt")
    send(mirror, 20)
    mirror.send_last_files({})
    assert not mirror.messages
    sent = mirror.store.list("")
    assert "checkpoints/step_00000020/manifest.json" in sent
    assert not [key for key in sent if b"SECRET" in (mirror.store.read(key, 2**31) or b"")]


def test_foreign_objects_stay_in_the_bucket(bucket, mirror):
    foreign_keys = {"checkpoints/step_00000004_backup/model.safetensors", "notes.txt"}
    foreign_keys |= {f"checkpoints/step_{name}/manifest.json" for name in ("000000000004", "9" * 400)}
    for key in foreign_keys:
        bucket.store.write(key, b"mine")
    for step in (14, 16, 20):
        send(mirror, step, best=None)
    assert committed_steps(bucket.store) == {16, 20}
    assert foreign_keys <= set(bucket.store.list())


@pytest.mark.full
def test_an_intact_copy_in_the_bucket_replaces_a_damaged_checkpoint(bucket, tmp_path):
    bucket.run(tmp_path / "run", "--max_steps", "12")
    for folder in (tmp_path / "run" / "checkpoints").glob("step_*"):
        (folder / "model.safetensors").write_bytes(b"")
    output = bucket.run(tmp_path / "run", "--max_steps", "13")
    assert "is damaged" in output
    assert "downloading the checkpoint of step 12" in output
    assert "continuing at step 12" in output
    words = [*HELLO, "--output_dir", tmp_path / "new", "--resume"]
    assert "continuing at step 13" in run([*words, bucket.url], env=bucket.env)
    assert bucket.steps()[-1] == 13
    index = json.loads((tmp_path / "new" / "checkpoints" / "index.json").read_text())
    assert (tmp_path / "new" / "checkpoints" / index["best"]).is_dir(), "the best checkpoint is missing"
    words = [*HELLO, "--output_dir", tmp_path / "other", "--resume", f"{bucket.url}/nothing"]
    status, output = Job(words, env=bucket.env).wait()
    assert status == 1
    assert "contains no checkpoint" in output


def test_a_run_killed_after_starting_from_anothers_checkpoint_is_still_new(bucket, mirror, tmp_path):
    send(mirror, 14)
    stored_recipe = read_json(tmp_path / "run" / "recipe.json")["recipe"]
    flags = {"resume": bucket.url, "output_dir": str(tmp_path / "new")}
    recipe = CnnA(**{f.name: stored_recipe[f.name] for f in fields(CnnA) if f.name in stored_recipe} | flags)
    for _ in range(2):
        run_folder = RunFolder(recipe, "new", 24, lambda: None)
        assert (run_folder.starts_from_other_run, run_folder.checkpoint.step) == (True, 14)
        # A run writes recipe.json before its first step.
        shutil.copy(tmp_path / "run" / "recipe.json", run_folder.path)
        run_folder.release()


@pytest.mark.full
def test_a_run_started_from_anothers_checkpoint_moves_to_another_machine(bucket, tmp_path):
    bucket.run(tmp_path / "other", "--max_steps", "4")
    words = [*HELLO, "--resume", bucket.url, "--s3", f"{bucket.url}/own", "--output_dir"]
    run([*words, tmp_path / "first", "--max_steps", "8"], env=bucket.env)
    for steps in ("12", "16"):
        output = run([*words, tmp_path / "second", "--max_steps", steps], env=bucket.env)
        assert f"continuing at step {int(steps) - 4}" in output
    assert json.loads((tmp_path / "second" / "recipe.json").read_text())["resumed_from"] == bucket.url


def test_no_secret_is_written_anywhere(bucket, tmp_path):
    """Search the output, files, checkpoints, S3 objects, tracker files and process list for secrets."""
    canary = "canary-of-another-service"
    env = bucket.env | {"WANDB_API_KEY": canary * 2, "HF_TOKEN": canary, "WANDB_MODE": "offline"}
    flags = ["--trackers", "tensorboard,wandb", "--epochs", "15", "--checkpoint_every", "10"]
    job = Job([*torchrun(2), *bucket.words(tmp_path / "run", *flags)], env=env)
    sightings = 0
    while job.process.poll() is None:
        for process in psutil.process_iter():
            try:
                line = " ".join(process.cmdline())
            except psutil.Error:
                continue
            sightings += "train_hello.py" in line
            assert SECRET not in line
            assert canary not in line
        time.sleep(0.2)
    status, output = job.wait()
    assert status == 0, output
    assert sightings > 3
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert any("wandb" in str(path) for path in files)
    contents = [output.encode(), *(path.read_bytes() for path in files)]
    contents += [bucket.store.read(key, max_bytes=2**24) for key in bucket.store.list()]
    assert len(contents) > 20
    assert not [c for c in contents if SECRET.encode() in c or canary.encode() in c]
