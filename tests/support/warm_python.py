"""A stand-in for `python` that starts 3 s of processor time sooner: see warm_server.py."""

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent


@functools.cache
def warm_python(*modules: str) -> Path:
    """The stand-in, an executable file. Its server has these modules, too; it ends with this process."""
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    python, server = folder / "python", folder / "server"
    python.write_text(f"#!{sys.executable} -IS\n{(HERE / 'warm_client.py').read_text()}")
    python.chmod(0o755)
    process = subprocess.Popen(
        [sys.executable, HERE / "warm_server.py", server, *modules],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}, cwd=folder,
    )  # fmt: skip
    process.stdout.readline()  # it listens
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return python


def warmed(words: list[str]) -> list[str]:
    """The command, run by the stand-in where it is one for Python."""
    program = Path(words[0])
    is_launcher = program.parent == Path(sys.executable).parent and program.name in ("torchrun", "deepspeed")
    if words[0] != sys.executable and not is_launcher:
        return words
    zero = any("zero" in word or "deepspeed" in word for word in words)
    python = warm_python("deepspeed") if zero else warm_python()
    return [str(python), *(words if is_launcher else words[1:])]
