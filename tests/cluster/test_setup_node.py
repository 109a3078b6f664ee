"""cluster/setup_node.sh, run for real where it can break nothing: mounts, /etc and network of its own.

Real are git, make, /etc/hosts with getent, findmnt and ip. Not real are, where a test needs them, apt-get (it
fetches nothing), nvidia-smi (this machine may have no GPU) and mount (NFS, CIFS and S3 have no server here).
Only mount's call, the line in /etc/fstab and that it stays one line are tested. The mount itself is not.
"""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT

SCRIPT = ROOT / "cluster" / "setup_node.sh"
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
HOSTS = (
    "127.0.0.1 localhost\n127.0.1.1 node1.lan node1 # as installed\n::1 localhost\n\n192.168.7.7 printer\n"
)
CLUSTER = ["--host", "node1=10.9.0.1", "--host", "node2=10.9.0.2"]
BLOCK = """\
# BEGIN hosts of the training cluster (setup_node.sh)
10.9.0.1 node1
10.9.0.2 node2
# END hosts of the training cluster
"""
# What is written goes to a tmpfs: over /etc as an overlay, at /opt and /mnt instead of what is there.
INIT = """
set -e
world=$1
mount -t tmpfs tmpfs $world
mkdir $world/etc $world/work $world/opt $world/mnt $world/bin $world/usr $world/usr_work
mount -t overlay overlay -o lowerdir=/etc,upperdir=$world/etc,workdir=$world/work /etc
mount -t overlay overlay -o lowerdir=/usr/bin,upperdir=$world/usr,workdir=$world/usr_work /usr/bin
mount --bind $world/opt /opt
mount --bind $world/mnt /mnt
mount -t tmpfs tmpfs /sys
hostname node1
ip link set lo up
ip address add 10.9.0.1/24 dev lo
: > $world/ready
exec cat
"""
MAKEFILE = """\
.PHONY: setup
setup: .venv/installed
.venv/installed: requirements.txt
\tmkdir -p .venv
\techo made by $$(id -un)
\ttouch $@
"""


