"""Tests that each function of onecurve/upstream/ is still needed and works with the installed libraries.

The functions use private names of other libraries. If a row fails after an update, the library has changed,
and the function must be removed or adapted. Rows read a library's file, or a fresh copy of its module,
because other tests replace names in this process.
"""

import argparse
import ast
import contextlib
import functools
import importlib.util
import inspect
import io
import pkgutil
import re
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import timm
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

import onecurve.upstream
from onecurve.upstream import accelerate_, deepspeed_, packages_, python_, timm_, torch_, torch_fakes
from tests.conftest import ROOT, full, python

Row = Callable[[], None]
ROWS: dict[Callable, Row] = {}


def needs(*functions: Callable) -> Callable[[Row], Row]:
    """Declare a row for these functions. The row fails if the library no longer needs a function."""

    def declare(row: Row) -> Row:
        ROWS.update(dict.fromkeys(functions, row))
        return row

    return declare


def test_each_function_has_a_row():
    modules = [
        f"onecurve.upstream.{module.name}" for module in pkgutil.iter_modules(onecurve.upstream.__path__)
    ]
    functions = {
        function
        for name in modules
        for function in vars(importlib.import_module(name)).values()
        if inspect.isfunction(function) and function.__module__ == name
    }
    assert {function for function in functions if not function.__name__.startswith("_")} == ROWS.keys()


ALLOWED = {"_replace", "_asdict", "_exit"}  # Documented names of namedtuples and the os module
ALLOWED |= {"_span_bytes", "_typeshed"}  # Names in this project's code and in mypy


def private_names(file: Path) -> set[str]:
    """Return the private names of other objects that a file uses in attributes, imports and getattr."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            is_object_itself = ast.unparse(node.value) in ("self", "cls", "super()")
            names |= set() if is_object_itself else {node.attr}
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            parts = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            names |= {name for part in parts for name in part.split(".")}
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "setattr", "hasattr"):
            names |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
    return {name for name in names if re.match("_[a-zA-Z]", str(name))} - ALLOWED


def test_private_names_are_in_one_package():
    files = [path for folder in ("onecurve", "tools") for path in (ROOT / folder).rglob("*.py")]
    files += [path for path in ROOT.glob("*.py") if not path.match("train_*.py")]
    names = {str(path.relative_to(ROOT)): private_names(path) for path in files}
    room = [path for path in names if path.startswith("onecurve/upstream/")]
    assert {"_hp_mapping", "_dynamo"} <= set().union(*(names.pop(path) for path in room))
    assert {path: private for path, private in names.items() if private} == {}


def test_each_function_is_documented():
    for module in (accelerate_, deepspeed_, packages_, python_, timm_, torch_, torch_fakes):
        # The docstring contains the library versions for which the module was written.
        assert "Written for" in module.__doc__ or "0.4.6" in module.__doc__, module
    assert [function.__name__ for function in ROWS if not function.__doc__] == []


def file_of(name: str) -> Path:
    """Return the file of a module without importing its package."""
    package, *names = name.split(".")
    folder = Path(importlib.util.find_spec(package).origin).parent.joinpath(*names)
    return folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")


@functools.cache
def parsed(module: str) -> ast.Module:
    return ast.parse(file_of(module).read_text())


@functools.cache
def code(module: str, function: str = "") -> str:
    """Return the code of a module, or of a function or Class.method in the module, without comments."""
    node: ast.AST = parsed(module)
    for name in function.split(".") if function else ():
        children = [child for child in ast.walk(node) if getattr(child, "name", None) == name]
        assert children, f"{module} has no {function}"
        node = children[-1]
    return ast.unparse(node)


def fresh(module: str) -> ModuleType:
    """Return a new copy of a module, in the state right after its import, without replaced names."""
    spec = importlib.util.find_spec(module)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


# --- Accelerate


@needs(accelerate_.cache_package_lookups)
def looks_for_lomo_at_each_step():
    imports = fresh("accelerate.utils.imports")
    with patch("importlib.util.find_spec", return_value=None) as looked:
        assert not imports.is_lomo_available()
        assert not imports.is_lomo_available()
    assert looked.call_count == 2
    assert code("accelerate.optimizer", "AcceleratedOptimizer.step").count("is_lomo_available()") == 2


def process_state(**values):
    """Return a process's Accelerate state that contains only these values."""
    state_class = fresh("accelerate.state").PartialState
    state = state_class.__new__(state_class)
    vars(state).clear()
    vars(state).update(values)
    return state


