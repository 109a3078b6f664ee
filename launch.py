"""Starts a job on all hosts of a hostfile, over ssh, and ends it on all of them.

    python launch.py --hostfile hostfile --config_file accelerate_configs/ddp_2x2gpu.yaml train_cnn_a.py
    python launch.py --hostfile hostfile --exclude worker-2 train_vit.py --epochs 5
    python launch.py --mode single-node --gpus 2
    python launch.py --mode multi-node --gpus-per-node 2 --master-node worker-1 --worker-nodes worker-2

Each host runs one `accelerate launch`, with its rank, the address of the first host and the interface to it.
The project and its Python must be at the same path on each, and ssh must work without a question. Without a
script it is train_hello.py; what follows the script, or is no flag of the launcher, are the script's flags.

What a host prints stands behind its name, and in a file of its own. When one fails, all are stopped, and what
failed first is said. Ctrl-C, SIGTERM or SIGHUP: every process saves a checkpoint and ends, and the same
command continues (exit status 75); Ctrl-C twice ends all at once.
"""

import argparse
import contextlib
import difflib
import json
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from common.hosts.agent import BEAT_S, HELLO, SUSPENDED
from common.hosts.hostfile import NAME, Host, read_hostfile, select
from common.hosts.ssh import SSH_FAILED, let_go, master_address, start
from common.system.cli import run_command
from common.system.env import PREEMPTED
from common.system.files import read_accelerate_config, write_text
from common.system.paths import ROOT
from common.system.processes import is_under_nohup

CONNECT_S = 30  # for all hosts to answer
END_S = 60  # from `stop` until a host that still has not ended is given up
TRACEBACK = "Traceback (most recent call last):"
LAUNCHERS_OWN = ("subprocess.CalledProcessError", "torch.distributed.elastic.")  # exceptions
LINES = 200  # of a host's output that are kept to say what failed
COLOURS = (36, 33, 35, 32, 34, 96, 93, 95)
# What DeepSpeed's launcher may pass on to other hosts: nothing that is secret.
DEEPSPEED_ENV = (
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
    "WANDB_MODE",
    "WANDB_PROJECT",
)


def main() -> int:
    flags = parse(sys.argv[1:])
    sys.stdout.reconfigure(errors="replace")  # what ranks print must not end the job
    return write_deepspeed_env() if flags.write_deepspeed_env else Crew(plan(flags)).run(flags.dry_run)


# --- What is to be started


@dataclass(frozen=True)
class Job:
    hosts: list[Host]
    launcher: list[str]  # flags of accelerate launch
    script: list[str]  # and its flags
    env: dict[str, str]  # for each process, over stdin: no command line shows it
    master_addr: str | None
    port: int
    log_dir: Path

    @property
    def processes(self) -> int:
        return sum(len(host.devices) for host in self.hosts)

    def words(self, rank: int, address: str | None) -> list[str]:
        """What host number `rank` runs. address: of the first host, which a job on one host does not need."""
        place = ["--num_machines", str(len(self.hosts)), "--num_processes", str(self.processes)]
        if len(self.hosts) > 1:
            place += ["--machine_rank", str(rank), "--main_process_ip", str(address)]
            place += ["--main_process_port", str(self.port)]
        return [sys.executable, "-m", "accelerate.commands.launch", *self.launcher, *place, *self.script]


