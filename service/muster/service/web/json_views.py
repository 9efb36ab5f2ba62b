"""The status page as JSON, with the fields of ``muster.v1``."""

import json
from itertools import chain
from typing import Any

from muster.service.core.vocabulary.refusal import Refusal
from muster.service.local_wire import list_response
from muster.service.version import VERSION
from muster.service.web.page_data import Overview, RunData, count_fully_named
from muster.service.web.stacks import StacksData
from muster.service.wire import (
    as_dict,
    barrier_to_pb,
    members_to_pb,
    rendezvous_to_pb,
    run_to_pb,
    timestamp_to_pb,
)


def overview_json(overview: Overview) -> str:
    """Return all runs."""
    return _document(
        taken_at=_moment(overview.taken_at),
        version=VERSION,
        epoch=str(overview.epoch),
        runs=[as_dict(run_to_pb(view)) for view in overview.runs],
        barriers=_barriers(overview),
        **({"replicas": [as_dict(one) for one in overview.replicas]} if overview.replicas else {}),
    )


def run_json(data: RunData) -> str:
    """Return one run: the time, and what ``muster describe run -o json`` prints.

    ``local`` is what ``muster get checkpoints -o json`` prints, for a run with local checkpoints or keepers.
    """
    return _document(
        taken_at=_moment(data.taken_at),
        run=as_dict(run_to_pb(data.run)),
        rendezvous=as_dict(rendezvous_to_pb(data.rendezvous)),
        members=[as_dict(one) for one in members_to_pb(data.members)],
        barriers=_barriers(data),
        **({"local": as_dict(list_response(data.local))} if data.local is not None else {}),
    )


def stacks_json(data: StacksData) -> str:
    """Return stacks: the time, how many crowds are left out, and what ``muster stack -o json`` prints."""
    return _document(
        taken_at=_moment(data.taken_at), crowds_left_out=data.crowds_left_out, **as_dict(data.response)
    )


def refusal_json(refusal: Refusal) -> str:
    """Return why something cannot be shown."""
    return _document(error={"reason": refusal.reason.name, "message": refusal.message})


def _barriers(data: Overview | RunData) -> list[dict[str, Any]]:
    shown = chain(data.waiting, data.decided[: count_fully_named(data.decided)])
    return [as_dict(barrier_to_pb(view)) for view in shown]


def _moment(wall: float) -> str:
    return str(timestamp_to_pb(wall).ToJsonString())


def _document(**fields: object) -> str:
    # No indent: it makes Python a few times slower.
    return json.dumps(fields) + "\n"
