"""Tests that a run logs identical curves to metrics.jsonl, TensorBoard and W&B.

A failing tracker server must not delay training. The tests also check the run's name and result.
"""

import http.server
import json
import re
import sqlite3
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata

from export import write_curves
from onecurve.flags.recipe import Recipe
from onecurve.run.run import Run
from onecurve.telemetry.summary import HOST_MEASUREMENTS
from tests.cluster.test_engines_on_virtual_hosts import environment
from tests.conftest import CNN, Job, lines, metrics, mutate, python, result, run, torchrun, wait_until

FLAGS = ["--data", "digits", "--batch_size", "64", "--epochs", "2", "--max_steps", "30", "--log_every", "10"]
BOTH = ["--trackers", "tensorboard,wandb"]
# Names of the telemetry curves on a host without GPUs
TELEMETRY = {f"telemetry/{name}" for name in HOST_MEASUREMENTS}
KEY = {"WANDB_API_KEY": "c0ffee" * 6 + "c0ff"}
WANDB = {"WANDB_RUN_ID": "chosen1", "WANDB_NAME": "mine", "WANDB_ENTITY": "we", "WANDB_RUN_GROUP": "group"}
WANDB |= {"WANDB_TAGS": "a,b", "WANDB_NOTES": "some notes"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, cache, stoppable) -> Path:
    """Train with two processes and both trackers, and with W&B's variables but without a W&B key."""
    parent = tmp_path_factory.mktemp("shared") / "weights"
    words = [*torchrun(2), *CNN, *FLAGS, *BOTH, "--telemetry_s", "0.1", *cache]
    output = run([*words, "--model_folder", parent], cwd=stoppable, env=WANDB | {"STEP_S": "0.05"})
    assert output.count("no W&B API key is configured, so the run is logged offline") == 1
    assert not re.search("W&B did not|W&B has stopped|not receive the plots", output)
    (run_folder,) = (parent / "train_cnn_a").iterdir()
    return run_folder


def test_the_name_and_the_result_are_complete(folder):
    assert folder.name == "ddp_64_2_1_2"  # Strategy, batch size, epochs, hosts, processes per host
    facts = result(folder)
    expected = {"script": "train_cnn_a", "strategy": "ddp", "hosts": 1, "processes": 2, "batch_size": 64}
    expected |= {"per_device_batch_size": 32, "accumulation_steps": 1, "epochs": 2, "steps": 30, "seed": 0}
    expected |= {"val_images": 360, "status": "finished", "checkpoint": "checkpoints/step_00000030"}
    assert expected.items() <= facts.items()
    for number in ("best_accuracy", "final_accuracy", "train_s", "wall_s", "images_per_s", "peak_memory_gib"):
        assert facts[number] > 0, number
    assert facts["wall_s"] > facts["train_s"]
    walls = [line["wall_s"] for line in metrics(folder)]
    assert walls == sorted(walls)
    assert facts["train_s"] < walls[-1] < facts["wall_s"]
    record = json.loads((folder / "recipe.json").read_text())
    assert record["recipe"]["batch_size"] == 64
    assert {"argv", "git_commit", "versions", "hosts", "devices"} <= record.keys()
    # The two processes share one log and one sampler.
    assert [line["epoch"] for line in metrics(folder) if "val/accuracy" in line] == [1, 30 / 22]
    (file,) = folder.glob("telemetry-*")
    assert [host["samples"] for host in facts["telemetry"]] == [len(lines(file)) - 1]
    with Image.open(folder / "plots" / "curves.png") as image:
        assert image.size[0] > 800
        assert len(image.convert("RGB").getcolors(1 << 20)) > 50


