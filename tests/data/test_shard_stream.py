"""Tests of shards in S3: the same samples as on disk, a bounded cache, one download per shard, and faults."""

import os
import re
import resource
import signal
import threading
import time
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from onecurve.data import shard_cache
from onecurve.data.cache import prepare_data
from onecurve.data.images import open_images
from onecurve.data.splits import ShardSplit
from onecurve.distributed.watch import Preempted
from onecurve.flags.recipe import ImageRecipe, share_out
from onecurve.numerics.order import evaluation_plan, stream_order, training_plan
from onecurve.system.s3 import ObjectStore
from tests.conftest import ROOT, Job, accelerate, full, lines, python, result, run, small_disk, wait_until
from tests.data.test_shards import NO_WORKERS, VIT, break_image, read, samples
from tests.distributed.test_agreement import two_hosts
from tests.support.data_sets import write_shards
from tests.support.s3 import BUCKET, FaultProxy, aws_env, s3, s3_proxy, use_s3  # noqa: F401 (fixtures)

# Number of images in each shard. Four streams read 54 images each, and most streams end inside a shard.
TRAIN, VAL = (8, 10) * 12, (8, 8, 8, 8)
STEPS = 9  # Number of steps per epoch
SHARD_OF = np.repeat(np.arange(24), TRAIN)
FILES = [f"train-{k:05d}.tar" for k in range(24)]
SHARD_GIB = 30720 / 2**30  # Shard size in GiB, including headers, labels and tar padding
ROOM = 18  # Number of shards that fit into the cache
RECIPE = ImageRecipe(streams=4, shuffle_window=4, workers=0, cache_gib=ROOM * SHARD_GIB)
STREAMS = ["--streams", "4", "--shuffle_window", "4", "--epochs", "2"]


@pytest.fixture(scope="module")
def local(tmp_path_factory) -> Path:
    folder = write_shards(tmp_path_factory.mktemp("local") / "tiny", TRAIN, VAL)
    assert {path.stat().st_size / 2**30 for path in folder.glob("*.tar")} == {SHARD_GIB}
    return folder


@pytest.fixture(scope="module")
def url(local, s3) -> str:  # noqa: F811
    return upload(local, "tiny", s3)


def upload(folder: Path, name: str, server: str) -> str:
    """Upload a folder in the same way as `prep_imagenet.py --out`, with the manifest last."""
    url = f"s3://{BUCKET}/{name}"
    with pytest.MonkeyPatch.context() as patch:
        use_s3(patch, server)
        store = ObjectStore(url)
        for path in sorted(folder.iterdir(), key=lambda path: path.suffix == ".json"):
            store.upload(path, path.name)
    return url


@pytest.fixture
def through_proxy(s3_proxy, monkeypatch):  # noqa: F811
    """Return the proxy that handles all of this process's S3 requests."""
    use_s3(monkeypatch, s3_proxy.endpoint)
    return s3_proxy


def training_split(data: str | Path, cache: Path, **changes) -> ShardSplit:
    return open_images(prepare_data(str(data), cache), replace(RECIPE, **changes)).train


def read_epoch(train: ShardSplit) -> list[tuple]:
    return read(train, training_plan(train, share_out(24, 6, 1), 0, 0, 0, STEPS))


def fetched(proxy: FaultProxy) -> Counter:
    """Return the number of downloads of each shard."""
    paths = [re.search(r"[a-z]+-[0-9]+\.tar", path) for method, path, _ in proxy.requests if method == "GET"]
    return Counter(match[0] for match in paths if match)


def shards_in(cache: Path) -> list[Path]:
    return [path for path in cache.glob("*/shards/*") if path.is_file()]


def shards_of(samples: list[int]) -> set[str]:
    return {FILES[k] for k in SHARD_OF[samples].tolist()}


def cache_of(shards: int) -> list:
    return ["--cache_gib", shards * SHARD_GIB]


def expected(epochs: int = 2) -> np.ndarray:
    """Return the expected samples as an array of shape [steps, 24]."""
    orders = [stream_order(0, epoch, np.array(TRAIN), 4, 4, 24) for epoch in range(epochs)]
    return np.concatenate(orders).reshape(-1, 24)


# --- The same samples as from a local folder


