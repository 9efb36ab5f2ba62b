"""A job beside hostile clients of every kind: real processes all, and a judge of what the job noticed."""

import dataclasses
import json
import math
import os
import ssl
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.authority import Authority
from lab.hostile import readers
from lab.hostile.attacker import TEAM_RUN, Target
from lab.hostile.attacks import ATTACKS, Attack
from lab.patience import PATIENCE, until
from lab.processes import fork_client
from lab.processes.coordinator import Coordinator, free_port
from lab.processes.daemon import Daemon
from lab.processes.relay import Relay

RANKS = 8
"""Ranks of the job. Every second rank connects through the relay."""
MESSAGES_PER_SECOND = 1_000
"""Limit of one address, as docs/security.md advises."""
CONNECTIONS = 32
"""Limit of one address: enough for 16 processes of a node and its agent."""
GATHERED_BYTES = 32 << 20
"""Limit of the payloads of all runs."""
STORE_BYTES = 34 << 20
"""Limit of the store of one run. It has room for 32 values of 1 MiB."""
FILL_ONE_BUDGET = (readers.unread_gathers, readers.unread_decisions, readers.unread_values)
"""Attacks that a budget of bytes for all streams stops: one of them alone seldom fills it."""
VISIT_TIMEOUT = 10.0
"""Seconds in which a visitor is to be served while hostile clients compute only when nothing else does."""
SAMPLE_INTERVAL = 0.5
"""Seconds between two looks at the memory."""
HONEST = "lab.hostile.honest"
ATTACKING = "lab.hostile.attacking"


@dataclass(frozen=True, slots=True)
class Memory:
    """What one process used, in MiB."""

    peak: float
    """``VmHWM``, by the kernel."""
    resident: tuple[float, ...]
    """``VmRSS`` over the time."""


@dataclass(frozen=True, slots=True)
class Answered:
    """One hostile client, and how it was answered."""

    attack: Attack
    relayed: bool
    answers: Counter[str]
    ended: str = ""
    """The last words of its process, if that has ended by itself."""
    excused: bool = False
    """Whether another one was refused for the budget that both fill."""

    @property
    def name(self) -> str:
        """What it is called."""
        return f"{self.attack.name} (relay)" if self.relayed else self.attack.name

    @property
    def refused(self) -> int:
        """How often it was refused or limited as it is to be."""
        return sum(count for answer, count in self.answers.items() if _is_one_of(answer, self.attack.answers))

    @property
    def wrong(self) -> list[str]:
        """What is wrong with how it was answered."""
        found = [
            f"{self.name} was answered {answer}" for answer in self.answers if answer in self.attack.wrong
        ]
        if not self.refused and not self.excused:
            found.append(f"{self.name} was never refused: {dict(self.answers) or 'no answer at all'}")
        if self.ended:
            found.append(f"{self.name} has ended: {self.ended}")
        return found


def _is_one_of(answer: str, wanted: Any) -> bool:
    """Whether an answer is among those, which name a limit or only the reason."""
    return answer in wanted or answer.partition(" ")[0] in wanted


@dataclass(slots=True)
class Account:
    """What happened."""

    seconds: float = 0.0
    decisions: list[float] = field(default_factory=list)
    """Seconds from a barrier's last arrival until the last rank had its decision."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Outcomes of each rank at each barrier."""
    warnings: list[str] = field(default_factory=list)
    """Warnings of the ranks' SDK."""
    visits: int = 0
    longest_visit: float = 0.0
    failed_visits: list[str] = field(default_factory=list)
    memory: dict[str, Memory] = field(default_factory=dict)
    answered: list[Answered] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """All that must not be, but for how long anything took."""

    def percentile(self, part: float) -> float:
        """Milliseconds within which that part of the decisions was there."""
        ordered = sorted(self.decisions)
        return ordered[max(0, math.ceil(len(ordered) * part) - 1)] * 1000 if ordered else math.nan

    def __str__(self) -> str:
        lines = [
            f"{self.seconds:.0f} s, {len(self.decisions)} barriers of {RANKS} ranks: "
            + ", ".join(f"{name} {count}" for name, count in sorted(self.outcomes.items())),
            f"decision: p50 {self.percentile(0.5):.1f} ms, p99 {self.percentile(0.99):.1f} ms, "
            f"longest {self.percentile(1.0):.1f} ms",
            f"{self.visits} visits, {len(self.failed_visits)} failed, the longest {self.longest_visit:.2f} s",
            f"{len(self.warnings)} warnings of ranks",
        ]
        for name, memory in self.memory.items():
            lines.append(
                f"memory of the {name}: peak {memory.peak:.0f} MiB, at the begin {memory.resident[0]:.0f}, "
                f"median {statistics.median(memory.resident):.0f}, at the end {memory.resident[-1]:.0f}"
            )
        lines += ["", "| Row | Hostile client | Refused | All answers |", "|-|-|-:|-|"]
        for one in self.answered:
            answers = ", ".join(f"{name} {count}" for name, count in one.answers.most_common())
            lines.append(f"| {one.attack.row} | {one.name} | {one.refused} | {answers} |")
        return "\n".join([*lines, *(f"WRONG: {one}" for one in self.wrong)])


