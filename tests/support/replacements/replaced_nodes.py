"""A job whose nodes are replaced and killed, in virtual time.

The core, the agents' dialogue, the agreement on a step to save at and the command ``muster replace`` are the
real ones. The world models the rest: torchrun's agents, the training, and the network.
"""

import hashlib
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import TypeVar

import pytest
import typer

from muster.service.cli.actions import replace as module
from muster.service.cli.actions.replace import Done, Replacement
from muster.service.cli.client.coordinator_client import CallError
from muster.service.cli.failure import Exit
from muster.service.core import views
from muster.service.core.vocabulary.effects import Evicted, Message, Refused, SaveRequested
from muster.service.core.vocabulary.events import CancelSave, DrainNode, Event, EvictNode, RequestSave
from muster.service.core.vocabulary.model import Decision, NodeStanding, Outcome
from muster.service.core.vocabulary.refusal import Reason, Refusal
from muster.service.wire import nodes_to_pb, rendezvous_to_pb, run_to_pb, save_to_pb
from muster.v1 import rendezvous_pb2, run_pb2
from muster.worker.errors import RefusedError
from muster.worker.savepoint.agreement import Next
from tests.support.replacements.sdk_agent import SdkAgent
from tests.support.world.core_disk import Crash
from tests.support.world.core_world import RUN
from tests.support.world.rendezvous_world import RendezvousWorld, nodes
from tests.support.world.trainers import Trainer

T = TypeVar("T")

TICK = 0.1
"""Seconds: torchrun's interval between two looks at its workers, and a step of the training."""
GRACE = 30.0
"""Seconds from a worker's SIGTERM until its agent kills it."""
UNHEARD = 3.0
"""Seconds after which the coordinator has noticed that a machine is silent, at most."""
PATIENCE = 120.0
"""Seconds within which a job must train on, whatever happened."""
WAIT = 300.0
"""Seconds that a replacement may take."""
CHECKPOINT = "checkpoint"


def after(chain: str, step: int) -> str:
    """Return the state after a step that was trained from ``chain``."""
    return hashlib.sha256(f"{chain} {step}".encode()).hexdigest()[:16]


class Rank(Trainer):
    """A rank that trains a chain of states, commits it at a barrier of all ranks, and has a save point."""

    world: "ReplaceWorld"

    def __init__(self, world: "ReplaceWorld", rank: int, generation: int) -> None:
        self.over = False
        self.generation = generation
        self.world = world
        super().__init__(world, rank, generation)
        self.client.join(CHECKPOINT)
        self._committed = 0
        self.base, self.step, self.chain = world.newest_commit()
        self.signalled = False
        self._unsent: int | None = None
        """The newest request that it knew when it had the signal, until the coordinator has answered."""

    def end(self) -> None:
        """The process ends."""
        self.over = True
        if self.client.alive:
            self.client.die()

    def signal(self) -> None:
        """SIGTERM: the save point asks all ranks for a save after which training ends."""
        if not self.signalled:
            self.signalled = True
            self._unsent = self.asked.number if self.asked is not None else 0

    def live(self) -> None:
        """Do what is due, as the threads of the process do."""
        if self.client.session is None:
            if any(one.final for one in self.client.refusals):
                self.end()
                return
            self.client.connect()
        if self.client.session is None:
            return
        if self._unsent is not None:
            request = RequestSave(
                self.world.new_session(), RUN, True, f"rank {self.client.rank}", "SIGTERM", self._unsent
            )
            self.world.ask(request)
            self._unsent = None
        self.attend()
        self._hear_commit()
        if not self.over and not self.blocked and self.world.may_train(self):
            self.train()

    def attend(self) -> None:
        self.look()
        if not self.over:  # What it has heard may have been the end of training.
            super().attend()

    def train(self) -> None:
        self.look()
        if not self.blocked and not self.over:
            self.world.trained(self, self.step + 1)
            self.chain = after(self.chain, self.step + 1)
            self.step += 1
            self._come_to(self.step)

    def _come_to(self, step: int) -> None:
        match self._course.after(step):
            case Next.WAIT:
                self.blocked = True
            case Next.SAVE:
                self.blocked = True
                self.client.arrive(CHECKPOINT, payload=f"{self.base} {step} {self.chain}".encode())
                self._hear_commit()

    def _hear_commit(self) -> None:
        heard = self.client.memberships[CHECKPOINT].heard
        if len(heard) == self._committed or self.over:
            return
        self._committed = len(heard)
        if heard[-1].outcome is not Outcome.RELEASED:
            self.end()
            return
        self.base = heard[-1].sequence
        self._arrive()

    def _decided(self, heard: Decision) -> None:
        was_saving = self._course.saves
        super()._decided(heard)
        # Without an outcome, done() raises. Training ends if the request or a signal says so.
        if was_saving and (self.signalled or self.done.get(heard.sequence, True)):
            self.end()


