"""Tests that SkyPilot and Kubeflow accept the files in cluster/, and that their jobs train on virtual hosts.

Each package is installed into a separate environment, `.venv-<package>-<version>` in the repository's root,
on first use. The tests need no cloud and no Kubernetes. Tests set the variables that SkyPilot and Kubeflow's
controller would set, and power off a host to simulate a machine that the cloud reclaims.
"""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.cluster.test_engines import SKYPILOT, TRAINJOB, load
from tests.conftest import (
    ROOT,
    SLOW_STEP,
    TRAINING,
    Job,
    assert_same_losses,
    copy_project,
    insert_in_loop,
    lines,
    link_environment,
    per_device,
    wait_until,
)
from tests.support.s3 import aws_env

pytestmark = pytest.mark.full

PARSE_TASK = """
import json, sys
import sky
from sky.utils import schemas
schemas._allow_additional_properties = lambda: False  # the rule of SkyPilot's server, which is stricter
task = sky.Task.from_yaml(sys.argv[1])
[resources] = task.resources
print(json.dumps({
    "run": task.run, "setup": task.setup, "num_nodes": task.num_nodes, "envs": task.envs,
    "use_spot": resources.use_spot, "accelerators": resources.accelerators,
}))
"""
# Script that compares a job before and after parsing, because Kubeflow's models silently drop unknown keys
VALIDATE_JOB = """
import json, sys
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

def missing(mine, theirs, path="TrainJob"):
    if isinstance(mine, dict):
        for key, value in mine.items():
            if not isinstance(theirs, dict) or key not in theirs:
                yield f"{path}.{key}"
            else:
                yield from missing(value, theirs[key], f"{path}.{key}")
    elif isinstance(mine, list):
        assert len(mine) == len(theirs)
        for number, (ours, their) in enumerate(zip(mine, theirs)):
            yield from missing(ours, their, f"{path}[{number}]")
    elif mine != theirs:
        yield f"{path}: {mine} has become {theirs}"

job = json.load(sys.stdin)
unknown = list(missing(job, TrainerV1alpha1TrainJob.from_dict(job).to_dict()))
sys.exit(f"no key of a TrainJob: {unknown}" if unknown else 0)
"""
S3_HOST, S3 = "node5", "http://10.77.0.5:5000"
MAKE_BUCKET = "import boto3; boto3.client('s3').create_bucket(Bucket='my-bucket')"


def environment(package: str, version: str) -> Path:
    """Return the Python interpreter of an environment that contains only this package."""
    folder = ROOT / f".venv-{package}-{version}"
    if not (folder / "installed").exists():
        venv.create(folder, with_pip=True, clear=True)
        words = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", f"{package}=={version}"]
        subprocess.run(words, check=True)
        (folder / "installed").touch()
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def parse_task(tmp_path_factory):
    """Return SkyPilot's parser as a function that maps a file to (status, output).

    The parser runs without usage collection and without a server.
    """
    python, home = environment("skypilot", "0.14.1"), tmp_path_factory.mktemp("home")
    env = os.environ | {"HOME": str(home), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}

    def parse(file: Path) -> tuple[int, str]:
        words = [python, "-c", PARSE_TASK, file]
        completed = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
        return completed.returncode, completed.stdout if completed.returncode == 0 else completed.stderr

    return parse


def test_skypilots_parser_accepts_the_task_and_rejects_a_wrong_key(parse_task, tmp_path):
    status, output = parse_task(SKYPILOT)
    assert status == 0, output
    task = json.loads(output)
    assert (task["num_nodes"], task["use_spot"], task["accelerators"]) == (2, True, {"L4": 4})
    for right, wrong in (("num_nodes:", "num_node:"), ("RUN: vit-1", "RUN:")):
        (tmp_path / "task.yaml").write_text(SKYPILOT.read_text().replace(right, wrong))
        status, output = parse_task(tmp_path / "task.yaml")
        assert (status > 0, wrong.rstrip(":") in output) == (True, True), output


def test_kubeflows_models_accept_the_trainjob_and_reject_a_wrong_key():
    def validate(job: dict) -> tuple[int, str]:
        words = [environment("kubeflow-trainer-api", "2.3.0"), "-c", VALIDATE_JOB]
        completed = subprocess.run(words, input=json.dumps(job), capture_output=True, text=True, timeout=120)
        return completed.returncode, completed.stderr

    job = load(TRAINJOB)
    assert validate(job) == (0, "")
    job["spec"]["trainer"]["numNode"] = 2
    status, output = validate(job)
    assert (status > 0, "TrainJob.spec.trainer.numNode'" in output) == (True, True), output


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """Copy the project and its environment to a folder that is private to each host.

    In the copy, the variable STEP_S slows down each step.
    """
    project = copy_project(tmp_path_factory.mktemp("engines") / "project")
    insert_in_loop(project, "train_vit.py", SLOW_STEP)
    link_environment(project)
    return project


@pytest.fixture(scope="module")
def hosts(cluster_tools, project):
    """Start five hosts: two for training, two replacements and an S3 server."""
    cluster_tools.up(5, private=[project])
    env = aws_env(S3)
    words = [sys.executable, "-m", "moto.server", "-H", "0.0.0.0", "-p", "5000"]
    store = Job(cluster_tools.inside(S3_HOST, words), env=env, warm=False)
    try:
        make = cluster_tools.inside(S3_HOST, [sys.executable, "-c", MAKE_BUCKET])
        wait_until(lambda: Job(make, env=env, warm=False).wait()[0] == 0, store)
        yield cluster_tools
    finally:
        store.kill()
        cluster_tools.down()


def flags(cache: list) -> list[str]:
    return [str(word) for word in [*TRAINING[1:], per_device(2), *cache, "--checkpoint_every", "5"]]


