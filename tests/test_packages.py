"""The tests on a bare Debian, with Python and make: what needs a package is skipped, and CI refuses that."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, full, needs
from tests.support import packages
from tests.support.packages import PACKAGES

# A few tests of each kind: hosts, Slurm, a browser, a compiler, ssh, real images; and some that need nothing.
PART = ["tests/cluster", "tests/logbook/test_overview.py", "tests/distributed/test_compilation.py"]
PART += ["tests/scripts/test_launchers.py", "tests/scripts/test_real_data.py", "-m", "not full", "-k"]
PART += ["cluster or slurm or page or flag or health or other_script or real_data"]
# A mount namespace without /usr/sbin, which cluster/virtual_cluster.py adds to the PATH
BARE = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /usr/sbin && PATH=$0 exec "$@"']
STATUSES = {"": 0, "true": 1}  # with this value of CI


@pytest.fixture
def path(tmp_path) -> Path:
    """A folder as the PATH: the programs of Debian's required packages, Python, make, a false apt-get."""
    listed = subprocess.check_output(["dpkg-query", "-W", "-f", "${Priority} ${Package}\n"], text=True)
    required = re.findall("^required (.*)", listed, re.MULTILINE)
    files = subprocess.check_output(["dpkg", "--listfiles", *required], text=True).splitlines()
    programs = [Path(file) for file in files if re.fullmatch("(/usr)?/bin/[^/]+", file)]
    folder = tmp_path / "bin"
    folder.mkdir()
    for program in {*programs, Path(shutil.which("make"))}:
        (folder / program.name).symlink_to(program)
    (folder / "python3").symlink_to(sys.executable)
    (folder / "apt-get").unlink()
    (folder / "apt-get").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/installed\n')
    (folder / "apt-get").chmod(0o755)
    return folder


@pytest.mark.parametrize(("ci", "end"), [("", pytest.skip.Exception), ("true", pytest.fail.Exception)])
def test_what_is_missing_skips_a_test_and_in_ci_fails_it(ci, end, monkeypatch):
    monkeypatch.setenv("CI", ci)
    monkeypatch.setitem(packages.OTHERS, "root", False)
    with pytest.raises((pytest.skip.Exception, pytest.fail.Exception), match=r"^needs root$") as ended:
        needs("root")
    assert ended.type is end


@pytest.mark.needs("root")  # to mount
@pytest.mark.parametrize("ci", ["", full("true")])
def test_tests_without_their_packages(ci, path, tmp_path):
    def bare(*words) -> tuple[int, str]:
        env = {name: value for name, value in os.environ.items() if name != "TEST_DATA_DIR"} | {"CI": ci}
        done = subprocess.run([*BARE, path, *words], cwd=ROOT, env=env, capture_output=True, text=True)
        return done.returncode, done.stdout

    status, output = bare(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *PART)
    assert status == STATUSES[ci], output
    *_, summary, last = output.splitlines()
    lacking = {*PACKAGES.values(), "TEST_DATA_DIR"}
    if ci:
        assert "failed" in last
        assert "skipped" not in last
        return
    assert int(re.search(r"(\d+) passed", summary).group(1)) > 10
    assert "failed" not in summary
    counts, command = re.fullmatch(
        r"Skipped tests, by what is missing: (.*)\. To install packages: (.*)", last
    ).groups()
    numbers = {name: int(number) for name, number in re.findall(r"([\w+-]+) \((\d+)\)", counts)}
    assert numbers.keys() == lacking
    by_package = re.findall(r"SKIPPED \[(\d+)\] .* needs .*chromium", output)
    assert numbers["chromium"] == sum(map(int, by_package))
    assert bare(*command.split())[0] == 0
    assert {*(tmp_path / "installed").read_text().split()} > lacking - {"TEST_DATA_DIR"}
