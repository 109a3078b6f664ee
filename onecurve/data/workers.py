"""DataLoader workers that decode and crop images, with functions that start and stop the workers."""

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
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from types import ModuleType
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from onecurve.data.crops import CROP_SCALE, evaluation_crop, random_resized_crop
from onecurve.data.decode import torchcodec_decoder
from onecurve.data.encoded import EncodedImages
from onecurve.models.preprocessing import IMAGENET_CROP, Crop
from onecurve.numerics.augment import CROP, FLIP, send, send_arrays
from onecurve.numerics.order import Plan, PlanItem, uniforms
from onecurve.system.files import first_retry_error, note_retry
from onecurve.system.output import log
from onecurve.system.text import printable
from onecurve.upstream.python_ import call_on_unsent

PREFETCHED_PER_WORKER = 4  # number of micro-batches that each worker prefetches
BROKEN_IMAGE_ADVICE = {  # advice about a broken image, for training (True) and evaluation (False)
    True: ". To train without this image, add --on_bad_image skip",
    False: ". Evaluations include every image. Repair the image at its source",
}
SHARED_MEMORY_ADVICE = "Increase the size of /dev/shm (docker run --shm-size), or reduce --workers"


class MicroBatch(NamedTuple):
    """Images and labels for one forward pass, on the device."""

    epoch: int
    ids: np.ndarray  # sample ids, int64 [b]
    images: Tensor  # pixels, uint8 [b, H, W, 3]
    labels: Tensor  # class labels, int64 [b]


Item = TypeVar("Item")


class DecodedCrops(NamedTuple):
    """Result of decoding one micro-batch."""

    crops: Tensor  # uint8 [b, size, size, 3], or empty if the micro-batch has an error
    error_by_id: dict[int, str]  # errors of broken images, by sample id
    batch_error: str  # error of the whole micro-batch, or ""
    retry_cause: str  # cause of the worker's first retried read, or ""


def decoded_batches(
    open_images: Callable[[], EncodedImages],
    labels: np.ndarray,
    plan: Plan,
    *,
    device: torch.device,
    train: bool,
    crop_size: int,
    seed: int,
    worker_count: int,
    skip_broken: bool,
    flip_randomly: bool = False,
    crop: Crop = IMAGENET_CROP,
    crop_scale: tuple[float, ...] = CROP_SCALE,
) -> Iterator[MicroBatch]:
    """Yield micro-batches of decoded images, cropped to squares, in the order of the plan.

    For each skipped image, this function logs one warning and records the id for `skipped_ids`.

    Args:
        open_images: Function that opens the images. Its pickle must be small, because each worker receives a
            copy.
        labels: Labels of all samples, int64 [N].
        plan: Epoch and sample ids of each micro-batch.
        device: Device of the micro-batches.
        train: Whether to use random resized crops instead of the evaluation crop.
        crop_size: Height and width of the crops in pixels.
        seed: Seed of the random crops and flips.
        worker_count: Number of decoding processes. With 0 processes, the current process decodes.
        skip_broken: Whether to replace a broken image with the next intact image in the micro-batch.
        flip_randomly: Whether to mirror images at random, with a probability of 1/2.
        crop: Evaluation crop. Random crops use only the interpolation.
        crop_scale: Minimum and maximum area of a random crop, as fractions of the image area.

    Raises:
        ValueError: If an image is broken and `skip_broken` is False, or if no image in a micro-batch can be
            decoded.
    """
    # The loader reads ahead in the first copy of the plan to supply the workers. The loop below reads one
    # item of the second copy per finished micro-batch.
    prefetched_plan, consumed_plan = itertools.tee(plan)
    crop_loader = DataLoader(
        _CropDataset(open_images, train, crop_size, seed, skip_broken, crop, crop_scale),
        sampler=prefetched_plan,
        batch_size=None,  # because each item of the plan is already a batch
        num_workers=worker_count,
        prefetch_factor=PREFETCHED_PER_WORKER if worker_count else None,
        multiprocessing_context=_forkserver() if worker_count else None,
        worker_init_fn=start_worker if worker_count else None,
        pin_memory=device.type == "cuda",
    )
    with closing(while_workers_live(crop_loader)) as decoded_crops:
        crops_with_ids = zip(decoded_crops, consumed_plan, strict=False)
        for (crops, error_by_id, batch_error, retry_cause), (epoch, ids) in crops_with_ids:
            if retry_cause:
                note_retry(retry_cause)
            if batch_error:
                raise ValueError(batch_error)
            for sample_id in sorted(error_by_id.keys() - _skipped_ids):  # logs each broken image only once
                log.warning(f"skipped: {printable(error_by_id[sample_id])}")
            _skipped_ids.update(error_by_id)
            source_ids = ids[_source_positions(ids, error_by_id)]
            images = send(crops, device)
            batch_labels = labels[source_ids]
            if flip_randomly:
                flip_draws = uniforms(seed, epoch, ids, FLIP.stop)[:, FLIP.start]
                sent_labels, is_flipped = send_arrays((batch_labels, flip_draws < 0.5), device)
                # Dimension 2 is the width
                images = torch.where(is_flipped[:, None, None, None], images.flip(2), images)
            else:
                sent_labels = send(torch.from_numpy(batch_labels), device)
            yield MicroBatch(epoch, ids, images, sent_labels)