class Machine:
    """A machine with torchrun's agent and one worker."""

    def __init__(self, world: "ReplaceWorld", address: str) -> None:
        self.agent = SdkAgent(world, address)
        self.worker: Rank | None = None
        self.ended = ""
        """Why its agent has ended: the reason of a refusal, or ``killed``."""
        self._world = world
        self._killed_at: float | None = None
        """When the agent kills its worker, which it has asked to end."""
        self._away_until = 0.0
        """When it can reach the coordinator again."""
        world.agents.append(self.agent)
        self.agent.join()

    @property
    def lives(self) -> bool:
        return not self.ended

    @property
    def round(self) -> int | None:
        """The round that it is in."""
        place = self.agent.dialogue.place
        return place.round if place is not None and not self.agent.dialogue.done else None

    def be_away(self, seconds: float) -> None:
        """The agent cannot reach the coordinator for so long."""
        self._away_until = self._world.now + seconds
        self.agent.lose_stream()

    def kill(self, *, seen: bool) -> None:
        """The machine dies; the coordinator sees it at once, or after some seconds."""
        self.ended = "killed"
        self.agent.lose_stream(seen=seen)
        if self.worker is not None:
            self.worker.over = True
            self.worker.client.alive = False
            self.worker.client.stream_breaks()
            if seen:
                self._world.coordinator_sees_it(self.worker.client)

    def live(self) -> None:
        """Do what torchrun's agent does at one look at its workers."""
        dialogue, agent = self.agent.dialogue, self.agent
        if agent.session is None and not dialogue.done and self._world.now >= self._away_until:
            agent.connect()
        if self.worker is not None:
            if not self.worker.over:
                self.worker.live()
            self._attend_worker(self.worker)
        elif dialogue.error is not None:
            assert isinstance(dialogue.error, RefusedError)
            self.ended = dialogue.error.reason
        elif agent.nodes_waiting and dialogue.place is not None:
            self._join()
        elif dialogue.place is not None:
            self.worker = self._world.start_worker(dialogue.place.round, dialogue.place.rank)
            if self.worker is None:
                self._join()

    def _attend_worker(self, worker: Rank) -> None:
        now = self._world.now
        if self._killed_at is None and not worker.over and self.agent.nodes_waiting:
            worker.signal()
            self._killed_at = now + GRACE
        if worker.over or (self._killed_at is not None and now >= self._killed_at):
            worker.end()
            self.worker = self._killed_at = None
            self._join()

    def _join(self) -> None:
        if self.agent.dialogue.evicted_at is None:
            self.agent.join()
        else:
            self.ended = Reason.NODE_EVICTED.name