class World:
    """A machine of its own as far as setup_node.sh can see. `files` is its root."""

    def __init__(self, folder: Path):
        words = ["unshare", "--mount", "--uts", "--net", "bash", "-c", INIT, "init", folder]
        folder.mkdir()
        self.folder = folder
        self.init = subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.files = Path(f"/proc/{self.init.pid}/root")
        deadline = time.monotonic() + 20
        while not (self.files / str(folder)[1:] / "ready").exists():
            assert self.init.poll() is None, self.init.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        # Nothing that a test does may reach this machine's own files.
        for name in ("etc", "opt", "mnt", "usr/bin", "sys"):
            assert (self.files / name).stat().st_dev != Path("/", name).stat().st_dev
        self.at("/etc/hosts").write_text(HOSTS)
        self.at("/etc/fstab").write_text(
            "# as installed\nUUID=1 / ext4 defaults 0 1"
        )  # no newline at its end
        self.stub("nvidia-smi", "exit 9")  # as without a driver
        self.stub("apt-get", "exit 1")

    def end(self) -> None:
        self.init.stdin.close()
        self.init.wait(10)
        self.init.stderr.close()

    def at(self, path: str) -> Path:
        return self.files / path[1:]

    def read(self, path: str) -> str:
        return self.at(path).read_text()

    def stub(self, name: str, script: str) -> None:
        """A command in the place of the real one. Its calls are in self.calls()."""
        file = self.at(str(self.folder)) / "bin" / name
        file.write_text(f'#!/bin/bash\necho "{name} $*" >> {self.folder}/calls\n{script}\n')
        file.chmod(0o755)

    def calls(self, name: str) -> list[str]:
        file = self.at(str(self.folder)) / "calls"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line.removeprefix(f"{name} ") for line in lines if line.split()[0] == name]

    def do(self, *words) -> str:
        status, output = self._run(words)
        assert status == 0, output
        return output

    def setup(self, *flags, status: int = 0) -> str:
        """What the script says, which must end so."""
        ended, output = self._run([SCRIPT, *flags])
        assert ended == status, output
        return output

    def refused(self, *flags, status: int = 1) -> str:
        """Its one line of why, after which nothing is changed."""
        before = self.snapshot()
        error = self.setup(*flags, status=status).splitlines()
        assert self.snapshot() == before
        assert [line.startswith("error: ") for line in error].count(True) == 1, error
        assert error[-1].startswith("error: ")
        return error[-1]

    def snapshot(self) -> dict[str, tuple]:
        """Of all that the script could change: mode, owner and content of each file."""
        found = {}
        for top in ("etc", "opt", "mnt"):
            folder = self.at(str(self.folder)) / top
            for path in [folder, *folder.rglob("*")]:
                about = path.lstat()
                content = path.read_bytes() if path.is_file() and not path.is_symlink() else None
                found[str(path)] = (about.st_mode, about.st_uid, about.st_mtime_ns, content)
        return found

    def _run(self, words) -> tuple[int, str]:
        target = ["nsenter", "--target", str(self.init.pid), "--mount", "--uts", "--net"]
        env = {"PATH": f"{self.folder}/bin:{PATH}", "HOME": str(self.folder), "LC_ALL": "C"}
        done = subprocess.run(
            [*target, *map(str, words)], env=env, text=True, timeout=60,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        return done.returncode, done.stdout


@pytest.fixture
def world(tmp_path):
    needs = ("unshare", "make", "git", "gcc", "ssh", "sshd", "ip", "pdsh", "findmnt")
    missing = [name for name in needs if not shutil.which(name, path=PATH)]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and {', '.join(missing) or 'nothing else'}")
    world = World(tmp_path / "world")
    try:
        yield world
    finally:
        world.end()


@pytest.fixture
def origin(world) -> str:
    """A repository to clone, and /opt/mine, a clone from which a test pushes to it."""
    world.do("git", "init", "--quiet", "--bare", "--initial-branch=main", "/opt/origin.git")
    world.do("git", "clone", "--quiet", "/opt/origin.git", "/opt/mine")
    world.do("git", "-C", "/opt/mine", "switch", "--quiet", "--orphan", "main")
    world.at("/opt/mine/Makefile").write_text(MAKEFILE)
    world.at("/opt/mine/.gitignore").write_text(".venv/\n")
    push(world, "requirements.txt", "torch\n")
    return "/opt/origin.git"


def push(world: World, name: str, text: str) -> str:
    """Commits a file; the new commit, short."""
    world.at(f"/opt/mine/{name}").write_text(text)
    commit(world, "/opt/mine", name)
    world.do("git", "-C", "/opt/mine", "push", "--quiet", "origin", "main")
    return world.do("git", "-C", "/opt/mine", "rev-parse", "HEAD")[:10]


def commit(world: World, folder: str, message: str) -> None:
    world.do("git", "-C", folder, "add", ".")
    me = ("-c", "user.name=me", "-c", "user.email=me@example.com")
    world.do("git", "-C", folder, *me, "commit", "--quiet", "-m", message)


def serve(world: World, *programs: str) -> None:
    """apt-get that brings these programs, and a mount that lists the source as mounted, of a tmpfs."""
    brings = "; ".join(f"install -m 755 /dev/null {world.folder}/bin/{program}" for program in programs)
    world.stub("apt-get", f"[[ $* != *install* ]] || {{ {brings}; }}")
    real = shutil.which("mount")
    # mount -t TYPE -o OPTIONS SOURCE FOLDER; what s3fs mounts is listed as s3fs
    world.stub("mount", f'[ "$2" = fuse.s3fs ] && what=s3fs || what=$5; {real} -t tmpfs "$what" "$6"')


def test_a_dry_run_changes_nothing_and_a_second_run_neither(world, origin):
    flags = [*CLUSTER, "--repo", origin, "--path", "/opt/train", "--nfs", "10.9.0.9:/export"]
    serve(world, "mount.nfs")
    before = world.snapshot()
    planned = world.setup(*flags, "--dry-run")
    assert world.snapshot() == before
    assert world.calls("apt-get") == world.calls("mount") == []
    assert planned.splitlines()[-1] == "node1: 6 changes to make, dry run: none made"

    made = world.setup(*flags)
    changes = [line for line in made.splitlines() if line.startswith("change: ")]
    assert changes == [
        "change: install nfs-common",
        "change: /etc/hosts:",
        "change: mount 10.9.0.9:/export on /mnt/shared",
        "change: /etc/fstab:",
        "change: clone the repository into /opt/train",
        "change: make setup in /opt/train",
    ]
    assert [
        line.replace("would: ", "change: ") for line in planned.splitlines() if "would: " in line
    ] == changes
    assert made.splitlines()[-1] == "node1: 6 changes made"
    assert world.at("/opt/train/.venv/installed").exists()

    before = world.snapshot()
    for dry_run in ([], ["--dry_run"]):
        assert world.setup(*flags, *dry_run).splitlines()[-1] == "node1: nothing to do"
        assert world.snapshot() == before
    assert len(world.calls("apt-get")) == 2  # update, install
    assert len(world.calls("mount")) == 1


def test_packages_that_are_there_are_left_alone(world):
    assert "ok: packages: all are there" in world.setup()
    assert world.calls("apt-get") == []


def test_only_what_is_missing_is_installed(world):
    program = world.at("/usr/bin/pdsh")
    content = program.read_bytes()
    program.unlink()
    (world.at(str(world.folder)) / "pdsh").write_bytes(content)
    world.stub("apt-get", f"[[ $* != *install* ]] || install {world.folder}/pdsh /usr/bin/pdsh")
    assert "change: install pdsh" in world.setup()
    update, install = world.calls("apt-get")
    assert update.split()[0] == "update"
    assert install.split()[-2:] == ["--no-install-recommends", "pdsh"]
    assert "nothing to do" in world.setup()


def test_a_failed_installation_ends_it(world):
    world.at("/usr/bin/pdsh").unlink()
    assert world.refused(*CLUSTER) == "error: apt-get update failed, see above"


def test_the_hosts_are_one_block_and_no_name_is_loopback(world):
    assert world.do("getent", "ahostsv4", "node1").startswith("127.0.1.1")
    output = world.setup(*CLUSTER)
    kept = HOSTS.replace("node1.lan node1 #", "node1.lan #")
    assert world.read("/etc/hosts") == kept + BLOCK
    assert "    -127.0.1.1 node1.lan node1 # as installed\n" in output
    assert "    +10.9.0.2 node2\n" in output
    assert world.do("getent", "ahostsv4", "node1").startswith("10.9.0.1")

    world.at("/etc/hosts").write_text(kept + BLOCK + "192.168.7.8 scanner\n")
    world.setup("--host", "node1=10.9.0.1", "--host=node3=10.9.0.3")
    changed = BLOCK.replace("10.9.0.2 node2", "10.9.0.3 node3")
    assert world.read("/etc/hosts") == kept + changed + "192.168.7.8 scanner\n"
    assert "nothing to do" in world.setup()  # without --host it stays
    assert world.read("/etc/hosts") == kept + changed + "192.168.7.8 scanner\n"


def test_a_loopback_line_with_no_other_name_goes(world):
    world.at("/etc/hosts").write_text("127.0.0.1 localhost\n127.0.1.1 node1\n")
    world.at("/etc/hosts").chmod(0o640)
    world.setup(*CLUSTER)
    assert world.read("/etc/hosts") == "127.0.0.1 localhost\n" + BLOCK
    assert world.at("/etc/hosts").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    ("hosts", "flags", "warning"),
    [
        (HOSTS, [], "this host's own name, node1, is 127.0.1.1 here"),
        (HOSTS, ["--host", "node2=10.9.0.2"], "no --host has this host's name, node1"),
        (
            HOSTS,
            ["--host", "node1=10.9.0.7"],
            "--host node1=10.9.0.7 is this host, but it has no such address",
        ),
        (HOSTS + "10.1.1.1 old node2\n", CLUSTER, "another line for a host of the block: 10.1.1.1 old node2"),
    ],
)
def test_what_will_mislead_is_warned_of(hosts, flags, warning, world):
    world.at("/etc/hosts").write_text(hosts)
    output = world.setup(*flags)
    assert f"warning: {warning}" in output or f"warning: /etc/hosts has {warning}" in output
    assert " warning" in output.splitlines()[-1]


