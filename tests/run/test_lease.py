"""Tests of run folder ownership. A second run is refused, and a new run takes over from a dead owner."""

import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from onecurve.flags.recipe import Recipe, flag, recipe_part
from onecurve.run import folder as folder_module
from onecurve.run import lease as lease_module
from onecurve.run.folder import RunFolder, candidate_folders
from onecurve.run.identity import model_prefix, script_name
from onecurve.run.lease import FolderRecord, Lease
from onecurve.system.processes import process_uptime_s
from tests.checkpoint.test_checkpoints import LONG, start_and_wait
from tests.conftest import Job, wait_until


def test_a_second_run_is_refused_and_the_first_continues(tmp_path):
    words = [*LONG, "--epochs", "3000"]
    job = start_and_wait(words, tmp_path / "run")
    status, output = Job([*words, "--output_dir", tmp_path / "run"]).wait()
    assert status == 1
    assert output.count("error: ") == 1, output
    record = json.loads((tmp_path / "run" / "owner.json").read_text())
    assert record["pid"] == job.process.pid
    assert f"process {job.process.pid} on host {record['host']} (started {record['since']})" in output
    assert job.process.poll() is None
    job.process.terminate()
    assert job.wait()[0] == 75


def take_lease(folder) -> Lease:
    return Lease(FolderRecord(folder), lambda: None)


def test_the_record_goes_with_the_owner(tmp_path, capsys):
    owner = take_lease(tmp_path)
    with pytest.raises(ValueError, match="is in use by process"):
        take_lease(tmp_path)
    owner.release()
    assert not list(tmp_path.iterdir())
    take_lease(tmp_path).release()
    assert not capsys.readouterr().out


def test_one_of_many_starts_becomes_the_owner(tmp_path):
    script = (
        "import sys, time; from pathlib import Path; from onecurve.run.lease import *\n"
        "try:\n    Lease(FolderRecord(Path(sys.argv[1])), lambda: None)\n"
        "except ValueError:\n    sys.exit(3)\n"
        "print('mine', flush=True); time.sleep(60)\n"
    )
    words = [sys.executable, "-c", script, tmp_path]
    processes = [subprocess.Popen(words, stdout=subprocess.PIPE) for _ in range(6)]
    wait_until(lambda: sum(process.poll() is None for process in processes) == 1)
    [winner] = [process for process in processes if process.poll() is None]
    assert all(process.returncode == 3 for process in processes if process is not winner)
    assert b"mine" in winner.stdout.readline()
    winner.kill()


def foreign_record(folder, **changes) -> dict:
    record_of_owner = {"id": "theirs", "beat": 0, "host": "far", "machine": "another"}
    record = lease_module._this_process() | record_of_owner | changes
    (folder / "owner.json").write_text(json.dumps(record))
    return record


@pytest.fixture
def second_round(monkeypatch):
    """Make this process a member of a job's second round, and check heartbeats more often."""
    sleep = time.sleep
    monkeypatch.setattr(lease_module, "time", SimpleNamespace(**vars(time) | {"sleep": lambda _: sleep(0.1)}))
    monkeypatch.setenv("LAUNCH_JOB", "ours")
    monkeypatch.setenv("LAUNCH_ROUND", "2")


@pytest.mark.parametrize(
    ("changes", "is_watched"),
    [({}, True), ({"round": 1}, False), ({"machine": lease_module._machine_id(), "start_ticks": 1}, False)],
    ids=["stands still", "of an earlier round", "another process with the same number"],
)
def test_a_dead_owners_record_is_taken_over(changes, is_watched, second_round, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lease_module, "MAX_SILENCE_S", 0.5)
    foreign_record(tmp_path, **changes)
    owner, lines = take_lease(tmp_path), capsys.readouterr().out.splitlines()
    assert ["up to 0.5 s" in line and "on host far" in line for line in lines[:-1]] == [True] * is_watched
    assert lines[-1].endswith("has ended")
    owner.release()


@pytest.mark.parametrize("changes", [{"round": 2}, {"round": 3}, {"round": 1, "job": "another"}])
def test_a_record_from_elsewhere_that_moves_is_respected(changes, second_round, tmp_path, monkeypatch):
    """Check that a record is taken over only if it belongs to an earlier, finished round of the same job."""
    monkeypatch.setattr(lease_module, "MAX_SILENCE_S", 30)
    text = json.dumps(foreign_record(tmp_path, **changes) | {"beat": 1})
    threading.Timer(1, lambda: (tmp_path / "owner.json").write_text(text)).start()
    with pytest.raises(ValueError, match=r"in use by process .* on host far"):
        take_lease(tmp_path)
    assert json.loads((tmp_path / "owner.json").read_text())["id"] == "theirs"


