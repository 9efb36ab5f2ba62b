"""Checks the requests of keepers and ranks about local checkpoints, and hands them to the run's tier."""

from muster.client.protocol import MAX_COPIES, MAX_HOLDINGS, MAX_STEP, MAX_TRANSFERS
from muster.service.core.checks import Checks, invalid
from muster.service.core.local import refusals
from muster.service.core.local.keepers import Keeper
from muster.service.core.local.tier import LocalTier
from muster.service.core.membership.refusals import stale_generation
from muster.service.core.registry import Registry
from muster.service.core.retention.reaper import RunReaper
from muster.service.core.sessions import Sessions
from muster.service.core.vocabulary.effects import Effects, Refused
from muster.service.core.vocabulary.limits import Limits
from muster.service.core.vocabulary.local import (
    Attachment,
    Attempt,
    CommitLocal,
    ConnectKeeper,
    Holding,
    Level,
    LocalCheckpoint,
    LocalEvent,
    Recover,
    ReportKeeper,
    RequestPermit,
    Transfer,
)
from muster.service.core.vocabulary.model import Instant, SessionId
from muster.service.core.vocabulary.refusal import Refusal

MAX_SECONDS = 1e9
"""Longest transfer."""
MAX_URL_BYTES = 1_024
"""Length of a keeper's URL, or of a place in shared storage, in UTF-8."""
DIGEST_BYTES = 16
"""Length of a manifest's digest: XXH3 with 128 bits."""
MAX_BYTES = 2**63 - 1
"""Largest size of a manifest or a checkpoint, in bytes: the largest signed 64-bit number."""


class LocalRequests:
    """Handles the events of local checkpoints.

    Args:
        registry: knows the runs.
        reaper: is told that a run was used.
        checks: checks names and generations.
        limits: the configured bounds.
        sessions: counts the open sessions, among which keepers must fit.
    """

    def __init__(
        self, registry: Registry, reaper: RunReaper, checks: Checks, limits: Limits, sessions: Sessions
    ) -> None:
        self._registry = registry
        self._reaper = reaper
        self._checks = checks
        self._limits = limits
        self._sessions = sessions
        self._tiers: dict[SessionId, LocalTier] = {}
        """By the session of an open stream or a waiting call: the tier of its run."""

    def handle(self, event: LocalEvent, now: Instant, effects: Effects) -> None:
        """Carry out a request, or refuse it."""
        try:
            self._checks.name("run_id", event.run_id)
            match event:
                case ConnectKeeper():
                    self._connect(event, now, effects)
                case ReportKeeper():
                    self._report(event, now, effects)
                case CommitLocal():
                    self._commit(event, now, effects)
                case RequestPermit():
                    self._permit(event, now, effects)
                case Recover():
                    self._recover(event, now, effects)
        except Refusal as refusal:
            effects.send(event.session, Refused(refusal, final=isinstance(event, ConnectKeeper)))

    def disconnected(self, session: SessionId, now: Instant, effects: Effects) -> None:
        """A stream or a call has ended."""
        if (tier := self._tiers.pop(session, None)) is not None:
            tier.disconnect(session, now, effects)
            self._reaper.mark_used(self._registry.find_known(tier.run_id), now, effects)

    def forget(self, tier: LocalTier) -> list[SessionId]:
        """Forget the streams and calls of a run that is removed, and return them."""
        sessions = tier.sessions
        for session in sessions:
            self._tiers.pop(session, None)
        return sessions

    def _connect(self, event: ConnectKeeper, now: Instant, effects: Effects) -> None:
        keeper = event.keeper
        self._checks.name("keeper.id", keeper.id)
        _check_text("keeper.url", keeper.url, MAX_URL_BYTES)
        for field, value in (("failure_domain", keeper.domain), ("node_name", keeper.node_name)):
            if value:
                self._checks.name(f"keeper.{field}", value)
        self._check_holdings(event.holdings)
        _check_transfers(event.transfers)
        self._check_attachment(event.attachment)
        self._registry.check_room(event.run_id, now)
        self._sessions.check_room(-len(self._tiers))
        run = self._registry.begin(event.run_id, 0, now, effects)
        replaced = run.local.connect(event, now, effects)
        if replaced is not None:
            self._tiers.pop(replaced, None)
        self._tiers[event.session] = run.local
        self._reaper.mark_used(run, now, effects)

    def _report(self, event: ReportKeeper, now: Instant, effects: Effects) -> None:
        self._check_holdings(event.holdings)
        _check_transfers(event.transfers)
        self._check_attachment(event.attachment)
        run = self._registry.known(event.run_id)
        keeper = _connected(run.local, event.keeper_id)
        run.local.report(event, keeper, now, effects)
        self._reaper.mark_used(run, now, effects)

    def _permit(self, event: RequestPermit, now: Instant, effects: Effects) -> None:
        self._check_attempt(event.attempt)
        run = self._registry.known(event.run_id)
        _connected(run.local, event.keeper_id)
        run.local.permit(event, now, effects)
        self._reaper.mark_used(run, now, effects)

    def _commit(self, event: CommitLocal, now: Instant, effects: Effects) -> None:
        if event.keeper_id:
            self._checks.name("keeper_id", event.keeper_id)
        elif not event.checkpoint.persist_to:
            raise invalid("keeper_id", '""', "without one, the checkpoint must go to shared storage")
        _check_text("persisted_as", event.persisted_as, MAX_URL_BYTES, empty=True)
        self._check_checkpoint(event.checkpoint)
        _check_reachable(event.checkpoint, event.wait_for)
        run = self._registry.known(event.run_id)
        self._check_generation(run.generation, event.run_id, event.checkpoint.attempt.generation)
        self._tiers[event.session] = run.local
        run.local.commit(event, now, effects)
        self._reaper.mark_used(run, now, effects)

    def _recover(self, event: Recover, now: Instant, effects: Effects) -> None:
        self._checks.generation(event.generation)
        self._check_world_size(event.world_size)
        if event.number > MAX_STEP:
            raise invalid("number", event.number, f"it may be {MAX_STEP}")
        if len(event.absent) > MAX_HOLDINGS:
            raise invalid("absent", f"{len(event.absent)} entries", f"there may be {MAX_HOLDINGS}")
        run = self._registry.known(event.run_id)
        self._check_generation(run.generation, event.run_id, event.generation)
        self._tiers[event.session] = run.local
        run.local.recover(event, now, effects)
        self._reaper.mark_used(run, now, effects)

    # ------------------------------------------------------------------ checks

    def _check_generation(self, newest: int, run_id: str, generation: int) -> None:
        if generation < newest:
            raise stale_generation(run_id, generation, newest)

    def _check_world_size(self, world_size: int) -> None:
        most = self._limits.max_world_size
        if not 1 <= world_size <= most:
            raise invalid("world_size", world_size, f"it must be from 1 to {most}")

    def _check_attempt(self, attempt: Attempt) -> None:
        self._checks.generation(attempt.generation)
        if attempt.number > MAX_STEP:
            raise invalid("attempt.number", attempt.number, f"it may be {MAX_STEP}")

    def _check_attachment(self, attachment: Attachment | None) -> None:
        if attachment is None:
            return
        self._checks.generation(attachment.generation)
        self._check_world_size(attachment.world_size)
        outside = [rank for rank in attachment.ranks if not 0 <= rank < attachment.world_size]
        if outside:
            raise invalid(
                "attachment.ranks", sorted(outside)[:20], f"ranks are below {attachment.world_size}"
            )
        _check_replicas(attachment.replicas)

    def _check_holdings(self, holdings: tuple[Holding, ...]) -> None:
        if len(holdings) > MAX_HOLDINGS:
            raise invalid("holdings", f"{len(holdings)} entries", f"there may be {MAX_HOLDINGS}")
        for holding in holdings:
            self._check_attempt(holding.attempt)
            if len(holding.ranks) > self._limits.max_world_size:
                raise invalid("holding.ranks", f"{len(holding.ranks)} ranks", "a world has fewer")
            if len(holding.persisted_ranks) > self._limits.max_world_size:
                found = f"{len(holding.persisted_ranks)} ranks"
                raise invalid("holding.persisted_ranks", found, "a world has fewer")
            if len(holding.manifest_digest) not in (0, DIGEST_BYTES):
                found = f"{len(holding.manifest_digest)} bytes"
                raise invalid("holding.manifest_digest", found, f"it has {DIGEST_BYTES}, or none")
            _check_text("holding.persisted_as", holding.persisted_as, MAX_URL_BYTES, empty=True)

    def _check_checkpoint(self, checkpoint: LocalCheckpoint) -> None:
        self._check_attempt(checkpoint.attempt)
        self._check_world_size(checkpoint.world_size)
        _check_replicas(checkpoint.replicas)
        if checkpoint.step > MAX_STEP:
            raise invalid("checkpoint.step", checkpoint.step, f"it may be {MAX_STEP}")
        if len(checkpoint.manifest_digest) != DIGEST_BYTES:
            size = len(checkpoint.manifest_digest)
            raise invalid("checkpoint.manifest_digest", f"{size} bytes", f"it has {DIGEST_BYTES}")
        for field, value in (("manifest_size", checkpoint.manifest_size), ("size", checkpoint.size)):
            if value > MAX_BYTES:
                raise invalid(f"checkpoint.{field}", value, f"it may be {MAX_BYTES}")
        _check_text("checkpoint.persist_to", checkpoint.persist_to, MAX_URL_BYTES, empty=True)