@needs(accelerate_.print_only_where)
def prints_where_local_rank_is_0():
    state = process_state(local_process_index=0, process_index=3, distributed_type=DistributedType.MULTI_GPU)
    assert state.is_local_main_process
    assert "is_local_main_process" in code("accelerate.accelerator", "Accelerator.print") + code(
        "accelerate.state", "PartialState.print"
    )


@needs(accelerate_.skip_deepspeed_import)
def imports_deepspeed_where_it_is_installed():
    text = code("accelerate.utils.other", "extract_model_from_parallel")
    assert "if is_deepspeed_available():\n        from deepspeed import" in text


@needs(accelerate_.skip_dtensor_import)
def imports_dtensor_to_prepare_a_model():
    assert "model_has_dtensor(model)" in code("accelerate.accelerator", "Accelerator.prepare_model")
    assert "import DTensor" in code("accelerate.utils.other", "model_has_dtensor")


@needs(accelerate_.scale_loss_on_cpu)
def does_not_scale_losses_on_a_cpu():
    AcceleratorState._reset_state(True)
    try:
        accelerator = Accelerator(cpu=True, mixed_precision="fp16")
        assert (accelerator.native_amp, accelerator.scaler) == (False, None)
        accelerate_.scale_loss_on_cpu(accelerator)
        assert accelerator.native_amp
        assert accelerator.scaler.is_enabled()
    finally:
        AcceleratorState._reset_state(True)


@needs(accelerate_.set_backend)
def has_no_backend_without_a_gpu():
    with patch.dict("os.environ", LOCAL_RANK="0"), patch("torch.cuda.is_available", return_value=False):
        assert process_state()._prepare_backend(False) == (None, DistributedType.NO)


@needs(accelerate_.set_device_to_cpu)
def looks_for_a_gpu_in_a_group():
    state = process_state(device=None, local_process_index=0, distributed_type=DistributedType.MULTI_GPU)
    with patch("torch.cuda.device_count", return_value=0), pytest.raises(ZeroDivisionError):
        state.set_device()


@needs(accelerate_.launch_arguments)
def reads_a_config_file_for_launch_alone():
    config = ROOT / "accelerate_configs" / "fsdp_2gpu.yaml"
    arguments, read = accelerate_.launch_arguments(["--config_file", str(config), "plan.py"])
    assert arguments.use_fsdp
    assert arguments.num_processes == read.num_processes == 2


@needs(accelerate_.block_names)
def wraps_what_the_model_names():
    reads, plugin = "getattr(model, '_no_split_modules', None)", "FullyShardedDataParallelPlugin"
    assert reads in code("accelerate.utils.dataclasses", f"{plugin}.set_auto_wrap_policy")
    assert accelerate_.block_names(SimpleNamespace(_no_split_modules=["Block"])) == ("Block",)
    assert accelerate_.block_names(nn.Linear(1, 1)) == ()


# --- DeepSpeed, which is not imported because its import takes seconds

ZERO_2, ZERO_3 = "deepspeed.runtime.zero.stage_1_and_2", "deepspeed.runtime.zero.stage3"
LOSS_SCALER = "deepspeed.runtime.fp16.loss_scaler"


@needs(deepspeed_.use_gloo)
def compiles_an_operator_for_a_cpu():
    assert "NAME = 'deepspeed_shm_comm'" in code("deepspeed.ops.op_builder.cpu.comm")
    assert "__compatible_ops__" in code("deepspeed.ops")


@needs(deepspeed_.allow_fp16_on_cpu)
def refuses_fp16_on_a_cpu():
    assert "_is_mkldnn_fp16_supported()" in code(
        "deepspeed.accelerator.cpu_accelerator", "CPU_Accelerator.is_fp16_supported"
    )


@needs(deepspeed_.import_muon)
def compiles_muon_on_import():
    assert "@compiler.compile()" in code("deepspeed.runtime.zero.muon.original_muon")
    assert "compile" in code("deepspeed.runtime.compiler")


@needs(deepspeed_.hide_untested_optimizers)
def warns_of_an_optimizer_that_the_config_allows():
    assert "logger.warning('**** You are using ZeRO with an untested optimizer" in code(
        "deepspeed.runtime.engine"
    )


