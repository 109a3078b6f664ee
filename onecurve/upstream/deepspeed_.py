"""Uses private names of DeepSpeed, and replaces some of its behaviour. Written for deepspeed 0.19.8.

onecurve/distributed/zero_layout.py also reads undocumented attributes of ZeRO's optimizers that have no
leading underscore, such as bit16_groups and fp32_partitioned_groups_flat.
"""

import importlib
import logging
import sys
from collections.abc import Callable
from typing import Any

# Names of DeepSpeed functions that compare values across ranks, which is impossible in a fake process group
RANK_COMPARISONS = ("assert_ints_same_as_other_ranks", "assert_lst_len_same_as_other_ranks")


def use_gloo() -> None:
    """Make DeepSpeed exchange CPU tensors over gloo instead of DeepSpeed's shared-memory operator.

    DeepSpeed compiles the shared-memory operator on first use. If the compilation is killed, a lock file
    remains and blocks the next compilation (pytorch #189245).
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def allow_fp16_on_cpu() -> None:
    """Make DeepSpeed accept fp16 on every CPU.

    Otherwise, DeepSpeed refuses to train in fp16 on CPUs where fp16 is slow, although torch supports fp16 on
    all CPUs.
    """
    import deepspeed

    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True


def import_muon() -> None:
    """Import DeepSpeed's module for the Muon optimizer while torch.compile is disabled in DeepSpeed.

    DeepSpeed imports this module to check the type of every optimizer. During the import, the module calls
    torch.compile, which takes 5 s in each process.
    """
    from deepspeed.runtime import compiler

    original_compile = compiler.compile
    # The replacement returns a decorator that leaves its function uncompiled
    compiler.compile = lambda *_, **__: lambda decorated_function: decorated_function
    importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    compiler.compile = original_compile


def hide_untested_optimizers() -> None:
    """Hide DeepSpeed's warning that the script uses an untested optimizer.

    DeepSpeed prints this warning even if zero_allow_untested_optimizer is true in the DeepSpeed config.
    """
    logging.getLogger("DeepSpeed").addFilter(_is_not_optimizer_warning)


def _is_not_optimizer_warning(log_record: logging.LogRecord) -> bool:
    """Return False for the warning about an untested optimizer, so that the logger drops it."""
    return "untested optimizer" not in log_record.getMessage()


def allow_smallest_scale(zero_optimizer: Any) -> None:
    """Let fp16 training continue when ZeRO's loss scale reaches its minimum.

    Otherwise, ZeRO's optimizer raises an Exception when the loss scale reaches the minimum. In this project,
    the class Run reports a non-finite loss in one line instead.
    """
    zero_optimizer.loss_scaler.raise_error_at_min_scale = False


def call_at_overflow(zero_optimizer: Any, report_overflow: Callable[[], None]) -> None:
    """Call report_overflow() whenever ZeRO's optimizer would skip a step because a gradient is not finite.

    Otherwise, DeepSpeed silently skips the step in bf16 and fp32 training (DeepSpeed #8415). All processes
    call report_overflow() in the same step.
    """
    original_update_scale = zero_optimizer._update_scale

    def update_scale_and_report(has_overflow: bool = False) -> None:  # DeepSpeed calls this in every step
        if has_overflow:
            report_overflow()
        original_update_scale(has_overflow)

    zero_optimizer._update_scale = update_scale_and_report


def parameter_fragment(parameter: Any) -> tuple[int, int, int] | None:
    """Return the position of this process's fragment within a ZeRO-1 or ZeRO-2 parameter.

    DeepSpeed's public functions read and write only entire parameters.

    Returns:
        Start of the fragment in the parameter, length of the fragment, and start of the fragment in the flat
        partition of the master weights. None if this process has no fragment of the parameter.
    """
    if (fragment_mapping := parameter._hp_mapping) is None:
        return None  # this process has no fragment
    parameter_range = fragment_mapping.lp_fragment_address  # in the low-precision parameter
    partition_range = fragment_mapping.hp_fragment_address  # in the flat high-precision master weights
    return parameter_range.start, parameter_range.numel, partition_range.start


def partition_rank(zero_optimizer: Any, parameter: Any) -> int:
    """Return the index of this process's partition among the equal partitions of a ZeRO-3 parameter.

    The index is this process's rank, unless the DeepSpeed config uses secondary partitions.
    """
    return zero_optimizer._get_param_partition_rank(parameter)


def end_zero3_step(zero_optimizer: Any, sub_group_count: int) -> None:
    """Copy the fp32 master weights into the model, as ZeRO-3 does at the end of an optimizer step.

    This function is collective. DeepSpeed's public function safe_set_full_fp32_param does not update the
    weights for the next forward pass.
    """
    zero_optimizer._partition_all_parameters()  # frees the gathered parameters
    for sub_group_index in range(sub_group_count):
        zero_optimizer._reassign_or_swap_out_partitioned_parameters(sub_group_index)
    # Small parameters stay gathered on all ranks. DeepSpeed gathers all of them with one parameter's method
    if zero_optimizer.persistent_parameters:
        zero_optimizer.persistent_parameters[0].all_gather(zero_optimizer.persistent_parameters)


def zero_loss_scale(zero_optimizer: Any) -> tuple[float, int] | None:
    """Return ZeRO's fp16 loss scale and the number of steps since the last overflow.

    This project's checkpoints store only these two numbers, under every strategy. DeepSpeed's checkpoints
    store the loss scaler as a pickle. The result is None if the loss scale is not dynamic.
    """
    if (loss_scaler := _dynamic_scaler(zero_optimizer)) is None:
        return None  # the loss scale is not dynamic
    # cur_iter is the index of the next step, and last_overflow_iter is -1 before the first overflow
    return loss_scaler.cur_scale, loss_scaler.cur_iter - loss_scaler.last_overflow_iter - 1


def set_zero_loss_scale(zero_optimizer: Any, loss_scale: float, good_steps: int) -> None:
    """Set ZeRO's dynamic fp16 loss scale, and set the steps since the last overflow to `good_steps`."""
    loss_scaler = _dynamic_scaler(zero_optimizer)
    loss_scaler.cur_scale = loss_scale
    loss_scaler.cur_iter = loss_scaler.last_overflow_iter + 1 + good_steps


def _dynamic_scaler(zero_optimizer: Any) -> Any:
    """Return ZeRO's loss scaler, or None if the loss scale is not dynamic."""
    loss_scaler = getattr(zero_optimizer, "loss_scaler", None)
    return loss_scaler if getattr(loss_scaler, "dynamic", False) else None


def skip_comparisons() -> None:
    """Replace the functions in RANK_COMPARISONS in all DeepSpeed modules with functions that do nothing.

    plan.py simulates a job in a single process, so there are no other ranks to compare values with.
    """
    import deepspeed.runtime.zero.partition_parameters  # imports all modules that contain RANK_COMPARISONS
    import deepspeed.runtime.zero.stage3

    del deepspeed  # the imports only load the modules
    for module_name, deepspeed_module in list(sys.modules.items()):
        if module_name.startswith("deepspeed."):
            for function_name in RANK_COMPARISONS:
                if function_name in vars(deepspeed_module):
                    setattr(deepspeed_module, function_name, lambda *_, **__: None)
