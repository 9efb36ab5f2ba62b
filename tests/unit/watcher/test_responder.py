"""Evictions by the EvictionRequest API. API server and coordinator are objects of the test."""

from collections.abc import Sequence
from typing import Any

import pytest

from lab.watching.kubernetes_api import eviction, pod
from muster.v1 import run_pb2 as pb
from muster.watcher.connection import CoordinatorError
from muster.watcher.kubernetes.api import KubernetesError
from muster.watcher.kubernetes.evictions import RESPONDER, active, progress_of, read_eviction
from muster.watcher.kubernetes.objects import read_pod
from muster.watcher.kubernetes.responder import (
    FINAL_AFTER,
    HEARTBEAT_INTERVAL,
    MAX_WAIT,
    MIN_HEARTBEAT_INTERVAL,
    POLL_INTERVAL,
    Responder,
)
from muster.watcher.notice import Notice

BY_RUN = {"labels": {"muster.io/run-id": "job1"}}
WORKER = read_pod(pod("worker-0", metadata=BY_RUN))


def drained(state: pb.SaveState.ValueType, step: int = 0, run_id: str = "job1") -> pb.DrainedRun:
    return pb.DrainedRun(run_id=run_id, save=pb.Save(number=1, state=state, step=step))


class World:
    """The API server, the coordinator and the time."""

    def __init__(self, *evictions: dict[str, Any]) -> None:
        self.evictions = [read_eviction(one) for one in evictions or [eviction("worker-0", RESPONDER)]]
        self.runs: list[pb.DrainedRun] | CoordinatorError = [drained(pb.SAVE_STATE_ASKED)]
        self.refuses = False
        self.asked: list[Notice] = []
        self.entries: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.now = 1000.0
        self.responder = Responder(
            self,
            self._drain,
            lambda: active(self.evictions, [WORKER]),
            clock=lambda: self.now,
            wall_clock=lambda: self.now,
        )

    async def _drain(self, notice: Notice) -> Sequence[pb.DrainedRun]:
        self.asked.append(notice)
        if isinstance(self.runs, CoordinatorError):
            raise self.runs
        return self.runs

    async def apply(self, path: str, manifest: dict[str, Any], manager: str) -> dict[str, Any]:
        if self.refuses:
            raise KubernetesError("it is away")
        self.paths.append(path)
        (entry,) = manifest["status"]["responders"]
        assert entry.pop("name") == RESPONDER
        self.entries.append(entry)
        return manifest

    async def after(self, seconds: float) -> list[dict[str, str]]:
        """Look again after a time; return what was answered."""
        self.now += seconds
        before = len(self.entries)
        await self.responder.once()
        return self.entries[before:]


async def test_run_of_the_pod_is_asked_and_kubernetes_is_told():
    world = World()
    assert await world.after(0) == [
        {"heartbeatTime": "1970-01-01T00:16:40Z", "message": "run job1: its ranks agree on a step"}
    ]
    assert world.paths == [
        "/apis/lifecycle.k8s.io/v1alpha1/namespaces/team-a/evictions/evict-worker-0/status"
    ]
    (notice,) = world.asked
    assert notice == Notice(
        id="kubernetes/eviction/uid-of-evict-worker-0",
        reason="pod team-a/worker-0: its eviction is requested by example.org/maintenance",
        stop=True,
        run_id="job1",
    )


async def test_kubernetes_may_evict_the_pod_some_time_after_the_save():
    """Its ranks need time to end. A pod that has ended needs no eviction."""
    world = World()
    await world.after(0)
    world.runs = [drained(pb.SAVE_STATE_DONE, step=42)]
    assert await world.after(POLL_INTERVAL) == []
    world.runs = []  # The ranks have left the node.
    assert "completionTime" not in str(await world.after(FINAL_AFTER - 1))
    (entry,) = await world.after(1)
    assert entry["completionTime"] == entry["heartbeatTime"] == "1970-01-01T00:17:15Z"
    assert entry["message"] == "the coordinator knows of no rank on the node"


async def test_rank_that_reconnects_is_waited_for():
    world = World()
    await world.after(0)
    world.runs = []
    await world.after(FINAL_AFTER - 1)
    world.runs = [drained(pb.SAVE_STATE_ASKED)]
    await world.after(1)
    world.runs = [drained(pb.SAVE_STATE_DONE)]
    assert "completionTime" not in str(await world.after(POLL_INTERVAL))
    assert "completionTime" in str(await world.after(FINAL_AFTER))


async def test_ranks_that_never_save_are_not_waited_for_for_ever():
    world = World()
    await world.after(0)
    assert "completionTime" not in str(await world.after(MAX_WAIT - 1))
    (entry,) = await world.after(1)
    assert "completionTime" in entry
    assert entry["message"] == "not saved within 1800 s: run job1: its ranks agree on a step"


async def test_completion_is_reported_once():
    """The watch may be behind."""
    world = World()
    world.runs = [drained(pb.SAVE_STATE_DONE)]
    await world.after(0)
    assert "completionTime" in str(await world.after(FINAL_AFTER))
    world.runs = [drained(pb.SAVE_STATE_ASKED)]
    assert await world.after(HEARTBEAT_INTERVAL) == []


