"""What no client should say: messages made by Hypothesis from the protos' descriptors, and bytes.

Hypothesis makes a pool of messages of each kind, which takes it milliseconds each; what is said is crossed
and mutated from the pool in microseconds. Both follow from the seed alone.
"""

import random
from collections.abc import Callable
from functools import partial
from operator import mul
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

RUNS = [f"run-{number}" for number in range(6)]
SIZES = [255, 256, 257, 4_095, 4_096, 4_097, 16_385, 70_000]
"""Around the bounds of names, keys, values and reasons."""
TEXTS = [
    "",
    " ",
    "\x00",
    "\x1b[31m",
    "\u202e",
    "../../etc",
    "<script>",
    "%s%n",
    "a\nb",
    "𐍈",
    "\ufeff",
    "step-12000",
]
MORE_ENTRIES = 70_000
"""Than any list may have."""
Field = FieldDescriptor
WHOLE = {
    Field.TYPE_INT32: (-(2**31), 2**31 - 1),
    Field.TYPE_INT64: (-(2**63), 2**63 - 1),
    Field.TYPE_UINT32: (0, 2**32 - 1),
    Field.TYPE_UINT64: (0, 2**64 - 1),
}
EDGES = [-1, 0, 1, 2, 63, 64, 65, 1_000, 1_001, 65_535, 65_536, 65_537, 2**31, 2**53, 2**63 - 1, 2**64 - 2]


def _long(*units: str) -> st.SearchStrategy[str]:
    return st.builds(mul, st.sampled_from(units), st.sampled_from(SIZES))


def _some(prefix: str, count: int) -> st.SearchStrategy[str]:
    return st.sampled_from([f"{prefix}{number}" for number in range(count)])


PLAUSIBLE: dict[str, st.SearchStrategy[Any]] = {
    "run_id": st.sampled_from(RUNS),
    "prefix": st.sampled_from(["a", "b", "checkpoint", "k-"]),
    "incarnation": _some("life-", 8),
    "host": _some("node-", 3),
    "address": _some("10.0.0.", 4),
    "key": _some("k-", 8),
    "keys": _some("k-", 8),
    "client": _some("client-", 4),
    "value": st.sampled_from([b"1", b"", b"-7", b"value", bytes(100)]),
    "rank": st.integers(0, 3),
    "ranks": st.integers(0, 3),
    "participants": st.integers(0, 3),
    "world_size": st.integers(1, 4),
    "sequence": st.integers(0, 5),
    "generation": st.integers(0, 1),
    "ordinal": st.integers(0, 3),
    "timeout_ms": st.sampled_from([1, 5, 20, 100]),
    "join_timeout_ms": st.sampled_from([20, 100, 300]),
    "last_call_timeout_ms": st.sampled_from([1, 20]),
    "keep_alive_timeout_ms": st.sampled_from([50, 500]),
    "protocol_version": st.just(1),
    "attempt": st.integers(1, 3),
    "round": st.integers(0, 2),
    "min_nodes": st.integers(1, 2),
    "max_nodes": st.integers(2, 3),
    "number": st.integers(1, 6),
    "id": _some("keeper-", 3),
    "keeper_id": _some("keeper-", 3),
    "url": _some("http://10.0.0.", 4),
    "manifest_digest": st.sampled_from([bytes(16), bytes(range(16))]),
    "replicas": st.integers(0, 2),
    "step": st.integers(0, 3),
}
"""What a client would give for a field of this name."""


