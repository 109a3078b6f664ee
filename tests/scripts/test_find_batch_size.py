"""Tests that find_batch_size.py finds a size that fits in a memory limit while the next size fails."""

import itertools
import json
import random
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

import find_batch_size
from onecurve.system.files import write_json
from onecurve.system.processes import is_alive
from tests.conftest import ROOT, Job, rows_of, wait_until
from tests.distributed.test_agreement import ranks_of
from tests.support.commands import call
from tools.batch_size.largest import LaunchResult, knee_size, launch_limited, next_batch_size

LARGEST = "tools.batch_size.largest"
# Flags for small networks with large activations. Eight images need 0.09 to 0.13 GiB, many times more than
# the difference between two launches with the same batch size.
CNN = ["train_cnn_a.py", "--data=digits", "--widths=16,4,4", "--image_size=320"]
RESNET = ["train_cnn_b.py", "--data=digits", "--width=16", "--image_size=128"]
VIT = ["train_vit.py", "--data=digits", "--model=test_vit", "--image_size=96", "--patch_size=4"]


def finder(config: str, *words: str) -> list[str]:
    file = f"accelerate_configs/{config}.yaml"
    return [sys.executable, "find_batch_size.py", "--config_file", file, *words]


def find(tmp_path: Path, config: str, *words: str) -> tuple[dict, str]:
    """Run a search, check that the only file left is the result, and return the result and the output."""
    file = tmp_path / "found" / "result.json"
    status, output = Job([*finder(config, f"--output={file}"), *words]).wait(1200)
    assert status == 0, output
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    return json.loads(file.read_text()), output


def check(search_result: dict) -> None:
    """Check that the trial of the answer ran and that the next larger size ran out of memory."""
    outcomes = {trial["per_device_batch_size"]: trial["outcome"] for trial in search_result["trials"]}
    assert outcomes[search_result["answer"]] == "ran"
    assert outcomes[search_result["answer"] + search_result["quantum"]] == "out of memory"
    assert len(outcomes) == len(search_result["trials"]), "a size was tried twice"
    for trial in search_result["trials"]:
        if trial["outcome"] == "ran":
            # Linux may grant one page more than the limit.
            assert 0.5 < trial["memory_gib"] <= search_result["limit_gib"] + 1e-5
            assert trial["images_per_s"] > 0
    assert outcomes[search_result["knee"]] == "ran"


# --- Search for the largest batch size


def search(memory, limit_gib: float, quantum: int) -> tuple[int, list[int]]:
    """Return the search's answer and the batch sizes that the search tried.

    `memory(size)` returns the memory in GiB that a batch of this size needs.
    """
    ran, failed, tried = {}, set(), []
    while (size := next_batch_size(ran, failed, limit_gib, quantum)) is not None:
        assert size % quantum == 0
        assert size not in tried
        tried.append(size)
        gib = memory(size)
        if gib <= limit_gib:
            ran[size] = gib
        else:
            failed.add(size)
    return max(ran, default=0), tried


@pytest.mark.parametrize(("quantum", "max_trials"), [(1, 7), (4, 5), (8, 5), (24, 5)])
def test_five_trials_suffice_for_linear_memory(quantum, max_trials):
    """Check that a search needs at most five trials, or seven if the quantum is 1 and fewer than 32 images
    fit.

    For so few images, the search can't fit a line through the memory of several batch sizes.
    """
    sizes = itertools.product((0.1, 1, 9), (0.003, 0.02, 0.1, 0.3, 1), (2, 10, 80, 192))
    for fixed_gib, image_gib, limit_gib in sizes:
        fits = int((limit_gib - fixed_gib) / image_gib + 1e-6) // quantum * quantum
        if fits > 0:
            answer, tried = search(lambda size, a=fixed_gib, b=image_gib: a + b * size, limit_gib, quantum)
            assert answer == fits, (fixed_gib, image_gib, limit_gib)
            assert len(tried) <= (5 if answer >= 32 else max_trials), (fixed_gib, image_gib, limit_gib, tried)


@pytest.mark.parametrize(
    "gib",
    [
        lambda image, size, limit, draw: 1 + image * size + draw.gauss(0, 0.2),  # Memory with random noise
        lambda image, size, limit, draw: 1 + image * size // 0.5 / 2,  # Memory that grows in steps
        # Memory that is constant for small batch sizes
        lambda image, size, limit, draw: 1 + image * max(0, size - 100),
        # Cache that fills the available memory
        lambda image, size, limit, draw: min(1 + 1.3 * image * size, limit) + (image * size > limit),
    ],
    ids=range(4),
)
def test_the_search_ends_when_memory_is_not_linear(gib):
    for seed in range(300):
        draw = random.Random(seed)
        image_gib, limit_gib = draw.uniform(0.002, 0.2), draw.uniform(1.5, 30)
        memory = partial(gib, image_gib, limit=limit_gib, draw=draw)
        answer, tried = search(memory, limit_gib, 8)
        assert len(tried) <= 30
        assert answer == 0 or answer in tried
        assert answer + 8 in tried


