"""Tests of cluster/setup_node.sh in a sandbox with separate mounts, /etc and network.

git, make, getent with /etc/hosts, findmnt and ip are the real programs. Tests replace apt-get, nvidia-smi and
mount with stubs where necessary, because nothing may be downloaded, the machine may have no GPU, and there is
no NFS, CIFS or S3 server. The tests check the `mount` call and the line in /etc/fstab, but not the mounted
file system.
"""

import os
import pwd
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT, Job, needs, rows_of, wait_until

SCRIPT = ROOT / "cluster" / "setup_node.sh"
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
HOSTS = "127.0.0.1 localhost\n127.0.1.1 node1.lan node1 # as installed\n::1 localhost\n\n192.168.7.7 fax\n"
CLUSTER = ["--host", "node1=10.9.0.1", "--host", "node2=10.9.0.2"]
BLOCK = """\
# BEGIN hosts of the training cluster (setup_node.sh)
10.9.0.1 node1
10.9.0.2 node2
# END hosts of the training cluster
"""
# Script that redirects all writes to a tmpfs, which overlays /etc and replaces /opt and /mnt
INIT = """
set -e
sandbox=$1
mount -t tmpfs tmpfs $sandbox
mkdir $sandbox/etc $sandbox/work $sandbox/opt $sandbox/mnt $sandbox/bin $sandbox/usr $sandbox/usr_work
mount -t overlay overlay -o lowerdir=/etc,upperdir=$sandbox/etc,workdir=$sandbox/work /etc
mount -t overlay overlay -o lowerdir=/usr/bin,upperdir=$sandbox/usr,workdir=$sandbox/usr_work /usr/bin
mount --bind $sandbox/opt /opt
mount --bind $sandbox/mnt /mnt
mount -t tmpfs tmpfs /sys
hostname node1
ip link set lo up
ip address add 10.9.0.1/24 dev lo
: > $sandbox/ready
exec sleep 1000
"""
MAKEFILE = """\
.PHONY: setup
setup: .venv/installed
.venv/installed: requirements.txt
\tmkdir -p .venv
\techo made by $$(id -un)
\ttouch $@
"""


