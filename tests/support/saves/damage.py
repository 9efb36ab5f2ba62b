"""Damages files of checkpoints, as failing storage does."""

from pathlib import Path


def flip(file: Path, offset: int | None = None) -> None:
    """Flip a bit of a file, by default in the middle."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2 if offset is None else offset] ^= 1
    file.write_bytes(data)
