"""What a reader must know of the machine and the software that figures come from."""

import os
import platform
import sqlite3
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import psutil

PACKAGES = ["muster-coordinator", "torch", "jax", "jaxlib", "grpcio", "protobuf", "uvloop"]
SYNC_PROBES = 50


def describe_machine(state_directory: Path) -> dict[str, str]:
    """Describe the machine; names neither it nor its directories."""
    return {
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "file system of the SQLite state": _file_system(state_directory),
        "write and fsync of 4 KiB there, median": f"{_sync_ms(state_directory):.2f} ms",
        "load average when the run began, 1 min": f"{os.getloadavg()[0]:.2f}",
    }


def describe_versions() -> dict[str, str]:
    """Return the versions of everything that was measured, and of what it runs on."""
    versions = {"Python": platform.python_version(), "SQLite": sqlite3.sqlite_version}
    return versions | {package: version(package) for package in PACKAGES}


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _file_system(directory: Path) -> str:
    partitions = {
        Path(partition.mountpoint): partition.fstype for partition in psutil.disk_partitions(all=True)
    }
    resolved = directory.resolve()
    return next((partitions[path] for path in [resolved, *resolved.parents] if path in partitions), "unknown")


def _sync_ms(directory: Path) -> float:
    times = []
    with tempfile.TemporaryFile(dir=directory) as file:
        for _ in range(SYNC_PROBES):
            start = time.perf_counter()
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
            times.append((time.perf_counter() - start) * 1000)
    return statistics.median(times)
