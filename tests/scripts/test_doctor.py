"""doctor.py finds faults on real hosts. They have no GPUs: findings about GPUs come from given facts."""

import copy
import json
import re
import sys

import pytest

from cluster import virtual_cluster as hosts
from tests.conftest import ROOT, Job
from tests.data.test_shard_stream import upload
from tests.data.test_shards import write_shards
from tests.support.s3 import BUCKET, aws_env, s3  # noqa: F401 (a fixture)
from tools.doctor.checks import check_all_reduce, check_hosts, check_job, compare_hosts
from tools.launch.hosts import Host


def examine(tmp_path, *flags, env=None, slots=1) -> tuple[int, str, list[dict]]:
    """Runs doctor.py on node1, for node1 and node2. Returns exit status, output, and failing findings."""
    (tmp_path / "hostfile").write_text(f"node1 slots={slots}\nnode2 slots=1\n")
    words = [
        sys.executable,
        "doctor.py",
        "--hostfile",
        tmp_path / "hostfile",
        "--json",
        tmp_path / "out.json",
    ]
    status, output = Job(hosts.inside("node1", [*words, *flags], ROOT), env=env).wait(90)
    found = json.loads((tmp_path / "out.json").read_text())["findings"]
    return status, output, [finding for finding in found if finding["fails"]]


def test_sound_hosts(cluster, tmp_path):
    folder = tmp_path / "runs"
    flags = ["--output_dir", folder, "--data", ROOT / "recipes"]
    status, output, fails = examine(tmp_path, *flags, slots=2)  # three processes in the all-reduce
    assert (status, fails) == (0, []), output
    assert re.search(r"all-reduce \(gloo over eth0\): \d+\.\d\d ms, 64 MiB at \d", output)
    assert f"{folder} is shared" in output
    assert "rehearsal" in output
    assert not [*tmp_path.glob(".doctor*")]
    # launch.py is not affected by Debian's /etc/hosts.
    assert "warning [own-name] node2: its own name node2 is 127.0.1.1 there" in output
    for name in hosts.names():
        assert not [p for p in hosts.processes(name) if b"python" in _command(p)]


