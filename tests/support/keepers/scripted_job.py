"""A core with the keepers of one run, one rank on each, for tests that say what each keeper reports."""

from collections.abc import Iterable
from itertools import count
from typing import Self

from muster.service.core.coordinator import Coordinator
from muster.service.core.local.tier import ORDERS_PAUSE
from muster.service.core.vocabulary.effects import Effects, Message, Refused
from muster.service.core.vocabulary.events import Disconnected, Event, Tick
from muster.service.core.vocabulary.local import (
    Attachment,
    Attempt,
    CommitLocal,
    ConnectKeeper,
    Disk,
    Holding,
    KeeperInfo,
    Level,
    LocalCheckpoint,
    Orders,
    Recover,
    Recovered,
    ReportKeeper,
)
from muster.service.core.vocabulary.model import Instant, SessionId
from muster.service.core.vocabulary.refusal import Reason
from muster.service.storage.codec import decode_all, encode_all
from tests.support.keepers.told import check_told_levels

RUN = "job"


def digest(attempt: Attempt) -> bytes:
    """The digest of the manifest of an attempt."""
    return attempt.generation.to_bytes(8, "big") + attempt.number.to_bytes(8, "big")


class Job:
    """A core with the keepers of one run, one rank on each."""

    def __init__(self, nodes: int = 3, replicas: int = 1) -> None:
        self.nodes, self.replicas = nodes, replicas
        self.core = Coordinator()
        self.now = 0.0
        self.rows: dict[bytes, bytes] = {}
        self.sent: dict[SessionId, list[Message]] = {}
        self.sessions: dict[str, SessionId] = {}
        self.verifying: set[str] = set()
        """The keepers that still verify what is on their disks. The others confirm their orders at once."""
        self._ids = count(1)
        self._commits: dict[SessionId, Attempt] = {}

    def step(self, event: Event) -> Effects:
        effects = Effects()
        if isinstance(event, CommitLocal):
            self._commits[event.session] = event.checkpoint.attempt
        self.core.step(event, Instant(self.now, 1e9 + self.now), effects)
        batch = encode_all(effects.records)
        for prefix in batch.cleared:
            self.rows = {key: value for key, value in self.rows.items() if not key.startswith(prefix)}
        for key, value in batch.writes.items():
            self.rows.pop(key, None)
            if value is not None:
                self.rows[key] = value
        check_told_levels(self.rows, effects.deliveries, self._commits)
        for delivery in effects.deliveries:
            for session in delivery.audience:
                self.sent.setdefault(session, []).append(delivery.message)
        for delivery in effects.deliveries:
            if isinstance(delivery.message, Orders) and delivery.message.confirm:
                self._confirm(delivery.audience)
        return effects

    def _confirm(self, audience: Iterable[SessionId]) -> None:
        for name, session in self.sessions.items():
            if session in audience and name not in self.verifying:
                self.step(ReportKeeper(self.session(), RUN, name, (), self.orders(name).confirm))

    def restart(self) -> None:
        self.core = Coordinator()
        now = Instant(self.now, 1e9 + self.now)
        self.core.restore(decode_all(list(self.rows.items())), now)
        self.core.serve(now)
        self.sessions.clear()

    def session(self) -> SessionId:
        return next(self._ids)

    def connect(self, node: int, *holdings: Holding, generation: int | None = 1) -> None:
        session = self.sessions[f"k{node}"] = self.session()
        attachment = None
        if generation is not None:
            attachment = Attachment(generation, self.nodes, frozenset({node}), self.replicas)
        keeper = KeeperInfo(f"k{node}", f"http://k{node}")
        self.step(ConnectKeeper(session, RUN, keeper, holdings, Disk(1, 2), "secret", attachment))

    def connect_all(self, generation: int = 1) -> Self:
        """Connect each node's keeper, and return the job."""
        for node in range(self.nodes):
            self.connect(node, generation=generation)
        return self

    def lose(self, *nodes: int) -> None:
        for node in nodes:
            self.step(Disconnected(self.sessions.pop(f"k{node}")))
        self.now += 2 * ORDERS_PAUSE
        self.step(Tick())

    def report(self, node: int, attempt: Attempt, ranks: set[int], **more: object) -> Message:
        session = self.session()
        holding = Holding(attempt, digest(attempt), frozenset(ranks), **more)  # type: ignore[arg-type]
        name = f"k{node}"
        confirmed = self.orders(name).confirm if name in self.sessions.keys() - self.verifying else 0
        self.step(ReportKeeper(session, RUN, name, (holding,), confirmed))
        return self.sent[session][-1]

    def commit(
        self, attempt: Attempt, step: int, wait_for: Level = Level.LOCAL, persist_to: str = ""
    ) -> SessionId:
        session = self.session()
        checkpoint = LocalCheckpoint(
            attempt, step, self.nodes, 100, digest(attempt), self.replicas, persist_to
        )
        self.step(CommitLocal(session, RUN, checkpoint, "k0", wait_for))
        return session

    def save(self, attempt: Attempt, step: int, copies: bool = True) -> Self:
        """Commit a checkpoint, and let the keepers follow their orders; return the job."""
        self.commit(attempt, step)
        for node in range(self.nodes):
            self.report(node, attempt, {node})
        if copies:
            self.follow(attempt)
        return self

    def follow(self, attempt: Attempt) -> None:
        """Let each connected keeper fetch what it is ordered to hold."""
        for name in list(self.sessions):
            ranks = {
                rank
                for order in self.orders(name).checkpoints
                if order.checkpoint.attempt == attempt
                for rank in order.ranks
            }
            self.report(int(name[1:]), attempt, ranks)

    def orders(self, keeper: str) -> Orders:
        return [one for one in self.sent[self.sessions[keeper]] if isinstance(one, Orders)][-1]

    def recover(self, generation: int, number: int = 0) -> SessionId:
        session = self.session()
        self.step(Recover(session, RUN, generation, number, self.nodes))
        return session

    def answer(self, session: SessionId) -> Message | None:
        return self.sent.get(session, [None])[-1]

    def level(self, attempt: Attempt) -> Level | None:
        found = [one for one in self.core.run(RUN).local.copies if one.attempt == attempt]
        return found[0].level if found else None


def chosen(job: Job, session: SessionId) -> Attempt | None:
    answer = job.answer(session)
    assert isinstance(answer, Recovered)
    return answer.checkpoint.attempt if answer.checkpoint is not None else None


def refused(job: Job, session: SessionId) -> Reason:
    answer = job.answer(session)
    assert isinstance(answer, Refused)
    return answer.refusal.reason