@needs(deepspeed_.allow_smallest_scale)
def raises_at_the_smallest_scale():
    text = code(LOSS_SCALER, "DynamicLossScaler")
    assert "raise_error_at_min_scale=True" in text
    assert "self.cur_scale == self.min_scale and self.raise_error_at_min_scale" in text


@needs(deepspeed_.call_at_overflow)
def skips_a_step_in_silence():
    assert "logger" not in code(LOSS_SCALER, "LossScalerBase.update_scale")
    for module, optimizer in ((ZERO_2, "DeepSpeedZeroOptimizer"), (ZERO_3, "DeepSpeedZeroOptimizer_Stage3")):
        assert "self._update_scale(self.overflow)" in code(module, optimizer)
        assert "self.loss_scaler.update_scale(has_overflow)" in code(module, f"{optimizer}._update_scale")
    zero, calls = SimpleNamespace(_update_scale=Mock()), []
    update_scale = zero._update_scale
    deepspeed_.call_at_overflow(zero, lambda: calls.append(True))
    zero._update_scale(False)
    assert calls == []
    zero._update_scale(True)
    assert calls == [True]
    assert [call.args for call in update_scale.call_args_list] == [(False,), (True,)]


@needs(deepspeed_.parameter_fragment)
def maps_parameters_to_fragments():
    text = code("deepspeed.utils.tensor_fragment")
    for name in (
        "lp._hp_mapping is not None",
        "lp_fragment_address: fragment",
        "hp_fragment_address: fragment",
    ):
        assert name in text
    assert "numel: int\n    start: int" in text


@needs(deepspeed_.partition_rank, deepspeed_.end_zero3_step)
def partitions_parameters():
    for name in ("_get_param_partition_rank", "_reassign_or_swap_out_partitioned_parameters"):
        assert code(ZERO_3, f"DeepSpeedZeroOptimizer_Stage3.{name}")
    text = code(ZERO_3, "DeepSpeedZeroOptimizer_Stage3._post_step")
    assert "self.persistent_parameters[0].all_gather(self.persistent_parameters)" in text
    assert "_partition_all_parameters" in code(ZERO_3)


@needs(deepspeed_.zero_loss_scale, deepspeed_.set_zero_loss_scale)
def counts_steps_since_an_overflow():
    text = code(LOSS_SCALER, "DynamicLossScaler")
    assert "stable_interval = self.cur_iter - self.last_overflow_iter - 1" in text
    assert "self.dynamic = True" in text
    assert "self.dynamic = False" in code(LOSS_SCALER, "LossScalerBase")
    scaler = SimpleNamespace(dynamic=True, cur_scale=1.0, cur_iter=9, last_overflow_iter=4)
    deepspeed_.set_zero_loss_scale(zero := SimpleNamespace(loss_scaler=scaler), 128.0, 7)
    assert deepspeed_.zero_loss_scale(zero) == (128.0, 7)
    assert scaler.last_overflow_iter == 4
    assert deepspeed_.zero_loss_scale(SimpleNamespace()) is None


@needs(deepspeed_.skip_comparisons)
def compares_ranks():
    users = ("deepspeed.runtime.zero.partition_parameters", ZERO_3)
    for comparison in deepspeed_.RANK_COMPARISONS:
        assert "rank0" in code("deepspeed.runtime.zero.utils", comparison)
    assert any(comparison in code(module) for comparison in deepspeed_.RANK_COMPARISONS for module in users)


# --- timm


@needs(timm_.is_batch_norm_act)
def normalises_and_activates_in_one_layer():
    assert timm_.is_batch_norm_act(timm.layers.BatchNormAct2d.forward)
    assert not timm_.is_batch_norm_act(nn.BatchNorm2d.forward)
    text = code("timm.layers.norm_act", "BatchNormAct2d.forward")
    assert "x = self.drop(x)\n    x = self.act(x)" in text


@needs(timm_.replace_attention)
def calls_torchs_attention():
    attention = timm.layers.Attention(16, 2, qkv_bias=True)
    assert "F.scaled_dot_product_attention(" in code("timm.layers.attention", "Attention.forward")
    names = [name for name, _ in attention.named_parameters()]
    timm_.replace_attention(attention, type("Twice", (), {"forward": lambda self, x: 2 * x}))
    assert isinstance(attention, timm.layers.Attention)
    assert [name for name, _ in attention.named_parameters()] == names
    assert torch.equal(attention(torch.ones(1, 3, 16)), torch.full((1, 3, 16), 2.0))


