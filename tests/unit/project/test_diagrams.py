"""Diagrams of states follow from the tables in the code."""

import re
from pathlib import Path

from dev.docs.transitions import PAGE, diagram, filled
from muster.service.core.vocabulary.model import Outcome
from muster.worker.saves.queue.states import QueueState

PROTOCOL = Path(__file__).resolve().parents[3] / "docs/protocol.md"


def test_diagrams_of_the_save_queue_are_those_of_its_tables():
    page = PAGE.read_text()
    assert page.count("stateDiagram-v2") == 2
    assert filled(page) == page, "Run: python -m dev.docs.transitions"


def test_states_without_a_move_are_ends():
    drawn = diagram({QueueState.OPEN: frozenset({QueueState.CLOSED}), QueueState.CLOSED: frozenset()})
    assert re.findall(r"^ +(.+)$", drawn, re.MULTILINE) == [
        "[*] --> OPEN",
        "OPEN --> CLOSED",
        "CLOSED --> [*]",
    ]


def test_diagram_of_a_barrier_has_every_outcome():
    drawn = set(re.findall(r"open --> (\w+):", PROTOCOL.read_text())) - {"open"}
    assert drawn == {one.name for one in Outcome}
