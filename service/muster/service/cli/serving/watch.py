"""``muster watch``: ask the runs on this node to save when it is about to be lost."""

import asyncio
import enum
from pathlib import Path
from typing import Annotated

import typer

from muster.client.addresses import is_socket
from muster.client.credentials import Credentials
from muster.client.errors import EnvironmentValueError
from muster.client.node_name import node_name
from muster.service.address import Address
from muster.service.cli.client.credentials import connecting, given, usable_endpoint
from muster.service.cli.failure import Exit, fail

CONTEXT_SETTINGS = {"auto_envvar_prefix": "MUSTER_WATCH"}
"""``--http`` is also ``MUSTER_WATCH_HTTP``."""


class SourceName(enum.StrEnum):
    """Where notices come from."""

    KUBERNETES = "kubernetes"
    AWS = "aws"
    GOOGLE = "google"
    AZURE = "azure"
    SLURM = "slurm"


class Cordon(enum.StrEnum):
    """What the runs on a cordoned node do."""

    SAVE = "save"
    STOP = "stop"
    IGNORE = "ignore"


def _credentials(endpoint: str) -> Credentials:
    """Return the credentials of this command, unless only sockets are called.

    Raises:
        EnvironmentValueError: they cannot be used.
    """
    mine = given()
    if not all(map(is_socket, endpoint.split(","))):
        mine.check()
    return mine


def _node_name(value: str) -> str:
    try:
        return value or node_name()
    except EnvironmentValueError as error:
        raise typer.BadParameter(str(error)) from error


@connecting
def watch(
    source: Annotated[
        list[SourceName],
        typer.Option(help="Where notices come from. Repeat it for several sources.", show_default=False),
    ],
    endpoint: Annotated[
        str,
        typer.Option(
            "--endpoint",
            "-e",
            callback=usable_endpoint,
            envvar=["MUSTER_WATCH_ENDPOINT", "MUSTER_ENDPOINT"],
            metavar="HOST:PORT[,HOST:PORT…]",
            help="The coordinator, or all of its replicas.",
        ),
    ],
    node: Annotated[
        str,
        typer.Option(
            callback=_node_name,
            envvar=["MUSTER_WATCH_NODE", "MUSTER_NODE_NAME"],
            metavar="NAME",
            help="This node, as its scheduler knows it.  [default: SLURMD_NODENAME, else the host's name]",
            show_default=False,
        ),
    ] = "",
    http: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help="Where to serve /metrics, /healthz and /readyz; empty: nowhere."
        ),
    ] = "",
    namespace: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="kubernetes: also watch the pods of this namespace. Repeat it for several.",
            show_default=False,
        ),
    ] = None,
    pod_selector: Annotated[
        str,
        typer.Option(metavar="LABELS", help="kubernetes: only pods with these labels, such as app=train."),
    ] = "",
    cordon: Annotated[
        Cordon,
        typer.Option(
            help="kubernetes: what the runs on a cordoned node do: save, save and stop, or nothing."
        ),
    ] = Cordon.SAVE,
    taint: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help="kubernetes: another taint of nodes that are about to be lost. Repeat it for several.",
            show_default=False,
        ),
    ] = None,
    annotate: Annotated[
        bool,
        typer.Option(
            "--annotate",
            help="kubernetes: write the last committed step to the Job, JobSet or TrainJob of each pod.",
        ),
    ] = False,
    evictions: Annotated[
        bool,
        typer.Option(
            "--evictions",
            help="kubernetes: answer EvictionRequests as muster.io/saver: a pod goes after the save.",
        ),
    ] = False,
    kubeconfig: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="kubernetes: the kubeconfig file. Default: the pod's service account."
        ),
    ] = None,
    metadata_url: Annotated[
        str,
        typer.Option(metavar="URL", help="aws, google, azure: a metadata server other than the cloud's own."),
    ] = "",
    lead: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="aws, google, azure: how long before an announced event the runs save. Default: 900.",
        ),
    ] = None,
    interval: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            metavar="SECONDS",
            help="aws, google, azure, slurm: time between two polls. Default: 5, 2, 2 and 30.",
        ),
    ] = None,
    slurm_nodes: Annotated[
        str,
        typer.Option(
            metavar="NODES",
            help="slurm: the nodes to watch, such as n[1-4] or $SLURM_JOB_NODELIST. Default: this node.",
        ),
    ] = "",
) -> None:
    """Ask the runs on this node to save when the node is about to be lost.

    It runs until SIGTERM or SIGINT. Its token needs the role watcher. Name the coordinator, not a relay: a
    relay that asks for tokens refuses its requests.
    """
    # Imported here, so that the other sub-commands start without waiting for the server's libraries.
    import uvloop

    from muster.service.app import StartError
    from muster.service.app.watcher import WatcherSettings, run_watcher
    from muster.service.telemetry import logs
    from muster.watcher.sources.registry import SourceOptions

    try:
        settings = WatcherSettings(
            endpoint=endpoint,
            sources=list(dict.fromkeys(one.value for one in source)),
            http=Address.parse(http) if http else None,
            credentials=_credentials(endpoint),
            annotate=annotate,
            evictions=evictions,
            options=SourceOptions(
                node_name=node,
                metadata_url=metadata_url,
                lead=lead,
                interval=interval,
                slurm_nodes=slurm_nodes,
                kubeconfig=str(kubeconfig or ""),
                namespaces=list(dict.fromkeys(namespace or ())),
                pod_selector=pod_selector,
                cordon=cordon.value,
                taints=tuple(taint or ()),
            ),
        )
    except ValueError as error:
        fail(str(error), Exit.USAGE)
    for option, is_given in (("--annotate", annotate), ("--evictions", evictions)):
        if is_given and "kubernetes" not in settings.sources:
            fail(f"{option} needs --source kubernetes.", Exit.USAGE)
        if is_given and not namespace:
            fail(f"{option} needs the namespaces of the jobs: give --namespace.", Exit.USAGE)
    logs.configure("console")
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run_watcher(settings))
    except StartError as error:
        fail(str(error), Exit.FAILED)
