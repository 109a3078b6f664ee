"""--deterministic: the same bits at each run on the same GPUs."""

import os

import torch


def choose_algorithms(deterministic: bool) -> None:
    """The fastest algorithms, or deterministic ones, before the first operation on a GPU.

    For the fastest cuDNN tries several once per shape of a convolution; shapes hardly change in a training.
    """
    if deterministic:
        compute_deterministically()
    else:
        torch.backends.cudnn.benchmark = True


def compute_deterministically() -> None:
    """Makes torch use deterministic algorithms alone, before the first operation on a GPU.

    An operation that has none raises RuntimeError. Without this a GPU adds in the order in which its blocks
    finish (atomic additions in backward), cuBLAS may choose other algorithms from run to run, and fp32
    convolutions round their inputs to TF32. Nothing of it differs on a CPU.
    https://docs.pytorch.org/docs/stable/notes/randomness.html
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(True)
    # A property of torch's, which mypy does not see. Nothing here reads such memory, and filling takes time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False  # it would choose the algorithm by its speed in this run
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
