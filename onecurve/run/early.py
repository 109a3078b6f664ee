"""Reports invalid flags and data before a train script spends seconds on importing torch."""

import sys
from typing import Any, TypeVar

RecipeClass = TypeVar("RecipeClass", bound=type)


def check_early(recipe_class: RecipeClass) -> RecipeClass:
    """Check a train script's flags and data when its recipe class is defined, and exit if they are invalid.

    This class decorator returns the class unchanged. It has no effect in an imported script. The first
    process checks the data, but only in single-host jobs. In a multi-host job, the other hosts would wait for
    the host that has exited.
    """
    if recipe_class.__module__ == "__main__":
        from onecurve.flags.recipe import ImageRecipe, from_flags
        from onecurve.system.cli import run_command, say_loading
        from onecurve.system.env import is_hosts_first, is_launched, processes_per_host, world_size
        from onecurve.system.processes import end_with_parent

        if is_launched():  # End this process when the launcher ends, even during imports
            end_with_parent()

        recipe: Any = from_flags(recipe_class)  # Ends the process if a flag is invalid
        say_loading()  # Tells the user why the next imports take seconds
        if isinstance(recipe, ImageRecipe) and is_hosts_first() and world_size() == processes_per_host():
            from onecurve.data.sources import check_inputs

            if exit_status := run_command(lambda: check_inputs(recipe)):
                sys.exit(exit_status)
    return recipe_class
