"""The sources by name. A module is imported when its source is asked for: some need further libraries."""

import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TypeAlias

from muster.watcher.connection import Connection
from muster.watcher.drain import Drain
from muster.watcher.polling import Polled
from muster.watcher.source import Source, SourceError


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """What sources are made with."""

    node_name: str
    """The name of this node as its scheduler knows it."""
    metadata_url: str = ""
    """Another metadata server than the cloud's own; empty: that one."""
    lead: float | None = None
    """Seconds before an event that a cloud announces at which it becomes a notice; None: the default."""
    interval: float | None = None
    """Seconds between two looks of a source that polls; None: the source's default."""
    slurm_nodes: str = ""
    """The nodes that ``scontrol`` is asked for, as Slurm writes them; empty: this node."""
    kubeconfig: str = ""
    """The way to the Kubernetes API; empty: the service account of the pod."""
    namespaces: Sequence[str] = ()
    """The namespaces with pods to watch."""
    pod_selector: str = ""
    """Label selector of the pods that have ranks; empty: all."""
    cordon: str = "save"
    """What a cordoned node means: ``save``, ``stop`` or ``ignore``."""
    taints: Sequence[str] = ()
    """Keys of further taints that say that a node is about to be lost."""
    annotate_by: Connection | None = None
    """If given, the last committed steps that this coordinator knows are annotations of their jobs."""
    respond_by: Drain | None = None
    """If given, evictions by the EvictionRequest API wait for the saves that this asks for."""


Opener: TypeAlias = Callable[[SourceOptions, AsyncExitStack], Awaitable[Source]]
"""Makes a source. It registers with the stack what must be closed at the end."""


def _cloud(name: str, class_name: str) -> Opener:
    """Return the opener of a class that has ``look()``, in a module that has its ``INTERVAL``."""

    async def open_source(options: SourceOptions, _: AsyncExitStack) -> Source:
        module = import_module(f"muster.watcher.sources.{name}")
        given = {"base": options.metadata_url or None, "lead": options.lead}
        given = {key: value for key, value in given.items() if value is not None}
        looks = getattr(module, class_name)(options.node_name, **given)
        return Polled(name, looks.look, options.interval or module.INTERVAL)

    return open_source


async def _slurm(options: SourceOptions, _: AsyncExitStack) -> Source:
    module = import_module("muster.watcher.sources.slurm")
    looks = module.Slurm(options.node_name, nodes=options.slurm_nodes)
    return Polled("slurm", looks.look, options.interval or module.INTERVAL)


async def _kubernetes(options: SourceOptions, stack: AsyncExitStack) -> Source:
    try:
        Path.home()
    except RuntimeError:
        # The user of a container may have no home, and the library asks for it when it is imported.
        os.environ["HOME"] = "/"
    module = import_module("muster.watcher.sources.kubernetes")
    source: Source = await module.open_source(options, stack)
    return source


SOURCES: dict[str, Opener] = {
    "kubernetes": _kubernetes,
    "aws": _cloud("aws", "Aws"),
    "google": _cloud("google", "Google"),
    "azure": _cloud("azure", "Azure"),
    "slurm": _slurm,
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
