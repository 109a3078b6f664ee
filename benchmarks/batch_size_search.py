"""find_batch_size.py beside accelerate's find_executable_batch_size: the same model, data and limit.

    CUDA_VISIBLE_DEVICES= python -m benchmarks.batch_size_search

find_executable_batch_size wraps a user's training function, starts it at a size that the user chooses, and
multiplies that by 0.9 as long as it runs out of memory, all in one process. Here the function is 4 steps and
an evaluation of the same model, optimizer and images, under plain Accelerate. It gets help twice: freed
memory is returned before each try, as a GPU's cache is emptied, and oneDNN's out-of-memory errors are
translated into texts that it knows. Each answer is then tried by a launch of the real script. On one
process (with several each rank would decide for itself), in fp32.

2 GiB a process, two AVX512-BF16 cores with other work beside it:

search                             answer  trials  seconds    as a launch
find_batch_size.py                     56       4       71            ran
find_executable_batch_size(128)        52       9       76            ran
find_executable_batch_size(512)        51      22       70            ran
find_executable_batch_size(32)         32       1       14            ran

It never tries more than the first size. In bf16 it found nothing from 128 and 512: once oneDNN could not make
a primitive, it could make none in that process, for any size.
"""

import argparse
import ctypes
import json
import os
import re
import sys
import tempfile
import time

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size

import find_batch_size
from common.augment import to_float
from common.batch_search import launch
from common.data.images import Images, load
from common.order import order
from common.recipe import parse
from train_vit import Vit, build_model, build_optimizer

CONFIG = "accelerate_configs/single_gpu.yaml"
RECIPE = (
    "--data digits --model test_vit --image_size 96 --patch_size 4 --mixup 0 --cutmix 0 --mixed_precision no"
)
STEPS = 4
STARTS = (128, 512, 32)  # accelerate's default; too large by far; too small
FOUND = "found "
ONEDNN = "could not create a primitive"  # under a limit: out of memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--memory_limit_gib", type=float, default=2.0)
    parser.add_argument("--recipe", default=RECIPE, help="flags of train_vit.py")
    parser.add_argument("--start", type=int, help="of find_executable_batch_size, in the process under test")
    flags = parser.parse_args()
    if flags.start:
        search_in_process(flags.start, flags.recipe.split())
    else:
        compare(flags.recipe, flags.memory_limit_gib)


def compare(recipe: str, limit_gib: float) -> None:
    form = "{:<32} {:>8} {:>7} {:>8} {:>14}"
    rows = [form.format("search", "answer", "trials", "seconds", "as a launch")]
    launcher = [sys.executable, "-m", "accelerate.commands.launch", f"--config_file={CONFIG}"]
    with tempfile.TemporaryDirectory() as folder:
        words = [
            f"--config_file={CONFIG}",
            f"--memory_limit_gib={limit_gib}",
            f"--output={folder}/found.json",
        ]
        search = find_batch_size.Search(find_batch_size.parse([*words, "train_vit.py", *recipe.split()]))
        began = time.monotonic()
        search.run()
        seconds = time.monotonic() - began
        answer = max(t.per_device_batch_size for t in search.trials if t.outcome == find_batch_size.RAN)
        rows.append(form.format("find_batch_size.py", answer, len(search.trials), f"{seconds:.0f}", "ran"))
        for first in STARTS:
            module = ["-m", "benchmarks.batch_size_search", f"--start={first}", f"--recipe={recipe}"]
            ended = launch([*launcher, *module], limit_gib, timeout_s=900)
            if ended.status != 0:
                print(ended.output, file=sys.stderr)
            found = re.search(f"{FOUND}(.*)", ended.output)
            answer, trials = json.loads(found[1]) if found else ("none", "")
            outcome = search.try_size(answer)[0].outcome if found else ""
            name = f"find_executable_batch_size({first})"
            rows.append(form.format(name, answer, trials, f"{ended.seconds:.0f}", outcome))
    print("\n" + "\n".join(rows))


def search_in_process(first: int, words: list[str]) -> None:
    """A user's code around a training loop, with find_executable_batch_size."""
    recipe, accelerator = parse(Vit, words), Accelerator(mixed_precision="no")
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # the launcher has set one
    images = load(accelerator, recipe)
    tried = []

    @find_executable_batch_size(starting_batch_size=first)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        accelerator.free_memory()
        ctypes.CDLL(None).malloc_trim(0)  # as the decorator empties a GPU's cache
        try:
            train_and_evaluate(accelerator, images, recipe, batch_size)
        except RuntimeError as error:
            if ONEDNN not in str(error):
                raise
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory") from None
        return batch_size

    print(f"{FOUND}{json.dumps([train(), len(tried)])}", flush=True)


def train_and_evaluate(accelerator: Accelerator, images: Images, recipe: Vit, batch_size: int) -> None:
    torch.manual_seed(0)
    model = build_model(recipe, len(images.classes))
    mean, std = model.pretrained_cfg["mean"], model.pretrained_cfg["std"]
    model, optimizer = accelerator.prepare(model, build_optimizer(model, recipe))
    ids = np.resize(order(0, 0, len(images.train)), (STEPS + 1, batch_size))
    options = dict(train=True, size=recipe.image_size, seed=0, workers=0, device=accelerator.device)
    for k, (_, _, pixels, labels) in enumerate(images.train.batches([(0, row) for row in ids], **options)):
        inputs = to_float(pixels, mean, std, recipe.image_size)
        if k == STEPS:
            with torch.no_grad():
                model(inputs)
            break
        accelerator.backward(F.cross_entropy(model(inputs).float(), labels))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
