"""Fixture that calls logbook.py in the test's process."""

import sys

import pytest

import logbook
from onecurve.system.cli import run_command


@pytest.fixture
def book(tmp_path, monkeypatch, capsys):
    """Return a function that calls logbook.py with a log book in tmp_path.

    This function returns the exit status, standard output and standard error of logbook.py.
    """

    def call(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["logbook.py", *map(str, words), "--folder", str(tmp_path / "book")])
        status = run_command(logbook.main)
        return status, *capsys.readouterr()

    return call
