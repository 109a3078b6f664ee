"""Tests that launch.py starts, stops and cleans up hosts with a real sshd, and reports failures."""

import contextlib
import json
import re
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import psutil
import pytest
import timm

import launch
from cluster import virtual_hosts as hosts
from cluster.drill import ranks_on
from onecurve.system.gpus import GpuInventory
from tests.conftest import (
    ROOT,
    TRAINING,
    Job,
    assert_same_losses,
    full,
    per_device,
    result,
    rows_of,
    run,
    wait_until,
)
from tests.support.commands import call

HELLO = ["train_hello.py", "--trackers", "none", "--mixed_precision", "no"]
LONG = [*HELLO, "--epochs", "100000", "--log_every", "64", "--checkpoint_every", "64", "--timeout_s", "30"]


def write_hostfile(tmp_path, slots: Sequence[int]) -> Path:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("".join(f"node{n} slots={count}\n" for n, count in enumerate(slots, 1)))
    return hostfile


def start(words: list, tmp_path, flags=(), env=None, slots: Sequence[int] = (1, 1)) -> Job:
    """Start launch.py on node1 with a hostfile that lists `slots` processes for the first hosts."""
    launcher = ["launch.py", "--hostfile", write_hostfile(tmp_path, slots), "--log_dir", tmp_path / "logs"]
    return Job(hosts.inside("node1", [sys.executable, *launcher, *flags, *words], ROOT), env=env)


def left(host: str) -> list[str]:
    """Return the command lines of all processes that run on a host, except sshd's."""
    pids = hosts.processes(host)
    commands = [" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"]) if p.pid in pids]
    return [line for line in commands if line and not line.startswith(("sshd", "/usr/sbin/sshd", "sleep "))]


