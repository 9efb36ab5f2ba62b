"""The refusal of calls that reach a coordinator while it stops."""

from muster.service.core.vocabulary.refusal import Reason, Refusal

DRAINING = Refusal(
    Reason.COORDINATOR_DRAINING,
    "the coordinator is stopping; nothing has failed. Connect again: it, or its successor, goes on.",
)
