"""--deterministic: the same bits in each run on the same GPUs."""

import os

import torch


def choose_algorithms(deterministic: bool) -> None:
    """Chooses the fastest algorithms, or deterministic ones. Call it before the first operation on a GPU.

    To find the fastest, cuDNN tries several once per shape of a convolution. Shapes rarely change.
    """
    if deterministic:
        compute_deterministically()
    else:
        torch.backends.cudnn.benchmark = True


def compute_deterministically() -> None:
    """Makes torch use only deterministic algorithms. Call it before the first operation on a GPU.

    An operation without one raises RuntimeError. By default a GPU adds in the order in which its blocks
    finish (atomic additions in backward), cuBLAS may choose other algorithms from run to run, and fp32
    convolutions round their inputs to TF32. On a CPU this changes nothing.
    https://docs.pytorch.org/docs/stable/notes/randomness.html
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(True)
    # mypy does not see this property. Nothing here reads uninitialised memory, and filling it takes time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False  # it would choose algorithms by their speed in this run
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
