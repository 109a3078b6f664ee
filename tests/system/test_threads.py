"""Tests of work in a background thread while the main thread sends heartbeats."""

import threading
import time

import pytest

from onecurve.system.threads import run_with_heartbeat


def test_the_heartbeat_continues_until_the_result_or_error():
    beats: list[float] = []
    assert run_with_heartbeat(lambda: time.sleep(1) or 7, lambda: beats.append(time.monotonic()), 0.05) == 7
    assert len(beats) >= 3
    with pytest.raises(KeyError):
        run_with_heartbeat(lambda: {}["x"], lambda: None)


def test_an_exception_of_the_heartbeat_does_not_wait_for_the_work():
    end = threading.Event()

    def stop() -> None:
        raise SystemExit(75)

    began_s = time.monotonic()
    with pytest.raises(SystemExit):
        run_with_heartbeat(lambda: end.wait(20), stop, 0.05)
    assert time.monotonic() - began_s < 10
    end.set()