_skipped_ids: set[int] = set()  # sample ids of the images that training skipped


def skipped_ids() -> list[int]:
    """Return the sorted sample ids of all images that this process skipped."""
    return sorted(_skipped_ids)


def while_workers_live(loader: Iterable[Item]) -> Generator[Item, None, None]:
    """Yield the loader's batches. Closing this generator ends the worker processes.

    Raises:
        ValueError: If a worker was killed.
    """
    try:
        yield from loader
    except (RuntimeError, EOFError, ConnectionError) as error:
        is_worker_exit = "exited unexpectedly" in str(error)
        # A batch is lost if a worker dies after announcing it, and torch requests it before noticing that the
        # worker is dead. Errors that begin with "Caught" come from workers that are alive.
        is_lost_batch = not isinstance(error, RuntimeError) and not str(error).startswith("Caught")
        if not (is_worker_exit or is_lost_batch):
            raise
        worker_problem = "a decoding process was killed, because memory or shared memory ran out"
        raise ValueError(f"{worker_problem}. {SHARED_MEMORY_ADVICE}") from None


def max_items_in_flight(worker_count: int) -> int:
    """Return the number of plan items that a DataLoader processes at the same time, 1 without workers."""
    return max(1, PREFETCHED_PER_WORKER * worker_count)


class _CropDataset(Dataset):
    """Data set with one item per micro-batch and a small pickle, because the images stay on disk."""

    def __init__(
        self,
        open_images: Callable[[], EncodedImages],
        train: bool,
        crop_size: int,
        seed: int,
        skip_broken: bool,
        crop: Crop,
        crop_scale: tuple[float, ...],
    ):
        self.open_images, self.train, self.seed, self.skip_broken = open_images, train, seed, skip_broken
        self.crop_size, self.crop, self.crop_scale = crop_size, crop, crop_scale
        self.images: EncodedImages | None = None  # opened by the first item

    def __getitem__(self, plan_item: PlanItem) -> DecodedCrops:
        """Return the crops of one micro-batch, or an error.

        Errors are returned as strings, because torch would add a worker's traceback to an exception. Crops
        are sent through shared memory, so that the rest of the result is small. A pipe transfers up to 4 KiB
        atomically, so a killed worker never leaves a partial result for which the trainer would wait.

        Args:
            plan_item: Epoch and sample ids, int64 [b].
        """
        epoch, ids = plan_item
        self.images = self.images or self.open_images()
        # Random numbers for each image's crop, float64 [b, 40]
        crop_draws = uniforms(self.seed, epoch, ids, CROP.stop)[:, CROP] if self.train else None
        crops = torch.empty(len(ids), self.crop_size, self.crop_size, 3, dtype=torch.uint8)
        error_by_id = dict[int, str]()  # errors of broken images
        batch_error = ""  # error that ends the run, or ""
        for position, sample_id in enumerate(ids.tolist()):
            try:
                image = self.images.decode(sample_id)
            except ValueError as decode_error:
                error_by_id[sample_id] = str(decode_error)
                if self.skip_broken:
                    continue
                batch_error = f"{decode_error}{BROKEN_IMAGE_ADVICE[self.train]}"
                break
            except OSError as read_error:
                batch_error = str(read_error)
                if read_error.strerror:
                    batch_error = f"{read_error.filename}: {read_error.strerror}"
                break
            if crop_draws is None:
                pixels = evaluation_crop(image, self.crop_size, self.crop)
            else:
                draws = crop_draws[position]
                pixels = random_resized_crop(image, self.crop_size, draws, self.crop.filter, self.crop_scale)
            crops[position] = torch.from_numpy(pixels)
        if error_by_id and not batch_error:
            if error_by_id.keys() >= set(ids.tolist()):  # no intact image can replace the broken images
                first_error = error_by_id[int(ids[0])]
                batch_error = f"none of the {len(ids)} images in a micro-batch can be decoded: {first_error}"
            else:
                crops = crops[_source_positions(ids, error_by_id)]
        if not batch_error and (worker_info := torch.utils.data.get_worker_info()):
            batch_error = _share_crops(crops, PREFETCHED_PER_WORKER * worker_info.num_workers)
        if batch_error:
            crops = torch.empty(0)  # the trainer raises the error and uses no crops
        return DecodedCrops(crops, error_by_id, batch_error, first_retry_error())


