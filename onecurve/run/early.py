"""Reports mistakes in the flags and the data before a train script imports torch, which takes seconds."""

import sys
from typing import Any, TypeVar

Kind = TypeVar("Kind", bound=type)


def check_early(kind: Kind) -> Kind:
    """Decorates a train script's recipe: a mistake in the flags or in the data's files ends the script here.

    Does nothing where the script is imported. Checks the data of a job on one host only: others would wait.
    """
    if kind.__module__ == "__main__":
        from onecurve.flags.recipe import ImageRecipe, from_flags
        from onecurve.system.cli import run_command, say_loading
        from onecurve.system.env import is_hosts_first, launched, processes_per_host, world_size
        from onecurve.system.processes import end_with_parent

        if launched():  # a launcher that ends during the imports leaves no training behind
            end_with_parent()

        recipe: Any = from_flags(kind)
        say_loading()
        if isinstance(recipe, ImageRecipe) and is_hosts_first() and world_size() == processes_per_host():
            from onecurve.data.sources import check_inputs

            if status := run_command(lambda: check_inputs(recipe)):
                sys.exit(status)
    return kind