def parse(argv: list[str]) -> argparse.Namespace:
    """The launcher's flags, and as `script` the script with its own."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], epilog=__doc__.partition("\n\n")[2], allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter, usage="%(prog)s [flags] [SCRIPT [its flags]]",
    )  # fmt: skip
    parser.add_argument("--hostfile", type=Path, help="`name slots=N` lines (default: hostfile)")
    parser.add_argument("--include", default="", help="as DeepSpeed's: worker-1@worker-2:0,2")
    parser.add_argument("--exclude", default="", help="the same, for what is left out")
    parser.add_argument("--config_file", help="one of accelerate_configs/; DDP by default")
    parser.add_argument("--mode", choices=("single-node", "multi-node"), help="instead of a hostfile")
    parser.add_argument("--gpus", type=int, help="of this machine, with --mode single-node")
    parser.add_argument("--gpus_per_node", type=int, help="with --mode multi-node")
    parser.add_argument("--master_node", help="the first host, with --mode multi-node")
    parser.add_argument("--worker_nodes", help="the others, as a,b,c, with --mode multi-node")
    parser.add_argument("--port", type=int, default=29500, help="on the first host (default: %(default)s)")
    parser.add_argument("--master_addr", help="of the first host; by default as ssh reaches it")
    parser.add_argument("--env", action="append", default=[], metavar="NAME", help="pass this variable on")
    parser.add_argument("--log_dir", type=Path, help="of a file for each host (default: runs/launch/<time>)")
    parser.add_argument("--dry_run", action="store_true", help="show the command of each host, and end")
    parser.add_argument(
        "--write_deepspeed_env",
        action="store_true",
        help="write .deepspeed_env for the deepspeed launcher, and end",
    )
    at = next((k for k, word in enumerate(argv) if word.endswith(".py")), None)
    mine = [_underscores(word) for word in argv[:at]]
    flags, rest = parser.parse_known_args(mine)
    if at is not None and rest:
        near = difflib.get_close_matches(rest[0], parser._option_string_actions, n=1)
        parser.error(f"unknown flag {rest[0]}" + (f": did you mean {near[0]}?" if near else ""))
    flags.script = argv[at:] if at is not None else ["train_hello.py", *rest]
    return flags


def plan(flags: argparse.Namespace) -> Job:
    """ValueError for what can be seen to be wrong before a host is asked."""
    hosts = _hosts(flags)
    counts = {len(host.devices) for host in hosts}
    if len(counts) > 1:
        counts = ", ".join(f"{host.name} {len(host.devices)}" for host in hosts)
        raise ValueError(f"accelerate starts as many processes on each host; here they differ: {counts}")
    if not 1 <= flags.port <= 65535:
        raise ValueError(f"--port {flags.port}: from 1 to 65535")
    config = flags.config_file or _default_config(hosts)
    for file in (config, flags.script[0]):
        if not (ROOT / file).is_file():
            raise ValueError(f"{file}: no such file")
    if missing := [name.partition("=")[0] for name in flags.env if name not in os.environ]:
        raise ValueError(f"--env {missing[0]}: give the name of a variable of this environment, not a value")
    env = {name: os.environ[name] for name in flags.env}
    log_dir = flags.log_dir or ROOT / "runs" / "launch" / time.strftime("%Y-%m-%d_%H-%M-%S")
    launcher = ["--config_file", str(config), *_for_several(ROOT / config, hosts)]
    return Job(hosts, launcher, flags.script, env, flags.master_addr, flags.port, log_dir)


def _hosts(flags: argparse.Namespace) -> list[Host]:
    for_mode = {
        "single-node": ("gpus",),
        "multi-node": ("gpus_per_node", "master_node", "worker_nodes"),
        None: ("hostfile", "include", "exclude"),
    }
    for mode, names in for_mode.items():
        if mode != flags.mode and (given := [name for name in names if getattr(flags, name)]):
            needed = f"needs --mode {mode}" if mode else f"does not go with --mode {flags.mode}"
            raise ValueError(f"--{given[0]} {needed}")
    for name in ("gpus", "gpus_per_node"):
        if (getattr(flags, name) or 1) < 1:
            raise ValueError(f"--{name} {getattr(flags, name)}: at least 1")
    if flags.mode == "single-node":
        return [Host("localhost", tuple(range(flags.gpus or 1)))]
    if flags.mode == "multi-node":
        if not (flags.master_node and flags.worker_nodes and flags.gpus_per_node):
            raise ValueError("--mode multi-node needs --master-node, --worker-nodes and --gpus-per-node")
        names = [flags.master_node, *flags.worker_nodes.split(",")]
        if wrong := [name for name in names if not NAME.fullmatch(name)]:
            raise ValueError(f"{wrong[0]!r} is no host's name")
        if len(set(names)) < len(names):
            raise ValueError(f"--master-node and --worker-nodes name a host twice: {', '.join(names)}")
        return [Host(name, tuple(range(flags.gpus_per_node))) for name in names]
    return select(read_hostfile(flags.hostfile or ROOT / "hostfile"), flags.include, flags.exclude)


def _default_config(hosts: list[Host]) -> str:
    alone = len(hosts) == 1 and len(hosts[0].devices) == 1
    return f"accelerate_configs/{'single_gpu' if alone else 'ddp_2gpu'}.yaml"


def _for_several(config: Path, hosts: list[Host]) -> list[str]:
    """What a config needs beside its own keys. Hybrid sharding is inside of each host, be it two or ten.
    DeepSpeed's other launchers would write the whole environment into a file, and onto command lines.
    """
    content = read_accelerate_config(config)
    if content.get("distributed_type") == "DEEPSPEED" and len(hosts) > 1:
        return ["--deepspeed_multinode_launcher", "standard"]
    if "parallelism_config" not in content:
        return []
    prefix = "--parallelism_config_dp"
    return [f"{prefix}_replicate_size", str(len(hosts)), f"{prefix}_shard_size", str(len(hosts[0].devices))]


def _underscores(word: str) -> str:
    """--dry-run is --dry_run."""
    name, equals, value = word.partition("=")
    return name.replace("-", "_").replace("__", "--", 1) + equals + value if word.startswith("--") else word


def write_deepspeed_env() -> int:
    """What of this environment the other hosts need, and no more: DeepSpeed puts it on command lines.

    Lines of other names stay; blank ones, on which DeepSpeed's reader fails, do not.
    """
    file = Path(".deepspeed_env")
    lines = file.read_text().splitlines() if file.exists() else []
    kept = [line for line in lines if line.strip() and line.partition("=")[0] not in DEEPSPEED_ENV]
    ours = [f"{name}={os.environ[name]}" for name in DEEPSPEED_ENV if os.environ.get(name)]
    write_text(file, "".join(f"{line}\n" for line in [*kept, *ours]))
    print(f"{file}: {', '.join(line.partition('=')[0] for line in ours) or 'nothing of this environment'}")
    if kept:
        print(
            f"kept as they were, look whether they are secret: {', '.join(k.partition('=')[0] for k in kept)}"
        )
    return 0


# --- The hosts at work


@dataclass
class Member:
    """One host of the job."""

    host: Host
    process: subprocess.Popen
    log_file: Path
    log: IO[str] | None = None
    hello: dict[str, Any] | None = None
    status: int | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    said: list[str] = field(default_factory=list)  # its last lines
    silent: bool = False  # what comes now is its launcher's traceback: for the log alone

    def hear(self, line: str) -> None:
        self.said = [*self.said[-LINES:], line]
        with contextlib.suppress(OSError):  # a full disk here is no reason to end the job there
            if self.log is None:
                self.log_file.parent.mkdir(parents=True, exist_ok=True)
                self.log = open(self.log_file, "w", buffering=1, encoding="utf-8")  # noqa: SIM115
            self.log.write(line + "\n")

    def visible(self) -> dict[str, str]:
        """For a host of which not all devices take part, or not the first."""
        devices = self.host.devices
        every = devices == tuple(range(len(devices)))
        return {} if every else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))}

    def tell(self, line: str) -> None:
        with self.lock, contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()


class Crew:
    def __init__(self, job: Job):
        self.job = job
        self.events: queue.SimpleQueue[tuple] = queue.SimpleQueue()
        self.signals: list[int] = []  # that this launcher got
        self.failed: list[Member] = []  # in the order in which they ended
        self.stopped: float | None = None  # when all were told to stop

    def run(self, dry_run: bool) -> int:
        """The exit status: 0, 75 after a preemption, 1, or as after a signal."""
        hangup = (
            () if is_under_nohup() else (signal.SIGHUP,)
        )  # a terminal that is closed, an ssh that is lost
        for number in (signal.SIGINT, signal.SIGTERM, *hangup):
            signal.signal(number, lambda number, _: self.events.put(("signal", None, number)))
        began = time.monotonic()
        self.members = [self._connect(host) for host in self.job.hosts]
        threading.Thread(target=self._beat, daemon=True).start()
        try:
            if self._meet():
                hellos = [member.hello for member in self.members]
                found = master_address([h["address"] for h in hellos], [h["client"] for h in hellos])
                address = self.job.master_addr or found
                self._show(address, dry_run)
                if dry_run:
                    return 0
                self._start(address)
                self._say(f"started after {time.monotonic() - began:.2f} s, logs in {self.job.log_dir}")
                while any(member.status is None for member in self.members):
                    self._next_event()
            return self._status()
        finally:
            let_go([member.process for member in self.members], END_S)
            for member in self.members:
                if member.log:
                    member.log.close()

    def _connect(self, host: Host) -> Member:
        process = start(host.name, [sys.executable, "-m", "common.hosts.agent"], ROOT)
        member = Member(host, process, self.job.log_dir / f"{host.name}.log")
        threading.Thread(target=self._listen, args=(member,), daemon=True).start()
        return member

    def _listen(self, member: Member) -> None:
        for line in member.process.stdout:
            self.events.put(("line", member, line.rstrip("\n")))
        self.events.put(("end", member, member.process.wait()))

    def _beat(self) -> None:
        """Signs of life, also while a terminal that is stopped holds up what is shown."""
        while True:
            self._tell_all("")
            time.sleep(BEAT_S)

    def _meet(self) -> bool:
        """Whether all hosts answer, before anything is started on any."""
        deadline = time.monotonic() + CONNECT_S
        while silent := [member for member in self.members if member.hello is None]:
            if time.monotonic() > deadline:
                silent[0].said.append(f"no answer within {CONNECT_S} s")
                self.failed.append(silent[0])
            if self.failed or self.signals:
                return False
            self._next_event()
        return True

    def _start(self, address: str) -> None:
        for rank, member in enumerate(self.members):
            env = member.visible() | self.job.env
            master = (address, self.job.port) if len(self.members) > 1 else None
            part = {"words": self.job.words(rank, address), "env": env, "master": master, "first": rank == 0}
            member.tell(json.dumps(part))

    def _next_event(self) -> None:
        if self.stopped and time.monotonic() - self.stopped > END_S:
            for member in self.members:
                if member.status is None:  # can't be reached; its agent ends there by itself
                    member.process.kill()
                    self._ended(member, SSH_FAILED)
        with contextlib.suppress(queue.Empty):
            kind, member, what = self.events.get(timeout=0.5)
            {"line": self._hear, "end": self._ended, "signal": self._told}[kind](member, what)

    def _hear(self, member: Member, line: str) -> None:
        if member.hello is None and line.startswith(HELLO):
            member.hello = json.loads(line.removeprefix(HELLO))
            return
        member.hear(line)
        if line == TRACEBACK:
            return  # shown before the next line, unless that says it is the launcher's
        if member.said[-2:-1] == [TRACEBACK]:
            member.silent = member.silent or "<frozen runpy>" in line  # `python -m`
            self._show_line(member, TRACEBACK)
        self._show_line(member, line)

    def _show_line(self, member: Member, line: str) -> None:
        if not member.silent or line.startswith("error: "):
            self._say(f"{self._label(member)} | {line}")

    def _ended(self, member: Member, status: int) -> None:
        if member.status is not None:
            return
        member.status = status
        if status != 0:
            self.failed.append(member)
            self._stop_all()

    def _told(self, _: None, number: int) -> None:
        if self.signals:
            self._tell_all("kill")
        else:
            self._stop_all()
            self._say("stopping: every process saves and ends; once more ends all at once")
        self.signals.append(number)

    def _stop_all(self) -> None:
        self.stopped = self.stopped or time.monotonic()
        self._tell_all("stop")

    def _tell_all(self, word: str) -> None:
        for member in self.members:
            if member.status is None:
                member.tell(word)

    # --- What is shown

    def _say(self, text: str) -> None:
        """Where nobody reads any more (`| tee` ends at Ctrl-C, too) the job goes on, and its logs."""
        try:
            print(text, flush=True)
        except OSError:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115

    def _label(self, member: Member) -> str:
        name = f"{member.host.name:{max(len(host.name) for host in self.job.hosts)}}"
        if not sys.stdout.isatty() or "NO_COLOR" in os.environ:
            return name
        return f"\033[{COLOURS[self.members.index(member) % len(COLOURS)]}m{name}\033[0m"

    def _show(self, address: str, commands: bool) -> None:
        """The hosts and their ranks; commands: and what would start each host's part by hand."""
        first = 0
        for rank, member in enumerate(self.members):
            count = len(member.host.devices)
            ranks = f"rank {first}" if count == 1 else f"ranks {first}-{first + count - 1}"
            first += count
            devices = ",".join(map(str, member.host.devices))
            master = f"  master {address}:{self.job.port}" if rank == 0 and len(self.members) > 1 else ""
            at = member.hello["address"] or (address if rank == 0 else "this host")
            self._say(f"{self._label(member)}  {at}  {ranks}  devices {devices}{master}")
            if commands:
                visible = [f"{name}={value}" for name, value in member.visible().items()]
                self._say(f"    {shlex.join([*visible, *self.job.words(rank, address)])}")

    def _status(self) -> int:
        if not self.failed and all(member.status == 0 for member in self.members):
            return 0
        saved = [member for member in self.failed if member.status == PREEMPTED]
        if saved and (self.signals or self.failed[0] in saved):  # who fails later was stopped
            self._say(f"preempted: the same command continues (exit status {PREEMPTED})")
            return PREEMPTED
        if self.signals:
            return 128 + self.signals[0]
        first = min(self.failed, key=lambda member: _cause(member)[0])
        others = "; the other hosts were stopped" if len(self.members) > 1 and first.hello else ""
        what = f"{first.host.name}: {_cause(first)[1]}{others}"
        print(f"error: {what}. Its log: {first.log_file}", file=sys.stderr)
        return 1


