"""Decoding beside the training: the workers of a DataLoader, their start and their end."""

import atexit
import functools
import itertools
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from onecurve.data.crops import CROP_SCALE, evaluation_crop, random_resized_crop
from onecurve.data.decode import decode_image, torchcodec_decoder
from onecurve.data.encoded import Encoded
from onecurve.models.preprocessing import IMAGENET_CROP, Crop
from onecurve.numerics.augment import CROP, FLIP, send, send_arrays, to_float
from onecurve.numerics.order import Plan, uniforms
from onecurve.system.files import first_retry, note_retry, retried
from onecurve.system.output import log
from onecurve.system.text import printable
from onecurve.upstream.python_ import on_unsent

PREFETCHED = 4  # micro-batches for each worker
ADVICE = {  # for a broken image; True in training
    True: "; to train without it, add --on_bad_image skip",
    False: "; evaluations count each image, and skip none: repair it at its source",
}
MORE_ROOM = "Make /dev/shm larger (docker run --shm-size), or give fewer --workers"


class MicroBatch(NamedTuple):
    """Images of one forward; images and labels are on the device."""

    epoch: int
    ids: np.ndarray  # int64 [b], of the samples
    images: Tensor  # uint8 [b, H, W, 3]
    labels: Tensor  # int64 [b]


Item = TypeVar("Item")
# uint8 [b, size, size, 3]; errors by sample id; the batch's error; why the worker's first retried read failed
Crops = tuple[Tensor, dict[int, str], str, str]


def decoded(
    open_images: Callable[[], Encoded],
    labels: np.ndarray,
    plan: Plan,
    *,
    device: torch.device,
    train: bool,
    size: int,
    seed: int,
    workers: int,
    skip: bool,
    flip: bool = False,
    crop: Crop = IMAGENET_CROP,
    crop_scale: tuple[float, ...] = CROP_SCALE,
) -> Iterator[MicroBatch]:
    """Yields micro-batches of decoded and cropped images, size x size, in the order of the plan.

    open_images: called in each worker, so it must be small to pickle. skip: the next good image of its
    micro-batch replaces a broken one; otherwise a broken one raises a ValueError that names it.
    """
    # The loader takes items of the plan early, for its workers; this loop takes each with its images.
    ahead, items = itertools.tee(plan)
    loader = DataLoader(
        _Crops(open_images, train, size, seed, skip, crop, crop_scale),
        sampler=ahead,
        batch_size=None,  # the plan's items are batches already
        num_workers=workers,
        prefetch_factor=PREFETCHED if workers else None,
        multiprocessing_context=_forkserver() if workers else None,
        worker_init_fn=_start_worker if workers else None,
        pin_memory=device.type == "cuda",
    )
    with closing(_while_workers_live(loader)) as batches:
        for (images, broken, error, retry), (epoch, ids) in zip(batches, items, strict=False):
            if retry:
                note_retry(retry)
            if error:
                raise ValueError(error)
            for i in sorted(broken.keys() - _skipped):  # each is reported once
                log.warning(f"skipped: {printable(broken[i])}")
            _skipped.update(broken)
            images, shown = send(images, device), labels[ids[_shown(ids, broken)]]
            if flip:
                draws = uniforms(seed, epoch, ids, FLIP.stop)[:, FLIP.start]
                sent, flipped = send_arrays((shown, draws < 0.5), device)
                images = torch.where(flipped[:, None, None, None], images.flip(2), images)
            else:
                sent = send(torch.from_numpy(shown), device)
            yield MicroBatch(epoch, ids, images, sent)


_skipped: set[int] = set()  # sample ids


def skipped() -> list[int]:
    """The sample ids of all images that this process skipped."""
    return sorted(_skipped)


def _while_workers_live(loader: Iterable[Item]) -> Generator[Item, None, None]:
    """Yields the loader's batches; closing it ends the workers. Raises ValueError when one is killed."""
    try:
        yield from loader
    except (RuntimeError, EOFError, ConnectionError) as error:
        reported = "exited unexpectedly" in str(error)
        # A batch was announced, and torch asked the dead worker for its bytes before it noticed the death.
        # An error that begins with "Caught" comes from a worker that lives.
        noticed = not isinstance(error, RuntimeError) and not str(error).startswith("Caught")
        if not (reported or noticed):
            raise
        what = "a decoding process was killed: it lacked memory, or shared memory"
        raise ValueError(f"{what}. {MORE_ROOM}") from None


