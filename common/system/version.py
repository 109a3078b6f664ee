"""The project's version, which is written only in pyproject.toml."""

import functools
import tomllib

from common.system.paths import ROOT


@functools.cache
def project_version() -> str:
    """The version, as `0.9.0`; `unknown` if the code was copied without its pyproject.toml."""
    try:
        return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    except (OSError, ValueError, KeyError):
        return "unknown"
