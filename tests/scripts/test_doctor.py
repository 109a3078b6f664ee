"""Tests of doctor.py on virtual hosts with injected faults. Facts about the hosts' GPUs are simulated."""

import contextlib
import copy
import json
import re
import socket
import sys
from types import SimpleNamespace

import pytest
import timm
import yaml

from cluster import virtual_hosts as hosts
from tests.conftest import BIN, ROOT, Job, rows_of, run, wait_until
from tests.data.test_shard_stream import upload
from tests.scripts.test_launch import OTHER_CODE, OTHER_TIMM, another_host_key, changed, no_sshd
from tests.support.data_sets import write_shards
from tests.support.s3 import BUCKET, aws_env, s3  # noqa: F401 (a fixture)
from tools.doctor.checks import Checks, check_all_reduce, check_hosts, check_job, compare_hosts
from tools.launch.hosts import Host


def examine(tmp_path, *flags, count=2, env=None) -> tuple[int, str, list[tuple[str, str]]]:
    """Run doctor.py on node1 with a hostfile that lists two slots for node1 and one slot for other hosts.

    Returns:
        The exit status, the output, and the code and host of each failed check.
    """
    further_lines = "".join(f"{name} slots=1\n" for name in hosts.names()[1:count])
    (tmp_path / "hostfile").write_text(f"node1 slots=2\n{further_lines}")
    words = [sys.executable, "doctor.py", "--hostfile", tmp_path / "hostfile"]
    words += ["--json", tmp_path / "out.json", *flags]
    status, output = Job(hosts.inside("node1", words, ROOT), env=env).wait()
    findings = json.loads((tmp_path / "out.json").read_text())["findings"]
    return status, output, [(finding["code"], finding["host"]) for finding in findings if finding["fails"]]


def test_sound_hosts(cluster, tmp_path):
    """Check that healthy hosts pass all checks, including an all-reduce across three processes.

    A dangling link in the --data folder must not fail a check.
    """
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "gone").symlink_to("nowhere")
    folder = tmp_path / "runs"
    status, output, fails = examine(tmp_path, "--output_dir", folder, "--data", tmp_path / "data")
    assert (status, fails) == (0, []), output
    assert re.search(r"all-reduce \(gloo over eth0\): \d+\.\d\d ms, 64 MiB at \d", output)
    assert f"{folder} is shared" in output
    assert "rehearsal" in output
    assert not [*tmp_path.glob(".doctor*")]
    # Debian's /etc/hosts maps the host's name to 127.0.1.1, which does not affect launch.py.
    assert "warning [own-name] node2: the host's own name node2 resolves to 127.0.1.1 on the host" in output
    wait_until(lambda: "python" not in "".join(run(hosts.inside(n, ["ps", "ax"])) for n in hosts.names()))


def test_hosts_without_sshd_or_with_another_key(cluster, tmp_path):
    with another_host_key(None, 3), no_sshd(None):
        status, output, fails = examine(tmp_path, count=3)
    assert (status, fails) == (1, [("ssh", "node2"), ("host-key", "node3")]), output
    assert "Connection refused" in output