def wait_until_empty(names, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while any(left(name) for name in names):
        assert time.monotonic() < deadline, {name: left(name) for name in names}
        time.sleep(0.2)


def launcher_of(job: Job) -> psutil.Process:
    """Return the job's launch.py process, which is a descendant of nsenter."""
    for process in psutil.Process(job.process.pid).children(recursive=True):
        if "launch.py" in process.cmdline()[:2]:
            return process
    raise AssertionError("no launch.py")


# Commands from docs/launching.md for two hosts with one GPU each, without their script, and a torchrun
# command with the c10d rendezvous
_, _, PAGE = (ROOT / "docs" / "launching.md").read_text().partition("## Hosts with one GPU each\n")
COMMANDS = PAGE.split("```")[3].splitlines()[1:]
COMMAND_OF = {line.split()[0]: line.removesuffix(" train_cnn_a.py") for line in COMMANDS}
C10D = "--rdzv_backend=c10d --rdzv_endpoint=node1:29500 --rdzv_id=1"
COMMAND_OF["c10d"] = f"torchrun --nnodes=2 --nproc_per_node=1 {C10D}"
OTHER_CONFIGS = [("fsdp_2x4gpu", (2, 2)), ("zero3_2x4gpu", (2, 2)), ("ddp_2x4gpu", (2,) * 4)]
OTHER_CONFIGS += [("zero2_4gpu", (1,) * 4), ("zero2_4gpu", (2, 1))]
OTHER_CONFIGS += [("fsdp_4gpu", (1, 2)), ("zero3_4gpu", (1, 2))]
SLOTS = ((1, 1), (2, 2), (1, 2))


@pytest.mark.full
@pytest.mark.parametrize(
    ("launcher", "config", "slots"),
    [
        *(("python", *row) for row in OTHER_CONFIGS),
        *((launcher, "ddp_2x2gpu", slots) for slots, launcher in product(SLOTS, COMMAND_OF)),
        ("c10d", "ddp_2x2gpu", (1,) * 4),
    ],
)
def test_hosts_train_as_one_process(launcher, config, slots, cluster, one_process, tmp_path, cache):
    """Run the command on all hosts, or on the first host if the command starts other hosts over SSH."""
    names, folder, size = hosts.names()[: len(slots)], tmp_path / "run", per_device(sum(slots))
    write_hostfile(tmp_path, slots)
    words = [*TRAINING, size, *cache, "--output_dir", folder]
    line = re.sub(
        "(nodes=|num_machines )2", rf"\g<1>{len(slots)}", COMMAND_OF[launcher].replace("ddp_2x2gpu", config)
    )
    line = line.replace("IP", "10.77.0.1").replace("--hostfile hostfile", f"--hostfile {tmp_path}/hostfile")
    line = line.replace("launch.py", f"launch.py --log_dir {tmp_path}/logs")
    jobs = []
    for rank, name in enumerate(names[:1] if "hostfile" in line else names):
        command = re.sub("(nproc_per_node=)1", rf"\g<1>{slots[rank]}", re.sub(r"\bR\b", str(rank), line))
        # accelerate divides num_processes evenly among the hosts.
        command = re.sub("(num_processes )2", rf"\g<1>{slots[rank] * len(slots)}", command)
        jobs.append(Job(hosts.inside(name, [*command.split(), *words], ROOT)))
    endings = [job.wait() for job in jobs]
    assert {status for status, _ in endings} == {0}, endings
    assert_same_losses(folder, one_process(size))
    facts, record = result(folder), json.loads((folder / "recipe.json").read_text())
    assert (facts["hosts"], facts["processes"], record["hosts"]) == (len(slots), sum(slots), names)
    wait_until_empty(hosts.names(), 5)
    if launcher == "python":
        assert "node1 | the run folder is" in endings[0][1]
        assert "run folder" in (tmp_path / "logs" / "node1.log").read_text()
        assert (tmp_path / "logs" / "node2.log").exists()


MODES = {
    "single-node": ["--gpus", "2"],
    "multi-node": ["--gpus-per-node", "1", "--master-node", "node1", "--worker-nodes", "node2"],
}


@pytest.mark.parametrize("mode", ["single-node", full("multi-node")])
def test_the_default_script(mode, request, tmp_path):
    """Check that launch.py passes the flags to train_hello.py if no script is named."""
    words = [sys.executable, "launch.py", "--mode", mode, *MODES[mode], "--log-dir", tmp_path / "logs"]
    words += ["--epochs", "2", "--batch-size", "128", "--learning-rate", "0.02", "--data-size", "1024"]
    words += ["--output_dir", tmp_path / "run"]
    if mode == "multi-node":
        request.getfixturevalue("cluster")
        words = hosts.inside("node1", words, ROOT)
    run(words)
    facts = result(tmp_path / "run")
    assert (facts["script"], facts["processes"]) == ("train_hello", 2)
    assert (facts["epochs"], facts["batch_size"], facts["steps"]) == (2, 128, 16)
    assert json.loads((tmp_path / "run" / "recipe.json").read_text())["recipe"]["lr"] == 0.02


FOREIGN = """  # in shape Accelerate's examples/complete_cv_example.py: own flags, logging and checkpoints
import argparse, logging, os, sys
import torch
from accelerate import Accelerator
parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", required=True)
parser.add_argument("--fault", default="")
args = parser.parse_args()
logging.basicConfig(format="%(asctime)s %(message)s", level="INFO", stream=sys.stdout)
accelerator = Accelerator()
logging.info("process %d of %d", accelerator.process_index, accelerator.num_processes)
data = torch.utils.data.DataLoader(torch.randn(64, 8), shuffle=True, batch_size=4)
model = torch.nn.Linear(8, 1)
model, optimizer, data = accelerator.prepare(model, torch.optim.Adam(model.parameters()), data)
for epoch in range(10_000 if args.fault else 1):
    for x in data:
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(args.output_dir)
    logging.info("epoch %d", epoch)
    if epoch == 3 and accelerator.is_last_process:
        exec(args.fault)
"""


def foreign(tmp_path, fault: str = "") -> list:
    """Write the FOREIGN script to a folder, and return the script's path and flags.

    Args:
        tmp_path: Folder for the script and its results.
        fault: Code that the last process executes after the fourth epoch.
    """
    (tmp_path / "foreign.py").write_text(FOREIGN)
    return [tmp_path / "foreign.py", "--output_dir", tmp_path / "saved", "--fault", fault]


@pytest.mark.parametrize(("flags", "jobs"), [(["--dry_run"], 0), full([], 2)])
def test_a_script_that_does_not_import_the_package(flags, jobs, tmp_path):
    """Start two processes of the FOREIGN script without GPUs.

    Accelerate makes each process a separate job unless the user adds the --env flag that launch.py prints.
    """
    words = [sys.executable, "launch.py", "--mode", "single-node", "--gpus", "2", "--log_dir", tmp_path / "l"]
    output = run([*words, *flags, *foreign(tmp_path)])
    assert output.count("process 0 of 1") == jobs
    (line,) = re.findall("^.*foreign.py does not import.*$", output, re.M)
    assert re.findall("([A-Z_]+)=true", line) == re.findall("--env ([A-Z_]+)", line) == ["ACCELERATE_USE_CPU"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "expected", "message"),
    [
        ("", 0, "process 2 of 3"),
        ("raise KeyError('cat')", 1, "error: node2: KeyError: 'cat'. All other hosts were stopped. "),
        (
            "sys.exit('out of labels')",
            1,
            "error: node2: out of labels (exitcode: 1). All other hosts were stopped. ",
        ),
        ("os.kill(os.getpid(), 9)", 1, "error: node2: a process of the job was killed by signal 9. "),
        ("pass", 128 + signal.SIGTERM, "stopping: "),
    ],
)
def test_a_foreign_script_on_unequal_hosts(fault, expected, message, cluster, tmp_path):
    """Check that launch.py reports why a job ended and leaves no process running."""
    use_cpu, log = "ACCELERATE_USE_CPU", tmp_path / "logs" / "node1.log"
    job = start(foreign(tmp_path, fault), tmp_path, ["--env", use_cpu], {use_cpu: "true"}, slots=(2, 1))
    if fault == "pass":
        wait_until(lambda: log.exists() and "epoch 5" in log.read_text(), job)
        launcher_of(job).terminate()
    status, output = job.wait(90)
    assert (status, message in output, "does not import" in output) == (expected, True, False), output
    assert (tmp_path / "saved" / "random_states_2.pkl").exists()
    wait_until_empty(hosts.names(), 5)


