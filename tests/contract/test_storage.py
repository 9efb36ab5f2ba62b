"""What every storage engine must do; the driver relies on nothing else."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lab import records
from lab.leaders import successive_leaders
from muster.service.core.coordinator import Coordinator
from muster.service.core.vocabulary.local import (
    Attempt,
    ForgetLocalCheckpoint,
    Level,
    LocalCheckpoint,
    LocalCheckpointRecord,
    RecoveryRecord,
)
from muster.service.core.vocabulary.model import (
    Checkpoint,
    CheckpointHistory,
    Closed,
    Decision,
    EvictedNode,
    FailedSave,
    Instant,
    MemberState,
    NodeInfo,
    Ranks,
    RendezvousSettings,
    Save,
    SaveState,
    Shape,
    SlowestWrite,
    Stopped,
)
from muster.service.core.vocabulary.operations import Done, Number
from muster.service.core.vocabulary.records import (
    AgreementRecord,
    CheckpointsRecord,
    EvictionRecord,
    ForgetAgreement,
    ForgetDecision,
    ForgetParticipant,
    ForgetRankOwner,
    ForgetRound,
    ForgetRun,
    ForgetShape,
    ForgetStoreKey,
    ForgetStoreOperation,
    GroupRecord,
    ParticipantRecord,
    RankOwnerRecord,
    RoundRecord,
    RunRecord,
    SaveRecord,
    ShapeRecord,
    StoredRecord,
    StoreKeyRecord,
    StoreOperationRecord,
)
from muster.service.rpc.codec import encode_session_message
from muster.service.storage import codec
from muster.service.storage.engine import Engine, StorageError
from muster.service.storage.memory import MemoryEngine
from muster.service.storage.sqlite import SqliteEngine

SPEAKER = RankOwnerRecord(
    run_id="job1",
    prefix="checkpoint",
    rank=3,
    incarnation="c0ffee",
    ordinal=(1 << 32) + 5,
    host="node-0",
    pid=4121,
    start_sequence=6,
    shape=2,
    state=MemberState.DISCONNECTED,
    lineage=(1 << 32) + 2,
)
SHAPE = ShapeRecord("job1", "checkpoint", 2, Shape(16, Ranks((0, 3, 5))))
ROUND = RoundRecord("job1", 12, 2, 1_700_000_000.5, 31.25)
NODE = ParticipantRecord(
    run_id="job1",
    node=NodeInfo("decaf", "node-0", 4100),
    attempt=13,
    rank=1,
    settings=RendezvousSettings(
        min_nodes=2, max_nodes=4, join_timeout=600.0, last_call_timeout=30.0, keep_alive_timeout=0.5
    ),
)
AGREEMENT = AgreementRecord("job1", NODE.settings)
STORE: list[StoredRecord] = [
    StoreKeyRecord("job1", "a key\0with NUL", b"\0\xff"),
    StoreKeyRecord("job1", "", b""),
    StoreOperationRecord("job1", "c1", 2**63, Number(-(2**63))),
    StoreOperationRecord("job1", "c2", 1, Done()),
]
SAVE = SaveRecord(
    "job1",
    Save(
        number=3,
        state=SaveState.DONE,
        stop=True,
        by="ann@login",
        reason="a drain",
        asked_at=1_700_000_003.5,
        since=7,
        step=412,
        ended_at=1_700_000_005.25,
    ),
)
CHECKPOINTS = CheckpointsRecord(
    "job1",
    CheckpointHistory(
        newest=Checkpoint(1_200, 1_700_000_006.5, 2**40, SlowestWrite(3, "node-0", 12.5), "save/commit", 11),
        committed=12,
        intervals=(600.0, 601.25),
        failures=(FailedSave(None, 1_700_000_004.0, "was aborted: enough", "save", 10),),
    ),
)
EVICTION = EvictionRecord("job1", 5, 3, (1 << 32) + 9)
LOCAL = LocalCheckpointRecord(
    "job1",
    LocalCheckpoint(Attempt(3, 11), 1_200, 16, 4_096, bytes(range(16)), 1, "s3://bucket/job1", 3, 2**40),
    Level.PERSISTED,
    "a-keeper",
    1_700_000_007.5,
    "s3://bucket/job1/step-0000001200",
)
RECOVERY = RecoveryRecord(
    "job1", 3, 2, 16, Attempt(3, 11), "step 1200 is the newest, and whole", Attempt(3, 12)
)
ALL_KINDS: list[StoredRecord] = [
    RunRecord(
        "job1",
        3,
        Closed("me", "done", 1_700_000_001.25),
        1_700_000_002.5,
        Stopped(9, "me", "a drain", 1_700_000_001.25, 3),
        (EvictedNode("a-life", 3), EvictedNode("b-life", None)),
    ),
    GroupRecord("job1", "checkpoint", 3, 6),
    SHAPE,
    SPEAKER,
    records.decision(),
    AGREEMENT,
    EVICTION,
    ROUND,
    NODE,
    SAVE,
    CHECKPOINTS,
    LOCAL,
    RECOVERY,
    *STORE,
]


class Place:
    """Somewhere to keep state; at most one engine holds it at a time."""

    def __init__(self, make: Callable[[], Engine]) -> None:
        self.make = make
        self.engine = make()

    def reopen(self) -> int:
        """Let go, and take hold again as a restarted coordinator would. Returns the epoch."""
        self.engine.close()
        self.engine = self.make()
        return self.engine.open()

    @property
    def data(self) -> dict[bytes, bytes]:
        rows = list(self.engine.scan())
        assert len(rows) == len(dict(rows)), "a key comes twice"
        assert all(type(key) is bytes and type(value) is bytes for key, value in rows)
        return dict(rows)


@pytest.fixture(params=["memory", "sqlite", "etcd"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with ExitStack() as stack:
        if request.param == "memory":
            engine = MemoryEngine()
            place = Place(lambda: engine)
        elif request.param == "sqlite":
            place = Place(lambda: SqliteEngine(tmp_path / "muster.db"))
        else:
            members = request.getfixturevalue("etcd")
            place = Place(stack.enter_context(successive_leaders(members.state(tmp_path.name))))
        assert place.engine.open() == 1
        yield place
        place.engine.close()


# ---------------------------------------------------------------------- opening and closing


def test_epoch_rises_with_every_opening(place: Place):
    assert [place.reopen() for _ in range(3)] == [2, 3, 4]


def test_committed_rows_are_there_after_reopening(place: Place):
    place.engine.commit({b"a": b"1", b"b": b"2"})
    place.engine.commit({b"a": None, b"c": b"3"})
    place.reopen()
    assert place.data == {b"b": b"2", b"c": b"3"}


def test_closing_twice_does_no_harm(place: Place):
    place.engine.commit({b"a": b"1"})
    place.engine.close()
    place.engine.close()
    assert place.reopen() == 2
    assert place.data == {b"a": b"1"}


def test_engine_that_was_never_opened_can_be_closed(place: Place):
    place.engine.close()
    place.make().close()
    assert place.reopen() == 2


# ---------------------------------------------------------------------- reading and writing


def test_new_place_is_empty_and_the_epoch_is_not_among_its_data(place: Place):
    assert place.data == {}
    place.reopen()
    assert place.data == {}


def test_key_is_put_overwritten_and_deleted(place: Place):
    place.engine.commit({b"a": b"1"})
    assert place.data == {b"a": b"1"}
    place.engine.commit({b"a": b"2"})
    assert place.data == {b"a": b"2"}
    place.engine.commit({b"a": None})
    assert place.data == {}


def test_one_commit_puts_overwrites_and_deletes(place: Place):
    place.engine.commit({b"a": b"1", b"b": b"2", b"c": b"3"})
    place.engine.commit({b"a": None, b"b": b"22", b"d": b"4", b"never there": None})
    assert place.data == {b"b": b"22", b"c": b"3", b"d": b"4"}


def test_empty_commit_changes_nothing(place: Place):
    place.engine.commit({b"a": b"1"})
    place.engine.commit({})
    assert place.data == {b"a": b"1"}


def test_empty_value_is_not_a_deletion(place: Place):
    place.engine.commit({b"a": b""})
    place.reopen()
    assert place.data == {b"a": b""}


def test_keys_and_values_are_any_bytes(place: Place):
    writes = {b"": b"\0", b"\0": b"", b"a\0b": b"\xff\0\xfe", b"a\0c": b"x", b"\xff" * 300: bytes(range(256))}
    place.engine.commit(writes)
    place.engine.commit({b"a\0b": None})
    del writes[b"a\0b"]
    place.reopen()
    assert place.data == writes


def test_value_of_16_mib_comes_back(place: Place):
    large = bytes(range(256)) * (16 << 12)
    place.engine.commit({b"large": large, b"small": b"1"})
    place.reopen()
    assert place.data == {b"large": large, b"small": b"1"}


def test_commit_from_another_thread_is_seen(place: Place):
    """The driver opens and scans on its loop, and commits on a thread."""
    with ThreadPoolExecutor(1) as writer:
        writer.submit(place.engine.commit, {b"a": b"1"}).result()
    assert place.data == {b"a": b"1"}


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    commits=st.lists(
        st.dictionaries(st.binary(max_size=3), st.none() | st.binary(max_size=5), max_size=6), max_size=6
    )
)
def test_engine_is_a_map(place: Place, commits: list[dict[bytes, bytes | None]]):
    model: dict[bytes, bytes | None] = {}
    place.engine.commit(dict.fromkeys(place.data))
    for writes in commits:
        place.engine.commit(writes)
        model |= writes
    assert place.data == {key: value for key, value in model.items() if value is not None}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    present=st.sets(st.binary(max_size=3)),
    cleared=st.lists(st.binary(max_size=2).map(lambda some: some + b"\0"), max_size=3),
    written=st.dictionaries(st.binary(max_size=3), st.binary(max_size=2), max_size=3),
)
def test_prefixes_are_cleared_before_anything_is_written(
    place: Place, present: set[bytes], cleared: list[bytes], written: dict[bytes, bytes]
):
    place.engine.commit(dict.fromkeys(place.data))
    place.engine.commit(dict.fromkeys(present, b"old"))
    place.engine.commit(written, cleared)
    kept = {key: b"old" for key in present if not key.startswith(tuple(cleared))}
    assert place.data == kept | written


# ---------------------------------------------------------------------- records


def commit(place: Place, *some) -> None:
    """Commit records as the driver does."""
    batch = codec.encode_all(some)
    place.engine.commit(batch.writes, batch.cleared)


def keep(place: Place, *some) -> list[StoredRecord]:
    """Commit records, restart, and read what is there."""
    commit(place, *some)
    place.reopen()
    return list(codec.decode_all(place.engine.scan()))


def by_key(some) -> dict[bytes, StoredRecord]:
    return {codec.encode(record)[0]: record for record in some}


def test_every_kind_of_record_comes_back_whole(place: Place):
    assert by_key(keep(place, *ALL_KINDS)) == by_key(ALL_KINDS)


def test_all_of_the_world_is_not_a_list_of_participants(place: Place):
    whole = replace(SPEAKER, shape=Shape(16))
    assert keep(place, whole) == [whole]


def test_forgotten_record_is_gone_and_no_other(place: Place):
    others = [
        records.decision(sequence=8),
        records.decision(prefix="eval"),
        replace(SPEAKER, rank=30),
        replace(ROUND, round=1),
        replace(NODE, run_id="job2"),
        replace(LOCAL, checkpoint=replace(LOCAL.checkpoint, attempt=Attempt(3, 12))),
    ]
    keep(place, *ALL_KINDS, *others)
    forgotten = [
        ForgetDecision("job1", "checkpoint", 7),
        ForgetShape("job1", "checkpoint", 2),
        ForgetRankOwner("job1", "checkpoint", 3),
        ForgetRound("job1", 12),
        ForgetParticipant("job1", "decaf"),
        ForgetAgreement("job1"),
        ForgetStoreKey("job1", ""),
        ForgetStoreOperation("job1", "c1"),
        ForgetLocalCheckpoint("job1", Attempt(3, 11)),
    ]
    left = [*ALL_KINDS[:2], EVICTION, SAVE, CHECKPOINTS, RECOVERY, STORE[0], STORE[3], *others]
    assert by_key(keep(place, *forgotten)) == by_key(left)


def test_forgetting_a_run_removes_all_its_records_and_no_others(place: Place):
    others = [RunRecord("job", 1), RunRecord("job10", 1), GroupRecord("job10", "checkpoint", 0, 0)]
    keep(place, *ALL_KINDS, *others)
    assert by_key(keep(place, ForgetRun("job1"))) == by_key(others)


def test_forgotten_run_can_begin_again_in_the_same_batch(place: Place):
    keep(place, *ALL_KINDS)
    again = [RunRecord("job1", 0), StoreKeyRecord("job1", "", b"again")]
    early = StoreKeyRecord("job1", "early", b"")
    assert by_key(keep(place, early, ForgetRun("job1"), *again)) == by_key(again)


def test_every_kind_of_record_is_one_that_forgetting_a_run_knows():
    assert {type(record) for record in ALL_KINDS} == set(get_args(StoredRecord))
    kinds = {codec.encode(record)[0].split(b"\0")[0].decode() for record in ALL_KINDS}
    assert kinds == {"run", *codec.KINDS}


def test_keys_of_two_runs_differ_whatever_their_names(place: Place):
    """A run id holds no NUL, so the first one ends it."""
    alike = [
        StoreKeyRecord("a", "b\0c", b"1"),
        StoreKeyRecord("a", "b", b"2"),
        StoreKeyRecord("a\u00e9", "", b"3"),
    ]
    assert by_key(keep(place, *alike)) == by_key(alike)
    assert len(by_key(alike)) == 3


def test_last_record_for_a_key_wins_within_a_batch(place: Place):
    again = ForgetDecision("job1", "checkpoint", 7)
    assert keep(place, records.decision(), again) == []
    assert keep(place, again, records.decision()) == [records.decision()]
    assert keep(place, RunRecord("a", 1), RunRecord("a", 2), again) == [RunRecord("a", 2)]


def test_node_that_changes_rounds_within_one_batch_is_kept(place: Place):
    forgotten = ForgetParticipant("job1", "decaf")
    assert keep(place, NODE, forgotten, replace(NODE, attempt=14)) == [replace(NODE, attempt=14)]
    assert keep(place, replace(NODE, attempt=15), forgotten) == []


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(some=records.every_kind)
def test_any_record_survives_encoding_and_decoding(place: Place, some: tuple[StoredRecord, ...]):
    assert {type(record) for record in some} == set(get_args(StoredRecord))
    place.engine.commit(dict.fromkeys(place.data))
    found = by_key(keep(place, *some))
    assert found.keys() == by_key(some).keys()
    for key, record in by_key(some).items():
        back = found[key]
        if isinstance(record, Decision):
            assert isinstance(back, Decision)
            # Durations and dates are kept as finely as they are told: what a late rank hears is the same.
            assert encode_session_message(back) == encode_session_message(record)
            assert records.timeless(back) == records.timeless(record)
        elif isinstance(record, RunRecord | RoundRecord):
            assert records.timeless(back) == records.timeless(record)
            assert records.times(back) == pytest.approx(records.times(record), abs=2e-6)
        else:
            assert back == record
        assert codec.encode(back) == codec.encode(record)


def test_coordinator_takes_them_back(place: Place):
    core = Coordinator(epoch=2)
    core.restore(keep(place, *ALL_KINDS), Instant(0.0, 0.0))
    run = core.run("job1")
    assert run.groups["checkpoint"].decisions == {7: records.decision()}
    assert run.closed == Closed("me", "done", 1_700_000_001.25)
    assert run.evictions == {5: EVICTION}
    assert run.groups["checkpoint"].owners[3].shape == SHAPE.shape
    assert list(run.rendezvous.rounds) == [ROUND]
    assert run.rendezvous.complete
    assert [(node.info, node.attempt, node.rank) for node in run.rendezvous] == [(NODE.node, 13, 1)]
    assert run.checkpoints.history == CHECKPOINTS.history
    assert run.store.values == {"a key\0with NUL": b"\0\xff", "": b""}


def row(record: StoredRecord) -> tuple[bytes, bytes]:
    key, value = codec.encode(record)
    assert value is not None
    return key, value


RUN_KEY, RUN_VALUE = row(ALL_KINDS[0])
DECISION_KEY, DECISION_VALUE = row(records.decision())
SPEAKER_KEY, SPEAKER_VALUE = row(SPEAKER)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        pytest.param(DECISION_KEY, DECISION_VALUE[:-1], "pars", id="cut off"),
        pytest.param(DECISION_KEY, b"\xff" * 20, "pars", id="garbage"),
        pytest.param(
            DECISION_KEY, DECISION_VALUE + b"\x28\x63", "99 is not a valid Outcome", id="new outcome"
        ),
        pytest.param(DECISION_KEY, b"", "0 is not a valid Outcome", id="emptied decision"),
        pytest.param(
            SPEAKER_KEY, SPEAKER_VALUE + b"\x58\x63", "99 is not a valid MemberState", id="new state"
        ),
        pytest.param(RUN_KEY, b"", "belongs to b'run", id="emptied run"),
        pytest.param(RUN_KEY + b"2", RUN_VALUE, "belongs to b'run", id="wrong key"),
        pytest.param(b"lease\0job1", b"", "no record is called b'lease'", id="new kind"),
        pytest.param(b"", b"", "no record is called b''", id="no kind"),
    ],
)
def test_damaged_row_is_named(place: Place, key: bytes, value: bytes, why: str):
    commit(place, *ALL_KINDS)
    place.engine.commit({key: value})
    with pytest.raises(StorageError) as caught:
        list(codec.decode_all(place.engine.scan()))
    message = str(caught.value)
    assert f"the stored row {key!r} cannot be understood" in message
    assert why in message
    assert "restore a backup or run that version" in message
