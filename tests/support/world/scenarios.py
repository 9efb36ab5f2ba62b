"""Scenario files: commands to the core, each followed by its output. See the README.md beside them.

A file is read, its commands are carried out, and it is written again with the output that there was. The test
compares the two texts.
"""

import re
import shlex
from collections.abc import Callable, Iterator

from muster.service.core.rendezvous import reports
from muster.service.core.vocabulary import report
from muster.service.core.vocabulary.events import Abort, Arrival, Arrive, JoinGroup, LeaveRendezvous, Tick
from muster.service.core.vocabulary.limits import Limits
from muster.service.core.vocabulary.model import NodeStanding, RendezvousSettings
from tests.support.world.core_client import CKPT, TIMEOUT, Client
from tests.support.world.core_disk import Crash
from tests.support.world.core_world import RUN
from tests.support.world.rendezvous_world import Agent, nodes
from tests.support.world.scenario_world import ScenarioWorld

COMMAND = "> "
OUTPUT = "  "
HEADING = "== "
SECONDS = re.compile(r"(\d+(?:\.\d+)?)s")
ESCAPE = re.compile(r"\\x([0-9a-f]{2})")


def play(text: str) -> str:
    """Return the text of a scenario file with the output that its commands have today.

    Raises:
        AssertionError: a line is not of the format, a command does not exist, or a promise that the world
            holds by itself is broken.
    """
    return "".join(f"{line}\n" for line in _play(text.splitlines()))


def _play(lines: list[str]) -> Iterator[str]:
    scenario: Scenario | None = None
    last = ""
    for number, line in enumerate(lines, 1):
        try:
            if line.startswith(HEADING):
                if scenario is not None:
                    scenario.end()
                scenario = Scenario()
            elif line.startswith(COMMAND):
                assert scenario is not None, f"a command before the first {HEADING.strip()!r}"
                yield line
                yield from (
                    f"{OUTPUT}{one}".rstrip() for one in scenario.carry_out(line.removeprefix(COMMAND))
                )
            elif line.startswith(OUTPUT):
                assert last.startswith((COMMAND, OUTPUT)), "output that belongs to no command"
            else:
                assert not line or line.startswith("#"), "neither a heading, a command, output nor a comment"
            if not line.startswith((COMMAND, OUTPUT)):
                yield line
        except Exception as error:
            raise AssertionError(f"line {number}: {line}\n{error}") from error
        last = line
    assert scenario is not None, "no scenario"
    scenario.end()


class Options:
    """What follows the verb of a command: names and texts, and ``key=value``."""

    def __init__(self, words: list[str]) -> None:
        pairs = [re.fullmatch(r"([a-z_]+)=(.*)", word, re.DOTALL) for word in words]
        self._names = [word for word, pair in zip(words, pairs, strict=True) if pair is None]
        self._values = {pair[1]: pair[2] for pair in pairs if pair is not None}

    def text(self, key: str, default: str = "") -> str:
        return ESCAPE.sub(lambda code: chr(int(code[1], 16)), self._values.pop(key, default))

    def number(self, key: str, default: int = 0) -> int:
        return int(self._values.pop(key, default))

    def seconds(self, key: str, default: float) -> float:
        return seconds(self._values.pop(key)) if key in self._values else default

    def ranks(self, key: str) -> tuple[int, ...]:
        return tuple(int(rank) for rank in self._values.pop(key, "").split(",") if rank)

    def take_names(self) -> list[str]:
        names, self._names = self._names, []
        return names

    def take_rest(self) -> dict[str, str]:
        """Take the values that are left, by key."""
        rest, self._values = self._values, {}
        return rest

    def end(self) -> None:
        unknown = [*self._names, *self._values]
        assert not unknown, f"unknown: {', '.join(unknown)}"


def seconds(text: str) -> float:
    found = SECONDS.fullmatch(text)
    assert found, f"not a time, such as 2.5s: {text}"
    return float(found[1])


def _node_settings(options: Options, count: str) -> RendezvousSettings:
    """What a node asks for: ``count`` is ``3`` or ``2-3``."""
    least, _, most = count.partition("-")
    times = {f"{name}_timeout": options.seconds(name, -1.0) for name in ("join", "last_call", "keep_alive")}
    changed = {name: time for name, time in times.items() if time >= 0}
    return nodes(int(least), int(most or least), **changed)


