"""Tests of telemetry, which each host writes to a single file across restarts.

A failure of telemetry must not stop training. GPUs are simulated.
"""

import ctypes
import json
import os
import socket
from pathlib import Path

import pytest

from onecurve.telemetry import sampling
from onecurve.telemetry.sampling import Gpu, ProcessInfo, Telemetry, sampled_hosts
from onecurve.telemetry.summary import GPU_MEASUREMENTS, HOST_MEASUREMENTS, energy_wh, summarize
from tests.conftest import lines, metrics, result, wait_until
from tests.distributed.test_agreement import two_hosts

NAME = socket.gethostname()
HELLO = ["train_hello.py", "--trackers", "none", "--data_size", "6400", "--max_steps", "100"]


def is_header(line: dict) -> bool:
    return "host" in line


def samples_of(file: Path) -> list[dict]:
    return [line for line in lines(file) if not is_header(line)]


def assert_sane(file: Path) -> None:
    """Check the telemetry file that a run without GPUs writes, across all of the run's starts."""
    first, *following = lines(file)
    assert first["host"] == file.stem.removeprefix("telemetry-")
    assert (first["devices"], first["cpus"]) == ([], os.cpu_count())
    assert [line["t"] for line in following] == sorted(line["t"] for line in following)
    for line in (line for line in following if not is_header(line)):
        # Without GPUs, a sample contains only the host's measurements
        assert line.keys() == {"t", "step", *HOST_MEASUREMENTS}
        assert 0 <= line["cpu_pct"] <= 100
        assert 0 < line["memory_gib"] < first["memory_gib"]
        assert all(line[name] >= 0 for name in HOST_MEASUREMENTS if line[name] is not None)


def test_a_run_writes_one_file(folder):
    (file,) = folder.glob("telemetry-*")
    assert file.name == f"telemetry-{NAME}.jsonl"
    assert_sane(file)
    samples = samples_of(file)
    assert len(samples) >= 2
    assert samples[-1]["step"] > samples[0]["step"]
    (summary,) = result(folder)["telemetry"]
    assert summary == summarize(file)
    assert (summary["samples"], summary["gpus"]) == (len(samples), 0)
    assert summary["memory_gib"] == max(sample["memory_gib"] for sample in samples)
    assert [summary["utilisation_pct"], summary["gpu_memory_gib"], summary["energy_wh"]] == [None] * 3
    assert result(folder)["energy_wh"] is None
    assert not [name for line in metrics(folder) for name in line if "telemetry" in name]


def test_the_confusion_matrix_belongs_to_the_last_evaluation(folder):
    content = json.loads((folder / "confusion.json").read_text())
    assert (content["step"], content["classes"]) == (
        result(folder)["steps"],
        [str(digit) for digit in range(10)],
    )
    # Each row of the matrix contains the 36 images of one true class.
    assert [sum(row) for row in content["confusion"]] == [36] * 10
    correct = sum(row[k] for k, row in enumerate(content["confusion"]))
    assert correct / 360 == pytest.approx(result(folder)["final_accuracy"])


def test_the_main_process_receives_the_samples_of_other_hosts(tmp_path):
    """Run two processes with local rank 0, which represent two hosts with the same name.

    Only one host has a run folder.
    """
    jobs = two_hosts(tmp_path, [], [*HELLO, "--telemetry_s", "0.1"])
    assert [status for status, _ in jobs] == [0, 0], jobs
    names = sorted(file.name for file in tmp_path.glob("*/telemetry-*"))
    assert names == [f"telemetry-{NAME}-2.jsonl", f"telemetry-{NAME}.jsonl"]
    for file in (tmp_path / "run0").glob("telemetry-*"):
        assert_sane(file)
        assert samples_of(file)
    facts = result(tmp_path / "run0")
    assert facts["hosts"] == 2
    assert [host["host"] for host in facts["telemetry"]] == [f"{NAME}-2", NAME]
    assert all(host["samples"] for host in facts["telemetry"])


def telemetry_of(folder: Path | None, *processes: ProcessInfo, interval_s=0.0, step=int, steps=1):
    """Return the telemetry of rank 0, by default without a sampling thread."""
    processes = processes or (ProcessInfo("a", 0, "CPU", None),)
    return Telemetry(list(processes), 0, folder, interval_s, step, steps)


def test_samples_are_written_at_once_and_a_restart_adds_to_them(tmp_path):
    file, before = tmp_path / "telemetry-a.jsonl", []
    for _ in range(2):
        telemetry = telemetry_of(tmp_path, interval_s=0.02)
        wait_until(lambda started=telemetry: len(started.unlogged_samples) >= 2)
        telemetry.stop()
        assert lines(file)[: len(before)] == before
        before = lines(file)
    assert [is_header(line) for line in before].count(True) == 2
    assert_sane(file)
    assert telemetry.summaries()[0]["samples"] == len(before) - 2


def test_an_interval_of_0_takes_no_sample(tmp_path):
    telemetry = telemetry_of(tmp_path)
    telemetry.stop()
    assert (list(tmp_path.iterdir()), telemetry.summaries(), energy_wh([])) == ([], [], None)


