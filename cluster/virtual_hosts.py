"""Start virtual hosts on one Linux machine, run commands on the hosts, and cause faults.

cluster/virtual_cluster.py describes the hosts. cluster/drill.py causes faults while a job trains on them.
"""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

CLUSTER = os.environ.get("VIRTUAL_CLUSTER", "vc")
STATE = Path("/run/virtual_cluster") / CLUSTER
SWITCH = f"{CLUSTER}-switch"
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
NEEDS = {"ip": "iproute2", "tc": "iproute2", "nft": "nftables", "sshd": "openssh-server"}
NEEDS |= dict.fromkeys(("unshare", "taskset"), "util-linux")
SSHD_CONFIG = """\
HostKey /etc/ssh/ssh_host_key
AuthorizedKeysFile /etc/ssh/user.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
StrictModes no
PidFile none
MaxStartups 100
Subsystem sftp internal-sftp
"""
SSH_CONFIG = "IdentityFile /etc/ssh/user\nGlobalKnownHostsFile /etc/ssh/ssh_known_hosts\n"
# Script of a host's first process. $1 is the host's folder. When the first process ends, the kernel kills all
# other processes of the host.
INIT = """
set -e
folder=$1
mount --make-rprivate /
hostname "$(cat $folder/name)"
ip link set lo up
mount -t tmpfs tmpfs /dev/shm
mount --bind $folder/ssh /etc/ssh
for name in hosts hostname hostfile; do
    [ -e /etc/$name ] || touch /etc/$name
    mount --bind $folder/$name /etc/$name
done
mkdir -p /run/sshd ~/.ssh
mount -t tmpfs -o mode=700 tmpfs ~/.ssh
while read -r private; do
    own=$folder/private$private
    mkdir -p $own/changes $own/work
    mount -t overlay overlay -o lowerdir=$private,upperdir=$own/changes,workdir=$own/work $private
done < $folder/private_folders
touch $folder/up
while true; do
    [ -e $folder/no_sshd ] || /usr/sbin/sshd -D -e 2> $folder/sshd.log || true
    sleep 0.2
done
"""


def up(hosts: int, slots: int = 2, private: Sequence[Path] = (), spare: int = 0) -> None:
    """Start the hosts.

    Args:
        hosts: Number of hosts.
        slots: Slots per host in the hostfile.
        private: Folders to copy for each host, so that the hosts do not share them.
        spare: Number of hosts at the end that are not in the hostfile.
    """
    if STATE.exists():
        raise ValueError(f"a virtual cluster is already running ({STATE}). Remove it with `down`.")
    if missing := [program for program in NEEDS if not shutil.which(program, path=PATH)]:
        packages = " ".join(sorted({NEEDS[program] for program in missing}))
        raise ValueError(f"missing programs: {', '.join(missing)}. Run apt-get install {packages}.")
    if not 1 <= hosts <= 250:
        raise ValueError(f"--hosts {hosts}: must be from 1 to 250")
    STATE.mkdir(parents=True, mode=0o700)
    try:
        _make(hosts, slots, [folder.resolve() for folder in private], spare)
    except BaseException:
        down()
        raise


def down() -> None:
    """Kill all processes on all hosts, and remove the hosts' namespaces and files."""
    for name in names():
        with contextlib.suppress(ValueError):
            kill(name)
    for namespace in [SWITCH, *(_namespace(name) for name in names())]:
        subprocess.run(["ip", "netns", "del", namespace], capture_output=True)
    shutil.rmtree(STATE, ignore_errors=True)


def names() -> list[str]:
    return sorted((folder.name for folder in STATE.glob("node*")), key=lambda name: int(name[4:]))


def inside(host: str, command: list[str], folder: Path | None = None) -> list[str]:
    """Return the command line that runs a command on a host, in `folder` or in the working folder."""
    init = _init(host)
    target = [*_on_its_cores(host), "nsenter", f"--target={init}", "-m", "-u", "-i", "-n", "-p"]
    # nsenter's --wd would enter this machine's folder instead of the host's --private copy.
    words = shlex.join(["env", "--default-signal=INT", *map(str, command)])
    return [*target, "sh", "-c", f"cd {shlex.quote(str(folder or Path.cwd()))} && exec {words}"]


def cut(host: str) -> None:
    """Disconnect a host's network. The host's processes continue."""
    _init(host)
    _ip(SWITCH, "link set", f"to-{host}", "down")


