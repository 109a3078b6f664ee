"""Several virtual hosts on one Linux machine, to rehearse launches and faults: real sshd and interfaces.

    python cluster/virtual_cluster.py up --hosts 2 --rate 1gbit --delay 2ms
    python cluster/virtual_cluster.py run python launch.py --hostfile /etc/hostfile train_hello.py
    python cluster/virtual_cluster.py run --host node2 bash
    python cluster/virtual_cluster.py cut node2
    python cluster/virtual_cluster.py heal node2
    python cluster/virtual_cluster.py kill node2
    python cluster/virtual_cluster.py revive node2
    python cluster/virtual_cluster.py down
    python cluster/virtual_cluster.py drill -- python launch.py --hostfile /etc/hostfile train_hello.py

Each host (node1, node2, ...) is a set of Linux namespaces: it has its own name, interface eth0 (10.77.0.1,
10.77.0.2, ...), processes, /dev/shm and /etc/hosts, and an sshd that accepts one key, made by `up`.
`ssh node2` works on each of them. This machine's cores are divided among the hosts; where there are more
hosts than cores, several use one. They share its memory, GPUs and files. --private FOLDER gives each host its
own copy of that folder, as if it were not shared. VIRTUAL_CLUSTER=NAME in the environment makes another
cluster beside the usual one.

Nothing of this machine is changed: the hosts are on a switch in its own namespace, without a route out.
`down` kills all their processes and removes everything. It needs root, and Debian's iproute2, nftables and
openssh-server.
"""

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from cluster import virtual_hosts as hosts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="\n".join(__doc__.splitlines()[1:]), allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("up", help="start the hosts")
    verb.add_argument("--hosts", type=int, default=2)
    verb.add_argument("--slots", type=int, default=2, help="per host, for /etc/hostfile on each host")
    verb.add_argument("--rate", help="limit on each host's outgoing rate, as 1gbit")
    verb.add_argument("--delay", help="delay of each outgoing packet, as 2ms")
    verb.add_argument("--loss", type=float, default=0, help="percent of incoming packets that are dropped")
    verb.add_argument("--private", type=Path, action="append", default=[], metavar="FOLDER")
    verb = verbs.add_parser("run", help="run a command on a host, in this folder")
    verb.add_argument("--host", default="node1")
    verb.add_argument("command", nargs=argparse.REMAINDER)
    for name, action in ACTIONS.items():
        verb = verbs.add_parser(name, help=action.__doc__.partition("\n")[0])
        verb.add_argument("host")
    verbs.add_parser("down", help="kill and remove everything")
    verb = verbs.add_parser("drill", help="run a command with faults, and show what each costs")
    verb.add_argument("--hosts", type=int, default=3, help="of the training; an extra one runs the command")
    verb.add_argument("--slots", type=int, default=1)
    verb.add_argument("--faults", help="only these, as kill-rank,cut-cable")
    verb.add_argument("--folder", type=Path, default=Path("runs/drill"), help="for the runs")
    verb.add_argument("command", nargs=argparse.REMAINDER)
    flags = parser.parse_args()
    try:
        if os.geteuid() != 0:
            raise ValueError("hosts are namespaces: this needs root")
        sys.exit(act(flags))
    except ValueError as error:
        sys.exit(f"error: {error}")


def act(flags: argparse.Namespace) -> int:
    if flags.verb == "up":
        hosts.up(flags.hosts, flags.slots, flags.private)
        for name in hosts.names():
            hosts.shape(name, flags.rate, flags.delay)
            hosts.lose(name, flags.loss)
        print(f"{', '.join(hosts.names())} are up; python {sys.argv[0]} run --host node1 COMMAND")
    elif flags.verb == "run":
        words = hosts.inside(flags.host, flags.command or ["bash"])
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command
        return subprocess.run(words).returncode
    elif flags.verb == "down":
        hosts.down()
    elif flags.verb == "drill":
        from cluster import drill

        return drill.main(flags)
    else:
        ACTIONS[flags.verb](flags.host)
    return 0


# Verbs that take a host
ACTIONS = {"cut": hosts.cut, "heal": hosts.heal, "kill": hosts.kill, "revive": hosts.revive}


if __name__ == "__main__":
    main()
