"""Run virtual hosts with sshd and network interfaces on one Linux machine, to rehearse launches and faults.

    python cluster/virtual_cluster.py up --hosts 2 --rate 1gbit --delay 2ms
    python cluster/virtual_cluster.py run python launch.py --hostfile /etc/hostfile train_hello.py
    python cluster/virtual_cluster.py run --host node2 bash
    python cluster/virtual_cluster.py cut node2
    python cluster/virtual_cluster.py heal node2
    python cluster/virtual_cluster.py kill node2
    python cluster/virtual_cluster.py revive node2
    python cluster/virtual_cluster.py down
    python cluster/virtual_cluster.py drill -- python launch.py --hostfile /etc/hostfile train_hello.py

Each virtual host (node1, node2, ...) is a set of Linux namespaces with a separate host name, network
interface eth0 (10.77.0.1, 10.77.0.2, ...), process tree, /dev/shm and /etc/hosts. `ssh node2` works on every
host, because the sshd on each host accepts a key that `up` creates. This machine's cores are divided among
the hosts. If there are more hosts than cores, several hosts share a core. All hosts share this machine's
memory, GPUs and files. The flag --private FOLDER creates a separate copy of a folder for each host. The
environment variable VIRTUAL_CLUSTER=NAME selects a second cluster that is independent of the default cluster.

The command does not change the machine itself. The hosts are connected to a switch in a separate namespace,
without a route to other networks. `down` kills all processes on the hosts and removes the cluster. The
command requires root permissions and the Debian packages iproute2, nftables and openssh-server.
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
    verb = verbs.add_parser("up", help="start the virtual hosts")
    verb.add_argument(
        "--hosts", type=int, default=2, metavar="N", help="number of virtual hosts (default: 2)"
    )
    verb.add_argument(
        "--slots",
        type=int,
        default=2,
        metavar="N",
        help="number of slots per host in /etc/hostfile (default: 2)",
    )
    verb.add_argument(
        "--rate", metavar="RATE", help="limit on each host's outgoing data rate, for example 1gbit"
    )
    verb.add_argument("--delay", metavar="TIME", help="delay added to each outgoing packet, for example 2ms")
    verb.add_argument(
        "--loss", type=float, default=0, metavar="PERCENT", help="percentage of incoming packets to drop"
    )
    verb.add_argument(
        "--private",
        type=Path,
        action="append",
        default=[],
        metavar="FOLDER",
        help="folder to copy for each host (repeatable)",
    )
    verb = verbs.add_parser(
        "run",
        help="run a command on a host, in the current working folder",
        usage="%(prog)s [--host HOST] [COMMAND ...]",
    )
    verb.add_argument(
        "--host", default="node1", metavar="HOST", help="host that runs the command (default: node1)"
    )
    verb.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="COMMAND", help="command to run (default: bash)"
    )
    for name, action in ACTIONS.items():
        summary = (action.__doc__ or "").partition("\n")[0].rstrip(".")
        verb = verbs.add_parser(name, help=summary[:1].lower() + summary[1:])
        verb.add_argument("host", metavar="HOST")
    verbs.add_parser("down", help="kill and remove all virtual hosts")
    verb = verbs.add_parser(
        "drill",
        help="run a training command, cause faults, and print the cost of each fault",
        usage="%(prog)s [flags] -- COMMAND ...",
    )
    verb.add_argument(
        "--hosts",
        type=int,
        default=3,
        metavar="N",
        help="number of hosts that train (default: 3). An additional host runs the command",
    )
    verb.add_argument(
        "--slots", type=int, default=1, metavar="N", help="number of slots per host (default: 1)"
    )
    verb.add_argument(
        "--faults",
        metavar="NAME,...",
        help="names of the faults to cause, for example kill-rank,cut-cable (default: all)",
    )
    verb.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/drill"),
        metavar="PATH",
        help="output folder for the runs (default: runs/drill)",
    )
    verb.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="training command")
    flags = parser.parse_args()
    try:
        if os.geteuid() != 0:
            raise ValueError(
                "virtual hosts are Linux namespaces, which require root. Run this command as root."
            )
        sys.exit(act(flags))
    except ValueError as error:
        sys.exit(f"error: {error}")


def act(flags: argparse.Namespace) -> int:
    if flags.verb == "up":
        hosts.up(flags.hosts, flags.slots, flags.private)
        for name in hosts.names():
            hosts.shape(name, flags.rate, flags.delay)
            hosts.lose(name, flags.loss)
        print(f"The virtual hosts {', '.join(hosts.names())} are running.")
        print(f"Run a command on a host with: python {sys.argv[0]} run --host node1 COMMAND")
    elif flags.verb == "run":
        words = hosts.inside(flags.host, flags.command or ["bash"])
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C stops only the command and not this process
        return subprocess.run(words).returncode
    elif flags.verb == "down":
        hosts.down()
    elif flags.verb == "drill":
        from cluster import drill

        return drill.main(flags)
    else:
        ACTIONS[flags.verb](flags.host)
    return 0


# Subcommands whose argument is the name of a host
ACTIONS = {"cut": hosts.cut, "heal": hosts.heal, "kill": hosts.kill, "revive": hosts.revive}


if __name__ == "__main__":
    main()
