"""Tests that the package's messages look like printed lines and can be silenced."""

from tests.conftest import python, run

MESSAGES = """
from onecurve.system.output import log
log.info("100 % of the images")
log.warning("an image is missing")
"""
SILENCE = 'import logging\nlogging.getLogger("onecurve").setLevel("ERROR")\n'


def test_information_goes_to_stdout_and_warnings_to_stderr(capsys):
    from onecurve.system.output import log

    log.info("100 % of the images")
    log.warning("an image is missing")
    assert capsys.readouterr() == ("100 % of the images\n", "an image is missing\n")


def test_an_embedding_program_silences_the_package():
    assert run([*python(), "-c", MESSAGES]) == "100 % of the images\nan image is missing\n"
    assert run([*python(), "-c", SILENCE + MESSAGES]) == ""
