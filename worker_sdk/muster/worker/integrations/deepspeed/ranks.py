"""What the ranks of a job tell one another, by DeepSpeed's own collectives."""

from typing import Any, TypeVar

from deepspeed import comm

T = TypeVar("T")


def from_rank_0(said: T) -> T:
    """Return what rank 0 says."""
    words = [said]
    comm.broadcast_object_list(words, src=0)
    return words[0]


def of_all(said: T) -> list[T]:
    """Return what each rank says, by rank."""
    words: list[Any] = [None] * comm.get_world_size()
    comm.all_gather_object(words, said)
    return words
