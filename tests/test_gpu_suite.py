"""benchmarks/gpu_suite.py as far as a CPU goes: --dry_run, and the code of its full rows."""

import itertools
import json
import os
import signal
import sys
import threading
import time
import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch
from accelerate import PartialState

from benchmarks import gpu_suite, peers
from benchmarks.gpu import checks, probe, shared_gpu, speed
from benchmarks.gpu.rows import Result, Setting, Skip, command, on_gpu, once, row, run_flags, run_rows
from onecurve.distributed import accelerator, rendezvous, step_graph
from onecurve.flags.recipe import parse
from onecurve.models.script import load_script, recipe_class
from onecurve.system.env import LOCAL_NUMBER
from onecurve.system.processes import is_alive
from tests.conftest import ROOT, Job, full, wait_until

SUITE = [sys.executable, "-m", "benchmarks.gpu_suite", "--dry_run"]
# What a bare host lacks
ABSENT = ("simplejpeg", "pynvml", "datasets", "torchcodec", "deepspeed", "boto3", "wandb", "evaluate")


@pytest.mark.needs("g++")
@pytest.mark.parametrize("sections", ["ceilings", *map(full, sorted({*gpu_suite.SECTIONS} - {"ceilings"}))])
def test_a_dry_run(sections, tmp_path):
    status, output = Job([*SUITE, "--out", tmp_path, "--only", sections]).wait(900)
    assert status == 0, output
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert {row["section"] for row in rows} == set(sections.split(","))
    assert {row["verdict"] for row in rows} <= {"", "ok", "skipped"}, rows
    assert all(row["note"] for row in rows if row["verdict"] == "skipped")
    first = (tmp_path / "table.md").read_text().split("\n\n")[0]  # tables of kernels follow
    assert len(first.splitlines()) == len(rows) + 2


# --- Rows and sections


def setting_of(tmp_path, left_s: float = 60, **named) -> Setting:
    return Setting(tmp_path, "digits", 0, named.pop("dry_run", True), time.time() + left_s, **named)


def fails(setting: Setting) -> Result:
    done = command(setting, ["-c", "print('first of many lines'); raise SystemExit(3)"])
    raise RuntimeError(f"no such kernel, {done.status}")


def skips(setting: Setting) -> Result:
    raise Skip("needs two GPUs")


def test_a_row_that_fails_keeps_its_output_and_ends_no_other(tmp_path):
    log = tmp_path / "failures.log"
    rows = {"one": fails, "two": skips, "three": lambda setting: Result(3, "ms"), "four": on_gpu(fails)}
    found = list(run_rows(rows, setting_of(tmp_path, failures=log)))
    assert [(row["row"], row["verdict"], row["value"], row["note"]) for row in found] == [
        ("one", "FAIL", "", "RuntimeError: no such kernel, 3"),
        ("two", "skipped", "", "needs two GPUs"),
        ("three", "", 3, ""),
        ("four", "skipped", "", "not in a dry run"),
    ]
    text = log.read_text()
    assert "first of many lines" in text
    assert "exit status 3" in text
    assert "three" not in text


def test_a_measurement_that_misses_its_estimate_by_half_is_marked(tmp_path):
    rows = {str(v): lambda s, v=v: Result(v, "images/s", expected=100) for v in (40, 60, 140, 160)}
    found = [row["verdict"] for row in run_rows(rows, setting_of(tmp_path, dry_run=False))]
    assert found == ["off by half", "", "", "off by half"]


def test_rows_run_at_once(tmp_path):
    both = threading.Barrier(2, timeout=30)  # broken, unless two rows wait in it
    meets = {name: lambda setting: Result(both.wait() >= 0) for name in ("one", "two")}
    found = run_rows(meets, setting_of(tmp_path), at_once=2)
    assert [row["value"] for row in found] == [True] * 2


def test_what_several_rows_need_is_made_once(tmp_path):
    made = []
    make = once(lambda setting, name: made.append((setting.folder, name)) or len(made))
    rows = {str(n): lambda setting, n=n: Result(make(setting, n % 2)) for n in range(6)}
    found = {row["row"]: row["value"] for row in run_rows(rows, setting_of(tmp_path), at_once=6)}
    assert sorted(made) == [(tmp_path, 0), (tmp_path, 1)]
    assert found["0"] == found["2"] == found["4"] != found["1"]
    assert make(setting_of(tmp_path / "another section"), 0) == 3


def test_rows_that_the_sections_time_cuts_are_skipped(tmp_path):
    def long(setting: Setting) -> Result:
        time.sleep(1.2)
        raise RuntimeError("did not end in time")

    found = run_rows({"one": long, "two": long}, setting_of(tmp_path, left_s=1))
    assert [(row["verdict"], row["note"]) for row in found] == [
        ("skipped", "the section's time ended during this row"),
        ("skipped", "did not fit into the section's time"),
    ]


