"""The marker of a committed checkpoint, in a folder or a bucket."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from muster.checkpoint.digest import digest_of
from muster.checkpoint.manifest import ManifestReference
from muster.checkpoint.version import FORMAT, LaterVersionError

WIDTH = 10
"""Digits of a step, so that names sort as steps do."""
MARKER = "committed.json"
"""The file that says that a folder is a committed checkpoint."""
SEAL = "digest"
"""The marker's key for the digest of all its other fields."""


class UncommittedError(ValueError):
    """The named path is not a committed checkpoint."""


@dataclass(frozen=True, slots=True)
class Committed:
    """A committed checkpoint: the marker's content, and where it is."""

    step: int
    """The step that was saved."""
    world_size: int
    """The number of ranks that saved it."""
    run_id: str
    """The training job."""
    prefix: str
    """The group of the barrier whose decision committed it."""
    sequence: int
    """The number of that barrier in its group."""
    path: Path | str
    """A folder, or in object storage the address with its scheme, as a string."""
    order: int = 0
    """Counts the commits in its place, from 1. Checkpoints of 0.1.0 have 0."""
    committed_at: float = 0.0
    """When it was committed, in seconds of Unix time by rank 0's clock, for people; 0 if it is not known."""
    manifest: ManifestReference | None = None
    """None if its content cannot be verified: 0.1.0 wrote no digests."""

    @property
    def age_order(self) -> tuple[int, int]:
        """The key that sorts checkpoints by their commits, oldest first."""
        return self.order, self.step

    def fields(self) -> dict[str, Any]:
        """Return the fields of its marker."""
        said = asdict(self)
        del said["path"]
        return said


class SaveAttempt(NamedTuple):
    """Identifies one attempt to save a step. Later attempts of a job compare greater."""

    generation: int
    """The generation of the run: it grows at every restart of the job."""
    number: int
    """The number of the save: that of its barrier, which continues after a restart within the generation."""


def run_mark(run_id: str) -> str:
    """Return the mark of a run in the names of its attempts: each run numbers its attempts from the start."""
    return f"{crc32(run_id.encode()):08x}"


# ---------------------------------------------------------------------- markers


def seal(fields: Mapping[str, Any]) -> bytes:
    """Encode a marker with a digest of its own fields, so that a flipped bit is noticed."""
    fields = {"format": FORMAT, **fields}
    return json.dumps({**fields, SEAL: _digest(fields)}, sort_keys=True).encode()


def unseal(data: bytes, what: str = MARKER) -> dict[str, Any]:
    """Read a marker. A marker of 0.1.0 has no digest, and names no manifest.

    Args:
        data: its content.
        what: the name of the marker, for people.

    Returns:
        Its fields, without digest and format.

    Raises:
        ValueError: it is not what was written.
        LaterVersionError: it is intact, but of a format that this version cannot read.
    """
    try:
        said = json.loads(data)
    except RecursionError as error:
        raise ValueError("it is nested too deep for a marker") from error
    if not isinstance(said, dict):
        raise ValueError(f"a marker is a JSON object, and this is {said!r}")
    sealed = said.pop(SEAL, None)
    if sealed is None and "manifest" in said:
        raise ValueError("the marker has lost its digest")
    if sealed is not None and sealed != _digest(said):
        raise ValueError("the marker's content does not agree with its digest")
    if (found := said.pop("format", FORMAT)) != FORMAT:
        raise LaterVersionError.of(what, found)
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
    """Build a checkpoint from the fields of its marker.

    Raises:
        ValueError: a field is missing or of another type.
    """
    known = {name: said[name] for name in _TYPES if name in said}
    manifest = said.get("manifest")
    try:
        reference = None if manifest is None else ManifestReference(**manifest)
        made = Committed(**known, path=path, manifest=reference)
    except TypeError as error:
        raise ValueError(f"it does not say what a checkpoint is: {error}") from error
    for name, kind in _TYPES.items():
        value = getattr(made, name)
        if type(value) is not kind:
            raise ValueError(f"it says {name} = {value!r}")
    if not math.isfinite(made.committed_at):
        raise ValueError(f"it says committed_at = {made.committed_at!r}")
    if reference is not None and (type(reference.size) is not int or type(reference.digest) is not str):
        raise ValueError(f"it says manifest = {manifest!r}")
    return made


# ---------------------------------------------------------------------- adapters of frameworks

NO_STEP = -1
"""The step of a checkpoint if neither its marker nor its name has one."""
_NUMBER = re.compile(r"(\d+)(?:\.[a-z]+)?$")
_SHARED = ("world_size", "run_id", "prefix", "sequence", "order", "committed_at", "manifest")
"""The fields that an adapter's marker shares with a ``Checkpointer``'s."""


def step_in(name: str) -> int:
    """Return the number at the end of a checkpoint's name, as in ``checkpoint-500``; else :data:`NO_STEP`."""
    number = _NUMBER.search(name)
    return int(number[1]) if number is not None else NO_STEP


def committed_by_adapter(said: Mapping[str, Any], path: Path) -> Committed:
    """Build a checkpoint from the marker of a framework's adapter. The step is in the checkpoint's name.

    Raises:
        ValueError: a field is missing or of another type.
    """
    shared = {name: said[name] for name in _SHARED if name in said}
    return committed_from({"step": step_in(path.name), **shared}, path)
