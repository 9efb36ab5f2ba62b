"""What the ranks have written, looked at before it is committed."""

from pathlib import Path

from torch.distributed.checkpoint.storage import WriteResult


def check_files(folder: Path, results: list[list[WriteResult]]) -> None:
    """On rank 0: what the ranks wrote is there, whoever else is at work in the folder.

    Args:
        folder: where it was written.
        results: by rank, what torch says of its part.

    Raises:
        OSError: a file is shorter than it was written, or is not there.
    """
    ends: dict[str, int] = {}
    for result in (result for part in results for result in part):
        stored = result.storage_data
        ends[stored.relative_path] = max(ends.get(stored.relative_path, 0), stored.offset + stored.length)
    for name, end in ends.items():
        size = (folder / name).stat().st_size
        if size < end:
            raise OSError(f"{folder / name} has {size} bytes, and {end} were written. Is the folder shared?")
