"""Private and replaced names of Pillow 13.0, huggingface_hub, TensorBoard 2.21 and evaluate 0.4.6."""

import sys
import threading
from pathlib import Path
from typing import Any


def allow_large_texts() -> None:
    """Let Pillow read a PNG with a text or colour profile longer than 1 MiB.

    Otherwise, Pillow refuses such a PNG even if the image itself is small (Pillow #8363). Pillow's limit for
    the total length of all texts still applies.
    """
    from PIL import PngImagePlugin

    PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY


def use_hub_offline() -> None:
    """Make huggingface_hub use only its cache from now on.

    huggingface_hub reads HF_HUB_OFFLINE only on import. Without this function, huggingface_hub tries to fetch
    each file five times if the hub is unreachable.
    """
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = True


def is_tensorboard_writer(thread: threading.Thread | None) -> bool:
    """Return True if the thread is TensorBoard's writer thread.

    When the disk is full, TensorBoard raises an error in this thread and later again in the main thread.
    Recognising the thread avoids a second traceback.
    """
    return type(thread).__name__ == "_AsyncWriterThread"


def import_evaluate(scratch: Path) -> Any:
    """Import `evaluate` without transformers, and make it copy the modules that it loads to `scratch`.

    Otherwise, `evaluate` writes the copies to a cache in the home folder, which may be read-only or contain
    another process's incomplete copy. `evaluate` imports transformers for its pipelines, which takes 2 s.
    """
    modules: dict[str, Any] = sys.modules
    modules.setdefault("transformers", None)
    import evaluate

    if modules["transformers"] is None:
        del modules["transformers"]
    evaluate.config.HF_MODULES_CACHE = scratch
    return evaluate
