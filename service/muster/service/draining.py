"""What whoever comes too late is told by a coordinator that stops."""

from muster.service.core.vocabulary.refusal import Reason, Refusal

DRAINING = Refusal(
    Reason.COORDINATOR_DRAINING,
    "the coordinator is stopping; nothing has failed. Connect again: it, or its successor, goes on.",
)
