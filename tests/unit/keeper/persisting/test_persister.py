"""Only verified bytes reach shared storage, and no file there is ever half of one."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from muster.checkpoint.damage import DamageError
from muster.checkpoint.directory import METADATA, CheckpointDirectory
from muster.checkpoint.manifest import MANIFEST, Manifest
from muster.keeper.persisting.destination import Described, LostFilesError
from muster.keeper.persisting.folder import FolderDestination
from muster.keeper.persisting.persister import SharedStoragePersister
from muster.keeper.vocabulary import Head
from tests.support.crashes.stat_faults import StatFaults
from tests.support.keeping.checkpoints import MadeCheckpoint, made_checkpoint

PART = "__0_0.distcp"


@pytest.fixture
def persister() -> Iterator[SharedStoragePersister]:
    with closing(SharedStoragePersister("job")) as made:
        yield made


def head_of(made: MadeCheckpoint) -> Head:
    return Head(made.local().manifest, Manifest.decode(made.manifest))


@pytest.mark.parametrize("name", [MANIFEST, METADATA])
async def test_damaged_head_is_not_persisted(name: str, tmp_path: Path, persister: SharedStoragePersister):
    made, shared = made_checkpoint(world_size=1), tmp_path / "shared"
    checkpoint, head = made.local(persist_to=str(shared)), head_of(made)
    made.write(tmp_path, [0], head=True)
    folder = tmp_path / made.name
    await persister.persist(checkpoint, head, folder, 0)
    damaged = bytearray(made.head[name])
    damaged[10] ^= 1
    (folder / name).write_bytes(damaged)
    with pytest.raises(DamageError) as raised:
        await persister.prepare(checkpoint, head, folder)
    assert raised.value.damage.file == name
    assert not list(shared.rglob(name))
    made.write(tmp_path, [], head=True)
    await persister.prepare(checkpoint, head, folder)
    assert [path.read_bytes() for path in shared.rglob(name)] == [made.head[name]]


async def test_file_that_is_nowhere_is_named(tmp_path: Path, persister: SharedStoragePersister):
    made = made_checkpoint(world_size=1)
    checkpoint, head = made.local(persist_to=str(tmp_path / "shared")), head_of(made)
    made.write(tmp_path, [0], head=True)
    await persister.persist(checkpoint, head, tmp_path / made.name, 0)
    for path in [*(tmp_path / "shared").rglob(PART), tmp_path / made.name / PART]:
        path.unlink()
    with pytest.raises(LostFilesError) as raised:
        await persister.prepare(checkpoint, head, tmp_path / made.name)
    assert raised.value.names == [PART]


async def test_file_that_cannot_be_looked_at_at_first_is_copied(
    tmp_path: Path, persister: SharedStoragePersister, monkeypatch: pytest.MonkeyPatch
):
    made = made_checkpoint(world_size=1)
    checkpoint, head = made.local(persist_to=str(tmp_path / "shared")), head_of(made)
    made.write(tmp_path, [0], head=True)
    faults = StatFaults(monkeypatch, tmp_path / made.name / PART, times=1)
    await persister.prepare(checkpoint, head, tmp_path / made.name)
    assert faults.struck == 1
    assert [path.read_bytes() for path in (tmp_path / "shared").rglob(PART)] == [made.files[PART]]


async def test_committed_checkpoint_that_cannot_be_looked_at_is_not_written_again(
    tmp_path: Path, persister: SharedStoragePersister, monkeypatch: pytest.MonkeyPatch
):
    made = made_checkpoint(world_size=1)
    checkpoint, head = made.local(persist_to=str(tmp_path / "shared")), head_of(made)
    made.write(tmp_path, [0], head=True)
    await persister.persist(checkpoint, head, tmp_path / made.name, 0)
    await persister.prepare(checkpoint, head, tmp_path / made.name)
    path = await persister.commit(checkpoint, head, [])
    StatFaults(monkeypatch, Path(path), links_only=True)
    assert await persister.prepare(checkpoint, head, tmp_path / made.name) == path


def test_writer_that_has_lost_its_turn_leaves_a_finished_file_whole(tmp_path: Path):
    made = made_checkpoint(world_size=1)
    checkpoint = made.local(persist_to=str(tmp_path))
    first, second = (
        FolderDestination(CheckpointDirectory(tmp_path, "job"), Described(checkpoint, "job"))
        for _ in range(2)
    )
    first.enter(0)
    data = made.files[PART]
    seen: list[dict[str, int]] = []

    def slow() -> Iterator[memoryview]:
        yield memoryview(data)[:1_000]
        second.write(PART, [memoryview(data)])
        seen.append(dict(second.sizes()))
        yield memoryview(data)[1_000:2_000]
        raise OSError("this node is cut off")

    with pytest.raises(OSError, match="cut off"):
        first.write(PART, slow())
    assert seen[0][PART] == len(data)
    assert dict(second.sizes()) == {PART: len(data)}