def _connected(tier: LocalTier, keeper_id: str) -> Keeper:
    keeper = tier.keepers.find(keeper_id)
    if keeper is None or keeper.session is None:
        raise refusals.keeper_unknown(tier.run_id, keeper_id[:64])
    return keeper


def _check_reachable(checkpoint: LocalCheckpoint, wanted: Level) -> None:
    """Refuse to wait for a level that the checkpoint can never have."""
    if wanted is Level.PERSISTED and not checkpoint.persist_to:
        raise invalid("wait_for", wanted.name, "the checkpoint is not to be persisted")
    if wanted is Level.REPLICATED and not checkpoint.replicas and not checkpoint.persist_to:
        raise invalid("wait_for", wanted.name, "the checkpoint is to have no copies")


def _check_transfers(transfers: tuple[Transfer, ...]) -> None:
    if len(transfers) > MAX_TRANSFERS:
        raise invalid("transfers", f"{len(transfers)} entries", f"there may be {MAX_TRANSFERS}")
    for one in transfers:
        _check_text("transfer.url", one.url, MAX_URL_BYTES)
        if one.bytes > MAX_BYTES:
            raise invalid("transfer.bytes", one.bytes, f"it may be {MAX_BYTES}")
        if not 0 <= one.seconds <= MAX_SECONDS:
            raise invalid("transfer.seconds", one.seconds, f"it must be from 0 to {MAX_SECONDS:g}")


def _check_replicas(replicas: int) -> None:
    if not 0 <= replicas <= MAX_COPIES:
        raise invalid("replicas", replicas, f"it must be from 0 to {MAX_COPIES}")


def _check_text(field: str, value: str, most: int, *, empty: bool = False) -> None:
    size = len(value.encode("utf-8", "replace"))
    if not value and not empty:
        raise invalid(field, '""', "it must not be empty")
    if size > most or not value.isprintable():
        raise invalid(field, f"{size:,} bytes", f"it may have {most:,}, all of them printable")