def _source_positions(sample_ids: np.ndarray, error_by_id: dict[int, str]) -> np.ndarray:
    """Return the index of the image used at each position in the micro-batch, int64 [b].

    A broken image is replaced with the next intact image, or with the first intact image at the end.
    """
    intact_positions = np.flatnonzero(~np.isin(sample_ids, list(error_by_id)))
    next_intact_index = np.searchsorted(intact_positions, np.arange(len(sample_ids))) % len(intact_positions)
    return intact_positions[next_intact_index]


def _share_crops(crops: Tensor, prefetched_batches: int) -> str:
    """Move crops to shared memory, and return an error message, or "" on success.

    Without this explicit move, the queue's thread would only print the error, and the trainer would wait
    forever.

    Args:
        crops: Crops of one micro-batch.
        prefetched_batches: Number of micro-batches that all workers of a process prefetch, shown in the error
            message.
    """
    try:
        crops.share_memory_()
    except RuntimeError as sharing_error:
        # Error messages of torch 2.15 and torch 2.11, respectively
        if "No space left" not in str(sharing_error) and "allocate shared memory" not in str(sharing_error):
            raise
        return (
            f"/dev/shm is full. Each process prefetches up to {prefetched_batches} micro-batches"
            f" of {crops.nbytes / 2**20:.1f} MiB into /dev/shm. {SHARED_MEMORY_ADVICE}"
        )
    return ""


# Signals that workers ignore, because the trainer handles them
TRAINER_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@functools.cache
def _forkserver() -> multiprocessing.context.BaseContext:
    """Return a multiprocessing context whose fork server starts the workers.

    Forking this process directly would copy its sockets and any locks that process group, CUDA or telemetry
    threads hold at the time of the fork. Spawning workers would import the script and torch once per worker
    and epoch. In contrast, the fork server imports modules only once, runs none of our threads, and forks
    each worker.
    """
    atexit.register(_kill_workers)
    # Each worker runs the script's top-level code again, because Python 3.11's fork server does not preload
    # "__main__". The code runs fast if the server has already imported the script's modules.
    module_names = []
    for script_global in list(vars(sys.modules["__main__"]).values()):
        is_module = isinstance(script_global, ModuleType)
        module_name = script_global.__name__ if is_module else getattr(script_global, "__module__", None)
        module_names.append(module_name)
    script_modules = {name for name in module_names if isinstance(name, str) and name in sys.modules}
    forkserver_context = multiprocessing.get_context("forkserver")
    # Preloading a library that can't be loaded would end the server.
    codec_modules = ["torchcodec.decoders"] if torchcodec_decoder() else []
    preloaded_modules = ["onecurve.data.workers", *codec_modules, *sorted(script_modules - {"__main__"})]
    forkserver_context.set_forkserver_preload(preloaded_modules)
    # Python 3.11 does not pass sys.path to the fork server. Without PYTHONPATH, the server can't import a
    # script that was started from a different folder.
    previous_python_path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    # The fork server and the workers inherit the signal mask, so that a signal to the process group can't end
    # a worker during startup.
    multiprocessing.resource_tracker.ensure_running()  # unblocks signals, so this call must precede the mask
    previous_signal_mask = signal.pthread_sigmask(signal.SIG_BLOCK, TRAINER_SIGNALS)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_signal_mask)
        if previous_python_path is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = previous_python_path
    return forkserver_context


def _kill_workers() -> None:
    """Kill workers that still run at exit because an error's traceback refers to the batches.

    Without this function, multiprocessing would send SIGTERM, which workers ignore, and wait forever.
    """
    for worker_process in multiprocessing.active_children():
        if worker_process.daemon:  # DataLoader workers are daemons
            worker_process.kill()


def start_worker(_worker_id: int) -> None:
    """Make a worker ignore signals to the process group, and end the worker when the trainer ends.

    torch's watchdog does not end the worker, because it only checks the worker's parent process. This parent
    is the fork server, which stays alive.
    """
    trainer_process = multiprocessing.parent_process()
    assert trainer_process is not None

    def exit_with_trainer() -> None:
        trainer_process.join()
        os._exit(1)

    # Sending images fails if too many files are open or /tmp is full. The worker then exits, and the trainer
    # detects the exit.
    call_on_unsent(_exit_unsent)
    for signal_number in TRAINER_SIGNALS:
        signal.signal(signal_number, signal.SIG_IGN)
    threading.Thread(target=exit_with_trainer, daemon=True).start()


def _exit_unsent(send_error: Exception, _unsent_object) -> None:
    """Log the reason why a worker can't send its images, and end the worker process."""
    log.warning(f"a decoding process can't send its images: {send_error}")
    os._exit(1)
