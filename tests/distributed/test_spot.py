"""Notices of a cloud: all three metadata services are real HTTP servers on loopback."""

import json
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from common.distributed import preemption, spot
from tests.checkpoint.test_checkpoints import LONG, start_and_wait
from tests.conftest import latest, lines, python, result, run, torchrun
from tools.logbook.page import page
from tools.logbook.price import Terms
from tools.logbook.record import RunRecord

AWS, GCP = "/latest/", "/computeMetadata/v1/instance/preempted"
ACTION = json.dumps({"action": "terminate", "time": "2026-11-23T08:22:00Z"})
EVENT = {"EventType": "Preempt", "Resources": ["vm-7"], "NotBefore": "Mon, 23 Nov 2026 18:29:47 GMT"}
VARIABLES = {
    "aws": ("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://{}"),
    "gcp": ("GCE_METADATA_HOST", "{}"),
    "azure": ("AZURE_METADATA_ENDPOINT", "http://{}"),
}


class Service:
    """A metadata service. pages: the answers by path, as text or (status, text); others are 404.

    Wrong headers are refused, as the real ones do. asked: how often each path was asked for.
    """

    def __init__(self):
        self.pages: dict[str, str | tuple[int, str]] = {}
        self.asked: Counter[str] = Counter()
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
                service.asked[path] += 1
                if (
                    path.startswith(AWS)
                    and self.headers["X-aws-ec2-metadata-token"] not in service.tokens[-1:]
                ):
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
        self.place = f"127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()


@pytest.fixture
def service(monkeypatch):
    service = Service()
    for name, form in VARIABLES.values():
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
    service.pages[AWS + "meta-data/events/recommendations/rebalance"] = (
        '{"noticeTime": "2026-11-23T08:00:00Z"}'
    )
    assert ask() == spot.Notice("aws: rebalance recommended, since 2026-11-23T08:00:00Z", "")
    service.pages[AWS + "meta-data/spot/instance-action"] = ACTION
    assert ask() == spot.Notice("aws: terminate", "2026-11-23T08:22:00Z")
    assert service.tokens == ["token-0"]  # one for all questions
    service.tokens.append("of another process")  # ours is refused from now on
    assert ask() == spot.Notice("aws: terminate", "2026-11-23T08:22:00Z")
    ask.renew_at = 0  # half as old as it gets
    ask()
    assert service.tokens == ["token-0", "of another process", "token-2", "token-3"]


def test_a_recommendation_from_before_the_start_does_not_end_it_again(service):
    service.pages[AWS + "meta-data/events/recommendations/rebalance"] = '{"noticeTime": "2026-11-23"}'
    ask = spot.Aws()
    assert ask() is None
    assert ask() is None
    service.pages[AWS + "meta-data/spot/instance-action"] = ACTION
    assert ask() == spot.Notice("aws: terminate", "2026-11-23T08:22:00Z")


def test_gcp(service):
    ask = spot.Gcp()
    service.pages[GCP] = "FALSE"
    assert ask() is None
    service.pages[GCP] = "TRUE"
    assert ask() == spot.Notice("gcp: preempted", "")


def test_azure(service):
    """Its events name virtual machines: only those for this one count."""
    ask = spot.Azure()
    service.pages["/metadata/instance/compute/name"] = "vm-7"
    for events, found in (
        ([], None),
        ([EVENT | {"Resources": ["vm-70"]}], None),
        ([EVENT | {"EventType": "Reboot"}], None),
        ([EVENT], spot.Notice("azure: preempted", EVENT["NotBefore"])),
    ):
        service.pages["/metadata/scheduledevents"] = json.dumps({"DocumentIncarnation": 1, "Events": events})
        assert ask() == found
    assert service.asked["/metadata/instance/compute/name"] == 1


