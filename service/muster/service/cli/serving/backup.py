"""``muster backup`` and ``muster restore``: copies of a state, in SQLite or in etcd."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muster.service.cli import options
from muster.service.cli.failure import Exit, fail
from muster.service.cli.options import Output
from muster.service.cli.serving import etcd
from muster.service.cli.views.table import counted, document, emit
from muster.service.etcd.location import SCHEME
from muster.service.storage.engine import StorageError

if TYPE_CHECKING:
    from muster.service.storage.backup import Copy

File = Annotated[Path, typer.Argument(metavar="FILE", help="The backup.", show_default=False)]
State = Annotated[
    str,
    typer.Option(
        envvar=["MUSTER_STATE", "MUSTER_SERVE_STATE"],
        metavar="sqlite:///PATH|etcd://HOST:PORT/PREFIX",
        help="The state, as muster serve takes it.",
    ),
]
DEFAULT_STATE = "sqlite:///muster.db"


def backup(
    file: File,
    state: State = DEFAULT_STATE,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    etcd_ca: etcd.Ca = None,
    etcd_cert: etcd.Cert = None,
    etcd_key: etcd.Key = None,
    etcd_user: etcd.User = "",
    etcd_password_file: etcd.PasswordFile = None,
    output: options.Format = Output.TABLE,
) -> None:
    """Copy a coordinator's state to a file while the coordinator runs.

    The copy is checked from its first page to its last. The file appears complete, or not at all.
    """
    # Imported here, so that the other sub-commands start without waiting for SQLite.
    from muster.service.storage.backup import backup as copy
    from muster.service.storage.moving import backup_from

    if not state.startswith(SCHEME):
        path = _path(state)
        done = _copied(lambda: copy(path, file, force=force))
        _say(f"{path} was backed up to {file}", done, output)
        return
    access = (etcd_ca, etcd_cert, etcd_key, etcd_user, etcd_password_file)
    with etcd.client(state, *access) as (client, location):
        done = _copied(lambda: backup_from(client, location, file, force=force))
    _say(f"{location} was backed up to {file}", done, output)


def restore(
    file: File,
    state: State = DEFAULT_STATE,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing state.")] = False,
    etcd_ca: etcd.Ca = None,
    etcd_cert: etcd.Cert = None,
    etcd_key: etcd.Key = None,
    etcd_user: etcd.User = "",
    etcd_password_file: etcd.PasswordFile = None,
    output: options.Format = Output.TABLE,
) -> None:
    """Replace a coordinator's state by a backup. First stop the coordinator, or all replicas.

    Decisions since the backup are lost: restart each job that continues, as a new generation.
    """
    from muster.service.storage.backup import restore as put_back
    from muster.service.storage.moving import restore_into

    if not state.startswith(SCHEME):
        path = _path(state)
        done = _copied(lambda: put_back(file, path, force=force))
        _say(f"{path} was restored from {file}", done, output)
        return
    access = (etcd_ca, etcd_cert, etcd_key, etcd_user, etcd_password_file)
    with etcd.client(state, *access) as (client, location):
        done = _copied(lambda: restore_into(client, location, file, force=force))
    _say(f"{location} was restored from {file}", done, output)


def _path(state: str) -> Path:
    from muster.service.storage.location import sqlite_path

    path = sqlite_path(state)
    if path is None:
        fail(
            f'--state "{state}" is neither a SQLite file, such as sqlite:///muster.db, nor in etcd',
            Exit.USAGE,
        )
    return path


def _copied(copy: Callable[[], "Copy"]) -> "Copy":
    try:
        return copy()
    except StorageError as error:
        fail(str(error), Exit.FAILED)


def _say(what: str, done: "Copy", output: Output) -> None:
    if output is Output.JSON:
        emit(document({"runs": done.runs, "bytes": done.bytes, "epoch": done.epoch}))
    else:
        emit(f"{what}: {counted(done.runs, 'run', 'runs')}, {done.bytes:,} bytes, epoch {done.epoch}")