def test_cloud_init_would_write_the_hosts_anew(world):
    world.at("/etc/cloud").mkdir(exist_ok=True)
    world.at("/etc/cloud/cloud.cfg").write_text("manage_etc_hosts: true\n")
    assert "manage_etc_hosts: false" in world.setup(*CLUSTER)


def test_half_a_block_is_not_guessed_at(world):
    world.at("/etc/hosts").write_text(BLOCK.splitlines(keepends=True)[0] + HOSTS)
    assert "has only one of the lines" in world.refused(*CLUSTER)


def test_no_failure_is_silent(world):
    world.do("mount", "-o", "remount,ro", "/etc")
    error = world.refused(*CLUSTER)
    assert error.startswith("error: line ")
    assert "mktemp" in error


def test_a_repository_follows_by_fast_forward(world, origin):
    flags = ["--repo", origin]
    world.setup(*flags)
    world.at("/opt/train/notes.txt").write_text("not in git\n")
    stamp = world.at("/opt/train/.venv/installed").stat().st_mtime_ns
    new = push(world, "train.py", "print('new')\n")
    output = world.setup(*flags, "--dry-run")
    assert f"to {new} of main" in output
    assert not world.at("/opt/train/train.py").exists()
    output = world.setup(*flags)
    assert world.read("/opt/train/train.py") == "print('new')\n"
    assert world.read("/opt/train/notes.txt") == "not in git\n"
    assert world.at("/opt/train/.venv/installed").stat().st_mtime_ns == stamp  # nothing new to install
    assert f"ok: /opt/train is at {new} of main" in world.setup(*flags)
    push(world, "requirements.txt", "torch\nnumpy\n")
    assert "change: make setup" in world.setup(*flags)
    assert world.at("/opt/train/.venv/installed").stat().st_mtime_ns > stamp