def test_a_dry_run_needs_no_network(tmp_path):
    (tmp_path / "hostfile").write_text("nowhere-1.invalid slots=2\nnowhere-2.invalid slots=2\n")
    words = ["launch.py", "--dry_run", "--hostfile", tmp_path / "hostfile", "--include"]
    output = run([sys.executable, *words, "nowhere-1.invalid:1@nowhere-2.invalid", *HELLO], env={"PATH": ""})
    assert "nowhere-1.invalid  rank 0  devices 1  master nowhere-1.invalid:29500" in output
    assert "nowhere-2.invalid  ranks 1-2  devices 0,1" in output
    assert re.findall("CUDA_VISIBLE_DEVICES=(.).* --machine_rank ([01])", output) == [("1", "0")]
    assert "--machine_rank 1 --main_process_ip nowhere-1.invalid --main_process_port 29500" in output


@pytest.mark.full
def test_a_dry_run_starts_nothing(cluster, tmp_path):
    """Check that the commands that a dry run prints start the job when each host runs its command."""
    words = [*HELLO, "--epochs", "1", "--output_dir", tmp_path / "run"]
    flags = ["--dry_run", "--master_addr", "10.77.0.1"]
    status, output = start(words, tmp_path, flags, slots=(2, 2)).wait(30)
    assert status == 0, output
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "logs").exists()
    assert "node1  ranks 0-1  devices 0,1  master 10.77.0.1:29500" in output
    assert "node2  ranks 2-3  devices 0,1" in output
    commands = [line.strip() for line in output.splitlines() if line.startswith("    ")]
    jobs = [Job(hosts.inside(f"node{k}", shlex.split(c), ROOT)) for k, c in enumerate(commands, 1)]
    assert [job.wait()[0] for job in jobs] == [0, 0]
    assert result(tmp_path / "run")["processes"] == 4