@needs(timm_.replace_patch_convolution)
def projects_patches_by_a_convolution():
    embedding = timm.layers.PatchEmbed(img_size=8, patch_size=4, embed_dim=6)
    assert type(embedding.proj) is nn.Conv2d
    timm_.replace_patch_convolution(embedding, convolution_class := type("Conv2d", (nn.Conv2d,), {}))
    assert type(embedding.proj) is convolution_class


# --- torch

STEP = """
import os, sys, torch
from onecurve.upstream.torch_ import postpone_compiler

def step():
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return layer

if os.fork() == 0:
    step()
    os._exit("torch._inductor" not in sys.modules)
assert os.wait()[1] == 0, "without postpone_compiler() torch imports no compiler, either"
postpone_compiler()
layer = step()
assert "torch._inductor" not in sys.modules
"""
COMPILE = """
compiled = torch.compile(layer, backend="eager")
assert torch.equal(compiled(torch.ones(1, 2)), layer(torch.ones(1, 2)))
assert torch._dynamo is sys.modules["torch._dynamo"]
assert type(torch._dynamo).__name__ == "module"
"""


@pytest.mark.parametrize("more", ["", full(COMPILE)])
def test_a_step_imports_no_compiler(more):
    done = subprocess.run([*python(), "-c", STEP + more], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@needs(torch_.postpone_compiler)
def imports_the_compiler_with_the_first_step():
    """Check that torch's optimizer code imports the compiler in the first step.

    test_a_step_imports_no_compiler tests both the postponed import and the original import.
    """
    assert "import torch._dynamo" in code("torch.optim.optimizer", "_use_grad_for_differentiable")


@needs(torch_.allow_recompilations)
def compiles_a_function_8_times():
    assert "\nrecompile_limit = 8\n" in code("torch._dynamo.config")


@needs(torch_.draw_random_numbers_as_eager)
def draws_other_numbers_in_compiled_code():
    assert "\nfallback_random = False\n" in code("torch._inductor.config")


@needs(torch_.has_cpp_compiler)
def raises_without_a_cpp_compiler():
    import torch._inductor.config

    with torch._inductor.config.patch({"cpp.cxx": (None, "no-such-compiler")}):
        assert not torch_.has_cpp_compiler()


@needs(torch_.lerp_, torch_.add_, torch_.multiply_, torch_.norms)
def computes_on_lists():
    oldest = re.search(r"^torch>=([\d.]+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE)[1]
    assert int(oldest.split(".")[1]) < 15  # torch.foreach exists in torch 2.15 and later
    first, second = torch.ones(2), torch.full((3,), 2.0)
    torch_.lerp_([first, second], [torch.zeros(2), torch.zeros(3)], 0.5)
    torch_.add_((first, second), 1)
    torch_.multiply_([first, second], torch.tensor(2.0))
    assert [first.tolist(), second.tolist()] == [[3.0] * 2, [4.0] * 3]
    assert torch.stack(torch_.norms([first, -second], float("inf"))).tolist() == [3.0, 4.0]


@needs(torch_.has_bf16_instructions)
def tells_a_cpus_instructions():
    assert isinstance(torch_.has_bf16_instructions(), bool)
    assert not [name for name in dir(torch.cpu) if "bf16" in name and not name.startswith("_")]


@needs(torch_.batch_norm_class)
def has_one_base_class_of_batch_norms():
    base = torch_.batch_norm_class()
    assert base.__name__.startswith("_")
    for layer in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        assert layer.__bases__ == (base,)
        assert layer.forward is base.forward
    assert issubclass(timm.layers.BatchNormAct2d, base)


@needs(torch_.unscale_before_step)
def unscales_in_fused_steps():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], fused=True)
    assert optimizer._step_supports_amp_scaling
    torch_.unscale_before_step(optimizer)
    reads = "getattr(optimizer, '_step_supports_amp_scaling', False)"
    assert reads in code("torch.amp.grad_scaler", "GradScaler.step")
    assert not optimizer._step_supports_amp_scaling


@needs(torch_.loss_scale, torch_.set_loss_scale)
def names_its_good_steps_privately():
    scaler = torch.amp.GradScaler("cpu")
    assert [name for name in scaler.state_dict() if "growth" in name and name.startswith("_")]
    scaler.scale(torch.ones(()))
    torch_.set_loss_scale(scaler, 128.0, 3)
    assert torch_.loss_scale(scaler) == (128.0, 3)


