"""Keepers copy parts to shared storage, where a ``Checkpointer`` without keepers finds a checkpoint."""

import json
import os
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from lab.patience import until
from lab.processes.bucket_server import BUCKET, BucketServer
from lab.processes.keeper import Keeper
from muster.checkpoint.bucket.fsspec_objects import FsspecObjects
from muster.checkpoint.bucket.protocol import CheckpointBucket
from muster.checkpoint.bucket.source import BucketSource
from muster.checkpoint.committed import MARKER, Committed
from muster.checkpoint.directory import METADATA, CheckpointDirectory
from muster.checkpoint.manifest import MANIFEST
from muster.checkpoint.source import FolderSource, Source
from muster.checkpoint.verification import read_manifest, verify
from tests.support.keeping.checkpoints import MadeCheckpoint, made_checkpoint
from tests.support.keeping.fake_service import FakeService
from tests.support.keeping.nodes import Nodes, order


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BucketServer]:
    with BucketServer(tmp_path_factory.mktemp("server")) as running:
        yield running


class Persisted:
    """Two nodes whose keepers persist what their ranks have written.

    Args:
        nodes: of the test.
        service: of the test.
        where: the shared storage.
        environment: of the keepers.
        extra: their further arguments.
    """

    def __init__(
        self,
        nodes: Nodes,
        service: FakeService,
        where: str,
        *extra: str,
        environment: dict[str, str] | None = None,
        keep: int = 0,
    ) -> None:
        self._service = service
        self._where = where
        self._keep = keep
        self.a = nodes.add("a", *extra, ranks=[0], environment=environment)
        self.b = nodes.add("b", *extra, ranks=[1], environment=environment)

    def order(
        self, made: MadeCheckpoint, keeper: Keeper, *, commit: bool = False, persist: bool = True
    ) -> None:
        """Order what the coordinator would."""
        rank = 0 if keeper is self.a else 1
        source = self._service.source((self.b if rank == 0 else self.a).id, 1 - rank)
        self._service.push(
            keeper.id,
            order(
                made,
                [rank],
                source,
                persist=[rank] if persist else [],
                persist_to=self._where,
                keep_persisted=self._keep,
                commit=commit,
            ),
        )

    def copied(self, made: MadeCheckpoint, keeper: Keeper) -> None:
        """Wait until a keeper has reported its part."""
        rank = 0 if keeper is self.a else 1
        until(
            lambda: list(self.reported(made, keeper)) == [rank],
            lambda: f"it is not persisted:\n{keeper.log}",
        )

    def reported(self, made: MadeCheckpoint, keeper: Keeper) -> list[int]:
        """The parts that a keeper has reported to be in shared storage."""
        holding = self._service.holding(keeper.id, made)
        return [] if holding is None else list(holding.persisted_ranks)

    def committed(self, made: MadeCheckpoint, keeper: Keeper) -> str:
        """Wait until a keeper has committed; return the path that it reports."""

        def path() -> str:
            holding = self._service.holding(keeper.id, made)
            return "" if holding is None else holding.persisted_as

        until(path, lambda: f"it is not committed:\n{keeper.log}")
        return path()

    def save(self, made: MadeCheckpoint) -> str:
        """Save, persist and commit."""
        made.write(self.a.folder, [0], head=True)
        made.write(self.b.folder, [1])
        for keeper in (self.a, self.b):
            self.order(made, keeper)
        for keeper in (self.a, self.b):
            self.copied(made, keeper)
        self.order(made, self.b, commit=True)
        return self.committed(made, self.b)


def _check(source: Source, committed: Committed, made: MadeCheckpoint) -> None:
    manifest = read_manifest(source, committed.manifest)
    assert manifest is not None
    assert manifest.encode() == made.manifest
    found = list(verify(source, manifest, 2))
    assert [one.file for one in found] == sorted(set(made.files) - {MANIFEST})
    assert [damage for one in found for damage in one.damages] == []
    facts = (committed.step, committed.world_size, committed.run_id, committed.prefix, committed.sequence)
    assert facts == (made.step, len(made.parts), "job", "save", made.attempt.number)


def _check_folder(shared: Path, path: str, made: MadeCheckpoint) -> None:
    committed = CheckpointDirectory(shared, "job").read(Path(path))
    _check(FolderSource(Path(path)), committed, made)
    assert {one.name for one in Path(path).iterdir()} == {*made.files, MARKER}


def test_parts_of_two_nodes_become_one_checkpoint_in_a_folder(
    nodes: Nodes, service: FakeService, tmp_path: Path
):
    shared = tmp_path / "shared"
    job = Persisted(nodes, service, str(shared))
    made = made_checkpoint(files=2)
    path = job.save(made)
    assert path == str(shared / "step-0000000010")
    assert [one.name for one in shared.iterdir()] == ["step-0000000010"]
    _check_folder(shared, path, made)