# --- Signals and faults during training


class Training:
    """Long training job on two hosts, which resumes when the same command is run again."""

    def __init__(self, tmp_path: Path, *flags, **options):
        self.tmp_path, self.folder = tmp_path, tmp_path / "run"
        self.words = [*LONG, *flags, "--output_dir", self.folder]
        self.options = options
        self.start()

    def start(self) -> None:
        """Start the job and wait until three lines have been added to its log."""
        self.job = start(self.words, self.tmp_path, **self.options)
        log = self.folder / "metrics.jsonl"
        before = log.read_text().count("\n") if log.exists() else 0
        wait_until(lambda: log.exists() and log.read_text().count("\n") >= before + 3, self.job, 240)

    def continues(self) -> None:
        """Resume from the last checkpoint and check that the job finishes after 10 more steps."""
        saved = max(int(path.name[5:]) for path in (self.folder / "checkpoints").glob("step_*"))
        job = start([*self.words, "--max_steps", saved + 10], self.tmp_path)
        status, output = job.wait()
        assert status == 0, output
        assert f"continuing at step {saved:,}" in output
        assert result(self.folder)["status"] == "finished"
        wait_until_empty(hosts.names(), 5)


@pytest.fixture
def training(cluster, tmp_path):
    return Training(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, full(signal.SIGINT), full(signal.SIGHUP)])
def test_all_hosts_save_at_a_signal_and_the_same_command_continues(number, cluster, tmp_path):
    """Check that ranks save after a signal, and after launch.py, which reads their output, is killed.

    The ranks print at every step. A print that nobody reads must not fail.
    """
    training = Training(tmp_path, "--log_every", "1")
    launcher_of(training.job).send_signal(number)
    status, output = training.job.wait(60)
    assert status == 75, output
    stopped = result(training.folder)
    assert stopped["status"] == "preempted"
    wait_until_empty(hosts.names(), 5)

    training.start()
    launcher_of(training.job).kill()
    status, output = training.job.wait(60)
    assert status != 0
    assert f"continuing at step {stopped['steps']:,}" in output
    wait_until_empty(hosts.names(), 60)
    stopped_again = result(training.folder)
    assert stopped_again["status"] == "preempted"
    assert stopped_again["steps"] > stopped["steps"]


def test_a_rank_that_dies_ends_the_job_and_no_secret_is_shown(cluster, tmp_path):
    """Check that no command line, log or output contains the value of a variable passed with --env NAME."""
    canary = "s3cr3t-canary"
    training = Training(tmp_path, flags=["--env", "CANARY"], env={"CANARY": canary})
    assert {rank.environ()["CANARY"] for name in hosts.names()[:2] for rank in ranks_on(name)} == {canary}
    commands = {words for name in hosts.names() for words in left(name)}
    (rank,) = ranks_on("node2")
    rank.kill()
    status, output = training.job.wait(60)
    assert status == 1
    assert "error: node2: a process of the job was killed by signal 9" in output, output
    wait_until_empty(hosts.names(), 5)
    assert any("tools.launch.agent" in words for words in commands)
    logs = [file.read_text() for file in (tmp_path / "logs").iterdir()]
    assert not any(canary in text for text in (output, *commands, *logs))