class ReplaceWorld(RendezvousWorld):
    """A job on some machines, one of which stands by.

    Args:
        seed: of all choices.
        size: nodes of a round.
    """

    def __init__(self, seed: int, size: int = 3) -> None:
        super().__init__(nodes(size, size, keep_alive_timeout=3.0, last_call_timeout=1.0))
        self.world_size = size
        self.chance = random.Random(seed)
        self.machines: list[Machine] = []
        self.steps = 0
        """The last step that any rank has trained."""
        self.trained_from: dict[int, str] = {}
        """By step: the state that it was trained from."""
        self.again = 0
        """Steps that a generation had trained, and that its successor must train again."""
        self.evictions = 0
        self.drained = False
        """Whether a notice has asked the run to stop. Then the scheduler starts all its machines again."""
        self.notices = 0
        self.unsure = False
        """Whether commands are doubled and answers lost."""
        self._ranks: dict[int, dict[int, Rank]] = {}
        """By generation and rank."""
        self._starts: dict[int, tuple[int, int, str]] = {}
        """By generation: the commit that its ranks have loaded."""
        self._unseen: list[tuple[float, Machine]] = []
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._coming = size + 1
        """Machines that the scheduler is about to start, so that one always stands by."""
        for _ in range(size + 1):
            self.add()

    def add(self) -> None:
        """Start one more machine."""
        self._coming -= 1
        self.machines.append(Machine(self, f"node-{len(self.machines)}"))

    # ------------------------------------------------------------------ time

    def later(self, seconds: float, do: Callable[[], None]) -> None:
        """Let something happen when so much time has passed."""
        self._due.append((self.now + seconds, do))

    def pass_time(self, seconds: float) -> None:
        """Let machines and coordinator live for so long."""
        end = self.now + seconds
        while self.now < end:
            self.wait(TICK)
            for at, machine in self._unseen[:]:
                if self.now >= at:
                    self._unseen.remove((at, machine))
                    machine.agent.coordinator_sees_it()
                    if machine.worker is not None:
                        self.coordinator_sees_it(machine.worker.client)
            for due in self._due[:]:
                if self.now >= due[0]:
                    self._due.remove(due)
                    due[1]()
            living = [machine for machine in self.machines if machine.lives]
            for _ in range(self.world_size + 1 - len(living) - self._coming):
                self._coming += 1
                self.later(self.chance.uniform(0.2, 3.0), self.add)
            self.chance.shuffle(living)
            for machine in living:
                machine.live()
            run = self.coordinator.runs[RUN]
            assert run.closed is None
            assert run.stopping.stopped is None or self.drained, "nobody has asked to stop"

    def train_on(self) -> None:
        """Wait until the job trains on."""
        target, deadline = self.steps + 3, self.now + PATIENCE
        while self.steps < target:
            assert self.now < deadline, f"the job is lost: {self.rendezvous.of(NodeStanding.PARTICIPANT)}"
            self.pass_time(TICK)

    def kill(self, machine: Machine) -> None:
        """A machine dies, perhaps silently."""
        if machine.lives:
            seen = self.chance.random() < 0.5
            machine.kill(seen=seen)
            if not seen:
                self._unseen.append((self.now + self.chance.uniform(0.0, UNHEARD), machine))

    def crash(self) -> None:
        self._unseen.clear()
        super().crash()

    # ------------------------------------------------------------------ training

    def start_worker(self, round: int, rank: int) -> Rank | None:
        """Start a rank of a round; None: a newer generation has begun, so it fails at once."""
        if self.coordinator.runs[RUN].generation > round:
            return None
        worker = Rank(self, rank, round)
        loaded = worker.base, worker.step, worker.chain
        if round not in self._starts:
            self._starts[round] = loaded
            self.again += self.steps - worker.step
        assert self._starts[round] == loaded, "ranks of one round loaded different states"
        self._ranks.setdefault(round, {})[rank] = worker
        return worker

    def newest_commit(self) -> tuple[int, int, str]:
        """Return the newest committed state: its barrier, step and value."""
        newest = -1, 0, ""
        for decision in self.disk.decided.get((RUN, CHECKPOINT), []):
            if decision.outcome is Outcome.RELEASED:
                (payload,) = {payload for _, payload in decision.payloads}
                base, step, chain = payload.decode().split(" ")
                assert int(base) == newest[0], "a checkpoint does not follow from the one before it"
                assert int(step) > newest[1]
                newest = decision.sequence, int(step), chain
        return newest

    def may_train(self, one: Rank) -> bool:
        """Whether the collective of the rank's next step ends: all ranks of its generation are in it.

        It fails, and with it the rank, if a rank has ended.
        """
        peers = self._ranks[one.generation]
        if any(peer.over for peer in peers.values()):
            one.end()
            return False
        if len(peers) < self.world_size:
            return False
        return all(
            peer.step > one.step or (peer.step == one.step and not peer.blocked) for peer in peers.values()
        )

    def trained(self, one: Rank, step: int) -> None:
        """A rank trains a step from its state."""
        assert self.trained_from.setdefault(step, one.chain) == one.chain, f"step {step} of two states"
        self.steps = max(self.steps, step)

    # ------------------------------------------------------------------ notices

    def notice(self, machines: list[Machine], *, stop: bool) -> None:
        """The watchers of these machines tell of a notice, and repeat it, as they do.

        Args:
            machines: those that are about to be lost.
            stop: whether the runs on them must stop.
        """
        self.drained = self.drained or stop
        self.notices += 1
        for _ in range(self.chance.choice([1, 2])):
            for machine in machines:
                if self.unsure and self.chance.random() < 0.1:
                    self.crash_next = self.chance.choice(list(Crash))
                name, notice = machine.agent.address, f"notice {self.notices}"
                drain = DrainNode(
                    self.new_session(), name, (RUN,), stop, f"watcher@{name}", "spot", notice=notice
                )
                self.do(drain)
                self.crash_next = None  # One that changes nothing has nothing to be killed at.

    def withdraw(self) -> None:
        """An operator withdraws the save that is pending, if one is."""
        self.do(CancelSave(self.new_session(), RUN, "the node stays"))

    # ------------------------------------------------------------------ replacements

    def in_round(self) -> list[Machine]:
        """The living machines of the newest round."""
        newest = max((m.round for m in self.machines if m.lives and m.round is not None), default=None)
        return [m for m in self.machines if m.lives and m.round == newest and newest is not None]

    def replace(self, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Done | int:
        """Run ``muster replace``. Returns how it ended, or its exit code."""
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self.pass_time)
        monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(module, "POLL_INTERVAL", self.chance.choice([0.1, 0.5]))
        try:
            command = Replacement(Calls(self), RUN, machine.agent.address, "a test", WAIT, save=True)  # type: ignore[arg-type]
            return command.carry_out()
        except typer.Exit as ended:
            return ended.exit_code

    def spares(self, address: str) -> int:
        """The connected agents of other machines that were told that they stand by."""
        return sum(
            m.lives and m.agent.session is not None and m.agent.address != address
            for m in self.machines
            if m.agent.stands is NodeStanding.REDUNDANT
        )


