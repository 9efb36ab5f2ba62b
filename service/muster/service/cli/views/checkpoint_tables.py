"""Tables, texts and JSON of the checkpoints in a folder or a bucket."""

import enum
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from muster.checkpoint.damage import Damage
from muster.checkpoint.digest import ALGORITHM
from muster.checkpoint.manifest import FileEntry, Manifest, RankEntry
from muster.checkpoint.stored import StoredCheckpoint
from muster.service.cli.views.table import Column, Table, counted, fields, indented
from muster.service.formatting.cells import NOTHING, duration, size


class State(enum.StrEnum):
    """The state of a checkpoint."""

    COMMITTED = "COMMITTED"
    """No damage is known. Its bytes were not read."""
    VERIFIED = "VERIFIED"
    """Every byte is what was written."""
    UNVERIFIED = "UNVERIFIED"
    """It has no digests."""
    UNREADABLE = "UNREADABLE"
    """An I/O error occurred while it was verified."""
    DAMAGED = "DAMAGED"
    """It is not what was committed, or it is marked as damaged."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Damage, and the rank that wrote the damaged file."""

    damage: Damage
    writer: RankEntry | None = None
    """None if it is not known."""

    def __str__(self) -> str:
        if self.writer is None:
            return str(self.damage)
        return f"{self.damage}; rank {self.writer.rank} ({self.writer.host}) wrote it"


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of verifying a checkpoint."""

    checkpoint: StoredCheckpoint
    state: State
    files: int = 0
    """Files that its manifest names."""
    read: int = 0
    """Bytes that are what was written."""
    findings: tuple[Finding, ...] = ()
    error: str = ""
    """Why it is unreadable."""


def writer_of(manifest: Manifest, file: str) -> RankEntry | None:
    """Return the rank that wrote a file; None if the manifest does not name it."""
    entry = manifest.files.get(file)
    if entry is None or entry.rank is None:
        return None
    known = (one for one in manifest.ranks if one.rank == entry.rank)
    return next(known, RankEntry(entry.rank, "unknown host", 0, 0.0))


# ---------------------------------------------------------------------- cells


def title(one: StoredCheckpoint) -> str:
    """Return the name of a checkpoint in a sentence: ``step 100``, or its folder's name."""
    return one.name if one.step is None else f"step {one.step}"


def _step(one: StoredCheckpoint) -> str:
    return NOTHING if one.step is None else str(one.step)


def _age(one: StoredCheckpoint) -> str:
    return duration(_age_ms(one)) if one.committed_at else NOTHING


def _age_ms(one: StoredCheckpoint) -> int:
    # A clock that is behind that of rank 0 shows no age below zero.
    return max(0, round((time.time() - one.committed_at) * 1000))


def _committed_at(one: StoredCheckpoint) -> str:
    return _time(one.committed_at) or NOTHING


def _time(seconds: float) -> str:
    """Format a time in UTC; return an empty string if it is not known."""
    try:
        known = datetime.fromtimestamp(seconds, UTC) if seconds else None
    except (ValueError, OverflowError, OSError):
        known = None  # It was read from a file that anyone may have written.
    return "" if known is None else f"{known:%Y-%m-%dT%H:%M:%SZ}"


def _ranks(one: StoredCheckpoint) -> str:
    return str(one.made.world_size) if one.made is not None and one.made.world_size else NOTHING


def _state(one: StoredCheckpoint) -> State:
    return State.COMMITTED if one.damage is None else State.DAMAGED


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _reason(found: Verification, *, most: int) -> str:
    if found.error:
        return found.error
    if found.state is State.UNVERIFIED:
        return "it has no digests"
    shown = "; ".join(map(str, found.findings[:most]))
    left = len(found.findings) - most
    return f"{shown}; and {left:,} more" if left > 0 else shown or NOTHING


CHECKPOINTS: list[Column[StoredCheckpoint]] = [
    Column(title="STEP", cell=_step),
    Column(title="AGE", cell=_age),
    Column(title="SIZE", cell=lambda one: size(one.size)),
    Column(title="RANKS", cell=_ranks),
    Column(title="RUN", cell=lambda one: one.made.run_id if one.made is not None else NOTHING),
    Column(title="STATE", cell=_state, state=True),
    Column(title="DIGESTS", cell=lambda one: _yes(one.has_digests)),
    Column(title="KEPT", cell=lambda one: _yes(one.kept)),
    Column(title="COMMITTED AT", cell=_committed_at, wide=True),
    Column(title="NAME", cell=lambda one: one.name, wide=True),
    Column(title="REASON", cell=lambda one: NOTHING if one.damage is None else str(one.damage)),
]


def verification_columns(*, full: bool) -> list[Column[Verification]]:
    """Return the columns of a table of verifications, with all findings of a checkpoint or the first one."""
    most = sys.maxsize if full else 1
    return [
        Column(title="STEP", cell=lambda found: _step(found.checkpoint)),
        Column(title="STATE", cell=lambda found: found.state, state=True),
        Column(title="FILES", cell=lambda found: str(found.files) if found.files else NOTHING),
        Column(title="VERIFIED", cell=lambda found: size(found.read) if found.files else NOTHING),
        Column(title="NAME", cell=lambda found: found.checkpoint.name, wide=True),
        Column(title="REASON", cell=lambda found: _reason(found, most=most)),
    ]