def test_faults_of_hosts(cluster, tmp_path, s3):  # noqa: F811
    """Check the findings for different code, packages and data, a closed port, a bad folder and unreachable
    S3.
    """
    runs, data = tmp_path / "runs", tmp_path / "data"
    runs.mkdir()
    data.mkdir()
    (data / "a.parquet").write_text("one")
    rule = "add table inet wall; add chain inet wall in { type filter hook input priority 0; };"
    rule += " add rule inet wall in tcp dport 29500 reject"
    faults = [  # Each fault's host, the command that injects the fault, and the command that repairs the host
        ("node2", *OTHER_CODE),
        ("node2", *OTHER_TIMM),
        ("node2", ["mount", "-t", "tmpfs", "tmpfs", data], ["umount", data]),
        ("node1", ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", runs], ["umount", runs]),
        ("node1", ["nft", rule], ["nft", "delete table inet wall"]),
    ]
    with contextlib.ExitStack() as stack:
        for fault in faults:
            stack.enter_context(changed(*fault)(None))
        flags = ["--output_dir", runs, "--data", data, "--s3", f"s3://{BUCKET}/doctor"]
        status, output, fails = examine(tmp_path, *flags, env=aws_env(s3))
    on_node2 = [(code, "node2") for code in ("versions", "code", "data", "port-closed")]
    assert (status, sorted(fails)) == (1, sorted([*on_node2, ("output", "node1"), ("s3", "node1")])), output
    assert "onecurve/data/decode.py is " in output
    assert f"timm is 0.{timm.__version__} on this host, but {timm.__version__} on other hosts" in output
    assert f"{runs} is not shared" in output


@pytest.mark.parametrize(("words", "message"), rows_of("doctor.py wrong flags"))
def test_a_mistake_is_reported(words, message):
    status, output = Job([sys.executable, "doctor.py", *words.split()]).wait(60)
    assert status == 1
    assert message in output
    assert "Traceback" not in output


def test_a_script_without_a_recipe_is_not_checked(tmp_path):
    (tmp_path / "foreign.py").write_text("raise SystemExit('it was run')\n")
    status, output = Job([sys.executable, "doctor.py", tmp_path / "foreign.py"]).wait(60)
    assert (status, "batch size were not checked" in output, "it was run" in output) == (0, True, False), (
        output
    )


def test_one_host_with_s3_and_a_script(tmp_path, s3):  # noqa: F811
    """Read --data from S3 with the host's credentials while this process occupies the --port."""
    url = upload(write_shards(tmp_path / "tiny"), "doctor-data", s3)
    words = [sys.executable, "doctor.py", "--s3", f"s3://{BUCKET}/doctor", "--data", url]
    words += ["train_cnn_a.py", "--data", "digits", "--batch_size", "1440"]
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        status, output = Job([*words[:2], "--port", port, *words[2:]], env=aws_env(s3)).wait(90)
    assert status == 1
    assert "FAILS [batch] localhost: --batch_size 1440 is larger than the 1,437 images in digits" in output
    assert f"FAILS [port-taken] localhost: port {port}: Address already in use by process " in output
    assert output.count("FAILS [") == 2, output
    status, output = Job([sys.executable, "doctor.py", "--data", f"{url}/nothing"], env=aws_env(s3)).wait(90)
    assert status == 1
    assert f"FAILS [data] localhost: --data {url}/nothing contains no manifest.json" in output


def test_a_host_answers_as_deepspeed_asks_it(request, monkeypatch):
    """Check the default hostfile without SSH, and then with a running sshd.

    DeepSpeed also requires pdsh if there are several hosts.
    """
    client = SimpleNamespace(name="localhost")
    checks = Checks([client, client], SimpleNamespace(), {})
    checks.facts_by_host = {"localhost": {"versions": {"deepspeed": "0.19.8"}}}
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(BIN))
        without_programs = [finding.what for finding in checks.deepspeed_findings()]
    assert without_programs[2:] == ["pdsh is not installed on this machine"]
    assert "No such file or directory: 'ssh'" in without_programs[0]
    for name, value in request.getfixturevalue("ssh").items():
        monkeypatch.setenv(name, value)
    checks.clients = [client]
    assert list(checks.deepspeed_findings()) == []
    checks.clients = [SimpleNamespace(name="elsewhere.invalid")]
    checks.facts_by_host["elsewhere.invalid"] = checks.facts_by_host["localhost"]
    [finding] = checks.deepspeed_findings()
    assert (finding.code, finding.fails) == ("deepspeed", False)
    assert "Could not resolve hostname elsewhere.invalid" in finding.what


@pytest.mark.needs("root")
def test_one_host_with_an_unknown_name_and_a_wrong_variable():
    rename = ["unshare", "--uts", "sh", "-c", 'echo nowhere > /proc/sys/kernel/hostname; exec "$@"', "sh"]
    env = {"GLOO_SOCKET_IFNAME": "eth99"}
    status, output = Job([*rename, sys.executable, "doctor.py"], env=env).wait(60)
    assert status == 1
    assert "warning [own-name] localhost: the host's own name nowhere is unknown on the host" in output
    assert (
        "FAILS [interface] localhost: ValueError: GLOO_SOCKET_IFNAME=eth99 matches no network inter" in output
    )


