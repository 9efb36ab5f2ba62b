"""Checkpoints in a bucket: real ranks, a real coordinator, and a server that speaks S3 and fails."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.patience import until
from lab.processes.bucket_server import BUCKET, BucketServer
from lab.processes.coordinator import Coordinator
from muster.checkpoint.committed import UncommittedError
from muster.checkpoint.version import LaterVersionError
from muster.worker import Checkpointer
from tests.support.chaos.save_chaos import SaveChaos
from tests.support.saves.fake_barrier import FakeBarrier
from tests.support.saves.save_history import weight_at, whole_checkpoint
from tests.support.saves.savers import Failed, all_of, savers

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BucketServer]:
    with BucketServer(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def job(tmp_path: Path) -> str:
    """Where its checkpoints go: a name of its own."""
    return f"s3://{BUCKET}/{tmp_path.name}"


def names(server: BucketServer, job: str) -> list[str]:
    """What is there, without the objects of checkpoints."""
    found = server.filesystem().find(job.removeprefix("s3://"))
    return sorted({name.split("/")[2] for name in found})


def test_save_of_all_ranks_is_committed_and_save_with_a_killed_writer_is_swept(
    coordinator: Coordinator, server: BucketServer, job: str, tmp_path: Path
):
    options = server.options()
    with savers(coordinator.endpoint, 2, tmp_path / "none", place=job, options=options) as world:
        all_of(world, "begin")
        for step in (1, 2):
            all_of(world, "save", step=step)
        assert all_of(world, "finalize") == [[1, 2], [1, 2]]
        world[0].tell("save", step=3)
        world[1].ask("save", step=3, doom="kill")
        world[0].answer()
        for [heard] in all_of(world, "finalize"):
            assert isinstance(heard, Failed)
            assert "killed by SIGKILL" in heard.message
            assert [one.rank for one in heard.failures] == [1]
        all_of(world, "save", step=4, more="something")
        assert all_of(world, "finalize") == [[4], [4]]
        assert all_of(world, "load") == [(4, True)] * 2
        assert all_of(world, "close") == [[], []]
        last = world[0].ask("latest")
    steps = {name[:15] for name in names(server, job)}
    assert steps == {f"step-000000000{step}" for step in (1, 2, 4)}
    assert len(names(server, job)) == 6, "three checkpoints, each with its verdict"
    assert whole_checkpoint(last.path, 4, options) is None
    # The same by more ranks, which divide it otherwise.
    with savers(
        coordinator.endpoint, 3, tmp_path / "none", place=job, options=options, generation=1
    ) as world:
        all_of(world, "begin")
        assert all_of(world, "load") == [(4, True)] * 3


def test_an_upload_of_a_killed_child_is_aborted(server: BucketServer, job: str, tmp_path: Path):
    barrier: Any = FakeBarrier()
    options = server.options() | {"default_block_size": 5 << 20}
    made = Checkpointer(job, barrier=barrier, storage_options=options)
    import torch

    server.spoil(1.0, "slow")
    try:
        made.save(1, {"weight": torch.zeros(8 << 20)})
        uploads = made._storage._objects.uploads  # type: ignore[attr-defined]
        until(uploads)
        made._queue.abort("a test")
    finally:
        server.spoil(0.0)
    with pytest.raises(Exception, match="a test"):
        made.finalize(blocking=True)
    made.close()
    assert uploads() == set()
    assert names(server, job) == []


def test_bucket_checkpoints_are_whole_after_any_kill_or_request_error(tmp_path: Path, thorough: bool):
    saves, ranks = (500, 2) if thorough else (20, 1)
    chaos = SaveChaos(
        seed=6,
        saves=saves,
        ranks=ranks,
        bucket=True,
        bucket_faults=0.03,
        child_odds=0.15 if thorough else 0.3,
        rank_every=(8, 14),
        coordinator_every=15,
    )
    chaos.run(tmp_path)
    print(chaos.account())
    assert chaos.wrong == []
    assert len(chaos.saves_with("scheduled")) >= saves
    assert len(chaos.committed) >= saves / 3
    assert chaos.injected["rank killed"] >= 1
    assert chaos.injected["child killed"] >= 2


# ---------------------------------------------------------------------- bad input


def opened(job: str, server: BucketServer, key: str = "anyone") -> Checkpointer:
    barrier: Any = FakeBarrier()
    return Checkpointer(job, barrier=barrier, storage_options=server.options(key))


def test_where_nothing_can_be_saved_is_said_at_once(server: BucketServer, job: str):
    with pytest.raises(FileNotFoundError, match=r"s3://nowhere/job cannot .*bucket does not exist"):
        opened("s3://nowhere/job", server)
    with pytest.raises(PermissionError, match="Access Denied"):
        opened(job, server, "READER-1")
    with pytest.raises(PermissionError, match="expired"):
        opened(job, server, "EXPIRED-1")


def test_credentials_that_expire_fail_the_save_and_nothing_else(
    server: BucketServer, job: str, monkeypatch: pytest.MonkeyPatch
):
    for name, value in server.environ().items():
        monkeypatch.setenv(name, value)
    barrier: Any = FakeBarrier()
    made = Checkpointer(job, barrier=barrier)
    made.save(1, {"step": 1})
    assert made.finalize(blocking=True) == [1]
    with monkeypatch.context() as expired:
        expired.setenv("AWS_ACCESS_KEY_ID", "EXPIRED-1")  # The child finds credentials for itself.
        made.save(2, {"step": 2})
        with pytest.raises(Exception, match=r"(?s)step 2 was not committed.*token has expired"):
            made.finalize(blocking=True)
    made.save(2, {"step": 2})
    assert made.finalize(blocking=True) == [2]
    into = {"step": 0}
    assert made.load(into).step == into["step"] == 2
    made.close()


def test_credentials_in_a_file_may_be_replaced(
    server: BucketServer, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "credentials"
    for name, value in server.environ().items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    barrier: Any = FakeBarrier()
    keys = [f"{job.rpartition('/')[2]}-{number}" for number in range(4)]
    file.write_text(f"[default]\naws_access_key_id = {keys[0]}\naws_secret_access_key = anything\n")
    made = Checkpointer(job, barrier=barrier, keep_last=1)
    for step, key in enumerate(keys[1:]):
        made.save(step, {"step": step})
        assert made.finalize(blocking=True) == [step]
        last = made.latest()
        file.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = anything\n")
        server.expire(keys[step])
    assert last is not None
    # As a rank does that has asked for nothing since.
    into = {"step": 0}
    assert made.load(into).step == into["step"] == 2
    made.close()


def test_bucket_refuses_a_checkpoint_committed_by_rename(server: BucketServer, job: str):
    server.filesystem().pipe_file(f"{job}/step-0000000007/committed.json", b"{}")
    with pytest.raises(UncommittedError, match=r"step-0000000007/, which was committed by rename"):
        opened(job, server)
    assert names(server, job) == ["step-0000000007"]


def test_a_checkpoint_of_another_version_is_an_error_of_all(server: BucketServer, job: str):
    made = opened(job, server)
    made.save(1, {"step": 1})
    assert made.finalize(blocking=True) == [1]
    name = f"{job}/step-0000000002.0-0-00000000"
    server.filesystem().pipe_file(f"{name}.json", b'{"format": 2}')
    with pytest.raises(LaterVersionError, match="by another version of Muster"):
        made.load({"step": 0})
    assert made.load({"step": 0}, f"{job}/{names(server, job)[0]}").step == 1
    made.close()


def test_damaged_object_lets_a_job_resume_from_the_step_before(
    coordinator: Coordinator, server: BucketServer, job: str, tmp_path: Path, thorough: bool
):
    """A real store refuses a range behind the end of an object that has become shorter."""
    options = server.options()
    with savers(coordinator.endpoint, 2, tmp_path / "none", place=job, options=options) as world:
        all_of(world, "begin")
        for step in (1, 2):
            all_of(world, "save", step=step)
        assert all_of(world, "finalize") == [[1, 2], [1, 2]]

    def resumed() -> int:
        made = Checkpointer(job, barrier=FakeBarrier(), storage_options=options)  # type: ignore[arg-type]
        weight = torch.zeros_like(weight_at(0))
        into = {"weight": weight, "step": -1}
        found = made.resume(into)
        made.close()
        assert found is not None
        assert torch.equal(weight, weight_at(found.step))
        assert into["step"] == found.step
        return found.step

    store, below = server.filesystem(), job.removeprefix("s3://")
    whole: dict[str, bytes] = store.cat(store.find(below))
    newest = [(name, data) for name, data in whole.items() if "step-0000000002" in name and data]
    for number, (name, data) in enumerate(newest):
        kinds = (bytes([data[0] ^ 1]) + data[1:], data[: len(data) // 2], data + b"x")
        for damaged in kinds if thorough else [kinds[number % len(kinds)]]:
            store.pipe_file(name, damaged)
            assert resumed() == 1, name
            for mark in set(store.find(below)) - whole.keys():
                store.rm_file(mark)
            store.pipe_file(name, data)
    assert resumed() == 2