RANKS: list[Column[RankEntry]] = [
    Column(title="RANK", cell=lambda one: str(one.rank)),
    Column(title="HOST", cell=lambda one: one.host),
    Column(title="SIZE", cell=lambda one: size(one.size)),
    Column(title="WROTE FOR", cell=lambda one: duration(round(one.seconds * 1000))),
]

FILES: list[Column[tuple[str, FileEntry]]] = [
    Column(title="FILE", cell=lambda row: row[0]),
    Column(title="SIZE", cell=lambda row: size(row[1].size)),
    Column(title="RANK", cell=lambda row: NOTHING if row[1].rank is None else str(row[1].rank)),
    Column(title="SEGMENTS", cell=lambda row: str(len(row[1].segments))),
    Column(title="DIGEST", cell=lambda row: row[1].digest.hex()),
]


# ---------------------------------------------------------------------- texts


def checkpoint_text(
    one: StoredCheckpoint, manifest: Manifest | None, damage: Damage | None, *, wide: bool, color: bool
) -> str:
    """Describe a checkpoint for people.

    Args:
        one: the checkpoint.
        manifest: its manifest; None if it cannot be read, or the checkpoint has none.
        damage: its damage; None if none is known.
        wide: whether to show its files.
        color: whether states get their colours.
    """
    age = f", {_age(one)} ago" if one.committed_at else ""
    shown = {
        "Step": _step(one),
        "Path": one.source.place,
        "State": State.COMMITTED if damage is None else State.DAMAGED,
        "Committed": f"{_committed_at(one)}{age}",
        "Size": size(one.size),
    }
    if (made := one.made) is not None:
        shown |= {
            "Run": made.run_id,
            "World size": _ranks(one),
            "Decision": f'barrier "{made.prefix}" #{made.sequence}',
            "Order": str(made.order) if made.order else NOTHING,
        }
    shown |= {"Digests": _digests(one, manifest), "Kept": _yes(one.kept)}
    parts = [fields(shown)]
    if damage is not None:
        finding = Finding(damage, None if manifest is None else writer_of(manifest, damage.file))
        parts.append(f"Damage:\n{indented(str(finding))}")
    if manifest is not None and manifest.ranks:
        rows = sorted(manifest.ranks, key=lambda rank: rank.rank)
        parts.append(f"Ranks:\n{indented(Table(RANKS, color=color).text(rows))}")
    if manifest is not None and wide:
        parts.append(f"Files:\n{indented(Table(FILES, color=color).text(sorted(manifest.files.items())))}")
    return "\n\n".join(parts)


def _digests(one: StoredCheckpoint, manifest: Manifest | None) -> str:
    if manifest is None:
        return "no" if not one.has_digests else "the manifest cannot be read"
    segments = sum(len(entry.segments) for entry in manifest.files.values())
    files = counted(len(manifest.files), "file", "files")
    return f"{ALGORITHM} of {counted(segments, 'segment', 'segments')} in {files}"


# ---------------------------------------------------------------------- JSON


def as_json(one: StoredCheckpoint) -> dict[str, Any]:
    """Return a checkpoint as JSON."""
    made = one.made
    return {
        "step": one.step,
        "name": one.name,
        "path": one.source.place,
        "state": _state(one),
        "committed_at": _time(one.committed_at) or None,
        "age_ms": _age_ms(one) if one.committed_at else None,
        "bytes": one.size,
        "world_size": None if made is None else made.world_size,
        "run_id": None if made is None else made.run_id,
        "prefix": None if made is None else made.prefix,
        "sequence": None if made is None else made.sequence,
        "order": None if made is None else made.order,
        "digests": one.has_digests,
        "kept": one.kept,
        "marked_damaged": one.marked_damaged,
        "damage": None if one.damage is None else damage_json(Finding(one.damage)),
    }


def damage_json(finding: Finding) -> dict[str, Any]:
    """Return damage as JSON."""
    damage, writer = finding.damage, finding.writer
    return {
        "file": damage.file or None,
        "offset": damage.offset,
        "reason": damage.reason,
        "written_by_rank": None if writer is None else writer.rank,
        "written_by_host": None if writer is None else writer.host,
        "found_by_rank": damage.rank,
        "found_on_host": damage.host or None,
        "found_at": _time(damage.found_at) or None,
    }


def manifest_json(manifest: Manifest) -> dict[str, Any]:
    """Return a manifest as JSON."""
    return {
        "algorithm": ALGORITHM,
        "files": [
            {
                "file": name,
                "bytes": entry.size,
                "rank": entry.rank,
                "segments": len(entry.segments),
                "digest": entry.digest.hex(),
            }
            for name, entry in sorted(manifest.files.items())
        ],
        "ranks": [
            {"rank": one.rank, "host": one.host, "bytes": one.size, "seconds": one.seconds}
            for one in manifest.ranks
        ],
    }


def verification_json(found: Verification) -> dict[str, Any]:
    """Return the result of a verification as JSON."""
    return {
        "step": found.checkpoint.step,
        "name": found.checkpoint.name,
        "path": found.checkpoint.source.place,
        "state": found.state,
        "marked_damaged": found.checkpoint.marked_damaged,
        "files": found.files,
        "verified_bytes": found.read,
        "damages": [damage_json(one) for one in found.findings],
        "error": found.error or None,
    }


def steps_text(stored: Sequence[StoredCheckpoint]) -> str:
    """List the steps of checkpoints, for a sentence."""
    return ", ".join(sorted({_step(one) for one in stored}, key=lambda step: (len(step), step)))
