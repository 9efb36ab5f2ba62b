"""The ``muster`` command on local checkpoints and keepers: real streams of keepers that keep no files."""

import json
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from lab.keepers import Keeper, save
from lab.processes.command import ended, job, muster, output, watching
from lab.processes.coordinator import Coordinator


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    with Coordinator(tmp_path, state="memory:") as running:
        yield running


@pytest.fixture
def keepers(coordinator: Coordinator) -> Iterator[list[Keeper]]:
    with grpc.insecure_channel(coordinator.endpoint) as channel:
        all_of_them = [Keeper(channel, number, 3, domain=f"rack-{number}") for number in range(3)]
        yield all_of_them
        for keeper in all_of_them:
            keeper.close()


def test_checkpoints_show_copies_and_the_cost_of_a_loss(coordinator: Coordinator, keepers: list[Keeper]):
    save(keepers, 340, 17)
    save(keepers, 350, 18, copies=False)
    keepers[1].follow(18)
    header, newest, before = output(coordinator.endpoint, "get", "checkpoints", "job1").splitlines()
    assert header.split() == ["STEP", "ATTEMPT", "LEVEL", "AGE", "SIZE", "COPIES", "PENDING", "LOSS"]
    assert newest.startswith("350    1-18      LOCAL")
    assert "1-2 nodes each   parts of ranks" in newest
    assert " loses it" in newest
    assert before.startswith("340    1-17      REPLICATED")
    assert "2 nodes each" in before
    found = json.loads(output(coordinator.endpoint, "get", "checkpoints", "job1", "-o", "json"))
    assert [one["checkpoint"]["step"] for one in found["checkpoints"]] == ["350", "340"]
    assert len(found["keepers"]) == 3


def test_keepers_show_where_their_copies_go(coordinator: Coordinator, keepers: list[Keeper]):
    header, *rows = output(coordinator.endpoint, "get", "keepers", "job1").splitlines()
    assert header.split() == ["NODE", "STATE", "RANKS", "COPIES", "TO", "DISK", "DOMAIN", "VERSION"]
    assert [row.split()[:3] for row in rows] == [
        [f"node-{number}", "CONNECTED", str(number)] for number in range(3)
    ]
    assert all("1.0 GiB of 4.0 GiB (25%)" in row for row in rows)
    targets = {row.split()[3] for row in rows}
    assert targets <= {"node-0", "node-1", "node-2"}
    wide = output(coordinator.endpoint, "get", "keepers", "job1", "-o", "wide")
    assert "http://10.0.0.2:40123" in wide


def test_watches_print_what_changes(coordinator: Coordinator, keepers: list[Keeper]):
    options = ["job1", "--watch", "--interval=0.1"]
    save(keepers, 340, 17)
    with (
        watching(coordinator.endpoint, "get", "checkpoints", *options) as table,
        watching(coordinator.endpoint, "get", "keepers", *options, "-o", "json") as lines,
    ):
        assert table.stdout.readline().split()[0] == "STEP"
        assert table.stdout.readline().split()[:3] == ["340", "1-17", "REPLICATED"]
        for _ in keepers:
            assert json.loads(lines.stdout.readline())["connected"] is True
        keepers[2].close()
        assert "losing node-" in table.stdout.readline()
        assert json.loads(lines.stdout.readline())["connected"] is False
        assert ended(table) == (130, "")
        assert ended(lines) == (130, "")


@pytest.mark.parametrize("kind", ["checkpoints", "keepers"])
def test_run_without_local_checkpoints_is_no_failure(coordinator: Coordinator, kind: str):
    with job(coordinator):
        done = muster(coordinator.endpoint, "get", kind, "job1")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith(f"run job1 has no {'local ' if kind == 'checkpoints' else ''}{kind} on ")
    assert "\n  next: give its Checkpointer a folder on the nodes" in done.stderr


def test_doctor_checks_the_keepers_of_a_run(coordinator: Coordinator, keepers: list[Keeper]):
    save(keepers, 340, 17)
    *_, connected, space, step, bandwidth, domains = output(
        coordinator.endpoint, "doctor", "job1"
    ).splitlines()
    assert connected.split(maxsplit=2) == ["ok", "keepers", "3 of 3 are connected"]
    assert space.split()[:2] == ["warning", "space"]
    assert (
        "1.0 GiB of 4.0 GiB (25%); 3 checkpoints with their copies need about 6.0 GiB on each node" in space
    )
    assert "next: raise the quota (MUSTER_LOCAL_QUOTA)" in step
    assert bandwidth.split()[:2] == ["ok", "bandwidth"]
    assert domains.split(maxsplit=2) == ["ok", "domains", "the connected nodes are in 3"]
    without = output(coordinator.endpoint, "doctor")
    assert "keepers" not in without


def test_unknown_run_is_refused(coordinator: Coordinator):
    done = muster(coordinator.endpoint, "get", "checkpoints", "job9")
    assert (done.returncode, done.stdout) == (1, "")
    assert "job9" in done.stderr