def test_tensorboard_matches_metrics_jsonl(folder):
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == curves(folder).keys() | TELEMETRY
    for name, points in curves(folder).items():
        events_of_curve = [(event.step, event.value) for event in events.Scalars(name)]
        assert [step for step, _ in events_of_curve] == [step for step, _ in points]
        assert [value for _, value in events_of_curve] == pytest.approx(
            [value for _, value in points], rel=1e-6
        )
    for name in TELEMETRY:
        steps = [event.step for event in events.Scalars(name)]
        assert set(steps) <= {line["step"] for line in metrics(folder) if "train/loss" in line}
        assert len(steps) == len(set(steps))
    for name, file in pictures(folder).items():
        (event,) = events.Images(name)
        with Image.open(file) as image:
            assert (event.step, event.width, event.height) == (30, *image.size)
    # The hyperparameters are in the run folder, together with the names of the headline curves.
    content = events.PluginTagToContent("hparams")
    assert {path.parent for path in folder.rglob("events.out.tfevents*")} == {folder / "tensorboard"}
    assert all(path.is_file() for path in (folder / "tensorboard").iterdir())
    start = metadata.parse_session_start_info_plugin_data(content[metadata.SESSION_START_INFO_TAG])
    assert start.hparams["batch_size"].number_value == 64
    assert start.hparams["widths"].string_value == "(4, 8, 32)"
    assert start.hparams["strategy"].string_value == "ddp"
    experiment = metadata.parse_experiment_plugin_data(content[metadata.EXPERIMENT_TAG])
    names = [metric.name.tag for metric in experiment.metric_infos]
    assert names[0] == "val/accuracy"
    assert set(names) <= curves(folder).keys()
    end = metadata.parse_session_end_info_plugin_data(content[metadata.SESSION_END_INFO_TAG])
    assert end.status == 1  # In TensorBoard's session records, status 1 means success


def test_curves_for_the_hub_have_neither_recipe_nor_pictures(folder, tmp_path):
    write_curves(folder, tmp_path)
    written, recorded = (
        EventAccumulator(str(events_folder)).Reload() for events_folder in (tmp_path, folder / "tensorboard")
    )
    assert written.Tags() == recorded.Tags() | {"images": []}
    assert all(written.Scalars(name) == recorded.Scalars(name) for name in recorded.Tags()["scalars"])
    for events_folder, has_recipe in ((tmp_path, False), (folder / "tensorboard", True)):
        assert any(b"output_dir" in file.read_bytes() for file in events_folder.iterdir()) == has_recipe