def test_an_owner_that_was_taken_over_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(lease_module, "HEARTBEAT_INTERVAL_S", 0.1)
    owner = take_lease(tmp_path)
    foreign_record(tmp_path)
    wait_until(lambda: owner.lost_message)
    assert "was taken over by process" in owner.lost_message
    owner.release()
    assert json.loads((tmp_path / "owner.json").read_text())["id"] == "theirs"


def test_a_record_that_was_removed_is_not_another_owner(tmp_path, monkeypatch):
    monkeypatch.setattr(lease_module, "HEARTBEAT_INTERVAL_S", 0.1)
    owner = take_lease(tmp_path)
    (tmp_path / "owner.json").unlink()
    wait_until(lambda: owner.lost_message)
    message = f"{tmp_path} no longer contains owner.json. A user deleted this file, or another run used"
    assert owner.lost_message == f"{message} {tmp_path}"


def test_the_age_of_a_process_does_not_change_with_the_clock(monkeypatch):
    before = process_uptime_s()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert 0 < before <= process_uptime_s() < before + 100


# --- Choice of the run folder


@dataclass(frozen=True, kw_only=True)
class Small(Recipe):
    lr: float = flag(0.1, "learning rate")


def open_folder(tmp_path, **fields):
    """Return the storage of a start with this recipe. The test's process owns the storage."""
    recipe = Small(**{"output_dir": f"{tmp_path}/*"} | fields)
    return RunFolder(recipe, "named", 10, lambda: None)


