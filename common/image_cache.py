"""The cache of prepared images: a folder per data set, named by its content, that is complete or not there.

One process per host makes it in a temporary folder, under a lock, and renames that when all is on disk.
"""

import fcntl
import hashlib
import json
import math
import os
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.decode import SPLITS, Encoded, decode_share
from common.image_sources import Beat, Source, find_source, waiting

FORMAT = 1  # part of the key: a change of what a cache folder holds makes old ones unused
HASH_LIMIT_BYTES = 4 * 2**30
SAMPLE = 64  # images of each split that are looked at to tell the common size
# A decoding process needs 5 s and more of a core to import torch and torchvision: shorter work is done sooner
# in this one (CIFAR-10 in 3 s; in two processes on two cores in 15).
POOL_FROM_S = 10.0


def prepare(
    data: str, cache_dir: Path, beat: Callable[[], None] = lambda: None, show_progress: bool = True
) -> Path:
    """Finds or makes the cache folder of `data`; one process per host calls it. Returns the folder.

    beat() is called about every second meanwhile. Raises ValueError: what is wrong, where, and what to do.
    """
    cache_dir = Path(cache_dir).expanduser().resolve()
    try:
        source = find_source(data, beat, show_progress)
        keys = waiting(beat, lambda: _keys(source))
        folder = _find(cache_dir, keys)
        if folder is not None:
            return folder
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _lock(cache_dir / f".{keys.array}.lock", beat):
            # Another job may have made it while we waited for the lock.
            return _find(cache_dir, keys) or _make(cache_dir, source, keys, beat, show_progress)
    except OSError as error:
        raise ValueError(
            f"--data {data} could not be prepared in --cache_dir {cache_dir}: {error}. The data must be"
            " readable, and the cache on a local disk with room for the decoded images"
        ) from error


@dataclass(frozen=True)
class _Keys:
    """16 hex digits each: of the content, and of a cache folder that holds an array or an index."""

    content: str
    array: str
    index: str


def _keys(source: Source) -> _Keys:
    """SHA-256 over the names and bytes of all files. Above 4 GiB reading everything at each start would take
    too long: names, sizes and times of change instead; of these only names and sizes count as content, so
    that two hosts agree. An index of paths belongs to the place where the files are, too.
    """
    stats = [(name, path, os.stat(path)) for name, path in source.files]
    content = hashlib.sha256(f"format {FORMAT}\n{source.name if not stats else ''}\n".encode())
    times = ""
    if sum(stat.st_size for *_, stat in stats) <= HASH_LIMIT_BYTES:
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # SHA-256 and reading release the GIL
            marks = list(pool.map(_sha256, (path for _, path, _ in stats)))
    else:
        marks = [str(stat.st_size) for *_, stat in stats]
        times = " ".join(str(stat.st_mtime_ns) for *_, stat in stats)
    for (name, *_), mark in zip(stats, marks, strict=True):
        content.update(os.fsencode(name) + b"\0" + mark.encode() + b"\n")
    array = _also(content.hexdigest()[:16], times)
    return _Keys(content.hexdigest()[:16], array, _also(array, str(source.root or "")))


def _also(key: str, text: str) -> str:
    return hashlib.sha256(f"{key} {text}".encode(errors="surrogateescape")).hexdigest()[:16] if text else key


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _find(cache_dir: Path, keys: _Keys) -> Path | None:
    """A folder gets its name when it is complete, so its being there is enough."""
    for key in (keys.array, keys.index):
        for meta in cache_dir.glob(f"*-{key}/meta.json"):
            return meta.parent
    return None