def test_local_work_is_never_lost(world, origin):
    flags = ["--repo", origin]
    world.setup(*flags)
    world.at("/opt/train/Makefile").write_text(MAKEFILE + "# mine\n")
    assert "has local changes, which are left alone (Makefile)" in world.refused(*flags)
    commit(world, "/opt/train", "mine")
    assert "has commits that --repo has not" in world.refused(*flags)
    push(world, "train.py", "theirs\n")
    error = world.setup(*flags, status=1).splitlines()[-1]
    assert error == "error: /opt/train and --repo have each commits that the other has not: rebase and push"
    assert world.read("/opt/train/Makefile") == MAKEFILE + "# mine\n"


def test_a_file_that_git_does_not_know_is_not_overwritten(world, origin):
    world.setup("--repo", origin)
    world.at("/opt/train/train.py").write_text("mine\n")
    push(world, "train.py", "theirs\n")
    error = world.setup("--repo", origin, status=1).splitlines()[-1]
    assert "untracked working tree files would be overwritten" in error
    assert world.read("/opt/train/train.py") == "mine\n"


def test_another_repository_is_left_alone(world, origin):
    world.setup("--repo", origin)
    assert "clone of another repository" in world.refused("--repo", "/opt/other.git")
    world.at("/opt/full").mkdir()
    world.at("/opt/full/thesis.txt").write_text("mine\n")
    assert "is no git repository" in world.refused("--repo", origin, "--path", "/opt/full")


def test_gits_reason_is_the_error(world):
    error = world.setup("--repo", "/opt/nowhere.git", status=1).splitlines()[-1]
    assert error.startswith("error: fatal: repository '/opt/nowhere.git' does not exist")


