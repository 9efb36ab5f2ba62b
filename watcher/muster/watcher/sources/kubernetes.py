"""Notices of Kubernetes: this node is cordoned, tainted or deleted, or a pod on it is to be disrupted."""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import cast

from muster.watcher.kubernetes.annotator import Annotator
from muster.watcher.kubernetes.api import ConfigurationError, connect
from muster.watcher.kubernetes.collection import Collection, Reads
from muster.watcher.kubernetes.evictions import API_VERSION, KubernetesEviction, active, read_eviction
from muster.watcher.kubernetes.notices import Cordon, Policy, deletion, notices_of
from muster.watcher.kubernetes.objects import Node, Pod, read_node, read_pod
from muster.watcher.kubernetes.responder import Responder
from muster.watcher.notice import Notice
from muster.watcher.source import Report, SourceError
from muster.watcher.sources.registry import SourceOptions


class Kubernetes:
    """Watches the object of this node, and the pods on it.

    Args:
        api: the API server.
        node_name: of this node.
        namespaces: their pods are watched; empty: pods are not watched.
        pod_selector: a label selector of the pods that have ranks; empty: all.
        policy: what counts as a notice.
        evictions: whether the evictions of these pods by the EvictionRequest API are watched.
    """

    name = "kubernetes"

    def __init__(
        self,
        api: Reads,
        node_name: str,
        namespaces: Sequence[str] = (),
        pod_selector: str = "",
        policy: Policy | None = None,
        *,
        evictions: bool = False,
    ) -> None:
        self._node_name = node_name
        self._policy = policy or Policy()
        self.annotator: Annotator | None = None
        """Annotates the objects of the runs; None: nothing does."""
        self.responder: Responder | None = None
        """Answers evictions; None: nothing does."""
        self._known = asyncio.Event()
        self._report: Report | None = None
        self._latest: Node | None = None
        """This node as it was seen last."""
        self._cordoned: dict[str, str] = {}
        """By uid: when a cordoned node was cordoned, as it was seen first. Another time would be another
        notice, and Kubernetes keeps that of the latest change of any field by the same manager."""
        by_name = {"fieldSelector": f"metadata.name={node_name}"}
        by_node = {"fieldSelector": f"spec.nodeName={node_name}"}
        if pod_selector:
            by_node["labelSelector"] = pod_selector
        self._nodes: Collection[Node] = Collection(api, "/api/v1/nodes", by_name, read_node, self._changed)
        self._pods: list[Collection[Pod]] = [
            Collection(api, f"/api/v1/namespaces/{namespace}/pods", by_node, read_pod, self._changed)
            for namespace in namespaces
        ]
        self._evictions: list[Collection[KubernetesEviction]] = [
            Collection(
                api,
                f"/apis/{API_VERSION}/namespaces/{namespace}/evictions",
                {},
                read_eviction,
                self._changed,
            )
            for namespace in (namespaces if evictions else ())
        ]
        self._collections: list[Collection[Node] | Collection[Pod]] = [self._nodes, *self._pods]

    async def watch(self, report: Report) -> None:
        """See ``Source``."""
        self._report = report
        async with asyncio.TaskGroup() as tasks:
            for collection in (*self._collections, *self._evictions):
                tasks.create_task(collection.follow())
            await self._known.wait()
            if self.annotator is not None:
                tasks.create_task(self.annotator.run())
            if self.responder is not None:
                tasks.create_task(self.responder.run())

    def pods(self) -> Iterable[Pod]:
        """Return the pods on this node, as far as they are known."""
        return (pod for collection in self._pods for pod in collection.objects.values())

    def active_evictions(self) -> Iterable[tuple[KubernetesEviction, Notice]]:
        """Return the evictions of pods on this node that wait for Muster, each with its notice."""
        evictions = (one for collection in self._evictions for one in collection.objects.values())
        return active(evictions, self.pods())

    def _changed(self) -> None:
        # With a part of the objects, notices would seem to be withdrawn.
        if self._report is None or not all(one.is_known for one in self._collections):
            return
        found = self._nodes.objects.values()
        self._cordoned = {
            one.uid: self._cordoned.get(one.uid) or one.cordoned_at for one in found if one.unschedulable
        }
        nodes = [replace(one, cordoned_at=self._cordoned.get(one.uid, "")) for one in found]
        notices = notices_of(nodes, self.pods(), self._policy)
        notices.extend(notice for _, notice in self.active_evictions())
        for node in nodes:
            self._latest = node
        if self._latest is None:
            raise SourceError(
                f"there is no node {self._node_name} in this cluster. Give --node the name that `kubectl get "
                "nodes` shows."
            )
        if not self._nodes.objects:
            notices.append(deletion(self._latest))
        self._known.set()
        self._report(notices)


async def open_source(options: SourceOptions, stack: AsyncExitStack) -> Kubernetes:
    """Connect to the API server, and make the source.

    Args:
        options: the namespaces, and what counts as a notice.
        stack: closes the connection.

    Raises:
        SourceError: there is no way to an API server.
    """
    try:
        api = await connect(options.kubeconfig)
    except ConfigurationError as error:
        raise SourceError(
            f"source kubernetes: {error}. Run the watcher in a pod with a service account, or name a file "
            "with --kubeconfig."
        ) from error
    stack.push_async_callback(api.close)
    policy = Policy(cordon=cast(Cordon, options.cordon), taints=options.taints)
    source = Kubernetes(
        api,
        options.node_name,
        options.namespaces,
        options.pod_selector,
        policy,
        evictions=options.respond_by is not None,
    )
    if options.respond_by is not None:
        source.responder = Responder(api, options.respond_by, source.active_evictions)
    if options.annotate_by is not None:
        source.annotator = Annotator(api, options.annotate_by, source.pods)
    return source