def log_of(hosts, host: str, project: Path, run: str) -> Path:
    """Return the path of the run's metrics.jsonl in this host's private copy of the project."""
    return hosts.STATE / host / f"private{project}" / "changes" / "weights" / run / "metrics.jsonl"


def wait_for_step(step: int, logs: list[Path], jobs: list[Job]) -> None:
    """Wait until one of the logs contains a line for `step`.

    At step 12, the step-10 checkpoint has been uploaded.
    """
    wait_until(lambda: sum(log.read_text().count("\n") for log in logs if log.exists()) >= step, jobs[0], 180)


def assert_trained(logs: list[Path], outputs: list[str], reference: Path) -> None:
    """Check that the run resumed from a checkpoint in S3 and reports the same losses as a one-process run."""
    [log] = [log for log in logs if log.exists()]
    assert "continuing at step 10 " in "".join(outputs), outputs
    assert [line["step"] for line in lines(log) if "train/loss" in line] == list(range(1, 21))
    assert_same_losses(log.parent, reference)


def test_skypilots_run_block_trains_on_two_hosts_and_recovers(parse_task, hosts, project, cache, one_process):
    """Check that SkyPilot's task resumes from S3 on two new, empty machines after a power failure."""
    task = json.loads(parse_task(SKYPILOT)[1])
    task["envs"] |= {"RUN": "sky-1", "FLAGS": " ".join(flags(cache))}

    def start(names: list[str], env: dict[str, str]) -> list[Job]:
        """Run the task's setup and run blocks on these hosts in the same way as SkyPilot."""
        addresses = "\n".join(f"10.77.0.{name.removeprefix('node')}" for name in names)
        node_env = {"SKYPILOT_NODE_IPS": addresses, "SKYPILOT_NUM_NODES": str(len(names))}
        # Starts one process per host, because the hosts have no GPU
        node_env |= {"SKYPILOT_NUM_GPUS_PER_NODE": "1"}
        env = aws_env(S3) | task["envs"] | node_env | env
        for name in names:
            status, output = Job(hosts.inside(name, ["bash", "-c", task["setup"]], project), env=env).wait()
            assert (status, "Nothing to be done" in output) == (0, True), output
        words = ["bash", "-c", task["run"]]
        return [
            Job(hosts.inside(name, words, project), env=env | {"SKYPILOT_NODE_RANK": str(rank)})
            for rank, name in enumerate(names)
        ]

    jobs = start(["node1", "node2"], {"STEP_S": "0.7"})
    wait_for_step(12, [log_of(hosts, name, project, "sky-1") for name in ("node1", "node2")], jobs)
    hosts.kill("node1")
    hosts.kill("node2")
    assert all(job.wait()[0] != 0 for job in jobs)

    outcomes = [job.wait() for job in start(["node3", "node4"], {})]
    assert [status for status, _ in outcomes] == [0, 0], outcomes
    logs = [log_of(hosts, name, project, "sky-1") for name in ("node3", "node4")]
    assert_trained(logs, [output for _, output in outcomes], one_process(per_device(2)))


SECRETS = {"train-s3": {name: aws_env(S3)[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}}


def pods_env(job: dict, rank: int) -> dict[str, str]:
    """Return the environment variables that the job and the torch plugin set in a node's container.

    Source: kubeflow/trainer, pkg/runtime/framework/plugins/torch/torch.go, EnforceMLPolicy.
    """
    name, trainer = job["metadata"]["name"], job["spec"]["trainer"]
    env = {}
    for variable in trainer["env"]:
        if "value" in variable:
            env[variable["name"]] = variable["value"]
        else:
            secret = variable["valueFrom"]["secretKeyRef"]
            env[variable["name"]] = SECRETS[secret["name"]][secret["key"]]
    return env | {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_NODE_RANK": str(rank),
        "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
        "PET_MASTER_PORT": "29500",
    }


def test_the_trainjobs_containers_train_on_two_hosts_and_restart(hosts, project, cache, one_process):
    """Check that killing one container ends both containers, and that new containers resume from S3."""
    job = load(TRAINJOB)
    job["spec"]["trainer"]["numProcPerNode"] = 1  # The default is 4 processes, but this machine has few cores
    trainer, name = job["spec"]["trainer"], job["metadata"]["name"]
    pods = ["node3", "node4"]
    for host in pods:  # Add the names that the headless service would resolve
        with open(hosts.STATE / host / "hosts", "a") as file:
            file.write(f"10.77.0.3 {name}-node-0-0.{name}\n")
    s3_env = {name: value for name, value in aws_env(S3).items() if "KEY" not in name}

    def start(env: dict[str, str]) -> list[Job]:
        words = [*trainer["command"], *trainer["args"], *flags(cache), "--timeout_s", "30"]
        return [
            Job(hosts.inside(host, words, project), env=s3_env | pods_env(job, rank) | env)
            for rank, host in enumerate(pods)
        ]

    jobs, logs = start({"STEP_S": "0.7"}), [log_of(hosts, host, project, name) for host in pods]
    wait_for_step(12, logs, jobs)
    # Simulate a container that is killed when its memory is full.
    for process in hosts.processes("node4"):
        if "train_vit.py" in Path(f"/proc/{process}/cmdline").read_text():
            os.kill(process, 9)
    assert all(job.wait(120)[0] != 0 for job in jobs)
    for host in pods:
        assert Job(hosts.inside(host, ["rm", "-rf", f"weights/{name}"], project)).wait()[0] == 0

    outcomes = [job.wait() for job in start({})]
    assert [status for status, _ in outcomes] == [0, 0], outcomes
    assert_trained(logs, [output for _, output in outcomes], one_process(per_device(2)))