def test_folder_keeps_the_newest_checkpoints_and_no_remains(
    nodes: Nodes, service: FakeService, tmp_path: Path
):
    shared = tmp_path / "shared"
    job = Persisted(nodes, service, f"file://{shared}", keep=2)
    unfinished = CheckpointDirectory(shared, "job").unfinished(5, made_checkpoint().attempt)
    unfinished.mkdir()
    mades = [made_checkpoint(number=number) for number in range(3)]
    paths = [job.save(made) for made in mades]
    until(lambda: sorted(one.name for one in shared.iterdir()) == ["step-0000000020", "step-0000000030"])
    _check_folder(shared, paths[2], mades[2])
    assert [one.order for one in CheckpointDirectory(shared).all()] == [2, 3]


def test_keeper_killed_while_it_copies_goes_on_and_copies_nothing_twice(
    nodes: Nodes, service: FakeService, tmp_path: Path
):
    shared = tmp_path / "shared"
    job = Persisted(nodes, service, str(shared), "--upload-rate=2000000")
    made = made_checkpoint(files=4, size=600_000)
    made.write(job.a.folder, [0], head=True)
    made.write(job.b.folder, [1])
    job.order(made, job.a)
    unfinished = CheckpointDirectory(shared, "job").unfinished(made.step, made.attempt)
    first, last = unfinished / "__0_0.distcp", unfinished / "__0_3.distcp"
    until(lambda: first.exists() and first.stat().st_size == 600_000 and not last.exists())
    until(lambda: (unfinished / "__0_1.distcp").exists())
    job.a.kill()
    service.gone(job.a.id)
    written = first.stat().st_mtime_ns
    assert not last.exists()
    job.a.start()
    job.copied(made, job.a)
    assert first.stat().st_mtime_ns == written
    job.order(made, job.b)
    job.copied(made, job.b)
    job.order(made, job.a, commit=True)
    _check_folder(shared, job.committed(made, job.a), made)


def test_keeper_killed_after_its_commit_reports_it(nodes: Nodes, service: FakeService, tmp_path: Path):
    job = Persisted(nodes, service, str(tmp_path / "shared"))
    made = made_checkpoint()
    path = job.save(made)
    job.b.kill()
    service.gone(job.b.id)
    job.b.start()
    assert job.committed(made, job.b) == path


def test_commit_without_a_permit_does_not_take_place(nodes: Nodes, service: FakeService, tmp_path: Path):
    shared = tmp_path / "shared"
    job = Persisted(nodes, service, str(shared))
    service.permits_nothing = True
    made = made_checkpoint()
    made.write(job.a.folder, [0], head=True)
    made.write(job.b.folder, [1])
    for keeper in (job.a, job.b):
        job.order(made, keeper)
        job.copied(made, keeper)
    job.order(made, job.b, commit=True)
    until(lambda: "a recovery has passed over it" in job.b.log, "it is not refused")
    assert all(one.name.startswith(".step-") for one in shared.iterdir()), "all is there but the commit"
    service.permits_nothing = False
    job.committed(made, job.b)
    assert set(service.permits) == {tuple(made.attempt)}


@pytest.mark.parametrize("is_bucket", [False, True])
def test_older_commit_that_may_still_come_is_prevented_first(
    nodes: Nodes, service: FakeService, tmp_path: Path, server: BucketServer, is_bucket: bool
):
    """Its keeper was permitted, and has stalled: it must not commit after a newer one."""
    where = f"s3://{BUCKET}/{tmp_path.name}" if is_bucket else str(tmp_path / "shared")
    environment = {**os.environ, "MUSTER_STORAGE_OPTIONS": json.dumps(server.options())}
    job = Persisted(nodes, service, where, environment=environment)
    older, newer = [made_checkpoint(number=number) for number in range(2)]
    service.permits_nothing = True
    older.write(job.a.folder, [0], head=True)
    older.write(job.b.folder, [1])
    for keeper in (job.a, job.b):
        job.order(older, keeper)
        job.copied(older, keeper)
    service.permits_nothing = False
    service.unsettled = [older.message(persist_to=where)]
    path = job.save(newer)
    objects = FsspecObjects(where, server.options()) if is_bucket else None
    names = set(objects.names()) if objects else {one.name for one in Path(where).iterdir()}
    newest = path.rpartition("/")[2]
    assert names == ({f"{newest}/", f"{newest}.json"} if is_bucket else {newest})


def test_part_that_vanished_from_shared_storage_is_copied_again_at_the_commit(
    nodes: Nodes, service: FakeService, tmp_path: Path
):
    shared = tmp_path / "shared"
    job = Persisted(nodes, service, str(shared))
    made = made_checkpoint()
    made.write(job.a.folder, [0], head=True)
    made.write(job.b.folder, [1])
    for keeper in (job.a, job.b):
        job.order(made, keeper)
    for keeper in (job.a, job.b):
        job.copied(made, keeper)
    unfinished = CheckpointDirectory(shared, "job").unfinished(made.step, made.attempt)
    (unfinished / "__1_0.distcp").unlink()
    job.order(made, job.a, commit=True)
    _check_folder(shared, job.committed(made, job.a), made)
    job.a.logged("__1_0.distcp of")