def in_flight(workers: int) -> int:
    """The number of items of its plan that a DataLoader holds at once."""
    return max(1, PREFETCHED * workers)


class _Crops(Dataset):
    """The crops of each item of the plan, made by a worker. Small to pickle: the images stay on disk."""

    def __init__(
        self,
        open_images: Callable[[], Encoded],
        train: bool,
        size: int,
        seed: int,
        skip: bool,
        crop: Crop,
        crop_scale: tuple[float, ...],
    ):
        self.open_images, self.train, self.size, self.seed, self.skip = open_images, train, size, seed, skip
        self.crop, self.crop_scale = crop, crop_scale
        self.images: Encoded | None = None

    def __getitem__(self, item: tuple[int, np.ndarray]) -> Crops:
        """Returns the crops uint8 [b, size, size, 3], errors of broken images by id, and the item's.

        The error is no exception, which torch would wrap in a worker's traceback. Everything but the crops,
        which go by shared memory, is small: a pipe takes up to 4 KiB whole or not at all, so that a worker
        that is killed leaves no half of an answer to wait for.
        """
        epoch, ids = item
        self.images = self.images or self.open_images()
        draws = uniforms(self.seed, epoch, ids, CROP.stop)[:, CROP] if self.train else None
        crops = torch.empty(len(ids), self.size, self.size, 3, dtype=torch.uint8)
        broken, error = {}, ""
        for k, i in enumerate(ids.tolist()):
            try:
                image = self.images.decode(i)
            except ValueError as found:
                broken[i] = str(found)
                if self.skip:
                    continue
                error = f"{found}{ADVICE[self.train]}"
                break
            except OSError as found:
                error = f"{found.filename}: {found.strerror}" if found.strerror else str(found)
                break
            if draws is None:
                pixels = evaluation_crop(image, self.size, self.crop)
            else:
                pixels = random_resized_crop(image, self.size, draws[k], self.crop.filter, self.crop_scale)
            crops[k] = torch.from_numpy(pixels)
        if broken and not error:
            if broken.keys() >= set(ids.tolist()):
                error = f"no image of a micro-batch of {len(ids)} can be decoded: {broken[int(ids[0])]}"
            else:
                crops = crops[_shown(ids, broken)]
        if not error and (worker := torch.utils.data.get_worker_info()):
            error = _share(crops, PREFETCHED * worker.num_workers)
        return torch.empty(0) if error else crops, broken, error, first_retry()


def _shown(ids: np.ndarray, broken: dict[int, str]) -> np.ndarray:
    """Indices [b] of the images shown: each its own, and for a broken one the next good one's."""
    good = np.flatnonzero(~np.isin(ids, list(broken)))
    return good[np.searchsorted(good, np.arange(len(ids))) % len(good)]


def _share(crops: Tensor, ahead: int) -> str:
    """Moves crops to shared memory; returns the error. The queue's thread would only print it, and leave the
    trainer waiting for ever."""
    try:
        crops.share_memory_()
    except RuntimeError as error:
        # The first is the word of torch 2.15, the second of 2.11
        if "No space left" not in str(error) and "allocate shared memory" not in str(error):
            raise
        return (
            f"/dev/shm is full: each process decodes up to {ahead} micro-batches ahead into it, of"
            f" {crops.nbytes / 2**20:.1f} MiB each. {MORE_ROOM}"
        )
    return ""


