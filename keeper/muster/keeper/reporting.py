"""What the coordinator has been told, and what it has yet to hear. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from muster.checkpoint.committed import SaveAttempt
from muster.keeper.vocabulary import Attachment, Holding


@dataclass(frozen=True, slots=True)
class Report:
    """What a keeper says of itself, or what has changed of it."""

    attachment: Attachment | None = None
    holdings: Mapping[SaveAttempt, Holding] = field(default_factory=dict)
    used: int = 0
    """Bytes."""
    quota: int = 0
    """Bytes; 0 in what has changed: neither has."""
    is_complete: bool = False
    """Whether all that is in the folder has been verified; in what has changed: since the last report."""

    @property
    def is_empty(self) -> bool:
        """Whether it says nothing."""
        return self.attachment is None and not self.holdings and not self.quota and not self.is_complete

    def without(self, heard: "Report") -> "Report":
        """Return what has changed since a report.

        A checkpoint of which nothing is left is reported as a holding without ranks.
        """
        gone = {
            attempt: Holding(attempt, before.manifest_digest)
            for attempt, before in heard.holdings.items()
            if attempt not in self.holdings and (before.ranks or before.persisted_ranks)
        }
        changed = {
            attempt: now for attempt, now in self.holdings.items() if heard.holdings.get(attempt) != now
        }
        disk = (self.used, self.quota) if (self.used, self.quota) != (heard.used, heard.quota) else (0, 0)
        return Report(
            None if self.attachment == heard.attachment else self.attachment,
            gone | changed,
            *disk,
            is_complete=self.is_complete and not heard.is_complete,
        )

    def with_changes(self, changes: "Report") -> "Report":
        """Return this report after further changes were heard."""
        merged = replace(
            self,
            holdings={**self.holdings, **changes.holdings},
            is_complete=self.is_complete or changes.is_complete,
        )
        if changes.attachment is not None:
            merged = replace(merged, attachment=changes.attachment)
        if changes.quota:
            merged = replace(merged, used=changes.used, quota=changes.quota)
        return merged
