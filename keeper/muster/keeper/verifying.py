"""Verifies files of a keeper's folder."""

import logging
from pathlib import Path

from muster.checkpoint.damage import DamageError
from muster.checkpoint.directory import METADATA
from muster.checkpoint.manifest import MANIFEST, FileEntry, Manifest, ManifestError, ManifestReference
from muster.checkpoint.source import FolderSource, read_whole
from muster.checkpoint.verification import read_file, read_manifest, verify
from muster.keeper.vocabulary import Head

logger = logging.getLogger(__name__)


def file_is_whole(folder: Path, name: str, entry: FileEntry) -> bool:
    """Return whether a file is what was written; log its damage.

    Raises:
        OSError: it cannot be read.
    """
    for found in verify(FolderSource(folder), Manifest({name: entry}), threads=1):
        for damage in found.damages:
            logger.error("%s is damaged: %s", folder / name, damage)
            return False
    return True


def read_head(folder: Path, reference: ManifestReference | None = None) -> Head | None:
    """Read and verify a manifest, and torch's metadata by it.

    Args:
        folder: of the attempt.
        reference: to the manifest; None: any that is whole.

    Returns:
        The head; None if a file of it is missing or damaged.

    Raises:
        OSError: a file cannot be read.
        UnusableManifestError: the manifest names files that no rank writes.
    """
    source = FolderSource(folder)
    try:
        if reference is None:
            reference = ManifestReference.of(read_whole(source, MANIFEST))
        manifest = read_manifest(source, reference)
        if manifest is None:
            return None
        head = Head(reference, manifest)
        read_file(source, manifest, METADATA)
    except FileNotFoundError:
        return None
    except (DamageError, ManifestError) as error:
        # An unfinished head is usual: rank 0 writes it last. The log tells of a damaged one.
        if (folder / METADATA).exists() and (folder / MANIFEST).exists():
            logger.warning("the head in %s is not used: %s", folder, error)
        return None
    return head
