"""Compares two reports of a keeper, so that only changes are sent. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

from muster.checkpoint.committed import SaveAttempt
from muster.client.protocol import MAX_HOLDINGS
from muster.keeper.vocabulary import Attachment, Holding, Transfer

LONG = 30.0
"""Seconds of a transfer that are worth a report of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The state of a keeper as the coordinator hears it: all of it, or only what has changed."""

    attachment: Attachment | None = None
    holdings: Mapping[SaveAttempt, Holding] = field(default_factory=dict)
    used: int = 0
    """Bytes that the folder takes."""
    quota: int = 0
    """Bytes that it may take. In a report of changes, 0 means that ``used`` and ``quota`` are unchanged."""
    confirmed: int | None = 0
    """The number that the orders ask to confirm, if it is confirmed; else 0. In a report of changes, None
    means that this is unchanged."""
    transfers: Mapping[str, Transfer] = field(default_factory=dict)
    """By the URLs of other keepers. In a report of changes: all, or none if they are as before."""
    goes_on: bool = False
    """In a report of changes: whether a transfer has gone on for long. People hear of it before its end."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing has changed that must be reported. Transfers go with the next report."""
        has_changed = self.attachment or self.holdings or self.quota or self.goes_on
        return not has_changed and self.confirmed is None

    def without(self, heard: "Report") -> "Report":
        """Return what has changed since an earlier report.

        A checkpoint that is no longer here is reported as a holding without ranks. If more than
        ``MAX_HOLDINGS`` checkpoints have changed, the others are for the next report.

        Args:
            heard: what the coordinator has heard.
        """
        gone = {
            attempt: Holding(attempt, before.manifest_digest)
            for attempt, before in heard.holdings.items()
            if attempt not in self.holdings and (before.ranks or before.persisted_ranks)
        }
        changed = {
            attempt: now for attempt, now in self.holdings.items() if heard.holdings.get(attempt) != now
        }
        differing = gone | changed
        confirmed = self.confirmed if len(differing) <= MAX_HOLDINGS else 0  # It holds for all of them.
        has_other_disk = (self.used, self.quota) != (heard.used, heard.quota)
        return Report(
            attachment=None if self.attachment == heard.attachment else self.attachment,
            holdings=dict(islice(differing.items(), MAX_HOLDINGS)),
            used=self.used if has_other_disk else 0,
            quota=self.quota if has_other_disk else 0,
            confirmed=None if confirmed == heard.confirmed else confirmed,
            transfers={} if self.transfers == heard.transfers else self.transfers,
            goes_on=any(
                now.seconds - (heard.transfers[url].seconds if url in heard.transfers else 0.0) >= LONG
                for url, now in self.transfers.items()
            ),
        )

    def with_changes(self, changes: "Report") -> "Report":
        """Return this report with changes applied."""
        merged = replace(
            self,
            holdings={**self.holdings, **changes.holdings},
            confirmed=self.confirmed if changes.confirmed is None else changes.confirmed,
            transfers=changes.transfers or self.transfers,
        )
        if changes.attachment is not None:
            merged = replace(merged, attachment=changes.attachment)
        if changes.quota:
            merged = replace(merged, used=changes.used, quota=changes.quota)
        return merged