def _anything(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    """Every value of a field's type, the edges more often."""
    if field.type in WHOLE:
        least, most = WHOLE[field.type]
        edges = [least, most, most - 1, *(edge for edge in EDGES if least <= edge <= most)]
        return st.sampled_from(edges) | st.integers(least, most)
    if field.type == Field.TYPE_STRING:
        return st.sampled_from(TEXTS) | st.text(max_size=20) | _long("x", "é", "𐍈", "\n", "\x1b")
    if field.type == Field.TYPE_BYTES:
        return st.binary(max_size=20) | _long("x").map(str.encode)
    if field.type == Field.TYPE_BOOL:
        return st.booleans()
    if field.enum_type is not None:
        known = [value.number for value in field.enum_type.values]
        return st.sampled_from([*known, max(known) + 1, -1, 2**31 - 1])
    raise NotImplementedError(f"a strategy for the type of {field.full_name}")


_anything_of: dict[str, st.SearchStrategy[Any]] = {}


@st.composite
def messages(draw: st.DrawFn, kind: Descriptor) -> Message:
    """Messages of one kind, some as a client would send them, some with nothing right."""
    return _filled(draw, kind, draw(st.sampled_from([0, 0, 0, 1, 2, 10])))


def _filled(draw: st.DrawFn, kind: Descriptor, wild: int) -> Message:
    made = GetMessageClass(kind)()
    left_out = set()
    for choice in kind.oneofs:
        if len(choice.fields) > 1:
            names = [field.name for field in choice.fields]
            left_out |= set(names) - {draw(st.sampled_from([*names, *names, ""] if wild else names))}
    for field in kind.fields:
        chance = draw(st.integers(0, 19))
        if field.name in left_out or chance < wild + (field.has_presence and field.message_type is None) * 8:
            continue
        count = draw(st.integers(0, 4)) if field.is_repeated else 1
        if field.message_type is not None:
            for _ in range(count):
                value = _filled(draw, field.message_type, wild)
                if field.is_repeated:
                    getattr(made, field.name).append(value)
                else:
                    getattr(made, field.name).CopyFrom(value)
            continue
        values = _anything_of.setdefault(field.full_name, _anything(field))
        if 19 - chance >= wild:
            values = PLAUSIBLE.get(field.name, values)
        if field.is_repeated:
            getattr(made, field.name).extend(draw(values) for _ in range(count))
        else:
            setattr(made, field.name, draw(values))
    return made


def pool(kind: Descriptor, count: int, number: int) -> list[Message]:
    """So many messages of a kind.

    Args:
        kind: of message.
        count: about how many; fewer if there are not as many different ones.
        number: the seed.
    """
    made: list[Message] = []

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(messages(kind))
    def make(message: Message) -> None:
        made.append(message)

    make()
    return made


class Source:
    """Says something of each kind.

    Args:
        kinds: of messages, with how many of each Hypothesis makes.
        number: the seed.
    """

    def __init__(self, kinds: dict[Descriptor, int], number: int) -> None:
        self._pools = {kind.full_name: pool(kind, count, number) for kind, count in kinds.items()}

    def message(self, kind: Descriptor, chance: random.Random, suffix: str = "") -> Message:
        """A message of the pool, or two crossed.

        Args:
            kind: of message.
            chance: decides.
            suffix: added to the names of the pool's runs. A closed run, or one at its last
                generation, accepts few messages.
        """
        choices = self._pools[kind.full_name]
        made = GetMessageClass(kind)()
        made.CopyFrom(chance.choice(choices))
        what = chance.random()
        if what < 0.3:
            # Lists of both, one after the other: with duplicates.
            made.MergeFrom(chance.choice(choices))
        elif what < 0.302:
            self._swell(made, chance)
        if suffix:
            _rename(made, suffix)
        return made

    def data(self, kind: Descriptor, chance: random.Random, suffix: str = "") -> bytes:
        """A message of the pool, bytes that were one, or bytes."""
        what = chance.random()
        if what < 0.1:
            return chance.randbytes(chance.choice([0, 1, 2, 5, 20, 100, 1_000]))
        data = self.message(kind, chance, suffix).SerializeToString()
        return _mutated(data, chance) if what < 0.25 else data

    @staticmethod
    def _swell(message: Message, chance: random.Random) -> None:
        """Let one list have more entries than any may have."""
        lists: list[Callable[[], None]] = []
        for field in message.DESCRIPTOR.fields:
            if field.is_repeated and field.message_type is None:
                entry: Any = "" if field.type == Field.TYPE_STRING else 1
                values = getattr(message, field.name)
                lists.append(partial(values.extend, [entry] * MORE_ENTRIES))
        if lists:
            chance.choice(lists)()


def _rename(message: Any, suffix: str) -> None:
    if message.DESCRIPTOR.full_name == "muster.v1.ConnectRequest":
        message = message.hello
    if getattr(message, "run_id", "") in RUNS:
        message.run_id = f"{message.run_id}-{suffix}"


def _mutated(data: bytes, chance: random.Random) -> bytes:
    """Some bytes changed, cut, doubled or put in."""
    made = bytearray(data or b"\x00")
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(made) + 1)
        what = chance.randrange(4)
        if what == 0 and at < len(made):
            made[at] = chance.randrange(256)
        elif what == 1:
            made = made[:at] or bytearray(b"\x08")
        elif what == 2:
            made[at:at] = chance.randbytes(chance.randint(1, 8))
        else:
            made += made[at : at + 200]
    return bytes(made)
