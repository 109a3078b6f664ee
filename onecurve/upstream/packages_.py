"""Private or replaced names of Pillow 13.0, huggingface_hub, TensorBoard 2.21 and evaluate 0.4.6."""

import sys
import threading
from pathlib import Path
from typing import Any


def allow_large_texts() -> None:
    """Let Pillow read a PNG with a text or colour profile longer than 1 MiB.

    Otherwise, Pillow refuses PNGs even if their images are small (Pillow #8363). The limit for all texts
    together still applies.
    """
    from PIL import PngImagePlugin

    PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY


def use_hub_offline() -> None:
    """Make huggingface_hub answer from its cache from now on.

    huggingface_hub reads HF_HUB_OFFLINE only on import. Without this function, it tries five times for each
    file of an unreachable hub.
    """
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = True


def is_tensorboard_writer(thread: threading.Thread | None) -> bool:
    """Return True for the thread in which TensorBoard writes its file.

    TensorBoard raises an error in this thread, and later again in the main thread. Unless the thread is
    recognised, a full disk prints a second traceback.
    """
    return type(thread).__name__ == "_AsyncWriterThread"


def import_evaluate(scratch: Path) -> Any:
    """Import `evaluate` without transformers, and let it copy the modules that it loads to `scratch`.

    Otherwise, the copies go to a cache in the home folder, which may be read-only or contain another
    process's incomplete copy. evaluate imports transformers for its pipelines, which takes 2 s.
    """
    modules: dict[str, Any] = sys.modules
    modules.setdefault("transformers", None)
    import evaluate

    if modules["transformers"] is None:
        del modules["transformers"]
    evaluate.config.HF_MODULES_CACHE = scratch
    return evaluate