@pytest.mark.parametrize("workers", [0, full(2)])
def test_samples_equal_local_ones_and_the_cache_is_bounded(workers, local, url, through_proxy, tmp_path):
    """Compare two processes' samples with samples from disk. The cache fits two thirds of the shards."""
    remote = open_images(prepare_data(url, tmp_path / "cache"), RECIPE)
    disk = open_images(prepare_data(str(local), tmp_path / "here"), RECIPE)
    counts = []
    through_proxy.on("GET", r"\.tar", lambda: counts.append(len(shards_in(tmp_path / "cache"))), times=None)
    batch = share_out(24, 6, 2)
    remote.train.check_batch(batch)
    for rank in range(2):
        plan = list(training_plan(disk.train, batch, rank, 0, 3, 2 * STEPS))
        streamed, stored = (read(images.train, plan, workers=workers) for images in (remote, disk))
        assert len(streamed) == (2 * STEPS - 3) * 2
        for (e1, ids1, pixels1, labels1), (e2, ids2, pixels2, labels2) in zip(streamed, stored, strict=True):
            assert (e1, ids1.tolist(), labels1.tolist()) == (e2, ids2.tolist(), labels2.tolist())
            assert torch.equal(pixels1, pixels2)
    plan = [(0, ids) for ids, _ in evaluation_plan(32, 5, 2, 1)]
    streamed, stored = (read(images.val, plan, train=False, workers=workers) for images in (remote, disk))
    assert all(torch.equal(a[2], b[2]) for a, b in zip(streamed, stored, strict=True))
    val_shards = {key for key in fetched(through_proxy) if key.startswith("val")}
    assert val_shards == {"val-00002.tar", "val-00003.tar"}
    assert 0 < max(counts) <= ROOM
    assert len(shards_in(tmp_path / "cache")) <= ROOM


def test_an_epoch_fetches_each_shard_once_per_stream(url, through_proxy, tmp_path):
    """Check that a cache that fits two thirds of the shards evicts no shard that a stream still needs."""
    read_epoch(training_split(url, tmp_path))
    streams = expected(1).reshape(STEPS, 4, 6).swapaxes(0, 1).reshape(4, -1)
    readers = Counter(file for samples in streams.tolist() for file in shards_of(samples))
    assert 24 < readers.total() <= 24 + 3
    assert set(fetched(through_proxy)) == set(readers)
    assert fetched(through_proxy) <= readers


def test_the_advised_cache_size_is_enough(url, through_proxy, tmp_path, monkeypatch):
    """Check the advised cache size with shuffle windows that span several prefetched batches.

    One evaluation runs during training and another at the end. By then, training has prefetched as many
    shards as the cache allows.
    """
    monkeypatch.setattr(shard_cache, "FREE_SPACE_TIMEOUT_S", 5)
    batch, small = share_out(24, 6, 1), training_split(url, tmp_path, workers=2, cache_gib=5 * SHARD_GIB)
    enough = small.needed_bytes(batch) / 2**30  # Required cache size in GiB, not rounded up
    assert enough < 28 * SHARD_GIB
    images = open_images(prepare_data(url, tmp_path), replace(RECIPE, workers=2, cache_gib=enough))
    images.train.check_batch(batch)
    options = {"device": "cpu", "size": 32, "seed": 0, "workers": 2}
    plan = training_plan(images.train, batch, 0, 0, 0, 2 * STEPS)
    trained_ids = []
    for _, ids, _, _ in images.train.batches(plan, train=True, **options):
        trained_ids.append(ids.tolist())
        if len(trained_ids) % 36 == 34:
            part = [(0, ids) for ids, _ in evaluation_plan(32, 6, 1, 0)]
            for _ in images.val.batches(part, train=False, **options):
                # Both splits share the cache limit.
                assert images.val.cache.reserved_bytes <= images.val.cache.limit_bytes
    assert trained_ids == expected().reshape(-1, 6).tolist()
    assert images.val.cache.reserved_bytes == 0


def test_a_resume_reads_only_the_rest_of_the_epoch(url, through_proxy, tmp_path):
    train = training_split(url, tmp_path)
    read(train, training_plan(train, share_out(24, 6, 1), 0, 0, 7, 8))
    rest = shards_of(expected()[7].tolist())
    assert set(fetched(through_proxy)) == rest
    assert len(rest) <= 12


# --- Faults