# Workers ignore these signals: the trainer acts on them.
FOR_THE_TRAINER = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@functools.cache
def _forkserver() -> multiprocessing.context.BaseContext:
    """The context in which workers start: a fork server.

    A fork of this process would copy its sockets, and locks that threads of the process group, CUDA or
    telemetry may hold just then; spawn would import the script, and torch, once per worker and epoch. The
    fork server imports once, has none of our threads, and forks.
    """
    atexit.register(_kill_workers)
    # A worker runs the script's top level again (Python 3.11's server does not preload "__main__"): that is
    # quick when the server has imported what the script did.
    values = list(vars(sys.modules["__main__"]).values())
    names = [x.__name__ if isinstance(x, ModuleType) else getattr(x, "__module__", None) for x in values]
    modules = sorted({name for name in names if isinstance(name, str) and name in sys.modules} - {"__main__"})
    context = multiprocessing.get_context("forkserver")
    # One that can't be loaded would end the server.
    codec = ["torchcodec.decoders"] if torchcodec_decoder() else []
    context.set_forkserver_preload(["onecurve.data.workers", *codec, *modules])
    # Python 3.11 does not give the server our sys.path: a script started from elsewhere would not import.
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    # The server and its workers inherit the mask: a signal to the whole group can't end a worker that starts.
    multiprocessing.resource_tracker.ensure_running()  # first, as it unblocks these signals
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THE_TRAINER)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if before is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = before
    return context


def _kill_workers() -> None:
    """Kills workers that live at exit, when the traceback of an error still holds the batches.
    multiprocessing would send them SIGTERM, which they ignore, and wait for ever."""
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


def _start_worker(_: int) -> None:
    """Makes a worker ignore signals to the whole group, and end when the trainer ends, even killed. torch's
    own watchdog looks at the worker's parent, which is the fork server and lives."""

    trainer = multiprocessing.parent_process()
    assert trainer is not None

    def watch() -> None:
        trainer.join()
        os._exit(1)

    on_unsent(_end_unsent)  # too many open files, or no room in /tmp; the trainer notices when a worker ends
    for number in FOR_THE_TRAINER:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=watch, daemon=True).start()


def _end_unsent(error: Exception, _) -> None:
    log.warning(f"a decoding process can't send its images: {error}")
    os._exit(1)


# Pictures to predict


class Preprocessing(NamedTuple):
    """How a picture becomes the model's input. is_cropped: as `crop` says; else the whole is resized."""

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    is_cropped: bool
    crop: Crop = IMAGENET_CROP


class Pictures(Dataset[tuple[int, Tensor | str]]):
    """The model's inputs of pictures: float32 [3, S, S]; an error's text where one can't be read."""

    def __init__(self, files: Sequence[str], preprocessing: Preprocessing):
        self.files, self.preprocessing = files, preprocessing

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> tuple[int, Tensor | str]:
        size, mean, std, is_cropped, crop = self.preprocessing
        try:
            pixels = decode_image(retried(Path(self.files[i]).read_bytes)())  # uint8 [H, W, 3]
        except OSError as error:
            return i, error.strerror or str(error)
        except ValueError as error:
            return i, str(error)
        pixels = np.ascontiguousarray(evaluation_crop(pixels, size, crop)) if is_cropped else pixels
        return i, to_float(torch.from_numpy(pixels)[None], mean, std, size, crop.enlargement)[0]


class PictureBatch(NamedTuple):
    ids: np.ndarray  # int64 [b]
    inputs: Tensor  # float32 [b, 3, S, S]
    broken: list[tuple[int, str]]  # ids of others, and why


def picture_batches(
    pictures: Pictures, ids: Sequence[int], size: int, workers: int
) -> Iterator[PictureBatch]:
    """Yields batches of up to `size` pictures, in the order of ids. workers: processes that decode."""
    batches = [list(ids[k : k + size]) for k in range(0, len(ids), size)]
    options: dict[str, Any] = {"worker_init_fn": _start_worker} if workers else {}
    loader = DataLoader(pictures, batch_sampler=batches, num_workers=workers, collate_fn=_collate, **options)
    yield from _while_workers_live(loader)


def _collate(rows: list[tuple[int, Tensor | str]]) -> PictureBatch:
    good = [(i, content) for i, content in rows if isinstance(content, Tensor)]
    broken = [(i, content) for i, content in rows if isinstance(content, str)]
    inputs = torch.stack([content for _, content in good]) if good else torch.empty(0)
    return PictureBatch(np.array([i for i, _ in good], np.int64), inputs, broken)