def _cause(member: Member) -> tuple[int, str]:
    """Why this host's part ended; before it, how likely that follows from another's end (0: least)."""
    last = next((line for line in reversed(member.said) if line.strip("=- ")), f"exit status {member.status}")
    if member.hello is None:
        return 0, f"{last} (`ssh {member.host.name}` must work without a question, the project be at {ROOT})"
    if member.status == SSH_FAILED:
        return 0, f"the connection is lost ({last})"
    text = "\n".join(member.said)
    if suspended := re.search(rf"^error: (.* {re.escape(SUSPENDED)})$", text, re.MULTILINE):
        return 1, suspended[1]
    # As torchrun reports it; survivors are ended by 15, and by 6 when NCCL notices.
    if killed := re.search(r"exitcode *: *-(?!15\b|6\b)(\d+)", text):
        return 1, f"a process was killed by signal {killed[1]}"
    if errors := re.findall(r"^(?:\S+: )?error: (.*)", text, re.MULTILINE):
        return 2, errors[0]
    raised = re.findall(r"^(?:\[\w+\]: ?)?(\w[\w.]*(?:Error|Exception): .*)", text, re.MULTILINE)
    if raised := [line for line in raised if not line.startswith(LAUNCHERS_OWN)] or raised:
        return 3, raised[-1]
    return 4, last


if __name__ == "__main__":
    sys.exit(run_command(main))