def test_a_shard_with_other_content_is_fetched_again_then_reported(local, through_proxy, s3, tmp_path):  # noqa: F811
    copy = write_shards(tmp_path / "copy", TRAIN, VAL)
    break_image(copy, 100)  # Damage the image after the manifest was written
    train = training_split(upload(copy, "broken", s3), tmp_path / "cache")
    with pytest.raises(ValueError, match=r"broken/train-00011\.tar does not match the SHA-256"):
        read_epoch(train)
    assert fetched(through_proxy)["train-00011.tar"] == 2
    assert not list((tmp_path / "cache").glob("*/shards/train-00011.tar*"))


def test_a_failing_store_is_one_clear_error(url, through_proxy, tmp_path):
    train = training_split(url, tmp_path)
    through_proxy.fail(403, "AccessDenied", times=None, path=r"\.tar")
    with pytest.raises(ValueError, match="these credentials lack a permission") as error:
        read_epoch(train)
    assert "\n" not in str(error.value)


def test_no_manifest(local, through_proxy, s3, tmp_path):  # noqa: F811
    with pytest.raises(
        ValueError, match=r"contains no manifest\.json\. Prepare data with prep_imagenet\.py --out s3:"
    ):
        prepare_data(f"s3://{BUCKET}/nothing", tmp_path)
    ObjectStore(f"s3://{BUCKET}/half").upload(local / "val-00000.tar", "val-00000.tar")
    with pytest.raises(
        ValueError, match=r"the same prep_imagenet\.py command again to continue the preparation"
    ):
        prepare_data(f"s3://{BUCKET}/half", tmp_path)


def test_a_cache_that_is_too_small_is_refused_at_the_start(url, through_proxy, tmp_path):
    message = r"--cache_gib .* is too small for the shards that a host reads at once for its streams"
    with pytest.raises(ValueError, match=message) as error:
        training_split(url, tmp_path, cache_gib=5 * SHARD_GIB).check_batch(share_out(24, 6, 1))
    enough = float(re.search("Use --cache_gib ([0-9.]+),", str(error.value))[1])
    training_split(url, tmp_path, cache_gib=enough).check_batch(share_out(24, 6, 1))
    with pytest.raises(ValueError, match=r"--cache_gib .* is too small for train-00000\.tar in s3://"):
        training_split(url, tmp_path, cache_gib=SHARD_GIB * 0.9)


def test_shards_in_use_by_another_process_are_not_removed(url, through_proxy, tmp_path, monkeypatch):
    """Let another process use the whole cache. A read must fail after a timeout and evict no shard."""
    monkeypatch.setattr(shard_cache, "FREE_SPACE_TIMEOUT_S", 1)
    train, other, files = training_split(url, tmp_path), training_split(url, tmp_path).cache, FILES[:ROOM]
    locks = [other.hold_shard(file, threading.Event()) for file in files]
    with pytest.raises(ValueError, match=r"has no space for train-00020\.tar, because all .* are in use"):
        read(train, [(0, np.array([180]))])
    assert {path.name for path in shards_in(tmp_path)} == set(files)
    other.release_shard(files[3], locks[3])
    read(train, [(0, np.array([180]))])
    assert {path.name for path in shards_in(tmp_path)} == {*files, "train-00020.tar"} - {files[3]}


def test_the_least_recently_used_shard_is_removed_first(url, through_proxy, tmp_path):
    cache = training_split(url, tmp_path, cache_gib=3 * SHARD_GIB).cache
    stop = threading.Event()
    # When shard 3 arrives, shard 2 is the least recently used shard, followed by shard 0.
    for k in (0, 1, 2, 0, 3, 1):
        cache.release_shard(FILES[k], cache.hold_shard(FILES[k], stop))
        time.sleep(0.02)  # Give the files different modification times
    assert {path.name for path in shards_in(tmp_path)} == {FILES[k] for k in (3, 1, 0)}
    cache.release_shard(FILES[2], cache.hold_shard(FILES[2], stop))
    assert {path.name for path in shards_in(tmp_path)} == {FILES[k] for k in (3, 1, 2)}