def test_wandb_matches_metrics_jsonl(folder):
    """Check that one process logs one run, and that every curve uses the optimizer step as its x-axis."""
    (file,) = folder.glob("wandb/offline-run-*-chosen1/run-chosen1.wandb")
    records = wandb_records(file)
    history = [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    for name, points in curves(folder).items():
        assert [(row["step"], row[name]) for row in history if name in row] == points
    assert {name for row in history for name in row if name.startswith("telemetry/")} == TELEMETRY
    for name, picture in pictures(folder).items():
        assert [row["step"] for row in history if name in row] == [30]
        (sent_file,) = file.parent.glob(f"files/media/images/{name}_*.png")
        with Image.open(sent_file) as sent_image, Image.open(picture) as image:
            assert sent_image.convert("RGB").tobytes() == image.convert("RGB").tobytes()
    (started,) = (record.run for record in records if record.HasField("run"))
    labels = started.display_name, started.entity, started.run_group, list(started.tags), started.notes
    assert labels == ("mine", "we", "group", ["a", "b"], "some notes")
    axes = {r.metric.glob_name: r.metric.step_metric for r in records if r.HasField("metric")}
    assert axes["*"] == "step"
    items = [item for r in records for item in (*r.config.update, *r.run.config.update)]
    config = {item.key: json.loads(item.value_json) for item in items}
    assert (config["batch_size"], config["strategy"], config["processes"]) == (64, "ddp", 2)


def test_a_scripts_own_scalars_are_in_the_next_line(project_copy, tmp_path):
    call = "            if run.should_evaluate(step):\n"
    new_scalar = "            run.log_scalars({'train/own': step, 'train/bad': math.nan})\n"
    new_evaluation = "                run.log_scalars({'val/own': torch.tensor(step / 2)})\n"
    mutate(project_copy, "train_hello.py", call, new_scalar + call + new_evaluation)
    words = ["train_hello.py", "--data_size", "640", "--epochs", "2", "--log_every", "10"]
    run([*python(), *words, "--trackers", "none", "--output_dir", tmp_path / "run"], cwd=project_copy)
    for name, loss, values in (("train/own", "train/loss", [9, 19]), ("val/own", "val/loss", [5, 10])):
        assert [line[name] for line in metrics(tmp_path / "run") if loss in line] == values
    assert "bad" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    with pytest.raises(ValueError, match="log_scalars: the name own needs a group, for example train/own"):
        Run.log_scalars(None, {"own": 1.0})


@pytest.mark.full
def test_pictures_that_a_tracker_does_not_take(project_copy, tmp_path, cache):
    mutate(project_copy, "onecurve/run/trackers.py", "tracker.log_images(", "tracker.log_pictures(")
    words = [*python(), *CNN, *FLAGS, *BOTH, *cache, "--output_dir", tmp_path / "run"]
    output = run(words, cwd=project_copy)
    assert [output.count(f"{name} did not receive the plots") for name in ("tensorboard", "wandb")] == [1, 1]
    assert result(tmp_path / "run")["status"] == "finished"


@pytest.mark.parametrize(
    "server",
    [401, pytest.param(500, marks=pytest.mark.full), None],
    ids=["refuses the key", "fails", "is silent"],
    indirect=True,
)
def test_training_does_not_depend_on_the_wandb_server(server, folder, request, tmp_path, cache, project_copy):
    """Check that training continues if the W&B server fails.

    The client must ask the server to continue the run WANDB_RUN_ID, which recipe.json records.
    """
    url, requests = server
    mutate(project_copy, "onecurve/run/trackers.py", "WANDB_INIT_TIMEOUT_S = 10", "WANDB_INIT_TIMEOUT_S = 5")
    words = [*CNN, *FLAGS, "--trackers", "wandb", *cache, "--output_dir", tmp_path / "run"]
    output = run(words, cwd=project_copy, env=KEY | {"WANDB_BASE_URL": url, "WANDB_RUN_ID": "chosen1"})
    assert requests, "the server was never asked"
    if request.node.callspec.id == "refuses the key":
        assert b"chosen1" in next(body for body in requests if b"RunResumeStatus" in body)
    assert json.loads((tmp_path / "run" / "recipe.json").read_text())["wandb_id"] == "chosen1"
    assert output.count("W&B did not accept the run") == 1
    assert KEY["WANDB_API_KEY"] not in output
    facts = result(tmp_path / "run")
    assert facts["status"] == "finished"
    # WANDB_INIT_TIMEOUT_S limits the time spent waiting for the server, in seconds. W&B's default is 90 s.
    assert facts["wall_s"] < result(folder)["wall_s"] + 60
    assert len(list((tmp_path / "run").glob("wandb/offline-run-*/*.wandb"))) == 1


def test_wandb_that_is_disabled(tmp_path, cache):
    words = [*CNN, *FLAGS, "--trackers", "wandb", *cache, "--output_dir", tmp_path / "run"]
    output = run(words, env={"WANDB_MODE": "disabled"})
    assert re.findall(".*W&B.*", output) == ["W&B is disabled by WANDB_MODE=disabled"]
    assert result(tmp_path / "run")["status"] == "finished"


def test_a_tracker_that_is_not_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"--trackers trackio requires the package trackio\. Run `pip"):
        Run(None, Recipe(trackers=("trackio",)), None)


