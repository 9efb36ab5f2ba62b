"""The memory of freed messages goes back to the system."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import pathlib, re, sys
from muster.serving.heap import return_freed_memory

def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text()).group(1)) >> 10

if sys.argv[1] == "returns":
    return_freed_memory()
bytearray(2 << 20)  # Once such a block is freed, glibc takes the next ones from its heap.
before = resident()
large, small = [], []
for _ in range(64):
    large.append(bytearray(b"x") * (1 << 20))
    small.append(bytearray(b"x") * 10_000)
large.clear()
print(resident() - before)
"""


def kept(argument: str, **environment: str) -> int:
    """Return the MiB that a process keeps of 64 MiB in large blocks that it has freed."""
    command = [sys.executable, "-c", PROGRAM, argument]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def test_freed_large_blocks_leave_memory_though_small_ones_stay():
    assert kept("returns") < 8


@pytest.mark.parametrize(
    ("argument", "environment"),
    [("keeps", {}), ("returns", {"MALLOC_MMAP_THRESHOLD_": str(16 << 20)})],
)
def test_default_of_glibc_keeps_them_and_the_environment_wins(argument: str, environment: dict[str, str]):
    assert kept(argument, **environment) > 48


SCATTERED = """
import ctypes, pathlib, re
from muster.serving.heap import HeapTrimmer

def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text()).group(1)) >> 10

before = resident()
blocks = [bytearray(b"x") * 16_384 for _ in range(8_192)]
del blocks[::2]
held = resident() - before
HeapTrimmer(128 << 20).trim()
assert resident() - before > held - 8, "little is free, and trimmed nevertheless"
assert HeapTrimmer(32 << 20).trim()
print(held - (resident() - before))
"""


def test_trim_returns_pages_between_blocks_in_use():
    done = subprocess.run([sys.executable, "-c", SCATTERED], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 32
