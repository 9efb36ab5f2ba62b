"""CoordinatorStore without a coordinator: what it sends, what it sends again, and how it gives up."""

import gc
import itertools
import os
import pickle
from datetime import timedelta
from typing import Any

import grpc
import pytest
import torch.distributed as dist

from muster.client import replicas
from muster.client.credentials import TOKEN_PATIENCE
from muster.client.replicas import Target
from muster.service.core.vocabulary.refusal import Reason, Refusal
from muster.service.draining import DRAINING
from muster.service.rpc import errors as service_errors
from muster.v1 import store_pb2 as pb
from muster.worker import (
    ConnectError,
    CoordinatorStore,
    MusterError,
    RefusedError,
    StoreTimeoutError,
    init_method,
    store_stream,
)
from muster.worker import store as store_module
from muster.worker.environment import EnvironmentValueError
from muster.worker.transport import channel, fork_guard
from tests.support.rich_status import rich_status

ENDPOINT = "127.0.0.1:1"
TIMED_OUT = Refusal(Reason.STORE_TIMED_OUT, 'Wait timeout after 1 s for "a".')


class Failure(grpc.RpcError):
    """A call that ended so."""

    def __init__(self, code: grpc.StatusCode, details: str = "why", trailers: tuple[Any, ...] = ()) -> None:
        super().__init__()
        self._ended = (code, details, trailers)

    def code(self) -> grpc.StatusCode:
        return self._ended[0]

    def details(self) -> str:
        return self._ended[1]

    def trailing_metadata(self) -> tuple[Any, ...]:
        return self._ended[2]


def refusal(refused: Refusal) -> Failure:
    status = service_errors.grpc_status(refused)
    return Failure(status.code, status.details, status.trailing_metadata)


def upstream_lost() -> Failure:
    status = rich_status("UPSTREAM_LOST", "the relay has lost the coordinator.")
    return Failure(status.code, status.details, status.trailing_metadata)


def relay_cut_off() -> Failure:
    status = rich_status("RELAY_CUT_OFF", "the coordinator is out of the relay's reach.")
    return Failure(status.code, status.details, status.trailing_metadata)


UNAVAILABLE = Failure(grpc.StatusCode.UNAVAILABLE, "Connection refused")


class Stub:
    """Remembers what is sent, and answers as it was told: with failures first, then with the answer."""

    def __init__(self, time: "Time") -> None:
        self.sent: list[tuple[str, Any, float | None]] = []
        self.failures: list[Failure] | list[EnvironmentValueError] = []
        self.answers: dict[str, Any] = {
            "Set": pb.SetResponse(),
            "Add": pb.AddResponse(value=3),
            "CompareSet": pb.CompareSetResponse(value=b"c"),
            "Append": pb.AppendResponse(),
            "Delete": pb.DeleteResponse(existed=True),
            "Get": pb.StoreServiceGetResponse(values=[b"v\xff", b""]),
            "Wait": pb.WaitResponse(),
            "Check": pb.CheckResponse(present=True),
            "NumKeys": pb.NumKeysResponse(count=7),
            "ListKeys": pb.ListKeysResponse(keys=["a", "b"]),
        }
        self._time = time

    def Operate(self, *_: object, **__: object) -> Any:  # noqa: N802
        """No streams: ``test_store_stream.py`` has them."""
        raise Failure(grpc.StatusCode.UNIMPLEMENTED)

    def __getattr__(self, method: str) -> Any:
        def call(request: Any, timeout: float | None, metadata: Any) -> Any:
            copy = type(request)()
            copy.CopyFrom(request)
            self.sent.append((method, copy, timeout))
            if self.failures:
                raise self.failures.pop(0)
            return self.answers[method]

        return call

    @property
    def requests(self) -> list[Any]:
        return [request for _, request, _ in self.sent]


