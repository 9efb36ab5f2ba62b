"""The screen of ``muster top``, rendered from the coordinator's answers alone."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from muster.service.cli.views.columns import barrier_state, missing_sentence
from muster.service.cli.views.table import COLORS
from muster.service.core.vocabulary import report
from muster.service.formatting.cells import duration
from muster.v1 import barrier_pb2, run_pb2

BAR_CELLS = 16
NAME_CELLS = 24
"""A longer run id or prefix is cut, to leave room for the other columns."""
TAIL = 15
"""Characters at the end of a barrier's name that remain when it is cut."""
MIN_DECISIONS = 5
"""Lines that remain for the last decisions, however many barriers are open."""
HURRY = 0.2
"""A barrier with less than this part of its timeout left is shown in red."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The answers of a coordinator at one time."""

    endpoint: str
    runs: Sequence[run_pb2.Run]
    barriers: Sequence[barrier_pb2.Barrier]
    """Open and decided, in any order."""
    taken_at: float
    """Seconds since 1970."""
    error: str | None = None
    """Why the data is outdated; None if it is current."""


def render(snapshot: Snapshot, height: int) -> RenderableType:
    """Render the screen.

    Args:
        snapshot: the data.
        height: lines of the screen.
    """
    waiting = sorted(
        (barrier for barrier in snapshot.barriers if not barrier.HasField("decision")),
        key=lambda barrier: barrier.age_ms,
        reverse=True,
    )
    decided = sorted(
        (barrier for barrier in snapshot.barriers if barrier.HasField("decision")),
        key=lambda barrier: barrier.decision.decided_at.ToNanoseconds(),
        reverse=True,
    )
    head = _totals(snapshot)
    # Two empty lines, two lines of titles, and one for what did not fit.
    room = max(2, height - len(head) - 5)
    most_waiting = max(1, room - min(MIN_DECISIONS, len(decided)))
    shown = waiting[:most_waiting]
    parts: list[RenderableType] = [*head, Text()]
    if shown:
        parts.append(_waiting(shown))
    else:
        parts.append(Text("no barrier is open", style="dim"))
    if len(waiting) > len(shown):
        parts.append(Text(f"and {len(waiting) - len(shown)} more", style="dim"))
    if decided:
        last = decided[: max(1, room - len(shown))]
        parts += [Text(), _decided(last, snapshot.taken_at)]
    return Group(*parts)


def _totals(snapshot: Snapshot) -> list[Text]:
    connected = sum(run.connected for run in snapshot.runs)
    waiting = sum(run.open_barriers for run in snapshot.runs)
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f"muster at {snapshot.endpoint}", style="bold")
    line.append(f"   runs {len(snapshot.runs)}")
    if closed := sum(run.HasField("closed") for run in snapshot.runs):
        line.append(f" ({closed} closed)")
    if stopped := sum(run.HasField("stopped") for run in snapshot.runs):
        line.append(f" ({stopped} stopped)")
    if nodes := sum(run.nodes for run in snapshot.runs):
        line.append(f"   nodes {nodes}")
    line.append(f"   connected ranks {connected}   open barriers {waiting}")
    line.append("   q ends", style="dim")
    if snapshot.error is None:
        return [line]
    headline = report.printable(snapshot.error).splitlines()[0]
    return [line, Text(headline, style="bold red", no_wrap=True, overflow="ellipsis")]


def _waiting(barriers: Sequence[barrier_pb2.Barrier]) -> Table:
    table = _table()
    for title in ("RUN", "BARRIER"):
        table.add_column(title, no_wrap=True, overflow="ellipsis", max_width=NAME_CELLS)
    for title in ("ARRIVED", "AGE", "LEFT"):
        table.add_column(title, no_wrap=True, min_width=4)
    table.add_column("MISSING", no_wrap=True, overflow="ellipsis", ratio=1)
    for barrier in barriers:
        hurry = barrier.remaining_ms < HURRY * (barrier.age_ms + barrier.remaining_ms)
        table.add_row(
            _text(barrier.run_id),
            _barrier(barrier.prefix, barrier.sequence),
            _bar(barrier.arrived, barrier.required),
            Text(duration(barrier.age_ms)),
            Text(duration(barrier.remaining_ms), style="red" if hurry else ""),
            _text(missing_sentence(barrier)),
        )
    return table


def _decided(barriers: Sequence[barrier_pb2.Barrier], now: float) -> Table:
    table = _table()
    table.add_column("AGO", no_wrap=True, min_width=4)
    table.add_column("OUTCOME", no_wrap=True)
    table.add_column("LAST DECISIONS", no_wrap=True, overflow="ellipsis", ratio=1)
    for barrier in barriers:
        ago = now * 1000 - barrier.decision.decided_at.ToMilliseconds()
        outcome = barrier_state(barrier)
        table.add_row(
            # The coordinator's clock may be ahead of ours.
            Text(duration(max(0, round(ago)))),
            Text(outcome, style=COLORS.get(outcome, "")),
            _text(barrier.message.partition("\n")[0]),
        )
    return table


def _table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), expand=True, header_style="bold")


def _bar(arrived: int, required: int) -> Text:
    full = BAR_CELLS * arrived // required if required else 0
    style = COLORS["RELEASED"] if arrived == required else COLORS["OPEN"]
    bar = Text("█" * full, style=style)
    bar.append("░" * (BAR_CELLS - full), style="dim")
    return bar.append(f" {arrived}/{required}", style="default")


def _barrier(prefix: str, sequence: int) -> Text:
    """Format a barrier's name. A long one is cut in the middle, because groups of saves differ at the end."""
    name = report.printable(f"{prefix} #{sequence}")
    if len(name) > NAME_CELLS:
        name = f"{name[: NAME_CELLS - TAIL - 1]}…{name[-TAIL:]}"
    return Text(name)


def _text(text: str) -> Text:
    """Return text that is shown literally, without markup and escapes."""
    return Text(report.printable(text))