GPU = {"name": "a GPU", "capability": [8, 0], "memory_gib": 80.0, "free_gib": 79.0}
GPU |= {"held_by": [], "peers": [True]}
FACTS = {"hostname": "a", "own_name_is": "10.0.0.1", "versions": {"python": "3.11.7"}, "code": {"x.py": "1"}}
FACTS |= {"nccl": "2.30", "torch_cuda": "13.2", "shm_gib": 60.0, "open_files": 10**6, "clock_off_s": 0.0}
FACTS |= {"devices": {"driver": "610", "driver_cuda": [13, 3], "problem": None, "gpus": [GPU, dict(GPU)]}}
FACTS |= {"data": {"digest": "a", "problem": None}}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda b: None, []),
        (lambda b: b.update(data={"digest": "b", "problem": None}), [("data", True)]),
        (lambda b: b.update(data={"problem": "no credentials"}), [("data", True)]),
        (lambda b: b["devices"]["gpus"].pop(), [("slots", True)]),
        (lambda b: b["devices"].update(gpus=[], driver=None), [("slots", True), ("driver", False)]),
        (lambda b: b["devices"].update(driver="550"), [("driver", False)]),
        (lambda b: b["devices"].update(driver_cuda=[12, 2]), [("old-driver", True)]),
        (lambda b: b["devices"].update(problem="version mismatch"), [("driver-broken", True)]),
        (lambda b: b.update(torch_cuda=None), [("unusable-gpu", True)]),
        # Unknown GPU properties are not a fault.
        (lambda b: b["devices"]["gpus"][1].update(memory_gib=None, free_gib=None, capability=None), []),
        (lambda b: b.update(nccl="2.20"), [("driver", True)]),
        (lambda b: b["devices"]["gpus"][1].update(free_gib=40.0, held_by=["7"]), [("device-memory", False)]),
        (lambda b: b["devices"]["gpus"][0].update(capability=[7, 5]), [("precision", False)]),
        (lambda b: b["devices"]["gpus"][0].update(peers=[False]), [("peer-access", False)]),
        (lambda b: b.update(shm_gib=0.05), [("shm", True)]),
        (lambda b: b.update(open_files=1024), [("open-files", False)]),
        (lambda b: b.update(clock_off_s=300.0), [("clock", False)]),
    ],
)
def test_a_fault_of_one_host(change, expected):
    """Change one fact about the second of two hosts and check the resulting finding."""
    facts = {"a": copy.deepcopy(FACTS), "b": copy.deepcopy(FACTS)}
    change(facts["b"])
    findings = [*check_hosts([Host("a", (0, 1)), Host("b", (0, 1))], facts), *compare_hosts(facts)]
    assert all(finding.host == "b" for finding in findings)
    assert all(finding.remedy for finding in findings)
    assert [(finding.code, finding.fails) for finding in findings] == expected


def test_a_gpu_that_torch_was_not_built_for():
    answer = {"problem": None, "capability": [6, 1], "built_for": ["sm_75", "sm_80", "sm_90", "compute_120"]}
    assert all_reduced(answer) == [("unsupported-gpu", "torch was built")]
    # Error that torch prints on a GPU for which it was not built
    failed = answer | {"problem": "CUDA error: no kernel image is available"}
    assert all_reduced(failed) == [("unsupported-gpu", "torch was built")]
    assert all_reduced(failed | {"capability": None}) == [("all-reduce", "CUDA error: no")]
    for capability in ([7, 5], [8, 6], [9, 0], [12, 1]):
        assert not all_reduced(answer | {"capability": capability}), capability


def test_one_gpu_of_a_host_fails():
    sound, hung = {"problem": None, "latency_s": 1.0}, {"problem": "the process did not respond within 60 s"}
    assert all_reduced(sound, hung) == [("all-reduce", "slot 1: the")]
    assert all_reduced(hung, hung) == [("all-reduce", "the process did")]
    broken = {"problem": "exit status 1", "unusable": "CUDA unknown error"}
    assert all_reduced(broken, sound) == [("unusable-gpu", "slot 0: CUDA")]


def all_reduced(*ranks: dict) -> list[tuple[str, str]]:
    """Return the code and the first three words of each all-reduce finding on one host."""
    findings = check_all_reduce(Host("a", tuple(range(len(ranks)))), {"ranks": list(ranks)})
    return [(finding.code, " ".join(finding.what.split()[:3])) for finding in findings]


@pytest.mark.parametrize(("config", "model", "memory_gib", "expected"), rows_of("wrong tools"))
def test_the_wrong_tool(config, model, memory_gib, expected):
    vit = {"parameters": 87_462_922, "images": 50_000, "batch_size": 512, "data": "cifar10"}
    settings = yaml.safe_load((ROOT / "accelerate_configs" / f"{config}.yaml").read_text())
    assert [f.code for f in check_job("a", settings, vit | model, memory_gib)] == expected