class Scenario:
    """One scenario: a world of its own, and what each command does to it."""

    def __init__(self) -> None:
        self.world = ScenarioWorld()
        self._calls: dict[str, int] = {}
        """The session of each rank's last call. Calls keep no history of what they heard."""
        self._commands: dict[str, Callable[[Options], Iterator[str] | None]] = {
            name.removeprefix("do_").replace("_", "-"): getattr(self, name)
            for name in dir(self)
            if name.startswith("do_")
        }

    def carry_out(self, line: str) -> list[str]:
        verb, *words = shlex.split(line)
        assert verb in self._commands, f"unknown command: {verb}"
        options, since = Options(words), self.world.now
        shown = list(self._commands[verb](options) or ())
        options.end()
        return [line.replace("\n", " | ") for line in (*self.world.written(since), *shown)]

    def end(self) -> None:
        """Hold what everybody has heard against the invariants."""
        if not self._calls:
            self.world.assert_good()
        self.world.assert_told()

    # ------------------------------------------------------------------ the world

    def do_world(self, options: Options) -> None:
        """How many ranks the job has, how many nodes a round, and the limits that are not the default."""
        settings = _node_settings(options, options.text("nodes", "2"))
        size = options.number("size", 2)
        limits = {name: int(value) for name, value in options.take_rest().items()}
        self.world = ScenarioWorld(size, settings, Limits(**limits) if limits else None)

    def do_wait(self, options: Options) -> None:
        (time,) = options.take_names()
        self.world.wait(seconds(time))

    def do_stall(self, options: Options) -> None:
        """Time passes, and the coordinator gets to run only at its end."""
        (time,) = options.take_names()
        self.world.tick(self.world.now + seconds(time))

    def do_tick(self, options: Options) -> None:
        """The coordinator looks at its clock, though nothing is due."""
        self.world.do(Tick())

    def do_move_wall_clock(self, options: Options) -> None:
        (time,) = options.take_names()
        self.world.wall_offset += seconds(time.lstrip("-")) * (-1 if time.startswith("-") else 1)

    def do_crash(self, options: Options) -> None:
        self.world.crash()

    def do_crash_next(self, options: Options) -> None:
        """The coordinator is killed within its next step, before or after that is on disk."""
        (when,) = options.take_names()
        self.world.crash_next = {"before-disk": Crash.BEFORE_PERSIST, "after-disk": Crash.AFTER_PERSIST}[when]

    # ------------------------------------------------------------------ processes and nodes

    def do_start(self, options: Options) -> None:
        """Start processes, each with its stream open."""
        generation, run = options.number("generation"), options.text("run", RUN)
        for name in options.take_names():
            self._start(name, generation, run)

    def _start(self, name: str, generation: int = 0, run: str = RUN) -> Client:
        rank = re.match(r"\d+", name)
        assert rank, f"a process is called by its rank, perhaps with a letter: {name}"
        assert name not in self.world.processes, f"{name} has started already"
        client = self.world.processes[name] = self.world.start(
            int(rank[0]), generation=generation, run=run, connect=False
        )
        client.connect()
        return client

    def _client(self, name: str) -> Client:
        """A process, which starts if it has not."""
        found = self.world.processes.get(name) or self._start(name)
        assert isinstance(found, Client), f"{name} is a node"
        return found

    def _started(self, name: str) -> Client | Agent:
        assert name in self.world.processes, f"{name} has not started"
        return self.world.processes[name]

    def _node(self, name: str) -> Agent:
        found = self._started(name)
        assert isinstance(found, Agent), f"{name} is a process"
        return found

    def do_join(self, options: Options) -> None:
        """Processes join a group, or nodes a round."""
        names = options.take_names()
        if names[0][0].isalpha():
            self._join_round(names, options)
            return
        group, size, ranks = options.text("group", CKPT), options.number("size"), options.ranks("ranks")
        for name in names:
            client = self._client(name)
            if size and group in client.memberships:
                assert client.session is not None
                self.world.do(JoinGroup(client.session, group, size))
            else:
                client.join(group, size, ranks)

    def do_joined(self, options: Options) -> None:
        """Processes of a new group have joined it, or nodes of a new run its round: nothing to read there."""
        wait = options.seconds("wait", 0.0)
        self.do_join(options)
        self.world.wait(wait)
        for line in self.world.written(self.world.now):
            assert re.match(r"(\[.*\] )?(disk: |[^:]*: (joined|PARTICIPANT|rank)|log: round)", line), (
                f"write join: {line}"
            )

    def _join_round(self, names: list[str], options: Options) -> None:
        run, address = options.text("run", RUN), options.text("address")
        count = options.text("nodes")
        settings = _node_settings(options, count) if count else None
        seen = options.text("old_stream") != "open"
        for name in names:
            if name not in self.world.processes:
                agent = self.world.agent(address or name, settings, run=run, incarnation=name, join=False)
                self.world.processes[name] = agent
            agent = self._node(name)
            agent.settings, agent.address = settings or agent.settings, address or agent.address
            agent.join(seen=seen)

    def do_connect(self, options: Options) -> None:
        for name in options.take_names():
            self._started(name).connect()

    def do_disconnect(self, options: Options) -> None:
        """The stream breaks, and both ends see it."""
        for name in options.take_names():
            process = self._started(name)
            process.lose_connection() if isinstance(process, Client) else process.lose_stream()

    def do_break(self, options: Options) -> None:
        """The stream breaks, and the coordinator does not see it yet."""
        for name in options.take_names():
            process = self._started(name)
            process.stream_breaks() if isinstance(process, Client) else process.lose_stream(seen=False)

    def do_notice(self, options: Options) -> None:
        """The coordinator sees that streams broke."""
        for name in options.take_names():
            self._node(name).coordinator_sees_it()

    # ------------------------------------------------------------------ processes

    def do_arrive(self, options: Options) -> None:
        """Processes arrive at their next barrier; with ``at``, at another."""
        group, at = options.text("group", CKPT), options.text("at")
        timeout, warn = options.seconds("timeout", TIMEOUT), options.seconds("warn", 0.0)
        payload = options.text("payload").encode()
        for name in options.take_names():
            client = self._client(name)
            if at:
                assert client.session is not None
                self.world.do(Arrive(client.session, group, int(at), timeout, (Arrival(client.rank),)))
            else:
                client.arrive(group, payload=payload, timeout=timeout, progress_after=warn)

    def do_arrive_again(self, options: Options) -> None:
        """Processes send the same arrival again."""
        for name in options.take_names():
            self._client(name).arrive_again()

    def do_vote(self, options: Options) -> None:
        """A process votes that its barrier must fail."""
        (name,) = options.take_names()
        self._client(name).arrive(failure=options.text("reason"))

    def do_goodbye(self, options: Options) -> None:
        for name in options.take_names():
            self._client(name).goodbye()

    def do_die(self, options: Options) -> None:
        for name in options.take_names():
            self._client(name).die()

    # ------------------------------------------------------------------ nodes, calls, operators

    def do_leave(self, options: Options) -> None:
        reason = options.text("reason")
        for name in options.take_names():
            self.world.caller = name
            self._node(name).leave(reason)
            self.world.caller = "operator"

    def do_ask(self, options: Options) -> None:
        """A node sends an attempt that is not its last, on a stream of its own."""
        (name,) = options.take_names()
        attempt = options.number("attempt")
        self.world.caller = f"{name}, attempt {attempt}"
        self.world.do(self._node(name).ask(session=self.world.new_session(), attempt=attempt))
        self.world.caller = "operator"

    def do_remove(self, options: Options) -> None:
        """An operator makes a node leave."""
        (name,) = options.take_names()
        event = LeaveRendezvous(
            self.world.new_session(), RUN, self._node(name).incarnation, options.text("reason")
        )
        self.world.do(event)

    def do_call(self, options: Options) -> None:
        """A rank arrives by a call."""
        (rank,) = options.take_names()
        at = options.text("at")
        self.world.caller = f"call of {rank}"
        self._calls[rank] = self.world.call(int(rank), int(at) if at else None)
        self.world.caller = "operator"

    def do_hang_up(self, options: Options) -> None:
        for rank in options.take_names():
            self.world.hang_up(self._calls[rank])

    def do_abort(self, options: Options) -> None:
        """An operator ends the open barrier."""
        run, group, reason = options.text("run", RUN), options.text("group", CKPT), options.text("reason")
        at = options.text("at")
        self.world.do(Abort(self.world.new_session(), run, group, reason, int(at) if at else None))

    # ------------------------------------------------------------------ looking

    def do_show_group(self, options: Options) -> Iterator[str]:
        prefix = options.text("group", CKPT)
        if prefix not in self.world.coordinator.runs[RUN].groups:
            yield "no such group"
            return
        group, now = self.world.group(prefix), self.world.instant
        kept = report.ranges(group.decisions) or "none"
        yield f"next #{group.next_sequence}; decisions kept: {kept}"
        if group.open is not None:
            missing = group.missing(group.open, now, group.open.shape)
            yield f"open #{group.open.sequence}: " + report.roll_call(
                len(group.open.arrivals), group.open.shape.size, missing
            )

    def do_show_nodes(self, options: Options) -> Iterator[str]:
        rendezvous, now = self.world.rendezvous, self.world.now
        yield reports.state(rendezvous)
        for standing in NodeStanding:
            for node in rendezvous.of(standing):
                rank = f" rank {node.rank}" if node.rank is not None else ""
                stream = "" if node.session is not None else ", stream lost"
                yield f"{standing.name}{rank}: {node}, joined {now - node.joined_at:g} s ago{stream}"
        for gone in rendezvous.departed:
            name = report.node_name(gone.info)
            yield f"gone: {name} of round {gone.round}, {gone.reason} {now - gone.at:g} s ago"
