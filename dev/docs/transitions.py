"""The diagrams of docs/architecture.md that follow from the tables of the save queue.

``python -m dev.docs.transitions`` writes them into the page; a test compares.
"""

import enum
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from muster.worker.saves.queue.states import QUEUE_MOVES, SAVE_MOVES

PAGE = Path(__file__).resolve().parents[2] / "docs/architecture.md"

State = TypeVar("State", bound=enum.Enum)


def diagram(moves: Mapping[State, frozenset[State]]) -> str:
    """Return the diagram of a table of moves. The first state begins, and those without a move end."""
    states = list(moves)
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {states[0].name}"]
    for state, following in moves.items():
        lines += [f"    {state.name} --> {one.name}" for one in sorted(following, key=states.index)]
        if not following:
            lines.append(f"    {state.name} --> [*]")
    return "\n".join([*lines, "```"])


def filled(page: str) -> str:
    """Return a page with the diagrams between its marks replaced."""
    tables = {"queue": diagram(QUEUE_MOVES), "save": diagram(SAVE_MOVES)}
    return re.sub(
        r"(?s)(<!-- moves of the (queue|save) -->\n).*?(<!-- end -->)",
        lambda found: f"{found[1]}\n{tables[found[2]]}\n\n{found[3]}",
        page,
    )


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