def test_a_write_error_is_reported_once_and_stops_nothing(tmp_path, capsys):
    """Check errors when writing this host's samples, another host's samples, and the summary."""
    for host in "ab":
        (tmp_path / f"telemetry-{host}.jsonl").mkdir()
    telemetry = telemetry_of(tmp_path, interval_s=0.05)
    wait_until(lambda: not telemetry.sampling_thread.is_alive())
    for _ in range(2):
        telemetry.write_texts([("telemetry-b.jsonl", "{}\n")])
        assert telemetry.summaries() == []
    reported = capsys.readouterr().out.splitlines()
    assert len(reported) == len(set(reported)) == 4
    assert all("the telemetry is incomplete: " in line for line in reported)
    assert all("Is a directory" in line or "not a regular file" in line for line in reported)


@pytest.mark.parametrize("answers", [True, False])
def test_nvidia_smi_is_called_at_the_start_and_in_the_middle(answers, tmp_path, monkeypatch):
    """Check that nvidia-smi is called, and that a program that does not respond does not delay the run."""
    script = tmp_path / "bin" / "nvidia-smi"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\n" + ('echo "answer to $*"' if answers else "exec sleep 1000") + "\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sampling, "NVIDIA_SMI_TIMEOUT_S", 60 if answers else 0.2)
    step = 3
    telemetry = telemetry_of(tmp_path, interval_s=0.01, step=lambda: step, steps=20)
    file = tmp_path / "telemetry-a.jsonl"
    wait_until(lambda: file.exists() and samples_of(file))
    step = 10
    wait_until(lambda: [sample["step"] for sample in samples_of(file)][-3:] == [10] * 3)
    telemetry.stop()
    text = (tmp_path / "nvidia-smi-a.txt").read_text() if answers else ""
    steps = [line.split(", ")[1] for line in text.splitlines() if line.startswith("#")]
    assert (text.count("answer to -q\n"), steps) == ((2, ["step 3", "step 10"]) if answers else (0, []))


# --- GPUs: the real pynvml with a fake NVIDIA library
# These tests check which NVML functions are called and how answers are used, but not the answers of a real
# GPU.

NOT_SUPPORTED, NOT_FOUND, GPU_IS_LOST = 3, 6, 15


class Library:
    """Fake libnvidia-ml, in which each function writes an answer to the target of its last argument."""

    def __init__(self, uuid: str, answers: dict):
        self.uuid, self.answers = uuid, answers

    def nvmlInitWithFlags(self, flags: int) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: ctypes.c_char_p, handle) -> int:
        return 0 if uuid.value.decode() == self.uuid else NOT_FOUND

    def __getattr__(self, name: str):
        def function(handle, *words) -> int:
            answer = self.answers.get(name, NOT_SUPPORTED)
            if isinstance(answer, int):
                return answer
            for field, value in answer.items():
                setattr(words[-1]._obj, field, value)
            return 0

        return function


@pytest.fixture
def nvml(monkeypatch):
    """Return a function that maps (uuid, answers) to a pynvml module that uses this fake library."""
    import pynvml

    def load(uuid: str, answers: dict):
        monkeypatch.setattr(pynvml, "nvmlLib", Library(uuid, answers))
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        return pynvml

    return load


ANSWERS = {
    "nvmlDeviceGetUtilizationRates": {"gpu": 97},
    "nvmlDeviceGetMemoryInfo": {"used": 3 * 2**29},
    "nvmlDeviceGetPowerUsage": {"value": 312_500},  # Power in mW
    "nvmlDeviceGetTotalEnergyConsumption": {"value": 7_200_000},  # Energy in mJ
    "nvmlDeviceGetTemperature": {"value": 61},
    "nvmlDeviceGetClockInfo": {"value": 1980},
    "nvmlDeviceGetCurrentClocksEventReasons": {"value": 0x1 | 0x4 | 0x40},
}
UNITS = {"index": 2, "utilisation_pct": 97, "memory_gib": 1.5, "power_w": 312.5, "temperature_c": 61}
UNITS |= {"sm_clock_mhz": 1980, "throttle": ["sw_power_cap", "hw_thermal_slowdown"], "energy_wh": 1.0}
NOTHING = dict.fromkeys(UNITS) | {"index": 2}


@pytest.mark.parametrize(
    ("uuid", "first", "changes", "expected", "complaint"),
    [
        ("GPU-1", ANSWERS, {"nvmlDeviceGetTotalEnergyConsumption": {"value": 10_800_000}}, UNITS, ""),
        ("MIG-1", {"nvmlDeviceGetMemoryInfo": {"used": 2**30}}, {}, NOTHING | {"memory_gib": 1.0}, ""),
        ("GPU-1", ANSWERS, dict.fromkeys(ANSWERS, GPU_IS_LOST), NOTHING, "of GPU 2 ("),
    ],
    ids=["in its units", "a part of a GPU (MIG) supports less", "lost"],
)
def test_answers_of_a_gpu_are_converted(nvml, uuid, first, changes, expected, complaint):
    complaints, answers = [], dict(first)
    gpu = Gpu(nvml(uuid, answers), 2, "1", complaints.append)
    answers |= changes
    assert gpu.sample() == expected
    assert bool(complaints) == bool(complaint)
    assert complaint in "".join(complaints)