def test_a_command_that_hangs_leaves_no_process(tmp_path):
    sleep = "import subprocess; subprocess.run(['setsid', 'sleep', '61.2'])"
    assert command(setting_of(tmp_path, command_s=1), ["-c", sleep]).status is None
    wait_until(lambda: ["sleep", "61.2"] not in [p.info["cmdline"] for p in psutil.process_iter(["cmdline"])])


def test_a_package_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (row,) = run_rows({"zero2, one process": lambda setting: Result()}, setting_of(tmp_path))
    assert (row["verdict"], row["note"]) == ("skipped", "deepspeed is not installed")


@pytest.mark.parametrize(
    ("only", "limits"),
    [
        ("throughput", [560]),
        ("snapshots,strategies", [560 * 20 / 92, 560 * 72 / 92]),
        ("scaling,several", [140, 420]),
    ],
)
def test_chosen_sections_share_the_whole_budget(only, limits, tmp_path, monkeypatch):
    """Simulated: each section takes its whole share."""
    given = []
    monkeypatch.setattr(gpu_suite.Suite, "section", lambda self, name, limit_s: given.append(limit_s))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("time.time", lambda: float(sum(given)))
    gpu_suite.Suite(gpu_suite.parse(["--out", str(tmp_path), "--only", only]), tmp_path).run()
    assert given == pytest.approx(limits)


def test_one_gpu_has_the_sections_that_fit_into_the_budget(tmp_path):
    suite = gpu_suite.Suite(gpu_suite.parse(["--out", str(tmp_path), "--gpus", "1"]), tmp_path)
    names = suite.usual()
    assert names[0] == "smoke"
    assert not {*names} & {"thorough", *gpu_suite.SEVERAL_GPUS}
    assert sum(gpu_suite.SECTIONS[name][1] for name in names) <= gpu_suite.BUDGET_S
    suite.flags.gpus = 2
    assert suite.usual() == [*names, *gpu_suite.SEVERAL_GPUS]


def test_what_does_not_fit_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    words = ["--out", str(tmp_path), "--only", "ceilings,recipes,inputs", "--budget_s", "5"]
    suite = gpu_suite.Suite(gpu_suite.parse(words), tmp_path)
    suite.run()
    assert [row["verdict"] for row in suite.rows] == ["skipped"] * 3
    assert "did not fit" in (tmp_path / "table.md").read_text()


@pytest.mark.full
def test_ctrl_c_leaves_the_table_and_no_process(tmp_path):
    job, table = Job([*SUITE, "--out", tmp_path, "--only", "ceilings,scripts"]), tmp_path / "table.md"
    wait_until(lambda: table.exists() and "matrix product, fp16" in table.read_text(), timeout_s=120)
    below = psutil.Process(job.process.pid).children(recursive=True)
    job.process.send_signal(signal.SIGINT)
    status, output = job.wait(60)
    assert status == 130, output
    assert "interrupted" in table.read_text()
    wait_until(lambda: not any(map(is_alive, below)), timeout_s=10)  # a killed process takes a moment


def test_without_a_gpu_it_says_what_to_do():
    status, output = Job([*SUITE[:-1], "--out", ROOT / "nowhere"]).wait(60)
    assert status == 1
    assert "error: torch can't use a GPU on this machine. Pass --dry_run" in output
    assert not (ROOT / "nowhere").exists()


# --- The probe


def ended(watch, during_step=lambda step: None):
    """What a watch returns, and after how many steps of 64 images."""
    next(watch)
    for step in itertools.count(1):
        during_step(step)
        try:
            watch.send(64)
        except StopIteration as end:
            return end.value, step


def test_waits_are_counted_and_placed(monkeypatch):
    """Simulated: the warnings are those that CUDA's mode gives, and torch's own about the mode."""
    modes = []

    def set_mode(mode):
        modes.append(mode)
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.set_sync_debug_mode", set_mode)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)

    def during_step(step):
        for text in (*["called a synchronizing CUDA operation"] * 3, "another") if step == 2 else ():
            warnings.warn(text, stacklevel=1)

    found, steps = ended(probe.waits(2, steps=2), during_step)
    assert steps == 3  # the first one's end is the beginning
    assert modes == ["warn", "default"]
    assert found["waits"] == 1.5
    assert [(place.split(":")[0], n) for place, n in found["places"].items()] == [("test_gpu_suite.py", 3)]