def test_the_knee_is_the_smallest_size_that_no_other_beats_by_five_percent():
    assert knee_size({8: 100.0}) == 8
    assert knee_size({8: 100.0, 16: 190.0, 32: 199.0, 64: 180.0}) == 16
    assert knee_size({8: 100.0, 16: 150.0, 32: 200.0}) == 32


# --- Launch of one trial


def test_a_hanging_launch_leaves_no_process(tmp_path, monkeypatch):
    """Check that the search also ends a process that has left its session and outlived its parent process."""
    monkeypatch.chdir(tmp_path)
    sleeper, starter, launcher = (tmp_path / name for name in ("sleeper.py", "starter.py", "launcher.py"))
    sleeper.write_text("import os, time\nopen('pids', 'a').write(f'{os.getpid()} ')\ntime.sleep(600)")
    begin = "import subprocess, sys\nsubprocess."
    starter.write_text(f"{begin}Popen([sys.executable, {str(sleeper)!r}], start_new_session=True)")
    launcher.write_text(f"{begin}run([sys.executable, {str(starter)!r}])\n{sleeper.read_text()}")
    ended = launch_limited([sys.executable, str(launcher)], limit_gib=None, timeout_s=5)
    assert (ended.exit_status, ended.is_out_of_memory) == (None, False)
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_ctrl_c_while_a_trial_starts_ends_the_search():
    """Send SIGINT from a fork hook, where Python ignores exceptions."""
    code = "import os, signal\nfrom tools.batch_size.largest import launch_limited\n"
    code += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background job ignores SIGINT
    code += "os.register_at_fork(before=lambda: os.kill(os.getpid(), signal.SIGINT))\n"
    code += "launch_limited(['sleep', '60'], limit_gib=None, timeout_s=60)"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=30)
    assert ended.returncode == -signal.SIGINT, ended.stderr


@pytest.mark.parametrize(("code", "is_out_of_memory"), rows_of("out of memory"))
def test_out_of_memory_is_recognized(code, is_out_of_memory, monkeypatch):
    monkeypatch.setattr(f"{LARGEST}.LISTING_INTERVAL_S", 0.05)
    ended = launch_limited([sys.executable, "-c", code], limit_gib=0.5, timeout_s=60)
    assert ended.is_out_of_memory == is_out_of_memory, ended.output


@pytest.mark.parametrize(("message", "is_out_of_memory"), rows_of("out of memory on a GPU"))
def test_a_gpu_out_of_memory_is_recognized_by_its_message(message, is_out_of_memory, monkeypatch):
    """Print a library's out-of-memory message from a process that uses no GPU."""
    sample = f"{LARGEST}._sample_largest_data_gib"
    monkeypatch.setattr(sample, lambda *_: pytest.fail("it looked at processes"))
    ended = launch_limited(
        [sys.executable, "-c", f"print({message!r}); exit(1)"], limit_gib=None, timeout_s=60
    )
    assert (ended.exit_status, ended.is_out_of_memory, ended.data_gib) == (1, is_out_of_memory, 0)


def test_the_largest_process_is_measured():
    small, large = (f"import time; x = bytearray({mib} * 2**20); time.sleep(3)" for mib in (50, 300))
    words = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {large!r}])\n{small}"
    ended = launch_limited([sys.executable, "-c", words], limit_gib=1.0, timeout_s=60)
    assert ended.exit_status == 0, ended.output
    assert 300 / 1024 < ended.data_gib < 350 / 1024


# --- Searches with real launches


@pytest.mark.full
def test_the_answer_ran_and_the_next_size_did_not(tmp_path):
    """Search in real launches under a memory limit that fits 32 images but not 64."""
    search_result, output = find(tmp_path, "cpu", "--memory_limit_gib=1.55", "--quantum=32", *CNN)
    check(search_result)
    assert len(search_result["trials"]) <= 3
    expected = ("train_cnn_a", "single", 1, 32, 1.55, "memory")
    names = ("script", "strategy", "processes", "quantum", "limit_gib", "limited_by")
    assert tuple(search_result[name] for name in names) == expected
    assert search_result["flags"] == CNN[1:]
    assert search_result["versions"]["torch"]
    assert f"Largest size: {search_result['answer']} images" in output
    assert "accelerate launch --config_file accelerate_configs/cpu.yaml train_cnn_a.py" in output


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "config"),
    [(RESNET, "single_gpu"), (VIT, "ddp_2gpu"), (VIT, "fsdp_2gpu"), (RESNET, "zero2_2gpu")],
    ids=["resnet, one process", "vit, ddp", "vit, fsdp", "resnet, zero2"],
)
def test_scripts_and_strategies(script, config, tmp_path):
    search_result, _ = find(tmp_path, config, "--memory_limit_gib=1.7", *script)
    check(search_result)
    assert len(search_result["trials"]) <= 5 or config in ("fsdp_2gpu", "zero2_2gpu")
    assert search_result["processes"] == (1 if config == "single_gpu" else 2)


