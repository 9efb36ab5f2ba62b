"""What the coordinator has been told, and what it has yet to hear. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from muster.checkpoint.committed import SaveAttempt
from muster.keeper.vocabulary import Attachment, Holding, Transfer

LONG = 30.0
"""Seconds of a transfer that are worth a report of their own."""


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
    transfers: Mapping[str, Transfer] = field(default_factory=dict)
    """By the URLs of other keepers; in what has changed: all, or none if they are as before."""
    goes_on: bool = False
    """In what has changed: whether a transfer has gone on for long. People hear of it before its end."""

    @property
    def is_empty(self) -> bool:
        """Whether it says nothing that must be reported. Transfers go with the next report."""
        return not (self.attachment or self.holdings or self.quota or self.is_complete or self.goes_on)

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
            transfers={} if self.transfers == heard.transfers else self.transfers,
            goes_on=any(
                now.seconds - (heard.transfers[url].seconds if url in heard.transfers else 0.0) >= LONG
                for url, now in self.transfers.items()
            ),
        )

    def with_changes(self, changes: "Report") -> "Report":
        """Return this report after further changes were heard."""
        merged = replace(
            self,
            holdings={**self.holdings, **changes.holdings},
            is_complete=self.is_complete or changes.is_complete,
            transfers=changes.transfers or self.transfers,
        )
        if changes.attachment is not None:
            merged = replace(merged, attachment=changes.attachment)
        if changes.quota:
            merged = replace(merged, used=changes.used, quota=changes.quota)
        return merged