def test_a_failed_setup_is_tried_again(world, origin):
    push(world, "Makefile", MAKEFILE.replace("\ttouch $@", "\tfalse"))
    output = world.setup("--repo", origin, status=1)
    assert output.splitlines()[-1] == "error: make setup in /opt/train failed, see above"
    push(world, "Makefile", MAKEFILE)
    assert "node1: 2 changes made" in world.setup("--repo", origin)


def test_a_python_that_is_too_old_is_said_before_pip_fails(world, origin):
    world.stub("python3", "[[ $* != *version_info* ]]")  # has venv, but not the version
    error = world.setup("--repo", origin, status=1).splitlines()[-1]
    assert error == "error: python3 is older than 3.11: take Debian 12 or Ubuntu 24.04, or set PYTHON"
    assert not world.at("/opt/train/.venv").exists()


def test_the_repository_belongs_to_who_trains(world, origin):
    world.do("chown", "-R", "nobody", "/opt/origin.git")
    flags = ["--repo", origin, "--user", "nobody"]
    assert "made by nobody" in world.setup(*flags)
    owners = {path.stat().st_uid for path in world.at("/opt/train").rglob("*")}
    assert owners == {world.at("/opt/origin.git").stat().st_uid}
    assert "nothing to do" in world.setup(*flags)


def secret(world: World, text: str, mode: int = 0o600) -> str:
    world.at("/etc/secret").write_text(text)
    world.at("/etc/secret").chmod(mode)
    return "/etc/secret"


def test_a_share_of_windows(world):
    serve(world, "mount.cifs")
    file = secret(world, "username=me\npassword=hunter2\n")
    flags = ["--cifs", "//10.9.0.9/data", "--cifs_credentials", file, "--mount", "/mnt/data"]
    flags += ["--user", "nobody"]
    output = world.setup(*flags)
    ids = f"uid={world.do('id', '-u', 'nobody').strip()},gid={world.do('id', '-g', 'nobody').strip()}"
    options = f"credentials={file},{ids},_netdev,nofail"
    line = f"//10.9.0.9/data /mnt/data cifs {options} 0 0\n"
    assert world.read("/etc/fstab") == "# as installed\nUUID=1 / ext4 defaults 0 1\n" + line
    assert world.calls("mount") == [f"-t cifs -o {options} //10.9.0.9/data /mnt/data"]
    assert "hunter2" not in output + world.read("/etc/fstab")
    assert "nothing to do" in world.setup(*flags)
    assert world.read("/etc/fstab").count("/mnt/data") == 1
    world.do("umount", "/mnt/data")  # as after a failed start
    assert "node1: 1 change made" in world.setup(*flags)
    assert "/etc/fstab mounts something else on /mnt/data" in world.refused(
        "--nfs", "10.9.0.9:/export", "--mount", "/mnt/data"
    )


@pytest.mark.parametrize(("file", "who"), [(True, "passwd_file=/etc/secret"), (False, "iam_role=auto")])
def test_a_bucket_as_a_folder(file, who, world):
    serve(world, "s3fs")
    secrets = ["--s3_credentials", secret(world, "AKIA123:hunter2\n")] if file else []
    flags = ["--s3_mount", "my-bucket:/images", "--mount_s3", "/mnt/s3", *secrets]
    assert "hunter2" not in world.setup(*flags)
    line = f"my-bucket:/images /mnt/s3 fuse.s3fs {who},uid=0,gid=0,allow_other,_netdev,nofail 0 0"
    assert world.read("/etc/fstab").splitlines()[2:] == [line]
    assert "nothing to do" in world.setup(*flags)


def test_a_mount_that_fails_leaves_no_line(world):
    serve(world, "mount.nfs")
    world.stub("mount", "echo 'mount.nfs: access denied by server' >&2; exit 32")
    output = world.setup("--nfs", "10.9.0.9:/export", status=1)
    assert output.splitlines()[-1].startswith(
        "error: mounting 10.9.0.9:/export on /mnt/shared: mount.nfs: access"
    )
    assert "10.9.0.9" not in world.read("/etc/fstab")


