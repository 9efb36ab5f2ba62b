"""What the tests that need a GPU share."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def gpu() -> None:
    """Skip, with what to do, where there is no GPU."""
    if not torch.cuda.is_available():
        pytest.skip(
            f"this torch ({torch.__version__}) finds no CUDA GPU. Run it on a machine that has one, with a "
            "torch that was built for CUDA: make test-gpu GPU_PYTHON=…"
        )
