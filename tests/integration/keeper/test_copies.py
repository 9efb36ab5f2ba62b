"""Keepers copy parts from one another over real sockets, and trust only what they have verified."""

import os
import signal
from pathlib import Path

import pytest

from lab.patience import PATIENCE, until
from lab.processes.keeper import Keeper, ask
from muster.checkpoint.manifest import MANIFEST
from tests.support.keeping.checkpoints import MadeCheckpoint, made_checkpoint
from tests.support.keeping.fake_service import TOKEN, FakeService
from tests.support.keeping.nodes import Nodes, order


def _saved(service: FakeService, a: Keeper, b: Keeper, made: MadeCheckpoint) -> None:
    """Both ranks have written, rank 0 has committed, and each keeper is to hold both parts."""
    made.write(a.folder, [0], head=True)
    made.write(b.folder, [1])
    from_a, from_b = service.source(a.id, 0), service.source(b.id, 1)
    service.push(a.id, order(made, [0, 1], from_b))
    service.push(b.id, order(made, [0, 1], from_a))


def _flip(path: Path, offset: int = 1_000) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def _check(keeper: Keeper, made: MadeCheckpoint) -> None:
    assert made.differing(keeper.folder / made.name) == []


def test_each_keeper_holds_its_own_part_and_the_copy_of_its_peer(nodes: Nodes, service: FakeService):
    a, b = nodes.pair()
    made = made_checkpoint(files=3)
    _saved(service, a, b, made)
    service.holds(a.id, made, [0, 1])
    service.holds(b.id, made, [0, 1])
    _check(a, made)
    _check(b, made)
    assert not list(a.folder.rglob("*.fetch"))


def test_file_larger_than_a_piece_is_copied_whole(nodes: Nodes, service: FakeService):
    a, b = nodes.pair()
    made = made_checkpoint(size=150_000_001)
    _saved(service, a, b, made)
    service.holds(b.id, made, [0, 1])
    _check(b, made)
    (url,) = service.keepers[b.id].transfers
    transfer = service.keepers[b.id].transfers[url]
    assert url == service.url(a.id)
    assert transfer.bytes >= 150_000_001
    assert 0 < transfer.elapsed_ms < PATIENCE * 1000


def test_part_damaged_on_its_own_node_is_fetched_from_a_copy(nodes: Nodes, service: FakeService):
    a, b = nodes.pair()
    made = made_checkpoint()
    _saved(service, a, b, made)
    service.holds(b.id, made, [0, 1])
    service.holds(a.id, made, [0, 1])
    a.kill()
    service.gone(a.id)
    _flip(a.folder / made.name / "__0_0.distcp")
    service.push(a.id, order(made, [0, 1], service.source(b.id, 0, 1)))
    a.start()
    service.holds(a.id, made, [0, 1])
    _check(a, made)
    assert "is damaged" in a.log


def test_damaged_source_is_named_and_another_one_is_asked(nodes: Nodes, service: FakeService):
    a, b, c = nodes.add("a", ranks=[0]), nodes.add("b", ranks=[1]), nodes.add("c")
    made = made_checkpoint()
    _saved(service, a, b, made)
    service.holds(a.id, made, [0, 1])
    service.holds(b.id, made, [0, 1])
    damaged = a.folder / made.name / "__0_0.distcp"
    changed = damaged.stat()
    _flip(damaged)
    os.utime(damaged, ns=(changed.st_atime_ns, changed.st_mtime_ns))  # As a disk does it.
    service.push(a.id, order(made, [0, 1]))
    # Whichever source it asks first: it has no whole copy from the damaged one.
    service.push(c.id, order(made, [0], service.source(a.id, 0)))
    c.logged(f"{service.url(a.id)} sent a damaged copy")
    service.holds(a.id, made, [1])  # It was asked to verify its file again.
    service.push(c.id, order(made, [0], service.source(a.id, 0), service.source(b.id, 0)))
    service.holds(c.id, made, [0])
    assert (c.folder / made.name / "__0_0.distcp").read_bytes() == made.files["__0_0.distcp"]


