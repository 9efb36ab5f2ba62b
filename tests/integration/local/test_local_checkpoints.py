"""Jobs that resume from their nodes' disks: real ranks, keepers and coordinator."""

import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from lab.patience import until
from lab.processes.bucket_server import BUCKET, BucketServer
from lab.processes.coordinator import Coordinator
from tests.support.chaos.local_chaos import LocalChaos
from tests.support.chaos.local_torchrun_chaos import LocalTorchrunChaos
from tests.support.saves.local_ranks import LocalJob, local_job


@pytest.fixture
def job(tmp_path: Path, coordinator: Coordinator) -> Iterator[LocalJob]:
    """A job of three nodes."""
    with local_job(tmp_path, coordinator.endpoint, 3) as made:
        yield made


@contextmanager
def small_disk(folder: Path) -> Iterator[Callable[[bool], None]]:
    """A disk of 2 MiB, and what fills it or makes room."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], check=True)

    def fill(is_full: bool) -> None:
        filler = folder / "filler"
        filler.unlink(missing_ok=True)
        if is_full:
            with filler.open("wb", buffering=0) as file, suppress(OSError):
                while True:
                    file.write(bytes(4096))

    try:
        yield fill
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.also_through_relay
def test_job_resumes_without_shared_storage_after_a_node_and_its_disk_are_lost(job: LocalJob):
    assert job.begin(per_node=2) == [None] * 6
    assert job.all("resume") == ["nothing"] * 6
    job.save(1, 2)
    job.save(3, wait_for="replicated")
    job.kill()
    job.kill_keepers()
    job.nodes[1].lose()
    job.hide_shared()
    assert job.begin(per_node=2) == [None] * 6
    assert job.all("resume") == ["step 3, local"] * 6


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")
def test_save_for_which_a_node_has_no_room_goes_to_shared_storage(job: LocalJob):
    node = job.nodes[1]
    with small_disk(node.folder) as fill:
        job.begin(persist_every=100)
        job.save(1)
        fill(True)
        job.save(2)
        until(
            lambda: job.all("level", step=2) == ["persisted"] * 3,
            lambda: f"the levels are {job.all('level', step=2)}",
        )
        log = (node.folder.parent / "rank-1.log").read_text()
        assert "had no room for local copies. rank 1" in log
        fill(False)
        job.save(3)
        until(lambda: job.all("level", step=3)[0] in ("local", "replicated"), "it is not on the nodes")
        job.begin(persist_every=100)
        assert job.all("resume") == ["step 3, local"] * 3
        fill(True)
        job.save(4)
        job.begin(persist_every=100)
        assert job.all("resume") == ["step 4, shared"] * 3
        job.kill()
        job.kill_keepers()


def test_bucket_that_needs_options_is_persisted_to_and_resumed_from(job: LocalJob, tmp_path: Path):
    with BucketServer(tmp_path) as server:
        job.where = f"s3://{BUCKET}/job"
        options: dict[str, Any] = {"storage_options": server.options()}
        job.begin(**options)
        job.save(1, wait_for="persisted")
        job.kill()
        for node in job.nodes:
            node.lose()
        job.begin(**options)
        assert job.all("resume") == ["step 1, shared"] * 3


def test_other_world_sizes_read_the_pieces_that_they_need_from_the_nodes(job: LocalJob):
    assert job.begin(per_node=2) == [None] * 6
    job.save(1, 2, wait_for="replicated")
    job.kill()
    job.nodes[2].lose()
    job.hide_shared()
    assert job.begin(0, 1, per_node=2) == [None] * 4
    assert job.all("resume") == ["step 2, local"] * 4
    job.save(3, wait_for="replicated")
    assert job.begin(0, 1, 2) == [None] * 3
    assert job.all("resume") == ["step 3, local"] * 3
    job.save(4, wait_for="replicated")
    job.kill()
    job.nodes[0].lose()
    assert job.begin(1) == [None]
    assert job.all("resume") == ["step 4, local"]


@pytest.mark.parametrize("name", ["__1_0.distcp", "manifest.json", ".metadata"])
def test_copy_that_is_damaged_while_all_are_down_is_replaced(job: LocalJob, name: str):
    job.begin()
    job.save(1, wait_for="replicated")
    job.kill()
    job.kill_keepers()
    job.nodes[1].flip("0-0", name)
    job.begin()
    assert job.all("resume") == ["step 1, local"] * 3


@pytest.mark.parametrize("name", ["__1_0.distcp", "manifest.json", ".metadata"])
def test_copy_that_is_damaged_after_its_keeper_verified_it_is_replaced(job: LocalJob, name: str):
    job.begin()
    job.save(1, wait_for="replicated")
    job.begin()
    job.nodes[1].flip("0-0", name)
    assert job.all("resume") == ["step 1, local"] * 3


def test_only_copy_on_a_node_that_lost_the_manifest_is_used(job: LocalJob):
    """A node may die after its rank has written, and before the manifest has come from rank 0's node."""
    job.begin(persist_every=100)
    job.save(1, 2, wait_for="replicated")
    job.kill()
    job.kill_keepers()
    for name in ("manifest.json", ".metadata"):
        job.nodes[1].remove("0-1", name)
    for node in (job.nodes[0], job.nodes[2]):
        node.remove("0-1", "__1_0.distcp")
    job.begin(persist_every=100)
    assert job.all("resume") == ["step 2, local"] * 3


