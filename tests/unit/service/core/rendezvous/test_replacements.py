"""Nodes of a job are replaced, killed and drained at random.

The job trains on, or starts again after a stop, and no step is trained from two different states.
"""

from functools import partial

import pytest

from muster.service.cli.actions.replace import Done
from tests.support.replacements.replaced_nodes import ReplaceWorld

EVENTS = 30
"""Replacements and kills of each job."""


def test_planned_replacement_trains_no_step_again(monkeypatch: pytest.MonkeyPatch):
    world = ReplaceWorld(seed=1)
    world.train_on()
    for _ in range(5):
        machine = world.in_round()[0]
        done = world.replace(machine, monkeypatch)
        assert isinstance(done, Done)
        assert done.evicted
        world.train_on()
        assert machine.ended == "NODE_EVICTED"
    assert (world.again, world.evictions) == (0, 5)


@pytest.mark.parametrize("seed", range(10))
def test_job_outlives_kills_and_replacements_of_its_nodes(
    seed: int, thorough: bool, monkeypatch: pytest.MonkeyPatch
):
    world = ReplaceWorld(seed, size=2 + seed % 3)
    world.unsure = True
    world.train_on()
    for _ in range(10 * EVENTS if thorough else EVENTS):
        happen(world, monkeypatch)
        world.train_on()


@pytest.mark.parametrize("seed", range(10))
def test_job_outlives_notices_for_some_or_all_of_its_nodes_at_any_moment(seed: int, thorough: bool):
    world = ReplaceWorld(seed, size=2 + seed % 3)
    world.unsure = True
    world.train_on()
    for _ in range(10 * EVENTS if thorough else EVENTS):
        announce(world)
        world.train_on()
    assert world.notices > EVENTS / 2
    assert any(machine.ended == "RUN_STOPPED" for machine in world.machines)


def announce(world: ReplaceWorld) -> None:
    """Let notices come, for a node or for all, in the midst of saves, kills, rounds and failovers.

    Some saves are withdrawn.
    """
    chance = world.chance
    for _ in range(chance.choice([1, 1, 2, 3])):
        world.later(chance.uniform(0.0, 3.0), partial(notice, world, stop=chance.random() < 0.3))
    if chance.random() < 0.3:
        world.later(chance.uniform(0.0, 3.0), world.withdraw)
    kind = chance.choice(["nothing", "kill", "crash", "away"])
    if kind == "crash":
        world.later(chance.uniform(0.0, 3.0), world.crash)
    machines = world.in_round()
    if machines and kind == "kill":
        world.later(chance.uniform(0.0, 3.0), partial(world.kill, chance.choice(machines)))
    if machines and kind == "away":
        victim = chance.choice(machines)
        world.later(chance.uniform(0.0, 1.0), partial(victim.be_away, chance.uniform(0.5, 4.0)))
    world.pass_time(4.0)


def notice(world: ReplaceWorld, *, stop: bool) -> None:
    machines = world.in_round()
    if machines:
        world.notice(machines if world.chance.random() < 0.4 else [world.chance.choice(machines)], stop=stop)


def happen(world: ReplaceWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let something happen to a node of the round."""
    chance = world.chance
    world.pass_time(chance.uniform(0.0, 3.0))
    machines = world.in_round()
    if not machines:
        return
    victim, other = chance.choice(machines), chance.choice(machines)
    kind = chance.choice(["replace", "replace", "kill", "both", "crash", "away", "repeat"])
    if kind == "kill":
        world.kill(victim)
        return
    if kind == "both":
        world.later(chance.uniform(0.0, 3.0), lambda: world.kill(other))
    if kind == "away":
        world.later(chance.uniform(0.0, 1.0), lambda: victim.be_away(chance.uniform(0.5, 4.0)))
    if kind == "crash":
        world.later(chance.uniform(0.0, 3.0), world.crash)
    ended = world.replace(victim, monkeypatch)
    assert isinstance(ended, Done), f"muster replace ended with {ended}"
    if kind == "repeat":
        assert isinstance(world.replace(victim, monkeypatch), Done)
    assert victim not in world.in_round()
    if ended.evicted and victim.lives:
        world.pass_time(10.0)
        assert victim.ended in ("NODE_EVICTED", "killed")
