"""Tests of --deterministic: the settings that the flag changes and the operations that run.

These tests run on a CPU and can't check the flag's effect on a GPU.
"""

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from onecurve.distributed.devices import choose_algorithms
from onecurve.run.ending import explained_error
from tests.conftest import CNN, RESNET, VIT, result, run
from tests.support.faults import called_first

# Operations without a deterministic implementation on CUDA, according to the
# torch.use_deterministic_algorithms reference. nll_loss has a deterministic implementation, but nll_loss2d
# (for label maps) does not.
NONE_ON_CUDA = {
    *("_adaptive_avg_pool2d_backward", "adaptive_max_pool2d_backward", "avg_pool3d_backward"),
    *("fractional_max_pool2d_backward", "grid_sampler_2d_backward", "reflection_pad2d_backward"),
    *("upsample_linear1d_backward", "upsample_bilinear2d_backward", "upsample_bicubic2d_backward"),
    *("_upsample_bilinear2d_aa_backward", "_upsample_bicubic2d_aa_backward"),
    *("nll_loss2d_forward", "nll_loss2d_backward", "_ctc_loss_backward", "max_unpool2d"),
    *("put", "put_", "histc", "bincount", "median", "kthvalue", "scatter_reduce", "scatter_reduce_"),
}


class Operations(TorchDispatchMode):
    """Dispatch mode that writes the name of each operation in this thread to a file, once per name."""

    def __init__(self, file: Path):
        super().__init__()
        self.file, self.seen = file, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name not in self.seen:
            self.seen.add(name)
            with self.file.open("a") as file:
                file.write(f"{name}\n")
        return function(*args, **(kwargs or {}))


def record(file: Path) -> None:
    Operations(file).__enter__()


AUGMENTED = ["--randaug_layers", "4", "--color_jitter", "0.4", "--random_erasing", "0.5", "--dropout", "0.1"]


@pytest.mark.parametrize(
    "words", [CNN, [*RESNET, "--stem", "imagenet"], [*VIT, *AUGMENTED]], ids=["cnn_a", "cnn_b", "vit"]
)
def test_each_operation_has_a_deterministic_form_on_a_gpu(words, tmp_path, cache):
    """Record the augmentation, forward pass, loss, backward pass, optimizer and evaluation on a CPU."""
    flags = ["--data", "digits", "--batch_size", 48, "--max_steps", 1]
    flags += ["--trackers", "none", "--deterministic"]
    words = [*words, *flags, *cache, "--output_dir", tmp_path / "run"]
    output = run(words, env=called_first(tmp_path, partial(record, tmp_path / "operations")))
    assert ", deterministic" in output
    assert result(tmp_path / "run")["deterministic"] is True
    operations = set((tmp_path / "operations").read_text().split())
    assert "_log_softmax_backward_data" in operations, operations  # The training loop runs this operation
    assert not operations & NONE_ON_CUDA


def test_the_switches(monkeypatch):
    # Make monkeypatch restore the variable after the test.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, True
    with cudnn.flags(benchmark=False, deterministic=False, allow_tf32=True):
        try:
            choose_algorithms(deterministic=False)
            assert cudnn.benchmark
            assert not torch.are_deterministic_algorithms_enabled()
            choose_algorithms(deterministic=True)
            assert torch.are_deterministic_algorithms_enabled()
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
            assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
            assert cudnn.deterministic
            assert not any([cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32])
        finally:
            torch.use_deterministic_algorithms(False)
            matmul.allow_tf32 = before


def test_an_operation_without_a_deterministic_form_is_reported():
    """Report an error with text that torch raises only on a GPU."""
    error = RuntimeError(
        "upsample_bilinear2d_backward_out_cuda does not have a deterministic implementation, but you set"
        " 'torch.use_deterministic_algorithms(True)'. You can turn off determinism just for this operation"
    )
    mistake = explained_error(error, None, None, None)
    assert str(mistake).startswith("--deterministic: upsample_bilinear2d_backward_out_cuda has no determin")
