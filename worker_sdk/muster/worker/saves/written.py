"""What the ranks have written, looked at before it is committed."""

from collections.abc import Iterator
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult


def check_whole(metadata: Metadata, results: list[list[WriteResult]]) -> None:
    """On rank 0: everything that a checkpoint is to hold was written by someone.

    Args:
        metadata: what it is to hold.
        results: by rank, what torch says of its part.

    Raises:
        ValueError: a part was written by nobody.
    """
    written = {result.index for part in results for result in part}
    for index in _parts(metadata):
        if index not in written:
            raise ValueError(
                f"{index.fqn} was written by no rank: they have not all written by the same plan. The next "
                "save is another attempt; if it fails as well, restart the job on all ranks."
            )


def _parts(metadata: Metadata) -> Iterator[MetadataIndex]:
    for name, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            yield from (MetadataIndex(name, chunk.offsets) for chunk in stored.chunks)
        else:
            yield MetadataIndex(name)


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
