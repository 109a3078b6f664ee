"""Reports mistakes in flags and data before a train script spends seconds on importing torch."""

import sys
from typing import Any, TypeVar

RecipeClass = TypeVar("RecipeClass", bound=type)


def check_early(recipe_class: RecipeClass) -> RecipeClass:
    """Decorate a train script's recipe, so that a mistake in flags or data files ends the script early.

    The decorator does nothing in an imported script. It checks the data only if the job runs on one host,
    because the other hosts of a job would wait for a host that has ended.
    """
    if recipe_class.__module__ == "__main__":
        from onecurve.flags.recipe import ImageRecipe, from_flags
        from onecurve.system.cli import run_command, say_loading
        from onecurve.system.env import is_hosts_first, launched, processes_per_host, world_size
        from onecurve.system.processes import end_with_parent

        if launched():  # end this process if the launcher ends, even during the imports
            end_with_parent()

        recipe: Any = from_flags(recipe_class)
        say_loading()
        if isinstance(recipe, ImageRecipe) and is_hosts_first() and world_size() == processes_per_host():
            from onecurve.data.sources import check_inputs

            if status := run_command(lambda: check_inputs(recipe)):
                sys.exit(status)
    return recipe_class
