"""Damages files of checkpoints, as failing storage does."""

from pathlib import Path


def flip(file: Path) -> None:
    """Flip a bit in the middle of a file."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