def test_step_before_is_resumed_if_all_copies_of_a_part_are_damaged(job: LocalJob):
    job.begin(persist_every=100)
    job.save(1, 2, wait_for="replicated")
    job.begin()
    for node in job.nodes:
        node.flip("0-1", "__1_0.distcp")
    assert job.all("resume") == ["step 1, local"] * 3
    job.save(2, wait_for="replicated")
    job.begin()
    assert job.all("resume") == ["step 2, local"] * 3


def test_keepers_that_die_during_training_are_replaced(job: LocalJob):
    job.begin(persist_every=100)  # The level of step 3 stays "replicated".
    job.save(1, wait_for="replicated")
    job.kill_keepers()
    job.save(2, wait_for="replicated")
    job.nodes[0].kill_keeper()
    job.save(3, wait_for="replicated")
    until(lambda: job.all("level", step=3) == ["replicated"] * 3, "not all keepers hear of the level")
    job.nodes[2].lose()
    job.begin()
    assert job.all("resume") == ["step 3, local"] * 3


def test_keeper_that_dies_before_the_decision_is_replaced(job: LocalJob):
    job.begin()
    job.save(1, wait_for="replicated")
    job.begin()
    job.nodes[1].kill_keeper()
    assert job.all("resume") == ["step 1, local"] * 3


def test_coordinator_that_is_killed_forgets_no_local_checkpoint(job: LocalJob, coordinator: Coordinator):
    job.begin()
    job.save(1, wait_for="replicated")
    coordinator.restart()
    job.save(2, wait_for="replicated")
    job.kill()
    coordinator.restart()
    job.nodes[0].lose()
    job.begin()
    assert job.all("resume") == ["step 2, local"] * 3


def test_node_that_was_away_mixes_nothing_into_a_new_attempt(job: LocalJob):
    """Its part of step 2 is of an attempt that was passed over."""
    job.begin(persist_every=100)
    job.save(1, wait_for="replicated")
    job.save(2)
    away = job.nodes[2]
    job.kill()
    job.kill_keepers()
    kept = away.folder.rename(job.folder / "away")
    for node in job.nodes[:2]:
        node.remove("0-1", "__2_0.distcp")
    job.begin(0, 1)
    assert job.all("resume") == ["step 1, local"] * 2
    job.save(2, 3, wait_for="replicated")
    job.kill()
    kept.rename(away.folder)
    job.begin()
    assert job.all("resume") == ["step 3, local"] * 3
    job.save(4, wait_for="replicated")
    job.begin()
    assert job.all("resume") == ["step 4, local"] * 3


def test_job_that_loses_all_nodes_resumes_from_shared_storage(job: LocalJob):
    job.begin(persist_every=2)
    job.save(1, 2)
    job.save(3, wait_for="persisted")
    until(lambda: job.all("level", step=3) == ["persisted"] * 3, "not all keepers hear of the level")
    job.save(4, wait_for="replicated")
    job.kill()
    for node in job.nodes:
        node.lose()
    job.begin()
    assert job.all("resume") == ["step 3, shared"] * 3
    job.save(4, wait_for="persisted")
    job.kill()
    for node in job.nodes:
        node.lose()
    job.begin(0, 1)
    assert job.all("resume") == ["step 4, shared"] * 2


def test_step_that_another_life_persisted_is_saved_again(job: LocalJob):
    """The job goes back to local step 1, and makes another step 2 than shared storage has."""
    job.begin()
    job.save(1, wait_for="persisted")
    job.begin()
    assert job.all("resume") == ["step 1, local"] * 3
    job.save(2, wait_for="persisted")
    job.hide_shared()
    job.begin()
    assert job.all("resume") == ["step 2, local"] * 3


def test_job_resumes_from_what_the_model_allows_after_many_faults(tmp_path: Path):
    chaos = LocalChaos(seed=7, rounds=3).run(tmp_path)
    assert chaos.wrong == []


@pytest.mark.timeout(3600)
def test_job_under_torchrun_resumes_from_an_allowed_step_after_many_faults(tmp_path: Path, thorough: bool):
    chaos = LocalTorchrunChaos(seed=3, faults=300 if thorough else 6).run(tmp_path)
    print(chaos.account())
    assert chaos.wrong == []


@pytest.mark.timeout(900)
def test_killed_keepers_delay_a_load_but_do_not_change_it(job: LocalJob, thorough: bool):
    """One node has lost its disk, and a keeper dies at any moment of the resume."""
    chance = random.Random(33)
    job.begin(persist_every=1000)
    job.save(1, wait_for="replicated")
    for step in range(2, 42 if thorough else 6):
        job.save(step, wait_for="replicated")
        job.kill()
        job.nodes[chance.randrange(3)].lose()
        victim = job.nodes[chance.randrange(3)]
        job.begin(persist_every=1000)
        for rank in job.ranks:
            rank.tell("resume")
        time.sleep(chance.uniform(0.0, 0.3))
        victim.kill_keeper()
        assert [rank.answer() for rank in job.ranks] == [f"step {step}, local"] * 3


@pytest.mark.timeout(900)
def test_keepers_that_die_while_ranks_save_fail_no_save(job: LocalJob, thorough: bool):
    chance = random.Random(34)
    job.begin(persist_every=3)
    for step in range(1, 41 if thorough else 6):
        assert job.all("save", step=step, wait_for="replicated") == [None] * 3
        for rank in job.ranks:
            rank.tell("finalize")
        time.sleep(chance.uniform(0.0, 0.3))
        job.nodes[chance.randrange(3)].kill_keeper()
        assert [rank.answer() for rank in job.ranks] == [[step]] * 3
    job.kill()
    job.nodes[chance.randrange(3)].lose()
    job.hide_shared()
    job.begin()
    assert job.all("resume") == [f"step {step}, local"] * 3