@pytest.mark.parametrize(
    ("text", "mode", "error"),
    [
        ("username=me\npassword=hunter2\n", 0o644, "its mode is 644: chmod 600 /etc/secret"),
        ("username=me\npassword=hunter2\n", 0o660, "its mode is 660"),
        ("hunter2\n", 0o600, "has no line username=..."),
    ],
)
def test_secrets_that_others_could_read_are_refused(text, mode, error, world):
    serve(world, "mount.cifs")
    flags = ["--cifs", "//10.9.0.9/data", "--cifs_credentials", secret(world, text, mode)]
    said = world.refused(*flags)
    assert error in said
    assert "hunter2" not in said


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--hots", "a=10.0.0.1"], "unknown flag --hots: did you mean --host?"),
        (["--cifs-credential=x"], "unknown flag --cifs_credential: did you mean --cifs_credentials?"),
        (["node1"], "node1 is no flag"),
        (["--repo"], "--repo needs a value"),
        (["--repo", "--dry-run"], "--repo needs a value"),
        (["--user", "nobody", "--user", "root"], "--user is given twice"),
        (["--user", "nobody-here"], "there is no such user"),
        (["--repo", "https://me:hunter2@example.com/x.git"], "--repo holds a password or token"),
        (["--repo", "https://ghp_hunter2@example.com/x.git"], "--repo holds a password or token"),
        (["--path", "/opt/train"], "--path needs --repo"),
        (["--repo", "/opt/x.git", "--path", "train"], "--path train: a path from / on"),
        (["--host", "node1"], "give NAME=ADDRESS"),
        (["--host", "-oProxyCommand=10.0.0.1"], "give NAME=ADDRESS"),
        (["--host", "a=10.0.0.256"], "10.0.0.256 is no IP address"),
        (["--host", "a=127.0.1.1"], "loopback address"),
        (["--host", "a=10.0.0.1", "--host", "a=10.0.0.2"], "--host a is given twice"),
        (["--nfs", "server"], "give SERVER:/EXPORT"),
        (["--nfs", "a:/b", "--cifs", "//a/b"], "--nfs and --cifs: give one of them"),
        (["--cifs", "//a/b"], "--cifs needs --cifs_credentials FILE"),
        (["--mount", "/mnt/x"], "--mount needs --nfs or --cifs"),
        (["--mount_s3", "/mnt/x"], "need --s3_mount"),
        (["--nfs", "a:/b", "--s3_mount", "bucket", "--mount_s3", "/mnt/shared"], "the same folder"),
    ],
)
def test_a_wrong_flag_changes_nothing(flags, error, world):
    said = world.refused(*flags, status=2)
    assert error in said
    assert "hunter2" not in said


def gpu(world: World) -> None:
    device = world.at("/sys/bus/pci/devices/0000:00:1e.0")
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x030200\n")


def test_a_gpu_without_a_driver_is_not_ready(world):
    assert "ok: no NVIDIA GPU: this is a host for rehearsals on the CPU" in world.setup()
    gpu(world)
    output = world.setup(*CLUSTER, status=1)
    assert "ubuntu-drivers install" in output
    assert "change: /etc/hosts" in output  # all else is done
    assert output.splitlines()[-1].endswith("NOT READY: there is an NVIDIA GPU, but no driver that works")
    assert world.calls("apt-get") == []


def test_gpus_are_shown_with_their_driver(world):
    gpu(world)
    world.stub("nvidia-smi", "printf 'NVIDIA L4, 580.95.05\\nNVIDIA L4, 580.95.05\\n'")
    assert "ok: 2 x NVIDIA L4, driver 580.95.05\n" in world.setup()


def test_help_names_every_flag(world):
    text = world.setup("--help")
    flags = SCRIPT.read_text().partition("FLAGS=(")[2].partition("PACKAGES")[0]
    for flag in flags.replace("FLAGS+=(", "").replace(")", "").split():
        assert f"    {flag.replace('dry_run', 'dry-run')} " in text
