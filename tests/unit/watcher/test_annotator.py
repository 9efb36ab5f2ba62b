"""Annotations against an API server and a coordinator that are objects of the test."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

import pytest

from lab.watching.kubernetes_api import merge, pod
from muster.v1 import run_pb2 as pb
from muster.watcher.connection import Connection, CoordinatorError
from muster.watcher.kubernetes.annotator import INTERVAL, Annotator
from muster.watcher.kubernetes.api import KubernetesError
from muster.watcher.kubernetes.objects import Pod, read_pod

JOB, JOBSET, TRAINJOB = (
    "/apis/batch/v1/namespaces/team-a/jobs/train",
    "/apis/jobset.x-k8s.io/v1alpha2/namespaces/team-a/jobsets/train",
    "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team-a/trainjobs/train",
)


def owned_by(api_version: str, kind: str, name: str = "train") -> dict[str, Any]:
    owner = {"apiVersion": api_version, "kind": kind, "name": name, "controller": True}
    return {"ownerReferences": [owner]}


BY_JOB = owned_by("batch/v1", "Job")


def worker(index: str = "0", run_id: str = "job1", owner: dict[str, Any] | None = None, **more: Any) -> Pod:
    labels = {"muster.io/run-id": run_id, "batch.kubernetes.io/job-completion-index": index}
    name = f"worker-{index}"
    return read_pod(pod(name, metadata={"labels": labels, **(owner or BY_JOB)}, **more))


class Server:
    """The objects at their paths, and what was written."""

    def __init__(self, **objects: dict[str, Any]) -> None:
        self.objects = {path: {"metadata": metadata} for path, metadata in objects.items()}
        self.patched: list[str] = []

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> dict[str, Any]:
        if path not in self.objects:
            raise KubernetesError(f"{path} is forbidden", 403)
        return self.objects[path]

    async def merge(self, path: str, patch: dict[str, Any]) -> dict[str, Any]:
        self.patched.append(path)
        merge(self.objects[path], patch)
        return self.objects[path]

    def annotations(self, path: str) -> dict[str, str]:
        found: dict[str, str] = self.objects[path]["metadata"].get("annotations", {})
        return found


class Coordinator:
    """Knows runs."""

    def __init__(self, *runs: pb.Run) -> None:
        self.runs = {run.run_id: run for run in runs}
        self.asked: list[str] = []

    async def call(self, make: Callable[[Any, float, Any], Awaitable[Any]]) -> Any:
        return await make(self, 1.0, ())

    async def Get(  # noqa: N802 (a stub's name)
        self, request: pb.RunServiceGetRequest, **_: Any
    ) -> pb.RunServiceGetResponse:
        self.asked.append(request.run_id)
        if request.run_id not in self.runs:
            raise CoordinatorError(f"there is no run {request.run_id}", "RUN_NOT_FOUND")
        return pb.RunServiceGetResponse(run=self.runs[request.run_id])


def run(step: int | None = 41_200, run_id: str = "job1") -> pb.Run:
    newest = pb.Checkpoint(step=step)
    newest.committed_at.FromJsonString("2026-11-25T10:00:00.5Z")
    return pb.Run(run_id=run_id, checkpoints=pb.Checkpoints(newest=newest))


def annotator(server: Server, coordinator: Coordinator, *pods: Pod) -> Annotator:
    return Annotator(server, cast(Connection, coordinator), lambda: pods)


WRITTEN = {
    "muster.io/run-id": "job1",
    "muster.io/committed-step": "41200",
    "muster.io/committed-at": "2026-11-25T10:00:00Z",
}


async def test_job_has_the_last_committed_step():
    server = Server(**{JOB: {"annotations": {"theirs": "stays"}}})
    await annotator(server, Coordinator(run()), worker()).once()
    assert server.annotations(JOB) == {"theirs": "stays", **WRITTEN}


async def test_outermost_owner_is_annotated():
    by_jobset = owned_by("jobset.x-k8s.io/v1alpha2", "JobSet")
    by_trainjob = owned_by("trainer.kubeflow.org/v1alpha1", "TrainJob")
    server = Server(**{JOB: by_jobset, JOBSET: by_trainjob, TRAINJOB: {}})
    await annotator(server, Coordinator(run()), worker()).once()
    assert server.patched == [TRAINJOB]
    assert server.annotations(TRAINJOB) == WRITTEN


async def test_owner_of_another_kind_is_left_alone():
    server = Server(**{JOB: owned_by("example.org/v1", "Workflow")})
    await annotator(server, Coordinator(run()), worker()).once()
    assert server.patched == [JOB]


@pytest.mark.parametrize(
    "one",
    [
        pytest.param(worker(index="1"), id="another index"),
        pytest.param(worker(run_id=""), id="an unknown run"),
        pytest.param(worker(status={"phase": "Succeeded"}), id="it has ended"),
        pytest.param(read_pod(pod("a", metadata={"labels": {"muster.io/run-id": "job1"}})), id="no owner"),
    ],
)
async def test_pod_that_is_not_the_first_writes_nothing(one: Pod):
    server, coordinator = Server(**{JOB: {}}), Coordinator(run())
    await annotator(server, coordinator, one).once()
    assert (server.patched, coordinator.asked) == ([], [])


async def test_pod_without_an_index_writes():
    labels = {"muster.io/run-id": "job1"}
    server = Server(**{JOB: {}})
    one = read_pod(pod("worker-0", metadata={"labels": labels, **BY_JOB}))
    await annotator(server, Coordinator(run()), one).once()
    assert server.annotations(JOB) == WRITTEN


async def test_same_step_is_not_written_again():
    server, coordinator = Server(**{JOB: {}}), Coordinator(run())
    mine, theirs = (annotator(server, coordinator, worker()) for _ in range(2))
    await mine.once()
    await mine.once()
    await theirs.once()
    assert server.patched == [JOB]
    coordinator.runs["job1"] = run(step=42_000)
    await mine.once()
    assert server.annotations(JOB)["muster.io/committed-step"] == "42000"


async def test_checkpoint_without_a_step_has_its_time_alone():
    server = Server(**{JOB: {"annotations": {"muster.io/committed-step": "7"}}})
    await annotator(server, Coordinator(run(step=None)), worker()).once()
    assert server.annotations(JOB).keys() == {"muster.io/run-id", "muster.io/committed-at"}


@pytest.mark.parametrize("known", [[], [pb.Run(run_id="job1")]])
async def test_run_that_has_committed_nothing_writes_nothing(
    known: list[pb.Run], caplog: pytest.LogCaptureFixture
):
    server = Server(**{JOB: {}})
    await annotator(server, Coordinator(*known), worker()).once()
    assert server.patched == []
    assert not caplog.records


async def test_failure_is_logged_once_and_tried_again(caplog: pytest.LogCaptureFixture):
    server, coordinator = Server(), Coordinator(run(), run(run_id="job2"))
    other = worker(run_id="job2", owner=owned_by("batch/v1", "Job", "other"))
    mine = annotator(server, coordinator, worker(), other)
    server.objects[JOB.replace("train", "other")] = {"metadata": {}}
    await mine.once()
    await mine.once()
    (record,) = caplog.records
    assert "jobs/train is forbidden" in record.getMessage()
    assert server.patched == [JOB.replace("train", "other")], "one failure is not another run's"
    server.objects[JOB] = {"metadata": {}}
    await mine.once()
    assert server.annotations(JOB) == WRITTEN


async def test_objects_are_written_at_most_once_a_minute():
    class Ended(Exception):
        pass

    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise Ended

    server = Server(**{JOB: {}})
    mine = Annotator(server, cast(Connection, Coordinator(run())), lambda: [worker()], pause)
    with pytest.raises(Ended):
        await mine.run()
    assert pauses == [INTERVAL] * 3


async def test_answer_of_another_shape_is_a_failure(caplog: pytest.LogCaptureFixture):
    server = Server(**{JOB: {}})
    server.objects[JOB] = {"kind": {}}
    await annotator(server, Coordinator(run()), worker()).once()
    assert "unknown shape" in caplog.text
