"""Tests that the hostfile is parsed in the same way as by DeepSpeed.

Mistakes in the hostfile are errors, even if DeepSpeed ignores them.
"""

import json
from pathlib import Path

import pytest
from deepspeed.launcher.runner import _parse_hostfile, parse_inclusion_exclusion

from tests.conftest import ROOT, rows_of
from tools.launch.hosts import EVENT_MARK, Host, read_hostfile, select_hosts, start_module_on

GOOD = "# all of them\n\nworker-1 slots=2\n  worker-2\tslots=4  \n#worker-3 slots=4\n10.0.0.7 slots=1\n"


@pytest.fixture
def hostfile(tmp_path):
    def write(text: str):
        (tmp_path / "hostfile").write_text(text)
        return tmp_path / "hostfile"

    return write


def test_the_hostfile_is_parsed_like_deepspeeds(hostfile):
    expected = _parse_hostfile(GOOD.splitlines(keepends=True))
    assert {host.name: len(host.devices) for host in read_hostfile(hostfile(GOOD))} == dict(expected)
    assert [host.name for host in read_hostfile(hostfile(GOOD))] == list(expected)


@pytest.mark.parametrize(
    ("encoding", "mark", "is_read"),
    [
        ("utf-8", "\ufeff", True),  # Windows editors and PowerShell write this byte order mark
        ("utf-16-le", "\ufeff", True),
        ("utf-16-be", "\ufeff", True),
        ("utf-16-le", "", False),
        ("cp1252", "#\xfc\n", False),
    ],
)
def test_other_encodings(encoding, mark, is_read, tmp_path):
    (tmp_path / "hostfile").write_bytes(f"{mark}worker-1 slots=2\r\n# all\r\n".encode(encoding))
    if is_read:
        assert read_hostfile(tmp_path / "hostfile") == [Host("worker-1", (0, 1))]
    else:
        with pytest.raises(ValueError, match=r"hostfile is not UTF-8\. Save the file as UTF-8"):
            read_hostfile(tmp_path / "hostfile")


@pytest.mark.parametrize(("text", "message"), rows_of("hostfile mistakes"))
def test_a_mistake_is_refused_with_its_line(text, message, hostfile):
    with pytest.raises(ValueError, match="hostfile") as error:
        read_hostfile(Path("nothing/hostfile") if text is None else hostfile(text))
    assert message in str(error.value)


@pytest.mark.parametrize(("include", "exclude"), rows_of("hostfile filters"))
def test_filters_select_the_same_hosts_as_deepspeed(include, exclude, hostfile):
    expected = parse_inclusion_exclusion(_parse_hostfile(GOOD.splitlines()), include, exclude)
    hosts = select_hosts(read_hostfile(hostfile(GOOD)), include, exclude)
    assert [(host.name, list(host.devices)) for host in hosts] == [(n, list(d)) for n, d in expected.items()]


@pytest.mark.parametrize(("include", "exclude", "message"), rows_of("hostfile wrong filters"))
def test_a_wrong_filter_is_refused(include, exclude, message, hostfile):
    with pytest.raises(ValueError, match="clude") as error:
        select_hosts(read_hostfile(hostfile(GOOD)), include, exclude)
    assert message in str(error.value)


def test_the_users_ssh_connection_does_not_define_the_hosts_network(monkeypatch):
    """Simulate an SSH connection from a laptop to an address that the hosts do not use."""
    monkeypatch.setenv("SSH_CONNECTION", "192.0.2.7 50000 192.0.2.1 22")
    with start_module_on("localhost", "tools.launch.agent") as agent:
        hello = json.loads(agent.stdout.readline().removeprefix(EVENT_MARK))
        agent.stdin.close()
    assert (hello["reached_at"], hello["asked_from"]) == (None, None)


def test_the_committed_hostfile_names_this_host():
    assert [(host.name, host.devices) for host in read_hostfile(ROOT / "hostfile")] == [("localhost", (0, 1))]