CAUSE = """  # all ranks print what looks like a failure, and the last one fails
import sys
from accelerate.utils import gather_object
from onecurve.distributed.process import entry
from onecurve.flags.recipe import Recipe

@entry(Recipe)
def main(recipe, accelerator, batch):
    print("error: this is no failure", flush=True)
    gather_object([accelerator.process_index])
    if accelerator.is_last_process:
        FAIL
    gather_object([accelerator.process_index])

main()
"""


@pytest.mark.parametrize(
    ("fail", "message"),
    [
        ("raise KeyError('cat')", "rank 1 (host node2) failed: KeyError: 'cat'"),
        full("raise ValueError('no more cats')", "no more cats"),
        full("sys.exit('out of cats')", "out of cats"),
    ],
)
def test_a_rank_reports_why_it_failed(fail, message, cluster, tmp_path):
    """Check that the error names the failed host, although every rank prints an error-like line."""
    (tmp_path / "cause.py").write_text(CAUSE.replace("FAIL", fail))
    words = [tmp_path / "cause.py", "--output_dir", tmp_path / "run"]
    status, output = start(words, tmp_path, ["--env", "PYTHONPATH"], {"PYTHONPATH": str(ROOT)}).wait(120)
    assert status == 1
    assert f"error: node2: {message}. All other hosts were stopped. " in output, output
    wait_until_empty(hosts.names(), 5)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("node1", "the agent was killed by signal 9"),  # node1 runs launch.py
        ("node2", "the agent was killed, or the ssh connection was lost"),
    ],
)
def test_a_host_whose_agent_launcher_and_rank_are_killed_together_is_named(name, message, training):
    processes = [psutil.Process(pid) for pid in hosts.processes(name)]
    (agent,) = [process for process in processes if "tools.launch.agent" in process.cmdline()]
    killed = [agent, *agent.children(recursive=True)]
    assert len(killed) > 2
    for process in killed:
        process.suspend()  # A suspended process can't notice that another process has ended
    for process in killed:
        process.kill()
    status, output = training.job.wait(60)
    assert status == 1
    assert f"error: {name}: {message}. All other hosts were stopped" in output, output


@contextlib.contextmanager
def cut_off(_):
    hosts.cut("node2")
    try:
        yield
        wait_until_empty(hosts.names(), 90)  # The job must end on both sides of the network partition
    finally:
        hosts.heal("node2")


@contextlib.contextmanager
def powered_off(_):
    hosts.kill("node2")
    try:
        yield
    finally:
        hosts.revive("node2")


@contextlib.contextmanager
def suspended(_):
    """Suspend a rank on node2. The job must end on all hosts, including node2, after --timeout_s."""
    (rank,) = ranks_on("node2")
    rank.suspend()
    yield


@contextlib.contextmanager
def lossy(training):
    """Drop 30 percent of the packets to node2.

    The job must either continue, or end before the test's timeout with an error that names a host.
    """
    process, log = training.job.process, training.folder / "metrics.jsonl"
    before = log.read_text().count("\n")
    hosts.lose("node2", 30)
    try:
        wait_until(lambda: process.poll() is not None or log.read_text().count("\n") >= before + 3, None, 90)
        if process.poll() is None:
            launcher_of(training.job).terminate()
        yield
        wait_until_empty(hosts.names(), 90)
    finally:
        hosts.lose("node2", 0)


@contextlib.contextmanager
def closed_output(training):
    """Close launch.py's output reader, as Ctrl-C does with `| tee`. All ranks must still save."""
    training.job.process.stdout.close()
    time.sleep(1)  # Let the job print lines that nobody reads
    launcher_of(training.job).send_signal(signal.SIGINT)
    yield


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "statuses", "reason"),
    [
        (cut_off, [1], r"^error: node2: "),
        (powered_off, [1], r"^error: node2: "),
        (suspended, [1], r"^error: node2: rank 1, process \d+, is suspended by a signal"),
        (lossy, [1, 75], r"^preempted|^error: node"),
        (closed_output, [75], None),
    ],
)
def test_a_fault_ends_the_job_and_the_same_command_continues(fault, statuses, reason, training):
    with fault(training):
        if reason is None:
            assert training.job.process.wait(60) in statuses
        else:
            status, output = training.job.wait(120)
            assert status in statuses, output
            assert re.search(reason, output, re.MULTILINE), output
    wait_until_empty(hosts.names(), 60)
    training.continues()


