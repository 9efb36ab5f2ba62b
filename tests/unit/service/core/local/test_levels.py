"""Which copies make a checkpoint replicated."""

import pytest

from muster.service.core.local.copies import Copies
from muster.service.core.local.keepers import Keepers
from muster.service.core.local.levels import is_replicated
from muster.service.core.vocabulary.local import (
    Attachment,
    Attempt,
    Holding,
    KeeperInfo,
    Level,
    LocalCheckpoint,
    LocalCheckpointRecord,
)

DIGEST = bytes(16)
ATTEMPT = Attempt(1, 0)


def keepers_in(*domains: str) -> Keepers:
    """Connected keepers with one rank each, of which each part is to have one copy."""
    keepers = Keepers()
    for rank, domain in enumerate(domains):
        keeper = keepers.add(KeeperInfo(f"k{rank}", f"http://k{rank}", domain))
        keeper.session = rank + 1
        keepers.attach(keeper, Attachment(1, len(domains), frozenset({rank}), replicas=1))
    keepers.place()
    return keepers


def copies_of(*held: set[int]) -> Copies:
    """A checkpoint of which each keeper holds the parts of these ranks."""
    checkpoint = LocalCheckpoint(ATTEMPT, 10, len(held), 100, DIGEST, replicas=1)
    copies = Copies(LocalCheckpointRecord("job", checkpoint, Level.LOCAL, "k0", 0.0))
    for number, ranks in enumerate(held):
        copies.change(f"k{number}", None, Holding(ATTEMPT, DIGEST, frozenset(ranks)))
    return copies


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        pytest.param(({0, 1}, {0, 1}, {2, 3}, {2, 3}), False, id="each copy in the rack of its part"),
        pytest.param(({0, 2}, {1, 3}, {0, 2}, {2, 3}), False, id="one copy is missing"),
        pytest.param(({0, 2}, {1, 3}, {0, 2}, {1, 3}), True, id="each copy in the other rack"),
    ],
)
def test_copies_count_only_in_as_many_domains_as_placement_reaches(
    held: tuple[set[int], ...], expected: bool
):
    keepers = keepers_in("a", "a", "b", "b")
    assert is_replicated(copies_of(*held), keepers) is expected


def test_copies_in_one_domain_count_where_there_is_no_other():
    assert is_replicated(copies_of({0, 1}, {0, 1}), keepers_in("a", "a"))