def write_run(folder, recipe: dict, steps: int = 1) -> None:
    """Write the files of a killed run that had trained `steps` steps with this recipe."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.json").write_text(json.dumps({"script": script_name(), "recipe": recipe}))
    (folder / "metrics.jsonl").write_text('{"train/loss": 1.0, "step": 1}\n' * steps)


def test_the_folder_of_a_start_that_trained_no_step_is_taken_again(tmp_path):
    parent, other = tmp_path / script_name(), recipe_part(Small(lr=0.2))
    write_run(parent / "named", other, steps=0)
    for name in ("*", f"{script_name()}/named"):
        opened = open_folder(tmp_path, output_dir=f"{tmp_path}/{name}")
        assert opened.path.name == "named"
        opened.release()
    write_run(parent / "named", other)
    opened = open_folder(tmp_path)
    assert opened.path.name == "named-2"
    opened.release()
    for name in ("named", "named-2"):
        write_run(parent / name, recipe_part(Small()))
    opened = open_folder(tmp_path)
    assert opened.path.name == "named", "the first of them"
    opened.release()


@dataclass(frozen=True, kw_only=True)
class SmallWithModel(Small):
    model: str = flag("hf-hub:timm/vit_b", "model")


def test_runs_that_1_0_named_without_the_model_are_continued(tmp_path):
    recipe = SmallWithModel(output_dir=f"{tmp_path}/*")
    name, parent = f"{model_prefix(recipe)}ddp_8", tmp_path / script_name()
    assert next(candidate_folders(recipe, name, 10)).name == "hf-hub_timm_vit_b_ddp_8"
    write_run(parent / "ddp_8", recipe_part(SmallWithModel(lr=0.2)))
    write_run(parent / "ddp_8-2", recipe_part(recipe))
    assert next(candidate_folders(recipe, name, 10)).name == "ddp_8-2"
    (parent / "ddp_8-2" / "result.json").write_text('{"status": "finished", "steps": 10}')
    assert next(candidate_folders(recipe, name, 10)).name == "hf-hub_timm_vit_b_ddp_8"


def test_a_second_recipe_gets_the_next_number_before_the_first_has_a_recipe_json(tmp_path):
    first = open_folder(tmp_path)
    with pytest.raises(ValueError, match="is in use by process"):
        open_folder(tmp_path)
    assert [path.name for path in first.path.iterdir()] == ["owner.json"]
    second, third = open_folder(tmp_path, lr=0.2), open_folder(tmp_path, resume="never")
    names = [opened.path.name for opened in (first, second, third)]
    assert names == ["named", "named-2", "named-3"]
    with pytest.raises(ValueError, match="is in use by process"):
        open_folder(tmp_path, lr=0.2, output_dir=str(first.path))
    for opened in (first, second, third):
        opened.release()


def test_resume_never_is_refused_if_the_launcher_restarts(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    with pytest.raises(ValueError, match="--resume never would start a new run each time"):
        open_folder(tmp_path, resume="never")
    open_folder(tmp_path).release()


def test_a_run_that_ends_while_another_looks_for_its_folder(tmp_path, monkeypatch):
    """Let another run start and end after the folder is checked and before the owner is recorded."""

    class Late(Lease):
        def __init__(self, record, *rest):
            if record.path.parent.name == "named":
                other_run = {"recipe": recipe_part(Small(lr=0.2))}
                write_run(record.path.parent, other_run["recipe"])
            super().__init__(record, *rest)

    monkeypatch.setattr(folder_module, "Lease", Late)
    opened = open_folder(tmp_path)
    assert opened.path.name == "named-2"
    assert not (tmp_path / script_name() / "named" / "owner.json").exists()
    opened.release()


@pytest.mark.parametrize("content", ["", '{"recipe": {', "[]"])
def test_a_recipe_json_that_can_not_be_read_is_refused(content, tmp_path):
    open_folder(tmp_path).release()
    file = tmp_path / script_name() / "named" / "recipe.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=f"{file} can't be read .*Delete the file") as error:
        open_folder(tmp_path)
    assert "\n" not in str(error.value)
    assert [path.name for path in file.parent.parent.iterdir()] == ["named"]
    file.unlink()
    opened = open_folder(tmp_path)
    assert opened.path.name == "named"
    opened.release()


FOREIGN = {  # Files of other programs that a run would replace or extend
    "metrics.jsonl": '{"loss": 1}\n',
    "result.json": '{"status": "preempted", "score": 1}',
    "confusion.json": "[]",
    "recipe.json": '{"name": "soup"}',
    "starts.jsonl": '{"at": 1}\n',
    "samples.jsonl": "{}",
    "restarts.json": '{"count": 3}',
    "owner.json": '{"name": "me"}',
    "telemetry-gpu.jsonl": "{}",
    "nvidia-smi-host.txt": "GPU",
    "plots/curves.png": "PNG",
    "checkpoints/index.json": "{}",
    "profile/table.txt": "x",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_folder_of_another_program_is_refused_before_anything_is_written(name, tmp_path):
    folder = tmp_path / "mine"
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_text(FOREIGN[name])
    before = {path: path.stat() for path in folder.rglob("*")}
    with pytest.raises(
        ValueError, match=f"--output_dir {folder} contains {name}, but no run. .*different folder"
    ):
        open_folder(tmp_path, output_dir=str(folder))
    assert {path: path.stat() for path in folder.rglob("*")} == before
    folder.rename(tmp_path / "named")
    (tmp_path / script_name()).mkdir()
    (tmp_path / "named").rename(tmp_path / script_name() / "named")
    opened = open_folder(tmp_path)
    assert opened.path.name == "named-2"
    opened.release()


LEFT = {  # Files that remain after a start with an early end, and files that no run writes
    "result.json": '{"status": "preempted"}',
    "restarts.json": '{"launcher": "h 1 2", "step": 0, "fruitless": 0}',
    "starts.jsonl": '{"recipe": {"lr": 0.1}, "step": 0}\n',
    "owner.json": "",
    "metrics.jsonl": "",
    "notes.txt": "mine",
    "checkpoints/last.ckpt": "mine",
}


@pytest.mark.parametrize("name", LEFT)
def test_a_folder_of_a_start_that_ended_early_is_used(name, tmp_path):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(LEFT[name])
    assert next(candidate_folders(Small(output_dir=str(tmp_path)), "named", 10)) == tmp_path


@pytest.mark.parametrize("content", [b"[" * 100_000, b"\xff\x00", b'{"pid": 1e999}'])
def test_a_record_with_any_content_is_one_bounded_line(content):
    assert isinstance(lease_module._parsed_record(content.decode(errors="replace")), dict)
    odd = {"host": "\x1b[31m" + "h" * 5000, "pid": [1] * 1000, "since": {"\n": 1}}
    text = lease_module._owner_in_words(lease_module._parsed_record(json.dumps(odd)))
    assert text.isprintable()
    assert len(text) < 700
