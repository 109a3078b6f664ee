"""Files that are there whole or not at all."""

import json
import os
from pathlib import Path
from typing import Any


def sync(path: Path) -> None:
    """Waits until the file, or the folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    temporary.replace(path)
