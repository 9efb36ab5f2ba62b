"""``muster keep``: keep parts of local checkpoints on this node, of one run or of all runs there."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from muster.checkpoint.storage_options import STORAGE_OPTIONS, storage_options
from muster.client.addresses import is_socket
from muster.client.failure_domain import failure_domain as found_domain
from muster.client.node_name import node_name
from muster.keeper.settings import KeeperSettings, host_and_port
from muster.service.cli.client.credentials import connecting, given, usable_endpoint
from muster.service.cli.failure import Exit, fail

CONTEXT_SETTINGS = {"auto_envvar_prefix": "MUSTER_KEEP"}
"""``--listen`` is also ``MUSTER_KEEP_LISTEN``."""


@connecting
def keep(
    folder: Annotated[
        Path,
        typer.Option(metavar="FOLDER", help="The local folder, on a disk of this node or in tmpfs."),
    ],
    endpoint: Annotated[
        str,
        typer.Option(
            "--endpoint",
            "-e",
            callback=usable_endpoint,
            envvar=["MUSTER_KEEP_ENDPOINT", "MUSTER_ENDPOINT"],
            metavar="HOST:PORT[,HOST:PORT…]",
            help="The coordinator, all of its replicas, or a relay.",
        ),
    ],
    run_id: Annotated[
        str,
        typer.Option(
            envvar=["MUSTER_KEEP_RUN_ID", "MUSTER_RUN_ID"],
            metavar="RUN",
            help="The training job to keep for.",
        ),
    ] = "",
    runs: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Instead of --run-id: keep for all runs on this node that match one of these glob patterns, "
            "each in a process of its own.",
        ),
    ] = None,
    idle: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="With --runs: delete what is kept of a run when no rank of it has been on this node for so "
            "long; 0: never.",
        ),
    ] = 86_400.0,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where to serve other keepers; port 0: any.")
    ] = "0.0.0.0:0",
    listen_ranks: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help="Where to serve the ranks of this node, which must reach this host."
        ),
    ] = "127.0.0.1:0",
    advertise: Annotated[
        str,
        typer.Option(
            envvar=["MUSTER_KEEP_ADVERTISE", "MUSTER_NODE_ADDRESS"],
            metavar="HOST",
            help="The host that other keepers connect to.  [default: the one by which the coordinator is "
            "reached]",
            show_default=False,
        ),
    ] = "",
    failure_domain: Annotated[
        str,
        typer.Option(
            envvar=["MUSTER_KEEP_FAILURE_DOMAIN", "MUSTER_FAILURE_DOMAIN"],
            metavar="NAME",
            help="What fails together with this node, such as its rack.  [default: the switch that Slurm "
            "names]",
            show_default=False,
        ),
    ] = "",
    quota: Annotated[
        int,
        typer.Option(
            envvar=["MUSTER_KEEP_QUOTA", "MUSTER_LOCAL_QUOTA"],
            min=0,
            metavar="BYTES",
            help="What the folder may take; 0: nine tenths of the free space.",
        ),
    ] = 0,
    upload_rate: Annotated[
        int,
        typer.Option(
            envvar=["MUSTER_KEEP_UPLOAD_RATE", "MUSTER_UPLOAD_RATE"],
            min=0,
            metavar="BYTES",
            help="Bytes a second that it copies to shared storage; 0: without limit.",
        ),
    ] = 0,
    follow: Annotated[
        int, typer.Option(min=0, metavar="PID", help="End when this process has ended; 0: by a signal.")
    ] = 0,
) -> None:
    """Keep parts of a run's local checkpoints on this node, and serve them to the keepers of other nodes.

    It runs until SIGTERM or SIGINT. A Checkpointer with ``local=…`` starts one itself if none runs, unless
    ``MUSTER_KEEPER=node`` says that this command runs on the node with ``--runs``.
    """
    if bool(run_id) == bool(runs):
        fail("give either --run-id (MUSTER_RUN_ID) or --runs.", Exit.USAGE)
    try:
        credentials = given()
        if not all(map(is_socket, endpoint.split(","))):
            credentials.check()
        settings = KeeperSettings(
            folder=folder.absolute(),
            run_id=run_id,
            endpoint=endpoint,
            listen=host_and_port(listen),
            listen_ranks=host_and_port(listen_ranks),
            advertise=advertise,
            failure_domain=failure_domain or found_domain(),
            node_name=node_name(),
            quota=quota,
            upload_rate=upload_rate,
            storage_options=storage_options(os.environ.get(STORAGE_OPTIONS, "")),
            follow=follow,
            idle=idle if runs else 0,
            credentials=credentials,
        )
    except ValueError as error:
        fail(str(error), Exit.USAGE)
    failure = _keep(settings, runs or ())
    if failure is not None:
        fail(failure, Exit.FAILED)


def _keep(settings: KeeperSettings, patterns: Sequence[str]) -> str | None:
    """Keep until told to stop; return why that cannot be done."""
    # Imported here, so that the other sub-commands start without waiting for the server's libraries.
    if patterns:
        from muster.keeper.node.supervisor import run_node_until_stopped

        return run_node_until_stopped(settings, patterns)
    from muster.keeper.process import run_until_stopped

    return run_until_stopped(settings)