@pytest.mark.full
def test_the_data_set_limits_the_size(tmp_path):
    """Search on the digits, whose 1,437 training images contain only one multiple of 1,024."""
    words = ["train_cnn_a.py", "--data=digits", "--widths=4,8,32"]
    search_result, output = find(tmp_path, "cpu", "--quantum=1024", "--memory_limit_gib=4", *words)
    outcomes = [(trial["per_device_batch_size"], trial["outcome"]) for trial in search_result["trials"]]
    assert outcomes[0] == (1024, "ran")
    assert [outcome for _, outcome in outcomes[1:]] == ["exceeds the data set"]
    assert (search_result["answer"], search_result["limited_by"]) == (1024, "data")
    assert "the data set allows no larger batch" in output


def test_a_result_with_the_same_name_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/find_batch_size/train_vit")
    folder.mkdir(parents=True)
    config = ROOT / "accelerate_configs" / "ddp_2gpu.yaml"
    words = [f"--config_file={config}", "--memory_limit_gib=1", str(ROOT / "train_vit.py"), *VIT[1:]]
    for name in ("ddp_2gpu.json", "ddp_2gpu-2.json"):
        assert find_batch_size.BatchSearch(find_batch_size.parse_flags(words)).output == folder / name
        (folder / name).touch()


@pytest.fixture
def simulated(tmp_path, monkeypatch):
    """Return a function that runs a search whose trials are simulated.

    A simulated process needs a fixed amount of memory plus 0.01 GiB per image.
    """
    monkeypatch.chdir(ROOT)
    file = tmp_path / "found" / "result.json"

    def run_search(fixed_gib: float, *words: str, gpu_gib: float | None = None) -> dict:
        def launched(words, limit_gib, timeout_s):
            flags = dict(word[2:].split("=", 1) for word in words if word.startswith("--") and "=" in word)
            # Scripts refuse a flag that is passed under two names.
            assert not {"learning_rate", "model_folder"} & flags.keys()
            size = int(flags["per_device_batch_size"])
            gib = fixed_gib + size / 100
            if gib > (gpu_gib or limit_gib):
                return LaunchResult(1, "error: out of memory", 0, 1.0, True)
            folder = Path(flags["output_dir"])
            folder.mkdir()
            names = ("script", "strategy", "mixed_precision", "half_precision", "compile")
            memory = {"reserved": gib, "other": 0, "device": gpu_gib, "peak": gib}
            facts = dict.fromkeys((*names, "grad_checkpointing", "device")) | {"memory_gib": [memory]}
            write_json(folder / "result.json", facts)
            write_json(folder / "recipe.json", dict.fromkeys(("sharding", "git_commit", "versions")))
            steps = range(int(flags["patience"]))
            log = [json.dumps({"step": step, "train/images_per_s": size}) for step in steps]
            (folder / "metrics.jsonl").write_text("\n".join(log))
            return LaunchResult(0, "", gib, 1.0, False)

        monkeypatch.setattr(find_batch_size, "launch_limited", launched)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu_gib is not None)
        config = "--config_file=accelerate_configs/single_gpu.yaml"
        find_batch_size.BatchSearch(find_batch_size.parse_flags([config, f"--output={file}", *words])).run()
        return json.loads(file.read_text())

    return run_search


@pytest.mark.parametrize(("layers", "answer"), [("0", 96), ("2", 88)])
def test_a_margin_stays_free_with_randaugment(layers, answer, simulated, capsys):
    """Search on a simulated GPU with 1 GiB of memory, with and without RandAugment."""
    words = ["--patience=1", "--learning-rate=1", "--model_folder=elsewhere", f"--randaug_layers={layers}"]
    search_result = simulated(0.02, *VIT, *words, gpu_gib=1.0)
    assert (search_result["answer"], search_result["margin"]) == (answer, 0.05 if layers == "2" else 0)
    assert search_result["limit_gib"] == 1
    assert search_result["knee"] <= answer
    outcomes = {trial["per_device_batch_size"]: trial["outcome"] for trial in search_result["trials"]}
    expected = "ran without margin" if layers == "2" else "out of memory"
    assert outcomes[answer + 8] == expected
    assert ("left less than 5% of the memory free" in capsys.readouterr().out) == (layers == "2")


