"""What ranks say of a save that they are asked for, and what has become of it."""

from collections.abc import Iterable

from muster.client.save_votes import PREFIX
from muster.service.core.vocabulary.model import Save
from tests.support.expect import some
from tests.support.world.core_client import Client
from tests.support.world.core_world import RUN, World


def newest(world: World) -> Save:
    return some(world.coordinator.runs[RUN].saving.save)


def say(clients: Iterable[Client], *words: str) -> None:
    for client, word in zip(clients, words, strict=True):
        client.arrive(PREFIX, payload=word.encode())


def save(clients: list[Client], *, stop: bool, number: int, step: int = 9) -> None:
    """All ranks agree on a step, and save it."""
    for phase in ("agree", "done"):
        say(clients, *[f"{phase} {step} {number} {int(stop)}"] * len(clients))