def _command(process: int) -> bytes:
    try:
        with open(f"/proc/{process}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


@pytest.fixture
def broken(cluster, tmp_path):
    """Breaks a host by a command, and repairs it by another one after the test."""
    repairs = []

    def broken(host: str, command: list, repair: list) -> None:
        assert Job(hosts.inside(host, command)).wait()[0] == 0
        repairs.append((host, repair))

    yield broken
    for host, repair in repairs:
        assert Job(hosts.inside(host, repair)).wait()[0] == 0


def test_no_sshd(cluster, tmp_path):
    hosts.stop_sshd("node2")
    try:
        status, output, fails = examine(tmp_path)
    finally:
        hosts.start_sshd("node2")
    assert status == 1
    assert [(f["code"], f["host"]) for f in fails] == [("ssh", "node2")]
    assert "Connection refused" in output


def test_another_host_key(cluster, tmp_path):
    known = hosts.STATE / "node1" / "ssh" / "ssh_known_hosts"
    text = known.read_text()
    first = text.splitlines()[0]
    known.write_text(f"{first}\nnode2,10.77.0.2 {first.partition(' ')[2]}\n")
    try:
        status, output, fails = examine(tmp_path)
    finally:
        known.write_text(text)
    assert status == 1
    assert [(f["code"], f["host"]) for f in fails] == [("host-key", "node2")], output


@pytest.mark.full
def test_other_code(broken, tmp_path):
    file = ROOT / "common" / "data" / "decode.py"
    broken("node2", ["sed", "-i", r"1s/^/# old\n/", file], ["sed", "-i", "1d", file])
    status, output, fails = examine(tmp_path)
    assert status == 1
    assert [(f["code"], f["host"]) for f in fails] == [("code", "node2")], output
    assert "common/data/decode.py is " in output


@pytest.mark.full
def test_another_package(broken, tmp_path):
    import timm

    (folder,) = ROOT.__class__(timm.__file__).parent.parent.glob("timm-*.dist-info")
    change = ["sed", "-i", "s/^Version: /Version: 0./", folder / "METADATA"]
    broken("node2", change, ["sed", "-i", "s/^Version: 0[.]/Version: /", folder / "METADATA"])
    status, output, fails = examine(tmp_path)
    assert status == 1
    assert [(f["code"], f["host"]) for f in fails] == [("versions", "node2")], output
    assert f"timm is 0.{timm.__version__}, elsewhere {timm.__version__}" in output


def test_a_taken_port(cluster, tmp_path):
    code = "import socket, time; s = socket.create_server(('', 29500)); print(1, flush=True); time.sleep(300)"
    taker = Job(hosts.inside("node1", [sys.executable, "-c", code]))
    assert taker.process.stdout.readline() == "1\n"
    try:
        status, output, fails = examine(tmp_path)
    finally:
        taker.kill()
        taker.process.communicate()
    assert status == 1
    assert [(f["code"], f["host"]) for f in fails] == [("port-taken", "node1")], output
    assert "Address already in use by process " in output


def test_a_closed_port(broken, tmp_path):
    rule = "add table inet wall; add chain inet wall in { type filter hook input priority 0; };"
    rule += " add rule inet wall in tcp dport 29500 reject"
    broken("node1", ["nft", rule], ["nft", "delete table inet wall"])
    status, output, fails = examine(tmp_path)
    assert status == 1
    assert [(f["code"], f["host"]) for f in fails] == [("port-closed", "node2")], output


def test_a_folder_that_can_not_be_written(broken, tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir()
    broken("node1", ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", folder], ["umount", folder])
    status, output, fails = examine(tmp_path, "--output_dir", folder)
    assert status == 1
    assert [(f["code"], f["host"]) for f in fails] == [("output", "node1")], output
    assert "is not shared" in output


@pytest.mark.full
def test_other_data(broken, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.parquet").write_text("one")
    empty = ["mount", "-t", "tmpfs", "tmpfs", tmp_path / "data"]
    broken("node2", empty, ["umount", tmp_path / "data"])
    status, output, fails = examine(tmp_path, "--data", tmp_path / "data")
    assert status == 1
    assert [(f["code"], f["host"]) for f in fails] == [("data", "node2")], output


def test_s3_is_asked_from_the_first_host(cluster, tmp_path, s3):  # noqa: F811
    """The hosts have no route out, so they can't reach a server on this machine."""
    status, output, fails = examine(tmp_path, "--s3", f"s3://{BUCKET}/doctor", env=aws_env(s3))
    assert status == 1
    assert [(f["code"], f["host"]) for f in fails] == [("s3", "node1")], output


@pytest.mark.full
def test_a_dangling_link_is_no_trouble_with_ssh(cluster, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "gone").symlink_to("nowhere")
    status, output, fails = examine(tmp_path, "--data", tmp_path / "data")
    assert (status, fails) == (0, []), output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--json", "/no/such/x"], "error: /no/such/x: No such file or directory"),
        (["nothing.py"], "FAILS [script] localhost: "),
        (
            ["train_cnn_a.py", "--lrr", "1"],
            "FAILS [script] localhost: train_cnn_a.py: error: unknown flag --lrr",
        ),
        (["--hostfile", "nowhere"], "error: the hostfile nowhere can't be read: No such file"),
    ],
)
def test_a_mistake_is_said(words, message):
    status, output = Job([sys.executable, "doctor.py", *words]).wait(60)
    assert status == 1
    assert message in output
    assert "Traceback" not in output


def test_one_host_with_s3_and_a_script(tmp_path, s3):  # noqa: F811
    words = [sys.executable, "doctor.py", "--s3", f"s3://{BUCKET}/doctor"]
    words += ["train_cnn_a.py", "--data", "digits", "--batch_size", "1440"]
    status, output = Job(words, env=aws_env(s3)).wait(90)
    assert status == 1
    assert "FAILS [batch] localhost: --batch_size 1440 of 1,437 images in digits" in output
    assert output.count("FAILS [") == 1, output


def test_data_in_s3_is_read_by_the_host_itself(tmp_path, s3):  # noqa: F811
    env, url = aws_env(s3), upload(write_shards(tmp_path / "tiny"), "doctor-data", s3)
    status, output = Job([sys.executable, "doctor.py", "--data", url], env=env).wait(90)
    assert "[data]" not in output, output
    status, output = Job([sys.executable, "doctor.py", "--data", f"{url}/nothing"], env=env).wait(90)
    assert status == 1
    assert f"FAILS [data] localhost: --data {url}/nothing has no manifest.json" in output


GPU = {
    "name": "a GPU",
    "capability": [8, 0],
    "memory_gib": 80.0,
    "free_gib": 79.0,
    "held_by": [],
    "peers": [True],
}
FACTS = {
    "hostname": "a",
    "own_name_is": "10.0.0.1",
    "versions": {"python": "3.11.7"},
    "nccl": "2.30",
    "code": {"x.py": "1"},
    "devices": {"driver": "610", "driver_cuda": [13, 3], "problem": None, "gpus": [GPU, dict(GPU)]},
    "torch_cuda": "13.2",
    "shm_gib": 60.0,
    "open_files": 10**6,
    "data": None,
    "clock_off_s": 0.0,
}


def codes(change, devices=(0, 1)) -> list[tuple]:
    """The findings on two hosts, of which the second is changed."""
    facts = {"a": copy.deepcopy(FACTS), "b": copy.deepcopy(FACTS)}
    change(facts["b"])
    both = [Host("a", devices), Host("b", devices)]
    found = [*check_hosts(both, facts), *compare_hosts(facts)]
    assert all(finding.host == "b" for finding in found)
    assert all(finding.remedy for finding in found)
    return [(finding.code, finding.fails) for finding in found]


def test_sound_gpus():
    assert codes(lambda b: None) == []


@pytest.mark.parametrize("answer", [{"digest": "b", "problem": None}, {"problem": "no credentials"}])
def test_data_that_another_host_has_otherwise_or_not(answer, monkeypatch):
    monkeypatch.setitem(FACTS, "data", {"digest": "a", "problem": None})
    assert codes(lambda b: b.update(data=answer)) == [("data", True)]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda b: b["devices"]["gpus"].pop(), [("slots", True)]),
        (lambda b: b["devices"].update(gpus=[], driver=None), [("slots", True), ("driver", False)]),
        (lambda b: b["devices"].update(driver="550"), [("driver", False)]),
        (lambda b: b["devices"].update(driver_cuda=[12, 2]), [("old-driver", True)]),
        (lambda b: b["devices"].update(problem="version mismatch"), [("driver-broken", True)]),
        (lambda b: b.update(torch_cuda=None), [("unusable-gpu", True)]),
        (
            lambda b: b["devices"]["gpus"][1].update(memory_gib=None, free_gib=None, capability=None),
            [],  # not known is no fault
        ),
        (lambda b: b.update(nccl="2.20"), [("driver", True)]),
        (
            lambda b: b["devices"]["gpus"][1].update(free_gib=40.0, held_by=["7 python"]),
            [("device-memory", False)],
        ),
        (lambda b: b["devices"]["gpus"][0].update(capability=[7, 5]), [("precision", False)]),
        (lambda b: b["devices"]["gpus"][0].update(peers=[False]), [("peer-access", False)]),
        (lambda b: b.update(shm_gib=0.05), [("shm", True)]),
        (lambda b: b.update(open_files=1024), [("open-files", False)]),
        (lambda b: b.update(clock_off_s=300.0), [("clock", False)]),
    ],
)
def test_a_fault_of_one_host(change, expected):
    assert codes(change) == expected