def heal(host: str) -> None:
    """Reconnect a host's network after a cut."""
    _init(host)
    _ip(SWITCH, "link set", f"to-{host}", "up")
    for name in names():  # otherwise, old failed lookups of the address would cause "No route to host"
        _ip(_namespace(name), "neigh flush all")


def shape(host: str, rate: str | None = None, delay: str | None = None) -> None:
    """Limit a host's outgoing rate and add a delay, in tc's units (`1gbit`, `2ms`). None removes a limit."""
    _init(host)
    tc = ["tc", "-n", _namespace(host), "qdisc"]
    subprocess.run([*tc, "del", "dev", "eth0", "root"], capture_output=True)
    if delay:
        try:
            _run(*tc, *f"add dev eth0 root netem delay {delay} {f'rate {rate}' if rate else ''}".split())
        except ValueError as error:
            raise ValueError(f"--delay needs the kernel module sch_netem ({error})") from None
    elif rate:
        _run(*tc, *f"add dev eth0 root tbf rate {rate} burst 256kb latency 50ms".split())


def lose(host: str, percent: float) -> None:
    """Drop a random share of the packets to a host. This works without netem, which some kernels lack."""
    rules = "table inet lossy\ndelete table inet lossy\n"
    if percent:
        chance = f"numgen random mod 10000 < {round(percent * 100)}"
        rules += "table inet lossy {\n chain arriving {\n  type filter hook prerouting priority 0\n"
        rules += f'  iifname "eth0" {chance} drop\n }}\n}}\n'
    _run(*inside(host, ["nft", "-f", "-"]), text=rules)


def processes(host: str) -> set[int]:
    """Return this machine's pids of all processes of a host except the first process."""
    init = _init(host)
    namespace = os.readlink(f"/proc/{init}/ns/pid")
    pids = set()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # if the process has just ended
            if os.readlink(path / "ns" / "pid") == namespace and int(path.name) != init:
                pids.add(int(path.name))
    return pids


def stop_sshd(host: str) -> None:
    """Stop a host's sshd. Open connections stay open."""
    (STATE / host / "no_sshd").touch()
    for process in processes(host):
        with contextlib.suppress(OSError):  # if a connection's process has just ended
            if "[listener]" in Path(f"/proc/{process}/cmdline").read_text():
                os.kill(process, signal.SIGTERM)


def start_sshd(host: str) -> None:
    (STATE / host / "no_sshd").unlink()
    _wait_for_sshd(host)


