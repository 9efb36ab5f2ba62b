"""The status page for programs: JSON, with the fields of ``muster.v1``."""

import json
from itertools import chain
from typing import Any

from muster.service.core.vocabulary.refusal import Refusal
from muster.service.version import VERSION
from muster.service.web.look import Overview, RunLook, named
from muster.service.web.stacks import StacksLook
from muster.service.wire import (
    as_dict,
    barrier_to_pb,
    members_to_pb,
    rendezvous_to_pb,
    run_to_pb,
    timestamp_to_pb,
)


def overview_twin(overview: Overview) -> str:
    """All runs."""
    return _document(
        taken_at=_moment(overview.taken_at),
        version=VERSION,
        epoch=str(overview.epoch),
        runs=[as_dict(run_to_pb(view)) for view in overview.runs],
        barriers=_barriers(overview),
        **({"replicas": [as_dict(one) for one in overview.replicas]} if overview.replicas else {}),
    )


def run_twin(look: RunLook) -> str:
    """One run; but for the time, as ``muster describe run -o json`` has it."""
    return _document(
        taken_at=_moment(look.taken_at),
        run=as_dict(run_to_pb(look.run)),
        rendezvous=as_dict(rendezvous_to_pb(look.rendezvous)),
        members=[as_dict(one) for one in members_to_pb(look.members)],
        barriers=_barriers(look),
    )


def stacks_twin(look: StacksLook) -> str:
    """Where processes of a run stand; but for the time and what is left out, as ``muster stack -o json``."""
    return _document(
        taken_at=_moment(look.taken_at), crowds_left_out=look.crowds_left_out, **as_dict(look.told)
    )


def refusal_twin(refusal: Refusal) -> str:
    """What cannot be shown."""
    return _document(error={"reason": refusal.reason.name, "message": refusal.message})


def _barriers(look: Overview | RunLook) -> list[dict[str, Any]]:
    shown = chain(look.waiting, look.decided[: named(look.decided)])
    return [as_dict(barrier_to_pb(view)) for view in shown]


def _moment(wall: float) -> str:
    return str(timestamp_to_pb(wall).ToJsonString())


def _document(**fields: object) -> str:
    # Without an indent: Python writes that a few times slower.
    return json.dumps(fields) + "\n"
