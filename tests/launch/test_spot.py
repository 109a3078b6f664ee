"""Notices of a cloud: all three metadata services are real HTTP servers on loopback."""

import json
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.checkpoint.test_checkpoints import LONG, start_and_wait
from tests.conftest import Job, accelerate, full, latest, lines, python, result, torchrun
from tools.launch import spot

AWS, GCP = "/latest/", "/computeMetadata/v1/instance/preempted"
REBALANCE, NOTICE = AWS + "meta-data/events/recommendations/rebalance", AWS + "meta-data/spot/instance-action"
EVENTS, NAME = "/metadata/scheduledevents", "/metadata/instance/compute/name"
ACTION = json.dumps({"action": "terminate", "time": "2026-11-23T08:22:00Z"})
EVENT = {"EventType": "Preempt", "Resources": ["vm-7"], "NotBefore": "Mon, 23 Nov 2026 18:29:47 GMT"}
VARIABLES = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://{}", "GCE_METADATA_HOST": "{}"}
VARIABLES |= {"AZURE_METADATA_ENDPOINT": "http://{}"}
# The sidecar, which asks 20 times as often, and waits less for an answer
HASTY = "from tools.launch import spot; spot.POLL_S, spot.TIMEOUT_S = 0.1, 0.3; raise SystemExit(spot.main())"
SIDECAR = [*python(), "-m", "tools.launch.spot", "aws", "--"]


class Service:
    """A metadata service. pages: the answers by path, as text or (status, text); others are 404.

    Wrong headers are refused, as the real ones do. asked: the paths that were asked for.
    """

    def __init__(self):
        self.pages: dict[str, str | tuple[int, str]] = {}
        self.asked: list[str] = []
        self.tokens: list[str] = []
        self.delay_s = 0.0
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self):
                assert int(self.headers["X-aws-ec2-metadata-token-ttl-seconds"]) > 0
                service.tokens.append(f"token-{len(service.tokens)}")
                self.answer(200, service.tokens[-1])

            def do_GET(self):
                time.sleep(service.delay_s)
                path = self.path.partition("?")[0]
                service.asked.append(path)
                token = self.headers["X-aws-ec2-metadata-token"]
                if path.startswith(AWS) and token not in service.tokens[-1:]:
                    return self.answer(401, "")
                if path == GCP and self.headers["Metadata-Flavor"] != "Google":
                    return self.answer(403, "")
                if path.startswith("/metadata/") and self.headers["Metadata"] != "true":
                    return self.answer(400, "")
                page = service.pages.get(path, (404, ""))
                return self.answer(*(page if isinstance(page, tuple) else (200, page)))

            def answer(self, status, text):
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None  # a client that waits no longer
        self.place = f"127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()


@pytest.fixture
def service(monkeypatch):
    service = Service()
    for name, form in VARIABLES.items():
        monkeypatch.setenv(name, form.format(service.place))
    # A proxy that nobody answers at: a request that used it would fail.
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setattr(spot, "TIMEOUT_S", 0.3)
    yield service
    service.server.shutdown()


def test_aws(service):
    ask = spot.Aws()
    assert ask() is None
    service.pages[REBALANCE] = '{"noticeTime": "2026-11-23T08:00:00Z"}'
    assert ask() == "aws: rebalance recommended, since 2026-11-23T08:00:00Z"
    assert spot.Aws()() is None  # a recommendation from before the start
    service.pages[NOTICE] = ACTION
    service.tokens.append("of another process")  # older ones are refused from now on
    assert ask() == "aws: terminate at 2026-11-23T08:22:00Z"


def test_gcp_and_azure(service):
    """Azure's events name virtual machines: only those for this one count."""
    ask = spot.Gcp()
    for text, notice in (("FALSE", None), ("TRUE", "gcp: preempted")):
        service.pages[GCP] = text
        assert ask() == notice
    ask = spot.Azure()
    service.pages[NAME] = "vm-7"
    for events, notice in (
        ([], None),
        ([EVENT | {"Resources": ["vm-70"]}], None),
        ([EVENT | {"EventType": "Reboot"}], None),
        ([EVENT], f"azure: preempted, not before {EVENT['NotBefore']}"),
    ):
        service.pages[EVENTS] = json.dumps({"DocumentIncarnation": 1, "Events": events})
        assert ask() == notice
    assert service.asked.count(NAME) == 1


@pytest.mark.parametrize(
    ("cloud", "path", "answer"),
    [
        ("aws", NOTICE, "[]"),
        ("aws", NOTICE, (500, "")),
        ("azure", EVENTS, '{"Events": [7]}'),
        ("azure", NAME, (404, "")),
        ("gcp", GCP, "slow"),
        ("gcp", "", ""),
    ],
)
def test_a_failing_service_is_said_once_and_the_command_runs_on(cloud, path, answer, service, monkeypatch):
    service.delay_s = 1.0 if answer == "slow" else 0.0  # a request ends after TIMEOUT_S
    service.pages |= {NAME: "vm-7", path: answer}
    if not path:
        monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")
    words = [*python(), "-c", HASTY, cloud, "--", "sh", "-c", "sleep 1; exit 3"]
    status, output = Job(words).wait(60)
    assert status == 3
    assert output.startswith("the metadata service does not answer as expected (")
    assert len(output.splitlines()) == 1
    assert len(service.asked) > 1 or not path or answer == "slow"


@pytest.mark.parametrize(
    ("launcher", "status"),
    [
        (["launch.py", "--mode", "single-node", "--spot_notice", "aws", "--log_dir"], 75),
        full([*SIDECAR, *python()], 75),
        full([*SIDECAR, *accelerate("single_gpu")], 128 + 15),  # it ends at once, and the script saves
        full([*SIDECAR, *torchrun(2, "--standalone", "--max_restarts=1000")], 1),  # no restart on this host
    ],
)
def test_a_run_saves_at_a_notice(launcher, status, service, tmp_path):
    """With a proxy in the environment, which is not asked."""
    log_dir = [tmp_path / "logs"] if launcher[-1] == "--log_dir" else []
    words = [*launcher, *log_dir, *LONG, "--epochs", "3000"]
    job = start_and_wait(words, tmp_path / "run")
    service.pages[NOTICE] = ACTION
    found_status, output = job.wait(60)
    assert found_status == status, output
    assert output.count("preemption notice (aws: terminate at 2026-11-23T08:22:00Z): sending SIGTERM") == 1
    found = result(tmp_path / "run")
    assert (found["status"], latest(tmp_path / "run").name) == ("preempted", f"step_{found['steps']:08d}")
    last = lines(tmp_path / "run" / "metrics.jsonl")[-1]
    assert (last["step"], last["why"]) == (found["steps"], "SIGTERM")


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGTERM, 75), full(signal.SIGKILL, -signal.SIGKILL)])
def test_a_signal_to_the_sidecar_reaches_the_command(sent, status, service, tmp_path):
    job = start_and_wait([*SIDECAR, *python(), *LONG, "--epochs", "3000"], tmp_path / "run")
    job.process.send_signal(sent)
    assert job.wait(60)[0] == status
    assert result(tmp_path / "run")["status"] == "preempted"