def test_killed_keeper_holds_after_its_restart_what_it_has_verified_again(nodes: Nodes, service: FakeService):
    a, b = nodes.pair()
    made = made_checkpoint()
    _saved(service, a, b, made)
    service.holds(b.id, made, [0, 1])
    old = b.id
    b.kill()
    service.gone(old)
    _flip(b.folder / made.name / "__1_0.distcp")
    service.push(old, order(made, []))
    b.start()
    service.connected(old)
    assert service.held(b.id, made) == [0]
    assert b.id == old


def test_keeper_killed_while_it_fetches_goes_on_after_its_restart(nodes: Nodes, service: FakeService):
    a, b = nodes.pair()
    made = made_checkpoint(size=300_000_000)
    _saved(service, a, b, made)
    part = b.folder / made.name / ".__0_0.distcp.fetch"
    until(lambda: part.exists() and part.stat().st_size > 1_000_000)
    b.kill()
    assert not (b.folder / made.name / "__0_0.distcp").exists()
    b.start()
    service.holds(b.id, made, [0, 1])
    _check(b, made)


def test_keeper_survives_a_restart_of_the_coordinator(nodes: Nodes, service: FakeService):
    a, b = nodes.pair()
    made = made_checkpoint()
    _saved(service, a, b, made)
    service.holds(b.id, made, [0, 1])
    service.stop()
    service.start()
    service.connected(a.id, b.id)
    assert list(service.keepers[b.id].request.attachment.ranks) == [1]
    service.holds(b.id, made, [0, 1])


def test_report_that_is_refused_is_repeated_on_another_stream(nodes: Nodes, service: FakeService):
    a, b = nodes.pair()
    made = made_checkpoint()
    service.refusing = True
    _saved(service, a, b, made)
    until(lambda: "not connected" in b.log)
    service.refusing = False
    service.holds(b.id, made, [0, 1])


def test_attempts_that_are_forgotten_are_deleted_and_later_ones_stay(nodes: Nodes, service: FakeService):
    a, b = nodes.pair()
    first, second, third = (made_checkpoint(number=number) for number in range(3))
    _saved(service, a, b, first)
    service.holds(a.id, first, [0, 1])
    second.write(a.folder, [0], head=True)
    third.write(a.folder, [0])
    service.push(a.id, order(second, [0]), forget_before=(1, 2))
    service.holds(a.id, first, [])
    service.holds(a.id, second, [0])
    until(lambda: not (a.folder / first.name).exists())
    assert (a.folder / third.name).exists()
    assert not list(a.folder.glob(".removed*"))


def test_copy_beyond_the_quota_is_refused_with_figures(nodes: Nodes, service: FakeService):
    a, b = nodes.add("a", ranks=[0]), nodes.add("b", "--quota=500000", ranks=[1])
    made = made_checkpoint(size=400_000)
    _saved(service, a, b, made)
    service.holds(b.id, made, [1])
    b.logged("no room for the copy 1-0/__0_0.distcp (400,000 bytes)")
    b.logged("of its quota of 500,000 bytes")
    service.holds(a.id, made, [0, 1])
    assert service.keepers[b.id].disk.quota == 500_000
    # A rank that recovers gets it all the same.
    assert b.post("/fetch", attempt=made.name, name="__0_0.distcp").status == 200
    service.holds(b.id, made, [0, 1])


def test_rank_fetches_a_part_that_its_keeper_was_not_told_to_hold(nodes: Nodes, service: FakeService):
    a, b, c = nodes.add("a", ranks=[0]), nodes.add("b", ranks=[1]), nodes.add("c")
    made = made_checkpoint()
    _saved(service, a, b, made)
    service.holds(a.id, made, [0, 1])
    service.push(c.id, order(made, [], service.source(a.id, 0, 1)))
    for name in made.files:
        answer = c.post("/fetch", attempt=made.name, name=name)
        assert (answer.status, Path(answer.said["path"]).read_bytes()) == (200, made.files[name])
    service.holds(c.id, made, [0, 1])
    assert c.post("/fetch", attempt=made.name, name="__7_0.distcp").status == 404
    assert c.post("/fetch", attempt=made.name, name="../x").status == 404


