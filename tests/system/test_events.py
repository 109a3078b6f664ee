"""Tests of events that ranks report to launch.py through a file. Each event is read exactly once."""

import io
from types import SimpleNamespace

from onecurve.system.env import EVENTS_FILE_VARIABLE, EventReader, report_to_launcher
from tools.launch.agent import _send_new_events
from tools.launch.hosts import EVENT_MARK, Connection, event_line, read_requests


def test_events_are_read_once_each(tmp_path, monkeypatch):
    file = tmp_path / "events"
    reader = EventReader(file)
    # Without the environment variable, report_to_launcher() does nothing.
    report_to_launcher("exit", status=1)
    assert reader.read_new_events() == []
    monkeypatch.setenv(EVENTS_FILE_VARIABLE, str(file))
    report_to_launcher("step", step=1)
    assert reader.read_new_events() == [{"event": "step", "step": 1}]
    assert reader.read_new_events() == []
    report_to_launcher("step", step=2)
    with open(file, "a") as half:
        half.write('{"event": "st')
    assert [event["step"] for event in reader.read_new_events()] == [2]
    with open(file, "a") as half:
        half.write('ep", "step": 3}\n')
    assert [event["step"] for event in reader.read_new_events()] == [3]


def test_the_agent_keeps_statuses_and_passes_the_other_events_on(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv(EVENTS_FILE_VARIABLE, str(tmp_path / "events"))
    for status in (0, 75, 75):
        report_to_launcher("exit", status=status)
    report_to_launcher("notice", until="12:00")
    statuses = set()
    _send_new_events(EventReader(tmp_path / "events"), statuses)
    assert statuses == {0, 75}
    assert capfd.readouterr().out == EVENT_MARK + '{"event": "notice", "until": "12:00"}\n'


def test_a_message_that_is_cut_off_is_ignored(monkeypatch):
    text = f"a banner\na title{event_line('step', step=1)}\n{event_line('step', step=2)[:-3]}"
    connection = Connection(None, SimpleNamespace(stdout=io.StringIO(text), stdin=io.StringIO()))
    assert list(connection.events_and_lines()) == ["a banner", "a title", {"event": "step", "step": 1}]
    connection.request("start", words=["a b"], first=True)
    connection.request("kill")
    sent = connection.process.stdin.getvalue()
    monkeypatch.setattr("sys.stdin", io.StringIO(sent[:-3]))
    assert list(read_requests()) == [("start", {"words": ["a b"], "first": True})]
