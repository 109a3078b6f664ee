"""Private names of DeepSpeed, and replaced behaviour. Seen in deepspeed 0.19.8.

ZeRO's optimizers also have undocumented attributes without a leading underscore, such as bit16_groups and
fp32_partitioned_groups_flat. onecurve/distributed/layout.py reads these attributes.
"""

import importlib
import logging
import sys
from collections.abc import Callable
from typing import Any

# Functions that compare values between ranks, which does not work in a fake process group.
COMPARISONS = ("assert_ints_same_as_other_ranks", "assert_lst_len_same_as_other_ranks")


def use_gloo() -> None:
    """Make DeepSpeed exchange CPU tensors over gloo instead of using its shared-memory operator.

    DeepSpeed compiles this operator on first use. A build that is killed leaves a lock behind, which blocks
    the next build (pytorch #189245).
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def allow_fp16_on_cpu() -> None:
    """Make DeepSpeed accept fp16 on every CPU.

    Otherwise, DeepSpeed refuses fp16 on CPUs where it is slow, although torch supports fp16 on all CPUs.
    """
    import deepspeed

    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True


def import_muon() -> None:
    """Import DeepSpeed's Muon without compiling it.

    DeepSpeed imports Muon's module to check the type of every optimizer. The module calls torch.compile on
    import, which takes 5 s in each process.
    """
    from deepspeed.runtime import compiler

    compile = compiler.compile
    compiler.compile = lambda *_, **__: lambda function: function
    importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    compiler.compile = compile


def hide_untested_optimizers() -> None:
    """Hide DeepSpeed's warning that it has not tested the script's optimizer.

    DeepSpeed warns even if zero_allow_untested_optimizer is true in DeepSpeed's config.
    """
    logging.getLogger("DeepSpeed").addFilter(_is_shown)


def _is_shown(record: logging.LogRecord) -> bool:
    return "untested optimizer" not in record.getMessage()


def allow_smallest_scale(zero: Any) -> None:
    """Allow fp16's loss scale to stay at its minimum.

    Otherwise, ZeRO's optimizer raises an Exception at the minimum. In this project, Run reports a non-finite
    loss in one line instead.
    """
    zero.loss_scaler.raise_error_at_min_scale = False


def call_at_overflow(zero: Any, report: Callable[[], None]) -> None:
    """Call report() whenever ZeRO's optimizer would skip a step because a gradient is not finite.

    Otherwise, DeepSpeed silently skips such steps in bf16 and fp32 (DeepSpeed #8415). All processes detect
    the overflow in the same step.
    """
    update_scale = zero._update_scale

    def check(has_overflow: bool = False) -> None:
        if has_overflow:
            report()
        update_scale(has_overflow)

    zero._update_scale = check


def fragment(parameter: Any) -> tuple[int, int, int] | None:
    """Return this process's fragment of a parameter under ZeRO-1 or ZeRO-2, or None without a fragment.

    The fragment is (start in the parameter, length, start in the flat partition of the master weights).
    DeepSpeed's public functions read and write only whole parameters.
    """
    if (mapping := parameter._hp_mapping) is None:
        return None
    in_parameter, in_partition = mapping.lp_fragment_address, mapping.hp_fragment_address
    return in_parameter.start, in_parameter.numel, in_partition.start


def partition_rank(zero: Any, parameter: Any) -> int:
    """Return the index of the equal part of a ZeRO-3 parameter that this process holds.

    The index equals the rank, unless the config uses secondary partitions.
    """
    return zero._get_param_partition_rank(parameter)


def end_zero3_step(zero: Any, partitions: int) -> None:
    """Copy the master weights into the model, like the end of a ZeRO-3 optimizer step.

    DeepSpeed's public safe_set_full_fp32_param does not update the weights that the next forward pass uses.
    """
    zero._partition_all_parameters()
    for i in range(partitions):
        zero._reassign_or_swap_out_partitioned_parameters(i)
    if zero.persistent_parameters:
        zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


def zero_loss_scale(zero: Any) -> tuple[float, int] | None:
    """Return fp16's loss scale and the steps since the last overflow, or None without a dynamic scale.

    DeepSpeed's checkpoints store the loss scaler as a pickle. The project's checkpoints store only these two
    numbers, under every strategy.
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
    """Disable comparisons between ranks in all DeepSpeed modules.

    plan.py simulates a job in a single process, where such comparisons can't succeed.
    """
    import deepspeed.runtime.zero.partition_parameters  # imports all modules that use COMPARISONS
    import deepspeed.runtime.zero.stage3

    del deepspeed
    for name, module in list(sys.modules.items()):
        if name.startswith("deepspeed."):
            for comparison in COMPARISONS:
                if comparison in vars(module):
                    setattr(module, comparison, lambda *_, **__: None)
