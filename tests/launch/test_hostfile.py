"""The hostfile is read as DeepSpeed reads it; mistakes that DeepSpeed ignores are refused."""

from pathlib import Path

import pytest
from deepspeed.launcher.runner import _parse_hostfile, parse_inclusion_exclusion

from tests.conftest import ROOT
from tools.launch.hosts import read_hostfile, select

GOOD = "# all of them\n\nworker-1 slots=2\n  worker-2\tslots=4  \n#worker-3 slots=4\n10.0.0.7 slots=1\n"


@pytest.fixture
def hostfile(tmp_path):
    def write(text: str):
        (tmp_path / "hostfile").write_text(text)
        return tmp_path / "hostfile"

    return write


def test_it_is_read_as_deepspeed_reads_it(hostfile):
    theirs = _parse_hostfile(GOOD.splitlines(keepends=True))
    assert {host.name: len(host.devices) for host in read_hostfile(hostfile(GOOD))} == dict(theirs)
    assert [host.name for host in read_hostfile(hostfile(GOOD))] == list(theirs)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=1\nb slots=1\na slots=2\n", "line 3: a is in line 1 already"),
        ("a slots=1\n\nb slots=2 gpus=3\n", "line 3: expected `name slots=N`, found `b slots=2 gpus=3`"),
        ("a slots=two\n", "line 1: expected `name slots=N`"),
        ("a\n", "line 1: expected `name slots=N`, found `a`"),
        ("a slots=0\n", "line 1: a has no slots"),
        ("-oProxyCommand=evil slots=1\n", "line 1: -oProxyCommand=evil is no host's name"),
        ("me@a slots=1\n", "line 1: me@a is no host's name"),
        ("# nobody\n", "names no host"),
        ("", "names no host"),
        (None, "No such file"),  # no local job, as with DeepSpeed
    ],
)
def test_a_mistake_is_refused_with_its_line(text, message, hostfile):
    with pytest.raises(ValueError, match="hostfile") as error:
        read_hostfile(Path("nothing/hostfile") if text is None else hostfile(text))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("include", "exclude"),
    [
        ("", ""),
        ("worker-1@worker-2:0,2", ""),
        ("worker-2:3,1,1", ""),
        ("worker-2@worker-2:1", ""),
        ("10.0.0.7@worker-1", ""),
        ("", "worker-1"),
        ("", "worker-2:0@worker-1:1"),
        ("", "worker-1:0,1"),
    ],
)
def test_filters_are_deepspeeds(include, exclude, hostfile):
    theirs = parse_inclusion_exclusion(_parse_hostfile(GOOD.splitlines()), include, exclude)
    ours = select(read_hostfile(hostfile(GOOD)), include, exclude)
    assert [(host.name, list(host.devices)) for host in ours] == [(n, list(d)) for n, d in theirs.items()]


@pytest.mark.parametrize(
    ("include", "exclude", "message"),
    [
        ("worker-9", "", "no host worker-9; there are worker-1, worker-2, 10.0.0.7"),
        ("worker-1:2", "", "worker-1 has no slot 2, but 2 slots"),
        ("worker-1:", "", "expected `worker-1:0,2`"),
        ("worker-1", "worker-2", "exclude one another"),
        ("", "worker-1@worker-2@10.0.0.7", "leaves no host"),
    ],
)
def test_a_wrong_filter_is_refused(include, exclude, message, hostfile):
    with pytest.raises(ValueError, match="clude") as error:
        select(read_hostfile(hostfile(GOOD)), include, exclude)
    assert message in str(error.value)


def test_the_committed_one_is_this_host():
    assert [(host.name, host.devices) for host in read_hostfile(ROOT / "hostfile")] == [("localhost", (0, 1))]
