"""CoordinatorStore against a real coordinator: beside torch's stores, under torch, and through crashes."""

import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch.distributed as dist
from google.rpc.error_details_pb2 import ErrorInfo
from grpc_status import rpc_status
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.patience import PATIENCE, until
from lab.processes.coordinator import Coordinator, free_port
from lab.processes.proxy import Proxy
from muster.v1 import store_pb2 as pb
from muster.v1 import store_pb2_grpc
from muster.worker import ConnectError, CoordinatorStore, RefusedError, StoreTimeoutError
from tests.support import store_users
from tests.support.expect import some
from tests.support.waiters import wait_until_asked

pytestmark = pytest.mark.also_through_relay

SOON = timedelta(seconds=60)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """A coordinator in memory for tests that leave it as it is, each in a run of its own."""
    with Coordinator(tmp_path_factory.mktemp("shared"), state="memory:") as running:
        yield running
        assert "Traceback" not in running.log_path.read_text()


def in_a_run(coordinator: Coordinator, timeout: timedelta = SOON) -> CoordinatorStore:
    return CoordinatorStore(coordinator.endpoint, uuid.uuid4().hex, timeout)


# ---------------------------------------------------------------------- beside torch's stores


KEYS = st.sampled_from(["a", "b", "c/d", "é"])
VALUES = st.sampled_from([b"0", b"-12", b"x", b"\0\xff", b""])
STEPS = st.one_of(
    st.tuples(st.just("set"), KEYS, VALUES),
    st.tuples(st.just("append"), KEYS, VALUES),
    st.tuples(st.just("add"), KEYS, st.integers(-(2**31), 2**31)),
    st.tuples(st.just("compare_set"), KEYS, VALUES, VALUES),
    st.tuples(st.just("delete_key"), KEYS),
    st.tuples(st.just("check"), st.lists(KEYS, max_size=3)),
    st.tuples(st.just("multi_set"), st.just(["a", "b"]), st.lists(VALUES, min_size=2, max_size=2)),
)


@pytest.fixture(scope="module")
def tcp_store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", free_port(), is_master=True, timeout=SOON)


def is_number(value: bytes) -> bool:
    return value.removeprefix(b"-").isdigit()


@settings(max_examples=40, deadline=None)
@given(steps=st.lists(STEPS, max_size=12))
def test_it_gives_what_torchs_stores_give(
    shared: Coordinator, tcp_store: dist.TCPStore, steps: list[tuple[Any, ...]]
):
    ours = in_a_run(shared)
    layered = dist.PrefixStore("layer", ours)
    hashes, tcp = dist.HashStore(), dist.PrefixStore(uuid.uuid4().hex, tcp_store)
    four = [ours, layered, hashes, tcp]
    for name, *arguments in steps:
        if name == "add" and hashes.check(arguments[:1]) and not is_number(hashes.get(arguments[0])):
            continue  # Torch's stores do not agree on it.
        assert len({repr(getattr(store, name)(*arguments)) for store in four}) == 1, (name, arguments)
    # torch lists a HashStore's keys from 2.10 on.
    keys = [key for key in ours.list_keys() if not key.startswith("layer/")]
    assert hashes.num_keys() == len(keys)
    assert ours.multi_get(keys) == layered.multi_get(keys) == hashes.multi_get(keys) == tcp.multi_get(keys)
    assert ours.num_keys() == 2 * len(keys)
    assert ours.list_keys() == sorted([*keys, *(f"layer/{key}" for key in keys)])


def test_ddp_trains_on_it_and_starts_again_in_the_same_process(shared: Coordinator):
    first, second = store_users.together(store_users.train, 2, shared.endpoint, None, 3)
    assert first == second


def test_ddp_meets_by_init_method_and_no_rank_hosts_anything(shared: Coordinator):
    url = f"muster://{shared.endpoint}/meet"
    first, second = store_users.together(store_users.train, 2, shared.endpoint, url, 3)
    assert first == second
    keys = CoordinatorStore(shared.endpoint, "meet", SOON).list_keys()
    assert {"/".join(key.split("/")[:2]) for key in keys} == {"init_process_group/0", "init_process_group/1"}


