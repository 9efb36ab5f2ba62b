"""A unary call waits for one answer, and leaves nothing behind."""

import asyncio

import pytest

from muster.service.core.effects import Evicted, Message, NodeLeft, Refused
from muster.service.core.events import Disconnected, Event
from muster.service.core.refusal import Reason, Refusal
from muster.service.driver import Outgoing
from muster.service.rpc.call import Call

ID = 7
NO = Refusal(Reason.RUN_NOT_FOUND, "no run is called that.")

pytestmark = pytest.mark.timeout(30)


class FakeDriver:
    """Remembers what it was handed."""

    def __init__(self) -> None:
        self.events: list[Event | str] = []

    def connect(self, sink: object) -> int:
        return ID

    def disconnect(self, session: int) -> None:
        self.events.append(f"disconnect {session}")

    def submit(self, event: Event) -> None:
        self.events.append(event)


ENDED = [f"disconnect {ID}", Disconnected(ID)]


@pytest.fixture
async def call() -> Call[NodeLeft]:
    return Call(FakeDriver(), NodeLeft)  # type: ignore[arg-type]


def deliver(call: Call[NodeLeft], message: Message) -> None:
    call.deliver(Outgoing(message, lambda _: b""))


async def ends(call: Call[NodeLeft]) -> NodeLeft:
    try:
        return await call.answer()
    finally:
        assert call._driver.events == ENDED, "the driver forgets it"


async def test_the_first_answer_of_its_kind_ends_it(call: Call[NodeLeft]):
    assert call.id == ID
    deliver(call, Evicted())
    deliver(call, NodeLeft(had_place=True))
    deliver(call, NodeLeft(had_place=False))
    deliver(call, Refused(NO))
    assert await ends(call) == NodeLeft(had_place=True)


async def test_a_refusal_ends_it(call: Call[NodeLeft]):
    deliver(call, Refused(NO))
    deliver(call, NodeLeft(had_place=True))
    with pytest.raises(Refusal) as caught:
        await ends(call)
    assert caught.value is NO


async def test_it_may_be_ended_from_outside_and_the_first_end_counts(call: Call[NodeLeft]):
    call.refuse(NO)
    call.refuse(Refusal(Reason.COORDINATOR_DRAINING, "later."))
    with pytest.raises(Refusal) as caught:
        await ends(call)
    assert caught.value is NO


async def test_a_caller_that_gives_up_leaves_nothing_behind(call: Call[NodeLeft]):
    waiting = asyncio.create_task(call.answer())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert call._driver.events == ENDED
    deliver(call, NodeLeft(had_place=True))
    call.refuse(NO)