def test_rank_learns_why_a_file_cannot_be_fetched(nodes: Nodes, service: FakeService):
    a, b, c = nodes.add("a", ranks=[0]), nodes.add("b", ranks=[1]), nodes.add("c")
    made = made_checkpoint()
    _saved(service, a, b, made)
    service.holds(a.id, made, [0, 1])
    gone = service.source(b.id, 1)
    service.push(c.id, order(made, [], service.source(a.id, 0), gone))
    assert c.post("/fetch", attempt=made.name, name=MANIFEST).status == 200
    b.kill()
    silent = c.post("/fetch", attempt=made.name, name="__1_0.distcp")
    assert (silent.status, gone.url in silent.said["error"]) == (503, True)
    service.push(c.id, order(made, [], service.source(a.id, 0)))
    until(lambda: c.post("/fetch", attempt=made.name, name="__1_0.distcp").status == 404)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_keeper_that_is_told_to_stop_leaves_its_folder_to_another(
    nodes: Nodes, service: FakeService, number: int
):
    a = nodes.add("a", ranks=[0])
    other = Keeper(a.folder.parent, service.endpoint)
    other.launch()
    assert other.ended() == 1
    assert "another keeper runs in" in other.log
    a.signal(number)
    assert a.ended() == 0
    assert not (a.folder / "keeper.json").exists()
    a.start()


def test_address_of_a_keeper_is_for_its_user_alone(nodes: Nodes, service: FakeService):
    a = nodes.add("a")
    assert (a.folder / "keeper.json").stat().st_mode & 0o777 == 0o600
    assert a.address["id"] == a.id
    assert a.address["pid"] == a.pid


def test_peer_is_served_only_with_the_token_of_the_run(nodes: Nodes, service: FakeService):
    a, b = nodes.pair()
    made = made_checkpoint()
    _saved(service, a, b, made)
    service.holds(a.id, made, [0, 1])
    url, path = service.url(a.id), f"/files/{made.name}/__0_0.distcp"
    assert ask(url, "GET", path, TOKEN).body == made.files["__0_0.distcp"]
    part = ask(url, "GET", path, TOKEN, headers={"Range": "bytes=100-199"})
    assert (part.status, part.body) == (206, made.files["__0_0.distcp"][100:200])
    for token in ("", "another", TOKEN[:-1], f"{TOKEN}x", a.address["token"][1:]):
        assert ask(url, "GET", path, token).status == 401
    for method, other in (("POST", "/attach"), ("POST", "/take"), ("POST", "/fetch"), ("GET", "/status")):
        assert ask(url, method, other, TOKEN).status == 404  # They are for the node's ranks alone.
        assert ask(a.address["url"], method, other, TOKEN).status == 401


@pytest.mark.parametrize(
    "path",
    [
        "/files/1-0/../keeper.json",
        "/files/1-0/..%2fkeeper.json",
        "/files/1-0/%2e%2e%2fkeeper.json",
        "/files/%2e%2e/keeper.json",
        "/files/../keeper.json",
        "/files/1-0/%2fetc%2fpasswd",
        "/files/1-0/.notes",
        "/files/1-0/.notes%2fnote",
        "/files/1-0/link",
        "/files/1-0/",
        "/files/1-0/.",
        "/files/01-0/__0_0.distcp",
        "/notes/1-0/..%2f..%2fkeeper.json",
        "/notes/1-0/..%2f__0_0.distcp",
        "/notes/1-0/%00",
        "/notes/1-0/link",
        "/notes/9-9/note",
    ],
)
def test_path_that_leads_out_of_an_attempt_is_refused(nodes: Nodes, service: FakeService, path: str):
    a = nodes.add("a", ranks=[0], world_size=1)
    made = made_checkpoint(world_size=1)
    made.write(a.folder, [0], head=True)
    notes = a.folder / made.name / ".notes"
    notes.mkdir()
    (notes / "note").write_text("a note")
    for folder in (notes, a.folder / made.name):
        (folder / "link").symlink_to(a.folder / "keeper.json")
    service.push(a.id, order(made, [0]))
    service.holds(a.id, made, [0])
    url = service.url(a.id)
    assert ask(url, "GET", "/notes/1-0/note", TOKEN).body == b"a note"
    answer = ask(url, "GET", path, TOKEN)
    assert answer.status == 404
    assert b"token" not in answer.body