def test_shards_are_prefetched(url, through_proxy, tmp_path):
    """Check that the prefetcher fills the cache.

    The first micro-batch needs one shard, and the test never requests the second micro-batch.
    """
    cache = training_split(url, tmp_path, cache_gib=5 * SHARD_GIB).cache
    plan = [(0, np.array([k])) for k in range(10)]
    prefetcher = shard_cache.ShardPrefetcher(plan, lambda ids: {FILES[ids[0]]}, cache, cache.limit_bytes, 1)
    with closing(prefetcher) as supply:
        next(iter(supply))
        # No partial files remain.
        wait_until(lambda: {path.name for path in shards_in(tmp_path)} == set(FILES[:5]))
        assert set(supply.reserved_shards) == set(fetched(through_proxy)) == set(FILES[:5])


def test_too_many_open_files_are_a_clear_error(url, through_proxy, tmp_path):
    cache, folder = training_split(url, tmp_path).cache, os.open(tmp_path, os.O_RDONLY)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (folder + 1, limits[1]))
    try:
        with pytest.raises(ValueError, match=r"Too many open files\. Raise the limit"):
            cache.hold_shard(FILES[0], threading.Event())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        os.close(folder)


def test_a_full_disk_is_a_clear_error(url, through_proxy, tmp_path):
    refused = pytest.raises(ValueError, match=r"can't be stored in .*: No space left on device\. Free")
    with small_disk(tmp_path / "cache", "256k") as disk, refused:
        read_epoch(training_split(url, disk))


def test_an_unexpected_error_does_not_wait_for_downloads(url, s3_proxy, tmp_path):  # noqa: F811
    """Raise an error while the job is prefetching shards. The error must not wait for the downloads."""
    s3_proxy.delay(0.5, times=None, method="GET", path=r"\.tar")
    status, output = reader(url, tmp_path, s3_proxy, "raise RuntimeError('NCCL is gone')").wait()
    assert status == 1
    assert output.splitlines()[-1] == "RuntimeError: NCCL is gone"
    assert "Traceback" in output
    assert len(fetched(s3_proxy)) < 24


READER = """
import sys
import torchcodec.decoders  # imports it before shards are fetched
from pathlib import Path
from onecurve.distributed.process import run_process
from onecurve.data.cache import prepare_data
from onecurve.data.images import open_images
from onecurve.numerics.order import training_plan
from onecurve.flags.recipe import ImageRecipe, share_out
url, cache, gib, then = sys.argv[1:]
recipe = ImageRecipe(streams=4, shuffle_window=4, cache_gib=float(gib))
train = open_images(prepare_data(url, Path(cache)), recipe).train
plan = training_plan(train, share_out(24, 6, 1), 0, 0, 0, 9)
def main():
    batches = train.batches(plan, device="cpu", train=True, size=32, seed=0, workers=0)
    first = next(batches)[1].tolist()
    exec(then)
    print(first, *(ids.tolist() for _, ids, _, _ in batches), sep=", ")
run_process(main)
"""


