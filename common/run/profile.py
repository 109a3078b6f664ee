"""Begins the profile of a run's steps."""

from pathlib import Path

from accelerate import Accelerator

from common.order import Steps
from common.recipe import Recipe
from common.telemetry.profiler import STEPS, Profile


def begin_profile(
    accelerator: Accelerator,
    recipe: Recipe,
    steps: Steps,
    folder: Path | None,
) -> Profile | None:
    """The profile that --profile asks for; None without it, or once its first step is done.

    folder: the run's, on the main process; None elsewhere, where nothing is profiled. ValueError on all
    processes when the run ends before the profile.
    """
    first = recipe.profile
    if first is None:
        return None
    if first + STEPS - 1 > steps.last:
        raise ValueError(
            f"--profile {first}: {STEPS} steps from step {first:,} on, and the run ends at step"
            f" {steps.last:,}: choose at most {steps.last - STEPS + 1:,}"
        )
    if folder is None:
        return None
    if steps.first >= first:
        print(f"no new profile: the run goes on behind step {first:,}", flush=True)
        return None
    profile = Profile(accelerator.device, first, folder)
    profile.begin(steps.first)
    return profile