async def test_unchanged_progress_is_reported_at_times():
    world = World()
    await world.after(0)
    assert await world.after(HEARTBEAT_INTERVAL - 1) == []
    assert len(await world.after(1)) == 1


async def test_changed_progress_is_reported_sooner():
    world = World()
    await world.after(0)
    world.runs = [drained(pb.SAVE_STATE_AGREED, step=7)]
    assert await world.after(MIN_HEARTBEAT_INTERVAL - 1) == []
    (entry,) = await world.after(1)
    assert entry["message"] == "run job1: its ranks save at step 7"


async def test_no_heartbeat_is_sent_without_the_coordinator():
    """Else a drain of the node would wait for a coordinator that is away."""
    world = World()
    await world.after(0)
    world.runs = CoordinatorError("it does not answer")
    assert await world.after(HEARTBEAT_INTERVAL) == []
    assert await world.after(HEARTBEAT_INTERVAL) == []
    world.runs = [drained(pb.SAVE_STATE_ASKED)]
    assert len(await world.after(POLL_INTERVAL)) == 1


async def test_report_that_failed_is_repeated():
    world = World()
    world.refuses = True
    assert await world.after(0) == []
    world.refuses = False
    assert len(await world.after(POLL_INTERVAL)) == 1


async def test_failure_of_one_eviction_does_not_delay_the_others():
    other = eviction("worker-0", RESPONDER)
    other["metadata"] |= {"uid": "uid-of-another", "name": "another"}
    world = World(eviction("worker-0", RESPONDER), other)
    refused = []

    async def apply(path: str, manifest: dict[str, Any], manager: str) -> dict[str, Any]:
        if "evict-worker-0" in path:
            refused.append(path)
            raise KubernetesError("evict-worker-0 is another object by now", 409)
        return await World.apply(world, path, manifest, manager)

    world.apply = apply  # type: ignore[method-assign]
    assert len(await world.after(0)) == 1
    assert len(refused) == 1


def completed(one: dict[str, Any]) -> dict[str, Any]:
    one["status"]["responders"][0]["completionTime"] = "2026-11-28T10:00:00Z"
    return one


@pytest.mark.parametrize(
    "one",
    [
        *(eviction("worker-0", RESPONDER, state) for state in ("Inactive", "Interrupted", "Canceled")),
        eviction("worker-0", RESPONDER, "Completed"),
        completed(eviction("worker-0", RESPONDER)),
        eviction("worker-0", "example.org/other"),
        eviction("worker-1", RESPONDER),
        {"metadata": {"name": "new", "uid": "1"}, "spec": {"target": {"pod": {"name": "worker-0"}}}},
        {"metadata": {"name": "of no pod", "uid": "1"}, "spec": {}},
    ],
)
def test_eviction_that_does_not_wait_for_muster_is_ignored(one: dict[str, Any]):
    assert list(active([read_eviction(one)], [WORKER])) == []


def test_pod_that_has_ended_has_nothing_to_save():
    ended = read_pod(pod("worker-0", status={"phase": "Failed"}))
    assert list(active([read_eviction(eviction("worker-0", RESPONDER))], [ended])) == []


def test_requester_that_withdrew_is_not_named():
    one = eviction("worker-0", RESPONDER)
    one["status"]["requesters"].append({"name": "example.org/other", "intent": "Withdrawn"})
    assert read_eviction(one).requesters == ("example.org/maintenance",)


def test_all_runs_of_a_node_must_have_saved():
    """A pod whose run is unknown stands for all runs on its node."""
    first, second = drained(pb.SAVE_STATE_DONE, step=3), drained(pb.SAVE_STATE_AGREED, 5, "job2")
    assert not progress_of([first, second]).is_final
    assert progress_of([first, second]).message == (
        "run job1: its ranks saved at step 3; run job2: its ranks save at step 5"
    )


@pytest.mark.parametrize("state", [pb.SAVE_STATE_WITHDRAWN, pb.SAVE_STATE_LAPSED])
def test_save_that_will_not_come_is_final(state: pb.SaveState.ValueType):
    save = pb.Save(number=1, state=state)
    assert progress_of([pb.DrainedRun(run_id="job1", save=save)]).is_final


def test_save_that_was_withdrawn_after_the_agreement_is_waited_for():
    assert not progress_of([drained(pb.SAVE_STATE_WITHDRAWN, step=7)]).is_final


def test_unknown_state_of_a_newer_coordinator_is_waited_for():
    progress = progress_of([drained(pb.SAVE_STATE_UNSPECIFIED)])
    assert (progress.message, progress.is_final) == ("run job1: asked to save", False)


def test_message_is_no_longer_than_kubernetes_accepts():
    many = [drained(pb.SAVE_STATE_ASKED, run_id=f"job{number}") for number in range(200)]
    assert len(progress_of(many).message) == 4000
