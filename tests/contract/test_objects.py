"""What the protocol of checkpoints in a bucket takes for granted, of each kind of store that runs here."""

import errno
import os
from collections.abc import Iterator
from uuid import uuid4

import pytest

from lab.processes.bucket_server import BUCKET, BucketServer
from muster.checkpoint.bucket.fsspec_objects import FsspecObjects
from tests.support.expect import raising


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BucketServer]:
    with BucketServer(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(params=["memory", "s3"])
def objects(request: pytest.FixtureRequest) -> FsspecObjects:
    if request.param == "memory":
        return FsspecObjects(f"memory://{uuid4().hex}", {})
    server: BucketServer = request.getfixturevalue("server")
    return FsspecObjects(f"s3://{BUCKET}/{uuid4().hex}/", server.options())


def test_nothing_is_there_at_first(objects: FsspecObjects):
    assert objects.names() == set()
    assert objects.sizes("folder") == {}
    assert objects.uploads() == set()
    with pytest.raises(FileNotFoundError, match=objects.url):
        objects.get("name")
    objects.remove(["name", "folder/name"])
    objects.abort_uploads("folder")


def test_created_object_is_visible_at_once(objects: FsspecObjects):
    objects.put("verdict.json", b"{}")
    for number in range(10):  # More than are on a page.
        objects.put(f"folder/{number}", b"x" * number)
    objects.put("folder/below/it", b"123")
    objects.put("folder-2/it", b"")
    assert objects.names() == {"verdict.json", "folder/", "folder-2/"}
    assert objects.sizes("folder") == {str(number): number for number in range(10)} | {"below/it": 3}
    assert objects.get("verdict.json") == b"{}"
    found = objects.get_all(["folder/3", "none", "folder/1"])
    assert found == {"folder/3": b"xxx", "folder/1": b"x"}
    assert objects.get_all(["none"]) == objects.get_all([]) == {}
    objects.put("verdict.json", b"other")
    assert objects.get("verdict.json") == b"other"


def test_message_is_encoded_once(objects: FsspecObjects):
    assert objects.check_exclusive()
    assert objects.create("name", b"first")
    assert not objects.create("name", b"second")
    assert objects.get("name") == b"first"
    objects.remove(["name"])
    assert objects.create("name", b"third")


def test_removed_object_is_gone_at_once(objects: FsspecObjects):
    for number in range(10):
        objects.put(f"folder/{number}", b"")
    objects.remove(["folder/3", "folder/none"])
    assert sorted(objects.sizes("folder")) == ["0", "1", "2", "4", "5", "6", "7", "8", "9"]
    objects.remove(f"folder/{number}" for number in range(10))
    assert objects.names() == set()


def test_probe_leaves_nothing(objects: FsspecObjects):
    objects.check()
    assert objects.check_exclusive()
    assert objects.names() == set()


def test_store_without_exclusive_writes_is_known(objects: FsspecObjects, monkeypatch: pytest.MonkeyPatch):
    pipe = objects._fs.pipe_file

    def overwrite(path: str, data: bytes, mode: str = "") -> None:
        pipe(path, data)

    monkeypatch.setattr(objects._fs, "pipe_file", overwrite)
    assert not objects.check_exclusive()
    assert objects.names() == set()
    assert objects.create("name", b"first")
    assert not objects.create("name", b"second")
    assert objects.get("name") == b"first"


def test_error_of_a_store_without_exclusive_writes_is_not_taken_for_absence(
    objects: FsspecObjects, monkeypatch: pytest.MonkeyPatch
):
    pipe = objects._fs.pipe_file
    monkeypatch.setattr(objects._fs, "pipe_file", lambda path, data, mode="": pipe(path, data))
    assert not objects.check_exclusive()
    assert objects.create("name", b"first")
    with monkeypatch.context() as patched:
        patched.setattr(objects._fs, "info", raising(OSError, errno.EIO, os.strerror(errno.EIO)))
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            objects.create("name", b"second")
    assert objects.get("name") == b"first"


def test_store_that_refuses_such_writes_is_known(objects: FsspecObjects, monkeypatch: pytest.MonkeyPatch):
    pipe = objects._fs.pipe_file

    def refuse(path: str, data: bytes, mode: str = "overwrite") -> None:
        if mode == "create":
            raise OSError(errno.ENOSYS, "NotImplemented")
        pipe(path, data)

    monkeypatch.setattr(objects._fs, "pipe_file", refuse)
    objects.check()
    assert not objects.check_exclusive()
    assert objects.create("name", b"first")
    assert not objects.create("name", b"second")


def test_sweep_beside_it_takes_no_store_for_another(objects: FsspecObjects, monkeypatch: pytest.MonkeyPatch):
    create = objects.create
    swept: list[str] = []

    def sweep_first(name: str, data: bytes) -> bool:
        if len(swept) < 2:
            objects.remove([name])
            swept.append(name)
        return create(name, data)

    monkeypatch.setattr(objects, "create", sweep_first)
    assert objects.check_exclusive()


def test_failing_removal_or_listing_is_reported_at_once(
    objects: FsspecObjects, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patched:
        patched.setattr(objects._fs, "rm_file", lambda _: None)
        with pytest.raises(OSError, match="is not removed"):
            objects.check()
    monkeypatch.setattr(objects._fs, "ls", lambda *_, **__: [])
    with pytest.raises(OSError, match="is not listed"):
        objects.check()


def test_forked_child_asks_for_itself(objects: FsspecObjects):
    objects.put("name", b"of the parent")
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if objects.get("name") == b"of the parent" else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# ---------------------------------------------------------------------- S3 alone


def test_uploads_that_were_not_completed_are_found_and_ended(server: BucketServer):
    objects = FsspecObjects(f"s3://{BUCKET}/uploads", server.options())
    other = FsspecObjects(f"s3://{BUCKET}/uploads-of-others", server.options())
    for some in (objects, other):
        for folder in ("one", "two"):
            begin_upload(server, f"{some.url}/{folder}/part")
    assert objects.uploads() == {"one", "two"}
    objects.abort_uploads("one")
    assert objects.uploads() == {"two"}
    assert other.uploads() == {"one", "two"}


def begin_upload(server: BucketServer, url: str) -> None:
    bucket, _, key = url.removeprefix("s3://").partition("/")
    server.filesystem().call_s3("create_multipart_upload", Bucket=bucket, Key=key)


@pytest.mark.parametrize(
    ("key", "error", "said"),
    [
        ("EXPIRED-1", PermissionError, r"s3://checkpoints/job cannot .*expired.*credentials of this process"),
        ("READER-1", PermissionError, r"s3://checkpoints/job cannot .*Access Denied.*write"),
    ],
)
def test_caller_that_may_not_write_hears_so_at_once(
    server: BucketServer, key: str, error: type[OSError], said: str
):
    with pytest.raises(error, match=said):
        FsspecObjects(f"s3://{BUCKET}/job", server.options(key)).check()


def test_bucket_that_is_not_there_is_named(server: BucketServer):
    with pytest.raises(FileNotFoundError, match=r"s3://nowhere/job cannot .*bucket does not exist"):
        FsspecObjects("s3://nowhere/job", server.options()).check()


def test_requests_outlast_a_bad_network(server: BucketServer):
    objects = FsspecObjects(f"s3://{BUCKET}/bad-network", server.options())
    server.spoil(0.2, "cut before", "cut after", "503")
    try:
        made = [objects.create(f"{number}", b"data") for number in range(10)]
    finally:
        server.spoil(0.0)
    assert objects.names() == {str(number) for number in range(10)}
    # Who did not hear of what it has made takes it for another's; the protocol looks.
    assert True in made
