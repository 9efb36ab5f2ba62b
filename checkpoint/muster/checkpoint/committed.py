"""What a committed checkpoint is, wherever it is: its marker."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from muster.checkpoint.digest import digest_of
from muster.checkpoint.manifest import ManifestReference

WIDTH = 10
"""Digits of a step, so that names sort as steps do."""
MARKER = "committed.json"
"""The file that says that a folder is a committed checkpoint."""
SEAL = "digest"
"""The marker's key for the digest of all its other content."""


class UncommittedError(ValueError):
    """What should be a checkpoint was not committed."""


@dataclass(frozen=True, slots=True)
class Committed:
    """A committed checkpoint: the marker's content, and where it is."""

    step: int
    world_size: int
    run_id: str
    prefix: str
    sequence: int
    """Of the decision that committed it."""
    path: Path | str
    """A string if it is in object storage: with its scheme."""
    order: int = 0
    """Counts the commits in its place. The last one has the highest; those of 0.1.0 have 0."""
    committed_at: float = 0.0
    """When, in seconds of Unix time by rank 0's clock; for people only. 0 if it is not known."""
    manifest: ManifestReference | None = None
    """None if its content cannot be verified: 0.1.0 wrote no digests."""

    @property
    def age_order(self) -> tuple[int, int]:
        """What to sort checkpoints by, oldest commit first."""
        return self.order, self.step

    def fields(self) -> dict[str, Any]:
        """Return what the marker says."""
        said = asdict(self)
        del said["path"]
        return said


class Life(NamedTuple):
    """Which attempt to save a step this is. The lives of a job are in the order of these."""

    generation: int
    """The job's life between restarts."""
    number: int
    """Of the save in it: that of its barrier, which goes on where the job is started again."""


# ---------------------------------------------------------------------- markers


def seal(fields: Mapping[str, Any]) -> bytes:
    """Encode a marker with a digest of its own content, so that a flipped bit does not go unnoticed."""
    return json.dumps({**fields, SEAL: _digest(fields)}, sort_keys=True).encode()


def unseal(data: bytes) -> dict[str, Any]:
    """Read a marker.

    Raises:
        ValueError: it is not what was written. A marker of 0.1.0 has no digest, and names no manifest.
    """
    said = json.loads(data)
    if not isinstance(said, dict):
        raise ValueError(f"a marker is a JSON object, and this is {said!r}")
    sealed = said.pop(SEAL, None)
    if sealed is None and "manifest" in said:
        raise ValueError("the marker has lost its digest")
    if sealed is not None and sealed != _digest(said):
        raise ValueError("the marker's content does not agree with its digest")
    return said


def _digest(fields: Mapping[str, Any]) -> str:
    return digest_of(json.dumps(dict(fields), sort_keys=True).encode()).hex()


_TYPES = {
    "step": int,
    "world_size": int,
    "run_id": str,
    "prefix": str,
    "sequence": int,
    "order": int,
    "committed_at": float,
}


def committed_from(said: Mapping[str, Any], path: Path | str) -> Committed:
    """Build a checkpoint from what its marker says.

    Raises:
        ValueError: a field is missing, unknown or of another type.
    """
    known = dict(said)
    manifest = known.pop("manifest", None)
    try:
        reference = None if manifest is None else ManifestReference(**manifest)
        made = Committed(**known, path=path, manifest=reference)
    except TypeError as error:
        raise ValueError(f"it does not say what a checkpoint is: {error}") from error
    for name, kind in _TYPES.items():
        value = getattr(made, name)
        if type(value) is not kind:
            raise ValueError(f"it says {name} = {value!r}")
    if reference is not None and (type(reference.size) is not int or type(reference.digest) is not str):
        raise ValueError(f"it says manifest = {manifest!r}")
    return made
