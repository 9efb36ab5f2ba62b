"""What the ranks have written, looked at before it is committed."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from torch.distributed.checkpoint import FileSystemReader
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


def check_shards(folder: Path) -> None:
    """Check that the files which torch's metadata in a folder names are there, as long as it says.

    Args:
        folder: a checkpoint that torch has written.

    Raises:
        OSError: a file is shorter, or is not there.
    """
    ends: dict[str, int] = {}
    for stored in FileSystemReader(folder).read_metadata().storage_data.values():
        ends[stored.relative_path] = max(ends.get(stored.relative_path, 0), stored.offset + stored.length)
    check_files(folder, ends)


def check_files(folder: Path, written: Mapping[str, int]) -> None:
    """As :func:`check_sizes`, in a folder."""
    there = {name: (folder / name).stat().st_size for name in written if (folder / name).exists()}
    check_sizes(folder, there, written)


def check_sizes(where: Path | str, there: Mapping[str, int], written: Mapping[str, int]) -> None:
    """Check that what the ranks wrote is there, whatever other processes did in the folder.

    Args:
        where: it was written.
        there: the size in bytes of each file that is found there.
        written: of each file how many bytes have been written.

    Raises:
        OSError: a file is shorter than it was written, or is not there.
    """
    for name, length in written.items():
        size = there.get(name)
        if size is None:
            raise FileNotFoundError(
                f"{where}/{name}, which was written, is not there. Do all ranks share it?"
            )
        if size < length:
            raise OSError(
                f"{where}/{name} has {size} bytes, and {length} were written. Do all ranks share it?"
            )