def test_launches_busy_share_and_kernels(monkeypatch):
    """Simulated: events of a GPU, one an annotation that spans the others, and one of a CPU."""
    cuda, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
    kinds = [
        ("a", cuda, False, 100),
        ("b", cuda, False, 300),
        ("step", cuda, True, 400),
        ("c", cpu, False, 9),
    ]
    names = ("name", "device_type", "is_user_annotation", "device_time")
    events = [SimpleNamespace(**dict(zip(names, kind, strict=True))) for kind in kinds]
    profiler = nullcontext(SimpleNamespace(events=lambda: events))
    monkeypatch.setattr("torch.profiler.profile", lambda activities: profiler)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    clock = iter([0.0, 0.008])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    found, _ = ended(probe.profile(2, steps=2))
    assert (found["launches"], found["busy_share"]) == (1, pytest.approx(0.4 / 8))
    assert found["kernels"] == [("b", 0.15, 0.5), ("a", 0.05, 0.5)]


def test_a_warm_up_precedes_three_windows(monkeypatch):
    """Steps of 1 s, the first of 100 s, which compiles."""
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])

    def during_step(step):
        clock[0] += 1 if step > 1 else 100

    found, steps = ended(probe.speed(4, 20), during_step)
    assert steps == 1 + 4 * 4
    assert (found["images_per_s"], found["spread"]) == (64, 0)


# --- The code of full rows, on small sizes


@pytest.fixture
def full_setting(tmp_path, monkeypatch):
    """A host with a GPU, as far as the suite's own process can tell; commands find none, and a bare host."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, resource, sys\n"
        f"sys.modules |= dict.fromkeys({ABSENT})\n"
        "if 'LIMIT_GIB' in os.environ:\n"
        "    resource.setrlimit(resource.RLIMIT_DATA, (int(os.environ['LIMIT_GIB']) * 2**30,) * 2)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    folder, failures = tmp_path / "scratch" / "section", tmp_path / "failures.log"
    folder.mkdir(parents=True)
    return Setting(folder, "synthetic", 1, False, time.time() + 300, 300, failures, small=True)


def done(find, setting: Setting) -> dict[str, dict]:
    rows = list(run_rows({"a row": find}, setting))
    failures = setting.failures.read_text() if setting.failures.exists() else ""
    assert not [r for r in rows if r["verdict"] in ("FAIL", "skipped")], (rows, failures)
    return {r["row"]: r for r in rows}


@pytest.mark.full
@pytest.mark.parametrize("name", ["CNN-A, batch 512", "vit ViT-S/16 at 224, RandAugment, batch 256"])
def test_a_full_case(name, full_setting):
    """The second one's data are JPEGs in folders."""
    rows = done(row(speed.measured, case := speed.CASES[name]), full_setting)
    for part in ("as it is", "data / resident", *case.variants):
        assert rows[f"a row, {part}"]["value"] > 0
    assert 0 < len(rows["a row, kernels"]["kernels"]) <= 15
    assert not (full_setting.folder / "run").exists()


@pytest.mark.full
def test_a_variant_that_fails_ends_no_other(full_setting):
    """All train in one process, one after the other."""
    bad, good = speed.Variant(("--widths", 0)), speed.Variant(("--label_smoothing", 0.1))
    case = replace(speed.CNN_A, repeated={"bad": bad, "good": good})
    rows = {r["row"]: r for r in run_rows({"a row": row(speed.repeated, case)}, full_setting)}
    assert (rows["a row, waits"]["value"], rows["a row, bad"]["verdict"]) == (0, "FAIL")
    assert rows["a row, good"]["value"] > 0
    assert "--widths" in full_setting.failures.read_text()