@pytest.mark.parametrize("fixed_gib", [0.4, 1.52])
def test_the_limit_of_a_rehearsal_follows_from_its_first_trial(fixed_gib, simulated):
    """Check that some batch sizes fit and larger sizes fail, whatever memory the data and libraries need."""
    search_result = simulated(fixed_gib, *VIT)
    assert search_result["limit_gib"] == pytest.approx(1.25 * (fixed_gib + 0.08))
    assert 8 < search_result["answer"] == int((search_result["limit_gib"] - fixed_gib) * 100 + 1e-6) // 8 * 8


NO_STEP = ", even with one image per process. "


@pytest.mark.parametrize(
    ("fixed_gib", "limit_gib", "gpu_gib", "message"),
    [
        (1.02, 1, None, f"1.00 GiB{NO_STEP}Pass a larger --memory_limit_gib"),
        (
            0.95,
            1,
            None,
            "8 images per process do not fit into 1.00 GiB, but one image fits. Pass a smaller --quantum",
        ),
        (
            1e6,
            None,
            None,
            f"GiB per process{NO_STEP}Choose a smaller model",
        ),
        (1.02, None, 1.0, f"the GPU's memory{NO_STEP}Choose a smaller model"),
    ],
)
def test_too_little_memory_differs_from_too_large_a_batch(fixed_gib, limit_gib, gpu_gib, message, simulated):
    limit = [f"--memory_limit_gib={limit_gib}"] if limit_gib else []
    with pytest.raises(ValueError, match=message):
        simulated(fixed_gib, *limit, *VIT, gpu_gib=gpu_gib)


def test_a_batch_below_the_largest_size_is_named_as_the_limit(simulated, capsys):
    search_result = simulated(0.02, "--memory_limit_gib=4", *CNN, "--batch_size=128")
    assert search_result["answer"] == 392
    command = "--per_device_batch_size=128  # limited by --batch_size 128; 392 images would fit into memory\n"
    assert command in capsys.readouterr().out


# --- Mistakes in flags


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ((), 2, "the train script is missing"),
        (("--quantum=0", *CNN), 2, "--quantum 0: the value must be more than 0"),
        (("--memory=1", *CNN), 2, "--memory=1"),
        ((*CNN, "--widht=1"), 2, "unknown flag --widht: did you mean --widths?"),
        (("--config_file=accelerate_configs/ddp_3gpu.yaml", *CNN), 1, "ddp_3gpu.yaml: No such file"),
        (("--config_file=accelerate_configs/ddp_2x2gpu.yaml", *CNN), 1, "is for 2 hosts. Pass --hostfile"),
        (("train_cnn_z.py",), 1, "train_cnn_z.py: No such file or directory"),
        (("--memory_limit_gib=1", "train_hello.py"), 1, "train_hello.py does not train on images"),
        (("--memory_limit_gib=9999", *CNN), 1, "exceeds this machine's memory"),
        (
            ("--memory_limit_gib=0.2", *CNN),
            1,
            "0.20 GiB, even with one image per process",
        ),
        (("--memory_limit_gib=2", *CNN, "--data=/nowhere"), 1, "--data /nowhere"),
        (("--memory_limit_gib=2", "--trial_timeout_s=0.5", *CNN), 1, "the trial did not end within"),
        (
            ("--memory_limit_gib=nan", *CNN),
            2,
            "--memory_limit_gib nan: the value must be more than 0 and finite",
        ),
    ],
)
def test_mistakes_are_one_clear_message(words, status, message, tmp_path, monkeypatch):
    file = tmp_path / "found" / "result.json"
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    ended, output = call(find_batch_size.main, *finder("cpu", f"--output={file}")[2:], *words)
    assert (ended, message in output.splitlines()[-1]) == (status, True), output
    assert not any(file.parent.glob("*")), "something is left"


def test_a_signal_leaves_no_process(tmp_path):
    file = tmp_path / "found" / "result.json"
    job = Job([*finder("ddp_2gpu", f"--output={file}", "--memory_limit_gib=2"), *CNN])
    running = ranks_of(job)
    job.process.send_signal(signal.SIGTERM)
    status, output = job.wait()
    assert (status, output.splitlines()[-1]) == (130, "interrupted")
    wait_until(lambda: not any(map(is_alive, running)), timeout_s=10)
    assert not any(file.parent.glob("*"))
