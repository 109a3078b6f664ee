"""Names of Pillow 13.0, huggingface_hub, TensorBoard 2.21 and evaluate 0.4.6 that are replaced or read."""

import sys
import threading
from pathlib import Path
from typing import Any


def allow_large_texts() -> None:
    """Let Pillow read a PNG whose text or colour profile is longer than 1 MiB.

    Without it Pillow refuses PNGs whose pixels are small (Pillow #8363). The limit of all texts together
    stays.
    """
    from PIL import PngImagePlugin

    PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY


def use_hub_offline() -> None:
    """Make huggingface_hub answer from its cache from now on.

    It reads HF_HUB_OFFLINE when it is imported. Without this it tries five times for each file of a hub that
    can't be reached.
    """
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = True


def is_tensorboard_writer(thread: threading.Thread | None) -> bool:
    """Return True for the thread in which TensorBoard writes its file.

    It raises an error twice, in this thread and later in the main thread. Without the name a full disk would
    print a second traceback.
    """
    return type(thread).__name__ == "_AsyncWriterThread"


def import_evaluate(scratch: Path) -> Any:
    """Import `evaluate`, which copies the modules that it loads to `scratch`, without transformers.

    Without it the copies go to a cache in the home folder, which may be read-only or hold another process's
    unfinished copy. evaluate imports transformers for its pipelines, which takes 2 s.
    """
    modules: dict[str, Any] = sys.modules
    modules.setdefault("transformers", None)
    import evaluate

    if modules["transformers"] is None:
        del modules["transformers"]
    evaluate.config.HF_MODULES_CACHE = scratch
    return evaluate
