"""How fast bytes came from other keepers."""

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from muster.keeper import measuring
from muster.keeper.measuring import KEPT, MeasuredTransport
from muster.keeper.transport import TransportError
from muster.keeper.vocabulary import Transfer

UNIT = measuring.MIN_BYTES


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Zeros:
    """A transport that sends as many bytes as there is room for."""

    def open(self, url: str, path: str, offset: int = 0, length: int | None = None) -> "Zeros":
        if path == "/broken":
            raise TransportError(f"{url} does not answer")
        return self

    def read_into(self, buffer: memoryview) -> int:
        return len(buffer)

    def keep_only(self, urls: Collection[str]) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def transport(clock: Clock) -> MeasuredTransport:
    return MeasuredTransport(Zeros(), clock)


@contextmanager
def receiving(transport: MeasuredTransport, url: str, units: float) -> Iterator[None]:
    """Hold a stream open after bytes have come on it."""
    stream = transport.open(url, "/file")
    stream.read_into(memoryview(bytearray(int(units * UNIT))))
    yield
    stream.close()
    stream.close()


def test_time_of_streams_at_once_counts_once(transport: MeasuredTransport, clock: Clock):
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(receiving(transport, "a", 2))
        clock.now += 2
    clock.now += 1000
    assert transport.transfers() == {"a": Transfer(8 * UNIT, 2.0)}
    with receiving(transport, "a", 8):
        clock.now += 1
    assert transport.transfers() == {"a": Transfer(16 * UNIT, 3.0)}


def test_fetch_that_goes_on_counts(transport: MeasuredTransport, clock: Clock):
    with receiving(transport, "a", 3):
        clock.now += 60
        assert transport.transfers() == {"a": Transfer(3 * UNIT, 60.0)}


def test_keepers_are_told_apart(transport: MeasuredTransport, clock: Clock):
    with receiving(transport, "a", 1), receiving(transport, "b", 2):
        clock.now += 1
    assert transport.transfers() == {"a": Transfer(UNIT, 1.0), "b": Transfer(2 * UNIT, 1.0)}


def test_few_bytes_say_nothing_unless_they_took_long(transport: MeasuredTransport, clock: Clock):
    with receiving(transport, "a", 0.5):
        clock.now += 1
    assert transport.transfers() == {}
    with receiving(transport, "a", 0.5):
        clock.now += 20
    assert transport.transfers() == {"a": Transfer(UNIT // 2, 20.0)}


def test_old_fetches_are_forgotten(transport: MeasuredTransport, clock: Clock):
    for seconds in range(1, KEPT + 3):
        with receiving(transport, "a", 1):
            clock.now += seconds
    assert transport.transfers() == {"a": Transfer(KEPT * UNIT, float(sum(range(3, KEPT + 3))))}


def test_keeper_that_does_not_answer_leaves_nothing(transport: MeasuredTransport, clock: Clock):
    with pytest.raises(TransportError):
        transport.open("a", "/broken")
    clock.now += 60
    assert transport.transfers() == {}


def test_keepers_that_were_not_used_for_longest_are_forgotten(
    transport: MeasuredTransport, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(measuring, "MAX_PEERS", 2)
    with receiving(transport, "held", 1):
        for url in ("a", "b", "c", "b", "d"):
            with receiving(transport, url, 1):
                clock.now += 1
        assert set(transport.transfers()) == {"held", "c", "b", "d"}


def test_no_more_keepers_are_named_than_a_report_may_have(
    transport: MeasuredTransport, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(measuring, "MAX_TRANSFERS", 2)
    with receiving(transport, "held", 1):
        for url in ("a", "b"):
            with receiving(transport, url, 1):
                clock.now += 1
        assert set(transport.transfers()) == {"held", "b"}, "the coordinator would refuse a third one"
