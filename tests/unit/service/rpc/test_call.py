"""A unary call as a session of the driver."""

import asyncio
from typing import Any

import pytest

from muster.service.core.vocabulary.effects import Message, Refused
from muster.service.core.vocabulary.events import Disconnected, Event
from muster.service.core.vocabulary.model import SessionId
from muster.service.core.vocabulary.operations import Done, Number
from muster.service.core.vocabulary.refusal import Reason, Refusal
from muster.service.draining import DRAINING
from muster.service.driver import Driver, Outgoing, Sink
from muster.service.rpc.call import Call, LongPolls

REFUSAL = Refusal(Reason.RUN_NOT_FOUND, "no such run.")


class FakeDriver(Driver):
    """Names calls, and remembers what it was handed."""

    def __init__(self) -> None:
        self.sinks: dict[int, Sink] = {}
        self.events: list[Event] = []

    def connect(self, sink: Sink) -> SessionId:
        self.sinks[len(self.sinks) + 1] = sink
        return len(self.sinks)

    def disconnect(self, session: SessionId) -> None:
        del self.sinks[session]

    def submit(self, event: Event) -> None:
        self.events.append(event)


def deliver(call: Call[Any], *messages: Message) -> None:
    for message in messages:
        call.deliver(Outgoing(message, lambda _: b""))


async def test_first_message_of_its_kind_is_its_answer():
    with Call(FakeDriver(), Number) as call:
        deliver(call, Done(), Number(1), Number(2), Refused(REFUSAL))
        assert await call.answer() == Number(1)


async def test_refusal_is_raised():
    with Call(FakeDriver(), Number) as call:
        deliver(call, Refused(REFUSAL), Number(1))
        with pytest.raises(Refusal, match="no such run"):
            await call.answer()


async def test_call_ends_with_its_block_and_the_core_hears_of_it():
    driver = FakeDriver()
    with pytest.raises(KeyError), Call(driver, Number):
        raise KeyError
    assert driver.sinks == {}
    assert driver.events == [Disconnected(1)]


async def test_caller_that_hangs_up_ends_it():
    driver = FakeDriver()

    async def wait() -> None:
        with Call(driver, Number) as call:
            await call.answer()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    assert driver.events == [Disconnected(1)]


async def test_drain_ends_every_long_poll_and_takes_no_more():
    polls = LongPolls(FakeDriver())
    with polls.open(Number) as answered, polls.open(Number) as waiting:
        deliver(answered, Number(1))
        polls.drain()
        assert await answered.answer() == Number(1)
        with pytest.raises(Refusal) as caught:
            await waiting.answer()
        assert caught.value is DRAINING
    with pytest.raises(Refusal) as caught, polls.open(Number):
        pass
    assert caught.value is DRAINING
