"""Private names of DeepSpeed, and behaviour of it that is replaced. Seen in deepspeed 0.19.8.

ZeRO's optimizers also have names without an underscore that no page documents, such as bit16_groups and
fp32_partitioned_groups_flat. onecurve/distributed/layout.py reads these.
"""

import importlib
import logging
import sys
from collections.abc import Callable
from typing import Any

# Functions that compare the ranks of a job, which a fake process group can't answer.
COMPARISONS = ("assert_ints_same_as_other_ranks", "assert_lst_len_same_as_other_ranks")


def use_gloo() -> None:
    """Make DeepSpeed exchange tensors of a CPU over gloo, not by its shared-memory operator.

    The operator is compiled at first use, and a killed build leaves a lock for which the next one waits
    (pytorch #189245).
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def allow_fp16_on_cpu() -> None:
    """Make DeepSpeed accept fp16 on every CPU.

    Without it DeepSpeed refuses CPUs where fp16 is slow, although torch computes it on all of them.
    """
    import deepspeed

    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True


def import_muon() -> None:
    """Import DeepSpeed's Muon without compiling it.

    DeepSpeed looks for it in each optimizer, and its module calls torch.compile: 5 s in each process.
    """
    from deepspeed.runtime import compiler

    compile = compiler.compile
    compiler.compile = lambda *_, **__: lambda function: function
    importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    compiler.compile = compile


def hide_untested_optimizers() -> None:
    """Hide DeepSpeed's warning that it has not tested the script's optimizer.

    It warns although zero_allow_untested_optimizer in its config allows the optimizer.
    """
    logging.getLogger("DeepSpeed").addFilter(_is_shown)


def _is_shown(record: logging.LogRecord) -> bool:
    return "untested optimizer" not in record.getMessage()


def allow_smallest_scale(zero: Any) -> None:
    """Let fp16's loss scale stay at its minimum.

    Without it ZeRO's optimizer raises an Exception there. Run reports a loss that is not finite in one line.
    """
    zero.loss_scaler.raise_error_at_min_scale = False


def call_at_overflow(zero: Any, report: Callable[[], None]) -> None:
    """Call report() where ZeRO's optimizer would skip a step because a gradient is not finite.

    Without it steps in bf16 and fp32 are skipped in silence (DeepSpeed #8415). All processes detect this
    together.
    """
    update_scale = zero._update_scale

    def check(has_overflow: bool = False) -> None:
        if has_overflow:
            report()
        update_scale(has_overflow)

    zero._update_scale = check


def fragment(parameter: Any) -> tuple[int, int, int] | None:
    """Return this process's part of a parameter under ZeRO-1 and ZeRO-2; None if others have all of it.

    It is (start in the parameter, length, start in the flat partition of masters). DeepSpeed's public
    functions read and write whole parameters only.
    """
    if (mapping := parameter._hp_mapping) is None:
        return None
    whole, own = mapping.lp_fragment_address, mapping.hp_fragment_address
    return whole.start, whole.numel, own.start


def partition_rank(zero: Any, parameter: Any) -> int:
    """Return which of a parameter's equal parts ZeRO-3's optimizer has in this process.

    It is the rank, except in a config with secondary partitions.
    """
    return zero._get_param_partition_rank(parameter)


def end_zero3_step(zero: Any, partitions: int) -> None:
    """Repeat the end of a step of ZeRO-3's optimizer, which copies its masters into the model.

    DeepSpeed's safe_set_full_fp32_param leaves the weights of the next forward as they were.
    """
    zero._partition_all_parameters()
    for i in range(partitions):
        zero._reassign_or_swap_out_partitioned_parameters(i)
    if zero.persistent_parameters:
        zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


def zero_loss_scale(zero: Any) -> tuple[float, int] | None:
    """Return fp16's loss scale and the steps since an overflow; None without a dynamic scale.

    DeepSpeed's own checkpoints have these, as pickles; the project's have the same two numbers under every
    strategy.
    """
    if (scaler := _dynamic_scaler(zero)) is None:
        return None
    return scaler.cur_scale, scaler.cur_iter - scaler.last_overflow_iter - 1


def set_zero_loss_scale(zero: Any, scale: float, good_steps: int) -> None:
    """Set the values that zero_loss_scale() returns."""
    scaler = _dynamic_scaler(zero)
    scaler.cur_scale = scale
    scaler.cur_iter = scaler.last_overflow_iter + 1 + good_steps


def _dynamic_scaler(zero: Any) -> Any:
    scaler = getattr(zero, "loss_scaler", None)
    return scaler if getattr(scaler, "dynamic", False) else None


def skip_comparisons() -> None:
    """Leave out what DeepSpeed's ranks compare with one another, in all of its modules.

    plan.py's process has no other ranks, so no comparison can succeed.
    """
    import deepspeed.runtime.zero.partition_parameters  # so that all who use them are loaded
    import deepspeed.runtime.zero.stage3

    del deepspeed
    for name, module in list(sys.modules.items()):
        if name.startswith("deepspeed."):
            for comparison in COMPARISONS:
                if comparison in vars(module):
                    setattr(module, comparison, lambda *_, **__: None)
