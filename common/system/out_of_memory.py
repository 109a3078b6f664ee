"""The messages of Python, torch and the libraries below them when memory runs out."""

MESSAGES = (  # in an error, or in the output of a failed process
    "out of memory",  # torch and CUDA
    "ALLOC_FAILED",  # cuBLAS, cuDNN 8
    "ALLOCATION_FAILED",  # cuDNN 9, of the device or the host
    "CUBLAS_STATUS_NOT_INITIALIZED",  # no room for cuBLAS's handle
    "unable to find an engine to execute this computation",  # cuDNN: no room for any engine's workspace
    "CUDA calloc",  # NCCL
    "can't allocate memory",  # torch on a CPU
    "could not create a primitive",  # oneDNN
)
LIMITED = (  # only under a limit on a process's memory, from other allocators than torch's
    "MemoryError",
    "std::bad_alloc",
    "Cannot allocate memory",
    "can't start new thread",
    "failed to map segment from shared object",
    "could not execute a primitive",
    "OpenBLAS error: Memory allocation still failed",
    "OpenBLAS blas_thread_init: pthread_create failed",
)


def says_out_of_memory(text: str, is_limited: bool = False) -> bool:
    """True if an error or a failed process's output has such a message. is_limited: memory had a limit."""
    return any(message in text for message in (*MESSAGES, *(LIMITED if is_limited else ())))