def test_a_gpu_that_torch_was_not_built_for():
    answer = {"problem": None, "capability": [6, 1], "built_for": ["sm_75", "sm_80", "sm_90", "compute_120"]}
    assert all_reduced(answer) == [("unsupported-gpu", "torch is built")]
    failed = answer | {"problem": "CUDA error: no kernel image is available"}  # torch's error on such a GPU
    assert all_reduced(failed) == [("unsupported-gpu", "torch is built")]
    assert all_reduced(failed | {"capability": None}) == [("all-reduce", "CUDA error: no")]
    for capability in ([7, 5], [8, 6], [9, 0], [12, 1]):
        assert not all_reduced(answer | {"capability": capability}), capability


def test_one_gpu_of_a_host_fails():
    sound, hung = {"problem": None, "latency_s": 1.0}, {"problem": "no answer within 60 s"}
    assert all_reduced(sound, hung) == [("all-reduce", "slot 1: no")]
    assert all_reduced(hung, hung) == [("all-reduce", "no answer within")]
    broken = {"problem": "exit status 1", "unusable": "CUDA unknown error"}
    assert all_reduced(broken, sound) == [("unusable-gpu", "slot 0: CUDA")]


def all_reduced(*ranks: dict) -> list[tuple[str, str]]:
    """The findings of one host: their codes and first three words."""
    found = check_all_reduce(Host("a", tuple(range(len(ranks)))), {"ranks": list(ranks)})
    return [(finding.code, " ".join(finding.what.split()[:3])) for finding in found]


@pytest.mark.parametrize(
    ("config", "model", "memory_gib", "expected"),
    [
        ("fsdp_2x4gpu", {}, 80.0, ["strategy"]),
        ("fsdp_2x4gpu", {}, 4.0, []),
        ("zero3_2x4gpu", {}, 80.0, ["strategy"]),
        ("ddp_2x4gpu", {}, 80.0, []),
        ("ddp_2x4gpu", {"batch_size": 60_000}, None, ["batch"]),
    ],
)
def test_the_wrong_tool(config, model, memory_gib, expected):
    import yaml

    vit = {
        "parameters": 87_462_922,
        "images": 50_000,
        "batch_size": 512,
        "data": "cifar10",
    }
    settings = yaml.safe_load((ROOT / "accelerate_configs" / f"{config}.yaml").read_text())
    assert [f.code for f in check_job("a", settings, vit | model, memory_gib)] == expected
