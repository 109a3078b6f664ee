"""Run several training commands in one process, because starting a process takes 10 s on a GPU.

    python -m benchmarks.gpu.trainings SPEC
    torchrun --nproc_per_node=2 -m benchmarks.gpu.trainings SPEC

SPEC is a JSON file with a list of commands. Each command is a list that contains a script and its flags. A
failed run does not end the other runs. A failed run's folder contains no result, or a result that reports the
failure. The command exits with status 1 if any run failed.
"""

import gc
import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState

from onecurve.distributed.accelerator import start
from onecurve.distributed.step_graph import free_graphs
from onecurve.flags.recipe import parse
from onecurve.models.script import load_script, recipe_class


def main() -> None:
    failed = [words for words in json.loads(Path(sys.argv[1]).read_text()) if not succeeds(words)]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(bool(failed))  # exit without waiting for the training runs' threads


def succeeds(words: list[str]) -> bool:
    script = load_script(Path(words[0]).resolve())
    sys.argv = words
    try:
        recipe = parse(recipe_class(script), words[1:])
        script.main.__wrapped__(recipe, *start(recipe, clip_norm=recipe.clip_norm))
    except (Exception, SystemExit):
        traceback.print_exc()
        return False
    finally:
        if dist.is_initialized():
            free_graphs()
            dist.destroy_process_group()
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
    return True


if __name__ == "__main__":
    main()