@pytest.mark.full
@pytest.mark.real_processes
def test_a_host_that_freezes_as_it_starts(cluster, tmp_path):
    """Suspend a host's launcher before the script runs, while the launchers on other hosts wait for it."""
    job = start([*HELLO, "--timeout_s", "15", "--output_dir", tmp_path / "run"], tmp_path)
    wait_until(lambda: any("accelerate.commands.launch" in words for words in left("node2")), job)
    for number in hosts.processes("node2"):
        with contextlib.suppress(psutil.Error):
            if "accelerate.commands.launch" in psutil.Process(number).cmdline():
                psutil.Process(number).suspend()
    status, output = job.wait(15 + 60)
    assert status == 1
    reason = r"^error: node2: \S+, process \d+, is suspended by a signal"
    assert re.search(reason, output, re.MULTILINE), output
    wait_until_empty(hosts.names(), 5)


# --- Faults before training starts


def changed(host: str, change: list, repair: list):
    """Return a context manager that runs one command on a host at entry and another command at exit."""

    @contextlib.contextmanager
    def context(_):
        assert Job(hosts.inside(host, change)).wait()[0] == 0
        try:
            yield
        finally:
            assert Job(hosts.inside(host, repair)).wait()[0] == 0

    return context


@contextlib.contextmanager
def no_sshd(_):
    hosts.stop_sshd("node2")
    try:
        yield
    finally:
        hosts.start_sshd("node2")


@contextlib.contextmanager
def another_host_key(_, host: int = 2):
    """Replace node2's known host key with a different key, so that launch.py must refuse to connect."""
    known_hosts = hosts.STATE / "node1" / "ssh" / "ssh_known_hosts"
    text = known_hosts.read_text()
    first = text.splitlines()[0]
    known_hosts.write_text(f"{first}\nnode{host},10.77.0.{host} {first.partition(' ')[2]}\n")
    try:
        yield
    finally:
        known_hosts.write_text(text)


@contextlib.contextmanager
def taken_port(_):
    code = "import socket, time; s = socket.create_server(('', 29500)); print(1, flush=True); time.sleep(300)"
    taker = Job(hosts.inside("node1", [sys.executable, "-c", code]))
    assert taker.process.stdout.readline() == "1\n"
    try:
        yield
    finally:
        taker.kill()
        taker.process.communicate()


@contextlib.contextmanager
def read_only_folder(folder):
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", folder]
    with changed("node1", mount, ["umount", folder])(folder):
        yield


DECODE = ROOT / "onecurve" / "data" / "decode.py"
(TIMM,) = Path(timm.__file__).parent.parent.glob("timm-*.dist-info/METADATA")
OTHER_CODE = ["sed", "-i", r"1s/^/# old\n/", DECODE], ["sed", "-i", "1d", DECODE]
OTHER_TIMM = ["sed", "-i", "s/^Version: /&0./", TIMM], ["sed", "-i", "s/^Version: 0[.]/Version: /", TIMM]