MEETS = """
import sys
import torch
import torch.distributed as dist

assert "muster.worker" not in sys.modules
dist.init_process_group("gloo", init_method="muster://")
ranks = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(ranks)
print(f"the sum is {int(ranks)}\\n", end="", flush=True)  # At once: both write to one place.
dist.destroy_process_group()
"""


def plain_python(script: Path, environ: dict[str, str]) -> list[str]:
    """What two processes say that nobody but us starts."""
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=environ | {"RANK": str(rank), "WORLD_SIZE": "2", "MUSTER_RUN_ID": "plain"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    return [rank.communicate(timeout=PATIENCE)[0] for rank in ranks]


def torchrun(script: Path, environ: dict[str, str]) -> list[str]:
    """What torchrun and two workers say."""
    endpoint = environ.pop("MUSTER_ENDPOINT")
    options = (f"--rdzv-endpoint={endpoint}", "--rdzv-id=torchrun", "--local-addr=127.0.0.1")
    return [
        subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=muster", *options),
                *("--nnodes=1", "--nproc-per-node=2", str(script)),
            ],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE,
            check=False,
        ).stdout
    ]


@pytest.mark.parametrize("start", [plain_python, torchrun])
def test_a_script_meets_by_init_method_and_imports_nothing_of_ours(
    shared: Coordinator, tmp_path: Path, start: Callable[[Path, dict[str, str]], list[str]]
):
    script = tmp_path / "meets.py"
    script.write_text(MEETS)
    said = "".join(start(script, os.environ | {"MUSTER_ENDPOINT": shared.endpoint, "OMP_NUM_THREADS": "1"}))
    assert said.count("the sum is 3") == 2, said
    assert "Exception ignored" not in said, said


def test_torch_elastics_store_functions_work_unchanged(shared: Coordinator):
    everyone = [b"rank 0", b"rank 1", b"rank 2"]
    assert store_users.together(store_users.use_elastic, 3, shared.endpoint) == [[everyone] * 3] * 3


def test_torch_elastics_barrier_names_the_missing_ranks(shared: Coordinator):
    from torch.distributed.elastic.utils.store import barrier

    with pytest.raises(dist.DistStoreError, match=r"missing_ranks=\[1\]"):
        barrier(in_a_run(shared), 2, "alone", barrier_timeout=0.05, rank=0, trace_timeout=0.05)


def test_a_forked_child_is_told_and_its_parent_goes_on(shared: Coordinator):
    (error,) = store_users.together(store_users.use_in_a_forked_child, 1, shared.endpoint)
    assert "gRPC does not work across a fork" in error


# ---------------------------------------------------------------------- waiting


def test_a_wait_is_ended_by_another_client(shared: Coordinator):
    store = in_a_run(shared)
    with ThreadPoolExecutor(1) as other:
        clone = store.clone()
        value = other.submit(clone.get, "k")
        wait_until_asked(clone)
        store.set("k", b"v")
        assert value.result(PATIENCE) == b"v"


def test_a_wait_in_vain_names_the_keys(shared: Coordinator):
    store = in_a_run(shared)
    store.set("there", "1")
    with pytest.raises(
        StoreTimeoutError, match=r'Wait timeout after 20 ms .* nobody set: "nowhere"'
    ) as caught:
        store.wait(["there", "nowhere"], timedelta(milliseconds=20))
    assert caught.value.keys == ("there", "nowhere")


def test_a_wait_in_vain_is_called_what_torchs_stores_call_it(shared: Coordinator):
    """Upstream's tests, and people's handlers, look for torch's words."""
    soon = timedelta(milliseconds=20)
    for store in (
        in_a_run(shared, soon),
        dist.PrefixStore("layer", in_a_run(shared, soon)),
        dist.HashStore(),
    ):
        store.set_timeout(soon)
        for attempt in (lambda store=store: store.get("k"), lambda store=store: store.wait(["k"], soon)):
            with pytest.raises(dist.DistStoreError, match=r"[t -i]imeout") as caught:
                attempt()
            assert "Wait timeout" in str(caught.value)