class Time:
    """The store's clock, which its pauses move."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert 0 <= seconds <= replicas.MAX_BACKOFF
        self.now += seconds


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    for module in (store_module, store_stream):
        monkeypatch.setattr(module, "time", time)
    monkeypatch.setattr(replicas.replicas_of(ENDPOINT), "clock", time.monotonic)
    return time


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch, time: Time) -> Stub:
    stub = Stub(time)
    monkeypatch.setattr(store_stream, "StoreServiceStub", lambda _: stub)
    return stub


@pytest.fixture
def store(stub: Stub) -> CoordinatorStore:
    return CoordinatorStore(ENDPOINT, "job")


# ---------------------------------------------------------------------- what is sent and given back


@pytest.mark.parametrize("layer", [lambda store: store, lambda store: dist.PrefixStore("p", store)])
def test_store_accepts_text_and_returns_bytes(store: CoordinatorStore, stub: Stub, layer):
    laid = layer(store)
    laid.set("k", "é")
    laid.append("k", "x")
    assert laid.compare_set("k", "a", "b") == b"c"
    assert laid.add("k", 2) == 3
    assert laid.multi_get(["a", "b"]) == [b"v\xff", b""]
    assert laid.get("k") == b"v\xff"
    assert laid.check(["k"]) is True
    assert laid.delete_key("k") is True
    assert laid.num_keys() == 7
    assert laid.has_extended_api() is True
    laid.multi_set(["a", "b"], ["1", "2"])
    laid.wait(["a"])
    laid.wait(["a"], timedelta(seconds=9))
    values = [r.entries[0].value for r in stub.requests if isinstance(r, pb.SetRequest)]
    assert values == ["é".encode(), b"1"]
    assert {request.run_id for request in stub.requests} == {"job"}
    assert [r.timeout_ms for r in stub.requests if isinstance(r, pb.WaitRequest)] == [300_000, 9_000]


def test_store_keeps_bytes_that_are_not_text(store: CoordinatorStore, stub: Stub):
    store.set("k", b"\xff\0")
    store.multi_set(["a", "b"], [b"\xff", "t"])
    assert store.list_keys() == ["a", "b"]
    assert [entry.value for entry in stub.requests[1].entries] == [b"\xff", b"t"]


def test_changes_carry_numbers_and_a_name_of_their_store(store: CoordinatorStore, stub: Stub):
    store.add("n", 1)
    store.set("k", "v")
    store.clone().add("n", 1)
    names = [(r.operation.client, r.operation.number) for r in stub.requests]
    assert [number for _, number in names] == [1, 2, 1]
    assert names[0][0] == names[1][0] != names[2][0]


def test_clone_has_the_same_keys_and_timeout(store: CoordinatorStore):
    store.set_timeout(timedelta(seconds=7))
    clone = store.clone()
    assert (clone.endpoint, clone.run_id, clone.timeout) == (ENDPOINT, "job", timedelta(seconds=7))


def test_store_stays_usable_if_only_torch_references_it(stub: Stub):
    laid: Any = dist.PrefixStore("p", CoordinatorStore(ENDPOINT, "job"))
    clone = laid.clone()
    gc.collect()
    assert laid.get("k") == clone.get("k") == b"v\xff"


@pytest.mark.parametrize("operation", [("queue_push", "k", "v"), ("queue_pop", "k"), ("queue_len", "k")])
def test_queue_operations_are_refused_with_a_reason(store: CoordinatorStore, operation: tuple[str, ...]):
    name, *arguments = operation
    with pytest.raises(NotImplementedError, match="queue support is not implemented"):
        getattr(store, name)(*arguments)


# ---------------------------------------------------------------------- waiting


def test_wait_uses_the_stores_timeout_which_torch_may_set(store: CoordinatorStore, stub: Stub):
    dist.PrefixStore("p", store).set_timeout(timedelta(seconds=2))
    store.get("a")
    assert stub.requests[0].timeout_ms == 2_000
    assert stub.sent[0][2] == 2.0 + store_module.ANSWER_GRACE


def test_timeout_of_0_waits_forever_as_in_torchs_stores(store: CoordinatorStore, stub: Stub):
    stub.failures = [UNAVAILABLE] * 50
    store.wait(["a"], timedelta(0))
    assert {(r.timeout_ms, timeout) for _, r, timeout in stub.sent} == {(0, None)}


def test_timeout_below_a_millisecond_does_not_wait_forever(store: CoordinatorStore, stub: Stub):
    store.wait(["a"], timedelta(microseconds=1))
    assert stub.requests[0].timeout_ms == 1


def test_missing_keys_raise_a_store_error_that_names_them(store: CoordinatorStore, stub: Stub):
    stub.failures = [refusal(TIMED_OUT)]
    with pytest.raises(dist.DistStoreError) as caught:
        store.wait(["a", "b"], timedelta(seconds=1))
    assert type(caught.value) is StoreTimeoutError
    assert (str(caught.value), caught.value.keys) == ('Wait timeout after 1 s for "a".', ("a", "b"))
    assert len(stub.sent) == 1


def test_missing_keys_raise_the_same_error_through_a_prefix_store(store: CoordinatorStore, stub: Stub):
    stub.failures = [refusal(TIMED_OUT)]
    with pytest.raises(StoreTimeoutError) as caught:
        dist.PrefixStore("p", store).get("a")
    assert caught.value.keys == ("p/a",)


def test_timeout_error_can_be_pickled():
    error = pickle.loads(pickle.dumps(StoreTimeoutError("why", ["a"])))
    assert (str(error), error.keys) == ("why", ("a",))


# ---------------------------------------------------------------------- trying again


@pytest.mark.parametrize(
    "failure",
    [
        pytest.param(UNAVAILABLE, id="connection lost"),
        pytest.param(Failure(grpc.StatusCode.CANCELLED, "stopped"), id="coordinator stopped"),
        pytest.param(refusal(DRAINING), id="coordinator draining"),
        pytest.param(relay_cut_off(), id="relay cut off"),
        pytest.param(upstream_lost(), id="relay has lost it"),
    ],
)
def test_repeated_change_keeps_its_name_and_number(store: CoordinatorStore, stub: Stub, failure: Failure):
    stub.failures = [failure, failure]
    assert store.add("n", 1) == 3
    first, second, third = stub.requests
    assert first == second == third
    store.add("n", 1)
    assert stub.requests[-1].operation.number == 2


def test_repeated_wait_has_less_time(store: CoordinatorStore, stub: Stub, time: Time):
    stub.failures = [UNAVAILABLE] * 5
    started = time.now
    store.wait(["a"], timedelta(seconds=60))
    left = [request.timeout_ms for request in stub.requests]
    assert left == sorted(left, reverse=True)
    assert left[-1] == round((60 - (time.now - started)) * 1000)
    assert left[-1] < 60_000


def test_store_waits_for_a_token_file_that_is_briefly_missing(store: CoordinatorStore, stub: Stub):
    away = EnvironmentValueError("MUSTER_TOKEN_FILE = token: it cannot be read.")
    stub.failures = [away]
    with pytest.raises(EnvironmentValueError):
        store.add("n", 1)
    store.add("n", 1)
    stub.failures = [away, away]
    assert store.add("n", 1) == 3
    stub.failures = [away] * 1_000
    store.set_timeout(timedelta(seconds=10))
    with pytest.raises(ConnectError, match=r"timeout of 10 s; last error: MUSTER_TOKEN_FILE = token"):
        store.add("n", 1)


def test_store_waits_for_a_new_token_after_a_refusal(
    store: CoordinatorStore, stub: Stub, time: Time, monkeypatch: pytest.MonkeyPatch
):
    """However long the coordinator was away before."""
    monkeypatch.setenv("MUSTER_TOKEN_FILE", "token")
    store.add("n", 1)
    unknown = refusal(Refusal(Reason.TOKEN_UNKNOWN, "not one of mine."))
    stub.failures = [UNAVAILABLE] * 120 + [unknown] * 20
    began = time.now
    assert store.add("n", 1) == 3
    assert time.now - began > TOKEN_PATIENCE
    stub.failures = [unknown] * 1_000
    with pytest.raises(RefusedError, match="not one of mine"):
        store.add("n", 1)


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED])
def test_timeout_error_names_the_address_and_the_last_error(
    store: CoordinatorStore, stub: Stub, time: Time, code: grpc.StatusCode
):
    stub.failures = [Failure(code, "nobody there")] * 1_000
    store.set_timeout(timedelta(seconds=10))
    started = time.now
    with pytest.raises(ConnectError) as caught:
        store.add("n", 1)
    assert time.now - started == pytest.approx(10.0)
    for words in (
        ENDPOINT,
        "run job",
        "within the timeout of 10 s",
        f"{code.name}: nobody there",
        "may have been carried out",
    ):
        assert words in str(caught.value)
    assert len(stub.sent) < 30


def test_abandoned_change_is_never_carried_out_later(store: CoordinatorStore, stub: Stub):
    """The next one has a higher number, so that the coordinator refuses a copy that is still on its way."""
    stub.failures = [UNAVAILABLE] * 1_000
    store.set_timeout(timedelta(seconds=1))
    with pytest.raises(ConnectError):
        store.add("n", 1)
    stub.failures = []
    store.add("n", 1)
    assert stub.requests[-1].operation.number > stub.requests[0].operation.number


def test_refused_operation_is_not_repeated(store: CoordinatorStore, stub: Stub):
    stub.failures = [refusal(Refusal(Reason.NOT_A_NUMBER, "it is none."))]
    with pytest.raises(RefusedError, match=r"^it is none\.$") as caught:
        store.add("n", 1)
    assert caught.value.reason == "NOT_A_NUMBER"
    assert len(stub.sent) == 1


def test_error_of_another_program_is_explained(store: CoordinatorStore, stub: Stub):
    stub.failures = [Failure(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")]
    with pytest.raises(RefusedError) as caught:
        store.set("k", "v")
    assert "UNIMPLEMENTED: Method not found!" in str(caught.value)
    assert ENDPOINT in str(caught.value)


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(lambda store: store.set("\udcff", "v"), id="key"),
        pytest.param(lambda store: store.get("\udcff"), id="key to get"),
        pytest.param(lambda store: store.set("k", "\udcff"), id="value"),
        pytest.param(lambda store: store.add("k", 2**63), id="number"),
        pytest.param(lambda store: store.multi_set(["a", "b"], ["1"]), id="counts"),
        pytest.param(lambda store: store.wait(["k"], timedelta(seconds=-1)), id="timeout"),
        pytest.param(lambda _: CoordinatorStore(ENDPOINT, "job", timedelta(seconds=-1)), id="its timeout"),
        pytest.param(lambda _: CoordinatorStore("nowhere"), id="endpoint"),
    ],
)
def test_unusable_argument_is_a_value_error_and_not_sent(store: CoordinatorStore, stub: Stub, operation):
    with pytest.raises(ValueError):
        operation(store)
    assert stub.sent == []


def test_defaults_come_from_the_environment(stub: Stub, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MUSTER_ENDPOINT", "there:1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "elastic")
    store = CoordinatorStore()
    assert (store.endpoint, store.run_id, store.timeout) == ("there:1", "elastic", timedelta(seconds=300))


def test_forked_child_cannot_use_its_parents_store(store: CoordinatorStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "getpid", lambda: 2)
    # Another thread of the parent was sending a change when it was forked.
    with store._turn:
        for operation in (lambda: store.get("k"), lambda: store.add("n", 1)):
            with pytest.raises(MusterError, match="process 2 was forked from process"):
                operation()


def test_forked_child_cannot_open_a_store_if_its_parent_has_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fork_guard, "_usages", [])
    parents = CoordinatorStore("127.0.0.1:3", "job")
    monkeypatch.setattr(os, "getpid", lambda: 2)
    parents.close()
    with pytest.raises(MusterError, match="which holds a"):
        CoordinatorStore("127.0.0.1:3", "job")


def test_closed_store_connects_again_when_used(store: CoordinatorStore, stub: Stub):
    store.close()
    assert store._line is None
    assert store.add("n", 1) == 3
    assert store._line is not None


def test_closed_store_waits_for_a_briefly_missing_token_file(
    store: CoordinatorStore, stub: Stub, monkeypatch: pytest.MonkeyPatch
):
    store.add("n", 1)
    store.close()
    away = [EnvironmentValueError("MUSTER_TOKEN_FILE = token: it cannot be read.")] * 5
    opened = channel.shared_channel

    def open_when_it_is_there(target: Target, **renew: bool) -> channel.SharedChannel:
        if away:
            raise away.pop()
        return opened(target, **renew)

    monkeypatch.setattr(store_module, "shared_channel", open_when_it_is_there)
    assert store.add("n", 1) == 3
    assert away == []


def test_stores_share_one_channel_for_each_coordinator():
    channels = [channel.shared_channel(Target(one)) for one in (ENDPOINT, ENDPOINT, "127.0.0.1:2")]
    assert [a is b for a, b in itertools.pairwise(channels)] == [True, False]


# ---------------------------------------------------------------------- init_process_group


class MeetingBarrier:
    """Remembers how it was made; all ranks come at once."""

    made: tuple[Any, ...] = ()
    sequence = 4

    def __init__(self, *arguments: Any) -> None:
        MeetingBarrier.made = arguments

    def execute_barrier(self) -> None:
        pass


@pytest.mark.parametrize(
    ("url", "environ", "rank", "run_id"),
    [
        ("muster://127.0.0.1:1/job%2F1?rank=1&world_size=2", {}, 1, "job/1"),
        ("muster:?rank=1&world_size=2", {"MUSTER_ENDPOINT": ENDPOINT}, 1, "default"),
        ("muster://", {"MUSTER_ENDPOINT": ENDPOINT, "RANK": "0", "WORLD_SIZE": "2"}, 0, "default"),
        ("muster:///job", {"MUSTER_ENDPOINT": ENDPOINT, "RANK": "0", "WORLD_SIZE": "2"}, 0, "job"),
    ],
)
def test_process_group_keys_carry_the_number_of_the_barrier(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, url: str, environ: dict[str, str], rank: int, run_id: str
):
    monkeypatch.setattr(init_method, "GroupBarrier", MeetingBarrier)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    store: Any
    store, *who = next(init_method.meet(url, timeout=timedelta(seconds=20)))
    assert who == [rank, 2]
    assert MeetingBarrier.made == (rank, 2, "init_process_group", ENDPOINT, 20.0, 20.0, run_id)
    store.set("k", "v")
    assert stub.requests[0].entries[0].key == "init_process_group/4/k"
    assert store.timeout == timedelta(seconds=20)


def test_init_method_accepts_several_coordinators(stub: Stub, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(init_method, "GroupBarrier", MeetingBarrier)
    assert next(dist.rendezvous("muster://127.0.0.1:1,127.0.0.1:2/job", 1, 2))[1:] == (1, 2)
    assert MeetingBarrier.made[3] == "127.0.0.1:1,127.0.0.1:2"


@pytest.mark.parametrize(
    "url",
    ["muster://127.0.0.1:1/job?rank=x&world_size=2", "muster://127.0.0.1:1/job?ranks=1", "muster://here/job"],
)
def test_unusable_init_method_is_a_value_error(url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError):
        next(init_method.meet(url))


def test_torch_knows_the_init_methods_scheme(stub: Stub, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(init_method, "GroupBarrier", MeetingBarrier)
    meeting = dist.rendezvous("muster://127.0.0.1:1/job", 1, 2)
    assert next(meeting)[1:] == (1, 2)