class Sandbox:
    """Sandbox in which setup_node.sh runs.

    `files` is the sandbox's root folder, and `scratch` is the test's folder inside it.
    """

    def __init__(self, folder: Path):
        words = ["unshare", "--mount", "--uts", "--net", "bash", "-c", INIT, "init", folder]
        folder.mkdir()
        self.folder = folder
        self.init = Job(words)
        self.files = Path(f"/proc/{self.init.process.pid}/root")
        self.scratch = self.at(str(folder))
        wait_until((self.scratch / "ready").exists, self.init)
        # Tests must not change this machine's files.
        for name in ("etc", "opt", "mnt", "usr/bin", "sys"):
            assert (self.files / name).stat().st_dev != Path("/", name).stat().st_dev
        self.at("/etc/hosts").write_text(HOSTS)
        # This file's last line does not end with a newline.
        self.at("/etc/fstab").write_text("# as installed\nUUID=1 / ext4 defaults 0 1")
        self.stub("nvidia-smi", "exit 9")  # nvidia-smi exits with status 9 if there is no driver
        self.stub("apt-get", "exit 1")

    def at(self, path: str) -> Path:
        return self.files / path[1:]

    def read(self, path: str) -> str:
        return self.at(path).read_text()

    def stub(self, name: str, script: str) -> None:
        """Replace a command with a stub, whose calls `self.calls()` returns."""
        file = self.scratch / "bin" / name
        file.write_text(f'#!/bin/bash\necho "{name} $*" >> {self.folder}/calls\n{script}\n')
        file.chmod(0o755)

    def calls(self, name: str) -> list[str]:
        file = self.scratch / "calls"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line.removeprefix(f"{name} ") for line in lines if line.split()[0] == name]

    def do(self, *words, status: int = 0) -> str:
        """Run a command in the sandbox, check its exit status, and return its output."""
        words = ["nsenter", "--target", str(self.init.process.pid), "--mount", "--uts", "--net", *words]
        env = {"PATH": f"{self.folder}/bin:{PATH}", "HOME": str(self.folder), "LC_ALL": "C"}
        completed = subprocess.run(
            words, env=env, text=True, timeout=60,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert completed.returncode == status, completed.stdout
        return completed.stdout

    def setup(self, *flags, status: int = 0) -> str:
        """Run setup_node.sh, check its exit status, and return its output."""
        return self.do(SCRIPT, *flags, status=status)

    def refused(self, *flags, status: int = 1) -> str:
        """Run setup_node.sh, check that it refuses and changes nothing, and return its one-line error."""
        before = self.snapshot()
        output_lines = self.setup(*flags, status=status).splitlines()
        assert self.snapshot() == before
        assert [line.startswith("error: ") for line in output_lines].count(True) == 1, output_lines
        assert output_lines[-1].startswith("error: ")
        return output_lines[-1]

    def snapshot(self) -> dict[str, tuple]:
        """Return the mode, owner and content of each file that the script could change."""
        files = {}
        for top in ("etc", "opt", "mnt"):
            folder = self.scratch / top
            for path in [folder, *folder.rglob("*")]:
                status = path.lstat()
                content = path.read_bytes() if path.is_file() and not path.is_symlink() else None
                files[str(path)] = (status.st_mode, status.st_uid, status.st_mtime_ns, content)
        return files


@pytest.fixture
def sandbox(tmp_path):
    needs("root", "git", "g++", "ssh", "sshd", "ip", "pdsh")
    sandbox = Sandbox(tmp_path / "sandbox")
    try:
        yield sandbox
    finally:
        sandbox.init.kill()


@pytest.fixture
def origin(sandbox) -> str:
    """Create a repository to clone, and a clone at /opt/mine, from which tests push to the repository."""
    sandbox.do("git", "init", "--quiet", "--bare", "--initial-branch=main", "/opt/origin.git")
    sandbox.do("git", "clone", "--quiet", "/opt/origin.git", "/opt/mine")
    sandbox.do("git", "-C", "/opt/mine", "switch", "--quiet", "--orphan", "main")
    sandbox.at("/opt/mine/Makefile").write_text(MAKEFILE)
    sandbox.at("/opt/mine/.gitignore").write_text(".venv/\n")
    push(sandbox, "requirements.txt", "torch\n")
    return "/opt/origin.git"


def push(sandbox: Sandbox, name: str, text: str) -> str:
    """Commit and push a file, and return the short commit ID."""
    sandbox.at(f"/opt/mine/{name}").write_text(text)
    commit(sandbox, "/opt/mine", name)
    sandbox.do("git", "-C", "/opt/mine", "push", "--quiet", "origin", "main")
    return sandbox.do("git", "-C", "/opt/mine", "rev-parse", "HEAD")[:10]


def commit(sandbox: Sandbox, folder: str, message: str) -> None:
    sandbox.do("git", "-C", folder, "add", ".")
    me = ("-c", "user.name=me", "-c", "user.email=me@example.com")
    sandbox.do("git", "-C", folder, *me, "commit", "--quiet", "-m", message)


def stub_mount(sandbox: Sandbox, *programs: str) -> None:
    """Replace apt-get with a stub that installs these programs, and mount with a stub that mounts a tmpfs.

    The mount table lists the tmpfs under the source's name.
    """
    installs = "; ".join(f"install -m 755 /dev/null {sandbox.folder}/bin/{program}" for program in programs)
    sandbox.stub("apt-get", f"[[ $* != *install* ]] || {{ {installs}; }}")
    real_mount = shutil.which("mount")
    # The stub is called as `mount -t TYPE -o OPTIONS SOURCE FOLDER`. The mount table lists S3 mounts as
    # `s3fs`.
    sandbox.stub("mount", f'[ "$2" = fuse.s3fs ] && what=s3fs || what=$5; {real_mount} -t tmpfs "$what" "$6"')


def test_a_dry_run_and_a_second_run_change_nothing(sandbox, origin):
    flags = [*CLUSTER, "--repo", origin, "--path", "/opt/train", "--nfs", "10.9.0.9:/export"]
    stub_mount(sandbox, "mount.nfs")
    before = sandbox.snapshot()
    planned = sandbox.setup(*flags, "--dry-run")
    assert sandbox.snapshot() == before
    assert sandbox.calls("apt-get") == sandbox.calls("mount") == []
    assert planned.splitlines()[-1] == "node1: 6 changes to make, dry run: none made"

    output = sandbox.setup(*flags)
    changes = [line.removeprefix("change: ") for line in output.splitlines() if line.startswith("change: ")]
    expected = ["install nfs-common", "/etc/hosts:", "mount 10.9.0.9:/export on /mnt/shared", "/etc/fstab:"]
    assert changes == [*expected, "clone the repository into /opt/train", "run make setup in /opt/train"]
    planned_changes = [line for line in planned.splitlines() if "would: " in line]
    assert [line.removeprefix("would: ") for line in planned_changes] == changes
    assert output.splitlines()[-1] == "node1: 6 changes made"
    assert sandbox.at("/opt/train/.venv/installed").exists()

    before = sandbox.snapshot()
    for dry_run in ([], ["--dry_run"]):
        assert sandbox.setup(*flags, *dry_run).splitlines()[-1] == "node1: nothing to do"
        assert sandbox.snapshot() == before
    # The first call updates the package lists, and the second call installs
    assert len(sandbox.calls("apt-get")) == 2
    assert len(sandbox.calls("mount")) == 1


def test_only_what_is_missing_is_installed(sandbox):
    assert "ok: all packages are installed" in sandbox.setup()
    program = sandbox.at("/usr/bin/pdsh")
    content = program.read_bytes()
    program.unlink()
    assert sandbox.refused(*CLUSTER) == "error: apt-get update failed. See its output above"
    (sandbox.scratch / "pdsh").write_bytes(content)
    sandbox.stub("apt-get", f"[[ $* != *install* ]] || install {sandbox.folder}/pdsh /usr/bin/pdsh")
    assert "change: install pdsh" in sandbox.setup()
    _, update, install = sandbox.calls("apt-get")
    assert update.split()[0] == "update"
    assert install.split()[-2:] == ["--no-install-recommends", "pdsh"]
    assert "nothing to do" in sandbox.setup()


def test_hosts_are_written_as_one_block_without_loopback_names(sandbox):
    assert sandbox.do("getent", "ahostsv4", "node1").startswith("127.0.1.1")
    output = sandbox.setup(*CLUSTER)
    kept = HOSTS.replace("node1.lan node1 #", "node1.lan #")
    assert sandbox.read("/etc/hosts") == kept + BLOCK
    assert "    -127.0.1.1 node1.lan node1 # as installed\n" in output
    assert "    +10.9.0.2 node2\n" in output
    assert sandbox.do("getent", "ahostsv4", "node1").startswith("10.9.0.1")

    sandbox.at("/etc/hosts").write_text(kept + BLOCK + "192.168.7.8 scanner\n")
    sandbox.setup("--host", "node1=10.9.0.1", "--host=node3=10.9.0.3")
    changed = BLOCK.replace("10.9.0.2 node2", "10.9.0.3 node3")
    assert sandbox.read("/etc/hosts") == kept + changed + "192.168.7.8 scanner\n"
    assert "nothing to do" in sandbox.setup()  # setup_node.sh without --host keeps the block in /etc/hosts
    assert sandbox.read("/etc/hosts") == kept + changed + "192.168.7.8 scanner\n"


def test_a_loopback_line_without_another_name_is_removed(sandbox):
    sandbox.at("/etc/hosts").write_text("127.0.0.1 localhost\n127.0.1.1 node1\n")
    sandbox.at("/etc/hosts").chmod(0o640)
    sandbox.at("/etc/cloud").mkdir(exist_ok=True)
    sandbox.at("/etc/cloud/cloud.cfg").write_text("manage_etc_hosts: true\n")
    # cloud-init would otherwise overwrite /etc/hosts.
    assert "manage_etc_hosts: false" in sandbox.setup(*CLUSTER)
    assert sandbox.read("/etc/hosts") == "127.0.0.1 localhost\n" + BLOCK
    assert sandbox.at("/etc/hosts").stat().st_mode & 0o777 == 0o640


def test_warns_about_misleading_lines(sandbox):
    other = "--host node1=10.9.0.7 is this host"
    twice = "/etc/hosts contains another line for a host of the block"
    for hosts, flags, warning in [
        (HOSTS, [], "this host's own name, node1, is 127.0.1.1 here"),
        (HOSTS, ["--host", "node2=10.9.0.2"], "no --host has this host's name, node1"),
        (HOSTS, ["--host", "node1=10.9.0.7"], f"{other}, but this host does not have this address"),
        (HOSTS + "10.1.1.1 old node2\n", CLUSTER, f"{twice}: 10.1.1.1 old node2"),
    ]:
        sandbox.at("/etc/hosts").write_text(hosts)
        output = sandbox.setup(*flags)
        assert f"warning: {warning}" in output
        assert " warning" in output.splitlines()[-1]


def test_an_etc_hosts_that_cannot_be_written_is_refused(sandbox):
    sandbox.at("/etc/hosts").write_text(BLOCK.splitlines(keepends=True)[0] + HOSTS)
    # An incomplete block in /etc/hosts is an error
    assert "has only one of the lines" in sandbox.refused(*CLUSTER)
    sandbox.at("/etc/hosts").write_text(HOSTS)
    sandbox.do("mount", "-o", "remount,ro", "/etc")
    error = sandbox.refused(*CLUSTER)
    assert error.startswith("error: line ")
    assert "mktemp" in error


def test_a_repository_is_updated_by_fast_forward(sandbox, origin):
    flags = ["--repo", origin]
    sandbox.setup(*flags)
    sandbox.at("/opt/train/notes.txt").write_text("not in git\n")
    stamp = sandbox.at("/opt/train/.venv/installed").stat().st_mtime_ns
    new = push(sandbox, "train.py", "print('new')\n")
    output = sandbox.setup(*flags, "--dry-run")
    assert f"to {new} of main" in output
    assert not sandbox.at("/opt/train/train.py").exists()
    output = sandbox.setup(*flags)
    assert sandbox.read("/opt/train/train.py") == "print('new')\n"
    assert sandbox.read("/opt/train/notes.txt") == "not in git\n"
    # The second run does not repeat the installation.
    assert sandbox.at("/opt/train/.venv/installed").stat().st_mtime_ns == stamp
    assert f"ok: /opt/train is at {new} of main" in sandbox.setup(*flags)
    push(sandbox, "requirements.txt", "torch\nnumpy\n")
    assert "change: run make setup" in sandbox.setup(*flags)
    assert sandbox.at("/opt/train/.venv/installed").stat().st_mtime_ns > stamp


def test_local_work_is_never_lost(sandbox, origin):
    flags = ["--repo", origin]
    sandbox.setup(*flags)
    sandbox.at("/opt/train/Makefile").write_text(MAKEFILE + "# mine\n")
    assert "has local changes (Makefile)" in sandbox.refused(*flags)
    commit(sandbox, "/opt/train", "mine")
    assert "has commits that --repo lacks" in sandbox.refused(*flags)
    push(sandbox, "train.py", "theirs\n")
    error = sandbox.setup(*flags, status=1).splitlines()[-1]
    assert error == "error: /opt/train and --repo have diverged. Rebase and push"
    assert sandbox.read("/opt/train/Makefile") == MAKEFILE + "# mine\n"


def test_no_other_file_or_repository_is_overwritten(sandbox, origin):
    sandbox.setup("--repo", origin)
    sandbox.at("/opt/train/train.py").write_text("mine\n")
    push(sandbox, "train.py", "theirs\n")
    error = sandbox.setup("--repo", origin, status=1).splitlines()[-1]
    assert "untracked working tree files would be overwritten" in error
    assert sandbox.read("/opt/train/train.py") == "mine\n"
    assert "is not a clone of --repo" in sandbox.refused("--repo", "/opt/other.git")
    sandbox.at("/opt/full").mkdir()
    sandbox.at("/opt/full/thesis.txt").write_text("mine\n")
    assert "is not a git repository" in sandbox.refused("--repo", origin, "--path", "/opt/full")
    flags = ["--repo", "/opt/nowhere.git", "--path", "/opt/new"]
    error = sandbox.setup(*flags, status=1).splitlines()[-1]
    assert error.startswith("error: fatal: repository '/opt/nowhere.git' does not exist")


def test_a_failed_setup_is_retried(sandbox, origin):
    push(sandbox, "Makefile", MAKEFILE.replace("\ttouch $@", "\tfalse"))
    output = sandbox.setup("--repo", origin, status=1)
    assert output.splitlines()[-1] == "error: make setup in /opt/train failed. See its output above"
    push(sandbox, "Makefile", MAKEFILE)
    assert "node1: 2 changes made" in sandbox.setup("--repo", origin)


def test_the_repository_belongs_to_the_user_who_trains(sandbox, origin):
    sandbox.do("chown", "-R", "nobody", "/opt/origin.git")
    flags = ["--repo", origin, "--user", "nobody"]
    assert "made by nobody" in sandbox.setup(*flags)
    owners = {path.stat().st_uid for path in sandbox.at("/opt/train").rglob("*")}
    assert owners == {sandbox.at("/opt/origin.git").stat().st_uid}
    assert "nothing to do" in sandbox.setup(*flags)


def secret(sandbox: Sandbox, text: str, mode: int = 0o600) -> str:
    sandbox.at("/etc/secret").write_text(text)
    sandbox.at("/etc/secret").chmod(mode)
    return "/etc/secret"


def test_a_windows_share(sandbox):
    stub_mount(sandbox, "mount.cifs")
    file = secret(sandbox, "username=me\npassword=hunter2\n")
    flags = ["--cifs", "//10.9.0.9/data", "--cifs_credentials", file, "--mount", "/mnt/data"]
    flags += ["--user", "nobody"]
    output = sandbox.setup(*flags)
    nobody = pwd.getpwnam("nobody")
    options = f"credentials={file},uid={nobody.pw_uid},gid={nobody.pw_gid},_netdev,nofail"
    line = f"//10.9.0.9/data /mnt/data cifs {options} 0 0\n"
    assert sandbox.read("/etc/fstab") == "# as installed\nUUID=1 / ext4 defaults 0 1\n" + line
    assert sandbox.calls("mount") == [f"-t cifs -o {options} //10.9.0.9/data /mnt/data"]
    assert "hunter2" not in output + sandbox.read("/etc/fstab")
    assert "nothing to do" in sandbox.setup(*flags)
    assert sandbox.read("/etc/fstab").count("/mnt/data") == 1
    sandbox.do("umount", "/mnt/data")  # Simulates a mount that failed at boot
    assert "node1: 1 change made" in sandbox.setup(*flags)
    line = sandbox.refused("--nfs", "10.9.0.9:/export", "--mount", "/mnt/data")
    assert "/etc/fstab mounts something else on /mnt/data" in line


@pytest.mark.parametrize(("has_file", "login"), [(True, "passwd_file=/etc/secret"), (False, "iam_role=auto")])
def test_a_bucket_as_a_folder(has_file, login, sandbox):
    stub_mount(sandbox, "s3fs")
    secrets = ["--s3_credentials", secret(sandbox, "AKIA123:hunter2\n")] if has_file else []
    flags = ["--s3_mount", "my-bucket:/images", "--mount_s3", "/mnt/s3", *secrets]
    assert "hunter2" not in sandbox.setup(*flags)
    line = f"my-bucket:/images /mnt/s3 fuse.s3fs {login},uid=0,gid=0,allow_other,_netdev,nofail 0 0"
    assert sandbox.read("/etc/fstab").splitlines()[2:] == [line]
    assert "nothing to do" in sandbox.setup(*flags)


def test_a_mount_that_fails_leaves_no_line(sandbox):
    stub_mount(sandbox, "mount.nfs")
    sandbox.stub("mount", "echo 'mount.nfs: access denied by server' >&2; exit 32")
    output = sandbox.setup("--nfs", "10.9.0.9:/export", status=1)
    error = "error: mounting 10.9.0.9:/export on /mnt/shared failed: mount.nfs: access"
    assert output.splitlines()[-1].startswith(error)
    assert "10.9.0.9" not in sandbox.read("/etc/fstab")


def test_secrets_that_others_could_read_are_refused(sandbox):
    stub_mount(sandbox, "mount.cifs")
    login = "username=me\npassword=hunter2\n"
    for text, mode, error in [
        (login, 0o644, "has mode 644. Run chmod 600 /etc/secret"),
        (login, 0o660, "has mode 660"),
        ("hunter2\n", 0o600, "does not contain a line username=..."),
    ]:
        flags = ["--cifs", "//10.9.0.9/data", "--cifs_credentials", secret(sandbox, text, mode)]
        line = sandbox.refused(*flags)
        assert error in line
        assert "hunter2" not in line


def test_a_dry_run_shows_its_plan_without_credentials(sandbox):
    before = sandbox.snapshot()
    flags = ["--cifs", "//10.9.0.9/data", "--cifs_credentials", "/root/.none", "--dry-run"]
    planned = sandbox.setup(*flags)
    assert "warning: --cifs_credentials /root/.none does not exist\n" in planned
    assert "would: mount //10.9.0.9/data on /mnt/shared\n" in planned
    assert sandbox.snapshot() == before
    assert "does not exist" in sandbox.refused(*flags[:-1])


def test_a_wrong_flag_changes_nothing(sandbox):
    for flags, error in rows_of("setup_node.sh wrong flags"):
        line = sandbox.refused(*flags.split(), status=2)
        assert error in line, flags
        assert "hunter2" not in line


def test_a_gpu_without_a_driver_is_not_ready(sandbox):
    assert "ok: no NVIDIA GPU. This host can run rehearsals on the CPU" in sandbox.setup()
    device = sandbox.at("/sys/bus/pci/devices/0000:00:1e.0")
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x030200\n")
    output = sandbox.setup(*CLUSTER, status=1)
    assert "ubuntu-drivers install" in output
    assert "change: /etc/hosts" in output  # All changes are made, although the host is not ready
    assert output.splitlines()[-1].endswith("NOT READY: this host has an NVIDIA GPU, but no working driver")
    assert sandbox.calls("apt-get") == []
    sandbox.stub("nvidia-smi", "printf 'NVIDIA L4, 580.95.05\\nNVIDIA L4, 580.95.05\\n'")
    assert "ok: 2 x NVIDIA L4, driver 580.95.05\n" in sandbox.setup()


def test_help_names_every_flag(sandbox):
    text = sandbox.setup("--help")
    flags = SCRIPT.read_text().partition("FLAGS=(")[2].partition("PACKAGES")[0]
    for flag in flags.replace("FLAGS+=(", "").replace(")", "").split():
        assert f"    {flag.replace('dry_run', 'dry-run')} " in text