def test_no_coordinator_is_an_error_with_its_address_when_the_time_is_over():
    endpoint = f"127.0.0.1:{free_port()}"
    with pytest.raises(
        ConnectError,
        match=rf"{endpoint} did not answer .* within the timeout of 0\.3 s; last error: UNAVAILABLE",
    ):
        CoordinatorStore(endpoint, "job", timedelta(seconds=0.3)).get("k")


# ---------------------------------------------------------------------- crashes and restarts


def see_more_adds(store: CoordinatorStore) -> None:
    """Wait until others have added ten times."""
    seen = store.add("n", 0)
    until(lambda: store.add("n", 0) >= seen + 10, "nobody adds")


def test_a_killed_coordinator_counts_every_add_once_and_ends_every_wait(coordinator: Coordinator):
    """SQLite; SIGKILL while adds are on their way and a waiter waits."""
    store = CoordinatorStore(coordinator.endpoint, "job", SOON)
    store.set("before", "kept")
    enough = threading.Event()

    def add(client: CoordinatorStore) -> list[int]:
        sums = []
        while not enough.is_set():
            sums.append(client.add("n", 1))
        return sums

    with ThreadPoolExecutor(5) as threads:
        patient = store.clone()
        waiter = threads.submit(patient.get, "after")
        wait_until_asked(patient)
        adders = [threads.submit(add, store.clone()) for _ in range(4)]
        try:
            for _ in range(3):
                see_more_adds(store)
                coordinator.restart()
        finally:
            enough.set()
        sums = [value for adder in adders for value in adder.result(PATIENCE)]
        store.set("after", "done")
        assert waiter.result(PATIENCE) == b"done"
    assert sorted(sums) == list(range(1, len(sums) + 1)), "an add counted twice, or not at all"
    assert store.add("n", 0) == len(sums)
    assert store.get("before") == b"kept"


def test_store_operations_share_a_stream_and_do_not_block_each_other(
    coordinator: Coordinator,
):
    store = CoordinatorStore(coordinator.endpoint, "job", SOON)
    assert [store.add("n", 1) for _ in range(50)] == list(range(1, 51))
    with ThreadPoolExecutor(1) as other:
        waiter = other.submit(store.get, "later")
        while waiter.running() and store.add("n", 1) < 100:
            pass
        store.set("later", "now")
        assert waiter.result(PATIENCE) == b"now"
    begun = "grpc_server_started_total{"
    counts = [line for line in coordinator.get("/metrics")[1].splitlines() if line.startswith(begun)]
    (count,) = (float(line.rpartition(" ")[2]) for line in counts if "Operate" in line)
    assert 1 <= count <= 3, counts


def test_a_coordinator_that_is_stopped_and_started_again_fails_nobody(coordinator: Coordinator):
    store = CoordinatorStore(coordinator.endpoint, "job", SOON)
    with ThreadPoolExecutor(1) as other:
        store.set("k", "1")
        clone = store.clone()
        waiting = other.submit(clone.multi_get, ["k", "late"])
        wait_until_asked(clone)
        assert coordinator.stop() == 0
        coordinator.start()
        store.set("late", "2")
        assert waiting.result(PATIENCE) == [b"1", b"2"]


# ---------------------------------------------------------------------- bad networks


def test_connections_that_break_again_and_again_never_count_an_add_twice(shared: Coordinator):
    with Proxy(shared.port) as proxy, ThreadPoolExecutor(3) as threads:
        far = CoordinatorStore(proxy.endpoint, uuid.uuid4().hex, SOON)
        near = CoordinatorStore(shared.endpoint, far.run_id, SOON)
        enough = threading.Event()

        def add(client: CoordinatorStore) -> list[int]:
            sums = []
            while not enough.is_set():
                sums.append(client.add("n", 1))
            return sums

        adders = [threads.submit(add, far.clone()) for _ in range(3)]
        try:
            for _ in range(5):
                see_more_adds(near)
                proxy.cut()
            see_more_adds(near)
        finally:
            enough.set()
        sums = [value for adder in adders for value in adder.result(PATIENCE)]
    assert sorted(sums) == list(range(1, len(sums) + 1))
    assert near.add("n", 0) == len(sums)


