#!/usr/bin/env python3
"""Draws docs/images/top.svg: ``muster top`` over a made-up coordinator whose job waits for one rank."""

import io
from pathlib import Path

from rich.console import Console

from muster.service.cli.views.dashboard import Snapshot, render
from muster.service.core.vocabulary import report
from muster.service.core.vocabulary.model import Decision, Failure, MissingRank, MissingState, Outcome
from muster.service.wire import decision_to_pb, missing_to_pb
from muster.v1 import barrier_pb2, run_pb2

IMAGE = Path(__file__).parent.parent / "docs" / "images" / "top.svg"
WIDTH, HEIGHT = 130, 14
NOW = 1_790_000_000.0

LOST = MissingRank(11, MissingState.CONNECTION_LOST, "node-1", 4123, gone_for=6.2, last_sequence=41)
SLOW = MissingRank(6, MissingState.NOT_ARRIVED, "node-0", 4118, last_sequence=11)
FULL = Failure(3, "node-0", 977, "OSError: [Errno 28] No space left on device: '/ckpt/step-30900'")


def waiting(
    prefix: str, sequence: int, age: float, timeout: float, *missing: MissingRank
) -> barrier_pb2.Barrier:
    """An open barrier of the job of 16 ranks."""
    return barrier_pb2.Barrier(
        run_id="llama-70b",
        prefix=prefix,
        sequence=sequence,
        arrived=16 - len(missing),
        required=16,
        age_ms=round(age * 1000),
        remaining_ms=round((timeout - age) * 1000),
        missing=[missing_to_pb(one) for one in missing],
    )


def decided(
    run_id: str, sequence: int, ago: float, why: str, outcome: Outcome = Outcome.RELEASED
) -> barrier_pb2.Barrier:
    """A barrier that is over."""
    name = report.barrier_name(run_id, "checkpoint", sequence)
    decision = Decision(
        run_id=run_id,
        prefix="checkpoint",
        sequence=sequence,
        generation=0,
        outcome=outcome,
        message=report.decision(name, why, outcome, run_id, 8, 8, (), None),
        missing=(),
        arrived=8,
        required=8,
        payloads=(),
        failures=(),
        decided_at=NOW - ago,
        wait=0.0,
        skew=0.0,
        last_arrival_rank=None,
    )
    return barrier_pb2.Barrier(decision=decision_to_pb(decision), message=decision.message)


SNAPSHOT = Snapshot(
    endpoint="10.0.4.17:7550",
    runs=[
        run_pb2.Run(run_id="llama-70b", connected=15, members=16, groups=2, open_barriers=2),
        run_pb2.Run(run_id="vit-small", connected=8, members=8, groups=1),
    ],
    barriers=[
        waiting("checkpoint", 42, 41.0, 300.0, LOST),
        waiting("eval", 12, 3.4, 600.0, SLOW, LOST),
        decided("vit-small", 310, 8, report.released(8, 0.021, 5)),
        decided("llama-70b", 41, 341, report.released(16, 2.31, 9)),
        decided("vit-small", 309, 612, report.voted([FULL]), Outcome.ABORTED),
        decided("llama-70b", 40, 642, report.released(16, 1.87, 3)),
    ],
    taken_at=NOW,
)


def main() -> None:
    """Write the image."""
    console = Console(
        record=True,
        width=WIDTH,
        height=HEIGHT,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        no_color=False,
    )
    console.print(render(SNAPSHOT, HEIGHT))
    IMAGE.parent.mkdir(parents=True, exist_ok=True)
    IMAGE.write_text(console.export_svg(title="muster top", clear=False))
    print(console.export_text())


if __name__ == "__main__":
    main()