@needs(torch_.default_store)
def hides_the_store_of_the_group():
    assert not [name for name in dir(dist) if "default_store" in name]
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        torch_.default_store().set("key", "value")
        assert torch_.default_store().get("key") == b"value"
    finally:
        dist.destroy_process_group()


@needs(torch_.set_default_group_timeout)
def has_a_default_timeout_of_its_own():
    text = code("torch.distributed.distributed_c10d", "_get_default_timeout")
    assert "return default_pg_timeout" in text
    assert "return default_pg_nccl_timeout" in text
    before = distributed_c10d.default_pg_timeout, distributed_c10d.default_pg_nccl_timeout
    try:
        torch_.set_default_group_timeout(77)
        for backend in ("gloo", "nccl"):
            assert distributed_c10d._get_default_timeout(backend).total_seconds() == 77
    finally:
        distributed_c10d.default_pg_timeout, distributed_c10d.default_pg_nccl_timeout = before
    assert "timeout" not in code("deepspeed.utils.groups", "_clone_world_group")


@needs(torch_.flight_record)
def records_collectives():
    import torch._C._distributed_c10d as c10d

    assert not hasattr(dist, "flight_record")
    assert c10d._dump_fr_trace_json
    assert isinstance(torch_.flight_record(), list)


@needs(torch_.leave_capture_pool)
def allocates_to_the_pool_of_a_capture():
    if torch.version.cuda is None:
        pytest.skip("this torch is built for CPUs alone")
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        assert hasattr(torch._C, name)
        assert not hasattr(torch.cuda, name.removeprefix("_cuda_"))


@needs(torch_.stop_ddp_timing)
def times_steps_of_ddp():
    method = DistributedDataParallel._set_ddp_runtime_logging_sample_rate
    assert list(inspect.signature(method).parameters) == ["self", "sample_rate"]


@needs(torch_.reset_reducer)
def keeps_a_backward_pass_that_did_not_end():
    assert dist.Reducer._reset_state
    assert not hasattr(dist.Reducer, "reset_state")


@needs(torch_.reset_fsdp_state)
def keeps_what_a_capture_has_left():
    groups = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
    for name in ("_all_gather_result", "_post_reduce_event", "_all_reduce_state"):
        assert re.search(rf"self\.{name}(: .*)? = None", code(groups, "FSDPParamGroup")), name
    assert "self._reshard_after_forward_event = None" in code(groups, "FSDPParamGroup")
    for name in ("all_gather_state", "reduce_scatter_states?"):
        assert re.search(rf"\b{name}: ", code(groups, "FSDPCommContext")), name
    if hasattr(FSDPModule, "reset_iter_state"):
        assert "_last_post_reduce_events: " in code(groups, "FSDPCommContext")
        reset = code("torch.distributed.fsdp._fully_shard._fully_shard", "FSDPModule.reset_iter_state")
        assert "_all_gather_result" not in reset


# --- torch without devices


@needs(torch_fakes.fake_contents)
def reads_no_number_of_a_fake_tensor():
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        torch.ones(1).sum().item()
    with torch_fakes.fake_contents():
        assert torch.zeros(1).sum().item() == 1.0
        assert not torch.ones((), dtype=torch.bool).item()


@needs(torch_fakes.join_fake_group)
def has_a_fake_group():
    torch_fakes.join_fake_group(4)
    try:
        assert (dist.get_rank(), dist.get_world_size()) == (0, 4)
        dist.all_reduce(torch.ones(1))
    finally:
        dist.destroy_process_group()


@needs(torch_fakes.skip_ddp_checks, torch_fakes.keep_first_buckets)
def reads_contents_in_ddp():
    text = code("torch.nn.parallel.distributed", "DistributedDataParallel")
    for name in (
        "_verify_param_shape_across_processes",
        "_sync_module_states",
        "self.reducer._rebuild_buckets",
    ):
        assert f"{name}(" in text
    reducer = SimpleNamespace(_rebuild_buckets=lambda: True, name="reducer")
    torch_fakes.keep_first_buckets(ddp := SimpleNamespace(reducer=reducer))
    assert (ddp.reducer._rebuild_buckets(), ddp.reducer.name) == (False, "reducer")