@contextmanager
def _lock(path: Path, beat: Beat) -> Iterator[None]:
    """Exclusive among a host's processes; the kernel releases it when its holder dies, however that is."""
    held = _try_lock(path)
    if held is None:
        print("another process is preparing the same images: waiting for it", file=sys.stderr, flush=True)
    while held is None:
        beat()
        time.sleep(0.5)
        held = _try_lock(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(held)


def _try_lock(path: Path) -> int | None:
    """A file descriptor that holds the lock, or None while another process does."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The last holder may have removed the file between our open and our lock: then it locks nothing.
        if os.path.samestat(os.fstat(file), os.stat(path)):
            return file
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(file)
    return None


def _remove_leftovers(cache_dir: Path) -> None:
    """Temporary folders of processes that were killed: those whose lock nobody holds."""
    for work in cache_dir.glob(".*.tmp"):
        lock = work.with_suffix(".lock")
        held = _try_lock(lock)
        if held is not None:
            shutil.rmtree(work, ignore_errors=True)
            lock.unlink(missing_ok=True)
            os.close(held)


def _make(cache_dir: Path, source: Source, keys: _Keys, beat: Beat, show_progress: bool) -> Path:
    """Writes everything into a temporary folder and renames it when complete. We hold the key's lock."""
    _remove_leftovers(cache_dir)
    work = cache_dir / f".{keys.array}.tmp"
    shutil.rmtree(work, ignore_errors=True)  # its maker held this very lock, and was killed
    work.mkdir()
    try:
        classes = source.write(work, beat)
        array = (work / "train_images.npy").exists() or _decode_all(work, source.name, beat, show_progress)
        label = re.sub(r"[^A-Za-z0-9._-]", "_", source.name).lstrip(".") or "images"
        folder = cache_dir / f"{label}-{keys.array if array else keys.index}"
        meta = {
            "kind": "array" if array else "files",
            "source": f"{label}-{keys.content}",
            "classes": classes,
            "val_name": source.val_name,
            "mirror": source.mirror,
        }
        (work / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
        waiting(beat, lambda: [_sync(path) for path in (*work.iterdir(), work)])
        os.rename(work, folder)
        _sync(cache_dir)
        return folder
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


class _OddSize(Exception):
    """An image of another size turned up: the data set stays encoded."""


def _decode_all(work: Path, name: str, beat: Beat, show_progress: bool) -> bool:
    """Puts decoded arrays in the place of encoded images. False, and nothing changed, if that can't be: sizes
    differ, or both splits together take more than a quarter of the memory. Raises ValueError with all images
    that can't be decoded."""
    shape, image_s = waiting(beat, lambda: _look(work))
    counts = {split: len(Encoded(work, split)) for split in SPLITS}
    count = sum(counts.values())
    if shape is None or count * math.prod(shape) > _memory_bytes() // 4:
        return False
    for split in SPLITS:
        _allocate(work / f"{split}_images.npy", (counts[split], *shape))
    bad: list[str] = []
    processes = _processes(count * image_s)
    text = f"decoding {count:,} images of {name}"
    try:
        with _progress(text, count, show_progress) as advance:

            def take(report: dict) -> None:
                beat()
                advance(report["done"])
                bad.extend(report["bad"])
                if "odd" in report:
                    raise _OddSize

            if processes == 1:
                decode_share(work, 0, 1, take)
            else:
                _decode_in_processes(work, processes, take, beat)
    except _OddSize:
        _remove(work, "images.npy")
        return False
    if bad:
        raise ValueError(_undecodable(bad, count))
    _remove(work, "items.bin", "offsets.npy", "items.json")
    return True


def _look(work: Path) -> tuple[tuple[int, ...] | None, float]:
    """From some images of each split: their shape (H, W, 3), None where it differs; and seconds per image."""
    shapes, times, bad = set(), [], []
    for split in SPLITS:
        images = Encoded(work, split)
        for i in np.unique(np.linspace(0, len(images) - 1, SAMPLE).astype(int)):
            start = time.perf_counter()
            try:
                shapes.add(images.decode(i).shape)
            except ValueError as error:
                bad.append(str(error))
            times.append(time.perf_counter() - start)
            if len(shapes) > 1:
                return None, 0.0
    if not shapes:
        raise ValueError(_undecodable(bad, len(bad)))
    return shapes.pop(), float(np.median(times))


def _undecodable(bad: list[str], count: int) -> str:
    more = [f"and {len(bad) - 10:,} more"] if len(bad) > 10 else []
    lines = "".join(f"\n  {line}" for line in sorted(bad)[:10] + more)
    return f"{len(bad):,} of {count:,} images can't be decoded: replace or remove them{lines}"


def _decode_in_processes(work: Path, count: int, take: Callable[[dict], None], beat: Beat) -> None:
    """`python -m common.decode` for each share. Not multiprocessing: that would fork our threads' locks, or
    import the training script in each process; and these end by themselves when we are killed."""
    root = Path(__file__).resolve().parents[1]
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    reports: queue.Queue = queue.Queue()

    def read(process: subprocess.Popen) -> None:
        for line in process.stdout:
            reports.put(json.loads(line))
        reports.put(process.wait())

    processes = []
    try:
        for share in range(count):
            command = [sys.executable, "-m", "common.decode", str(work), str(share), str(count)]
            processes.append(
                subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
                )
            )
            threading.Thread(target=read, args=(processes[-1],), daemon=True).start()
        running = count
        while running:
            try:
                report = reports.get(timeout=0.5)
            except queue.Empty:
                beat()
                continue
            if isinstance(report, dict):
                take(report)
            elif report:
                raise ChildProcessError(f"a decoding process ended with status {report} (-9: out of memory?)")
            else:
                running -= 1
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextmanager
def _progress(text: str, count: int, show: bool) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, a plain line elsewhere, both on stderr. Yields what to call with images done."""
    if not (show and sys.stderr.isatty()):
        print(text, file=sys.stderr, flush=True)
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(text, total=count)
        yield lambda done: bar.advance(task, done)


def _allocate(path: Path, shape: tuple[int, ...]) -> None:
    """An uint8 array file with all its room reserved: a full disk is an error here, not a SIGBUS later."""
    np.lib.format.open_memmap(path, "w+", np.uint8, shape)
    if hasattr(os, "posix_fallocate"):  # not on macOS
        with open(path, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


def _remove(work: Path, *endings: str) -> None:
    for split in SPLITS:
        for ending in endings:
            (work / f"{split}_{ending}").unlink(missing_ok=True)


def _memory_bytes() -> int:
    """What is available on this host, or to this container."""
    import psutil

    available = psutil.virtual_memory().available
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return available if text == "max" else min(available, int(text))


def _processes(work_s: float) -> int:
    """How many processes decode, at one a core; work_s: what one would take."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 1 if work_s < POOL_FROM_S else min(cores, math.ceil(work_s))
