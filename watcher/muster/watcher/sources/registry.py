"""The sources by name. A module is imported when its source is asked for: some need further libraries."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib import import_module
from typing import TypeAlias

from muster.watcher.polling import Polled
from muster.watcher.source import Source, SourceError


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """What sources are made with."""

    node_name: str
    """The name of this node as its scheduler knows it."""
    metadata_url: str = ""
    """Of the cloud's metadata server; empty: the cloud's own."""
    kubeconfig: str = ""
    """The way to the Kubernetes API; empty: the service account of the pod."""
    namespaces: Sequence[str] = ()
    """Whose pods are watched."""
    pod_selector: str = ""
    """Label selector of the pods that have ranks; empty: all."""
    cordon: str = "save"
    """What a cordoned node means: ``save``, ``stop`` or ``ignore``."""
    taints: Sequence[str] = ()
    """Keys of further taints that say that a node is about to be lost."""


Opener: TypeAlias = Callable[[SourceOptions, AsyncExitStack], Awaitable[Source]]
"""Makes a source. It registers with the stack what must be closed at the end."""


def _polled(name: str, class_name: str) -> Opener:
    """Return the opener of a class that has ``look()``, in a module that has its ``INTERVAL``."""

    async def open_source(options: SourceOptions, _: AsyncExitStack) -> Source:
        module = import_module(f"muster.watcher.sources.{name}")
        base = {"base": options.metadata_url} if options.metadata_url else {}
        looks = getattr(module, class_name)(options.node_name, **base)
        return Polled(name, looks.look, module.INTERVAL)

    return open_source


async def _kubernetes(options: SourceOptions, stack: AsyncExitStack) -> Source:
    module = import_module("muster.watcher.sources.kubernetes")
    source: Source = await module.open_source(options, stack)
    return source


SOURCES: dict[str, Opener] = {
    "kubernetes": _kubernetes,
    "aws": _polled("aws", "Aws"),
    "google": _polled("google", "Google"),
    "azure": _polled("azure", "Azure"),
    "slurm": _polled("slurm", "Slurm"),
}
"""By the name in ``muster watch --source NAME``."""


async def open_source(name: str, options: SourceOptions, stack: AsyncExitStack) -> Source:
    """Make a source.

    Args:
        name: a key of ``SOURCES``.
        options: what it is made with.
        stack: closes it at the end.

    Raises:
        SourceError: it cannot work here, such as for want of a library.
    """
    try:
        return await SOURCES[name](options, stack)
    except ModuleNotFoundError as error:
        raise SourceError(
            f"source {name} needs the Python module {error.name}, which is not installed. Install "
            "muster-coordinator[service,watch]."
        ) from error