@needs(torch_fakes.read_ranks_of_meshes)
def makes_a_mesh_in_the_current_mode():
    assert "mesh or _init_default_mesh()" in code(
        "torch.distributed.fsdp._fully_shard._fully_shard", "fully_shard"
    )


@needs(torch_fakes.hide_whole_shapes)
def asks_in_the_current_mode():
    assert "detect_fake_mode() or FakeTensorMode()" in code("torch.distributed.tensor._sharding_prop")


@needs(torch_fakes.dispatch_mode, torch_fakes.leaves)
def has_modes_and_trees_in_private_modules():
    mode = torch_fakes.dispatch_mode()
    assert "__torch_dispatch__" in dir(mode)
    assert "._" in mode.__module__
    assert torch_fakes.leaves({"a": [1, (2, 3)], "b": 4}) == [1, 2, 3, 4]
    assert importlib.util.find_spec("torch.utils.pytree") is None


@needs(torch_fakes.memory_tracker, torch_fakes.reset_peak_memory)
def keeps_its_peak():
    tracker = torch_fakes.memory_tracker()
    tracker._peak_mem[torch.device("cpu")] = 8
    tracker.reset_mod_stats()
    assert tracker._peak_mem
    torch_fakes.reset_peak_memory(tracker)
    assert not tracker._peak_mem


# --- CPython


@needs(python_.run_finalizers)
def runs_finalizers_at_exit_alone():
    import multiprocessing.util

    calls = []
    multiprocessing.util.Finalize(None, calls.append, (1,), exitpriority=5)
    python_.run_finalizers()
    assert calls == [1]
    assert "run_finalizers" not in multiprocessing.util.__all__


@needs(python_.call_on_unsent)
def drops_what_a_queue_cant_send():
    printed = io.StringIO()
    queue = fresh("multiprocessing.queues").Queue
    with contextlib.redirect_stderr(printed):
        try:
            raise OSError("no room")
        except OSError as error:
            queue._on_queue_feeder_error(error, None)
    assert printed.getvalue().startswith("Traceback")


@needs(python_.main_threads_frame)
def sees_the_main_thread():
    frames = []
    thread = threading.Thread(target=lambda: frames.append(python_.main_threads_frame()))
    thread.start()
    thread.join()
    names = []
    while frames[0]:
        names.append(frames[0].f_code.co_name)
        frames[0] = frames[0].f_back
    assert "sees_the_main_thread" in names
    assert not hasattr(threading, "current_frames")


@needs(python_.flag_names)
def lists_no_flags():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size")
    assert "--batch_size" in python_.flag_names(parser)
    assert not [name for name in vars(parser) if "option" in name and not name.startswith("_")]


# --- Other packages


@needs(packages_.allow_large_texts)
def refuses_a_large_text():
    text = code("PIL.PngImagePlugin")
    assert "MAX_TEXT_CHUNK = ImageFile.SAFEBLOCK" in text
    assert "MAX_TEXT_MEMORY = 64 * MAX_TEXT_CHUNK" in text
    assert "dobj.decompress(s, MAX_TEXT_CHUNK)" in text


@needs(packages_.use_hub_offline)
def reads_its_environment_on_import():
    assert "\nHF_HUB_OFFLINE = _is_true(os.environ.get(" in code("huggingface_hub.constants")
    assert "return HF_HUB_OFFLINE" in code("huggingface_hub.constants", "is_offline_mode")


@needs(packages_.is_tensorboard_writer)
def writes_in_a_thread():
    text = code("tensorboard.summary.writer.event_file_writer", "_AsyncWriterThread")
    assert text.startswith("class _AsyncWriterThread(threading.Thread)")
    assert packages_.is_tensorboard_writer(type("_AsyncWriterThread", (threading.Thread,), {})())
    assert not packages_.is_tensorboard_writer(threading.current_thread())


@needs(packages_.import_evaluate)
def imports_transformers_and_copies_to_the_home_folder():
    assert "from transformers" in code("evaluate.evaluator")
    assert "config.HF_MODULES_CACHE" in code("evaluate.utils.file_utils", "init_hf_modules")


@pytest.mark.parametrize("function", ROWS, ids=lambda f: f"{f.__module__.rpartition('.')[2]}.{f.__name__}")
def test_a_name_is_still_needed(function):
    ROWS[function]()
