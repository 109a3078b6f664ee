"""Out of memory beside a process that holds most of the GPU: the message, and find_batch_size.py."""

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.gpu.rows import FAIL, OK, Result, Row, Setting, command, run_flags, small_images, succeeds

FREE_GIB = 6  # what the ballast leaves
BALLAST = """
import sys, torch
free, _ = torch.cuda.mem_get_info()
held = torch.empty(max(0, free - int(float(sys.argv[1]) * 2**30)), dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""


# A dry run limits memory as find_batch_size.py does.
LIMITED = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_DATA, (2**32, 2**32))
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def rows() -> dict[str, Row]:
    return {"out of memory is one line": one_line, "find_batch_size.py": search}


@contextlib.contextmanager
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
    """A batch of all generated images, enlarged: it needs 40 times what is free."""
    words = small_images(setting, "train_cnn_b")
    words += [
        "--width",
        64,
        "--batch_size",
        4096,
        "--image_size",
        128,
        *run_flags(setting, setting.folder / "full", words),
    ]
    with ballast() if not setting.dry_run else contextlib.nullcontext():
        done = command(setting, ["-c", LIMITED, *words] if setting.dry_run else words)
    lines = re.findall(r"^error: out of memory.*", done.output, re.MULTILINE)
    sound = done.status not in (0, None) and len(lines) == 1 and "Traceback" not in done.output
    note = (lines or done.output.splitlines()[-1:] or [""])[0][:200]
    return Result(expected="one line", verdict=OK if sound else FAIL, note=note)


def search(setting: Setting) -> Result:
    """In a dry run under a limit of memory, which stands for the GPU's."""
    file = setting.folder / "found.json"
    limit = ["--memory_limit_gib", 2, "--quantum", 128] if setting.dry_run else []
    config = ["--config_file", "accelerate_configs/single_gpu.yaml", "--output", file]
    words = ["find_batch_size.py", *config, *limit, *small_images(setting, "train_cnn_b")]
    words += ["--cache_dir", setting.folder.parent / "cache"]
    if setting.dry_run:
        succeeds(setting, [*words, "--width", 64])
    else:
        with ballast():
            succeeds(setting, words)
    found = json.loads(file.read_text())
    tried = f"{len(found['trials'])} trials, knee {found.get('knee')}"
    return Result(found["answer"], "images", "above 0", OK if found["answer"] > 0 else FAIL, tried)