def reader(url: str, cache: Path, proxy: FaultProxy, then: str = "") -> Job:
    """Start a job that reads one epoch with a cache that fits all training shards."""
    (cache / "reader.py").write_text(READER)
    words = [cache / "reader.py", url, cache, 28 * SHARD_GIB, then]
    return Job(words, env=aws_env(proxy.endpoint) | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"})


def test_after_a_kill_during_a_download_the_same_command_works(url, s3, s3_proxy, tmp_path):  # noqa: F811
    s3_proxy.stall_download(5000, times=None, path=r"train-00009\.tar")
    job, part = reader(url, tmp_path, s3_proxy), "*/shards/train-00009.tar.part"
    wait_until(lambda: s3_proxy.faults["stall_download"] and list(tmp_path.glob(part)), job, 240)
    job.process.send_signal(signal.SIGKILL)
    assert job.wait()[0] == -signal.SIGKILL
    complete = {path.name for path in shards_in(tmp_path) if path.suffix == ".tar"}
    # Use a new proxy, because the first proxy may still count requests by the killed job.
    with closing(FaultProxy(s3)) as proxy:
        for job in [reader(url, tmp_path, proxy) for _ in range(2)]:  # Both jobs share the cache
            status, output = job.wait()
            assert status == 0, output
            assert output.splitlines()[-1] == str(expected(1).reshape(-1, 6).tolist())[1:-1]
    assert fetched(proxy) == dict.fromkeys(set(FILES) - complete, 1)
    assert not list(tmp_path.glob("*/shards/*.part"))


# --- Training runs

TRAINING = [*VIT, *STREAMS]


@pytest.mark.parametrize("workers", [0, full(1)])
def test_two_processes_of_a_host_fetch_each_shard_once(workers, url, s3_proxy, tmp_path):  # noqa: F811
    words = [*TRAINING, "--workers", workers, "--data", url, "--cache_dir", tmp_path / "cache", *cache_of(32)]
    run([*accelerate("ddp_2gpu"), *words, "--output_dir", tmp_path / "run"], env=aws_env(s3_proxy.endpoint))
    assert samples(tmp_path / "run") == expected().tolist()
    assert result(tmp_path / "run")["val_images"] == 32
    names = FILES + [f"val-{k:05d}.tar" for k in range(4)]
    assert fetched(s3_proxy) == {name: 1 for name in names}
    others = [path for method, path, _ in s3_proxy.requests if method == "GET" and ".tar" not in path]
    assert len(others) == 3, others  # Requests for the manifest and two indices, which both processes share


@pytest.mark.full
def test_each_host_reads_its_share(url, s3, s3_proxy, tmp_path):  # noqa: F811
    """Start two hosts with separate caches, and count each host's requests with a separate proxy."""
    proxies = [s3_proxy, other := FaultProxy(s3)]
    words = [*TRAINING, *cache_of(ROOM), *NO_WORKERS, "--data", url, "--epochs", "1"]
    caches = [["--cache_dir", tmp_path / f"cache{node}"] for node in (0, 1)]
    envs = [aws_env(proxy.endpoint) for proxy in proxies]
    outcomes = two_hosts(tmp_path, [], words, flags=caches, envs=envs)
    assert [status for status, _ in outcomes] == [0, 0], outcomes
    assert samples(tmp_path / "run0") == expected(1).tolist()
    per_step = expected(1).reshape(STEPS, 2, 12)
    for node, proxy in enumerate(proxies):
        train = shards_of(per_step[:, node].reshape(-1).tolist())
        evaluated = np.concatenate([positions for positions, _ in evaluation_plan(sum(VAL), 6, 2, node)])
        val = {f"val-{k:05d}.tar" for k in evaluated // VAL[0]}
        assert fetched(proxy) == {name: 1 for name in train | val}
        assert len(train) <= 14  # Half of the 24 shards, plus the shards at the ends of the streams
    other.close()


def test_a_stop_signal_ends_the_wait_for_a_shard(url, through_proxy, tmp_path, monkeypatch):
    """Signal a run with a single process, which can save and exit immediately because no other rank waits."""
    train = training_split(url, tmp_path)
    through_proxy.stall_download(5000, times=None, path=r"train-00011\.tar")
    monkeypatch.setattr(shard_cache.watch, "wanted", lambda: through_proxy.faults["stall_download"] > 0)
    with pytest.raises(Preempted):
        read_epoch(train)


@pytest.mark.parametrize(
    ("processes", "workers", "room"), [(1, 0, 20), full(1, 1, 20), full(2, 1, 26), full(4, 0, 40)]
)
def test_stopped_and_resumed_from_s3(processes, workers, room, url, s3_proxy, stoppable, tmp_path):  # noqa: F811
    """Send SIGTERM during the first epoch, and SIGKILL during a download for the epoch's evaluation."""
    launcher = {1: python(), 2: accelerate("ddp_2gpu"), 4: accelerate("ddp_4gpu")}[processes]
    words = [*launcher, *TRAINING, *cache_of(room), "--data", url, "--cache_dir", tmp_path / "cache"]
    words += ["--workers", workers, "--checkpoint_every", "2", "--output_dir", tmp_path / "run"]
    env = aws_env(s3_proxy.endpoint)
    status, output = Job(words, cwd=stoppable, env=env | {"STOP_AT": "5"}).wait()
    assert status == (75 if processes == 1 else 1), output
    job, killed = None, []

    def kill() -> None:
        job.kill()
        killed.append(max(os.listdir(tmp_path / "run" / "checkpoints")))

    s3_proxy.on("GET", r"val-00001\.tar", kill)
    job = Job(words, env=env)
    assert job.wait()[0] != 0
    assert len(killed) == 1
    assert killed[0] in ("step_00000006", "step_00000008"), "not killed at the end of an epoch"
    run(words, env=env)
    assert samples(tmp_path / "run") == expected().tolist()
    log = lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in log if "val/loss" in line] == [STEPS, 2 * STEPS]