def test_a_rate_does_not_fall_below_zero_with_an_interface_that_is_gone(monkeypatch):
    monkeypatch.setattr(sampling, "_io_totals_mib", [{"net_sent": 1.0}, {"net_sent": 5.0}].pop)
    assert sampling.HostMeter().sample()["net_sent_mib_s"] == 0


@pytest.mark.parametrize("known", [True, False], ids=["known to NVML", "unknown"])
def test_the_telemetry_of_a_host_with_gpus(nvml, tmp_path, capsys, known):
    """Check that only the job's GPUs are sampled, and that the host is sampled even if NVML knows no GPU."""
    nvml("GPU-1" if known else "GPU-2", ANSWERS)
    processes = [ProcessInfo("a", 0, "Model X", "1"), ProcessInfo("b", 0, "Model Y", "3")]
    telemetry = telemetry_of(tmp_path, *processes, interval_s=0.05, step=lambda: 7, steps=10)
    wait_until(lambda: telemetry.unlogged_samples)
    telemetry.stop()
    header, sample = lines(tmp_path / "telemetry-a.jsonl")[:2]
    assert header["devices"] == ["Model X"]
    assert [gpu["utilisation_pct"] for gpu in sample.get("gpus", [])] == ([97] if known else [])
    assert telemetry.measurement_means().get("telemetry/gpu0_power_w") == (312.5 if known else None)
    assert ("NVML can't find" in capsys.readouterr().out) == (not known)
    assert telemetry.summaries()[0]["utilisation_pct"] == (97 if known else None)
    assert telemetry.summaries()[0]["gpus"] == 1


# --- Summaries


def written(file: Path, *lines: dict | str) -> Path:
    file.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return file


HEADER = {"host": "a", "interval_s": 1.0, "devices": ["Model X"], "cpus": 2, "memory_gib": 8}


def sample(t: float, **gpu) -> dict:
    gpu_values = {"index": 0, "throttle": None, "energy_wh": None} | dict.fromkeys(GPU_MEASUREMENTS) | gpu
    return {"t": t, "step": 0, "gpus": [gpu_values]} | dict.fromkeys(HOST_MEASUREMENTS, 1.0)


@pytest.mark.parametrize(
    ("starts", "expected_wh"),
    [
        pytest.param([[{"energy_wh": 0.5}, {"energy_wh": 2.0}], [{"energy_wh": 1.0}]], 3.0, id="counted"),
        pytest.param([[{"power_w": 300}, {"power_w": 100}], [{"power_w": 50}] * 3], 0.3, id="from the power"),
        pytest.param([[{"power_w": 300}, {"energy_wh": 0.1}], [{"energy_wh": 0.2}]], 0.3, id="counter first"),
        pytest.param([[{"energy_wh": 1.0}], [{"utilisation_pct": 5}]], None, id="not in each start"),
    ],
)
def test_the_energy_of_a_run_includes_all_its_starts(tmp_path, starts, expected_wh):
    """Simulate a sample every 3.6 s, and an hour without power consumption between the starts."""
    content = []
    for hour, gpus in enumerate(starts):
        content.append(HEADER)
        content += [sample(3600 * hour + 3.6 * k, **gpu) for k, gpu in enumerate(gpus)]
    summary = summarize(written(tmp_path / "telemetry-a.jsonl", *content))
    assert summary["energy_wh"] == (expected_wh and pytest.approx(expected_wh))
    assert energy_wh([summary, summary]) == (expected_wh and pytest.approx(2 * expected_wh))
    assert energy_wh([summary, {"gpus": 0, "energy_wh": None}]) == summary["energy_wh"]


def test_a_line_that_was_cut_is_left_out(tmp_path):
    """Check that an incomplete line is skipped. A restart appends a newline before its lines."""
    file = written(tmp_path / "telemetry-a.jsonl", HEADER, sample(1, utilisation_pct=50), '{"t": 2, "st')
    telemetry_of(tmp_path).write_texts([(file.name, json.dumps(line) + "\n") for line in (HEADER, sample(9))])
    assert json.loads(file.read_text().splitlines()[-2]) == HEADER
    summary = summarize(file)
    assert (summary["samples"], summary["utilisation_pct"]) == (2, 50)


def test_a_file_without_telemetry_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"telemetry-a\.jsonl contains lines that are not telemetry"):
        summarize(written(tmp_path / "telemetry-a.jsonl", {"loss": 1}))


def test_hosts_with_equal_names_are_distinguished():
    names = ["node/1", "node 1", "localhost", "localhost", ".."]
    hosts = sampled_hosts([ProcessInfo(n, i, "X", f"{k}{i}") for k, n in enumerate(names) for i in (0, 1)])
    assert [host.name for host in hosts] == ["node_1", "node_1-2", "localhost", "localhost-2", ".."]
    assert [host.first_rank for host in hosts] == [0, 2, 4, 6, 8]
    assert list(hosts[1].gpu_name_by_uuid) == ["10", "11"]