def kill(host: str) -> None:
    """Kill all processes of a host at once, like a power failure."""
    init = _init(host)
    os.kill(init, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{init}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def revive(host: str) -> None:
    """Restart a host after a kill, with the same address and --private files."""
    if host not in names():
        raise ValueError(f"there is no host {host}. Hosts: {', '.join(names()) or 'none'}.")
    if _is_up(host):
        raise ValueError(f"{host} is already up")
    (STATE / host / "up").unlink()
    _wait_for(host, _start(host))


def _make(hosts: int, slots: int, private: list[Path], spare: int) -> None:
    _keygen(STATE / "user")
    addresses = {f"node{n}": f"10.77.0.{n}" for n in range(1, hosts + 1)}
    _run("ip", "netns", "add", SWITCH)
    _ip(SWITCH, "link add br0 type bridge")
    _ip(SWITCH, "link set br0 up")
    for name in addresses:
        (STATE / name).mkdir()
        _keygen(STATE / name / "host_key")
    shares = max(1, hosts - spare)
    for number, (name, address) in enumerate(addresses.items()):
        _write_files(name, addresses, slots, private, spare)
        (STATE / name / "cores").write_text(_share_of_cores(number % shares, shares))
        _plug_in(name, address)
    for name, process in [(name, _start(name)) for name in addresses]:
        _wait_for(name, process)


def _share_of_cores(number: int, shares: int) -> str:
    """Return a host's share of the cores that this process may use, in taskset's format."""
    cores = sorted(os.sched_getaffinity(0))
    return ",".join(map(str, cores[number % len(cores) :: shares]))


def _write_files(name: str, addresses: dict[str, str], slots: int, private: list[Path], spare: int) -> None:
    folder = STATE / name
    (folder / "ssh").mkdir()
    known = (f"{n},{a} {(STATE / n / 'host_key.pub').read_text()}" for n, a in addresses.items())
    files = {
        "name": name,
        "hostname": name + "\n",
        # A host's name resolves to a loopback address on the host, as Debian's installer configures it.
        "hosts": f"127.0.0.1 localhost\n127.0.1.1 {name}\n"
        + "".join(f"{address} {other}\n" for other, address in addresses.items() if other != name),
        "hostfile": "".join(
            f"{other} slots={slots}\n" for other in list(addresses)[: len(addresses) - spare]
        ),
        "private_folders": "".join(f"{folder}\n" for folder in private),
        "ssh/sshd_config": SSHD_CONFIG,
        "ssh/ssh_config": SSH_CONFIG,
        "ssh/ssh_known_hosts": "".join(known),
    }
    for file, text in files.items():
        (folder / file).write_text(text)
    for key in ("", ".pub"):
        shutil.copy(folder / f"host_key{key}", folder / "ssh" / f"ssh_host_key{key}")
        shutil.copy(STATE / f"user{key}", folder / "ssh" / f"user{key}")


def _plug_in(name: str, address: str) -> None:
    namespace = _namespace(name)
    _run("ip", "netns", "add", namespace)
    _ip(SWITCH, "link add", f"to-{name}", "type veth peer name eth0 netns", namespace)
    _ip(SWITCH, "link set", f"to-{name}", "master br0 up")
    _ip(namespace, "address add", f"{address}/24", "dev eth0")
    _ip(namespace, "link set eth0 up")


def _on_its_cores(host: str) -> list[str]:
    """Return the prefix that restricts a command, and its number of threads, to the host's cores.

    A step of a small ViT on 4 hosts and 2 cores takes 0.07 s with this prefix, and 1.5 s without the prefix.
    """
    return ["taskset", "--cpu-list", (STATE / host / "cores").read_text()]


def _start(name: str) -> subprocess.Popen:
    words = [*_on_its_cores(name), "nsenter", f"--net=/run/netns/{_namespace(name)}", "unshare"]
    words += ["--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
    words += ["bash", "-c", INIT, "init", str(STATE / name)]
    with open(STATE / name / "init.log", "w") as log, open(os.devnull) as nothing:
        process = subprocess.Popen(words, stdin=nothing, stdout=log, stderr=log, start_new_session=True)
    (STATE / name / "outer_pid").write_text(str(process.pid))
    return process


def _wait_for(name: str, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 20
    while not (STATE / name / "up").exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise ValueError(f"{name} did not start: {(STATE / name / 'init.log').read_text().strip()}")
        time.sleep(0.02)
    _wait_for_sshd(name)


def _wait_for_sshd(host: str) -> None:
    probe = inside(host, ["bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/22 && head -c 4 <&3"])
    deadline = time.monotonic() + 20
    while subprocess.run(probe, capture_output=True).stdout != b"SSH-":
        if time.monotonic() > deadline:
            raise ValueError(f"sshd on {host} does not answer: {(STATE / host / 'sshd.log').read_text()}")
        time.sleep(0.05)


def _init(host: str) -> int:
    """Return this machine's pid of a host's first process."""
    if not _is_up(host):
        running = ", ".join(filter(_is_up, names()))
        remedy = f"Running hosts: {running}." if running else "No host runs. Start hosts with `up`."
        raise ValueError(f"{host} is not up. {remedy}")
    return _first_child(host)


def _is_up(host: str) -> bool:
    """Return True if the recorded pid still belongs to the host's first process, because pids are reused."""
    try:
        network = os.stat(f"/run/netns/{_namespace(host)}").st_ino
        return os.stat(f"/proc/{_first_child(host)}/ns/net").st_ino == network
    except (OSError, IndexError, ValueError):
        return False


def _first_child(host: str) -> int:
    outer = (STATE / host / "outer_pid").read_text()
    return int(Path(f"/proc/{outer}/task/{outer}/children").read_text().split()[0])


def _namespace(name: str) -> str:
    return f"{CLUSTER}-{name}"


def _keygen(path: Path) -> None:
    _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", path.parent.name, "-f", str(path))


def _ip(namespace: str, *words: str) -> None:
    _run("ip", "-n", namespace, *" ".join(words).split())


def _run(*words: str, text: str | None = None) -> None:
    done = subprocess.run(words, input=text, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{shlex.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