def test_shared_folder_that_cannot_be_written_is_named_and_tried_again(
    nodes: Nodes, service: FakeService, tmp_path: Path
):
    shared = tmp_path / "shared"
    shared.write_text("a file is in its place")
    job = Persisted(nodes, service, str(shared))
    made = made_checkpoint()
    made.write(job.a.folder, [0], head=True)
    job.order(made, job.a)
    job.a.logged(f"{shared}")
    service.holds(job.a.id, made, [0])
    shared.unlink()
    job.copied(made, job.a)


def test_parts_of_two_nodes_become_one_checkpoint_in_a_bucket(
    nodes: Nodes, service: FakeService, tmp_path: Path, server: BucketServer
):
    where = f"s3://{BUCKET}/{tmp_path.name}"
    options = json.dumps(server.options())
    environment = {**os.environ, "MUSTER_STORAGE_OPTIONS": options}
    job = Persisted(nodes, service, where, environment=environment, keep=1)
    mades = [made_checkpoint(number=number, files=2) for number in range(2)]
    paths = [job.save(made) for made in mades]
    assert paths[1].startswith(f"{where}/step-0000000020.1-1-")
    objects = FsspecObjects(where, server.options())
    until(lambda: len(objects.names()) == 2, "the older checkpoint is not removed")
    bucket = CheckpointBucket(objects, objects.url, "job")
    committed = bucket.latest()
    assert committed is not None
    assert (committed.path, committed.order) == (paths[1], 2)
    name = paths[1].rpartition("/")[2]
    _check(BucketSource(objects, name), committed, mades[1])
    assert set(objects.sizes(name)) == {*mades[1].files, ".entered-0", ".entered-1"}


def test_copying_thread_gives_way_to_the_training(nodes: Nodes, service: FakeService, tmp_path: Path):
    job = Persisted(nodes, service, str(tmp_path / "shared"))
    job.save(made_checkpoint())
    tasks = [task / "stat" for task in Path(f"/proc/{job.a.pid}/task").iterdir()]
    nices = [int(task.read_text().rpartition(")")[2].split()[16]) for task in tasks]
    assert sorted(nices)[-1] == 19
    assert sorted(nices)[:-1] == [0] * (len(nices) - 1)


def test_committed_files_are_as_readable_as_the_umask_allows(
    nodes: Nodes, service: FakeService, tmp_path: Path
):
    job = Persisted(nodes, service, str(tmp_path / "shared"))
    made = made_checkpoint()
    path = Path(job.save(made))
    modes = {stat.S_IMODE((path / name).stat().st_mode) for name in made.files}
    mask = os.umask(0)
    os.umask(mask)
    assert modes == {0o666 & ~mask}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_checkpoint_of_torch_is_loaded_from_where_a_keeper_persisted_it(
    nodes: Nodes, service: FakeService, tmp_path: Path
):
    torch = pytest.importorskip("torch")
    from muster.worker.saves import Checkpointer

    saved: dict[str, Any] = {"model": {"weight": torch.arange(5_000.0), "bias": torch.ones(7)}, "epoch": 3}
    with closing(Checkpointer(tmp_path / "first")) as checkpointer:
        checkpointer.save(10, saved)
        assert checkpointer.finalize(blocking=True) == [10]
    written = tmp_path / "first" / "step-0000000010"
    files = {one.name: one.read_bytes() for one in written.iterdir() if one.name != MARKER}
    parts = {0: {name: data for name, data in files.items() if name.endswith(".distcp")}}
    made = MadeCheckpoint(
        made_checkpoint().attempt, 10, parts, {name: files[name] for name in (METADATA, MANIFEST)}
    )
    a = nodes.add("a", ranks=[0], world_size=1)
    made.write(a.folder, [0], head=True)
    shared = tmp_path / "shared"
    for commit in (False, True):
        service.push(a.id, order(made, [0], persist=[0], persist_to=str(shared), commit=commit))
        until(lambda: list(getattr(service.holding(a.id, made), "persisted_ranks", [])) == [0], lambda: a.log)
    until(lambda: (shared / "step-0000000010").exists(), lambda: a.log)
    loaded: dict[str, Any] = {"model": {"weight": torch.zeros(5_000), "bias": torch.zeros(7)}, "epoch": 0}
    with closing(Checkpointer(shared)) as checkpointer:
        resumed = checkpointer.resume(loaded)
    assert resumed is not None
    assert (resumed.step, loaded["epoch"]) == (10, 3)
    assert torch.equal(loaded["model"]["weight"], saved["model"]["weight"])