class Calls:
    """The command's client, whose calls are events of the core."""

    def __init__(self, world: ReplaceWorld) -> None:
        self._world = world

    def rendezvous(self, run: str) -> rendezvous_pb2.RendezvousServiceGetResponse:
        view = views.rendezvous(self._world.coordinator.runs[run], self._world.instant)
        return rendezvous_pb2.RendezvousServiceGetResponse(rendezvous=rendezvous_to_pb(view))

    def run(self, run: str) -> run_pb2.RunServiceGetResponse:
        view = views.run(self._world.coordinator.runs[run], self._world.instant)
        return run_pb2.RunServiceGetResponse(run=run_to_pb(view))

    def request_save(self, request: run_pb2.RequestSaveRequest) -> run_pb2.RequestSaveResponse:
        answer = self._ask(
            lambda: RequestSave(self._world.new_session(), RUN, request.stop, request.by, request.reason)
        )
        assert isinstance(answer, SaveRequested)
        return run_pb2.RequestSaveResponse(save=save_to_pb(answer.save), was_asked=answer.was_asked)

    def evict_node(self, request: rendezvous_pb2.EvictNodeRequest) -> rendezvous_pb2.EvictNodeResponse:
        world, name = self._world, request.node_name
        assert request.only_if_spare
        spares = world.spares(name)
        evicted = sum(node.info.address == name for node in world.rendezvous.of(NodeStanding.PARTICIPANT))
        answer = self._ask(
            lambda: EvictNode(world.new_session(), RUN, name, request.by, request.reason, True)
        )
        assert isinstance(answer, Evicted)
        assert spares >= evicted, "a node was evicted, and none stood by"
        world.evictions += 1
        return rendezvous_pb2.EvictNodeResponse(evicted=nodes_to_pb([]), spares=spares)

    def _ask(self, event: Callable[[], Event]) -> Message:
        """Do an event, perhaps twice, or so that its answer is lost when the coordinator is killed."""
        world = self._world
        if world.unsure and world.chance.random() < 0.2:
            world.crash_next = world.chance.choice(list(Crash))
            world.do(event())
            raise CallError("the coordinator cannot be reached", Exit.UNREACHABLE)
        (answer,) = world.ask(event())
        if world.unsure and world.chance.random() < 0.2:
            world.ask(event())
        if isinstance(answer, Refused):
            refusal: Refusal = answer.refusal
            raise CallError(refusal.message, Exit.FAILED, reason=refusal.reason.name)
        return answer