@pytest.mark.parametrize(
    ("cloud", "path", "answer"),
    [
        ("aws", "/latest/meta-data/spot/instance-action", "[]"),
        ("aws", "/latest/meta-data/spot/instance-action", "{"),
        ("aws", "/latest/meta-data/spot/instance-action", (500, "")),
        ("gcp", GCP, (302, "")),
        ("azure", "/metadata/scheduledevents", '{"Events": [7]}'),
        ("azure", "/metadata/scheduledevents", "[" * 100_000),
        ("azure", "", ""),
    ],
)
def test_a_service_that_fails_is_reported_once_and_asked_again(
    cloud, path, answer, service, monkeypatch, capsys
):
    service.pages["/metadata/instance/compute/name"] = "vm-7" if path else (404, "")
    service.pages[path] = answer
    asked = []

    def sleep(_):
        asked.append(1)
        if len(asked) == 3:
            raise InterruptedError

    # Not time.sleep itself, which the server calls, too
    monkeypatch.setattr(spot, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    with pytest.raises(InterruptedError):
        spot._poll(spot.SERVICES[cloud]())
    said = capsys.readouterr().err
    assert said.count("--spot_notice: the metadata service does not answer as expected") == 1
    assert len(said.splitlines()) == 1
    assert not preemption.reason()


def test_a_silent_service_and_none_at_all(service, monkeypatch):
    service.delay_s = 1.0
    with pytest.raises(OSError, match="timed out"):
        spot.Gcp()()
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")
    with pytest.raises(OSError, match="refused"):
        spot.Gcp()()


def test_without_the_flag_nothing_is_asked(service, monkeypatch):
    def start(*_, **__):
        raise AssertionError("a thread")

    monkeypatch.setattr(spot.threading, "Thread", start)
    spot.watch_for_notice(None)
    monkeypatch.setenv("LOCAL_RANK", "1")
    spot.watch_for_notice("aws")  # another process of the host does it
    assert not service.asked


@pytest.mark.full
def test_torchrun_does_not_start_again_on_a_host_with_a_notice(service, tmp_path):
    words = [*torchrun(2, "--standalone", "--max_restarts=1000"), *LONG, "--epochs", "3000"]
    job = start_and_wait([*words, "--spot_notice", "gcp"], tmp_path / "run")
    service.pages[GCP] = "TRUE"
    status, output = job.wait(60)
    assert status != 0
    assert output.count("notice from gcp: preempted: saving and ending") == 1, output
    assert result(tmp_path / "run")["status"] == "preempted"


def test_a_run_saves_at_a_notice_and_its_page_shows_the_interruption(service, tmp_path):
    """With a proxy in the environment, which is not asked."""
    words = [*python(), *LONG, "--epochs", "3000", "--spot_notice", "aws"]
    job = start_and_wait(words, tmp_path / "run")
    service.pages[AWS + "meta-data/spot/instance-action"] = ACTION
    status, output = job.wait(60)
    assert status == 75, output
    assert "notice from aws: terminate at 2026-11-23T08:22:00Z: saving and ending" in output
    found = result(tmp_path / "run")
    assert (found["status"], latest(tmp_path / "run").name) == ("preempted", f"step_{found['steps']:08d}")
    last = lines(tmp_path / "run" / "metrics.jsonl")[-1]
    assert (last["step"], last["why"]) == (found["steps"], "aws: terminate")
    service.pages.clear()
    words = [*python(), *LONG, "--epochs", "3000", "--output_dir", tmp_path / "run"]
    run([*words, "--max_steps", found["steps"] + 5])
    ((step, why, seconds),) = RunRecord(tmp_path / "run").interruptions
    assert (step, why) == (found["steps"], "aws: terminate")
    assert 0 < seconds < 60
    text = page(RunRecord(tmp_path / "run"), "x", [], Terms(price_per_hour=36.0))
    assert f"1 interruption, {seconds:,.0f} s without training, {seconds / 100:,.2f} at 36 per hour:" in text
    assert f"| {step:,} | aws: terminate | {seconds:,.0f} s | {seconds / 100:,.2f} |" in text
