"""The code of Megatron and nvidia-resiliency-ext that saves, on Muster with only its import line changed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.coordinator import Coordinator

WORLD = 2


@pytest.mark.parametrize(
    ("calls", "kind"),
    [
        ("torch_async_checkpoint", "fork"),
        ("torch_async_checkpoint", "persistent"),
        ("resiliency_writer", "fork"),
        ("resiliency_writer", "persistent"),
        ("megatron", "fork"),
        ("megatron", "persistent"),
        ("resiliency_restart", "fork"),
        ("resiliency_restart", "persistent"),
        ("megatron_loop", "fork"),
        ("megatron_loop", "persistent"),
    ],
)
def test_their_calls(calls: str, kind: str, coordinator: Coordinator, tmp_path: Path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.drop_in", calls, kind, str(rank), str(WORLD), str(folder)],
            env=os.environ
            | {
                "MUSTER_ENDPOINT": coordinator.endpoint,
                "MUSTER_RUN_ID": f"{calls}-{kind}",
                "RANK": str(rank),
                "WORLD_SIZE": str(WORLD),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        for rank in ranks:
            output, _ = rank.communicate(timeout=120)
            assert rank.returncode == 0, output
            assert "loaded" in output
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
