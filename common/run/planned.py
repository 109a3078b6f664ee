"""--plan: what plan.py has planned for this training, checked before anything starts."""

from pathlib import Path
from typing import Any

from accelerate import Accelerator

from common.distributed import strategy as job
from common.distributed.agreement import once
from common.recipe import Recipe
from common.report.record import PLAN_FILE_KINDS
from common.run.folder import script_name
from common.system.files import read_json
from common.system.schema import fitting
from common.system.threads import Heartbeat

NEEDED = ("script", "batch_size", "hosts", "gpus", "lines")


def read_plan(accelerator: Accelerator, recipe: Recipe) -> dict[str, Any] | None:
    """The content of plan.json; None without --plan. Collective: the main process reads the file.

    ValueError for a file that is no plan, or none of this script and strategy. Another batch size or cluster
    is no mistake: the run's page names the differences.
    """
    if recipe.plan is None:
        return None
    file, strategy = Path(recipe.plan), planned_strategy(job.strategy(accelerator), job.sharding(accelerator))

    def read(_: Heartbeat) -> dict[str, Any]:
        return plan_of(file, script_name(), strategy)

    return once(accelerator, "plan", read, recipe.timeout_s)


def planned_strategy(strategy: str, sharding: dict[str, Any]) -> str:
    """The name of a running strategy in a plan: `hybrid` is FSDP2 with replicas, `offload` ZeRO-3's.

    sharding: as strategy.sharding() gives it.
    """
    if sharding.get("replicas", 1) > 1:
        strategy = "hybrid"
    if sharding.get("offload_params"):
        return f"{strategy} with offload"
    if {sharding.get(name, "none") for name in ("offload_optimizer", "offload_param")} == {"none"}:
        return strategy
    return "offload" if strategy == "zero3" else f"{strategy} with offload"


def plan_of(file: Path, script: str, strategy: str) -> dict[str, Any]:
    """The plan with the `line` of this strategy in place of all `lines`."""
    make = f"make one: python plan.py --output {file.name} ... {script}.py"
    try:
        plan, wrong = fitting(read_json(file), PLAN_FILE_KINDS)
    except OSError as error:
        raise ValueError(f"--plan {file} can't be read: {error.strerror}; {make}") from None
    except ValueError as error:
        raise ValueError(f"--plan {error}; {make}") from None
    wrong += [name for name in NEEDED if name not in plan and name not in wrong]
    if wrong:
        raise ValueError(f"--plan {file} is no plan ({', '.join(wrong)} missing or wrong); {make}")
    if plan["script"] != script:
        raise ValueError(f"--plan {file} is of {plan['script']}, and this is {script}; {make}")
    lines = {line["strategy"]: line for line in plan.pop("lines") if line.get("strategy")}
    if strategy not in lines:
        raise ValueError(
            f"--plan {file} has no {strategy}, which runs here, but {', '.join(lines) or 'nothing'}: make one"
            " for this number of hosts and devices"
        )
    return plan | {"line": lines[strategy]}