def test_a_change_that_was_swallowed_is_sent_again_over_another_connection(shared: Coordinator):
    with Proxy(shared.port) as proxy, ThreadPoolExecutor(1) as threads:
        far = CoordinatorStore(proxy.endpoint, uuid.uuid4().hex, SOON)
        assert far.add("n", 1) == 1
        proxy.black_hole()
        adding = threads.submit(far.add, "n", 1)
        # An idle wait is wanted here: that nothing comes through is what is tried.
        with pytest.raises(TimeoutError):
            adding.result(0.5)
        proxy.cut(refuse=True)
        proxy.heal()
        assert adding.result(PATIENCE) == 2


# ---------------------------------------------------------------------- bad input


def test_a_value_past_the_limit_is_refused_with_its_name(shared: Coordinator):
    store = in_a_run(shared)
    store.set("k", b"x" * (1 << 20))
    with pytest.raises(RefusedError, match="the limit max_store_value_bytes is 1,048,576") as caught:
        store.append("k", b"x")
    assert caught.value.reason == "LIMIT_EXCEEDED"
    assert len(store.get("k")) == 1 << 20


def test_a_message_past_grpcs_limit_is_refused_and_explained(shared: Coordinator):
    with pytest.raises(RefusedError, match=r"RESOURCE_EXHAUSTED.*larger than max"):
        in_a_run(shared).set("k", bytes(20 << 20))


def test_a_run_id_past_its_limit_is_refused(shared: Coordinator):
    with pytest.raises(RefusedError, match=r'run_id = "jjjj.*10,000 bytes and may have 256') as caught:
        CoordinatorStore(shared.endpoint, "j" * 10_000, SOON).num_keys()
    assert caught.value.reason == "INVALID_ARGUMENT"


def test_many_long_keys_that_do_not_come_still_fit_in_the_error(shared: Coordinator):
    keys = [f"{number}" + "\U0001f525" * 1_000 for number in range(50)]
    with pytest.raises(StoreTimeoutError, match="and 46 more"):
        in_a_run(shared).wait(keys, timedelta(milliseconds=5))


def test_limits_are_flags(tmp_path: Path):
    with Coordinator(tmp_path, state="memory:", extra=("--max-store-keys=1",)) as small:
        store = CoordinatorStore(small.endpoint, "job", SOON)
        store.set("k", "1")
        with pytest.raises(RefusedError, match="max_store_keys is 1"):
            store.set("l", "1")


def reason_of(error: grpc.RpcError) -> str:
    status, info = rpc_status.from_call(error), ErrorInfo()
    assert status is not None
    assert status.details[0].Unpack(info)
    return str(info.reason)


def test_garbage_is_refused_and_disturbs_nobody(shared: Coordinator):
    with grpc.insecure_channel(shared.endpoint) as channel:
        raw: grpc.UnaryUnaryMultiCallable[bytes, bytes]
        raw = channel.unary_unary("/muster.v1.StoreService/Set")
        with pytest.raises(grpc.RpcError) as caught:
            raw(b"\xff" * 100, timeout=PATIENCE)
        assert "100 bytes that are not a request of /muster.v1.StoreService/Set" in some(
            caught.value.details()
        )
        assert reason_of(caught.value) == "INVALID_ARGUMENT"
        stub = store_pb2_grpc.StoreServiceStub(channel)
        for request in (pb.AddRequest(), pb.AddRequest(run_id="r", operation=pb.OperationId(client="c"))):
            with pytest.raises(grpc.RpcError) as caught:
                stub.Add(request, timeout=PATIENCE)
            assert reason_of(caught.value) == "INVALID_ARGUMENT"
    assert in_a_run(shared).add("n", 1) == 1
