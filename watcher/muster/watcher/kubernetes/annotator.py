"""Writes the last committed step of a run to the object that owns its pods, so that schedulers can read it.

The watcher on the node of the pod with completion index 0 writes it. If pods have no index, several watchers
write the same.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from muster.v1 import run_pb2 as pb
from muster.watcher.connection import Connection, CoordinatorError
from muster.watcher.kubernetes.api import KubernetesError, Manifest
from muster.watcher.kubernetes.collection import understood
from muster.watcher.kubernetes.objects import Owner, Pod, owner_of
from muster.watcher.polling import Fault

STEP, COMMITTED_AT, RUN = "muster.io/committed-step", "muster.io/committed-at", "muster.io/run-id"
"""The annotations."""
INTERVAL = 60.0
"""Seconds between two writes of one object."""
PLURALS = {
    ("batch", "Job"): "jobs",
    ("jobset.x-k8s.io", "JobSet"): "jobsets",
    ("trainer.kubeflow.org", "TrainJob"): "trainjobs",
}
"""The kinds that are annotated, by their API group. Each may own one of the kind above it."""
MAX_OWNERS = 4
"""Owners of owners that are followed."""


class Writes(Protocol):
    """What the annotator needs of the API; see ``Api``."""

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> Manifest:
        """See ``Api.get``."""
        ...

    async def merge(self, path: str, patch: Manifest) -> Manifest:
        """See ``Api.merge``."""
        ...


@dataclass(frozen=True, slots=True)
class Committed:
    """The last checkpoint of a run."""

    run_id: str
    step: int | None
    at: str
    """As Kubernetes writes times."""


def writers(pods: Iterable[Pod]) -> dict[str, Pod]:
    """Return, for each run, the pod on this node on whose behalf its object is annotated."""
    return {
        pod.run_id: pod
        for pod in sorted(pods, key=lambda one: one.name, reverse=True)
        if pod.run_id and pod.owner and not pod.has_ended and pod.index in ("", "0")
    }


def committed_of(run: pb.Run) -> Committed | None:
    """Return the last checkpoint of a run; None if it has committed none."""
    if not run.checkpoints.HasField("newest"):
        return None
    newest = run.checkpoints.newest
    at = newest.committed_at.ToDatetime().strftime("%Y-%m-%dT%H:%M:%SZ")
    return Committed(run.run_id, newest.step if newest.HasField("step") else None, at)


def annotations_of(committed: Committed) -> dict[str, str | None]:
    """Return the annotations of a run's object; None removes one."""
    step = None if committed.step is None else str(committed.step)
    return {RUN: committed.run_id, STEP: step, COMMITTED_AT: committed.at}


def path_of(owner: Owner, namespace: str) -> str:
    """Return where an owner is in the API; empty if its kind is not annotated."""
    group, _, _ = owner.api_version.partition("/")
    plural = PLURALS.get((group, owner.kind))
    return f"/apis/{owner.api_version}/namespaces/{namespace}/{plural}/{owner.name}" if plural else ""


def is_current(manifest: Manifest, wanted: Mapping[str, str | None]) -> bool:
    """Return whether an object has these annotations already."""
    found = manifest["metadata"].get("annotations") or {}
    return all(found.get(name) == value for name, value in wanted.items())


class Annotator:
    """Annotates the objects of the runs on this node, once a minute.

    Args:
        api: the API server.
        connection: to the coordinator.
        pods: returns the pods on this node.
        pause: waits for so many seconds.
    """

    def __init__(
        self,
        api: Writes,
        connection: Connection,
        pods: Callable[[], Iterable[Pod]],
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._api = api
        self._connection = connection
        self._pods = pods
        self._pause = pause
        self._fault = Fault("annotations")
        self._written: dict[str, Committed] = {}
        """By run: what its object has."""

    async def run(self) -> None:
        """Annotate until cancelled."""
        while True:
            await self.once()
            await self._pause(INTERVAL)

    async def once(self) -> None:
        """Annotate the object of each run whose last checkpoint is another one than before."""
        pods = writers(self._pods())
        self._written = {run_id: one for run_id, one in self._written.items() if run_id in pods}
        failures = []
        for run_id, pod in pods.items():
            try:
                await self._annotate(run_id, pod)
            except (KubernetesError, CoordinatorError) as error:
                failures.append(f"{run_id}: {error}")
        if failures:
            self._fault.happened("; ".join(failures))
        else:
            self._fault.over()

    async def _annotate(self, run_id: str, pod: Pod) -> None:
        async def make(stub: Any, left: float, metadata: Any) -> pb.RunServiceGetResponse:  # noqa: ANN401
            request = pb.RunServiceGetRequest(run_id=run_id)
            response: pb.RunServiceGetResponse = await stub.Get(request, timeout=left, metadata=metadata)
            return response

        try:
            run = (await self._connection.call(make)).run
        except CoordinatorError as error:
            if error.reason == "RUN_NOT_FOUND":
                return  # Its processes have not come yet.
            raise
        committed = committed_of(run)
        if committed is None or committed == self._written.get(run_id):
            return
        with understood(f"the owners of pod {pod.namespace}/{pod.name}"):
            path, found = await self._top(pod)
            wanted = annotations_of(committed)
            is_written = not path or is_current(found, wanted)
        if not is_written:
            await self._api.merge(path, {"metadata": {"annotations": wanted}})
        self._written[run_id] = committed

    async def _top(self, pod: Pod) -> tuple[str, Manifest]:
        """Return the path of the outermost object that owns a pod, and the object; empty without an owner."""
        path, owner = "", pod.owner
        found: Manifest = {}
        for _ in range(MAX_OWNERS):
            above = path_of(owner, pod.namespace) if owner else ""
            if not above:
                break
            path, found = above, await self._api.get(above)
            owner = owner_of(found["metadata"])
        return path, found
