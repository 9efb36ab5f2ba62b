"""A short dose of the soak of hostile clients: ``python -m benchmarks.hostile`` is the long one."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from lab.hostile import connections, readers, requests, windows
from lab.hostile.attacks import ATTACKS, Attack
from lab.hostile.soak import Account, Soak, run
from lab.patience import PATIENCE

GROUPS = {
    "requests": [requests],
    "readers": [readers, windows],
    "connections": [connections],
}
"""The modules of hostile clients that attack together."""
MIN_BARRIERS = 30
MAX_MEMORY = 400
"""MiB of the coordinator, and of the relay, as the benchmark asks."""


def attacks_of(group: str) -> Sequence[Attack]:
    """The attacks of a group."""
    modules = {module.__name__ for module in GROUPS[group]}
    return [attack for attack in ATTACKS if attack.act.__module__ in modules]


def enough(soak: Soak) -> bool:
    """Whether each kind of hostile client has been refused, or will not be."""
    return all(one.refused for one in soak.answered()) or soak.seconds >= 2 * PATIENCE


def judge(account: Account) -> None:
    """See that each kind was refused and nobody else, and that each rank was released from each barrier."""
    print(account)
    assert account.wrong == []
    assert account.outcomes.keys() == {"RELEASED"}
    assert account.visits > 0
    assert {name: memory.peak for name, memory in account.memory.items() if memory.peak > MAX_MEMORY} == {}


@pytest.mark.parametrize("group", GROUPS)
def test_job_notices_nothing_of_hostile_clients(tmp_path: Path, group: str):
    judge(run(tmp_path, enough, attacks_of(group), policy=os.SCHED_OTHER))


def test_each_attack_is_in_a_group():
    assert sum(len(attacks_of(group)) for group in GROUPS) == len(ATTACKS)


@pytest.mark.thorough_only
def test_job_notices_nothing_of_hostile_clients_of_every_kind(tmp_path: Path):
    account = run(tmp_path, enough)
    judge(account)
    assert len(account.decisions) >= MIN_BARRIERS
