"""Tests of packages that `make setup` installs. On a bare Debian, tests that lack a package skip or fail."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import ROOT
from tests.support.packages import PACKAGES

# Test files that cover each requirement (hosts, Slurm, a compiler, SSH, real images) and contain tests
# without requirements
PART = ["tests/cluster", "tests/distributed/test_compilation.py", "tests/scripts/test_launchers.py"]
PART += ["tests/scripts/test_real_data.py", "-m", "not full", "-k"]
PART += ["cluster or slurm or flag or health or other_script or real_data"]
# Command that starts a mount namespace without /usr/sbin, which cluster/virtual_cluster.py adds to the PATH
BARE = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /usr/sbin && PATH=$0 exec "$@"']


def test_each_requirement_has_one_version_with_hashes():
    text = (ROOT / "constraints.txt").read_text()
    versions = dict(re.findall(r"^([\w-]+)==(\S+).* \\\n    --hash=sha256:", text, re.MULTILINE))
    assert len(versions) == len(re.findall(r"^\S+==", text, re.MULTILINE))
    lines = "".join(file.read_text() for file in ROOT.glob("requirements*.txt"))
    requirements = [Requirement(line.partition("#")[0]) for line in re.findall(r"^\w.*", lines, re.MULTILINE)]
    assert len(requirements) > 30
    for requirement in requirements:
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), requirement


def test_the_package_requires_the_same_versions_as_the_checkout():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    dependencies = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    listed = re.findall(r"^\w\S+", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    assert len(dependencies) > 10
    assert set(dependencies) <= set(listed)


UV = "uv pip install --python V/bin/python"
PINNED = "--requirement requirements.txt --constraint constraints.txt"
INSTALLS = {
    "": f"{UV} {PINNED}",
    "CPU=1": f"{UV} --torch-backend cpu --no-verify-hashes {PINNED}",
    "INSTALLER=pip": f"python -m pip install {PINNED}",
    "TORCH=2.11": f'{UV} --requirement requirements.txt "torch==2.11.*"',
}


@pytest.mark.parametrize("flags", INSTALLS)
def test_make_setup_installs_by(flags):
    words = ["make", "-nB", "setup", "VENV=V", *flags.split()]
    commands = subprocess.check_output(words, cwd=ROOT, text=True).split()
    assert f" V/bin/{INSTALLS[flags]} touch V/installed" in " ".join(commands)


# Command that pretends that python3 is an unsupported version
ANOTHER_PYTHON = ["make", "setup", "FITS=import sys; sys.exit(1)", "INSTALL=true"]


@pytest.mark.full
def test_uv_installs_a_python_that_fits(tmp_path):
    words = [*ANOTHER_PYTHON, f"VENV={tmp_path}/venv"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    message = r"^Python 3\.\d+\.\d+ is not in >=3\.11,<3\.14\. uv installs a version that is$"
    assert re.search(message, done.stdout, re.MULTILINE)
    words = [tmp_path / "venv" / "bin" / "python", "-c", "import sys; print(sys.version_info[:2])"]
    assert (3, 11) <= eval(subprocess.check_output(words, text=True)) <= (3, 13)


def test_pip_does_not_accept_another_python(tmp_path):
    words = [*ANOTHER_PYTHON, "INSTALLER=pip", f"VENV={tmp_path}/venv"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode
    assert "error: INSTALLER=pip needs a Python in the range >=3.11,<3.14. Set PYTHON=\n" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_an_index_that_does_not_answer_is_one_line(tmp_path):
    words = ["make", "setup", f"VENV={tmp_path}/venv", "CPU=1", "CPU_INDEX=http://127.0.0.1:9"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    error, _ = done.stderr.splitlines()  # The second line is printed by make
    assert error == "error: CPU=1 needs http://127.0.0.1:9, which does not answer. Leave out CPU=1"
    assert not (tmp_path / "venv").exists()


@pytest.fixture
def path(tmp_path) -> Path:
    """Return a folder for PATH with the programs of Debian's required packages, Python, make and a fake
    apt-get.
    """
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


@pytest.mark.full
@pytest.mark.needs("root")  # Only root can mount
@pytest.mark.parametrize("ci", ["", "true"])
def test_tests_without_their_packages(ci, path, tmp_path):
    def bare(*words) -> tuple[int, str]:
        env = {name: value for name, value in os.environ.items() if name != "TEST_DATA_DIR"} | {"CI": ci}
        done = subprocess.run([*BARE, path, *words], cwd=ROOT, env=env, capture_output=True, text=True)
        return done.returncode, done.stdout

    status, output = bare(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *PART)
    assert status == (1 if ci else 0), output
    *_, summary, last = output.splitlines()
    missing_packages = {*PACKAGES.values(), "TEST_DATA_DIR"}
    if ci:
        assert "failed" in last
        assert "skipped" not in last
        return
    assert int(re.search(r"(\d+) passed", summary).group(1)) > 10
    assert "failed" not in summary
    pattern = r"Skipped tests, by what is missing: (.*)\. To install packages: (.*)"
    counts, command = re.fullmatch(pattern, last).groups()
    numbers = {name: int(number) for name, number in re.findall(r"([\w+-]+) \((\d+)\)", counts)}
    assert numbers.keys() == missing_packages
    by_package = re.findall(r"SKIPPED \[(\d+)\] .* needs .*slurm-wlm", output)
    assert numbers["slurm-wlm"] == sum(map(int, by_package))
    assert bare(*command.split())[0] == 0
    assert {*(tmp_path / "installed").read_text().split()} > missing_packages - {"TEST_DATA_DIR"}
