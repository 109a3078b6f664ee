"""Uses or replaces private names of Pillow 13.0, huggingface_hub, TensorBoard 2.21 and evaluate 0.4.6."""

import sys
import threading
from pathlib import Path
from typing import Any


def allow_large_texts() -> None:
    """Make Pillow accept PNG files that contain a text or colour profile of more than 1 MiB.

    Otherwise, Pillow refuses the file even if the image itself is small (Pillow #8363). Pillow's limit on a
    file's total text length still applies.
    """
    from PIL import PngImagePlugin

    PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY


def use_hub_offline() -> None:
    """Make huggingface_hub read only cached files from now on.

    Setting HF_HUB_OFFLINE is not enough, because huggingface_hub reads this variable only on import. Without
    this function, huggingface_hub requests each file five times if the Hub is unreachable.
    """
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = True


def is_tensorboard_writer(thread: threading.Thread | None) -> bool:
    """Return True if the thread is TensorBoard's writer thread.

    When the disk is full, TensorBoard raises an error in the writer thread, and later in the main thread.
    Callers use this function to avoid a second traceback.
    """
    return type(thread).__name__ == "_AsyncWriterThread"


def import_evaluate(module_cache: Path) -> Any:
    """Import the package `evaluate` without transformers, and set the folder for copies of metric modules.

    By default, `evaluate` copies the modules to a cache in the home folder. This cache may be read-only or
    contain an incomplete copy from another process. `evaluate` also imports transformers for pipelines, which
    takes 2 s.
    """
    loaded_modules: dict[str, Any] = sys.modules  # declared with a type that permits None
    loaded_modules.setdefault("transformers", None)  # None makes an import fail
    import evaluate

    if loaded_modules["transformers"] is None:
        del loaded_modules["transformers"]
    evaluate.config.HF_MODULES_CACHE = module_cache
    return evaluate
