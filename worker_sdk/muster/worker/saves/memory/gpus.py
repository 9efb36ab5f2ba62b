"""The GPUs of this process: whether it uses them, and the work that it has queued there."""

import torch


def uses_gpu() -> bool:
    """Return whether this process has begun to use a GPU."""
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def synchronize() -> None:
    """Wait for the work that this process has queued on its GPUs, above all the copies."""
    if not uses_gpu():
        return
    for device in range(torch.cuda.device_count()):
        # Waiting for a GPU that this process does not use would take some of its memory.
        if torch._C._cuda_hasPrimaryContext(device):  # type: ignore[attr-defined]
            torch.cuda.synchronize(device)
