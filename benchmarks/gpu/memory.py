"""Out of memory beside a process that holds most of the GPU: the message, and find_batch_size.py."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.gpu.rows import FAIL, OK, Result, Row, Setting, command, need_gpu, small_images, succeeds

FREE_GIB = 6  # what the ballast leaves
BALLAST = """
import sys, torch
free, _ = torch.cuda.mem_get_info()
held = torch.empty(max(0, free - int(float(sys.argv[1]) * 2**30)), dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""


def rows() -> dict[str, Row]:
    return {"out of memory is one line": one_line, "find_batch_size.py": search}


@contextmanager
def ballast() -> Iterator[None]:
    """Holds the GPU's memory but FREE_GIB, in another process."""
    words = [sys.executable, "-c", BALLAST, str(FREE_GIB)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "held\n"
            yield
        finally:
            process.kill()


def one_line(setting: Setting) -> Result:
    need_gpu(setting)
    words = small_images(setting, "train_cnn_b")
    with ballast():
        done = command(setting, [*words, "--batch_size", 32768, "--output_dir", setting.folder / "full"])
    lines = re.findall(r"^error: out of memory.*", done.output, re.MULTILINE)
    sound = done.status != 0 and len(lines) == 1 and "Traceback" not in done.output
    return Result(verdict=OK if sound else FAIL, note=(lines or done.output.splitlines()[-1:])[0][:200])


def search(setting: Setting) -> Result:
    """In a dry run under a limit of memory, which stands for the GPU's."""
    file = setting.folder / "found.json"
    limit = ["--memory_limit_gib", 2, "--quantum", 128] if setting.dry_run else []
    config = ["--config_file", "accelerate_configs/single_gpu.yaml", "--output", file]
    words = ["find_batch_size.py", *config, *limit, *small_images(setting, "train_cnn_b")]
    if setting.dry_run:
        succeeds(setting, [*words, "--width", 64])
    else:
        with ballast():
            succeeds(setting, words)
    found = json.loads(file.read_text())
    tried = f"{len(found['trials'])} trials, knee {found.get('knee')}"
    return Result(found["answer"], "images", OK if found["answer"] > 0 else FAIL, tried)