@pytest.mark.full
def test_trackio_matches_metrics_jsonl(tmp_path, cache):
    """Train, stop and resume with trackio, which requires an older Pillow than requirements.txt."""
    python = environment("trackio", "0.43.0")
    (site_packages,) = python.parent.parent.glob("lib/python*/site-packages")
    # Modules in this environment's site-packages take precedence.
    (site_packages / "ours.pth").write_text(f"{Path(psutil.__file__).parent.parent}\n")
    env = {"TRACKIO_DIR": str(tmp_path / "trackio")}
    words = [python, *CNN, *FLAGS, "--trackers", "trackio", *cache, "--output_dir", tmp_path / "run"]
    for steps in (15, 30):
        output = run([*words, "--max_steps", steps], env=env)
        assert re.search("to view the run run-[0-9a-f]{8}, run `trackio show --project train_cnn_a`", output)
    assert "did not receive the plots" not in output
    (file,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(file) as base:
        rows = base.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    assert len({name for name, *_ in rows}) == 1
    for name, points in curves(tmp_path / "run").items():
        logged = [(step, json.loads(text)) for _, step, text in rows]
        assert [(step, values[name]) for step, values in logged if name in values] == points


def test_the_training_outlives_the_wandb_service(tmp_path, cache):
    words = [*CNN, "--data", "digits", "--epochs", "20", "--log_every", "2", "--trackers", "wandb"]
    job = Job([*words, *cache, "--output_dir", tmp_path / "run"])
    log = tmp_path / "run" / "metrics.jsonl"
    wait_until(lambda: log.exists() and log.stat().st_size, job)
    services = [p for p in psutil.Process(job.process.pid).children() if p.name() == "wandb-core"]
    for service in services:
        service.kill()
    status, output = job.wait()
    assert services, "W&B's service was not found"
    assert status == 0, output
    assert output.count("W&B has stopped") == 1, output
    assert result(tmp_path / "run")["status"] == "finished"


@pytest.mark.full
@pytest.mark.parametrize("server", ["stops"], indirect=True)
def test_the_stop_button_of_wandb_saves_a_checkpoint(server, tmp_path, cache):
    words = [*CNN, "--data", "digits", "--epochs", "9999", "--log_every", "5", "--trackers", "wandb", *cache]
    job = Job([*words, "--output_dir", tmp_path / "run"], env=KEY | {"WANDB_BASE_URL": server[0]})
    status, output = job.wait(120)
    message = "W&B's Stop button was pressed, so the run saves a checkpoint and ends"
    assert (status, output.count(message)) == (75, 1), output
    assert "W&B did not" not in output
    facts = result(tmp_path / "run")
    assert facts["status"] == "preempted"
    assert (tmp_path / "run" / facts["checkpoint"] / "manifest.json").exists()


@pytest.fixture
def server(request) -> Iterator[tuple[str, list]]:
    """Run a server that responds with an HTTP status, does not respond (None), or acts like W&B ("stops").

    Yield the server's URL and the requests that it received.
    """
    requests: list = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            requests.append(self.rfile.read(int(self.headers.get("Content-Length", 0))))
            status = request.param
            if status is None:
                closing.wait()
            elif status == "stops":
                url = f"http://{self.headers['Host']}"
                self.send_json(answer_of_wandb(self.path, requests[-1], url))
            else:
                self.send_error(status)

        def send_json(self, content: dict) -> None:
            body = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = do_POST

        def log_message(self, *_) -> None:
            pass

    closing = threading.Event()
    http_server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http_server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{http_server.server_port}", requests
    closing.set()
    http_server.shutdown()
    http_server.server_close()


def answer_of_wandb(path: str, body: bytes, url: str) -> dict:
    """Return the W&B server's response, which stops the run as a user would, once a loss is logged."""
    if "file_stream" in path:
        return {"stopped": b"train/loss" in body}
    request = json.loads(body) if path == "/graphql" else {"query": ""}
    if "upsertBucket" in request["query"]:
        project = {"id": "2", "name": "p", "entity": {"id": "3", "name": "e"}}
        bucket = {"id": "1", "name": "x", "displayName": "x", "config": "{}", "project": project}
        return {"data": {"upsertBucket": {"bucket": bucket | {"historyLineCount": 0}, "inserted": True}}}
    if "createRunFiles" in request["query"]:
        files = [{"name": name, "uploadUrl": f"{url}/upload"} for name in request["variables"]["files"]]
        return {"data": {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": files}}}
    return {"data": {}}


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the curves in metrics.jsonl, which map each name to a list of (step, value) pairs."""
    points: dict[str, list] = {}
    for line in metrics(folder):
        for name in line.keys() - {"step"}:
            points.setdefault(name, []).append((line["step"], line[name]))
    expected = {"epoch", "wall_s", "train/loss", "train/lr", "train/images_per_s", "val/loss", "val/accuracy"}
    assert points.keys() == expected
    return points


def pictures(folder: Path) -> dict[str, Path]:
    """Map each image's name in the trackers to its file."""
    return {f"plots/{name}": folder / "plots" / f"{name}.png" for name in ("confusion", "predictions")}


def wandb_records(file: Path) -> list:
    """Return the protobuf records in a .wandb file, which uses LevelDB's log format after a 7-byte header."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, records, parts = file.read_bytes(), [], []
    position = 7
    while position + 7 <= len(data):
        left_in_block = 32768 - position % 32768
        _, length, record_type = struct.unpack("<IHB", data[position : position + 7])
        if left_in_block < 7 or record_type == 0:
            position += left_in_block
            continue
        parts.append(data[position + 7 : position + 7 + length])
        position += 7 + length
        if record_type in (1, 4):  # Types of a full record and of a record's last fragment
            records.append(Record.FromString(b"".join(parts)))
            parts = []
    return records