TOKENS = {
    name: (f"{name}-0123456789abcdef", role, runs)
    for name, (role, runs) in {
        "team": ("worker", "team.*"),
        "visitor": ("operator", "*"),
        "stranger": ("worker", "stranger.*"),
        "spy": ("viewer", "team.*"),
        # The coordinator is to warn of it: it matches runs of the team.
        "overlapping": ("worker", "team*"),
        "relay": ("worker", "*"),
    }.items()
}
"""By name: the token, its role and its runs."""


def secret(name: str) -> str:
    """The token of that name."""
    return TOKENS[name][0]


@dataclass(slots=True)
class Soak:
    """The processes of one run.

    Args:
        folder: an empty one, where all that they say is left.
        attacks: the kinds of hostile client.
        stack: ends them.
        visit_timeout: seconds in which a visitor is to be served.
    """

    folder: Path
    attacks: Sequence[Attack]
    stack: ExitStack
    visit_timeout: float = VISIT_TIMEOUT
    coordinator: Coordinator = field(init=False)
    relay: Relay = field(init=False)
    authority: Authority = field(init=False)
    hostile: list[tuple[Attack, bool, "subprocess.Popen[Any]"]] = field(init=False, default_factory=list)
    over: list[Answered] = field(init=False, default_factory=list)
    """The hostile clients that have been stopped."""
    honest: list["subprocess.Popen[Any]"] = field(init=False, default_factory=list)
    began: float = field(init=False, default=0.0)
    resident: dict[str, list[float]] = field(init=False, default_factory=dict)

    def start(self) -> None:
        """Start everyone but the hostile clients."""
        authority = self.authority = Authority(self.folder)
        pair = authority.issue("server")
        _write_tokens(self.folder / "tokens.toml", TOKENS)
        serves_tls = (f"--tls-cert={pair.cert}", f"--tls-key={pair.key}")
        asks = f"--tokens-file={self.folder / 'tokens.toml'}"
        context = ssl.create_default_context(cafile=authority.ca)
        limits = (
            f"--max-messages-per-second-per-peer={MESSAGES_PER_SECOND}",
            f"--max-connections-per-peer={CONNECTIONS}",
            f"--max-total-gather-bytes={GATHERED_BYTES}",
            f"--max-store-bytes={STORE_BYTES}",
        )
        self.coordinator = self.stack.enter_context(
            Coordinator(
                self.folder, https=context, extra=(*serves_tls, asks, *limits, "--http-tls", "--http-tokens")
            )
        )
        trust = {**os.environ, "MUSTER_TLS_CA": str(authority.ca)}
        self.relay = self.stack.enter_context(
            Relay(
                self.folder,
                self.coordinator.endpoint,
                listen=f"127.0.0.1:{free_port()}",
                extra=(*serves_tls, asks, limits[1]),
                environment={**trust, "MUSTER_TOKEN": secret("relay")},
            )
        )
        self._start_ranks(trust)
        until(self._job_runs, "the job runs no barriers")
        self._start_visitor(trust)
        self.began = time.monotonic()

    def attack(self) -> None:
        """Start all hostile clients; they attack together.

        They stand for other machines, so they compute only while nothing else does.
        """
        for attack, relayed in self._lanes():
            self._start_hostile(attack, relayed, os.SCHED_IDLE)
        until(self._all_ready, "not all of the hostile clients are ready")
        (self.folder / "begin").touch()
        self.began = time.monotonic()

    def attack_in_turns(self) -> None:
        """Let each kind of hostile client attack alone, and those of one budget together.

        A turn ends when its kind has been refused, and in the last turn one of them; or when :data:`PATIENCE`
        is over.
        """
        (self.folder / "begin").touch()
        for turn in self._turns():
            for attack, relayed in turn:
                self._start_hostile(attack, relayed, os.SCHED_OTHER)
            until_over = time.monotonic() + PATIENCE
            answered: list[Answered] = []
            while not any(one.refused for one in answered) and time.monotonic() < until_over:
                self.sample()
                time.sleep(SAMPLE_INTERVAL)
                answered = self.answered()[len(self.over) :]
                if any(one.ended for one in answered):
                    break
            one_was_refused = any(one.refused for one in answered)
            self.over += [dataclasses.replace(one, excused=one_was_refused) for one in answered]
            while self.hostile:
                _end(self.hostile.pop()[2])

    def _turns(self) -> list[list[tuple[Attack, bool]]]:
        lanes = list(self._lanes())
        together = [lane for lane in lanes if lane[0].act in FILL_ONE_BUDGET]
        return [[lane] for lane in lanes if lane not in together] + [together]

    def _job_runs(self) -> bool:
        return any(line["run"] == TEAM_RUN for line in self.coordinator.log("barrier.decided"))

    def _lanes(self) -> Iterator[tuple[Attack, bool]]:
        for attack in self.attacks:
            yield attack, False
            if attack.relayed:
                yield attack, True

    def _start_ranks(self, trust: dict[str, str]) -> None:
        team = {**trust, "MUSTER_TOKEN": secret("team")}
        for rank in range(RANKS):
            endpoint = self.relay.endpoint if rank % 2 else self.coordinator.endpoint
            arguments = ("rank", endpoint, str(rank), str(RANKS), str(self.folder))
            self.honest.append(self._start(f"rank-{rank}", HONEST, arguments, team))

    def _start_visitor(self, trust: dict[str, str]) -> None:
        visitor = {**trust, "MUSTER_TOKEN": secret("visitor")}
        ports = (self.coordinator.endpoint, self.relay.listen, str(self.coordinator.http_port))
        arguments = ("visitor", *ports, str(self.visit_timeout), str(self.folder))
        self.honest.append(self._start("visitor", HONEST, arguments, visitor))

    def _start_hostile(self, attack: Attack, relayed: bool, policy: int) -> None:
        port = int(self.relay.listen.rpartition(":")[2]) if relayed else self.coordinator.port
        target = Target(
            port=port,
            http_port=self.coordinator.http_port,
            ca=str(self.authority.ca),
            stranger=secret("stranger"),
            spy=secret("spy"),
            member=secret("team"),
        )
        name = _lane(attack, relayed)
        arguments = (
            attack.name,
            f"127.0.1.{1 + len(self.over) + len(self.hostile)}",
            json.dumps(dataclasses.asdict(target)),
            str(self.folder / f"{name}.json"),
            str(self.folder / "begin"),
            str(policy),
        )
        process = self._start(name, ATTACKING, arguments, dict(os.environ))
        self.hostile.append((attack, relayed, process))

    def _start(
        self, name: str, module: str, arguments: Sequence[str], environment: dict[str, str]
    ) -> "subprocess.Popen[Any]":
        with (self.folder / f"{name}.log").open("wb") as log:
            # Forked also where the coordinator is not: many processes would import for a minute.
            process = fork_client.Forked(
                fork_client.fork_server(*fork_client.TORCH),
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
            )
        self.stack.callback(_end, process)
        return process

    def _all_ready(self) -> bool:
        return all(
            (self.folder / f"{_lane(attack, relayed)}.json").exists() or process.poll() is not None
            for attack, relayed, process in self.hostile
        )

    @property
    def seconds(self) -> float:
        """Since the attacks began."""
        return time.monotonic() - self.began

    def answered(self) -> list[Answered]:
        """How the hostile clients were answered so far."""
        found = list(self.over)
        for attack, relayed, process in self.hostile:
            name = _lane(attack, relayed)
            path = self.folder / f"{name}.json"
            answers = Counter(json.loads(path.read_text())) if path.exists() else Counter()
            ended = "" if process.poll() is None else _last_words(self.folder / f"{name}.log")
            found.append(Answered(attack, relayed, answers, ended))
        return found

    def sample(self) -> None:
        """Look at the memory."""
        for name, process in self._measured():
            self.resident.setdefault(name, []).append(_memory(process.pid, "VmRSS"))

    def _measured(self) -> tuple[tuple[str, Daemon], ...]:
        return ("coordinator", self.coordinator), ("relay", self.relay)

    def end(self) -> Account:
        """Let the job end beside its attackers, and say what happened."""
        account = Account(self.seconds, answered=self.answered())
        (self.folder / "end").touch()
        for process in self.honest:
            try:
                code = process.wait(timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                account.wrong.append("a process of the job does not end")
            else:
                if code:
                    account.wrong.append(f"a process of the job ended with {code}")
        for name, daemon in self._measured():
            if not daemon.runs:
                account.wrong.append(f"the {name} has ended")
                continue
            account.memory[name] = Memory(_memory(daemon.pid, "VmHWM"), tuple(self.resident[name]))
        _judge_ranks(account, self.folder)
        _judge_visitor(account, self.folder)
        for one in account.answered:
            account.wrong += one.wrong
        _judge_logs(account, self.coordinator, self.relay)
        return account


def run(folder: Path, enough: Callable[[Soak], bool], attacks: Sequence[Attack] = ATTACKS) -> Account:
    """Let a job and hostile clients meet.

    Args:
        folder: an empty one.
        enough: says whether to end.
        attacks: the kinds of hostile client.
    """
    with ExitStack() as stack:
        soak = Soak(folder, attacks, stack)
        soak.start()
        soak.attack()
        while True:
            soak.sample()
            if enough(soak):
                return soak.end()
            time.sleep(SAMPLE_INTERVAL)


def run_in_turns(folder: Path) -> Account:
    """Let a job and hostile clients of each kind meet, one kind after the other.

    Args:
        folder: an empty one.
    """
    with ExitStack() as stack:
        soak = Soak(folder, ATTACKS, stack, visit_timeout=PATIENCE)
        soak.start()
        soak.attack_in_turns()
        return soak.end()


def _judge_ranks(account: Account, folder: Path) -> None:
    """Each barrier was released for all, and nobody was refused anything."""
    arrived: dict[int, list[float]] = {}
    released: dict[int, list[float]] = {}
    for rank in range(RANKS):
        path = folder / f"rank-{rank}.json"
        if not path.exists():
            account.wrong.append(f"rank {rank} has ended: {_last_words(folder / f'rank-{rank}.log')}")
            continue
        report = json.loads(path.read_text())
        account.warnings += report["warnings"]
        for sequence, began, ended, outcome in report["seen"]:
            account.outcomes[outcome.partition(":")[0]] += 1
            if outcome != "RELEASED":
                account.wrong.append(f"rank {rank} heard of #{sequence}: {outcome}")
            arrived.setdefault(sequence, []).append(began)
            released.setdefault(sequence, []).append(ended)
    for sequence, times in sorted(arrived.items()):
        if len(times) != RANKS:
            account.wrong.append(f"{len(times)} ranks heard of #{sequence}")
        account.decisions.append(max(released[sequence]) - max(times))


def _judge_visitor(account: Account, folder: Path) -> None:
    path = folder / "visitor.json"
    if not path.exists():
        account.wrong.append(f"the visitor has ended: {_last_words(folder / 'visitor.log')}")
        return
    report = json.loads(path.read_text())
    account.visits, account.longest_visit = report["calls"], report["longest"]
    account.failed_visits = report["failed"]
    account.wrong += [f"a visitor was refused: {one}" for one in report["failed"]]


def _judge_logs(account: Account, coordinator: Coordinator, relay: Relay) -> None:
    for name, process in (("coordinator", coordinator), ("relay", relay)):
        if "Traceback" in process.log_path.read_text():
            account.wrong.append(f"there is a traceback in the log of the {name}")
    if not coordinator.log("tokens.overlap"):
        account.wrong.append("nothing was said of tokens whose runs overlap")


def _write_tokens(path: Path, tokens: Mapping[str, tuple[str, str, str]]) -> None:
    path.write_text(
        "\n".join(
            f'[[token]]\nname = "{name}"\nrole = "{role}"\nruns = ["{runs}"]\ntoken = "{token}"\n'
            for name, (token, role, runs) in tokens.items()
        )
    )


def _lane(attack: Attack, relayed: bool) -> str:
    return f"{attack.name}-relay" if relayed else attack.name


def _memory(pid: int, name: str) -> float:
    """A figure of /proc/PID/status, in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0]) / 1024


def _last_words(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
    return lines[-1] if lines else "it said nothing"


def _end(process: "subprocess.Popen[Any]") -> None:
    process.kill()
    process.wait()