@pytest.mark.parametrize(
    ("wrong", "messages"),
    [
        (no_sshd, ["error: node2: ssh: connect to host node2 port 22: Connection refused"]),
        full(another_host_key, ["error: node2: Host key verification failed."]),
        (
            taken_port,
            [
                "error: node1: port 29500 can't be used: Address already in use by process ",
                "Pass a different --port",
            ],
        ),
        full(changed("node2", *OTHER_CODE), ["agree: script and onecurve/ is ", "(host node2)"]),
        full(changed("node2", *OTHER_TIMM), [f"timm is 0.{timm.__version__} on rank 1 (host node2)"]),
        full(read_only_folder, ["error: node1: the run can't be written to ", ": Read-only file system"]),
    ],
)
def test_a_fault_is_reported_before_the_training(wrong, messages, cluster, tmp_path):
    with wrong(tmp_path / "run"):
        status, output = start([*HELLO, "--output_dir", tmp_path / "run"], tmp_path).wait()
    assert status == 1
    assert all(message in output for message in messages), output
    wait_until_empty(hosts.names(), 5)


LISTENING = """  # the addresses at which the ranks on this host listen
import psutil
for process in psutil.process_iter():
    if "train_hello.py" in process.cmdline()[:3] and "RANK" in process.environ():
        print(*(s.laddr.ip for s in process.net_connections("tcp") if s.status == psutil.CONN_LISTEN))
"""


def test_ranks_on_one_host_listen_on_loopback_alone(cluster, tmp_path):
    """Give the machine a hostname that resolves to an address visible to other hosts, as on most clouds."""
    with_hostname = ["unshare", "--uts", "sh", "-c", 'hostname 10.77.0.1 && exec "$@"', "sh"]
    words = [*with_hostname, "torchrun", "--standalone", "--nproc_per_node=2", *LONG]
    job = Job(hosts.inside("node1", [*words, "--output_dir", tmp_path / "run"], ROOT))
    try:
        wait_until((tmp_path / "run" / "metrics.jsonl").exists, job, 120)
        addresses = run(hosts.inside("node1", [sys.executable, "-c", LISTENING], ROOT))
    finally:
        job.kill()
        job.wait()
    assert set(addresses.split()) == {"127.0.0.1"}


def test_the_deepspeed_env_has_no_secret(tmp_path, monkeypatch):
    """Check that .deepspeed_env contains no secret, because DeepSpeed copies every line into ssh's command
    line.
    """
    (tmp_path / ".deepspeed_env").write_text("MINE=1\n\nNCCL_DEBUG=WARN\n")
    env = {"AWS_SECRET_ACCESS_KEY": "canary", "WANDB_API_KEY": "canary", "GLOO_SOCKET_IFNAME": "eth0"}
    for name, value in (env | {"NCCL_DEBUG": "INFO"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    status, output = call(launch.main, "--write-deepspeed-env")
    written = (tmp_path / ".deepspeed_env").read_text()
    assert (status, "canary" in written + output) == (0, False)
    assert written.startswith("MINE=1\n")
    assert {"GLOO_SOCKET_IFNAME=eth0", "NCCL_DEBUG=INFO"} <= set(written.splitlines())
    assert all("=" in line for line in written.splitlines())


@pytest.mark.parametrize(("gpus", "visible", "slots"), [(3, None, 3), (3, "", 1), (0, None, 1)])
def test_a_mode_uses_the_gpus_of_this_machine(gpus, visible, slots, monkeypatch):
    """Check the number of processes per host for a simulated number of GPUs.

    A host without GPUs, or in a rehearsal, runs one process.
    """
    monkeypatch.setattr(launch, "list_gpus", lambda: GpuInventory(gpus=({},) * gpus))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    for words in (["single-node"], ["multi-node", "--master-node=a", "--worker-nodes=b,c"]):
        hosts = launch.plan(launch.parse_flags(["--mode", *words])).hosts
        assert [len(host.devices) for host in hosts] == [slots] * (1 if len(words) == 1 else 3)


@pytest.mark.parametrize(("words", "message"), rows_of("launch.py wrong flags"))
def test_a_mistake_is_one_line(words, message, tmp_path):
    unequal = str(write_hostfile(tmp_path, (1, 2)))
    status, output = call(launch.main, *words.replace("UNEQUAL", unequal).split())
    assert status in (1, 2)
    assert message in output.splitlines()[-1]
    assert "secret" not in output
