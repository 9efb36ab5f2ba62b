"""``python -m muster.keeper``: keep parts of local checkpoints on this node."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from muster.checkpoint.storage_options import STORAGE_OPTIONS, storage_options
from muster.client.addresses import checked
from muster.client.credentials import Credentials, check_credentials
from muster.client.errors import EnvironmentValueError
from muster.client.failure_domain import failure_domain
from muster.client.node_name import node_name
from muster.keeper.settings import (
    LOCAL_QUOTA,
    NODE_ADDRESS,
    UNUSED,
    UPLOAD_RATE,
    KeeperSettings,
    host_and_port,
)

FAILED, USAGE = 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        Its exit code.
    """
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        settings = _settings(given)
    except ValueError as error:
        parser.error(str(error))
    # The parser answers --help and wrong usage without the server's libraries.
    from muster.keeper.process import UnusedError, run_until_stopped

    try:
        failure = run_until_stopped(settings)
    except UnusedError:
        return UNUSED
    if failure is not None:
        print(f"Error: {failure}", file=sys.stderr)
        return FAILED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="muster.keeper", description=__doc__)
    parser.add_argument("--folder", required=True, type=Path, help="the local folder, on a disk or tmpfs")
    parser.add_argument("--run-id", required=True, help="the training job")
    parser.add_argument(
        "--endpoint",
        default=os.environ.get("MUSTER_ENDPOINT", ""),
        metavar="HOST:PORT[,HOST:PORT…]",
        help="the coordinator, all of its replicas, or a relay; default: MUSTER_ENDPOINT",
    )
    parser.add_argument(
        "--listen", default="0.0.0.0:0", metavar="HOST:PORT", help="where to serve other keepers"
    )
    parser.add_argument(
        "--listen-ranks",
        default="127.0.0.1:0",
        metavar="HOST:PORT",
        help="where to serve the ranks of this node, which must reach this host",
    )
    parser.add_argument(
        "--advertise",
        default=os.environ.get(NODE_ADDRESS, ""),
        metavar="HOST",
        help=f"the host that other keepers connect to; default: {NODE_ADDRESS}, else the address by which "
        "the coordinator is reached",
    )
    parser.add_argument(
        "--failure-domain",
        default=failure_domain(),
        metavar="NAME",
        help="what fails together with this node, such as a rack; default: MUSTER_FAILURE_DOMAIN, else "
        "Slurm's switch",
    )
    parser.add_argument(
        "--quota",
        default=os.environ.get(LOCAL_QUOTA, "0"),
        metavar="BYTES",
        help=f"what the folder may take; default: {LOCAL_QUOTA}, else most of the free space",
    )
    parser.add_argument(
        "--upload-rate",
        default=os.environ.get(UPLOAD_RATE, "0"),
        metavar="BYTES_PER_S",
        help=f"how fast it copies to shared storage; default: {UPLOAD_RATE}, else without limit",
    )
    parser.add_argument(
        "--follow", default=0, type=int, metavar="PID", help="end when this process has ended"
    )
    parser.add_argument(
        "--idle",
        default=0.0,
        type=float,
        metavar="SECONDS",
        help=f"end with exit status {UNUSED} when no rank has used it for so long; 0: never",
    )
    return parser


def _settings(given: argparse.Namespace) -> KeeperSettings:
    """Return the settings that arguments name.

    Raises:
        ValueError: one cannot be used.
    """
    if not given.endpoint:
        raise EnvironmentValueError(
            'no coordinator is named: pass --endpoint="host:port" or set MUSTER_ENDPOINT.'
        )
    endpoint = checked(given.endpoint)
    check_credentials(endpoint)
    return KeeperSettings(
        folder=given.folder.absolute(),
        run_id=given.run_id,
        endpoint=endpoint,
        listen=host_and_port(given.listen),
        listen_ranks=host_and_port(given.listen_ranks),
        advertise=given.advertise,
        failure_domain=given.failure_domain,
        node_name=node_name(),
        quota=_bytes("--quota", given.quota),
        upload_rate=_bytes("--upload-rate", given.upload_rate),
        storage_options=storage_options(os.environ.get(STORAGE_OPTIONS, "")),
        follow=given.follow,
        idle=given.idle,
        credentials=Credentials.of(),
    )


def _bytes(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise ValueError(f"{name} = {text!r}: it is a whole number of bytes, such as {64 << 30}.")
    return int(text)


if __name__ == "__main__":
    code = main()
    # Threads may wait for a network or a disk for long. What they write is verified before it is used.
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)