def test_the_goal_of_accuracy_is_that_of_the_data(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet

    for name, start in (("jpeg", b"\xff\xd8\xff"), ("png", b"\x89PNG")):
        (tmp_path / name).mkdir()
        table = pa.table({"img": [{"bytes": start, "path": None}], "label": [1]})
        pa.parquet.write_table(table, tmp_path / name / "train-00000-of-00001.parquet")
    assert speed.is_jpeg(str(tmp_path / "jpeg"))
    assert not speed.is_jpeg(str(tmp_path / "png"))
    assert not speed.is_jpeg("synthetic")


@pytest.mark.full
def test_a_probe_watches_beyond_an_epoch(full_setting):
    words = ["train_cnn_a.py", "--data", "synthetic", "--widths", "4,4,8", "--batch_size", 2048]  # 2 an epoch
    words += run_flags(full_setting, full_setting.folder / "run", words)
    ended = command(full_setting, ["-m", "benchmarks.gpu.probe", "--watch", "waits", "--steps", 5, *words])
    assert ended.status == 0, ended.output
    assert json.loads(ended.output.splitlines()[-1])[0]["waits"]["waits"] == 0


@pytest.mark.full
def test_full_out_of_memory(full_setting, monkeypatch):
    @contextmanager
    def ballast():
        monkeypatch.setenv("LIMIT_GIB", "4")
        yield

    monkeypatch.setattr(checks, "ballast", ballast)
    assert done(checks.one_line, full_setting)["a row"]["verdict"] == "ok"


@pytest.mark.full
def test_two_ranks_on_one_gpu_use_gloo(full_setting, tmp_path):
    """Simulated: torch says that there is a GPU, and NCCL would start. This NCCL finds no GPU: it is old."""
    script = tmp_path / "meets.py"
    script.write_text(
        "import torch\n"
        "torch.cuda.is_available = lambda: True\n"
        "from onecurve.distributed.rendezvous import join_agents_store\n"
        "join_agents_store(60)\n"
        "print('backend', torch.distributed.get_backend())\n"
    )
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    ended = command(full_setting, [*launcher, "-m", "benchmarks.gpu.shared_gpu", script])
    assert ended.status == 0, ended.output
    assert ended.output.count("gloo") == 2
    assert "nccl" not in ended.output


@pytest.mark.parametrize(("nccl", "backend"), [((2, 28, 9), "gloo"), ((2, 30, 7), "nccl")])
def test_cuda_starts_before_torch_counts_more_gpus(nccl, backend, monkeypatch):
    """Simulated: one GPU, whose start would ask for the properties of a second one; old NCCL, and new."""
    counts = []
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: nccl)
    for name in shared_gpu.NCCL:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "")  # to be removed after main()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.init", lambda: counts.append(torch.cuda.device_count()))
    monkeypatch.setattr("runpy.run_path", lambda *_, **__: counts.append(torch.cuda.device_count()))
    replaced = [(module, "backend") for module in (rendezvous, accelerator, step_graph)]
    replaced += [(PartialState, name) for name in ("_prepare_backend", "set_device")]
    replaced += [(accelerator, "check_own_gpu")]
    for owner, name in replaced:  # by main()
        monkeypatch.setattr(owner, name, getattr(owner, name))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", LOCAL_NUMBER):  # main() sets the last one
        monkeypatch.setenv(name, "2")
    monkeypatch.setattr("sys.argv", ["shared_gpu.py", "train_cnn_a.py"])
    shared_gpu.main()
    assert counts == [1, 2]
    assert rendezvous.backend() == accelerator.backend() == step_graph.backend() == backend
    if backend == "gloo":
        assert PartialState._prepare_backend(None)[0] == "gloo"
    else:
        assert accelerator.check_own_gpu(None, 1, 2, "the GPU of rank 0") is None
    assert (os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] == "1") == (backend == "nccl")


# --- The peers: with timm's train.py, as the docstring of benchmarks/peers.py says, they are run by hand


def test_the_flags_and_images_of_timms_train_py(tmp_path):
    words = ["--data", "digits", "--batch_size", "32", "--cache_dir", str(tmp_path / "cache")]
    flags = peers.timm_flags(words, tmp_path / "images")
    assert {"--model=vit_base_patch32_224", "--batch-size=32", "--mixup=0.8", "--num-classes=10"} <= {*flags}
    assert len([*tmp_path.glob("images/train/*/*.png")]) == 1437
    assert {path.name for path in tmp_path.glob("images/*/*/")} == {f"{label:04d}" for label in range(10)}


def test_timms_speed_is_that_after_its_start(tmp_path):
    """The log is timm's: updates of 512 images, 10 s until the 16th and 0.1 s for each one from there on."""
    lines = [(update, 10 + 0.1 * max(0, update - 16)) for update in (0, 16, 32, 48)]
    log = tmp_path / "log.py"
    log.write_text(
        "".join(
            f"print('Train: 0 [{n:>4d}/97 ( 18%)]  Loss: 2.31 (2.31)  Time: 0.1s, 5120.00/s  "
            f"({s / (n + 1):.3f}s, {512 * (n + 1) / s:>7.2f}/s)  LR: 1.000e-03  Data: 0.01 (0.01)')\n"
            for n, s in lines
        )
    )
    with psutil.Popen(["sleep", "60"]) as bystander:
        assert peers.timms([str(log)], 32) == pytest.approx(5120, rel=1e-3)
        bystander.terminate()
    assert bystander.returncode == -signal.SIGTERM  # and not that of timm's end
    with pytest.raises(ValueError, match="ended within 16 updates"):
        peers.timms(["-c", "print('Train: 0 [   0/97 (  1%)]  Time: 1s, 5/s  (1.000s,  512.00/s)')"], 32)


@pytest.mark.parametrize("case", speed.CASES.values(), ids=speed.CASES)
def test_the_flags_of_a_full_run(case, tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "photographs", lambda setting, sizes: tmp_path / "x".join(map(str, sizes[0])))
    script, *flags = map(str, speed.script_words(setting_of(tmp_path, dry_run=False), case))
    recipe = parse(recipe_class(load_script(ROOT / script)), flags)
    assert recipe.data == (str(tmp_path / "224x224") if case.photographs else "digits")
    assert recipe.batch_size in case.flags
